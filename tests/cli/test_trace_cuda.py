"""Traces on a GPU: moments of its streams on the host's clock, and the same messages and kernels as on a CPU."""

import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from test_trace_command import traced_case, workload

from attnmesh import run_virtual
from attnmesh.cli.trace import TraceCase, record_attention
from attnmesh.comm.in_flight import InFlightMessage, record_on_stream
from attnmesh.plan.shards import SCHEDULES
from attnmesh.planner.schedules import loads
from attnmesh.trace.timeline import Recorder, summarize_overlap
from helpers.processes import run_processes

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.exclusive
def test_moments_on_a_gpu_are_those_of_its_stream():
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    recorder = Recorder(0, "cuda")
    with recorder.span("compute", "matmul", x.device):
        for _ in range(20):
            x @ x
    queued = time.perf_counter()
    (span,) = recorder.spans()
    done = time.perf_counter()
    assert recorder.start - 1e-4 <= span.begin < span.end <= done + 1e-4
    assert span.end > queued  # the host was long done: the end is the device's


def check(spans, ask: TraceCase, world: int) -> None:
    problem = workload(ask, world)
    both = [loads(ask.schedule, problem, backward=way) for way in (False, True)]
    for rank in range(world):
        mine = [span for span in spans if span.rank == rank]
        assert all(-1e-3 < span.begin <= span.end for span in mine)
        sent = sum(span.args["bytes"] for span in mine if span.track == "send")
        assert sent == sum(way[rank].sent for way in both)
        assert {span.name for span in mine if span.track == "compute"} == {"attention", "attention backward"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_virtual_ranks_share_a_stream_so_their_kernels_never_overlap(schedule):
    ask = traced_case(schedule, device="cuda", length=4096, head_dim=64)
    spans = run_virtual(4, partial(record_attention, case=ask))[0]
    check(spans, ask, 4)
    computed = sorted((span.begin, span.end) for span in spans if span.track == "compute")
    # CUDA events measure from the start of the recording in float32 milliseconds: late events have a coarser clock.
    assert all(
        end <= begin + max(1e-6, 2 * torch.finfo(torch.float32).eps * end)
        for (_, end), (begin, _) in pairwise(computed)
    )


@pytest.mark.ranks
def test_processes_that_gloo_carries_through_host_memory():
    ask = traced_case("ring", device="cuda", length=4096, head_dim=64)
    check(run_processes(2, record_attention, ask, timeout=300)[0], ask, 2)


@pytest.mark.exclusive
@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_messages_over_nccl_and_kernels_run_at_the_same_time(world):
    """NCCL's streams are its own. The ranks share a GPU, and messages go through sockets: both take milliseconds."""
    ask = traced_case("ring", device="cuda", length=1 << 16, head_dim=64, layout="zigzag")
    spans = run_processes(world, record_attention, ask, timeout=300, backend="nccl")[0]
    check(spans, ask, world)
    # Of two ranks, each has one message in backward that is not sent after the last kernel: nothing to rely on.
    for kernel in ("attention", "attention backward") if world > 2 else ("attention",):
        chosen = [span for span in spans if span.track != "compute" or span.name == kernel]
        ranks = summarize_overlap(chosen)
        overlap, compute, transfer = (
            sum(getattr(rank, name) for rank in ranks) for name in ("overlap", "compute", "transfer")
        )
        print(f"{world} ranks, {kernel}: {1e3 * overlap:.1f} ms of {1e3 * compute:.1f} and {1e3 * transfer:.1f} ms")
        assert overlap > 0.05 * min(compute, transfer)


@pytest.mark.exclusive
def test_messages_that_only_order_streams_are_noted_without_a_wait_of_the_host():
    """As NCCL's: `wait` lets the current stream wait. The rank's own stream is free meanwhile."""
    carrying, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")

    class Work:
        def __init__(self) -> None:
            with torch.cuda.stream(carrying):
                for _ in range(50):
                    x @ x
                self.done = carrying.record_event()

        def wait(self) -> bool:
            torch.cuda.current_stream().wait_event(self.done)
            return True

    x @ x
    recorder = Recorder(0, "cuda")
    messages_in_flight = [InFlightMessage(x, 1, send=True), InFlightMessage(x, 2, send=False)]
    posted = recorder.now(x.device)
    record_on_stream([Work()], messages_in_flight, "exchange", recorder, posted)
    begun = recorder.now(x.device)
    recorder.add("compute", "mine", posted, begun)
    looked = time.perf_counter()
    spans = recorder.spans()
    messages = {span.track: span for span in spans if span.track != "compute"}
    assert set(messages) == {"send", "receive"}
    assert messages["send"].end == messages["receive"].end > looked
    assert next(span.end for span in spans if span.track == "compute") < messages["send"].end
