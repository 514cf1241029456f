"""Sparse attention with unequal rows: forward, backward, distribution, the indexer's top-k and its loss.

Rows read 0 to all of their slots. Slots name keys twice, or no key. Keys that no row reads hold NaN, and so do the
queries of rows that read nothing. There are enough rows for every program of a persistent kernel to get several.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.ops.sparse import reference
from helpers.sparse import embedded

from . import indexed
from .cases import DTYPES, HIGH, LOW, Case, chance, draw_length, integers, normal, pick

# Compile-time choices: the widths of keys and values, and the heads.
DIMS = {(576, 512): 6, (512, 512): 5, (192, 128): 1, (128, 128): 1, (64, 64): 1, (40, 24): 0.5, (256, 64): 0.5}
HEADS = {64: 5, 128: 5, 16: 4, 32: 1, 8: 1, 1: 1, 3: 0.5, 20: 0.5, 96: 0.5}
TOPK = {512: 4, 256: 3, 2048: 2, 128: 2, 1024: 1, 64: 1, 100: 1, 1: 0.5, 37: 0.5}
LENGTHS = {"random": 6, "zeros": 2, "few": 1, "full": 1, None: 3}  # of rows
KEYS = {"random": 5, "distinct": 2, "repeated": 1, "none": 0.3}
MASKS = {"none": 6, "causal": 4, "strided": 1, "positions": 1, "documents": 1, "offset": 1, "everything": 1}
BACKENDS = {"cuda": {"auto": 4, "triton": 1}, "cpu": {"auto": 1, "torch": 1}}


class Limits(NamedTuple):
    """The largest sizes."""

    rows: int
    keys: int
    slots: int  # rows x topk
    queries: int  # numbers in q
    kept: int  # of them, how many are compared with float64
    pairs: int  # rows x keys of an indexer over all keys
    dots: int  # pairs x heads


LIMITS = {
    "cuda": Limits(5000, 32768, 3 << 20, 200_000_000, 48_000_000, 30_000_000, 1_500_000_000),
    "cpu": Limits(60, 300, 1 << 11, 1 << 20, 1 << 18, 1 << 14, 1 << 19),
}


def draw(random: Random, build: Random, device: str) -> Case:
    op = pick(build, {"attention": 8, "distribution": 3, "topk": 3, "loss": 2, "dense_loss": 0.5})
    all_keys, most = op in ("topk", "dense_loss"), LIMITS[device]
    case: Case = {
        "op": op, "rows": draw_length(random, most.rows), "keys": draw_length(random, most.keys),
        "topk": pick(build, TOPK if device == "cuda" else {1: 1, 5: 2, 16: 3, 37: 3}), "mask": pick(random, MASKS),
        "lengths": None if all_keys else pick(random, LENGTHS), "indices": None if all_keys else pick(random, KEYS),
        "heads": pick(build, HEADS), "dims": pick(build, DIMS),
        "dtype": pick(build, {"bf16": 8, "fp16": 1, "fp32": 1}), "backend": pick(build, BACKENDS[device]),
    }  # fmt: skip
    if op == "attention":
        odds = {
            "own_values": 0.15, "sinks": 0.3, "max_logits": 0.4, "attn_sum": 0.2, "backward": 0.7, "deterministic": 0.4
        }  # fmt: skip
        case |= {name: chance(build, each) for name, each in odds.items()}
    elif op == "distribution":
        case |= {"head_group": pick(build, {None: 3, 4: 1, 16: 1}), "normalize": chance(random, 0.3)}
        case["base2"] = chance(random, 0.2)
    else:
        index = pick(build, {(64, 128): 5, (32, 128): 2, (4, 64): 1, (3, 20): 0.5, (1, 128): 0.5})
        case |= {"index": index, "relu": chance(build, 0.8)}
    while not _fits(case, most):
        case["rows"] = max(1, case["rows"] * 2 // 3)
        if all_keys:
            case["keys"] = max(1, case["keys"] * 2 // 3)
    return case | {"embedded": chance(random, 0.3), "seed": random.randrange(10**6)}


def _fits(case: Case, most: Limits) -> bool:
    rows, heads = case["rows"], case["heads"]
    if case["op"] in ("topk", "dense_loss"):
        pairs, share = (
            rows * case["keys"],
            16 if case["op"] == "dense_loss" else 1,
        )  # which keeps them all for gradients
        return pairs <= most.pairs // share and pairs * case["index"][0] <= most.dots // share
    slots = rows * case["topk"] * (8 if case.get("head_group") else 1)
    return slots <= most.slots and rows * heads * case["dims"][0] <= most.queries


def check(case: Case, device: str) -> None:
    mask = _mask(case, device)
    {"attention": _attention, "distribution": _distribution, "topk": _topk, "loss": _loss, "dense_loss": _loss}[
        case["op"]
    ](case, mask, device)


def _mask(case: Case, device: str) -> am.SparseMask:
    rows, keys, topk, seed = case["rows"], case["keys"], case["topk"], case["seed"]

    def ints(low: int, high: int, name: str) -> Tensor:
        return integers(low, max(high, low + 1), rows, seed=f"{seed}-{name}", device=device)

    fields: dict[str, Any] = {}
    kind, lengths = case["mask"], case.get("lengths")
    if kind in ("causal", "everything"):
        fields = {"causal": True, "q_start": max(0, keys - rows) if seed % 2 else 0}
    if kind == "strided":
        fields = {"causal": True, "k_stride": 4, "q_start": seed % 7}
    if kind == "positions":
        fields = {"causal": True, "q_positions": ints(-1, keys + 9, "positions").long()}
    if kind in ("documents", "everything"):
        start = ints(-5, keys, "start")
        fields |= {"k_start": start, "k_end": start + ints(0, max(2, keys // 2), "width")}
    if kind in ("offset", "everything"):
        fields["k_offset"] = 6
    if lengths is not None:
        count = ints(-1 if lengths == "zeros" else 0, min(3, topk + 1) if lengths == "few" else topk + 3, "lengths")
        if lengths == "zeros":
            count = count.masked_fill(ints(0, 3, "zeros") > 0, 0)
        if lengths == "full":
            count = torch.full_like(count, topk)
        fields["topk_length"] = count.masked_fill(ints(0, 10, "all") == 0, topk)
    return am.SparseMask(**fields)


def _indices(case: Case, mask: am.SparseMask, device: str) -> Tensor:
    """Return indices by kind, among them some of no key."""
    rows, keys, topk, kind = case["rows"], case["keys"], case["topk"], case["indices"]
    seed, first = case["seed"], mask.k_offset
    if kind == "distinct":
        start = integers(0, keys, rows, 1, seed=f"{seed}-start", device=device)
        step = next(n for n in range(max(2, keys // 3), 2 * keys + 3) if math.gcd(n, keys) == 1)
        at = (start + torch.arange(topk, device=device) * step) % keys
        at = at.masked_fill(torch.arange(topk, device=device) >= keys, -1)
        return torch.where(at < 0, at, at + first).int()
    span = 3 if kind == "repeated" else keys
    indices = first + integers(-2, span + 3, rows, topk, seed=f"{seed}-indices", device=device)
    if kind == "none":
        return indices.fill_(-1)
    odd = integers(0, 50, rows, topk, seed=f"{seed}-odd", device=device)
    return indices.masked_fill(odd == 0, HIGH).masked_fill(odd == 1, LOW).masked_fill(odd == 2, -1)


def _read(indices: Tensor, valid: Tensor, mask: am.SparseMask, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of the keys in memory, which keys some row reads, and which rows read some."""
    at = torch.where(valid, indices - mask.k_offset, 0)
    used = torch.zeros(keys, dtype=torch.bool, device=at.device)
    used[at[valid].long()] = True
    return at, used, valid.any(1)


def _poisoned(x: Tensor, used: Tensor, case: Case) -> Tensor:
    """Return rows with NaN where they are not used, maybe as a view in a larger tensor of NaN."""
    x = x.masked_fill(~used.view(-1, *[1] * (x.ndim - 1)), torch.nan)
    return embedded(x) if case.get("embedded") else x


def _attention(case: Case, mask: am.SparseMask, device: str) -> None:
    rows, keys, heads, (d, d_v), seed = case["rows"], case["keys"], case["heads"], case["dims"], case["seed"]
    dtype, scale = DTYPES[case["dtype"]], d**-0.5
    q, kv = (
        normal(*n, d, seed=f"{seed}-{i}", device=device, dtype=dtype) for i, n in enumerate(((rows, heads), (keys,)))
    )
    v = normal(keys, d_v, seed=f"{seed}-v", device=device, dtype=dtype) if case.get("own_values") else None
    sinks = 2 * normal(heads, seed=f"{seed}-sinks", device=device) if case.get("sinks") else None
    grads = None
    if case.get("backward"):
        grads = tuple(
            normal(*shape, seed=f"{seed}-{shape}", device=device, dtype=kind)
            for shape, kind in (((rows, heads, d_v), dtype), ((rows, heads), torch.float32))
        )
    indices = _indices(case, mask, device)
    valid = indexed.valid_slots(indices, keys, mask)
    at, used, some = _read(indices, valid, mask, keys)

    given = {"dq": _poisoned(q, some, case), "dk": _poisoned(kv, used, case)}
    given |= {} if v is None else {"dv": _poisoned(v, used, case)}
    given |= {} if sinks is None else {"dsinks": sinks}
    if grads is not None:
        given = {name: x.detach().requires_grad_() for name, x in given.items()}

    def run() -> dict[str, Tensor]:
        extra = [name for name in ("attn_sum", "max_logits") if case.get(name)]
        results = am.sparse_attention(
            given["dq"], given["dk"], indices, scale=scale, d_v=d_v, v=given.get("dv"), mask=mask,
            sinks=given.get("dsinks"), deterministic=bool(case.get("deterministic")), backend=case["backend"],
            **{f"return_{name}": True for name in extra},
        )  # fmt: skip
        found = dict(zip(("out", "lse", *extra), (x.detach() for x in results), strict=True))
        if grads is not None:
            found |= zip(given, torch.autograd.grad(results[:2], list(given.values()), grads), strict=True)
        return found

    actual = run()
    for name, x in run().items() if case.get("deterministic") else ():
        assert torch.equal(x, actual[name]), f"{name}: other bits in a second run"
    keep = _some_rows(rows, LIMITS[device].kept // (heads * d), seed, device)
    how = (q, kv, v, at, valid, scale, d_v, sinks, grads)
    exact, plain = (indexed.attention_results(*how, keep=keep, plain=plain) for plain in (False, True))
    if case.get("attn_sum"):
        for results, rounded in ((exact, False), (plain, True)):
            how = (q[keep], kv, at[keep], valid[keep], results["lse"], scale, heads)
            results["attn_sum"] = indexed.distribution_results(*how, plain=rounded)[0]
    for name, x in actual.items():
        x = x if name in ("dk", "dv", "dsinks") else x[keep]
        indexed.assert_rows_close(name, x, plain[name], exact[name], dtype)
    for name, unused in (("out", ~some), ("dq", ~some), ("dk", ~used), ("dv", ~used)):
        assert name not in actual or not actual[name][unused].any(), f"{name}: not 0 where nothing is read"
        assert name not in actual or actual[name].isfinite().all(), f"{name}: not finite"


def _some_rows(rows: int, most: int, seed: int, device: str) -> Tensor:
    """Return which rows are compared: all, or random ones, the last among them."""
    keep = torch.ones(rows, dtype=torch.bool, device=device)
    if rows > most:
        keep = integers(0, rows, rows, seed=f"{seed}-keep", device=device) < most
        keep[-1] = True
    return keep


def _distribution(case: Case, mask: am.SparseMask, device: str) -> None:
    rows, keys, heads = case["rows"], case["keys"], case["heads"]
    dtype, scale = DTYPES[case["dtype"]], case["dims"][0] ** -0.5
    q, kv, indices, lse = _target(case, mask, device)
    valid = indexed.valid_slots(indices, keys, mask)
    at, used, some = _read(indices, valid, mask, keys)
    group = case.get("head_group")
    actual = am.attention_distribution(
        _poisoned(q, some, case), _poisoned(kv, used, case), indices,
        am.sparse.convert_lse(lse, "e", "2") if case.get("base2") else lse, lse_base="2" if case.get("base2") else "e",
        scale=scale, mask=mask, head_group=group, normalize=bool(case.get("normalize")), backend=case["backend"],
    )  # fmt: skip
    how = (q, kv, at, valid, lse, scale, heads if group is None else min(group, heads))
    exact, plain = (indexed.distribution_results(*how, plain=plain) for plain in (False, True))
    if case.get("normalize"):
        exact, plain = (x / torch.where((mass := x.sum(-1, keepdim=True)) > 0, mass, 1.0) for x in (exact, plain))
    actual = actual[None] if group is None else actual
    assert actual.shape == (exact.shape[0], rows, case["topk"])
    indexed.assert_rows_close("p", *(x.movedim(1, 0) for x in (actual, plain, exact)), dtype)
    assert not actual[:, ~valid].any(), "p: not 0 in an invalid slot"


def _target(case: Case, mask: am.SparseMask, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, indices, and an lse near that of the scores, without mass in some heads."""
    rows, keys, heads, (d, _), seed = case["rows"], case["keys"], case["heads"], case["dims"], case["seed"]
    dtype = DTYPES[case["dtype"]]
    q = normal(rows, heads, d, seed=f"{seed}-q", device=device, dtype=dtype)
    k = normal(keys, d, seed=f"{seed}-k", device=device, dtype=dtype)
    lse = normal(rows, heads, seed=f"{seed}-lse", device=device) + 3
    odd = integers(0, 40, rows, heads, seed=f"{seed}-lse odd", device=device)
    lse = lse.masked_fill(odd == 0, -torch.inf).masked_fill(odd == 1, torch.inf)
    if case["op"] == "dense_loss":
        indices = torch.arange(keys, dtype=torch.int32, device=device).expand(rows, -1) + mask.k_offset
    else:
        indices = _indices(case, mask, device)
    return q, k, indices, lse


def _indexer(case: Case, device: str, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return iq, ik and w. Scores of whole numbers are exact in any order of summation, and many are equal."""
    (heads, d), seed, dtype = case["index"], case["seed"], DTYPES[case["dtype"]]
    shapes = ((case["rows"], heads, d), (case["keys"], d), (case["rows"], heads))
    if whole:
        iq, ik, w = (integers(-2, 3, *n, seed=f"{seed}-{i}", device=device).to(dtype) for i, n in enumerate(shapes))
        return iq, ik, w
    iq, ik, w = (normal(*n, seed=f"{seed}-{i}", device=device, dtype=dtype) for i, n in enumerate(shapes))
    return iq, ik, w


def _topk(case: Case, mask: am.SparseMask, device: str) -> None:
    rows, keys, topk = case["rows"], case["keys"], case["topk"]
    iq, ik, w = _indexer(case, device, whole=True)
    every = torch.arange(keys, dtype=torch.int32, device=device)[None] + mask.k_offset
    relu = bool(case.get("relu"))
    visible = indexed.valid_slots(every.expand(rows, -1), keys, mask)
    found = am.indexer_topk(
        _poisoned(iq, visible.any(1), case), _poisoned(ik, visible.any(0), case), w, topk, scale=0.5, relu=relu,
        mask=mask, backend=case["backend"],
    )  # fmt: skip
    for some in indexed.some_rows(rows, keys * iq.shape[1]):
        scores = indexed.index_scores(iq[some].double(), ik.double(), w[some].double(), 0.5, relu)
        assert_topk(found.indices[some], found.scores[some], found.lengths[some], scores, visible[some], mask.k_offset)


def assert_topk(
    indices: Tensor, scores: Tensor, lengths: Tensor, every: Tensor, visible: Tensor, k_offset: int = 0
) -> None:
    """Assert that the best keys of whole numbers are exactly those, with their scores."""
    topk = indices.shape[1]
    best = indexed.best_keys(every, visible, topk)
    right = torch.where(best < 0, best, best + k_offset)
    bad = (indices != right).any(1).nonzero().flatten().tolist()
    assert not bad, f"indices: other keys in {len(bad)} rows, the first {bad[0]}"
    assert torch.equal(lengths, (best >= 0).sum(1, dtype=torch.int32)), "lengths"
    kept = torch.nn.functional.pad(every, (0, 1)).gather(1, best.clamp(min=0).long())
    assert torch.equal(scores.double(), kept.masked_fill(best < 0, -torch.inf)), "scores"


def _loss(case: Case, mask: am.SparseMask, device: str) -> None:
    """The loss of every row, over slots or over all visible keys, and the gradients of the indexer."""
    rows, keys, scale = case["rows"], case["keys"], case["dims"][0] ** -0.5
    dense = case["op"] == "dense_loss"
    iq, ik, w = (x / 4 for x in _indexer(case, device, whole=False))
    q, k, indices, lse = _target(case, mask, device)
    valid = indexed.valid_slots(indices, keys, mask)
    at, used, some = _read(indices, valid, mask, keys)
    relu = bool(case.get("relu"))
    leaves = [_poisoned(iq, some, case), _poisoned(ik, used, case), w]
    leaves = [x.detach().requires_grad_() for x in leaves]
    grad = normal(rows, seed=f"{case['seed']}-grad", device=device)
    loss = am.indexer_kl_loss(
        *leaves, None if dense else indices,
        am.sparse.AttentionTarget(_poisoned(q, some, case), _poisoned(k, used, case), lse, scale),
        mask=mask, scale=0.3, relu=relu, reduction="none", backend=case["backend"],
    )  # fmt: skip
    actual = [loss.detach(), *torch.autograd.grad(loss, leaves, grad)]
    how = (iq, ik, w, q, k, lse, at, valid, scale, relu, grad)
    exact, plain = (_loss_results(*how, plain=plain) for plain in (False, True))
    for name, *three in zip(("loss", "d_iq", "d_ik", "d_w"), actual, plain, exact, strict=True):
        indexed.assert_rows_close(name, *three, iq.dtype)


def _loss_results(
    iq: Tensor, ik: Tensor, w: Tensor, q: Tensor, k: Tensor, lse: Tensor, at: Tensor, valid: Tensor, scale: float,
    relu: bool, grad: Tensor, *, plain: bool,
) -> list[Tensor]:  # fmt: skip
    wide = torch.float32 if plain else torch.float64

    def rounded(x: Tensor) -> Tensor:
        return x.to(iq.dtype).to(wide) if plain else x

    d_ik = torch.zeros(ik.shape, dtype=wide, device=ik.device)
    parts = []
    for rows in indexed.some_rows(len(iq), at.shape[1] * (ik.shape[1] + 2 * iq.shape[1])):
        keys = torch.where(valid[rows], at[rows], 0).long()
        p = indexed.distribution_results(q[rows], k, at[rows], valid[rows], lse[rows], scale, q.shape[1], plain=plain)
        leaves = [x.to(wide).requires_grad_() for x in (iq[rows], ik[keys], w[rows])]
        scores = indexed.index_scores(*leaves, 0.3, relu, rounded)
        # The scores of slots that do not count are replaced first: a row without any has no softmax.
        some = valid[rows].any(1)
        shown = torch.where(some[:, None], valid[rows], True)
        loss = torch.where(some, reference.kl(p[0], scores, shown), 0.0)
        d_iq, d_keys, d_w = torch.autograd.grad(loss, leaves, grad[rows].to(wide) * some)
        d_ik.index_add_(0, keys.flatten(), d_keys.flatten(0, 1))
        parts.append([loss.detach(), d_iq, d_w])
    loss, d_iq, d_w = (torch.cat(x) for x in zip(*parts, strict=True))
    return [loss, *(x.to(iq.dtype) if plain else x for x in (d_iq, d_ik, d_w))]
