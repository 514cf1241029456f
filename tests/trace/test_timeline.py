"""Traces: what goes into a file comes out of it, and viewers find what they need."""

import json
import math
import re
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.planner.simulator import simulate
from attnmesh.trace.timeline import TRACKS, Span, read_trace, write_trace
from helpers.clusters import all_to_all_program, simulated_cluster

RING = [
    Span(1, "wait", "keys 0", 0.75, 1.5),
    Span(1, "receive", "keys 0", 0.0, 1.5, {"bytes": 4096, "from": 0}),
    Span(1, "compute", "attention", 0.0, 0.75, {"operations": 1e9}),
    Span(0, "send", "keys 0", 0.0, 1.25, {"bytes": 4096, "to": 1}),
    Span(0, "compute", "attention", 0.5, 0.75),
    Span(0, "compute", "attention", 0.0, 0.5),
]


def written(tmp_path, spans, **kwargs):
    write_trace(tmp_path / "trace.json", spans, **{"title": "a ring", **kwargs})
    return json.loads((tmp_path / "trace.json").read_text())


def test_what_is_written_is_read(tmp_path):
    write_trace(tmp_path / "trace.json", RING, title="a ring", metadata={})
    found = read_trace(tmp_path / "trace.json")
    assert found == sorted(RING, key=lambda s: (s.rank, TRACKS.index(s.track), s.begin))


def test_every_event_has_the_fields_that_viewers_require(tmp_path):
    trace = written(tmp_path, RING, metadata={"world": np.int64(2), "program": "ring"})
    assert trace["otherData"] == {"title": "a ring", "world": 2, "program": "ring"}
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    send = next(event for event in events if event.get("cat") == "send")
    assert (send["name"], send["pid"], send["ts"], send["dur"]) == ("keys 0", 0, 0.0, 1_250_000.0)
    assert send["args"] == {"bytes": 4096, "to": 1}


def test_ranks_are_processes_and_tracks_are_threads_in_order(tmp_path):
    events = written(tmp_path, RING)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    threads = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert [name for rank, _, name in sorted(threads) if rank == 1] == ["compute", "receive", "wait"]
    assert [name for rank, _, name in sorted(threads) if rank == 0] == ["compute", "send"]
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=lambda at: (at[0], order[at])) == [(rank, tid) for rank, tid, _ in sorted(threads)]
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used == set(order)


def overlaps(events):
    """Events of one thread, in nanoseconds, that begin before another one there has ended."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, took = round(event["ts"] * 1000), round(event["dur"] * 1000)
            threads[event["pid"], event["tid"]].append((begin, begin + took))
    return [(a, b) for times in threads.values() for a, b in pairwise(sorted(times)) if b[0] < a[1]]


def test_spans_of_a_track_at_the_same_time_lie_side_by_side(tmp_path):
    spans = simulate(all_to_all_program(np.full((4, 4), 100)), simulated_cluster(message=0.1), keep=range(4)).spans
    events = written(tmp_path, spans)["traceEvents"]
    assert overlaps(events) == []
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2}
    assert {"send", "send 2", "send 3"} <= names
    assert len(read_trace(tmp_path / "trace.json")) == len(spans)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(TRACKS), st.floats(0, 100), st.floats(0, 10)), max_size=30
    ).map(lambda rows: [Span(rank, track, "x", begin, begin + took) for rank, track, begin, took in rows])
)
def test_nothing_is_lost_and_nothing_overlaps(tmp_path_factory, spans):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(path, spans, title="any")
    assert overlaps(json.loads(path.read_text())["traceEvents"]) == []
    found = sorted((s.rank, s.track, s.begin) for s in read_trace(path))
    expected = sorted((s.rank, s.track, s.begin) for s in spans)
    assert [at[:2] for at in found] == [at[:2] for at in expected]
    assert [at[2] for at in found] == pytest.approx([at[2] for at in expected], abs=1e-9)
    assert sum(s.end for s in read_trace(path)) == pytest.approx(sum(s.end for s in spans), abs=1e-7)


@pytest.mark.parametrize(
    ("rank", "begin", "end"),
    [(-1, 0.0, 1.0), (0, 2.0, 1.0), (0, -1.0, 1.0), (0, 0.0, float("inf")), (0, float("nan"), 1.0)],
)
def test_an_impossible_span_is_rejected(tmp_path, rank, begin, end):
    with pytest.raises(ValueError, match="span must have rank"):
        written(tmp_path, [Span(rank, "send", "x", begin, end)])


def test_args_that_are_not_json_are_rejected(tmp_path):
    with pytest.raises(TypeError, match="args and metadata must be"):
        written(tmp_path, [Span(0, "send", "x", 0.0, 1.0, {"peer": object()})])
    with pytest.raises(ValueError, match="JSON compliant"):
        written(tmp_path, [Span(0, "send", "x", 0.0, 1.0, {"rate": float("nan")})])


EVENT = {"ph": "X", "pid": 0, "cat": "send", "name": "x", "ts": 1, "dur": 2.5, "args": {}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ts": math.nan}, "ts must be a finite number of at least 0, got nan"),
        ({"dur": math.inf}, "dur must be a finite number of at least 0, got inf"),
        ({"ts": -1}, "ts must be a finite number of at least 0, got -1"),
        ({"ts": 10**400}, "ts must be a finite number"),
        ({"ts": "1"}, "ts must be a finite number of at least 0, got '1'"),
        ({"ts": None}, "ts must be a finite number"),
        ({"pid": -1}, "pid must be an integer >= 0, got -1"),
        ({"pid": 1.5}, "pid must be an integer >= 0, got 1.5"),
        ({"pid": 2**63}, "pid must be at most 65536, got 9223372036854775808"),
        ({"pid": True}, "pid must be an integer"),
        ({"cat": "lunch"}, "cat must be one of compute, send, receive, wait, got 'lunch'"),
        ({"cat": ["send"]}, "cat must be one of"),
        ({"name": 3}, "name must be a string, got 3"),
        ({"args": None}, "args must be an object, got None"),
        ({"args": [1]}, "args must be an object"),
    ],
)
def test_an_event_of_another_kind_is_named(tmp_path, wrong, said):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [EVENT, {**EVENT, **wrong}]}))
    with pytest.raises(
        ValueError, match=rf"trace\.json is not a trace written by attnmesh: in event 1, {re.escape(said)}"
    ):
        read_trace(path)


@pytest.mark.parametrize(
    "text",
    [
        "3",
        "[]",
        "{}",
        '{"traceEvents": 3}',
        '{"traceEvents": [3]}',
        '{"traceEvents": {}}',
        "",
        "{",
        "[" * 100_000,
        "\0",
    ],
    ids=lambda text: text[:20],
)
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json is not "):
        read_trace(path)
