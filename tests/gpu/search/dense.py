"""`attention`: masks, widths, strides, grouped heads, score terms, positions; out, lse and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.testing.attention import assert_results_close, forward_backward, random_inputs, reference_results
from helpers.strides import VARIANTS, strided

from .cases import DTYPES, Case, chance, draw_length, pick, rounding_of
from .masks import draw_mask, make_mask

# Compile-time choices repeat: few of them are frequent. Head dims of keys and of values.
DIMS = {(128, 128): 10, (64, 64): 6, (256, 256): 2, (192, 128): 2, (96, 96): 1, (80, 80): 1, (72, 40): 1,
        (33, 17): 1, (16, 16): 1, (576, 512): 2, (512, 512): 1, (1, 1): 0.3}  # fmt: skip
HEADS = {(1, 1): 3, (2, 2): 3, (4, 2): 3, (8, 1): 3, (6, 2): 2, (8, 8): 1, (16, 1): 1}  # of queries and of keys
BACKENDS = {
    "cuda": {"auto": 5, "triton": 3, "gluon": 3, "aten": 2, "torch": 1},
    "cpu": {"auto": 3, "aten": 3, "torch": 3, "reference": 1},
}
MOST_PAIRS = {"cuda": 60_000_000, "cpu": 500_000}  # of a float64 reference, per head
MOST_OF_ALL = {"cuda": 400_000_000, "cpu": 1_000_000}


def draw(random: Random, build: Random, device: str) -> Case:
    most = 5000 if device == "cuda" else 300
    batch, heads = pick(random, {1: 4, 2: 3, 3: 1}), pick(build, HEADS)
    q = draw_length(random, most)
    k = q if chance(random, 0.6) else draw_length(random, most)
    while batch * heads[0] // heads[1] * q * k > MOST_PAIRS[device] or batch * heads[0] * q * k > MOST_OF_ALL[device]:
        q, k = max(1, q * 2 // 3), max(1, k * 2 // 3)
    case: Case = {
        "mask": draw_mask(random, k, batch), "q": q, "k": k, "batch": batch, "heads": heads, "dims": pick(build, DIMS),
        "dtype": pick(build, {"bf16": 6, "fp16": 2, "fp32": 2}), "backend": pick(build, BACKENDS[device]),
        "softcap": chance(build, 0.15), "alibi": chance(build, 0.12), "sinks": chance(build, 0.2),
        "deterministic": chance(build, 0.15), "scale": chance(random, 0.1), "poison": chance(random, 0.3),
    }  # fmt: skip
    case["memory"] = random.choice(VARIANTS) if chance(random, 0.4) else None
    case["at"] = pick(random, {None: 8, "chunk": 2, "gaps": 1, "shuffled": 1, "device": 1})
    case["grad"] = draw_gradients(random, case["backend"])
    return case | {"seed": random.randrange(10**6)}


def draw_gradients(random: Random, backend: str) -> str:
    """Return the results that have a gradient; torch's CUDA kernels take none of lse."""
    return pick(random, {"out": 4, "both": 1} if backend == "aten" else {"out": 3, "both": 5, "lse": 1})


def check(case: Case, device: str) -> None:
    random = Random(case["seed"])
    mask = make_mask(case["mask"], case["seed"], case["k"], case["batch"])
    inputs = make_inputs(case, device)
    options = score_terms(case, device)
    at = _positions(case, device)
    if case.get("poison") and case.get("memory") != "expanded":  # which may repeat what is spoiled
        spoil_unseen(inputs, mask, at)
    if case.get("memory"):
        inputs = [_in_memory(x, case["memory"], random) for x in inputs]
    sinks = options.pop("sinks", None)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Any:
        return am.attention(
            q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=case["backend"], **options, **at
        )  # fmt: skip

    torch.use_deterministic_algorithms(bool(case.get("deterministic")))
    try:
        actual = forward_backward(attend, inputs, sinks)
        again = forward_backward(attend, inputs, sinks) if case.get("deterministic") else actual
    finally:
        torch.use_deterministic_algorithms(False)
    same = all(torch.equal(x, y) for x, y in zip(actual, again, strict=True))
    assert same or any(x.isnan().any() for x in actual), "other bits in a second run of deterministic algorithms"
    run = partial(references, inputs, mask, sinks=sinks, **options, **at)
    assert_attention(actual, run(plain=True), run(), inputs)


def _in_memory(x: Tensor, variant: str, random: Random) -> Tensor:
    """Return x with other strides. Only sequences and heads are repeated: equal keys and values cancel in gradients."""
    if variant != "expanded":
        return strided(x, variant, random)
    return x[:1].expand(x.shape) if chance(random, 0.5) else x[:, :1].expand(x.shape)


def make_inputs(case: Case, device: str) -> list[Tensor]:
    """Return q, k, v and the gradients of out and of lse: that of out may be zero, that of lse may be left out."""
    inputs = random_inputs(
        case["q"], case["k"], heads=case["heads"], dtype=DTYPES[case["dtype"]], batch=case["batch"],
        head_dim=case["dims"][0], value_dim=case["dims"][1], seed=case["seed"], device=device,
    )  # fmt: skip
    if case["grad"] == "lse":
        inputs[3].zero_()
    return inputs[:4] if case["grad"] == "out" else inputs


def score_terms(case: Case, device: str) -> dict[str, Any]:
    """Return scale, softcap, sinks and slopes, those that the case has."""
    options: dict[str, Any] = {}
    if case.get("scale"):
        options["scale"] = 1.7 * case["dims"][0] ** -0.5
    if case.get("softcap"):
        options["softcap"] = 3.0
    heads = case["heads"][0]
    if case.get("sinks"):
        generator = torch.Generator().manual_seed(case["seed"] + 1)
        options["sinks"] = (2 * torch.randn(heads, generator=generator)).to(device)
    if case.get("alibi"):  # the slopes of the paper
        options["alibi_slopes"] = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device=device))
    return options


def _positions(case: Case, device: str) -> dict[str, Tensor]:
    """Return positions of queries, and of keys where they have gaps or are in no order."""
    random, q, k = Random(case["seed"]), case["q"], case["k"]
    kind = case.get("at")
    if kind is None:
        return {}
    if kind in ("chunk", "device"):
        start = random.randint(0, max(0, k - q))
        return {"q_positions": torch.arange(start, start + q, device=device if kind == "device" else "cpu")}
    at = [random.sample(range(2 * n), n) for n in (q, k)]
    return {
        name: torch.tensor(sorted(x) if kind == "gaps" else x)
        for name, x in zip(("q_positions", "k_positions"), at, strict=True)
    }


def spoil_unseen(inputs: Sequence[Tensor], mask: am.Mask, at: dict[str, Tensor]) -> None:
    """Put NaN into rows that see nothing and into keys that no row sees."""
    q, k, v = inputs[:3]
    rows = at.get("q_positions", torch.arange(q.shape[2])).to(q.device)
    keys = at.get("k_positions", torch.arange(k.shape[2])).to(q.device)
    visible = mask.visible(rows[:, None], keys[None])
    visible = visible if visible.ndim == 3 else visible[None]
    q.masked_fill_(~visible.any(2)[:, None, :, None], torch.nan)
    for x in (k, v):
        x.masked_fill_(~visible.any(1)[:, None, :, None], torch.nan)


def references(inputs: Sequence[Tensor], mask: am.Mask, *, plain: bool = False, **options: Any) -> list[Tensor]:
    """Return `reference_results`, computed for one KV head at a time to save memory."""
    q_heads, kv_heads = inputs[0].shape[1], inputs[1].shape[1]
    group = q_heads // kv_heads
    parts = []
    for h in range(kv_heads):
        queries, key = slice(h * group, (h + 1) * group), slice(h, h + 1)
        own = [x[:, queries if i in (0, 3, 4) else key] for i, x in enumerate(inputs)]
        per_head = {
            name: x[queries] if name in ("sinks", "alibi_slopes") and x is not None else x
            for name, x in options.items()
        }
        parts.append(reference_results(own, mask, plain=plain, **per_head))
    return [torch.cat(x, 1 if x[0].ndim > 1 else 0) for x in zip(*parts, strict=True)]


def assert_attention(
    actual: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Assert the error rule; exactly 0 where rows see nothing."""
    rows = min(x[..., 0].numel() for x in inputs[:2])
    assert_results_close(actual, plain, exact, rounding=rounding_of(inputs[0].dtype, rows))
    empty = exact[1].isneginf()
    for name, x, rows in (("out", actual[0], empty), ("dq", actual[2], empty)):
        assert not x[rows].any(), f"{name}: not 0 in a row that sees nothing"
