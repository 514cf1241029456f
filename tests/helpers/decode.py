"""Decode calls for a backend, the error rule for their results, and decode computed key by key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.storage import Stored
from attnmesh.testing.decode import DecodeProblem, random_decode
from attnmesh.testing.errors import ROUNDING

CUDA = torch.cuda.is_available()
BACKENDS = ("cpu", "triton")
LSE_UNITS = 16  # of float32, relative to max(1, |lse|)

# How a mask may be broadcast: the letters of the dimensions that are not.
MASK_SHAPES = ("", "b", "h", "t", "bh", "bt", "ht", "bht")


def device_of(backend: str) -> torch.device:
    """Return the device on which a backend computes."""
    return torch.device("cuda" if backend == "triton" and CUDA else "cpu")


def supported_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype, or float16 for bfloat16 in Triton's interpreter, whose bfloat16 products are wrong."""
    return torch.float16 if interpreted(backend) and dtype == torch.bfloat16 else dtype


def interpreted(backend: str) -> bool:
    """Return whether kernels run in Triton's interpreter, where a call takes a tenth of a second or more."""
    return backend == "triton" and not CUDA


def problem_for(backend: str, positions: Sequence[int], **how: object) -> DecodeProblem:
    """Return a random call on the backend's device; with one KV head by default where kernels are interpreted."""
    how = {"dtype": torch.float16, "kv_heads": 1 if interpreted(backend) else 2} | how
    how["dtype"] = supported_dtype(backend, how["dtype"])
    return random_decode(positions, device=device_of(backend), **how)


def assert_decode_close(actual: State, problem: DecodeProblem, lse_units: float = LSE_UNITS) -> None:
    """Assert the error rule for the whole result and for its rows; lse is right to a few units of float32."""
    exact, plain, q = problem.exact(), problem.plain(), problem.q
    assert actual.out.dtype == (problem.options.get("out_dtype") or q.dtype)
    assert actual.lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert actual.out.shape == exact.out.shape
    assert actual.lse.shape == exact.lse.shape
    empty = exact.lse.isneginf()
    assert torch.equal(actual.lse.isneginf(), empty), f"lse -inf elsewhere {_rows(actual.lse.isneginf() != empty)}"
    assert actual.out.isfinite().all(), f"out not finite {_rows(~actual.out.isfinite().all(-1))}"
    assert not actual.out[empty].any(), "out is not 0 in a row that sees no key"
    if not actual.out.numel():
        return

    off = (actual.lse.double() - exact.lse).abs().where(~empty, 0.0)
    unit = 1e-13 if q.dtype == torch.float64 else lse_units * torch.finfo(torch.float32).eps
    bad = off > unit * exact.lse.abs().clamp(min=1).where(~empty, 1.0)
    assert not bad.any(), f"error of lse {off.max():.2e} {_rows(bad)}"

    rounding, one = ROUNDING[q.dtype], actual.out.shape[-1] ** 0.5
    size = exact.out.norm(dim=-1)
    error, allowed = ((x.out.double() - exact.out).norm(dim=-1) for x in (actual, plain))
    bound = 4 * allowed.max() + 4 * rounding * (size.max() + one)
    assert error.max() <= bound, f"error of out {error.max():.2e} > {bound:.2e} {_rows(error > bound)}"
    bound = 2 * allowed.norm() + rounding * (size.norm() + one)
    assert error.norm() <= bound, f"error of out {error.norm():.2e} > {bound:.2e}, norm {size.norm():.2e}"


def with_huge_scores(problem: DecodeProblem, exponent: int) -> DecodeProblem:
    """Return the problem with scores of about 2**exponent, but for those of every third query head."""
    of_q = min(exponent, 12) if problem.q.dtype == torch.float16 else exponent
    of_scale = exponent - of_q
    powers = torch.full((problem.q.shape[1], 1, 1), of_q, device=problem.q.device)
    powers[::3] = -of_scale
    q = torch.ldexp(problem.q.double(), powers).to(problem.q.dtype)
    return replace(problem.with_options(scale=2.0**of_scale * q.shape[-1] ** -0.5), q=q)


def assert_huge_scores_are_right(state: State, problem: DecodeProblem) -> None:
    """Assert that out and lse are right, where one key has all the weight and elsewhere."""
    exact = problem.exact()
    torch.testing.assert_close(state.out.double(), exact.out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(state.lse.double(), exact.lse, rtol=4e-6, atol=1e-5)


def check_backend(problem: DecodeProblem, backend: str, **more: object) -> State:
    """Return the result of a backend, after asserting the error rule."""
    actual = problem.run(backend, **more)
    assert_decode_close(actual, problem.with_options(**more))
    return actual


def _rows(bad: Tensor) -> str:
    return f"at (sequence, head, token) {bad.nonzero()[:4].tolist()}"


# The definition once more, key by key, without the reference's code.


def decode_by_loops(problem: DecodeProblem) -> State:
    """Return out and lse in float64 from the poisoned arguments; only keys that a row sees are read."""
    options = problem.options
    q, k, v, table = problem.q, problem.k, problem.v, problem.table
    batch, heads, tokens, dim = q.shape
    pool = (k if isinstance(k, Tensor) else k.values).shape
    kv_heads, capacity = (pool[1], pool[2]) if table is None else (pool[2], pool[1] * table.shape[1])
    wide = (v if isinstance(v, Tensor) else v.values).shape[-1]
    scale = options.get("scale")
    scale = 1 / math.sqrt(dim) if scale is None else scale
    given = options.get("cur_pos")
    given = [capacity - 1] * batch if given is None else [int(p) for p in given]
    out, lse = torch.zeros(batch, heads, tokens, wide).double(), torch.full((batch, heads, tokens), -math.inf).double()
    read: dict[tuple, tuple[Tensor, Tensor]] = {}
    for b in range(batch):
        owner = 0 if options.get("share_cache") else b
        for h in range(heads):
            at = h * kv_heads // heads
            for t in range(tokens if given[b] >= 0 else 0):
                row, scores, values = q[b, h, t].double(), [], []
                for key in range(given[b] + 1):
                    bias = _bias(options, b, h, t, key, given[b] - tokens + 1)
                    if bias is None:
                        continue
                    if table is None:
                        index = (owner, at, key)
                    else:
                        index = (int(table[owner, key // pool[1]]), key % pool[1], at)
                    if index not in read:
                        read[index] = _vector(k, index, at), _vector(v, index, at)
                    scores.append(float(row @ read[index][0]) * scale + bias)
                    values.append(read[index][1])
                sinks = options.get("sinks")
                weights = scores + ([] if sinks is None else [float(sinks[h])])
                if not weights:
                    continue
                top = max(weights)
                total = sum(math.exp(score - top) for score in weights)
                lse[b, h, t] = top + math.log(total)
                for score, value in zip(scores, values, strict=True):
                    out[b, h, t].add_(value, alpha=math.exp(score - top) / total)
    return State(out, lse)


def _bias(options: dict, b: int, h: int, t: int, key: int, first_new: int) -> float | None:
    """Return what is added to a score, or None where the row does not see the key."""
    own = first_new + t
    if options.get("key_range") is not None:
        first, end = options["key_range"]
        return 0.0 if int(first[b, t]) <= key < int(end[b, t]) else None
    if options.get("window") is not None and key <= own - options["window"]:
        return None
    mask, tree = options.get("mask"), options.get("tree")
    if mask is not None:
        if key >= mask.shape[3]:
            return None
        entry = mask[b % mask.shape[0], h % mask.shape[1], t % mask.shape[2], key].item()
        if mask.dtype == torch.bool:
            return 0.0 if entry else None
        return None if entry == -math.inf else entry
    if tree is not None:
        if key < first_new:
            return 0.0
        return 0.0 if (tree if tree.ndim == 2 else tree[b])[t, key - first_new] else None
    return 0.0 if key <= own else None


def _vector(stored: Stored, index: tuple[int, int, int], head: int) -> Tensor:
    """Return the values of one token and head."""
    if isinstance(stored, Tensor):
        return stored[index].double()
    values = stored.values[index].double()
    if stored.storage == "fp8":
        return values * float(stored.scales if stored.scales.ndim == 0 else stored.scales[head])
    if stored.storage == "int8":
        return values * float(stored.scales[index])
    return torch.cat([values[i * 16 : i * 16 + 16] * 2.0 ** int(s) for i, s in enumerate(stored.scales[index])])
