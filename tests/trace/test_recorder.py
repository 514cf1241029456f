"""Recorder: spans in order on one clock; no overhead without a recording."""

import time

import pytest
import torch

from attnmesh import ContextParallel, run_virtual
from attnmesh.comm import Comm, SubComm, recording
from attnmesh.trace import timeline
from attnmesh.trace.timeline import Recorder


def test_spans_are_sorted_by_begin():
    recorder = Recorder(3)
    with recorder.span("compute", "outer", blocks=2):
        begin = recorder.now()
        recorder.add("wait", "inner", begin, recorder.now(), verb="exchange")
    outer, inner = recorder.spans()
    assert (outer.rank, outer.track, outer.name, outer.args) == (3, "compute", "outer", {"blocks": 2})
    assert (inner.track, inner.name, inner.args) == (
        "wait",
        "inner",
        {"verb": "exchange"},
    )
    assert recorder.start <= outer.begin <= inner.begin <= inner.end <= outer.end <= time.perf_counter()


def test_messages_are_counted_by_direction_and_peer_so_that_both_ends_match():
    recorder = Recorder(0)
    ends = [("send", 1), ("send", 1), ("receive", 1), ("send", 2), ("send", 1)]
    for track, peer in ends:
        recorder.message(track, "exchange", peer, 8).done(recorder.now(), recorder.now())
    assert [span.args["number"] for span in recorder.spans()] == [0, 1, 0, 0, 2]
    assert [span.name for span in recorder.spans()][1:3] == ["exchange to rank 1", "exchange from rank 1"]
    assert all(span.args["bytes"] == 8 for span in recorder.spans())


def test_an_incomplete_message_is_not_recorded():
    recorder = Recorder(0)
    recorder.message("send", "exchange", 1, 8)
    assert recorder.spans() == []


def test_without_recording_no_recorder_is_touched(monkeypatch):
    def touched(*args: object, **named: object) -> None:
        raise AssertionError("a recorder was used without a recording")

    for name in ("__init__", "now", "add", "span", "message"):
        monkeypatch.setattr(Recorder, name, touched)

    def attend(comm: Comm) -> None:
        assert comm.recorder is None
        for schedule in ("ring", "allgather", "ulysses"):
            x = torch.randn(1, 2, 8, 8).requires_grad_()
            ContextParallel(comm, schedule=schedule).attention(x, x, x).sum().backward()
        comm.all_reduce(torch.ones(3))

    run_virtual(2, attend)


def test_kernels_are_recorded_where_a_rank_attends_to_its_own_keys_only():
    def attend(comm: Comm) -> list[str]:
        x = torch.randn(1, 2, 8, 8).requires_grad_()
        with recording(comm) as recorder:
            ContextParallel(comm, schedule="ring").attention(x, x, x).sum().backward()
        return [span.name for span in recorder.spans()]

    assert run_virtual(1, attend) == [["attention", "attention backward"]]


def test_a_part_of_a_world_is_recorded_with_it_and_the_recording_ends():
    def parts(comm: Comm) -> list[str]:
        part = SubComm(comm, [comm.rank])
        with recording(comm) as recorder:
            assert part.recorder is recorder
            with pytest.raises(RuntimeError, match="is being recorded already"), recording(part):
                pass
        assert comm.recorder is None
        assert part.recorder is None
        return [span.name for span in recorder.spans()]

    assert run_virtual(2, parts) == [[], []]


def test_a_recording_ends_with_an_error_too():
    def fails(comm: Comm) -> None:
        with pytest.raises(ZeroDivisionError), recording(comm):
            raise ZeroDivisionError
        assert comm.recorder is None

    run_virtual(1, fails)


def test_recorders_that_begin_together_measure_from_one_moment_of_a_gpu(monkeypatch):
    """Virtual ranks do: with a moment each, kernels that one stream runs in turn would seem to overlap."""
    now = 5.0

    class Anchor:
        def __init__(self, device):
            self.host = now

    monkeypatch.setattr(timeline, "_Anchor", Anchor)
    monkeypatch.setattr(timeline, "_anchors", {})
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now)
    first, other = torch.device("cuda", 0), torch.device("cuda", 1)
    anchor = timeline._anchor_of(first)
    now += 0.5
    assert timeline._anchor_of(first) is anchor
    assert timeline._anchor_of(other) is not anchor
    now += 1.0  # float32 milliseconds from long ago are coarse
    assert timeline._anchor_of(first) is not anchor
