"""Backend in plain torch: any device, mask, width and score function, one tile of rows and keys at a time.

Only the scores of one tile are in memory. The forward merges the states of tiles, and the backward computes their
scores again. A row sees one interval of the keys of a block, whose ends ascend from row to row: a tile needs no mask
for the keys that all its rows see, only for those before and after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.core.visibility import Block, Kind, key_hull
from attnmesh.ops.dense.call import Call, Grads, Result, Scores, of_sequences
from attnmesh.ops.dense.cost import strip_rows
from attnmesh.ops.merge import StateAccumulator

_CPU = torch.device("cpu")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROWS = 256  # of a tile
_FEW_ROWS = 128  # smaller blocks of a part are computed together
_SCORES_PER_TILE = 100_000  # a tile costs as much as so many scores
_MIN_ROWS, _MIN_KEYS = 16, 128
_SCORES = {"cpu": 1 << 21}  # of a tile, over all its sequences and heads
_SCORES_ON_A_DEVICE = 1 << 25


class TorchTiles:
    """Backend on torch's matrix products."""

    name = "torch"

    def why_not(self, call: Call) -> str | None:
        """The reason why this backend cannot serve the forward; None if it can."""
        if call.q.is_meta:
            return "tensors on meta have no values"
        return None if call.q.dtype in _DTYPES else f"it takes fp16, bf16, fp32 and fp64, not {call.q.dtype}"

    def backward_why_not(self, call: Call, *, grad_lse: bool = False) -> str | None:
        """The reason why this backend cannot serve the backward, with or without a gradient of lse; None if it can."""
        return self.why_not(call)

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Merges the attention of this call into `total`."""
        with torch.autocast(call.q.device.type, enabled=False):
            for tile, q, k, v in _tiles(call):
                scores, _ = tile.scores(q, k)
                top = scores.amax(-1, keepdim=True)
                top.masked_fill_(top == -torch.inf, 0.0)
                weights = scores.sub_(top).exp_()
                weight = weights.sum(-1, keepdim=True)
                lse = (top + weight.log()).squeeze(-1)  # -inf without a key
                out = (weights @ v).div_(weight.masked_fill_(weight == 0.0, 1.0))
                total.add(State(tile.by_head(out), tile.by_head(lse)), tile.rows.start, tile.first_sequence)

    def prepare(self, call: Call, result: Result) -> None:
        """Does nothing: its blocks do not run on two streams."""

    def backward(self, call: Call, result: Result, grads: Grads) -> None:
        """Adds the gradients of this call to `grads`."""
        dq, dk, dv = (None if grad is None else grad.total() for grad in (grads.q, grads.k, grads.v))
        with torch.autocast(call.q.device.type, enabled=False):
            for tile, q, k, v in _tiles(call):
                grad_out, lse, delta = (tile.of_rows(x) for x in (result.grad_out, result.lse, result.delta))
                scores, slope = tile.scores(q, k)
                lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # such a row has no weights
                weights = scores.sub_(lse.unsqueeze(-1)).exp_()
                if dv is not None:
                    tile.view(dv, tile.keys).add_(weights.mT @ grad_out)
                if dq is None and dk is None:
                    continue
                grad_scores = (grad_out @ v.mT).sub_(delta.unsqueeze(-1)).mul_(weights).mul_(call.scores.scale)
                if slope is not None:
                    grad_scores.mul_(slope)
                if dq is not None:
                    tile.view(dq, tile.rows).add_(tile.by_head(grad_scores @ k))
                if dk is not None:
                    tile.view(dk, tile.keys).add_(grad_scores.mT @ q)


@dataclass(frozen=True)
class _Tile:
    """Some rows against some keys. Rows of a group of query heads are stacked: [b, Hkv, group * rows, ...]."""

    rows: range
    keys: range
    sequences: range | None
    group: int  # query heads per kv head
    score: Scores
    hidden: tuple[tuple[slice, Tensor], ...]  # some keys of the tile, and which of them which row does not see
    distance: Tensor | None  # |q_position - k_position| [rows, keys], if there are ALiBi slopes

    @property
    def first_sequence(self) -> int:
        return 0 if self.sequences is None else self.sequences.start

    def view(self, x: Tensor, rows: range) -> Tensor:
        """Some rows of x [B, H, S, ...] in the sequences of this tile."""
        return of_sequences(x, self.sequences)[:, :, rows.start : rows.stop]

    def of_rows(self, x: Tensor) -> Tensor:
        """The rows of this tile of x [B, Hq, S, ...], stacked, in the accumulation dtype."""
        x = self.view(x, self.rows).to(accumulation_dtype(x.dtype))
        stacked: Tensor = x.unflatten(1, (-1, self.group)).flatten(2, 3)
        return stacked

    def by_head(self, x: Tensor) -> Tensor:
        """Stacked rows as [b, Hq, rows, ...]."""
        apart: Tensor = x.unflatten(2, (self.group, -1)).flatten(1, 2)
        return apart

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores, -inf where a row does not see a key, and the derivative of the softcap, if there is one."""
        scores = (q * self.score.scale) @ k.mT
        slope = None
        if self.score.softcap is not None:
            scores.div_(self.score.softcap).tanh_()
            slope = 1 - scores * scores
            scores.mul_(self.score.softcap)
        by_head = scores.unflatten(2, (self.group, -1))
        if self.score.alibi_slopes is not None:
            slopes = self.score.alibi_slopes.to(scores.dtype).view(-1, self.group, 1, 1)
            by_head.addcmul_(slopes, self.distance, value=-1)
        for keys, hidden in self.hidden:
            by_head[..., keys].masked_fill_(hidden, -torch.inf)
        return scores, slope


def _tiles(call: Call) -> Iterator[tuple[_Tile, Tensor, Tensor, Tensor]]:
    """The tiles with a visible pair, and q, k and v of each in the accumulation dtype."""
    dtype = accumulation_dtype(call.q.dtype)
    call = replace(call, q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))
    blocks = tuple(_joined(call.visibility.blocks))
    if any(block.kind is Kind.PARTIAL for block in blocks):
        call = call.with_unseen_zeroed()
    for block in blocks:
        batch = call.q.shape[0] if block.sequences is None else len(block.sequences)
        heads = max(1, batch * call.q.shape[1])
        most = _SCORES.get(call.q.device.type, _SCORES_ON_A_DEVICE)
        bounds = _Bounds.of(call, block)
        row_step = min(bounds.rows(heads), max(_MIN_ROWS, most // (heads * _MIN_KEYS)))
        for rows in _chunks(block.q, row_step):
            q = None
            for keys in _chunks(bounds.keys(rows), max(_MIN_KEYS, most // (heads * len(rows)))):
                tile = _Tile(
                    rows, keys, block.sequences, call.q.shape[1] // call.k.shape[1], call.scores,
                    tuple(bounds.hidden(rows, keys)), _distance(call, rows, keys, dtype),
                )  # fmt: skip
                q = tile.of_rows(call.q) if q is None else q
                yield tile, q, tile.view(call.k, keys), tile.view(call.v, keys)


def _joined(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks; many small blocks of a part become one PARTIAL block, whose tiles hold several of them."""
    groups: dict[tuple[int, range | None], list[Block]] = {}
    for block in blocks:
        groups.setdefault((block.part, block.sequences), []).append(block)
    for (part, sequences), group in groups.items():
        rows = range(min(block.q.start for block in group), max(block.q.stop for block in group))
        if len(group) > 1 and len(rows) < _FEW_ROWS * len(group):
            yield Block(rows, key_hull(group), Kind.PARTIAL, part, sequences)
        else:
            yield from group


def _chunks(whole: range, step: int) -> Iterator[range]:
    for start in range(whole.start, whole.stop, step):
        yield range(start, min(start + step, whole.stop))


def _distance(call: Call, rows: range, keys: range, dtype: torch.dtype) -> Tensor | None:
    if call.scores.alibi_slopes is None:
        return None
    q, k = call.visibility.positions(call.q.device)
    return (q[rows.start : rows.stop, None] - k[None, keys.start : keys.stop]).abs().to(dtype)


@dataclass(frozen=True)
class _Bounds:
    """The keys first[i] <= j < end[i] that row i of a block sees, on the host and on the device; None: all."""

    block: Block
    host: tuple[Tensor, Tensor] | None
    device: tuple[Tensor, Tensor] | None

    @staticmethod
    def of(call: Call, block: Block) -> _Bounds:
        if block.kind is Kind.FULL:
            return _Bounds(block, None, None)
        return _Bounds(block, *(call.bounds(block, device) for device in (_CPU, call.q.device)))

    def rows(self, heads: int) -> int:
        """The rows of a tile."""
        return _ROWS if self.host is None else strip_rows(*self.host, heads, _SCORES_PER_TILE)

    def keys(self, rows: range) -> range:
        """The keys from the first to the last that some row sees."""
        if self.host is None:
            return self.block.k
        first, end = self.host
        return range(int(first[rows.start - self.block.q.start]), int(end[rows.stop - 1 - self.block.q.start]))

    def hidden(self, rows: range, keys: range) -> Iterator[tuple[slice, Tensor]]:
        """Some of the keys, counted from the first, and which of them a row does not see [rows, n]."""
        if self.host is None or self.device is None:
            return
        top = rows.start - self.block.q.start
        first, end = (bound[top : top + len(rows), None] for bound in self.device)
        begin, stop = int(self.host[0][top + len(rows) - 1]), int(self.host[1][top])  # all rows see what lies between
        at = torch.arange(keys.start, keys.stop, device=first.device)
        left, right = max(begin - keys.start, 0), min(stop, keys.stop) - keys.start
        if left >= right:
            yield slice(None), (at < first) | (at >= end)
            return
        if left:
            yield slice(left), at[:left] < first
        if right < len(keys):
            yield slice(right, None), at[right:] >= end
