"""Keys on their way around a ring, and their gradients on the way home."""

from __future__ import annotations

from torch import Tensor

from attnmesh.comm import Comm, Pending
from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.merge import GradAccumulator
from attnmesh.parallel.message import message_row, rows_of, sides, two_buffers
from attnmesh.plan.ring import RingPlan


class Journey:
    """Keys and values on their way: what this rank holds at each stage, in exactly two buffers."""

    def __init__(self, k: Tensor, v: Tensor, plan: RingPlan, comm: Comm) -> None:
        self.stages = plan.stages(comm.rank)
        self._own, self._comm = (k, v), comm
        rows = max([len(self.stages[0].next_keys), *(len(stage.keys) for stage in self.stages[1:])])
        self._buffers = two_buffers(comm, rows, k, k.dtype)

    def send_on(self, at: int) -> Pending:
        """Post the exchange that takes these keys on and brings those of the next stage."""
        stage, after = self.stages[at], self.stages[at + 1 : at + 2]
        sends = [(self._outgoing(at), stage.next_rank)] if stage.next_keys else []
        recvs = [(self._buffers[(at + 1) % 2][: len(a.keys)], a.came_from) for a in after if a.keys]
        return self._comm.exchange(sends, recvs)

    def seen(self, at: int) -> tuple[Tensor, Tensor]:
        """K and V of a stage, the rows this rank's queries see, [B, Hkv, rows, D]."""
        stage = self.stages[at]
        if at > 0 and not stage.seen:
            k, v = self._own
            return k[:, :, :0], v[:, :, :0]
        return self._own if at == 0 else sides(rows_of(self._buffers[at % 2], stage.keys, stage.seen))

    def _outgoing(self, at: int) -> Tensor:
        stage = self.stages[at]
        if at > 0:
            return rows_of(self._buffers[at % 2], stage.keys, stage.next_keys)
        packed = self._buffers[0][: len(stage.next_keys)]
        rows = slice(stage.next_keys.start, stage.next_keys.stop)
        for side, x in zip(sides(packed), self._own, strict=True):  # the one copy a ring makes
            side.copy_(x[:, :, rows])
        return packed


class GradReturn:
    """Gradients of keys on their way home, float32, in two buffers: one leaves while the next arrives."""

    def __init__(self, k: Tensor, plan: RingPlan, comm: Comm) -> None:
        self._stages, self._comm = plan.stages(comm.rank), comm
        self._last_stage, self._last_rank, self._home_rows = plan.returns(comm.rank)
        dtype = accumulation_dtype(k.dtype)
        rows = max(len(stage.grads_out) for stage in self._stages)
        self._buffers = two_buffers(comm, rows, k, dtype)
        self._home = comm.buffer((len(self._home_rows), *message_row(k)), dtype=dtype, device=k.device)
        self._travelling: list[Pending] = []

    def join(self, at: int, mine: tuple[GradAccumulator | None, ...]) -> None:
        """Add what this rank found at stage `at` to what arrived from the visitors before it."""
        self._wait()
        stage = self._stages[at]
        if not stage.grads_out:
            return
        grads = self._buffers[at % 2][: len(stage.grads_out)]
        came = stage.grads_in or range(stage.grads_out.start, stage.grads_out.start)
        grads[: came.start - stage.grads_out.start].zero_()
        grads[came.stop - stage.grads_out.start :].zero_()
        if stage.seen:
            seen = rows_of(grads, stage.grads_out, stage.seen)
            for side, grad in zip(sides(seen), mine, strict=True):
                if grad is not None:
                    grad.add_to(side)

    def send_on(self, at: int) -> None:
        """Post the gradients of stage `at` to the next visitor or home, and receive those of the next stage."""
        stage, after = self._stages[at], self._stages[at + 1 : at + 2]
        sends = [(self._buffers[at % 2][: len(stage.grads_out)], stage.next_rank)] if stage.grads_out else []
        recvs = [
            (rows_of(self._buffers[(at + 1) % 2], a.grads_out, a.grads_in), a.came_from) for a in after if a.grads_in
        ]
        if at == self._last_stage and self._home_rows:
            recvs.append((self._home, self._last_rank))
        self._travelling.append(self._comm.exchange(sends, recvs))

    def arrive(self, dk: GradAccumulator | None, dv: GradAccumulator | None) -> None:
        """Add what came home to the gradients of this rank's own keys."""
        self._wait()
        if self._home_rows:
            for grad, side in zip((dk, dv), sides(self._home), strict=True):
                if grad is not None:
                    grad.add(side, self._home_rows.start)

    def _wait(self) -> None:
        while self._travelling:
            self._travelling.pop().wait()
