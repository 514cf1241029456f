"""The rehearsal on namespaces: arithmetic of counters and plans, verdicts, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from attnmesh.comm import VirtualComm, run_virtual
from attnmesh.comm.base import Message, Pending
from attnmesh.planner.hardware import Curve, Device, Link
from attnmesh.planner.program import program_loads
from benchmarks.rehearsal import __main__ as command
from benchmarks.rehearsal import nodes, programs
from benchmarks.rehearsal.links import HEADERS, Counters, LinkBytes, planned_links
from benchmarks.rehearsal.ranks import Case, Outcome
from benchmarks.rehearsal.study import (
    TWO_LEVEL,
    WORLD,
    Machine,
    attention_row,
    cases,
    fewer_rows,
    goodput,
    is_wrong,
    outside,
)

NET_DEV = """Inter-|   Receive                                   |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:    7       1    0    0    0     0          0         0     7       1    0    0    0     0       0          0
  eth0: 9132       3    0    0    0     0          0         0  4066       2    0    0    0     0       0          0
"""


def test_counters_without_headers_are_payload() -> None:
    counters = Counters.read("eth0", NET_DEV)
    assert counters == Counters(9132, 3, 4066, 2)
    assert (counters.received, counters.sent) == (9132 - 3 * HEADERS, 4066 - 2 * HEADERS)
    assert counters.overhead == 5 * HEADERS / (9132 + 4066 - 5 * HEADERS)
    assert counters.since(Counters(132, 1, 66, 1)) == Counters(9000, 2, 4000, 1)
    with pytest.raises(ValueError, match="eth1"):
        Counters.read("eth1", NET_DEV)


@pytest.mark.parametrize("count", [2, 4])
def test_planned_links_are_the_loads_of_the_programs(count: int) -> None:
    per_node = WORLD // count
    for case in cases(count, quick=False):
        programs = case.programs(WORLD, per_node)
        links = planned_links(programs, per_node)
        sent = sum(np.array([load.inter_node for load in program_loads(each, per_node)]) for each in programs)
        np.testing.assert_array_equal(links.sent, sent.reshape(count, per_node).sum(1))
        assert links.sent.sum() == links.received.sum() > 0


def test_the_link_that_differs_most_decides() -> None:
    planned = LinkBytes(np.array([100, 100]), np.array([100, 100]))
    assert LinkBytes(np.array([100, 101]), np.array([90, 100])).ratio_to(planned) == 0.9
    assert LinkBytes(np.array([100, 101]), np.array([100, 100])).ratio_to(planned) == 1.01
    nothing = LinkBytes(np.array([0]), np.array([0]))
    assert (nothing.ratio_to(nothing), LinkBytes(np.array([1]), np.array([0])).ratio_to(nothing)) == (1.0, float("inf"))
    assert [outside(ratio, 0.02) for ratio in (0.97, 0.99, 1.0, 1.02, 1.03, float("nan"))] == [
        True,
        *[False] * 3,
        *[True] * 2,
    ]


def _machine() -> Machine:
    kinds = ("attention", "attention backward", "copy", "relayout")
    device = Device("test", "test", 1e9, 1e-6, tuple((kind, Curve(((1e9, 1e-3),))) for kind in kinds), 2)
    return Machine(device, Link("memory", "test", 1e-4, 1e9, shared=True))


def _outcome(case: Case, per_node: int, factor: float = 1.0) -> Outcome:
    """A run that sent `factor` times the planned bytes, in packets of 1448 bytes."""
    links = planned_links(case.programs(WORLD, per_node), per_node)
    sent, received = ((factor * way).astype(np.int64) for way in (links.sent, links.received))
    packets = [(int(out) // 1448, int(into) // 1448) for out, into in zip(sent, received, strict=True)]
    counters = [
        Counters(int(into) + HEADERS * p_in, p_in, int(out) + HEADERS * p_out, p_out)
        for out, into, (p_out, p_in) in zip(sent, received, packets, strict=True)
    ]
    return Outcome(case, [1.0], counters, 1e-7)


def test_rows_say_what_is_wrong() -> None:
    machine, link = _machine(), Link("veth", "test", 1e-4, goodput(100), 1e-4)
    case = cases(2, quick=True)[0]
    right = replace(_outcome(case, 2), seconds=[machine.simulated_seconds(case.programs(WORLD, 2), 2, link)])
    assert attention_row(right, 1, machine, 2, link)["verdict"] == "ok"
    for wrong, outcome in {
        "bytes": replace(right, counters=_outcome(case, 2, 1.03).counters),
        "time": replace(right, seconds=[1.3 * right.seconds[0]]),
        "result": replace(right, error=float("nan")),
    }.items():
        row = attention_row(outcome, 1, machine, 2, link)
        assert is_wrong(row), wrong
        assert row["verdict"] == f"WRONG: {wrong}"


@pytest.mark.parametrize("elements", [1, 4095, 4097, 50001])
def test_a_planned_all_reduce_sends_what_ranks_send(elements: int) -> None:
    sent = []

    def rank(comm: VirtualComm) -> None:
        exchange = comm._exchange

        def noted(op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
            sent.extend((comm.rank, peer, x.nbytes) for x, peer in sends)
            return exchange(op, sends, recvs)

        comm._exchange = noted  # type: ignore[method-assign]
        comm.all_reduce(torch.ones(elements))

    run_virtual(WORLD, rank)
    planned = [
        message
        for round_ in programs.planned_all_reduce(4 * elements, WORLD).rounds()
        for each in round_.starts.values()
        for message in zip(each.source.tolist(), each.target.tolist(), each.nbytes.tolist(), strict=True)
    ]
    assert sorted(planned) == sorted(sent)


def test_a_planned_prefill_sends_what_ranks_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PROMPT", 250)
    model = programs.generation_model()

    def rank(comm: VirtualComm) -> int:
        steps = programs.GenerationSteps(model, comm)
        steps.prefill(0)  # also agrees on what is sent
        comm.traffic.reset()
        steps.prefill(1)
        return comm.traffic.bytes

    facts = programs._facts(model, 1)
    prefill = programs.Measured("prefill", 1, 0.0, 0.0, [], length=programs.PROMPT, losses=[], **facts)
    planned = np.zeros(WORLD, dtype=np.int64)
    for each in programs.planned_programs(prefill, WORLD, 1):
        for messages in (messages for round_ in each.rounds() for messages in round_.starts.values()):
            np.add.at(planned, messages.source, messages.nbytes)
    assert planned.tolist() == run_virtual(WORLD, rank)


def test_two_levels_must_send_less_than_flat_schedules() -> None:
    outcomes = [_outcome(case, 2) for case in cases(2, quick=True)]
    rows = fewer_rows(outcomes, 1)
    assert len(rows) == len(TWO_LEVEL)
    assert not any(map(is_wrong, rows))
    more = [_outcome(o.case, 2, 3.0 if o.case.schedule == "ring+ring" else 1.0) for o in outcomes]
    assert [row["run"] for row in fewer_rows(more, 1) if is_wrong(row)] == ["prefill, ring+ring"]


def test_without_root_one_line_says_that_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(nodes.shutil, "which", lambda name: f"/usr/bin/{name}")
    result = CliRunner().invoke(command.app, [])
    assert (result.exit_code, result.output) == (
        0,
        "rehearse: skipped: root is needed, to create network namespaces.\n",
    )
    monkeypatch.setattr(nodes.shutil, "which", lambda name: None if name == "tc" else name)
    assert nodes.missing() == "the programs of iproute2 are needed"


def _networks() -> set[str]:
    """The network namespaces of this machine that have a process."""
    found = set()
    for process in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(process))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("end", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_rehearsal_leaves_nothing_behind(end: signal.Signals | None) -> None:
    lacking = nodes.missing()
    if lacking is not None:
        pytest.skip(lacking)
    before = _networks()
    words = [
        sys.executable,
        "-m",
        "benchmarks.rehearsal",
        "--quick",
        "--only",
        "attention" if end is None else "programs",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        if end is not None:
            deadline = time.monotonic() + 200  # after imports
            while len(_networks() - before) < 3:
                assert time.monotonic() < deadline, "no namespaces"
                time.sleep(0.1)
            time.sleep(4)  # the agents have started
            run.send_signal(end)
        said = run.communicate(timeout=300)[0]
    if end is None:
        # Times are not asserted here: other tests run at the same time.
        assert "WRONG" not in said.replace("WRONG: time", ""), said
    deadline = time.monotonic() + 60
    while _networks() - before:
        assert time.monotonic() < deadline, "namespaces are left"
        time.sleep(0.1)
