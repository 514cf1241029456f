"""Recurrent layers over ranks: local segments, a scan over the ranges of all ranks, and the local pass.

Autograd differentiates the local computation; the exchanges between ranks are functions with backwards of their own.
Every rank takes part in every exchange of the backward, whether it holds positions or not: its output depends on each.

The first exchange is posted by one function (`_Give`) and waited for by another one (`_Take`). What a rank computes
between them needs no incoming state, and its backward runs while the gradients of incoming states travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm, Pending, propagate_failure
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import Documents
from attnmesh.core.ranges import Ranges, rows_between
from attnmesh.core.segment import Segment, forward_scan, reversed_scan, transition_gradient
from attnmesh.ops.recurrent.api import incoming_state
from attnmesh.ops.recurrent.kernels import KernelChunks
from attnmesh.ops.recurrent.layer import Chunks, Recurrence, RecurrentLayer, document_ages
from attnmesh.ops.recurrent.layers import ShortConvolution, last_inputs
from attnmesh.plan.recurrent import HaloPlan, ScanPlan, SegmentSizes, halo_plan, scan_plan


class RecurrentCall(NamedTuple):
    """A call whose arguments have been checked."""

    layer: RecurrentLayer  # with this rank's shards
    length: int  # of the whole sequence
    documents: tuple[Documents, ...] | None
    final: bool
    dtype: torch.dtype  # of the output
    needs_grad: bool
    kernels: bool  # GPU kernels compute the layer


def run_recurrent(
    call: RecurrentCall, initial_state: Tensor | None, layout: Layout, comm: Comm
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """This rank's outputs, and the final state if it is wanted."""
    with torch.autocast(getattr(call.layer, call.layer._OUTPUT).device.type, enabled=False):
        state = incoming_state(call.layer, initial_state)
        inputs = call.layer if call.kernels else call.layer._in_compute_dtype()
        out, final = _run(call._replace(layer=inputs), state, layout, comm)
    return out.to(call.dtype), final


def _run(call: RecurrentCall, state: Tensor, layout: Layout, comm: Comm) -> tuple[Tensor, Tensor]:
    layer = call.layer
    if not call.length:
        return getattr(layer, layer._OUTPUT), state
    if comm.world == 1:
        return layer._run(state, document_ages(call.documents, range(call.length), state.device), call.kernels)
    # A tensor that requires a gradient where some input does: then the exchanges have a backward on every rank.
    anchor = state.new_empty(0, requires_grad=call.needs_grad)
    if isinstance(layer, ShortConvolution):
        return _convolution(call, layer, state, anchor, layout, comm)
    assert isinstance(layer, Recurrence)
    return _recurrence(call, layer, state, anchor, layout, comm)


def segment_sizes(layer: Recurrence) -> SegmentSizes:
    """The bytes of a segment per head."""
    heads, itemsize = layer.state_shape[1], layer.compute_dtype.itemsize
    transition, state = (_size(shape) // max(heads, 1) for shape in (layer._transition_shape(), layer.state_shape))
    return SegmentSizes(transition * itemsize, state * itemsize)


def _recurrence(
    call: RecurrentCall, layer: Recurrence, state: Tensor, anchor: Tensor, layout: Layout, comm: Comm
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads, columns = state.shape[1], state.shape[3]
    plan = scan_plan(layout, call.length, comm.world, heads, segment_sizes(layer), columns, call.final)
    held, outs, transitions, updates = plan.held(comm.rank), [], [], []
    ends = list(accumulate(len(plan.segments[number].positions) for number in held))

    def chunks(i: int) -> Chunks:
        positions = plan.segments[held[i]].positions
        ages = document_ages(call.documents, positions, state.device)
        return layer.rows(range(ends[i] - len(positions), ends[i]))._chunks(ages, call.kernels)

    if call.kernels:
        ranges = [part for part in map(chunks, range(len(held))) if isinstance(part, KernelChunks)]
        tensors = [x for part in ranges for x in part.tensors]
        exchange = _Exchange(plan, comm, layer._transition_shape(), tuple(state.shape))
        with _computing("recurrent", comm, state):
            final, *outs = _KernelScan.apply(ranges, exchange, anchor, state, *tensors)  # type: ignore[no-untyped-call]
            return _output(layer, outs, final), final

    scanned = range(len(plan.out(comm.rank)))  # all ranges, or all but the last of the sequence
    parts = []
    with _computing("segments", comm, state):
        for i in scanned:
            part = chunks(i)
            if held[i] == 0:
                out, state_after = part.run(state)
                outs.append(out)
                updates.append(state_after)
            else:
                whole = part.total()
                parts.append(part)
                transitions.append(whole.transition)
                updates.append(whole.update)
        transition = torch.stack(transitions) if transitions else state.new_empty(0, *layer._transition_shape())
        update = torch.stack(updates) if updates else state.new_empty(0, *state.shape)
    exchange = _Exchange(plan, comm, tuple(transition.shape[1:]), tuple(state.shape))
    token = _Give.apply(transition, update, anchor, exchange)  # type: ignore[no-untyped-call]
    with _computing("last range", comm, state):
        parts += [chunks(i) for i in range(len(scanned), len(held))]
    incoming, final = _Take.apply(token, exchange)  # type: ignore[no-untyped-call]
    with _computing("outputs", comm, state):
        if parts and len(parts) > len(incoming):  # one range is the whole sequence
            outs.append(parts[0].run(state)[0])
        outs += [part.run(into)[0] for part, into in zip(parts[len(parts) - len(incoming) :], incoming, strict=True)]
        return _output(layer, outs, incoming, state), final


def _computing(name: str, comm: Comm, like: Tensor) -> AbstractContextManager[None]:
    """Around work of this rank, which is recorded if the rank is."""
    return nullcontext() if comm.recorder is None else comm.recorder.span("compute", name, like.device)


def _convolution(
    call: RecurrentCall, layer: ShortConvolution, state: Tensor, anchor: Tensor, layout: Layout, comm: Comm
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = layer.weight.shape[1]
    plan = halo_plan(layout, call.length, comm.world, width - 1, call.final)
    halos = _Halos.apply(layer.x, anchor, plan, comm, call.dtype)  # type: ignore[no-untyped-call]

    def before(position: int) -> Tensor:
        """The W - 1 inputs before a position."""
        known = _columns(halos, plan.needed[comm.rank], range(max(0, position - width + 1), position))
        return torch.cat([state[:, :, min(position, width - 1) :], known], 2)

    outs, at = [], 0
    with _computing("outputs", comm, state):
        for run in plan.held[comm.rank]:
            ages = document_ages(call.documents, run, state.device)
            outs.append(layer.rows(range(at, at + len(run)))._convolve(before(run.start), ages))
            at += len(run)
    final = state
    if call.final:
        ages = document_ages(call.documents, range(call.length - 1, call.length), state.device)
        final = last_inputs(before(call.length), width, None if ages is None else ages[:, 0])
    return _output(layer, outs, halos, state), _tied(final, halos, state)


def _columns(x: Tensor, ranges: Ranges, wanted: range) -> Tensor:
    """The columns of some consecutive positions, of a tensor [..., positions] with the positions of `ranges`."""
    at = 0
    for run in ranges:
        if wanted and wanted.start in run:
            rows = rows_between(run, wanted.start, wanted.stop)
            return x[..., at + rows.start : at + rows.stop]
        at += len(run)
    return x[..., :0]


def _output(layer: RecurrentLayer, outs: list[Tensor], *others: Tensor) -> Tensor:
    """The outputs of this rank's ranges. They depend on what ranks exchanged, and all inputs get a gradient."""
    if outs:
        return _tied(torch.cat(outs, 2), *others)
    return _tied(getattr(layer, layer._OUTPUT), *others, *layer._tensors().values())


def _tied(x: Tensor, *others: Tensor) -> Tensor:
    """`x`, whose backward gives a gradient to the others, too: 0 where `x` does not depend on them."""
    tied: Tensor = _Tied.apply(x, *others)  # type: ignore[no-untyped-call]
    return tied


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [other.shape for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros(shape) for shape in ctx.shapes)


class _Exchange:
    """The exchanges of a call, and what is in flight between `_Give` and `_Take` or back."""

    def __init__(self, plan: ScanPlan, comm: Comm, transition: tuple[int, ...], state: tuple[int, ...]) -> None:
        self.plan, self.comm, self.call = plan, comm, comm.calls
        batch, heads, own = state[0], state[1] * plan.parts, len(plan.heads[comm.rank])
        columns = (state[2], state[3] // plan.parts)
        self.whole_transition = transition
        self.state, self.transition = (batch, heads, *columns), (batch, own, *transition[2:])
        self.own_state = (batch, own, *columns)
        self.posted: _Posted | None = None
        self.saved: tuple[Tensor, Tensor] | None = None  # from `_Take` to `_Give`, in a backward

    def post(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> None:
        """Begin an all-to-all."""
        own, world = self.comm.rank, self.comm.world
        received = [part if i == own else part.new_empty(shapes[i]) for i, part in enumerate(parts)]
        others = [(own + step) % world for step in range(1, world)]
        pending = self.comm.exchange([(parts[i], i) for i in others], [(received[i], i) for i in reversed(others)])
        self.posted = _Posted(pending, received, parts)

    def wait(self) -> list[Tensor]:
        """What the all-to-all has brought."""
        posted, self.posted = self.posted, None
        assert posted is not None
        posted.pending.wait()
        return posted.received

    def back(self, parts: Sequence[Tensor], count: int) -> Tensor:
        """The second all-to-all: `count` states of this rank's, from the ranks that scanned their heads."""
        shapes = [(count, self.state[0], len(heads), *self.state[2:]) for heads in self.plan.heads]
        return torch.cat(self.comm.all_to_all(parts, shapes), 2)


class _Posted(NamedTuple):
    pending: Pending
    received: list[Tensor]
    sent: Sequence[Tensor]


class _Give(torch.autograd.Function):
    """Posts the segments of this rank's ranges in `plan.scanned`; the result is for `_Take`.

    The first range of all has no transition, and its outgoing state as the update.
    """

    @staticmethod
    def forward(ctx: Any, transition: Tensor, update: Tensor, anchor: Tensor, exchange: _Exchange) -> Tensor:
        with propagate_failure(exchange.comm):
            _post_segments(transition, update, exchange)
        ctx.save_for_backward(transition)
        ctx.exchange = exchange
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        (transition,), (incoming, scanned) = ctx.saved_tensors, exchange.saved
        exchange.saved = None
        by_update = _outgoing_gradients(scanned, exchange)
        later = by_update[len(by_update) - len(transition) :]  # without that of the first range of all
        return transition_gradient(transition, incoming[: len(transition)], later), by_update, None, None


class _Take(torch.autograd.Function):
    """The incoming states of this rank's ranges but the first of all, [ranges, B, H, K, V], and the final state.

    The final state is empty if it is not wanted.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> tuple[Tensor, Tensor]:
        with propagate_failure(exchange.comm):
            incoming, final, scanned = _incoming(exchange)
        ctx.save_for_backward(incoming, scanned)
        ctx.exchange = exchange
        return incoming, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_incoming: Tensor, by_final: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        exchange.saved = ctx.saved_tensors
        _post_gradients(by_incoming, by_final, exchange)
        return by_incoming.new_zeros(0), None


class _KernelScan(torch.autograd.Function):
    """The final state, empty if it is not wanted, and the outputs of this rank's ranges, computed by kernels.

    The backward computes the gradients of the inputs once, when the scan has brought the gradients of the states after
    the ranges. What the scan needs for that, the gradients of the states before them if nothing read the states after
    them, takes one pass. Gradients by way of the segments would take all passes twice.
    """

    @staticmethod
    def forward(
        ctx: Any, ranges: list[KernelChunks], exchange: _Exchange, anchor: Tensor, state: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        plan, comm = exchange.plan, exchange.comm
        held = plan.held(comm.rank)
        width = len(tensors) // max(1, len(ranges))
        parts = [part.of(tensors[i * width : (i + 1) * width]) for i, part in enumerate(ranges)]
        outs, transitions, updates = [], [], []
        for number, part in zip(held, parts, strict=True):
            if number == 0:
                out, state_after = part.forward(state)
                outs.append(out)
                if 0 in plan.scanned:
                    updates.append(state_after)
            elif number in plan.scanned:
                whole = part.total()
                transitions.append(whole.transition)
                updates.append(whole.update)
        update = torch.stack(updates) if updates else state.new_empty(0, *state.shape)
        transition = torch.stack(transitions) if transitions else state.new_empty(0, *exchange.whole_transition)
        with propagate_failure(comm):
            _post_segments(transition, update, exchange)
            incoming, final, scanned = _incoming(exchange)
        outs += [part.forward(into)[0] for part, into in zip(parts[len(outs) :], incoming, strict=True)]
        ctx.save_for_backward(state, incoming, scanned, *tensors)
        ctx.ranges, ctx.exchange = ranges, exchange
        return final, *outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_final: Tensor, *by_outs: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        plan, comm = exchange.plan, exchange.comm
        state, incoming, scanned, *tensors = ctx.saved_tensors
        held, width = plan.held(comm.rank), len(tensors) // max(1, len(ctx.ranges))
        parts = [part.of(tensors[i * width : (i + 1) * width]) for i, part in enumerate(ctx.ranges)]
        states = [*([state] if 0 in held else []), *incoming]
        read = [part.state_gradient(by_out) for n, part, by_out in zip(held, parts, by_outs, strict=True) if n]
        by_incoming = torch.stack(read) if read else incoming
        _post_gradients(by_incoming, by_final, exchange)
        found = {}
        for number, part, into, by_out in zip(held, parts, states, by_outs, strict=True):
            if number not in plan.scanned:  # while gradients travel
                found[number] = part.backward(into, by_out, None)
        by_update = iter(_outgoing_gradients(scanned, exchange))
        for number, part, into, by_out in zip(held, parts, states, by_outs, strict=True):
            if number in plan.scanned:
                found[number] = part.backward(into, by_out, next(by_update))
        grads = [grad for number in held for grad in found[number][:-1]]
        by_state = found[0][-1] if 0 in found else torch.zeros_like(state)
        return None, None, None, by_state, *grads


def _post_segments(transition: Tensor, update: Tensor, exchange: _Exchange) -> None:
    """Post the segments of this rank's ranges to the ranks that scan their heads."""
    plan, update = exchange.plan, _in_parts(update, exchange.plan.parts)
    mine = plan.out(exchange.comm.rank)
    first = bool(mine) and mine[0] == 0
    made: dict[range, Tensor] = {}
    for heads in plan.heads:
        if heads not in made:
            sent = [
                x.flatten()
                for i in range(len(mine))
                for x in ([] if first and i == 0 else [_of_parts(transition[i - first], heads, plan.parts)])
                + [update[i][:, heads.start : heads.stop]]
            ]
            made[heads] = torch.cat(sent) if sent else update.new_empty(0)
    sizes = [sum(map(_size, _shapes(source, exchange))) for source in range(plan.world)]
    exchange.post([made[heads] for heads in plan.heads], [(size,) for size in sizes])


def _shapes(source: int, exchange: _Exchange) -> list[tuple[int, ...]]:
    """The shapes of what a rank sends of its segments, in order."""
    state, transition = exchange.own_state, exchange.transition
    return [shape for n in exchange.plan.out(source) for shape in ((transition, state) if n else (state,))]


def _incoming(exchange: _Exchange) -> tuple[Tensor, Tensor, Tensor]:
    """The incoming states of this rank's ranges, the final state or nothing, and the transitions that it scanned."""
    (states, scanned), plan = _states(exchange), exchange.plan
    every = _whole(states, plan.parts)
    return every[: len(every) - plan.final], every[-1] if plan.final else every.new_empty(0), scanned


def _states(exchange: _Exchange) -> tuple[Tensor, Tensor]:
    """The incoming states of this rank's ranges and the final one, in parts, and the transitions that it scanned."""
    plan, rank = exchange.plan, exchange.comm.rank
    received, count = exchange.wait(), len(plan.scanned)
    transitions = received[rank].new_empty(max(0, count - 1), *exchange.transition)
    updates = received[rank].new_empty(count, *exchange.own_state)
    for source in range(plan.world):
        pieces = iter(_split(received[source], _shapes(source, exchange)))
        for n in plan.out(source):
            if n:
                transitions[n - 1] = next(pieces)
            updates[n] = next(pieces)
    del received  # before the states take the same memory
    states = forward_scan(Segment(transitions, updates[1:]), updates[0]) if count else updates

    # states[n] comes out of segment n, and into segment n + 1.
    wanted = [[n - 1 for n in plan.into(target)] + [-1] * plan.final for target in range(plan.world)]
    if plan.gathered:
        return _stacked(states, wanted[rank]), transitions
    return exchange.back([_stacked(states, numbers) for numbers in wanted], len(wanted[rank])), transitions


def _post_gradients(by_incoming: Tensor, by_final: Tensor, exchange: _Exchange) -> None:
    """Post the gradients of incoming states, and of the final state, to the ranks that scan their heads."""
    plan, comm = exchange.plan, exchange.comm
    comm.note("backward of recurrent", exchange.call)
    grads = _in_parts(torch.cat([by_incoming, by_final[None]]) if plan.final else by_incoming, plan.parts)
    with propagate_failure(comm):
        parts = [grads[:, :, heads.start : heads.stop].contiguous() for heads in plan.heads]
        counts = [len(plan.into(source)) + plan.final for source in range(plan.world)]
        exchange.post(parts, [(count, *exchange.own_state) for count in counts])


def _outgoing_gradients(transitions: Tensor, exchange: _Exchange) -> Tensor:
    """The gradients of the states that go out of this rank's ranges in `plan.scanned`."""
    plan, rank = exchange.plan, exchange.comm.rank
    with propagate_failure(exchange.comm):
        received, count = exchange.wait(), len(plan.scanned)
        read = received[rank].new_zeros(count, *exchange.own_state)
        for source, part in enumerate(received):
            for at, n in enumerate(plan.into(source)):
                read[n - 1] += part[at]
            if plan.final:
                read[-1] += part[-1]
        after = reversed_scan(transitions, read) if count else read
        out = [plan.out(target) for target in range(plan.world)]
        if plan.gathered:
            return _whole(_stacked(after, out[rank]), plan.parts)
        return _whole(exchange.back([_stacked(after, numbers) for numbers in out], len(out[rank])), plan.parts)


def _in_parts(x: Tensor, parts: int) -> Tensor:
    """States [..., H, K, V] with the columns of a head in parts, [..., H x parts, K, V / parts]."""
    return x if parts == 1 else x.unflatten(-1, (parts, -1)).movedim(-2, -3).flatten(-4, -3)


def _of_parts(transition: Tensor, heads: range, parts: int) -> Tensor:
    """The transitions [B, heads, ...] of some heads of `_in_parts`, from [B, H, ...]."""
    if parts == 1:
        return transition[:, heads.start : heads.stop]
    begin, end = heads.start // parts, -(-heads.stop // parts)
    whole = transition[:, begin:end].unsqueeze(2)
    every = whole.expand(*whole.shape[:2], parts, *whole.shape[3:]).flatten(1, 2)
    return every[:, heads.start - begin * parts : heads.stop - begin * parts]


def _whole(x: Tensor, parts: int) -> Tensor:
    """What `_in_parts` was given."""
    return x if parts == 1 else x.unflatten(-3, (-1, parts)).movedim(-3, -2).flatten(-2)


def _stacked(x: Tensor, numbers: Sequence[int]) -> Tensor:
    """`x[numbers]`, without a copy of the numbers to the device."""
    return torch.stack([x[n] for n in numbers]) if numbers else x[:0]


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _split(message: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    parts = message.split([_size(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


class _Halos(torch.autograd.Function):
    """The inputs [B, H, halos] before this rank's ranges, from x [B, H, positions] of all ranks.

    They are sent in the dtype that the caller gave them, and their gradients in the dtype of the computation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, plan: HaloPlan, comm: Comm, dtype: torch.dtype) -> Tensor:
        ctx.plan, ctx.comm, ctx.call, ctx.rows = plan, comm, comm.calls, x.shape[2]
        with propagate_failure(comm):
            rows = x.movedim(2, 0).to(dtype)
            ranks, own = range(comm.world), comm.rank
            parts = [_gathered(rows, [piece.rows for piece in plan.pieces(own, target)]) for target in ranks]
            received = comm.all_to_all(parts, [(plan.rows_sent(source, own), *rows.shape[1:]) for source in ranks])
            halos = x.new_zeros(sum(map(len, plan.needed[own])), *rows.shape[1:])
            for source, part in zip(ranks, received, strict=True):
                _add(halos, [piece.to for piece in plan.pieces(source, own)], part)
        return halos.movedim(0, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, comm = ctx.plan, ctx.comm
        comm.note("backward of recurrent", ctx.call)
        with propagate_failure(comm):
            rows = grad.movedim(2, 0)
            ranks, own = range(comm.world), comm.rank
            parts = [_gathered(rows, [piece.to for piece in plan.pieces(source, own)]) for source in ranks]
            received = comm.all_to_all(parts, [(plan.rows_sent(own, target), *rows.shape[1:]) for target in ranks])
            by_x = grad.new_zeros(ctx.rows, *rows.shape[1:])
            for target, part in zip(ranks, received, strict=True):
                _add(by_x, [piece.rows for piece in plan.pieces(own, target)], part)
        return by_x.movedim(0, 2), None, None, None, None


def _gathered(rows: Tensor, ranges: Sequence[range]) -> Tensor:
    """Some ranges of rows, one after another."""
    return torch.cat([rows[run.start : run.stop] for run in ranges]) if ranges else rows[:0].contiguous()


def _add(rows: Tensor, ranges: Sequence[range], part: Tensor) -> None:
    """Adds what `_gathered` returned to its rows."""
    at = 0
    for run in ranges:
        rows[run.start : run.stop] += part[at : at + len(run)]
        at += len(run)
