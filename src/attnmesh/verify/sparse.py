"""Sparse attention and its indexer against float64: every operation, forward and backward, on one device.

Slots name keys at random: some twice, some that do not exist, and in one row none. Keys that no row may read are
poisoned. The best keys of whole numbers, whose scores are exact in any order, must be the very same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.ops.sparse import attention, indexer, loss, reference
from attnmesh.ops.sparse.lse import convert_lse
from attnmesh.ops.sparse.mask import SparseMask
from attnmesh.parallel.sparse.api import SparseParallel
from attnmesh.verify.mode import Compared, ComparedMode

ROWS, KEYS, TOPK = 37, 53, 19
WIDTH, VALUE_WIDTH, INDEX_HEADS, INDEX_WIDTH = 40, 24, 3, 16
ATTN_SCALE, INDEX_SCALE = WIDTH**-0.5, INDEX_WIDTH**-0.5
MASKS = ("no mask", "causal", "causal strided", "documents")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HEADS, _GROUP = 10, 4
_NO_KEYS = (-1, -(2**31), 2**31 - 1, KEYS)  # indices that name none

Results = dict[str, Tensor]


class OneDevice:
    """The functions that `SparseParallel` has over ranks."""

    sparse_attention = staticmethod(attention.sparse_attention)
    attention_distribution = staticmethod(attention.attention_distribution)
    indexer_scores_at = staticmethod(indexer.indexer_scores_at)
    indexer_topk = staticmethod(indexer.indexer_topk)
    indexer_kl_loss = staticmethod(loss.indexer_kl_loss)


Family = OneDevice | SparseParallel


class Problem(NamedTuple):
    """Inputs of all operations, and the gradients of what comes out."""

    q: Tensor
    kv: Tensor
    v: Tensor
    sink: Tensor
    lse: Tensor  # natural; not that over the slots
    iq: Tensor
    ik: Tensor
    w: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    grad_slots: Tensor
    grad_loss: Tensor
    indices: Tensor
    mask: SparseMask

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> Problem:
        """Every tensor changed; the mask stays."""
        tensors = {name: change(name, x) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return Problem(**tensors, mask=self.mask)

    def to(self, dtype: torch.dtype) -> Problem:
        """In another precision; what is float32 by its meaning is never less."""
        wide = torch.promote_types(dtype, torch.float32)
        return self.changed(lambda name, x: x.to(wide if name in _WIDE else dtype) if x.is_floating_point() else x)

    def on(self, device: str) -> Problem:
        """Elsewhere; masks move by themselves."""
        return self.changed(lambda _, x: x.to(device))

    @property
    def indexer(self) -> tuple[Tensor, Tensor, Tensor]:
        """What every operation of the indexer begins with."""
        return self.iq, self.ik, self.w


_WIDE = {"lse", "grad_lse", "grad_slots", "grad_loss"}


@dataclass(frozen=True)
class Operation:
    """Results by name: the library's, and those by definition."""

    name: str
    found: Callable[[Family, Problem], Results]
    defined: Callable[[Problem], Results]
    over_slots: bool = True  # or over all keys that the mask shows

    def compared(self, found: dict[str, list[Tensor]], problem: Problem) -> list[Compared]:
        """Every copy of a result beside float64 and the plain computation; keys are right or wrong."""
        exact, plain = self.defined(problem.to(torch.float64)), self.defined(problem)
        return [
            Compared(name, x.cpu(), exact[name], None if name == "best keys" else plain[name])
            for name, copies in found.items()
            for x in copies
        ]


def sparse_modes() -> Iterator[ComparedMode]:
    """Every operation under every mask, and in both precisions."""
    for operation in (*OPERATIONS, *_MORE):
        for number, mask in enumerate(MASKS):
            for dtype in DTYPES if number == 0 else (list(DTYPES)[number % 2],):
                compared = partial(_compared, operation, mask, dtype)
                yield ComparedMode(f"sparse {operation.name} {mask}", shape_of(_HEADS, dtype), compared)
    yield ComparedMode("sparse top-k same bits", shape_of(_HEADS, "fp32"), _same_bits)


def shape_of(heads: int, dtype: str) -> str:
    """The problem in words."""
    return f"{heads}/1x{ROWS}:{KEYS}x{WIDTH}/{VALUE_WIDTH} {dtype}"


def _compared(operation: Operation, mask: str, dtype: str, seed: int, device: str) -> list[Compared]:
    problem = drawn(_HEADS, mask, seed).to(DTYPES[dtype])
    found = operation.found(OneDevice(), poisoned(problem, operation.over_slots).on(device))
    return operation.compared({name: [x] for name, x in found.items()}, problem)


def _same_bits(seed: int, device: str) -> list[Compared]:
    """In blocks of any size."""
    problem = drawn(_HEADS, "causal", seed).on(device)
    one, other = (indexer.indexer_topk(*problem.indexer, TOPK, mask=problem.mask, block=n) for n in (7, 4096))
    assert one.scores is not None
    assert other.scores is not None
    return [Compared("indices bits", one.indices, other.indices), Compared("scores bits", one.scores, other.scores)]


def drawn(heads: int, mask: str, seed: int) -> Problem:
    """The same on every rank, in float32 on the CPU."""
    dice = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice)

    named = torch.randperm(KEYS, generator=dice)[: KEYS * 4 // 5]  # the others are in nobody's slots
    indices = named[torch.randint(len(named), (ROWS, TOPK), generator=dice)].int()
    indices[:, 3 : 3 + len(_NO_KEYS)] = torch.tensor(_NO_KEYS, dtype=torch.int32)
    indices[1] = -1
    lse = 3 + normal(ROWS, heads)
    lse[2], lse[3, 0] = -torch.inf, torch.inf  # heads without mass
    return Problem(
        q=normal(ROWS, heads, WIDTH), kv=normal(KEYS, WIDTH), v=normal(KEYS, VALUE_WIDTH), sink=normal(heads),
        lse=lse,
        iq=normal(ROWS, INDEX_HEADS, INDEX_WIDTH), ik=normal(KEYS, INDEX_WIDTH), w=normal(ROWS, INDEX_HEADS),
        grad_out=normal(ROWS, heads, VALUE_WIDTH), grad_lse=normal(ROWS, heads), grad_slots=normal(ROWS, TOPK),
        grad_loss=normal(ROWS), indices=indices, mask=_mask(mask, dice),
    )  # fmt: skip


def _mask(name: str, dice: torch.Generator) -> SparseMask:
    """Each but the first hides some keys from everybody; the last two leave some rows with nothing."""

    def numbers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (ROWS,), generator=dice)

    match name:
        case "causal":
            return SparseMask(causal=True, q_start=KEYS - ROWS - 3)
        case "causal strided":
            at = numbers(0, 3 * (KEYS - 4))
            return SparseMask(causal=True, k_stride=3, q_positions=at, topk_length=numbers(0, TOPK + 5))
        case "documents":
            start = numbers(0, KEYS - 4)
            return SparseMask(k_start=start, k_end=(start + numbers(0, 30)).clamp(max=KEYS - 3))
    return SparseMask()


def poisoned(problem: Problem, over_slots: bool) -> Problem:
    """Keys that no row may read are NaN."""
    read = ((_times(problem) > 0) if over_slots else _seen(problem.mask)).any(0)[:, None]
    kv, v, ik = (torch.where(read, x, torch.nan) for x in (problem.kv, problem.v, problem.ik))
    return problem._replace(kv=kv, v=v, ik=ik)


def _seen(mask: SparseMask) -> Tensor:
    """[ROWS, KEYS]: what each row may see, whatever its slots name."""
    every = torch.arange(KEYS, dtype=torch.int32).expand(ROWS, -1)
    return reference.valid_slots(every, KEYS, _over_all_keys(mask))


def _over_all_keys(mask: SparseMask) -> SparseMask:
    return replace(mask, topk_length=None)


def _times(problem: Problem) -> Tensor:
    valid = reference.valid_slots(problem.indices, KEYS, problem.mask)
    return reference.times_named(problem.indices, valid, KEYS).to(problem.q.dtype)


def _at_slots(x: Tensor, problem: Problem, otherwise: float) -> Tensor:
    """[..., ROWS, KEYS] at the slots: [..., ROWS, TOPK]."""
    valid = reference.valid_slots(problem.indices, KEYS, problem.mask)
    at = torch.where(valid, problem.indices, 0).long().expand(*x.shape[:-1], -1)
    return torch.where(valid, x.gather(-1, at), otherwise)


def _shares(problem: Problem, lse: Tensor) -> Tensor:
    """[heads, ROWS, KEYS]: the probability of every key; none where a head has no mass."""
    shares = reference.distribution(problem.q, problem.kv, lse, ATTN_SCALE)
    return torch.where(torch.isinf(lse).T[..., None], 0.0, shares)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def _differentiated(found: Results, by: Results, *grads: Tensor) -> Results:
    """What was found, and its gradients by some of the inputs; an lse of -inf has none."""
    outputs = list(found.values())
    weights = [torch.where(torch.isfinite(x), g.to(x.dtype), 0.0) for x, g in zip(outputs, grads, strict=True)]
    found_grads = torch.autograd.grad(outputs, list(by.values()), weights)
    return {name: x.detach() for name, x in found.items()} | dict(zip(by, found_grads, strict=True))


# The operations, by the library and by definition.


def _attended(on: Family, problem: Problem) -> Results:
    """Values in the keys, and a sink."""
    q, kv, sink = _leaves(problem.q, problem.kv, problem.sink)
    out, lse, attn_sum = on.sparse_attention(
        q, kv, problem.indices, scale=ATTN_SCALE, d_v=VALUE_WIDTH, mask=problem.mask, sinks=sink,
        return_attn_sum=True,
    )  # fmt: skip
    by = {"dq": q, "dkv": kv, "dsink": sink}
    results = _differentiated({"out": out, "lse": lse}, by, problem.grad_out, problem.grad_lse)
    return results | {"attn_sum": attn_sum}


def _attended_by_definition(problem: Problem) -> Results:
    q, kv, sink = _leaves(problem.q, problem.kv, problem.sink)
    state = reference.attend(q, kv, kv[:, :VALUE_WIDTH], _times(problem), ATTN_SCALE, sink)
    by = {"dq": q, "dkv": kv, "dsink": sink}
    results = _differentiated(state._asdict(), by, problem.grad_out, problem.grad_lse)
    return results | {"attn_sum": _at_slots(_shares(problem, results["lse"]).sum(0), problem, 0.0)}


def _attended_apart(on: Family, problem: Problem) -> Results:
    """Values of their own, and no sink: rows without a key have nothing."""
    q, k, v = _leaves(problem.q, problem.kv, problem.v)
    out, lse = on.sparse_attention(q, k, problem.indices, scale=ATTN_SCALE, v=v, mask=problem.mask, deterministic=True)
    by = {"dq": q, "dk": k, "dv": v}
    return _differentiated({"out": out, "lse": lse}, by, problem.grad_out, problem.grad_lse)


def _attended_apart_by_definition(problem: Problem) -> Results:
    q, k, v = _leaves(problem.q, problem.kv, problem.v)
    state = reference.attend(q, k, v, _times(problem), ATTN_SCALE)
    return _differentiated(state._asdict(), {"dq": q, "dk": k, "dv": v}, problem.grad_out, problem.grad_lse)


def _distributed(on: Family, problem: Problem) -> Results:
    q, k, i = problem.q, problem.kv, problem.indices
    binary = convert_lse(problem.lse, "e", "2")
    return {
        "sum": on.attention_distribution(q, k, i, problem.lse, scale=ATTN_SCALE, mask=problem.mask),
        "normalized": on.attention_distribution(
            q, k, i, binary, scale=ATTN_SCALE, mask=problem.mask, lse_base="2", normalize=True
        ),
    }


def _distributed_by_definition(problem: Problem) -> Results:
    total = _in_groups_by_definition(problem)["groups"].sum(0)
    mass = total.sum(-1, keepdim=True)
    return {"sum": total, "normalized": total / torch.where(mass > 0, mass, 1.0)}


def _in_groups(on: Family, problem: Problem) -> Results:
    q, k, i = problem.q, problem.kv, problem.indices
    dist = on.attention_distribution(q, k, i, problem.lse, scale=ATTN_SCALE, mask=problem.mask, head_group=_GROUP)
    return {"groups": dist}


def _in_groups_by_definition(problem: Problem) -> Results:
    shares = _shares(problem, problem.lse)
    return {"groups": _at_slots(torch.stack([some.sum(0) for some in shares.split(_GROUP)]), problem, 0.0)}


def _scored(on: Family, problem: Problem) -> Results:
    iq, ik, w = _leaves(*problem.indexer)
    scores = on.indexer_scores_at(iq, ik, w, problem.indices, scale=INDEX_SCALE, mask=problem.mask)
    return _differentiated({"scores": scores}, {"d_iq": iq, "d_ik": ik, "d_w": w}, problem.grad_slots)


def _scored_by_definition(problem: Problem) -> Results:
    iq, ik, w = _leaves(*problem.indexer)
    scores = _at_slots(reference.index_scores(iq, ik, w, INDEX_SCALE), problem, -torch.inf)
    return _differentiated({"scores": scores}, {"d_iq": iq, "d_ik": ik, "d_w": w}, problem.grad_slots)


def _chosen(on: Family, problem: Problem) -> Results:
    mask = _over_all_keys(problem.mask)
    scores = on.indexer_topk(*problem.indexer, TOPK, scale=INDEX_SCALE, mask=mask).scores
    assert scores is not None
    iq, ik, w = (x.round() for x in problem.indexer)
    return {
        "best scores": scores.sort(descending=True).values,
        "best keys": on.indexer_topk(iq, ik, w, TOPK, mask=mask).indices,
    }


def _chosen_by_definition(problem: Problem) -> Results:
    seen = _seen(problem.mask)
    scores = reference.index_scores(*problem.indexer, INDEX_SCALE).masked_fill(~seen, -torch.inf)
    iq, ik, w = (x.round() for x in problem.indexer)
    keys = reference.best_keys(reference.index_scores(iq, ik, w), seen, TOPK)
    padded = [row + [-1] * (TOPK - len(row)) for row in keys]
    return {
        "best scores": scores.sort(descending=True).values[:, :TOPK],
        "best keys": torch.tensor(padded, dtype=torch.int32),
    }


def _lost(on: Family, problem: Problem) -> Results:
    """The loss of every row, over its slots."""
    iq, ik, w = _leaves(*problem.indexer)
    rows = on.indexer_kl_loss(
        iq, ik, w, problem.indices, q=problem.q, k=problem.kv, lse=problem.lse, attn_scale=ATTN_SCALE,
        mask=problem.mask, scale=INDEX_SCALE, reduction="none",
    )  # fmt: skip
    return _differentiated({"loss": rows}, {"d_iq": iq, "d_ik": ik, "d_w": w}, problem.grad_loss)


def _lost_by_definition(problem: Problem) -> Results:
    iq, ik, w = _leaves(*problem.indexer)
    p = _at_slots(_shares(problem, problem.lse).sum(0), problem, 0.0)
    scores = _at_slots(reference.index_scores(iq, ik, w, INDEX_SCALE), problem, 0.0)
    rows = reference.kl(p, scores, reference.valid_slots(problem.indices, KEYS, problem.mask))
    return _differentiated({"loss": rows}, {"d_iq": iq, "d_ik": ik, "d_w": w}, problem.grad_loss)


def _lost_over_all_keys(on: Family, problem: Problem) -> Results:
    """The mean over rows that count."""
    iq, ik, w = _leaves(*problem.indexer)
    mean = on.indexer_kl_loss(
        iq, ik, w, q=problem.q, k=problem.kv, lse=problem.lse, attn_scale=ATTN_SCALE, mask=_over_all_keys(problem.mask),
        mode="dense", scale=INDEX_SCALE, reduction="mean_rows", row_mask=_counts(problem),
    )  # fmt: skip
    return _differentiated({"mean": mean}, {"d_iq": iq, "d_ik": ik, "d_w": w}, torch.ones_like(mean))


def _lost_over_all_keys_by_definition(problem: Problem) -> Results:
    iq, ik, w = _leaves(*problem.indexer)
    p = _shares(problem, problem.lse).sum(0)
    rows = reference.kl(p, reference.index_scores(iq, ik, w, INDEX_SCALE), _seen(problem.mask))
    mean = rows[_counts(problem)].sum() / _counts(problem).sum()
    return _differentiated({"mean": mean}, {"d_iq": iq, "d_ik": ik, "d_w": w}, torch.ones_like(mean))


def _counts(problem: Problem) -> Tensor:
    return problem.grad_loss > -1


OPERATIONS = (
    Operation("attention", _attended, _attended_by_definition),
    Operation("distribution", _distributed, _distributed_by_definition),
    Operation("top-k", _chosen, _chosen_by_definition, over_slots=False),
    Operation("loss", _lost, _lost_by_definition),
    Operation("dense loss", _lost_over_all_keys, _lost_over_all_keys_by_definition, over_slots=False),
)
_MORE = (
    Operation("attention own values", _attended_apart, _attended_apart_by_definition),
    Operation("distribution head_group", _in_groups, _in_groups_by_definition),
    Operation("index scores", _scored, _scored_by_definition),
)
