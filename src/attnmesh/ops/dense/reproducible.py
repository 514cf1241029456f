"""Attention whose bits do not depend on which rows and keys are in a call: on ranks, layouts, chunks or the batch.

Here is what runs on a CPU, and the choice; `reproducible_kernels` runs on a GPU, with the same idea and other tiles.

Rows and keys are cut into tiles that are aligned to their positions, absent ones are hidden zeros, and every product
has the shape of whole tiles. A row reduces its keys in ascending tiles. A tile that it does not see changes nothing:
its largest score stays, and zeros are added. Gradients of keys are sums over leaves of rows in the tree of `core.tree`.

A new order of sums, or another tile, changes bits, and then `VERSION`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.core.tree import Node, TreeSum
from attnmesh.core.visibility import unseen_of
from attnmesh.ops.dense.aligned_tiles import Gradients, Side, sum_of
from attnmesh.ops.dense.call import Call, Grads, Result, Scores
from attnmesh.ops.merge import StateAccumulator
from attnmesh.plan.leaves import leaf_size
from attnmesh.utils.optional import require

ROWS, KEYS = 32, 128
"""Query rows and keys of a tile on a CPU, for every head dim and dtype."""
LEAF = leaf_size("cpu")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_SCORES = 1 << 20  # in memory at a time
_WHOLE: tuple[None] = (None,)


class Reproducible:
    """Backend of `reproducible=True`."""

    name = "reproducible"

    def why_not(self, call: Call) -> str | None:
        """The reason why this backend cannot serve the forward; None if it can."""
        if call.q.is_cuda:
            reason: str | None = _kernels().why_not(call)
            return reason
        if call.q.device.type != "cpu":
            return f"it runs on a CPU and on CUDA, not on {call.q.device}"
        return None if call.q.dtype in _DTYPES else f"it takes fp16, bf16, fp32 and fp64, not {call.q.dtype}"

    def backward_why_not(self, call: Call, *, grad_lse: bool = False) -> str | None:
        """The reason why this backend cannot serve the backward; None if it can."""
        return self.why_not(call)

    def prepare(self, call: Call, result: Result) -> None:
        """Does nothing: its blocks do not run on two streams."""

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Completes `total`, which must have no other part."""
        total.complete(_kernels().forward(call, total.sinks) if call.q.is_cuda else _forward(call, total.sinks))

    def backward(self, call: Call, result: Result, grads: Grads) -> None:
        """Adds the gradients of this call to `grads`."""
        needs = grads.q is not None, grads.k is not None, grads.v is not None
        found = gradients(call, result, needs)
        for grad, part in zip((grads.q, grads.k, grads.v), (found.q, found.k[0], found.v[0]), strict=True):
            if grad is not None and part is not None:
                grad.add(part)


def gradients(
    call: Call, result: Result, needs: Sequence[bool], nodes: Sequence[Node | None] = _WHOLE
) -> Gradients:  # fmt: skip
    """The gradients of a call in the accumulation dtype. A node is of leaves of `leaf_size`; None is all rows."""
    if call.q.is_cuda:
        found: Gradients = _kernels().gradients(call, result, needs, nodes)
        return found
    problem = _Problem.of(call, LEAF)
    q, k, v = problem.tensors()
    out, grad_out = (problem.rows.pack(x) for x in (result.out, result.grad_out))
    delta = (out * grad_out).sum(-1)
    if result.grad_lse is not None:
        delta -= problem.rows.pack_column(result.grad_lse)
    lse = problem.rows.pack_column(result.lse, absent=torch.inf)
    lse.masked_fill_(lse == -torch.inf, torch.inf)  # such a row has no weights
    dq = torch.zeros_like(q) if needs[0] else None
    sums = [[torch.zeros_like(x) if need else None for _ in nodes] for x, need in zip((k, v), needs[1:], strict=True)]
    leaves, group = LEAF // ROWS, q.shape[1] // k.shape[1]

    def by_leaf(weights: Tensor, x: Tensor) -> Tensor:
        """The products of weights [B, Hq, tiles, ROWS, KEYS] with rows of x, summed over a group: [B, Hkv, leaves]."""
        weights, x = (each.unflatten(2, (-1, leaves)).flatten(3, 4) for each in (weights, x))
        products = torch.bmm(weights.flatten(0, 2).mT, x.flatten(0, 2)).view(*x.shape[:3], KEYS, -1)
        heads: tuple[Tensor, ...] = products.unflatten(1, (-1, group)).unbind(2)
        added = heads[0].clone() if group > 1 else heads[0]
        for other in heads[1:]:
            added += other
        return added

    with torch.autocast(q.device.type, enabled=False):
        for at in range(len(problem.keys.tiles)):
            trees: tuple[TreeSum[Tensor], TreeSum[Tensor]] = TreeSum(), TreeSum()
            for rows, hidden in problem.chunks_of(at, leaves):
                tile_k, tile_v = k[:, :, at], v[:, :, at]
                tiles_q, tiles_grad = q[:, :, rows], grad_out[:, :, rows]
                scores, slope = problem.scores(tiles_q, tile_k, rows, at, hidden)
                weights = scores.sub_(lse[:, :, rows, :, None]).exp_()
                grad_scores = None
                if needs[0] or needs[1]:
                    grad_scores = _products(tiles_grad, tile_v.mT).sub_(delta[:, :, rows, :, None]).mul_(weights)
                    if slope is not None:
                        grad_scores.mul_(slope)
                    if dq is not None:
                        dq[:, :, rows] += _products(grad_scores, tile_k)
                numbers = problem.rows.tiles[rows.start : rows.stop : leaves]
                seen = (~hidden).flatten(2).view(hidden.shape[0], len(numbers), -1).any(2).any(0).tolist()
                for tree, factor, x, need in (
                    (trees[0], grad_scores, tiles_q, needs[1]), (trees[1], weights, tiles_grad, needs[2])
                ):  # fmt: skip
                    if need and factor is not None:
                        parts = by_leaf(factor, x)
                        for i, number in enumerate(numbers):
                            if seen[i]:
                                tree.add(number // leaves, parts[:, :, i].clone())
            for tree, per_node in zip(trees, sums, strict=True):
                for node, target in zip(nodes, per_node, strict=True):
                    added = sum_of(tree, node)
                    if target is not None and added is not None:
                        target[:, :, at] = added
    # An absent row adds 0 to a sum, which changes the sign of a zero: -0.0 becomes 0.0.
    return Gradients(
        None if dq is None else problem.rows.unpack(dq.mul_(call.scores.scale), call.q.shape[3]).add_(0.0),
        *(
            [None if x is None else problem.keys.unpack(x, like.shape[3]).add_(0.0) for x in per_node]
            for per_node, like in zip(sums, (call.k, call.v), strict=True)
        ),
    )  # fmt: skip


def sink_gradients(
    call: Call, result: Result, sinks: Tensor, nodes: Sequence[Node | None] = _WHOLE
) -> list[Tensor]:  # fmt: skip
    """What the rows of each node add to the gradient of `sinks` [Hq], in the accumulation dtype: [B, Hq] each."""
    leaf = leaf_size(call.q.device.type)
    rows = Side.of(call.visibility.positions(_CPU)[0], leaf, leaf)
    if call.q.is_cuda:
        delta = rows.pack_column(_kernels().deltas(result))
    else:
        out, grad_out = (rows.pack(x) for x in (result.out, result.grad_out))
        delta = (out * grad_out).sum(-1)
        if result.grad_lse is not None:
            delta -= rows.pack_column(result.grad_lse)
    lse = rows.pack_column(result.lse, absent=torch.inf)
    weights = torch.exp(sinks.detach().to(lse.dtype)[:, None, None] - lse.masked_fill(lse.isinf(), 0.0))
    terms = (-(weights * delta)).masked_fill_(lse.isinf(), 0.0)
    by_leaf = _sum_of_halves(terms) if terms.is_cuda else terms.sum(-1)  # whole leaves: always so many terms
    tree: TreeSum[Tensor] = TreeSum()
    for at, number in enumerate(rows.tiles):
        tree.add(number, by_leaf[:, :, at].clone())
    sums = (sum_of(tree, node) for node in nodes)
    return [by_leaf.new_zeros(by_leaf.shape[:2]) if x is None else x.add_(0.0) for x in sums]


def _sum_of_halves(x: Tensor) -> Tensor:
    """The sum over the last dimension, a power of two: a CUDA kernel's own order of sums depends on all dimensions."""
    while x.shape[-1] > 1:
        left, right = x.chunk(2, -1)
        x = left + right
    return x.squeeze(-1)


def sum_of_sequences(parts: Tensor) -> Tensor:
    """The sum over the sequences of a batch [B, H], one after another."""
    first, *more = parts.unbind(0)
    added = first.clone()
    for other in more:
        added += other
    return added


def _forward(call: Call, sinks: Tensor | None) -> State:
    problem = _Problem.of(call, ROWS)
    q, k, v = problem.tensors()
    out, lse = q.new_zeros(*q.shape[:4], v.shape[4]), q.new_empty(q.shape[:4])
    with torch.autocast(q.device.type, enabled=False):
        for rows in problem.chunks(1):
            tiles = q[:, :, rows]
            # A sink is the first key, of value 0. An infinite one has all the weight.
            top = tiles.new_full(tiles.shape[:4], -torch.inf)
            if sinks is not None:
                first = sinks.detach().to(top.dtype)[:, None, None]
                top = torch.where(first == torch.inf, top, first.expand_as(top))
            sums = (top > -torch.inf).to(top.dtype)
            acc = out[:, :, rows]
            for at, hidden in problem.keys_of(rows):
                scores, _ = problem.scores(tiles, k[:, :, at], rows, at, hidden)
                new_top = torch.maximum(top, scores.amax(-1))
                shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
                decay = top.sub_(shift).exp_()
                weights = scores.sub_(shift.unsqueeze(-1)).exp_()
                sums = sums.mul_(decay).add_(weights.sum(-1))
                acc.mul_(decay.unsqueeze(-1)).add_(_products(weights, v[:, :, at]))
                top = new_top
            lse[:, :, rows] = top + sums.log()
            acc.div_(sums.masked_fill_(sums == 0.0, 1.0).unsqueeze(-1))
    if sinks is not None:
        infinite = (sinks == torch.inf)[:, None, None]
        out.masked_fill_(infinite[..., None], 0.0)
        lse.masked_fill_(infinite, torch.inf)
    return State(problem.rows.unpack(out, call.v.shape[3]).add_(0.0).to(call.q.dtype), problem.rows.unpack_column(lse))


_CPU = torch.device("cpu")


def _kernels() -> Any:
    return require("attnmesh.ops.dense.reproducible_kernels", extra="triton")


@dataclass(frozen=True)
class _Problem:
    """A call whose rows and keys are in aligned tiles."""

    call: Call
    rows: Side
    keys: Side
    bounds: tuple[tuple[Tensor, Tensor], ...]  # slots of the first key and behind the last, [parts, B or 1, slots]
    present: Tensor  # whether a slot has a key
    score: Scores
    _hulls: dict[int, range] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, unit: int) -> _Problem:
        """The tiles of a call, in whole units of rows."""
        q_positions, k_positions = call.visibility.positions(_CPU)
        rows, keys = Side.of(q_positions, ROWS, unit), Side.of(k_positions, KEYS, KEYS)
        slots = len(rows.tiles) * ROWS
        # The slot of every key, and behind the last one of an interval.
        starts = torch.cat([keys.slots, keys.slots.new_full((1,), len(keys.tiles) * KEYS)])
        behind = torch.cat([keys.slots.new_zeros(1), keys.slots + 1])
        found = []
        for turn in getattr(call.visibility, "turns", (call.visibility,)):
            if not call.q.shape[2] or not call.k.shape[2]:
                continue
            first, end = (bound.long() for bound in turn.bounds(_CPU))
            empty = first >= end
            sides = []
            for bound, at in ((first, starts), (end, behind)):
                side = torch.zeros(*bound.shape[:2], slots, dtype=torch.long, device="cpu")
                side[:, :, rows.slots] = at[bound].masked_fill(empty, 0)
                sides.append(side)
            found.append((sides[0], sides[1]))
        present = torch.zeros(len(keys.tiles) * KEYS, dtype=torch.bool, device="cpu")
        present[keys.slots] = True
        return cls(call, rows, keys, tuple(found), present, call.scores)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled q, k and v in tiles. Rows that see no key and keys that no row sees may hold NaN: they become 0."""
        q, k, v = self.rows.pack(self.call.q), self.keys.pack(self.call.k), self.keys.pack(self.call.v)
        unseen = [unseen_of(*bounds, len(self.present)) for bounds in self.bounds]
        if unseen:
            rows, keys = (torch.stack(side).all(0).to(q.device) for side in zip(*unseen, strict=True))
            q.masked_fill_(rows.view(len(rows), 1, -1, ROWS, 1), 0.0)
            for x in (k, v):
                x.masked_fill_(keys.view(len(keys), 1, -1, KEYS, 1), 0.0)
        return q.mul_(self.score.scale), k, v

    def chunks(self, unit: int) -> Iterator[slice]:
        """Tiles of rows, a multiple of `unit` at a time, whose scores with one tile of keys are few."""
        heads = max(1, self.call.q.shape[0] * self.call.q.shape[1])
        step = max(1, _MAX_SCORES // (heads * ROWS * KEYS * unit)) * unit
        for start in range(0, len(self.rows.tiles), step):
            yield slice(start, min(start + step, len(self.rows.tiles)))

    def keys_of(self, rows: slice) -> Iterator[tuple[int, Tensor]]:
        """The tiles of keys that some of these rows see, in ascending order, and what is hidden: [b, tiles, ...]."""
        seen = self._hull(rows)
        for at in range(seen.start // KEYS, -(-seen.stop // KEYS)):
            hidden = self._hidden(rows, at)
            if not bool(hidden.all()):
                yield at, hidden

    def chunks_of(self, at: int, unit: int) -> Iterator[tuple[slice, Tensor]]:
        """The chunks of rows that see some key of a tile, and what is hidden."""
        for rows in self.chunks(unit):
            seen = self._hull(rows)
            if seen.start < (at + 1) * KEYS and at * KEYS < seen.stop:
                hidden = self._hidden(rows, at)
                if not bool(hidden.all()):
                    yield rows, hidden

    def scores(
        self, q: Tensor, k: Tensor, rows: slice, at: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The scores of tiles of scaled rows with a tile of keys, and the derivative of the softcap, if there is one.

        [B, Hq, n, ROWS, KEYS]; -inf where hidden.
        """
        scores, slope = _products(q, k.mT), None
        if self.score.softcap is not None:
            scores.div_(self.score.softcap).tanh_()
            slope = 1 - scores * scores
            scores.mul_(self.score.softcap)
        if self.score.alibi_slopes is not None:
            left = self.rows.positions[rows.start * ROWS : rows.stop * ROWS, None]
            right = self.keys.positions[at * KEYS : (at + 1) * KEYS]
            distance = (left - right).abs().view(1, -1, ROWS, KEYS).to(scores)
            # Not one multiply-add: whether its product is rounded may depend on the place in the tensor.
            scores -= self.score.alibi_slopes.to(scores.dtype).view(-1, 1, 1, 1) * distance
        return scores.masked_fill_(hidden.to(scores.device)[:, None], -torch.inf), slope

    def _hull(self, rows: slice) -> range:
        """The slots of keys from the first to the last that one of these rows sees."""
        known = self._hulls.get(rows.start)
        if known is not None:
            return known
        start, stop = len(self.present), 0
        for bounds in self.bounds:
            first, end = (bound[:, :, rows.start * ROWS : rows.stop * ROWS] for bound in bounds)
            some = first < end
            if bool(some.any()):
                start, stop = min(start, int(first[some].min())), max(stop, int(end[some].max()))
        self._hulls[rows.start] = range(start, max(start, stop))
        return self._hulls[rows.start]

    def _hidden(self, rows: slice, at: int) -> Tensor:
        """Which keys of a tile are hidden from each row: [B or 1, tiles, ROWS, KEYS]."""
        keys = torch.arange(at * KEYS, (at + 1) * KEYS, device="cpu")
        count = rows.stop - rows.start
        seen: Tensor | None = None
        for bounds in self.bounds:
            first, end = (bound[:, :, rows.start * ROWS : rows.stop * ROWS, None] for bound in bounds)
            for part in range(first.shape[0]):
                some = (first[part] <= keys) & (keys < end[part])
                seen = some if seen is None else seen | some
        if seen is None:
            return torch.ones(1, count, ROWS, KEYS, dtype=torch.bool, device="cpu")
        hidden = (seen & self.present[keys]).logical_not_()
        return hidden.view(-1, count, ROWS, KEYS)


def _products(tiles: Tensor, factor: Tensor) -> Tensor:
    """The products of tiles [B, Hq, n, M, K] with one matrix [B, Hkv, K, N] for each kv head: [B, Hq, n, M, N].

    Always products of M x K with K x N, as many as there are tiles: torch's batched product computes each of them
    alike, whatever their number, and does not copy the matrix.
    """
    batch, heads, count, rows, width = tiles.shape
    kv_heads, columns = factor.shape[1], factor.shape[3]
    result = tiles.new_empty(batch, heads, count, rows, columns)
    group = heads // kv_heads
    for sequence in range(batch):
        for head in range(kv_heads):
            mine = slice(head * group, (head + 1) * group)
            matrix = factor[sequence, head].expand(group * count, width, columns)
            products = torch.bmm(tiles[sequence, mine].reshape(-1, rows, width), matrix)
            result[sequence, mine] = products.view(group, count, rows, columns)
    return result
