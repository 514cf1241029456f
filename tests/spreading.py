"""Problems of the sparse family, spread over a grid of virtual ranks and joined again; and the truth in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.comm.sub import SubComm
from attnmesh.ops.sparse import reference

LAYOUTS = {"contiguous": am.Contiguous(), "zigzag": am.Zigzag(), "striped": am.Striped()}
SCALE, WIDTH, D_V = 0.3, 12, 8
_OF_ROWS = ("topk_length", "q_positions", "k_start", "k_end")


def heads_of(heads: int, tp: int) -> list[slice]:
    """An uneven share of the heads for each tp rank: the last has most."""
    ends = [heads * (rank + 1) * (rank + 2) // (tp * (tp + 1)) for rank in range(tp)]
    ends = [max(end, rank + 1) for rank, end in enumerate(ends)]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Problem:
    """Whole tensors. `d_out`, `d_lse` and `d_scores` are what comes back from the rest of a model."""

    q: Tensor
    kv: Tensor
    v: Tensor
    indices: Tensor
    sink: Tensor
    iq: Tensor
    ik: Tensor
    w: Tensor
    d_out: Tensor
    d_lse: Tensor
    d_scores: Tensor
    mask: am.SparseMask

    @property
    def length(self) -> int:
        return self.q.shape[0]

    @property
    def key_length(self) -> int:
        return self.kv.shape[0]

    def to(self, dtype: torch.dtype) -> Problem:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return Problem(**{
            name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()
        })  # fmt: skip

    def shard(self, place: Place) -> Problem:
        """What one rank of a grid holds."""
        rows, mine = place.rows, heads_of(self.q.shape[1], place.tp.world)[place.tp.rank]
        own = {name: rows(x) for name in _OF_ROWS if (x := getattr(self.mask, name)) is not None}
        return Problem(
            rows(self.q)[:, mine], rows(self.kv), rows(self.v), rows(self.indices), self.sink[mine], rows(self.iq),
            rows(self.ik), rows(self.w), rows(self.d_out)[:, mine], rows(self.d_lse)[:, mine], rows(self.d_scores),
            replace(self.mask, **own),
        )  # fmt: skip

    def leaves(self, *names: str) -> list[Tensor]:
        return [getattr(self, name).detach().clone().requires_grad_() for name in names]


@dataclass(frozen=True)
class Place:
    """A rank of a grid."""

    tp: am.Comm
    cp: am.Comm
    layout: am.Layout

    def rows(self, x: Tensor) -> Tensor:
        return self.layout.shard(x, 0, self.cp.world, self.cp.rank)


def on_grid(tp: int, cp: int, layout: am.Layout, fn: Callable[[Place], Any]) -> list[list[Any]]:
    """`fn` on every rank of tp x cp virtual ranks: results [cp][tp]."""

    def program(comm: am.Comm) -> Any:
        at_cp, at_tp = divmod(comm.rank, tp)
        along_tp = SubComm(comm, range(at_cp * tp, (at_cp + 1) * tp))
        along_cp = SubComm(comm, range(at_tp, tp * cp, tp))
        return fn(Place(along_tp, along_cp, layout))

    found = am.run_virtual(tp * cp, program, timeout=120)
    return [found[row * tp : (row + 1) * tp] for row in range(cp)]


def joined(grid: list[list[Tensor]], layout: am.Layout, *, heads: bool = False) -> Tensor:
    """The whole of what ranks hold. What tp ranks hold alike must be alike, but for the last bits of BLAS."""
    if not heads:
        for row in grid:
            for x in row[1:]:
                torch.testing.assert_close(x, row[0])
    return layout.unshard([torch.cat(row, 1) if heads else row[0] for row in grid], 0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def drawn(
    length: int = 11, key_length: int = 13, *, heads: int = 7, topk: int = 6, dtype: torch.dtype = torch.float64,
    seed: int = 0, **mask: Any,
) -> Problem:  # fmt: skip
    """Slots name keys twice, none (in every way there is), and keys that the mask hides; unused keys hold NaN."""
    g = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    indices = torch.randint(-1, key_length + 1, (length, topk), generator=g, dtype=torch.int32)
    indices.view(-1)[::17] = torch.iinfo(torch.int32).max
    indices.view(-1)[5::19] = torch.iinfo(torch.int32).min
    if length > 3:
        indices[3] = -1  # a row that sees nothing
    sight = am.SparseMask(**mask)
    kv, v, ik = numbers(key_length, WIDTH), numbers(key_length, D_V), numbers(key_length, 5)
    valid = reference.valid_slots(indices, key_length, sight)
    unused = reference.key_counts(indices, valid, key_length).sum(0) == 0
    for x in (kv, v, ik):
        x[unused] = torch.nan
    return Problem(
        numbers(length, heads, WIDTH), kv, v, indices, numbers(heads), numbers(length, 3, 5), ik, numbers(length, 3),
        numbers(length, heads, D_V), numbers(length, heads), numbers(length, topk), sight,
    )  # fmt: skip


MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda n: {},
    "causal": lambda n: {"causal": True, "q_start": 2},
    "strided": lambda n: {"causal": True, "k_stride": 3, "q_positions": torch.arange(n).flip(0) * 3},
    "ranges": lambda n: {
        "k_start": torch.arange(n) // 3, "k_end": torch.arange(n) + 5, "topk_length": torch.arange(n) % 7,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Truth:
    """Everything the family says about a problem, in float64 and plain operations."""

    valid: Tensor
    times: Tensor
    kv: Tensor
    v: Tensor
    ik: Tensor

    @classmethod
    def of(cls, problem: Problem) -> Truth:
        valid = reference.valid_slots(problem.indices, problem.key_length, problem.mask)
        times = reference.key_counts(problem.indices, valid, problem.key_length)
        kv, v, ik = (getattr(problem, name).double().nan_to_num(0.0) for name in ("kv", "v", "ik"))
        return cls(valid, times, kv, v, ik)


def attention_truth(problem: Problem, *, values: bool, sink: bool) -> dict[str, Tensor]:
    """out, lse, dist and all gradients."""
    truth = Truth.of(problem)
    q, sinks = problem.to(torch.float64).leaves("q", "sink")
    kv, v = (x.clone().requires_grad_() for x in (truth.kv, truth.v))
    out, lse = reference.attend(q, kv, v if values else kv[:, :D_V], truth.times, SCALE, sinks if sink else None)
    p = reference.distribution(q, kv, lse.detach().masked_fill(lse == -torch.inf, torch.inf), SCALE).sum(0).detach()
    at = torch.where(truth.valid, problem.indices, 0).long()
    dist = torch.where(truth.valid, torch.nn.functional.pad(p, (0, 1)).gather(1, at), 0.0)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    leaves = {"q": q, "kv": kv, "v": v, "sink": sinks}
    wanted = {name: x for name, x in leaves.items() if (name != "v" or values) and (name != "sink" or sink)}
    loss = (out * problem.d_out.double()).sum() + (finite * problem.d_lse.double()).sum()
    grads = torch.autograd.grad(loss, list(wanted.values()))
    return {"out": out.detach(), "lse": lse.detach(), "dist": dist} | {
        f"d_{name}": grad for name, grad in zip(wanted, grads, strict=True)
    }


def assert_exact(found: Tensor, true: Tensor, tolerance: float = 1e-11) -> None:
    assert found.shape == true.shape
    torch.testing.assert_close(found.double(), true.double(), rtol=tolerance, atol=tolerance)
