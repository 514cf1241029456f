"""What the tests of the dense Triton kernels share: masks as bounds, and the definition of attention over them."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.core.state import State
from attnmesh.ops.dense.triton_tiles import LOG2_E, PLAIN, EvenPositions, ScoreTerms
from helpers.cases import else_sweep

CUDA = torch.cuda.is_available()
# The interpreter's bf16 dot is wrong, and each of its tiles takes milliseconds: small tiles, small shapes.
DTYPES = [torch.float16, torch.float32] + [torch.bfloat16] * CUDA
HEADS = {"mha": (2, 2), "gqa": (8, 2), "mqa": (3, 1)}
MASKS = ["full", "causal", "window", "documents", "random", "union", "slices", "sequences"]


def _has_its_own_tiles(mask: str, widths: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether no other case has its kernel: tiles follow from the widths and from whether it is float32."""
    if dtype == torch.float16:  # the tiles of bf16
        return (mask, widths) in (("causal", (128, 128)), ("union", (64, 64)))
    if widths == (128, 128) and dtype == torch.bfloat16:
        return True
    if widths == (576, 512):  # the widest, with the smallest tiles
        return mask in ("causal", "union")
    if dtype == torch.float32:
        return mask == "union" or (mask, widths) == ("causal", (128, 128))
    return mask == "causal" or (mask, widths) == ("union", (192, 128))


DEFAULT_TILES = else_sweep(
    product(
        ["full", "causal", "random", "union", "sequences"],
        [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512)],
        DTYPES,
    ),
    _has_its_own_tiles,
)
"""Masks, widths and dtypes of launches with the tiles that the library picks."""
DEFAULT_TILES_WITH_TERMS = else_sweep(
    [(*terms, dtype) for terms in ((True, False), (False, True), (True, True)) for dtype in DTYPES],
    lambda softcap, alibi, dtype: dtype == torch.bfloat16 or (softcap and alibi),
)
"""Softcap, ALiBi and a dtype."""


def make_bounds(kind: str, q_len: int, kv_len: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bounds [parts, B or 1, rows] of a mask; those called random, slices and sequences have rows that see nothing."""
    rows = torch.arange(q_len)
    if kind == "window":
        parts = [(rows - 20, rows + 3)]
    elif kind == "documents":
        parts = [(rows // 13 * 13, rows // 13 * 13 + 13)]
    elif kind == "union":  # a window, the first four keys, and a few late keys for late rows
        first, end = (rows - 9).clamp(min=0), (rows + 2).clamp(max=kv_len)
        late = end.clamp(min=kv_len - 7)
        parts = [(first, end), (0 * rows, first.clamp(max=4)), (late, torch.where(rows < 20, late, kv_len))]
    elif kind == "slices":  # rows outside of each slice are empty, with bounds far from those inside
        a, b, c = q_len // 4, q_len // 2, q_len - q_len // 5
        parts = [_slice(rows, a, c, kv_len // 2, kv_len, 0), _slice(rows, 0, b, 1, kv_len // 3, kv_len)]
    elif kind == "sequences":
        each = [make_bounds(name, q_len, kv_len, 1, device) for name in ("random", "documents", "random")[:batch]]
        first, end = (torch.cat(bound, 1) for bound in zip(*each, strict=True))
        return first, end
    else:
        first = torch.randint(0, kv_len // 2, (q_len,)).sort().values
        end = torch.maximum(first, torch.randint(kv_len // 3, kv_len, (q_len,)).sort().values)
        first[:3], end[:3], first[-2:], end[-2:] = 0, 0, kv_len, kv_len
        parts = [(first, end)]
    ends = [end.clamp(0, kv_len) for _, end in parts]
    firsts = [torch.minimum(first.clamp(0, kv_len), end) for (first, _), end in zip(parts, ends, strict=True)]
    first, end = (torch.stack(bound)[:, None].int().to(device) for bound in (firsts, ends))
    assert (first.diff() >= 0).all()
    assert (end.diff() >= 0).all()
    return first, end


def _slice(rows: Tensor, begin: int, stop: int, first: int, end: int, before: int) -> tuple[Tensor, Tensor]:
    """Keys [first, end) for rows [begin, stop); rows before and after see nothing."""
    before = min(before, first)
    inside, after = (rows >= begin) & (rows < stop), rows >= stop
    low = torch.where(inside, first, torch.where(after, end, before))
    return low, torch.where(inside | after, end, low)


def mask_case(kind: str, q_len: int, kv_len: int, batch: int, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a kernel, and who sees whom: bool [B or 1, 1, Sq, Sk]."""
    rows, keys = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)
    if kind in ("full", "causal"):
        causal = kind == "causal"
        return {"causal": causal, "bounds": None}, (keys <= rows if causal else keys >= 0 * rows)[None, None]
    first, end = make_bounds(kind, q_len, kv_len, batch, device)
    seen = (keys >= first[..., None]) & (keys < end[..., None])
    assert (seen.sum(0) <= 1).all()
    return {"causal": False, "bounds": (first, end)}, seen.any(0)[:, None]


def score_terms(
    softcap: bool, alibi: bool, heads: int, q_len: int, kv_len: int, device: torch.device, *, ascending: bool = False
) -> ScoreTerms:  # fmt: skip
    """Terms of the scores; positions with gaps, in an order of their own unless `ascending`, then a slope below 0."""
    slopes = positions = None
    if alibi:
        # The slopes of the ALiBi paper. Steeper ones over random positions make the lse so large that its float32
        # rounding, which no kernel can undo, is most of the error.
        slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float32, device=device))
        positions = [torch.randperm(2 * n)[:n].int().to(device) for n in (q_len, kv_len)]
        if ascending:
            slopes[0] *= -0.1
            positions = [x.sort().values for x in positions]
            if q_len == kv_len:  # self-attention: most keys that a causal row sees are before it
                positions = positions[:1] * 2
    return ScoreTerms(2.0 if softcap else None, slopes, *(positions or (None, None)))


def even_terms(slopes: Tensor, q: Ranges, k: Ranges) -> tuple[ScoreTerms, ScoreTerms]:
    """Terms of rows and keys at these positions; then what a kernel gets that has to know them by `even` alone."""
    positions = [ranges.as_tensor(x, slopes.device).int() for x in (q, k)]
    even = EvenPositions.of(q, k)
    assert even is not None
    unread = [torch.full_like(x, -1 << 20) for x in positions]
    return ScoreTerms(None, slopes, *positions, even), ScoreTerms(None, slopes, *unread, even)


def dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, dtype: torch.dtype, terms: ScoreTerms = PLAIN,
    sinks: Tensor | None = None,
) -> State:  # fmt: skip
    """The definition, differentiable: rows that see nothing give 0 and -inf, and no gradient."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if terms.softcap is not None:
        scores = (scores / terms.softcap).tanh() * terms.softcap
    if terms.slopes is not None:
        distance = (terms.q_positions[:, None] - terms.k_positions).abs()
        scores = scores - terms.slopes.to(dtype)[:, None, None] * distance.to(dtype)
    if sinks is not None:  # one more key, of value 0; a sink of -inf is none
        column = sinks.to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
        seen = torch.cat([seen.expand(scores.shape), column > -torch.inf], -1)
        scores, v = torch.cat([scores, column], -1), torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    some = seen.any(-1)
    # Rows that see nothing get finite scores here and are cut off after, which keeps NaN out of autograd.
    scores = scores.masked_fill(~seen & some[..., None], -torch.inf)
    out = torch.where(some[..., None], scores.softmax(-1) @ v, 0.0)
    return State(out, torch.where(some, scores.logsumexp(-1), -torch.inf))


# Of scores in base 2. The last is near the end of float32; fp16 ends at 2^32.
HUGE_EXPONENTS = {torch.bfloat16: (20, 27, 28, 30, 31, 32, 60, 124), torch.float16: (20, 27, 28, 30, 31, 32)}


def make_scores_huge(q: Tensor, k: Tensor, exponent: int, scale: float) -> None:
    """Of four rows one keeps scores near 1, one has positive ones of about 2**exponent, one negative, one both.

    Every key is there twice, so that a row has two largest scores, in one tile or in two.
    """
    amount = exponent - math.log2(q.shape[-1] * abs(scale) * LOG2_E)
    of_q, of_k = 2.0 ** (amount // 2), 2.0 ** (amount - amount // 2)
    k.copy_((0.5 + torch.rand(k.shape, device=k.device)) * of_k)
    period = 5 * k.shape[-2] // 11
    k[..., period:, :] = k[..., : k.shape[-2] - period, :].clone()
    size = 0.5 + torch.rand(q.shape, device=q.device)
    signs = torch.randint(0, 2, q.shape, device=q.device) * 2 - 1
    kind = torch.arange(q.shape[-2], device=q.device)[:, None] % 4
    near_one = signs * size / of_k / q.shape[-1] ** 0.5
    q.copy_(torch.where(kind == 0, near_one, torch.where(kind == 3, signs, kind * 2 - 3) * size * of_q))


def assert_huge_scores_are_right(result: State, truth: State) -> None:
    """Rows of all kinds; where one key has all the weight, the output is its value."""
    tolerance = 1e-3 if result.out.dtype == torch.float16 else 6e-3  # float32 too: weights are bf16
    for kind in range(4):
        assert relative(result.out[..., kind::4, :], truth.out[..., kind::4, :]) < tolerance, kind
        assert relative(result.lse[..., kind::4], truth.lse[..., kind::4]) < 1e-6, kind


def relative(x: Tensor, truth: Tensor) -> float:
    """Norm-wise error; both must be -inf in the same places, and finite elsewhere."""
    assert torch.equal(x.isneginf(), truth.isneginf())
    finite = truth.isfinite()
    x, truth = x.double()[finite], truth[finite]
    return float((x - truth).norm() / truth.norm())
