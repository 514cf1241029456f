"""One rank of a world with replayed messages of the others, which on a GPU uses two streams.

Virtual ranks share a stream and do not use a second one. So a virtual run is recorded, message by message, and each
rank is then run again with the device to itself: messages arrive on a stream of their own as they do with NCCL, and the
device is kept behind the host, so that a missing wait shows.
"""

from collections import deque

import pytest
import torch

from attnmesh import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Layout,
    Mask,
    Zigzag,
    attention,
    run_virtual,
)
from attnmesh.comm import Comm
from attnmesh.comm.base import Pending
from attnmesh.plan.shards import SCHEDULES
from attnmesh.testing.errors import relative_error
from helpers.cases import first

BUSY = 20_000_000  # device cycles, about 10 ms


class Recorded(Comm):
    """A comm that keeps a copy of every message it received."""

    shares_stream = True

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm.rank, comm.world, comm.timeout)
        self.comm = comm
        self.received: deque[torch.Tensor] = deque()

    def _exchange(self, op, sends, recvs):
        return Keeping(self.comm.exchange(sends, recvs), recvs, self.received)

    def _compare(self, signature):
        return self.comm._compare(signature)


class Keeping(Pending):
    def __init__(self, pending, recvs, received) -> None:
        self.pending, self.received = pending, received
        self.slots = [(buffer, len(received) + i) for i, (buffer, _) in enumerate(recvs)]
        received.extend([None] * len(recvs))

    def wait(self) -> None:
        self.pending.wait()
        for buffer, at in self.slots:
            self.received[at] = buffer.clone()
        self.slots = []


class Replayed(Comm):
    """Receives, message by message, what was recorded."""

    def __init__(self, rank: int, world: int, messages: deque[torch.Tensor]) -> None:
        super().__init__(rank, world, timeout=10)
        self.messages = messages

    def _exchange(self, op, sends, recvs):
        return Arriving([(buffer, self.messages.popleft()) for buffer, _ in recvs])

    def _compare(self, signature):
        return {self.rank: signature}


class Arriving(Pending):
    """Copies under way: at once on the CPU, on a side stream on a GPU."""

    def __init__(self, copies) -> None:
        self.copies = copies  # kept: memory that is let go of could be written before it is read
        self.stream = None
        if copies and copies[0][0].is_cuda:
            self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for buffer, content in copies:
                buffer.copy_(content)

    def wait(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def results(cp: ContextParallel, inputs, mask) -> list[torch.Tensor]:
    """This rank's out, dq, dk, dv."""
    length = inputs[0].shape[2]
    q, k, v, grad = (cp.shard(x, 2).clone() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp.attention(*leaves, mask=mask, length=length)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


PLACES = ("zigzag", "contiguous documents", "balanced documents")


def layout_and_mask(place: str, length: int) -> tuple[Layout, Mask]:
    documents = Causal() & Documents([length // 20, 5 * length // 8, length - length // 20 - 5 * length // 8])
    return {
        "zigzag": (Zigzag(), Causal()),
        "contiguous documents": (Contiguous(), documents),
        "balanced documents": (Balanced(documents), documents),
    }[place]


@pytest.mark.parametrize(
    ("schedule", "place"),
    first(
        2,
        [
            pytest.param(schedule, place, marks=() if s % len(PLACES) == p else pytest.mark.sweep)
            for s, schedule in enumerate(SCHEDULES)
            for p, place in enumerate(PLACES)
        ],
    ),
)
def test_a_rank_matches_the_reference_on_its_own_device(device, schedule, place):
    world = 8 if schedule == "ring" else 4  # on a GPU, stages of four blocks, and of two in a backward
    ranks_per_node = 2 if "+" in schedule else None
    length, dtype = (800, torch.bfloat16) if device.type == "cuda" else (200, torch.float32)
    layout, mask = layout_and_mask(place, length)
    inputs = [torch.randn(1, heads, length, 64, device=device).to(dtype) for heads in (8, 4, 4, 8)]
    wide = [x.double().requires_grad_() for x in inputs[:3]]
    whole_out = attention(*wide, mask=mask, backend="reference")
    exact = (whole_out.detach(), *torch.autograd.grad(whole_out, wide, inputs[3].double()))

    def rank(comm: Comm) -> deque[torch.Tensor]:
        recorded = Recorded(comm)
        results(
            ContextParallel(recorded, layout=layout, schedule=schedule, ranks_per_node=ranks_per_node), inputs, mask
        )
        return recorded.received

    recordings = run_virtual(world, rank)
    for at in {0, world // 2, world - 1}:
        comm = Replayed(at, world, recordings[at])
        cp = ContextParallel(comm, layout=layout, schedule=schedule, ranks_per_node=ranks_per_node)
        if device.type == "cuda":
            torch.cuda._sleep(BUSY)
        found = results(cp, inputs, mask)
        assert not comm.messages
        for name, a, whole in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
            error = relative_error(a, cp.shard(whole, 2))
            assert error < (1.2e-2 if dtype == torch.bfloat16 else 2e-6), f"{name} of rank {at}"
