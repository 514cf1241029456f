"""Ring context parallelism: K and V travel from rank to rank, and every block is merged into the state of the queries.

The algorithm is the two loops of `Ring`, forward and backward; `KVExchange` and `GradReturn` move the data. What only
depends on the plan and on shapes is computed once: `_Program`, `KVRoute` and `GradRoute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.comm.base import FINISHED, post
from attnmesh.core.ranges import Ranges, difference, merged
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.core.visibility import Patch
from attnmesh.ops.dense import dispatch
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import (
    Backend,
    Call,
    Grads,
    Result,
    Scores,
    contiguous_last_dim,
    kernel_span,
    values_in_keys,
)
from attnmesh.ops.dense.dispatch import choose_fused, choose_fused_backward
from attnmesh.ops.merge import SINGLE_STREAM, GradAccumulator, StateAccumulator, StreamPair
from attnmesh.parallel.executor import Executor, ExecutorConfig, RowLayout, View, Views, copy_rows
from attnmesh.plan.ring import RingPlan, Stage, Transfer, Transfers, joined_blocks, packed_once, ring_plan


@dataclass(frozen=True)
class Ring(Executor):
    """The executor of "ring"."""

    plan: RingPlan
    backend: str
    comm: Comm
    backward_plan: RingPlan | None = None  # None: as forward
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)
    _local: Patch | None = field(init=False, repr=False, compare=False)  # of the only call, which is one of `attention`
    _programs: dict[object, _Program] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages = self.plan.stages(self.comm.rank)
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "_local", stages[0].patch if len(stages) == 1 and stages[0].patch.blocks else None)

    @classmethod
    def build(cls, config: ExecutorConfig) -> Ring:
        """The executor over all ranks."""
        shards, groups = config.shards, config.groups
        joined = joined_blocks(shards, config.key_row, groups.ranks_per_node, config.device)
        forward, backward = (ring_plan(shards, blocks) for blocks in joined)
        return cls(forward, config.backend, groups.all_ranks, backward)

    @property
    def backward_stages(self) -> tuple[Stage, ...]:
        """The stages of a backward."""
        return self.stages if self.backward_plan is None else self.backward_plan.stages(self.comm.rank)

    @property
    def computes(self) -> bool:
        """Whether this rank's queries see any key of the ring."""
        return any(stage.patch.blocks for stage in self.stages)

    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Call]:
        """The call of every stage that computes."""
        return [Call(q, k, v, stage.patch, scores) for stage in self.stages if stage.patch.blocks]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """Once around the ring."""
        if self._local is not None and self.comm.recorder is None:
            call = Call(contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v), self._local, scores)
            return dispatch.forward(call, sinks, self.backend), (q, k, v)
        program = self._program(q, k, v, scores)
        work = program.forward(q, k, v, scores)
        streams = SINGLE_STREAM if work.parts is None else StreamPair(enabled=True)
        total = StateAccumulator(q, v.shape[3], streams, work.parts, sinks=sinks)
        self._forward(program, work, (q, k, v), scores, total, streams, last=True)
        return total.finish(q.dtype), (q, k, v)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """Once around the ring with K and V again, and their gradients back to the owners."""
        q, k, v = saved
        program = self._program(q, k, v, scores)
        work = program.backward(q, k, v, scores, result)
        streams = SINGLE_STREAM if work.parts is None else StreamPair(enabled=True)
        one_call = len(work.stages) == 1
        grads = Grads(
            GradAccumulator(q, streams, work.parts, one_call=one_call) if needs_grad[0] else None,
            GradAccumulator(k, streams, one_call=one_call) if needs_grad[1] else None,
            GradAccumulator(v, streams, one_call=one_call) if needs_grad[2] else None,
        )
        self._backward(program, work, saved, scores, result, grads, streams)
        return grads

    def gradients(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, sinks: Tensor | None,
        needs_grad: Sequence[bool],
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of q, k, v and sinks; None for those that are not needed."""
        if self._local is not None and saved and self.comm.recorder is None:
            q, k, v = saved
            call = Call(contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v), self._local, scores)
            return dispatch.gradients(call, sinks, result, self.backend, needs_grad)
        return super().gradients(saved, result, scores, sinks, needs_grad)

    def forward_into(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, total: StateAccumulator, *, last: bool
    ) -> None:  # fmt: skip
        """Once around the ring, merging into a state to which other rings contribute as well, this one as the last."""
        program = self._program(q, k, v, scores)
        work = program.forward(q, k, v, scores)
        self._forward(program, work, (q, k, v), scores, total, SINGLE_STREAM, last=last)

    def backward_into(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Result, grads: Grads) -> None:
        """The backward of `forward_into`: adds to gradients to which other rings contribute as well."""
        program = self._program(q, k, v, scores)
        work = program.backward(q, k, v, scores, result)
        self._backward(program, work, (q, k, v), scores, result, grads, SINGLE_STREAM)

    def _program(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> _Program:
        shared = k.shape[3] > 256 and values_in_keys(k, v)
        key = q.shape, k.shape, v.shape, q.dtype, q.device, shared, scores.softcap is None, scores.alibi_slopes is None
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(self, k, v)
        return program

    def _forward(
        self, program: _Program, work: _Work, qkv: Sequence[Tensor], scores: Scores, total: StateAccumulator,
        streams: StreamPair, *, last: bool,
    ) -> None:  # fmt: skip
        q, k, v = map(contiguous_last_dim, qkv)
        exchange = KVExchange(k, v, program.keys, self.comm)
        recorder, on_two_streams = self.comm.recorder, streams is not SINGLE_STREAM
        for at, (patch, backend) in enumerate(work.stages):
            if on_two_streams:
                streams.wait_for_last_block()  # it reads the buffer into which the next K and V are received
            pending = exchange.start(at)  # the next K and V are in flight while these are computed
            if backend is not None:
                call = Call(q, *exchange.visible_kv(at), patch, scores)
                total.last_call = last and at == work.last
                if on_two_streams or recorder is not None:
                    with streams.next_stream(), kernel_span(recorder, "attention", backend, call):
                        backend.forward(call, total)
                else:
                    backend.forward(call, total)
            pending.wait()
            if on_two_streams:
                streams.record_arrival()
        if on_two_streams:
            streams.join()

    def _backward(
        self, program: _Program, work: _Work, qkv: Sequence[Tensor], scores: Scores, result: Result, grads: Grads,
        streams: StreamPair,
    ) -> None:  # fmt: skip
        q, k, v = map(contiguous_last_dim, qkv)
        exchange = KVExchange(k, v, program.backward_keys, self.comm)
        recorder, on_two_streams = self.comm.recorder, streams is not SINGLE_STREAM
        if on_two_streams:
            for at, (patch, backend) in enumerate(work.stages):
                if backend is not None:
                    backend.prepare(Call(q, *exchange.visible_kv(at), patch, scores), result)
        grad_return = None
        if (grads.k is not None or grads.v is not None) and len(work.stages) > 1:
            grad_return = GradReturn(program.grads, (grads.k, grads.v), self.comm)
        for at, (patch, backend) in enumerate(work.stages):
            if on_two_streams:
                streams.wait_for_last_block()
            pending = exchange.start(at)
            here = grads  # gradients of this rank's own K and V stay here
            if at > 0:  # gradients of other ranks' K and V are sent on with them
                here = Grads(grads.q, None, None)
            if backend is not None:
                call = Call(q, *exchange.visible_kv(at), patch, scores)
                if at > 0 and grad_return is not None:
                    here = Grads(grads.q, *grad_return.accumulators(at, call.k, call.v))
                if on_two_streams or recorder is not None:
                    with streams.next_stream(), kernel_span(recorder, "attention backward", backend, call):
                        backend.backward(call, result, here)
                else:
                    backend.backward(call, result, here)
            pending.wait()
            if on_two_streams:
                streams.record_arrival()
            if grad_return is not None and at > 0:
                if on_two_streams:
                    streams.wait_for_last_block()
                grad_return.add(at, here.k, here.v)  # the gradients of earlier ranks arrived while this stage computed
                grad_return.send(at)
        if on_two_streams:
            streams.join()
        if grad_return is not None:
            grad_return.finish()


class _Work(NamedTuple):
    """What every stage computes, and by which backend (None: nothing)."""

    stages: tuple[tuple[Patch, Backend | None], ...]
    last: int  # the last stage that computes
    parts: int | None  # blocks, if they run on two streams


class _Program:
    """What a ring does for inputs of some shapes, dtype and device."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self._stages, self._backward_stages = ring.stages, ring.backward_stages
        self._backend, self._shares_stream = ring.backend, ring.comm.shares_stream
        layout = RowLayout.of(k, v)
        self.keys = self.backward_keys = KVRoute(self._stages, layout, k.dtype, k.device)
        if self._backward_stages is not self._stages:
            self.backward_keys = KVRoute(self._backward_stages, layout, k.dtype, k.device)
        self.grads = GradRoute(self._backward_stages, layout, accumulation_dtype(k.dtype), k.device)
        self._forward: _Work | None = None
        self._backward: dict[object, _Work] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> _Work:
        """The work of a forward, whose backends depend only on the plan and on what programs differ in."""
        if self._forward is None:
            self._forward = self._work(self._stages, q, k, v, scores, lambda call: choose_fused(call, self._backend))
        return self._forward

    def backward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, result: Result) -> _Work:
        """The work of a backward: its backends also depend on whether there is a gradient of the lse."""
        key = result.grad_lse is None, torch.are_deterministic_algorithms_enabled()
        work = self._backward.get(key)
        if work is None:
            work = self._backward[key] = self._work(
                self._backward_stages, q, k, v, scores,
                lambda call: choose_fused_backward(call, result, self._backend),
            )  # fmt: skip
        return work

    def _work(
        self, plan: Sequence[Stage], q: Tensor, k: Tensor, v: Tensor, scores: Scores, choose: Callable[[Call], Backend]
    ) -> _Work:
        patches = [stage.patch for stage in plan]
        stages = [  # the tensors only give dtype and device
            (patch, choose(Call(q, k, v, patch, scores)) if patch.blocks else None) for patch in patches
        ]
        last = max((at for at, (_, backend) in enumerate(stages) if backend is not None), default=0)
        parts = None if self._shares_stream else _parts_on_two_streams(stages, q.device)
        return _Work(tuple(stages), last, parts)


def _parts_on_two_streams(stages: Sequence[tuple[Patch, Backend | None]], device: torch.device) -> int | None:
    """The number of blocks, if they run on two streams: if torch's fused kernels compute them all.

    Triton's kernels continue a single state and stay on one stream.
    """
    work = [(patch, backend) for patch, backend in stages if backend is not None]
    if len(work) < 2 or device.type != "cuda" or not all(isinstance(backend, Aten) for _, backend in work):
        return None
    return sum(len(patch.blocks) for patch, _ in work)


# K and V.


class _KVStage(NamedTuple):
    """The messages that are posted at a stage, and the K and V that are computed on."""

    k: View
    v: View
    sends: tuple[tuple[View, int], ...]  # of the K and V that are here
    packed: tuple[tuple[Ranges, tuple[View, ...]], ...]  # own rows, and where they are copied to
    own_sends: tuple[tuple[View, int], ...]  # of the copies
    recvs: tuple[tuple[View, int], ...]  # of the next ones
    nbytes: int  # sent


class KVRoute:
    """The messages of K and V of some layout around a ring, as views of buffers.

    Each pass has exactly two buffers, in which K and V are received and sent on. Rows that this rank sends of its own K
    and V are packed into a third one, except at the first stage.
    """

    def __init__(
        self, stages: tuple[Stage, ...], layout: RowLayout, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        self.dtype, self.device = dtype, device
        stages = stages if layout.elements else tuple(map(_without_messages, stages))
        own = [sum(len(to) for _, to in packed_once(stage.own_sent)[1]) for stage in stages]
        self.shape = layout.shape(max([own[0], *(stage.size for stage in stages[1:])]))
        self.packed_shape = layout.shape(max(own[1:])) if any(own[1:]) else None
        self.stages = [self._stage(stages, at, layout) for at in range(len(stages))]

    def _stage(self, stages: tuple[Stage, ...], at: int, layout: RowLayout) -> _KVStage:
        stage, following = stages[at], stages[at + 1 : at + 2]
        sends = tuple((layout.rows(_only(t.rows)), t.target) for t in stage.sent)
        places, copies = packed_once(stage.own_sent)
        packed = tuple((rows, layout.parts(to)) for rows, to in copies)
        own_sends = tuple((layout.rows(at), t.target) for t, at in zip(stage.own_sent, places, strict=True))
        recvs = tuple((layout.rows(_only(t.to)), t.source) for s in following for t in (*s.received, *s.from_owner))
        sent = sum(transfer.size for transfer in (*stage.sent, *stage.own_sent))
        k, v = layout.parts(range(stage.size))
        return _KVStage(k, v, sends, packed, own_sends, recvs, sent * layout.elements * self.dtype.itemsize)


class KVExchange:
    """K and V of each stage of one pass on this rank."""

    def __init__(self, k: Tensor, v: Tensor, route: KVRoute, comm: Comm) -> None:
        self._k, self._v, self._comm, self._stages = k, v, comm, route.stages
        if len(route.stages) > 1:
            dtype, device = route.dtype, route.device
            self._buffers = [Views(comm.buffer(route.shape, dtype=dtype, device=device)) for _ in range(2)]
            self._packed = self._buffers[0]
            if route.packed_shape is not None:
                self._packed = Views(comm.buffer(route.packed_shape, dtype=dtype, device=device))

    def start(self, at: int) -> Pending:
        """Start to send the K and V that the next stage needs, and to receive the K and V of stage `at + 1`."""
        _, _, sends, packed, own_sends, recvs, nbytes = self._stages[at]
        if not (sends or packed or recvs):
            return FINISHED
        here, there = self._buffers[at % 2], self._buffers[1 - at % 2]
        messages = [(here[view], peer) for view, peer in sends]
        if packed:
            own = self._packed if at else here
            for rows, targets in packed:
                self._pack(own, targets, rows)
            messages += [(own[view], peer) for view, peer in own_sends]
        return post(self._comm, messages, [(there[view], peer) for view, peer in recvs], nbytes)

    def visible_kv(self, at: int) -> tuple[Tensor, Tensor]:
        """K and V of a stage, [B, Hkv, rows, width]: the rows that this rank's queries attend to."""
        if at == 0:
            return self._k, self._v
        stage, here = self._stages[at], self._buffers[at % 2]
        return here[stage.k], here[stage.v]

    def _pack(self, own: Views, targets: tuple[View, ...], rows: Ranges) -> None:
        """Copies rows of this rank's own K and V: the only copy that a ring makes."""
        for view, x in zip(targets, (self._k, self._v), strict=True):
            target = own[view]
            if len(rows) == 1:
                copy_rows(target, x[:, :, rows[0].start : rows[0].stop])
                continue
            begin = 0
            for run in rows:
                copy_rows(target[:, :, begin : begin + len(run)], x[:, :, run.start : run.stop])
                begin += len(run)


# Gradients of K and V.


class _GradStage(NamedTuple):
    """The gradients of the K and V that are here at a stage, and the messages that are posted after it."""

    kv: tuple[View, ...]
    whole: View
    is_first: bool  # the buffer was never used before, and this rank is the first to add to these gradients
    unreceived: tuple[View, ...]  # rows of which no gradients arrive
    sends: tuple[tuple[View, int], ...]
    recvs: tuple[tuple[View, int], ...]  # of the next stage
    own_recvs: tuple[tuple[View, int], ...]  # of this rank's own K and V
    returned: tuple[tuple[tuple[View, ...], int], ...]  # where they are received, and the first of the own rows
    nbytes: int  # sent


class GradRoute:
    """The messages of gradients of K and V back to the owners, in `dtype`, as views of buffers.

    Each pass has two buffers, one to send and one to receive. A third one receives gradients of this rank's own K and
    V. Kernels compute a stage's in a fourth one, laid out alike: one addition of whole rows adds it to what arrived.
    """

    def __init__(
        self, stages: tuple[Stage, ...], layout: RowLayout, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        self.dtype, self.device = dtype, device
        stages = stages if layout.elements else tuple(map(_without_messages, stages))
        self.shape = layout.shape(max([0, *(stage.size for stage in stages[1:])]))
        self.returned_shape = layout.shape(max(sum(t.size for t in stage.own_returned) for stage in stages))
        self.stages = [self._stage(stages, at, layout) for at in range(len(stages))]

    def _stage(self, stages: tuple[Stage, ...], at: int, layout: RowLayout) -> _GradStage:
        stage, following = stages[at], stages[at + 1 : at + 2]
        received = tuple(run for transfer in stage.received for run in transfer.to)
        own_recvs, returned = [], []
        for transfer, rows in packed_rows(stage.own_returned):
            own_recvs.append((layout.rows(rows), transfer.source))
            begin = rows.start
            for run in transfer.to:
                returned.append((layout.parts(range(begin, begin + len(run))), run.start))
                begin += len(run)
        sent = sum(transfer.size for transfer in (*stage.sent, *stage.returned))
        return _GradStage(
            layout.parts(range(stage.size)), layout.rows(range(stage.size)),
            is_first=at <= 2 and not stage.received,
            unreceived=tuple(layout.rows(run) for run in difference(merged([range(stage.size)]), merged(received))),
            sends=tuple((layout.rows(_only(t.rows)), t.target) for t in (*stage.sent, *stage.returned)),
            recvs=tuple((layout.rows(_only(t.to)), t.source) for s in following for t in s.received),
            own_recvs=tuple(own_recvs), returned=tuple(returned),
            nbytes=sent * layout.elements * self.dtype.itemsize,
        )  # fmt: skip


class GradReturn:
    """Gradients of K and V of one pass on their way back to the owners; this rank's are added to `own`."""

    def __init__(
        self, route: GradRoute, own: tuple[GradAccumulator | None, GradAccumulator | None], comm: Comm
    ) -> None:
        self._own, self._comm, self._stages = own, comm, route.stages
        dtype, device = route.dtype, route.device
        self._buffers = [Views(comm.buffer(route.shape, dtype=dtype, device=device)) for _ in range(2)]
        self._returned = Views(comm.buffer(route.returned_shape, dtype=dtype, device=device))
        self._computed: Views | None = None
        self._pending: tuple[Pending, _GradStage] | None = None

    def accumulators(self, at: int, k: Tensor, v: Tensor) -> tuple[GradAccumulator | None, GradAccumulator | None]:
        """Accumulators for the gradients of stage `at`, for those that are needed. One call computes both."""
        own_k, own_v = self._own
        return (
            None if own_k is None else GradAccumulator(k, memory=partial(self._memory, at, 0)),
            None if own_v is None else GradAccumulator(v, memory=partial(self._memory, at, 1)),
        )

    def _memory(self, at: int, i: int) -> Tensor:
        """Where kernels compute the gradient of K (0) or V (1) of stage `at`: where it is sent from, if possible."""
        stage = self._stages[at]
        if stage.is_first:
            return self._buffers[at % 2][stage.kv[i]]
        if self._computed is None:
            self._computed = Views(torch.empty_like(self._buffers[0].buffer))
        return self._computed[stage.kv[i]]

    def add(self, at: int, k: GradAccumulator | None, v: GradAccumulator | None) -> None:
        """Add this rank's gradients of stage `at` to those that arrived from earlier ranks."""
        self._wait(last=False)
        stage, here = self._stages[at], self._buffers[at % 2]
        in_memory = (k or v) is not None and (k is None or k.in_memory) and (v is None or v.in_memory)
        if in_memory and stage.is_first:
            return
        for view in stage.unreceived:
            here[view].zero_()
        if in_memory and self._computed is not None:
            here[stage.whole].add_(self._computed[stage.whole])
            return
        if k is not None:
            k.add_to(here[stage.kv[0]])
        if v is not None:
            v.add_to(here[stage.kv[1]])

    def send(self, at: int) -> None:
        """Start to send the gradients of stage `at` to the next rank or the owner, and to receive the next stage's."""
        stage, returned = self._stages[at], self._returned
        here, there = self._buffers[at % 2], self._buffers[1 - at % 2]
        sends = [(here[view], peer) for view, peer in stage.sends]
        recvs = [(there[view], peer) for view, peer in stage.recvs]
        if stage.own_recvs:
            recvs += [(returned[view], peer) for view, peer in stage.own_recvs]
        self._pending = post(self._comm, sends, recvs, stage.nbytes), stage

    def finish(self) -> None:
        """Add the last returned gradients to those that this rank computed for its own K and V."""
        self._wait(last=True)

    def _wait(self, *, last: bool) -> None:
        if self._pending is None:
            return
        pending, stage = self._pending
        self._pending = None
        pending.wait()
        for i, grad in enumerate(self._own):
            if grad is None:
                continue
            for views, row in stage.returned:
                grad.add(self._returned[views[i]], row)
            if stage.returned and not last:  # the buffer is reused
                grad.total()


def packed_rows(transfers: Transfers) -> Iterator[tuple[Transfer, range]]:
    """Transfers and the rows of a buffer in which they lie one after another."""
    begin = 0
    for transfer in transfers:
        yield transfer, range(begin, begin + transfer.size)
        begin += transfer.size


def _only(rows: Ranges) -> range:
    """The rows of a message that is not packed."""
    (run,) = rows
    return run


def _without_messages(stage: Stage) -> Stage:
    """The stage of a batch without sequences: messages without elements are not sent."""
    return replace(stage, received=(), from_owner=(), sent=(), own_sent=(), returned=(), own_returned=())
