"""Recurrent layers over ranks: local segments, a scan over the ranges of all ranks, and the local pass.

Autograd differentiates the local computation; the exchanges between ranks are functions with backwards of their own.
Every rank takes part in every exchange of the backward, whether it holds positions or not: its output depends on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.comm import Comm, propagate_failure
from attnmesh.core.layouts import Layout
from attnmesh.core.masks import Documents
from attnmesh.core.ranges import Ranges, rows_between
from attnmesh.core.segment import Segment, forward_scan, reversed_scan, transition_gradient
from attnmesh.ops.recurrent.api import incoming_state
from attnmesh.ops.recurrent.convolution import ShortConvolution, last_inputs
from attnmesh.ops.recurrent.kernels import KernelChunks
from attnmesh.ops.recurrent.layer import Recurrence, RecurrentLayer, document_ages
from attnmesh.plan.recurrent import HaloPlan, ScanPlan, halo_plan, scan_plan


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


def _recurrence(
    call: RecurrentCall, layer: Recurrence, state: Tensor, anchor: Tensor, layout: Layout, comm: Comm
) -> tuple[Tensor, Tensor]:  # fmt: skip
    plan = scan_plan(layout, call.length, comm.world, state.shape[1], call.final)
    held = plan.held(comm.rank)
    chunks, at = [], 0
    for number in held:
        positions = plan.segments[number].positions
        ages = document_ages(call.documents, positions, state.device)
        chunks.append(layer.rows(range(at, at + len(positions)))._chunks(ages, call.kernels))
        at += len(positions)

    if call.kernels:
        ranges = [part for part in chunks if isinstance(part, KernelChunks)]
        tensors = [x for part in ranges for x in part.tensors]
        form = layer._transition_shape()
        final, *outs = _KernelScan.apply(ranges, form, plan, comm, anchor, state, *tensors)  # type: ignore[no-untyped-call]
        outs = [part.with_skip(out) for part, out in zip(ranges, outs, strict=True)]
        return _output(layer, outs, final), final

    outs, transitions, updates = [], [], []
    for number, part in zip(held, chunks, strict=True):
        if number == 0:
            out, state_after = part.run(state)
            outs.append(out)
            if 0 in plan.scanned:
                updates.append(state_after)
        elif number in plan.scanned:
            whole = part.total()
            transitions.append(whole.transition)
            updates.append(whole.update)
    empty = state.new_empty(0, *state.shape)
    transition = torch.stack(transitions) if transitions else state.new_empty(0, *layer._transition_shape())
    update = torch.stack(updates) if updates else empty
    incoming, final = _Exchange.apply(transition, update, anchor, plan, comm)  # type: ignore[no-untyped-call]

    for part, into in zip(chunks[len(outs) :], incoming, strict=True):
        outs.append(part.run(into)[0])
    return _output(layer, outs, incoming, state), final


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


class _Exchange(torch.autograd.Function):
    """The incoming states of this rank's ranges but the first of all, [ranges, B, H, K, V], and the final state.

    `transition` and `update` are of this rank's ranges in `plan.scanned`; the first range of all has no transition, and
    its outgoing state as the update. The final state is empty if it is not wanted.
    """

    @staticmethod
    def forward(
        ctx: Any, transition: Tensor, update: Tensor, anchor: Tensor, plan: ScanPlan, comm: Comm
    ) -> tuple[Tensor, Tensor]:
        with propagate_failure(comm):
            incoming, final, scanned = _incoming(transition, update, plan, comm)
        ctx.save_for_backward(transition, incoming, scanned)
        ctx.plan, ctx.comm, ctx.call = plan, comm, comm.calls
        ctx.shape = update.shape[1:]
        return incoming, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_incoming: Tensor, by_final: Tensor) -> tuple[Tensor | None, ...]:
        plan, comm = ctx.plan, ctx.comm
        comm.note("backward of recurrent", ctx.call)
        transition, incoming, scanned = ctx.saved_tensors
        with propagate_failure(comm):
            by_update = _outgoing_gradients(by_incoming, by_final, scanned, ctx.shape, plan, comm)
        later = by_update[len(by_update) - len(transition) :]  # without that of the first range of all
        by_transition = transition_gradient(transition, incoming[: len(transition)], later)
        return by_transition, by_update, None, None, None


class _KernelScan(torch.autograd.Function):
    """The final state, empty if it is not wanted, and the outputs of this rank's ranges, computed by kernels.

    The backward computes the gradients of the inputs once, when the scan has brought the gradients of the states after
    the ranges. What the scan needs for that, the gradients of the states before them if nothing read the states after
    them, takes one pass. Gradients by way of the segments would take all passes twice.
    """

    @staticmethod
    def forward(
        ctx: Any, ranges: list[KernelChunks], form: tuple[int, ...], plan: ScanPlan, comm: Comm, anchor: Tensor,
        state: Tensor, *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
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
        transition = torch.stack(transitions) if transitions else state.new_empty(0, *form)
        with propagate_failure(comm):
            incoming, final, scanned = _incoming(transition, update, plan, comm)
        outs += [part.forward(into)[0] for part, into in zip(parts[len(outs) :], incoming, strict=True)]
        ctx.save_for_backward(state, incoming, scanned, *tensors)
        ctx.ranges, ctx.plan, ctx.comm, ctx.call = ranges, plan, comm, comm.calls
        return final, *outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_final: Tensor, *by_outs: Tensor) -> tuple[Tensor | None, ...]:
        plan, comm = ctx.plan, ctx.comm
        comm.note("backward of recurrent", ctx.call)
        state, incoming, scanned, *tensors = ctx.saved_tensors
        held, width = plan.held(comm.rank), len(tensors) // max(1, len(ctx.ranges))
        parts = [part.of(tensors[i * width : (i + 1) * width]) for i, part in enumerate(ctx.ranges)]
        states = [*([state] if 0 in held else []), *incoming]
        read = [part.state_gradient(by_out) for n, part, by_out in zip(held, parts, by_outs, strict=True) if n]
        by_incoming = torch.stack(read) if read else incoming
        with propagate_failure(comm):
            by_update = iter(_outgoing_gradients(by_incoming, by_final, scanned, state.shape, plan, comm))
        grads: list[Tensor | None] = []
        by_state = torch.zeros_like(state)
        for number, part, into, by_out in zip(held, parts, states, by_outs, strict=True):
            *own, by_into = part.backward(into, by_out, next(by_update) if number in plan.scanned else None)
            grads += own
            by_state = by_into if number == 0 else by_state
        return None, None, None, None, None, by_state, *grads


def _incoming(transition: Tensor, update: Tensor, plan: ScanPlan, comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """The incoming states and the final one of this rank, and the transitions that it scanned."""
    batch, form, state_form = update.shape[1], transition.shape[3:], update.shape[3:]
    mine = [number for number in plan.held(comm.rank) if number in plan.scanned]
    first = bool(mine) and mine[0] == 0
    parts = []
    for heads in plan.heads:
        columns = slice(heads.start, heads.stop)
        sent = [
            x[:, columns].flatten()
            for i in range(len(mine))
            for x in ([] if first and i == 0 else [transition[i - first]]) + [update[i]]
        ]
        parts.append(torch.cat(sent) if sent else update.new_empty(0))

    own = len(plan.heads[comm.rank])
    shapes = {True: (batch, own, *form), False: (batch, own, *state_form)}
    order = {source: [n for n in plan.held(source) if n in plan.scanned] for source in range(plan.world)}
    messages = {
        source: [shapes[kind] for n in numbers for kind in ((True, False) if n else (False,))]
        for source, numbers in order.items()
    }
    received = comm.all_to_all(parts, [(sum(map(_size, messages[source])),) for source in range(plan.world)])

    count = len(plan.scanned)
    transitions = update.new_empty(max(0, count - 1), *shapes[True])
    updates = update.new_empty(count, *shapes[False])
    for source, numbers in order.items():
        pieces = iter(_split(received[source], messages[source]))
        for n in numbers:
            if n:
                transitions[n - 1] = next(pieces)
            updates[n] = next(pieces)
    states = forward_scan(Segment(transitions, updates[1:]), updates[0]) if count else updates

    # states[n] comes out of segment n, and into segment n + 1.
    parts = []
    for target in range(plan.world):
        wanted = [states[n - 1] for n in plan.held(target) if n in plan.incoming] + [states[-1]] * plan.final
        parts.append(torch.stack(wanted) if wanted else states[:0])
    count = len([n for n in plan.held(comm.rank) if n in plan.incoming]) + plan.final
    received = comm.all_to_all(parts, [(count, batch, len(part), *state_form) for part in plan.heads])
    every = torch.cat(received, 2)
    return every[: count - plan.final], every[-1] if plan.final else every.new_empty(0), transitions


def _outgoing_gradients(
    by_incoming: Tensor, by_final: Tensor, transitions: Tensor, shape: Sequence[int], plan: ScanPlan, comm: Comm
) -> Tensor:
    """The gradients of the states that go out of this rank's ranges in `plan.scanned`."""
    batch, _, *form = shape
    grads = torch.cat([by_incoming, by_final[None]]) if plan.final else by_incoming
    parts = [grads[:, :, heads.start : heads.stop].contiguous() for heads in plan.heads]
    own = len(plan.heads[comm.rank])
    into = [[n for n in plan.held(source) if n in plan.incoming] for source in range(plan.world)]
    received = comm.all_to_all(parts, [(len(numbers) + plan.final, batch, own, *form) for numbers in into])
    count = len(plan.scanned)
    read = by_incoming.new_zeros(count, batch, own, *form)
    for numbers, part in zip(into, received, strict=True):
        for at, n in enumerate(numbers):
            read[n - 1] += part[at]
        if plan.final:
            read[-1] += part[-1]
    after = reversed_scan(transitions, read) if count else read

    out = [[n for n in plan.held(target) if n in plan.scanned] for target in range(plan.world)]
    parts = [after[numbers] for numbers in out]
    received = comm.all_to_all(parts, [(len(out[comm.rank]), batch, len(heads), *form) for heads in plan.heads])
    return torch.cat(received, 2)


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
