"""Backend on the library's Triton kernels: any mask by row bounds, float32 states continued in place, deterministic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.ranges import narrow
from attnmesh.core.state import State
from attnmesh.core.visibility import Block, Kind, Patch, Visibility, key_hull
from attnmesh.ops.dense import cost
from attnmesh.ops.dense.call import Call, Grads, Result, Scores
from attnmesh.ops.launch import Recent, interpreted
from attnmesh.ops.merge import StateAccumulator, stream_of
from attnmesh.utils.optional import installed, require

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Triton:
    """Backend on the kernels in `triton_forward` and `triton_backward`."""

    name = "triton"

    def why_not(self, call: Call) -> str | None:
        """The reason why this backend cannot serve the forward; None if it can."""
        q = call.q
        if q.dtype not in _DTYPES:
            return f"its kernels take fp16, bf16 and fp32, not {q.dtype}"
        for head_dim in (q.shape[3], call.v.shape[3]):
            if not 16 <= head_dim <= 576:
                return f"its kernels take head_dim 16 to 576, not {head_dim}"
        if not installed("triton"):
            return "triton is not installed (pip install 'attnmesh[triton]')"
        if not q.is_cuda and not interpreted():
            return "it needs a GPU (or TRITON_INTERPRET=1 set before triton is imported)"
        return None

    def backward_why_not(self, call: Call, *, grad_lse: bool = False) -> str | None:
        """The reason why this backend cannot serve the backward, with or without a gradient of lse; None if it can."""
        return self.why_not(call)

    def _forward(self, call: Call) -> Callable[..., State]:
        return _module("triton_forward").forward  # type: ignore[no-any-return]

    def _backward(self, call: Call) -> Callable[..., None]:
        return _module("triton_backward").backward  # type: ignore[no-any-return]

    def _gradients(self, call: Call) -> Callable[..., list[Tensor | None]]:
        return _module("triton_backward").gradients  # type: ignore[no-any-return]

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Merges the attention of this call into `total`."""
        # The kernel continues the state it is given, so that partial results never round to bf16. It selects scores of
        # rows without keys away. The last call covers all rows: they are rounded, and have sinks.
        kernel = self._forward(call)
        for launch in _launches(call, zero_rows=False, all_rows=total.last_call):
            q, k, v = launch.inputs(call)
            if total.last_call:
                how = launch.how(call.scores)
                total.complete(kernel(q, k, v, state=total.flush(), out_dtype=q.dtype, sinks=total.sinks, **how))
                continue
            state = total.flush() if launch.rows is None else total.total()
            if state is not None and launch.rows is not None:
                state = State(state.out[:, :, launch.rows], state.lse[:, :, launch.rows])
            new = kernel(q, k, v, state=state, out_dtype=torch.float32, **launch.how(call.scores))
            if state is None:
                total.replace(new)

    def attend(self, call: Call, sinks: Tensor | None) -> State | None:
        """The state of a whole call, with the sinks, in the dtype of q; None if it is more than one launch, or none."""
        launches = _launches(call, zero_rows=False, all_rows=True)
        if len(launches) != 1:
            return None
        inputs, how = launches[0].inputs(call), launches[0].how(call.scores)
        return self._forward(call)(*inputs, state=None, out_dtype=call.q.dtype, sinks=sinks, **how)

    def gradients(self, call: Call, result: Result, needs: tuple[bool, bool, bool]) -> list[Tensor | None] | None:
        """The gradients of q, k and v in a whole call; None if that is not one launch over all rows and keys."""
        launches = _launches(call, zero_rows=True)
        if len(launches) != 1 or launches[0].rows is not None or launches[0].keys is not None:
            return None
        launch = launches[0]
        inputs, how = launch.inputs(call), launch.how(call.scores)
        has_one_part = launch.bounds is None or launch.bounds.parts == 1
        if self.name == "triton" and has_one_part and all(needs) and result.grad_lse is None and cost.is_short(call):
            short = _module("triton_backward").short_gradients
            return short(*inputs, result.out, result.lse, result.grad_out, **how)  # type: ignore[no-any-return]
        return self._gradients(call)(*inputs, result.grad_out, result.lse, result.delta, needs=needs, **how)

    def prepare(self, call: Call, result: Result) -> None:
        """Does nothing: its blocks do not run on two streams."""

    def backward(self, call: Call, result: Result, grads: Grads) -> None:
        """Adds the gradients of this call to `grads`."""
        launches = _launches(call, zero_rows=True)
        wanted = [grad for grad in (grads.q, grads.k, grads.v) if grad is not None]
        # The only call writes its gradients in their dtype; others add to float32, or write the first part of a sum.
        if all(grad.one_call for grad in wanted):
            self._backward_once(call, result, grads, launches)
            return
        kernel = self._backward(call)
        first = len(launches) == 1 and launches[0].keys is None
        for grad, x in ((grads.k, call.k), (grads.v, call.v)):
            first = first and (grad is None or (grad.empty and grad.shape == x.shape))
        for launch in launches:
            kernel(
                *launch.inputs(call), *result.of_rows(launch.rows), **launch.how(call.scores), overwrite_keys=first,
                grad_q=None if grads.q is None else _part(grads.q.total(), launch.rows),
                grad_k=None if grads.k is None else _part(grads.k.total(overwritten=first), launch.keys),
                grad_v=None if grads.v is None else _part(grads.v.total(overwritten=first), launch.keys),
            )  # fmt: skip

    def _backward_once(self, call: Call, result: Result, grads: Grads, launches: Sequence[_Launch]) -> None:
        kernel = self._backward(call)
        every = ("q", grads.q, call.q), ("k", grads.k, call.k), ("v", grads.v, call.v)
        for launch in launches:
            sums = {name: torch.zeros_like(x) for name, grad, x in every if grad is not None}
            parts = {f"grad_{name}": _part(x, launch.rows if name == "q" else launch.keys) for name, x in sums.items()}
            kernel(
                *launch.inputs(call), *result.of_rows(launch.rows), **launch.how(call.scores), **parts,
                overwrite=True, overwrite_keys=False,
            )  # fmt: skip
            for name, grad, _ in every:
                if grad is not None:
                    grad.add(sums[name])


class _Launch(NamedTuple):
    """Arguments of a kernel launch besides the tensors and scores of a call."""

    rows: slice | None  # of the queries; None: all of them
    keys: slice | None
    causal: bool
    bounds: Any  # `Bounds`, or None: rows attend to all keys, or to those up to their own
    positions: tuple[Tensor | None, Tensor | None]  # where the scores depend on them
    even: Any  # the same as `EvenPositions`, where they have that form
    unseen: tuple[Tensor | None, Tensor | None]  # rows and keys that may hold NaN, to be read as 0

    def inputs(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values."""
        q, k, v = call.q, call.k, call.v
        rows, keys = self.unseen
        if rows is not None:
            q = q.masked_fill(rows, 0.0)
        if keys is not None:
            k, v = k.masked_fill(keys, 0.0), v.masked_fill(keys, 0.0)
        if self.rows is not None:
            q = q[:, :, self.rows]
        if self.keys is not None:
            k, v = k[:, :, self.keys], v[:, :, self.keys]
        return q, k, v

    def how(self, scores: Scores) -> dict[str, Any]:
        """The mask and the scores, as both kernels take them."""
        tiles = _module("triton_tiles")
        terms = tiles.PLAIN
        if not scores.plain:
            terms = tiles.ScoreTerms(scores.softcap, scores.alibi_slopes, *self.positions, self.even)
        return {"scale": scores.scale, "causal": self.causal, "bounds": self.bounds, "terms": terms}


_known: Recent[tuple[Visibility, tuple[_Launch, ...]]] = Recent()


def _launches(call: Call, *, zero_rows: bool, all_rows: bool = False) -> tuple[_Launch, ...]:
    """The launches that serve a call. With `all_rows` they include all rows.

    They are kept with the bounds of the mask, for each stream: what one has computed, others have not waited for.
    """
    visibility, q = call.visibility, call.q
    with_positions = call.scores.alibi_slopes is not None
    stream = stream_of(q)
    key = id(visibility), q.device, stream, zero_rows, all_rows, with_positions
    known = _known.get(key)
    if known is not None and known[0] is visibility:
        return known[1]
    found = tuple(_planned(call, zero_rows, all_rows, with_positions))
    if isinstance(visibility, Patch) and stream is not None:
        _known.add(key, (visibility, found))
    return found


def _planned(call: Call, zero_rows: bool, all_rows: bool, with_positions: bool) -> Iterator[_Launch]:
    """A block without a mask as it is; any others as one launch over all rows and the keys that blocks include.

    With `all_rows` a block of some of the rows needs a mask, too. A call with other masks is launched without the NaN
    that unseen keys (and, with `zero_rows`, rows without keys) may hold.
    """
    visibility, device = call.visibility, call.q.device
    blocks = visibility.blocks
    unseen_rows: Tensor | None = None
    unseen_keys: Tensor | None = None
    masked = [block for block in blocks if block.kind is Kind.PARTIAL or block.sequences is not None]
    rows, keys = range(call.q.shape[2]), range(call.k.shape[2])
    if len(blocks) > 1 or masked:
        unseen_rows, unseen_keys = (None if x is None else x[:, None, :, None] for x in visibility.unseen(device))
    if len(blocks) > 1 or masked or (all_rows and any(block.q != rows for block in blocks)):
        blocks = (Block(rows, key_hull(blocks), Kind.PARTIAL),)
    for block in blocks:
        at, to = (
            None if part == whole else slice(part.start, part.stop)
            for part, whole in ((block.q, rows), (block.k, keys))
        )
        bounds = None
        if block.kind is Kind.PARTIAL:
            on_host = None
            if isinstance(visibility, Patch):
                on_host = _bounds_of(visibility, block, at, to, torch.device("cpu"))
            bounds = _module("triton_tiles").Bounds.of(_bounds_of(visibility, block, at, to, device), on_host)
        positions: tuple[Tensor | None, Tensor | None] = (None, None)
        even = None
        if with_positions:
            q_positions, k_positions = visibility.positions(device)
            positions = _last(q_positions, at), _last(k_positions, to)
            if isinstance(visibility, Patch):
                even = _module("triton_tiles").EvenPositions.of(
                    narrow(visibility.q, block.q), narrow(visibility.k, block.k)
                )
        unseen = unseen_rows if zero_rows else None, unseen_keys
        yield _Launch(at, to, block.kind is Kind.CAUSAL, bounds, positions, even, unseen)


def _bounds_of(
    visibility: Visibility, block: Block, rows: slice | None, keys: slice | None, device: torch.device
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The bounds of some rows, within the keys of a block."""
    first, end = visibility.bounds(device)
    if rows is not None or keys is not None:
        first, end = ((_last(x, rows) - block.k.start).clamp_(0, len(block.k)) for x in (first, end))
    return first, end


def _part(x: Tensor, rows: slice | None) -> Tensor:
    return x if rows is None else x[:, :, rows]


def _last(x: Tensor, rows: slice | None) -> Tensor:
    return x if rows is None else x[..., rows]


@cache
def _module(name: str) -> Any:
    return require(f"attnmesh.ops.dense.{name}", extra="triton")
