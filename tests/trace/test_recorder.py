"""One rank's notes: in order, on one clock, and not there at all while nobody watches."""

import time

import pytest
import torch

from attnmesh import Comm, ContextParallel, run_virtual
from attnmesh.comm import recording
from attnmesh.comm.sub import SubComm
from attnmesh.trace.recorder import Recorder


def test_notes_come_back_as_spans_in_the_order_of_their_beginning():
    recorder = Recorder(3)
    with recorder.noting("compute", "outer", blocks=2):
        begin = recorder.now()
        recorder.note("wait", "ranks_per_node", begin, recorder.now(), verb="exchange")
    outer, ranks_per_node = recorder.ranges()
    assert (outer.rank, outer.track, outer.name, outer.facts) == (3, "compute", "outer", {"blocks": 2})
    assert (ranks_per_node.track, ranks_per_node.name, ranks_per_node.facts) == (
        "wait",
        "ranks_per_node",
        {"verb": "exchange"},
    )
    assert (
        recorder.began <= outer.begin <= ranks_per_node.begin <= ranks_per_node.end <= outer.end <= time.perf_counter()
    )


def test_messages_are_counted_by_direction_and_peer_so_that_both_ends_match():
    recorder = Recorder(0)
    ends = [("send", 1), ("send", 1), ("receive", 1), ("send", 2), ("send", 1)]
    for track, peer in ends:
        recorder.message(track, "exchange", peer, 8).done(recorder.now(), recorder.now())
    assert [span.facts["number"] for span in recorder.ranges()] == [0, 1, 0, 0, 2]
    assert [span.name for span in recorder.ranges()][1:3] == ["exchange to rank 1", "exchange from rank 1"]
    assert all(span.facts["bytes"] == 8 for span in recorder.ranges())


def test_a_message_that_is_not_done_is_not_noted():
    recorder = Recorder(0)
    recorder.message("send", "exchange", 1, 8)
    assert recorder.ranges() == []


def test_without_recording_no_recorder_is_touched(monkeypatch):
    def touched(*args: object, **named: object) -> None:
        raise AssertionError("a recorder was used although nobody watches")

    for name in ("__init__", "now", "note", "noting", "message"):
        monkeypatch.setattr(Recorder, name, touched)

    def attend(comm: Comm) -> None:
        assert comm.recorder is None
        for schedule in ("ring", "allgather", "ulysses"):
            x = torch.randn(1, 2, 8, 8).requires_grad_()
            ContextParallel(comm, schedule=schedule).attention(x, x, x).sum().backward()
        comm.all_reduce(torch.ones(3))

    run_virtual(2, attend)


def test_a_part_of_a_world_is_recorded_with_it_and_the_recording_ends():
    def parts(comm: Comm) -> list[str]:
        part = SubComm(comm, [comm.rank])
        with recording(comm) as recorder:
            assert part.recorder is recorder
            with pytest.raises(RuntimeError, match="is being recorded already"), recording(part):
                pass
        assert comm.recorder is None
        assert part.recorder is None
        return [span.name for span in recorder.ranges()]

    assert run_virtual(2, parts) == [[], []]


def test_a_recording_ends_with_an_error_too():
    def fails(comm: Comm) -> None:
        with pytest.raises(ZeroDivisionError), recording(comm):
            raise ZeroDivisionError
        assert comm.recorder is None

    run_virtual(1, fails)
