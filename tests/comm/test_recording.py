"""Messages and waits as comms note them, on virtual ranks and on processes."""

import os
import time

import pytest
import torch

from attnmesh.comm import Comm, CommError, recording, run_virtual
from attnmesh.trace.timeline import Span
from helpers.processes import Died, run_processes


def verbs(comm: Comm) -> tuple[list[Span], int, int]:
    """Every verb once, recorded; the bytes and messages that the comm itself counted."""
    world, right, left = comm.world, (comm.rank + 1) % comm.world, (comm.rank - 1) % comm.world
    with recording(comm) as recorder:
        comm.traffic.reset()
        comm.exchange([(torch.ones(100), right), (torch.ones(50), right)], []).wait() if comm.rank == 0 else None
        if comm.rank == 1:
            buffers = torch.empty(100), torch.empty(50)
            pending = comm.exchange([], [(buffer, left) for buffer in buffers])
            pending.wait()
            pending.wait()  # twice does no harm, and is noted once
        comm.all_gather(torch.ones(3), [(3,)] * world)
        comm.reduce_scatter([torch.ones(2)] * world)
        comm.exchange([], []).wait()  # nothing to send, nothing to note
        counted = comm.traffic.bytes, comm.traffic.messages
        comm.all_gather(torch.empty(0), [(0,)] * world)
    return recorder.spans(), *counted


def check_verbs(ranks: list[tuple[list[Span], int, int]]) -> None:
    world = len(ranks)
    for rank, (spans, nbytes, _) in enumerate(ranks):
        tracks = {track: [span for span in spans if span.track == track] for track in ("send", "receive", "wait")}
        assert sum(map(len, tracks.values())) == len(spans)
        assert all(span.rank == rank and span.begin <= span.end for span in spans)
        assert sum(span.args["bytes"] for span in tracks["send"]) == nbytes
        assert len(tracks["wait"]) == 2 + (rank < 2)
        assert len(tracks["send"]) == 2 * (world - 1) + 2 * (rank == 0)
        assert len(tracks["receive"]) == 2 * (world - 1) + 2 * (rank == 1)
        for span in tracks["send"]:  # the other end noted the same message
            other = ranks[span.args["peer"]][0]
            facts = {**span.args, "peer": rank}
            assert [end.args for end in other if end.track == "receive" and end.args == facts] == [facts]


@pytest.mark.parametrize("world", [2, 3])
def test_virtual_ranks_record_every_message_and_wait(world):
    check_verbs(run_virtual(world, verbs))


def test_processes_record_every_message_and_wait():
    check_verbs(run_processes(2, verbs))


def ends_of_messages(spans: list[Span]) -> list[float]:
    return [span.end for span in spans if span.track in ("send", "receive")]


def behind_compute(comm: Comm) -> list[Span]:
    """A large message while this rank computes until its end is known, then a wait."""
    other = 1 - comm.rank
    x, sent, buffer = torch.randn(200, 200), torch.randn(1 << 20), torch.empty(1 << 20)
    with recording(comm) as recorder:
        pending = comm.exchange([(sent, other)], [(buffer, other)])
        with recorder.span("compute", "products"):
            until = time.perf_counter() + 30
            while len(ends_of_messages(recorder.spans())) < 2 and time.perf_counter() < until:
                x @ x
        pending.wait()
    return recorder.spans()


def test_the_end_of_a_message_is_known_although_the_rank_computes():
    """gloo itself would tell only at the wait: the overlap would look as long as the computation."""
    for spans in run_processes(2, behind_compute):
        (computed,) = (span for span in spans if span.track == "compute")
        (waited,) = (span for span in spans if span.track == "wait")
        ends = ends_of_messages(spans)
        assert len(ends) == 2
        assert max(ends) < computed.end <= waited.begin <= waited.end  # done before the rank looked


def without_a_peer(comm: Comm) -> str:
    comm.timeout = 15
    with recording(comm):
        if comm.rank == 1:
            os._exit(7)
        try:
            comm.exchange([], [(torch.empty(4), 1)]).wait()
        except CommError as error:
            return str(error)
    return "nothing"


def test_a_lost_rank_is_missed_in_time_while_recording_too():
    waiting, gone = run_processes(2, without_a_peer, strict=False)
    assert gone == Died(7)
    assert waiting.startswith("rank 1 is dead: its process has ended [rank 0 was in exchange")
    assert "receiving 16 bytes from rank 1" in waiting
