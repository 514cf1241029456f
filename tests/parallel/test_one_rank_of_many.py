"""One rank of a ring, with the keys of the others arriving as they would: exact, and on a GPU on its two lanes.

Virtual ranks share a stream and go without lanes. Here the rank has the device to itself, messages arrive on a stream
of their own as they do with NCCL, and the device is kept behind the host, so that a missing wait shows.
"""

from collections import deque

import pytest
import torch

from attending import relative_error
from attnmesh import Causal, ContextParallel, Contiguous, Documents, Striped, Zigzag, attention
from attnmesh.comm.base import Comm, Pending
from attnmesh.parallel.ring import Ring
from attnmesh.plan.ring import RingPlan, ring_plan
from attnmesh.plan.spread import spread
from attnmesh.spans import as_tensor

BUSY = 20_000_000  # device cycles, about 10 ms


class Scripted(Comm):
    """Receives, message by message, what the plan says the other ranks would send."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world, timeout=10)
        self.script: deque[torch.Tensor] = deque()

    def follow(self, plan: RingPlan, k: torch.Tensor, v: torch.Tensor) -> None:
        whole = torch.stack([k, v]).permute(3, 0, 1, 2, 4)  # rows first, K and V together
        for stage in plan.stages(self.rank)[1:]:
            if stage.keys:
                shard = whole[as_tensor(plan.spread.keys[stage.block])]
                self.script.append(shard[stage.keys.start : stage.keys.stop].contiguous())

    def _exchange(self, verb, sends, recvs):
        return Arriving([(buffer, self.script.popleft()) for buffer, _ in recvs])

    def _compare(self, claim):
        return {self.rank: claim}


class Arriving(Pending):
    """Copies under way: at once on the CPU, on a side stream on a GPU."""

    def __init__(self, copies) -> None:
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


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize("mask", [Causal(), Causal() & Documents([40, 500, 260])], ids=["causal", "documents"])
def test_a_rank_is_exact_on_its_own_device(device, layout, world, mask):
    length, dtype = 800, torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, grad = (torch.randn(1, heads, length, 64, device=device).to(dtype) for heads in (4, 2, 2, 4))
    wide = q.double().requires_grad_()
    whole_out = attention(wide, k.double(), v.double(), mask=mask, backend="reference")
    exact = (whole_out.detach(), *torch.autograd.grad(whole_out, wide, grad.double()))
    for rank in {0, world // 2, world - 1}:
        comm = Scripted(rank, world)
        cp = ContextParallel(comm, layout=layout)
        local_q, local_k, local_v, local_grad = (cp.shard(x, 2).clone() for x in (q, k, v, grad))
        local_q.requires_grad_()
        plan = ring_plan(spread(mask, layout, length, world))
        comm.follow(plan, k, v)
        comm.follow(Ring(plan, 1.0, "auto", comm).backward_plan(dtype), k, v)
        if device.type == "cuda":
            torch.cuda._sleep(BUSY)
        out = cp.attention(local_q, local_k, local_v, mask=mask, length=length)
        (dq,) = torch.autograd.grad(out, local_q, local_grad)
        assert not comm.script
        for found, whole in zip((out, dq), exact, strict=True):
            assert relative_error(found.detach(), cp.shard(whole, 2)) < (8e-3 if dtype == torch.bfloat16 else 2e-6)
