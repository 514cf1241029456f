"""The kernels of reproducible=True on a GPU: the order of sums depends on positions, not on the rows of a launch.

The forward and the gradient of the queries are sums over keys. Kernels reduce the keys of a row in ascending tiles,
which begin at multiples of the tile. Keys whose positions are not consecutive from a multiple of `KEYS` on are copied
to where they lie between zeros, so that a tile begins at the same position in every call. A row is alone in its sums:
it may lie anywhere in a launch.

The gradients of keys and values are sums over rows: one launch for each leaf of rows, in ascending heads and ascending
tiles of `ROWS`, and a tree over leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.core.tree import Node, TreeSum
from attnmesh.core.visibility import Visibility, unseen_of
from attnmesh.ops.dense import triton_backward, triton_forward
from attnmesh.ops.dense.aligned_tiles import Gradients, Side, sum_of
from attnmesh.ops.dense.call import Call, Result, Scores, loadable
from attnmesh.ops.dense.gluon import Gluon
from attnmesh.ops.dense.triton import Triton
from attnmesh.ops.dense.triton_tiles import PLAIN, Bounds, ScoreTerms
from attnmesh.ops.launch import Recent
from attnmesh.plan.leaves import leaf_size

KEYS, ROWS = 128, 64
"""Multiples of the tiles of all kernels: of keys in sums over keys, of rows in sums over rows."""
_CPU = torch.device("cpu")
_TRITON, _GLUON = Triton(), Gluon()


def why_not(call: Call) -> str | None:
    """The reason why the kernels cannot serve a call; None if they can."""
    reason = _TRITON.why_not(call)
    if reason is None and not _plan(call).whole_intervals:
        reason = "on a GPU, k_positions must have every key from the first to the last that a row attends to"
    return reason


def forward(call: Call, sinks: Tensor | None) -> State:
    """The state of a call, with the sinks, in the dtype of q."""
    plan, scores = _plan(call), call.scores
    how: dict[str, Any] = {"terms": plan.terms(scores), "sinks": sinks, "out_dtype": call.q.dtype}
    kernel: Callable[..., State] = triton_forward.forward
    if _has_gluon(_GLUON.why_not(call), call):
        from attnmesh.ops.dense import gluon_forward

        kernel = gluon_forward.forward
    else:
        how["ordered"] = True
    k, v = plan.keys_of(call.k), plan.keys_of(call.v)
    state = kernel(call.q, k, v, scale=scores.scale, causal=False, bounds=plan.bounds, state=None, **how)
    return State(state.out.add_(0.0), state.lse)  # a tile of hidden keys may make -0.0 of 0.0


def _has_gluon(why_not: str | None, call: Call) -> bool:
    """Whether a kernel in Gluon serves the call. Slopes and latents are left to Triton.

    With slopes Gluon rounds distances from the first row or key of a tile, of which a call may have any.
    """
    return why_not is None and call.scores.alibi_slopes is None and call.q.shape[3] <= 256


def gradients(call: Call, result: Result, needs: Sequence[bool], nodes: Sequence[Node | None]) -> Gradients:
    """As `reproducible.gradients`."""
    plan = _plan(call)
    given = _Given(plan.rows_of(call.q), plan.keys_of(call.k), plan.keys_of(call.v), call, result, plan)
    dq = given.query_gradient() if needs[0] else None
    if not (needs[1] or needs[2]):
        return Gradients(dq, [None] * len(nodes), [None] * len(nodes))
    # Both, even if only one is needed: kernels of one alone are others.
    tree: TreeSum[_KeySums] = TreeSum()
    for number, sums in given.key_gradients():
        tree.add(number, sums)
    dk: list[Tensor | None] = []
    dv: list[Tensor | None] = []
    for node in nodes:
        sums = sum_of(tree, node) or _KeySums(call.k[:, :, :0].float(), call.v[:, :, :0].float(), 0)
        for grads, x, need in zip((dk, dv), (sums.k, sums.v), needs[1:], strict=True):
            grads.append(plan.to_keys(x, sums.begin) if need else None)
    return Gradients(dq, dk, dv)


def deltas(result: Result) -> Tensor:
    """`rowsum(out * grad_out) - grad_lse` [B, H, S], the row term, in one order of sums for any shape."""
    out, grad_out = _flat(result.out), _flat(result.grad_out)
    grad_lse = None
    if result.grad_lse is not None:
        grad_lse = torch.as_strided(result.grad_lse.contiguous(), (1, 1, out.shape[2]), (0, 0, 1))
    return triton_backward.delta(out, grad_out, grad_lse).view(result.out.shape[:3])


def _flat(x: Tensor) -> Tensor:
    """All rows one after another: the strides that the compiler knows are the same for any shape."""
    x = x.contiguous()
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    return torch.as_strided(x, (1, 1, x.shape[:3].numel(), x.shape[3]), (0, 0, x.shape[3], 1))


class _KeySums(NamedTuple):
    """What some rows add to the gradients of consecutive keys and values, in tiles."""

    k: Tensor
    v: Tensor
    begin: int

    def add_(self, other: _KeySums) -> _KeySums:
        """The sum with the gradients of other keys, which may overlap with these."""
        small, large = sorted((self, other), key=lambda sums: sums.k.shape[2])
        begin, end = min(self.begin, other.begin), max(self.end, other.end)
        if begin < large.begin or end > large.end:
            k, v = (x.new_zeros(*x.shape[:2], end - begin, x.shape[3]) for x in (large.k, large.v))
            large = _KeySums(k, v, begin).add_(large)
        at = slice(small.begin - begin, small.end - begin)
        large.k[:, :, at] += small.k
        large.v[:, :, at] += small.v
        return large

    @property
    def end(self) -> int:
        """Behind the last key."""
        return self.begin + self.k.shape[2]


class _Leaf(NamedTuple):
    """The rows of a leaf, in tiles, and the keys that some of them see."""

    number: int
    rows: slice
    keys: range
    bounds: Bounds


@dataclass(frozen=True)
class _Plan:
    """What calls with a visibility have in common. Keys are in tiles; `span` has all that some row sees."""

    rows: Side
    keys: Side
    span: range
    whole_intervals: bool  # no key is absent between two keys of an interval that a row sees
    bounds: Bounds  # of the given rows; keys count from the beginning of the span
    first: Tensor  # the same, and the end of each interval, for the rows in tiles, on the host
    end: Tensor
    unseen: tuple[Tensor | None, Tensor | None]  # rows, and keys of the span, which may hold NaN
    device: torch.device

    @classmethod
    def of(cls, visibility: Visibility, device: torch.device) -> _Plan:
        """The plan of a visibility, whose bounds are read on the host."""
        q_positions, k_positions = visibility.positions(_CPU)
        rows, keys = Side.of(q_positions, ROWS, ROWS), Side.of(k_positions, KEYS, KEYS)
        first, end = (
            torch.cat(bounds).long()
            for bounds in zip(*(turn.bounds(_CPU) for turn in getattr(visibility, "turns", (visibility,))), strict=True)
        )
        some = first < end
        count = (end - first)[some]
        if not keys.dense:
            first = torch.cat([keys.slots, keys.slots.new_full((1,), keys.count)])[first]
            end = torch.cat([keys.slots.new_zeros(1), keys.slots + 1])[end]
        whole = bool(((end - first)[some] == count).all())
        begin, stop = 0, 0
        if len(count):
            begin, stop = int(first[some].min()) // KEYS * KEYS, int(end[some].max())
        first, end = ((x - begin).clamp_(0, stop - begin) for x in (first, end))
        no_keys, not_seen = unseen_of(first, end, stop - begin)
        unseen = tuple(x[:, None, :, None].to(device) if bool(x.any()) else None for x in (no_keys, not_seen))
        bounds = _bounds(first, end, device)
        first, end = (x.new_zeros(*x.shape[:2], rows.count).index_copy_(2, rows.slots, x) for x in (first, end))
        return cls(rows, keys, range(begin, stop), whole, bounds, first, end, (unseen[0], unseen[1]), device)

    def rows_of(self, x: Tensor) -> Tensor:
        """Queries, with 0 in rows that see no key."""
        return x if self.unseen[0] is None else x.masked_fill(self.unseen[0], 0.0)

    def keys_of(self, x: Tensor) -> Tensor:
        """The keys, or values, of the span in tiles, with 0 in the ones that no row sees."""
        x = self.keys.packed(x)[:, :, self.span.start : self.span.stop]
        return x if self.unseen[1] is None else x.masked_fill(self.unseen[1], 0.0)

    def to_keys(self, x: Tensor, begin: int) -> Tensor:
        """Gradients of keys of the span, from its key `begin` on, as gradients of all keys."""
        if x.shape[2] < self.keys.count:
            at = self.span.start + begin
            whole = x.new_zeros(*x.shape[:2], self.keys.count, x.shape[3])
            whole[:, :, at : at + x.shape[2]] = x
            x = whole
        return self.keys.unpacked(x)

    def terms(self, scores: Scores, rows: slice | None = None, keys: range | None = None) -> ScoreTerms:
        """The terms of the scores: of the given rows and the span, or of some rows in tiles and some keys of it."""
        if scores.plain:
            return PLAIN
        if scores.alibi_slopes is None:
            return ScoreTerms(scores.softcap)
        at = self._positions[0] if rows is None else self._positions[1][rows]
        to = self._positions[2] if keys is None else self._positions[2][keys.start : keys.stop]
        return ScoreTerms(scores.softcap, scores.alibi_slopes, at.contiguous(), to.contiguous())

    @cached_property
    def _positions(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys = self.rows.positions, self.keys.positions[self.span.start : self.span.stop]
        given, in_tiles, of_keys = (x.to(self.device, torch.int32) for x in (rows[self.rows.slots], rows, keys))
        return given, in_tiles, of_keys

    @cached_property
    def leaves(self) -> tuple[_Leaf, ...]:
        """The leaves of rows that see some key, in ascending order."""
        tiles = torch.tensor(self.rows.tiles, dtype=torch.long, device="cpu")
        numbers, counts = torch.unique_consecutive(tiles // (leaf_size(self.device.type) // ROWS), return_counts=True)
        found, at = [], 0
        for number, count in zip(numbers.tolist(), (counts * ROWS).tolist(), strict=True):
            rows = slice(at, min(at + count, self.rows.count))
            at += count
            first, end = self.first[:, :, rows], self.end[:, :, rows]
            some = first < end
            if bool(some.any()):
                keys = range(int(first[some].min()) // KEYS * KEYS, int(end[some].max()))
                first, end = ((x - keys.start).clamp(0, len(keys)) for x in (first, end))
                found.append(_Leaf(number, rows, keys, _bounds(first, end, self.device)))
        return tuple(found)


@dataclass(frozen=True)
class _Given:
    """The inputs of a backward: rows as they are, and keys of the span."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Call
    result: Result
    plan: _Plan

    @cached_property
    def _delta(self) -> Tensor:
        return deltas(self.result)

    def query_gradient(self) -> Tensor:
        """The gradient of the queries, float32."""
        grad_q = torch.empty_like(self.q, dtype=torch.float32)
        scores = self.call.scores
        triton_backward.backward(
            self.q, self.k, self.v, self.result.grad_out, self.result.lse, self._delta,
            scale=scores.scale, causal=False, bounds=self.plan.bounds, grad_q=grad_q, overwrite=True,
            terms=self.plan.terms(scores), ordered=True,
        )  # fmt: skip
        return grad_q.add_(0.0)

    def key_gradients(self) -> Iterator[tuple[int, _KeySums]]:
        """What each leaf adds to the gradients of keys and values, in ascending order."""
        plan, scores, side = self.plan, self.call.scores, self.plan.rows
        q, grad_out = (loadable(side.packed(x)) for x in (self.q, self.result.grad_out))
        k, v = loadable(self.k), loadable(self.v)
        lse, delta = side.packed(self.result.lse, -torch.inf), side.packed(self._delta)
        kernel: Callable[..., None] = triton_backward.backward
        how: dict[str, Any] = {"ordered": True}
        if _has_gluon(_GLUON.backward_why_not(self.call), self.call):
            from attnmesh.ops.dense import gluon_backward

            kernel = gluon_backward.backward
            tiles = gluon_backward.BackwardTiles.pick(q, v)
            how = {"tiles": tiles._replace(heads=None, paired=True)}  # not by the lengths
        for number, rows, keys, bounds in plan.leaves:
            k_rows, v_rows = (x[:, :, keys.start : keys.stop] for x in (k, v))
            grads = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (k_rows, v_rows)]
            kernel(
                q[:, :, rows], k_rows, v_rows, grad_out[:, :, rows], lse[:, :, rows], delta[:, :, rows],
                scale=scores.scale, causal=False, bounds=bounds, grad_k=grads[0], grad_v=grads[1], overwrite_keys=True,
                terms=plan.terms(scores, rows, keys), **how,
            )  # fmt: skip
            if scores.scale < 0:
                grads[0].add_(0.0)  # 0 times it is -0.0, which no sum of others would be
            yield number, _KeySums(grads[0], grads[1], keys.start)


_known: Recent[tuple[Visibility, _Plan]] = Recent(16)  # a forward, its backward, and the next layers


def _plan(call: Call) -> _Plan:
    visibility, device = call.visibility, call.q.device
    key = id(visibility), device
    known = _known.get(key)
    if known is not None and known[0] is visibility:
        return known[1]
    return _known.add(key, (visibility, _Plan.of(visibility, device)))[1]


def _bounds(first: Tensor, end: Tensor, device: torch.device) -> Bounds:
    return Bounds.of((first.to(device, torch.int32).contiguous(), end.to(device, torch.int32).contiguous()))
