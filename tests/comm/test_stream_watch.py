"""Operations that do not complete in time are noticed beside the rank, and its thread raises the error once."""

import os
import pickle
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from attnmesh.comm import CommError, comm_from
from attnmesh.comm.health import monitor
from attnmesh.comm.health.caller_error import Caller, lock, uninterrupted
from attnmesh.comm.in_flight import InFlightMessage
from attnmesh.comm.nccl import QueuedOperation, StreamWatch
from attnmesh.utils.text import without_link
from helpers.processes import run_processes


class Event:
    """As one of CUDA."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


class Overdue:
    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, operation) -> None:
        self.names.append(operation.name)


def test_the_oldest_operation_that_has_not_completed_is_known():
    overdue, now = Overdue(), time.monotonic()
    watch, events = StreamWatch(overdue.note), [Event(), Event(True), Event()]
    operations = [QueuedOperation(str(i), {1}, now - 3 + i, 60, event) for i, event in enumerate(events)]
    for operation in operations:
        watch.add(operation)
    watch.drop_completed()
    assert watch.oldest().name == "0"
    assert watch.oldest(age=100) is None
    events[0].done = True
    watch.drop_completed()
    assert watch.oldest().name == "2"
    assert watch.oldest(age=2) is None
    assert [operation.has_completed for operation in operations] == [True, True, False]
    events[2].done = True
    watch.drop_completed()
    assert watch.oldest() is None


class BlockedEvent(Event):
    """CUDA does not answer, because another thread waits for the device inside of it."""

    def query(self) -> bool:
        while not self.done:
            time.sleep(0.01)
        return True


def test_an_operation_that_does_not_complete_in_time_is_reported():
    """Whether it is queued, CUDA does not say so, or it is still being posted."""
    blocked, watched = BlockedEvent(), []
    for event in (Event(), None, blocked, Event()):  # all at once, so that their time passes once
        overdue = Overdue()
        watch = StreamWatch(overdue.note)
        operation = QueuedOperation("ring", {1}, time.monotonic(), 0.3, event)
        watch.add(operation)
        watch.report_overdue()
        assert not overdue.names
        watched.append((watch, operation, overdue))
    deadline = time.monotonic() + 30
    for watch, operation, overdue in watched:
        while not overdue.names and time.monotonic() < deadline:  # the thread notices
            time.sleep(0.02)
        assert overdue.names[0] == "ring"
        watch.remove(operation)
        assert watch.oldest() is None
    blocked.done = True


def test_a_thread_that_waits_raises_the_error_once_and_its_result_is_not_used():
    error, released, used, caught = Caller(), threading.Event(), [], []
    ready = threading.Event()

    def rank() -> None:
        error.remember_thread()
        try:
            ready.set()
            used.append(released.wait(5))  # as in torch.cuda.synchronize()
        except CommError as raised:
            caught.append(raised)
            time.sleep(0.01)  # a second one would come here

    thread = threading.Thread(target=rank)
    thread.start()
    ready.wait(5)
    error.send(CommError("rank 1 did not arrive"))
    released.set()
    thread.join(5)
    assert not used
    assert [without_link(str(raised)) for raised in caught] == ["rank 1 did not arrive"]
    assert repr(type(caught[0])) == repr(CommError)  # in tracebacks, too
    again = pickle.loads(pickle.dumps(caught[0]))
    assert type(again) is CommError
    assert without_link(str(again)) == "rank 1 did not arrive"


def test_an_error_that_is_raised_otherwise_is_withdrawn():
    error, ready, withdrawn, ended = Caller(), threading.Event(), threading.Event(), []

    def rank() -> None:
        error.remember_thread()
        ready.set()
        ended.append(withdrawn.wait(5))

    thread = threading.Thread(target=rank)
    thread.start()
    ready.wait(5)
    with lock:
        error.send(CommError("late"))
        error.withdraw()
    withdrawn.set()
    thread.join(5)
    assert ended == [True]


def traced_after_errors(comm):
    error = Caller()
    try:
        error.send(CommError("raised"))
        while True:
            pass
    except CommError:
        error.withdraw()  # has been raised
    try:
        with lock:
            error.send(CommError("raised by the lock's end at the latest"))
    except CommError:
        error.withdraw()
    sys.settrace(lambda *_: None)
    (lambda: None)()
    return "traced"


def test_a_program_can_be_traced_after_an_error_was_withdrawn():
    """In a process of its own: it may crash."""
    assert run_processes(1, traced_after_errors) == ["traced"]


# Ranks with operations that never complete, as if NCCL carried them.


def wait_for_rank_1(comm, timeout):
    """What a rank raises that waits for its device, while rank 1 does something else or has ended."""
    group = comm_from(dist.new_group(list(range(comm.world))), timeout=timeout)
    group.agree("start", {})
    group.nccl.has_begun = True
    group.barrier()
    begin = time.monotonic()
    raised = dist.distributed_c10d._get_default_store()
    if comm.rank == 1 and timeout > 10:
        os._exit(0)
    try:
        if comm.rank != 1:
            group.note("ring")
            if comm.rank == 0:
                group.note("another ring")  # rank 2 waits too, in an earlier call
            operation = group.queued("ring")
            operation.event = Event()
            group.nccl._in_flight.add(operation)
        while time.monotonic() < begin + 8:  # as in torch.cuda.synchronize()
            if comm.rank == 1 and raised.add("raised", 0) == comm.world - 1:
                break
            time.sleep(0.05)
        return "nothing", time.monotonic() - begin
    except CommError as error:
        raised.add("raised", 1)
        with pytest.raises(CommError, match="this comm has failed before"):
            group.barrier()
        return str(error), time.monotonic() - begin


def test_a_rank_that_does_not_arrive_is_named():
    ranks = run_processes(3, wait_for_rank_1, 0.5)
    for text, seconds in (ranks[0], ranks[2]):
        assert text.startswith("rank 1 did not arrive [")
        assert seconds < 8


@pytest.mark.sweep
def test_a_rank_that_has_ended_is_noticed_long_before_the_timeout():
    ranks = run_processes(3, wait_for_rank_1, 100, strict=False)
    for text, seconds in (ranks[0], ranks[2]):
        assert "rank 1 is dead" in text
        assert seconds < 8


def wait_in_two_groups(comm):
    """Rank 2 waits for rank 3, which does nothing; the others wait for rank 2, in a group without rank 3.

    All are in the same call of that group: rank 2 has failed there, say.
    """
    pair, three = dist.new_group([2, 3]), dist.new_group([0, 1, 2])
    mine = comm_from(pair if comm.rank > 1 else three, timeout=0.5 if comm.rank < 2 else 8)
    for group in (pair, three):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            comm_from(group).nccl.has_begun = True
    if comm.rank == 2:
        comm_from(three).note("ring")
    begin = time.monotonic()
    if comm.rank == 3:
        time.sleep(6)
        return ""
    try:
        mine.note("ring")
        operation = mine.queued("ring")
        operation.event = Event()
        mine.nccl._in_flight.add(operation)
        while time.monotonic() < begin + 8:
            time.sleep(0.05)
        return "nothing"
    except CommError as error:
        return str(error)


@pytest.mark.sweep
def test_a_rank_of_another_group_that_did_not_arrive_is_named():
    ranks = run_processes(4, wait_in_two_groups)
    for error in ranks[:2]:
        assert error.startswith("rank 3 did not arrive [")
    assert "rank 3 did not arrive" in ranks[2]  # the others have told it


def end_or_raise_as_nccl(comm):
    """What a rank raises if NCCL reports that a connection was closed: rank 1 has ended."""
    group = comm_from(dist.new_group(list(range(comm.world))), timeout=100)
    group.agree("start", {})
    group.barrier()
    if comm.rank == 1:
        os._exit(0)
    error = RuntimeError("NCCL error in: p.cpp:1, remote process exited or there was a network error, NCCL version 2")
    messages = [InFlightMessage(torch.zeros(1), peer, False) for peer in range(comm.world) if peer != comm.rank]
    return str(group.message_error("exchange", messages if comm.rank == 0 else (), error))


def test_the_rank_that_has_ended_is_named_where_nccl_reports_a_closed_connection():
    ranks = run_processes(3, end_or_raise_as_nccl, strict=False)
    for error in (ranks[0], ranks[2]):
        assert error.startswith("rank 1 is dead: its process has ended [")


def go_on_after_a_pause(comm):
    """What rank 1 raises in its next operation, if rank 0 has failed meanwhile."""
    group = comm_from(dist.new_group([0, 1]), timeout=100)
    group.agree("start", {})
    group.nccl.has_begun = True
    group.barrier()
    time.sleep(0.6)  # the monitor has nothing more to compare
    failed = dist.distributed_c10d._get_default_store()
    if comm.rank == 0:
        group.fail("injected")
        failed.set("failed", "yes")
        return ""
    failed.wait(["failed"])
    time.sleep(0.5)  # a pause of more than a second altogether, in which the monitor looks twice
    assert group._broken is None
    with pytest.raises(CommError) as error:
        group._check_usable()
    return str(error.value)


def test_a_rank_that_comes_back_learns_that_others_have_given_up_before_it_sends_anything():
    assert run_processes(2, go_on_after_a_pause)[1].startswith("rank 0 failed: injected [")


def test_an_error_does_not_interrupt_a_batch_of_messages():
    """NCCL would wait for the end of the batch, and send nothing any more."""
    error, ready, sent, steps = Caller(), threading.Event(), threading.Event(), []

    def rank() -> None:
        error.remember_thread()
        try:
            with uninterrupted():
                ready.set()
                sent.wait(5)
                for _ in range(100):
                    time.sleep(0)
                steps.append("posted")
            steps.append("used")
        except CommError as raised:
            steps.append(str(raised))

    thread = threading.Thread(target=rank)
    thread.start()
    ready.wait(5)
    error.send(CommError("rank 1 is dead"))
    sent.set()
    thread.join(5)
    assert list(map(without_link, steps)) == ["posted", "rank 1 is dead"]


def test_an_operation_that_may_be_queued_behind_another_is_left_to_it(monkeypatch):
    """Both ranks of a group wait in it, behind an operation of another group that waits for a third rank."""
    now = time.monotonic()
    first, second = (QueuedOperation("all_to_all", {1}, now - age, 5.0) for age in (9, 8))
    waiting = [SimpleNamespace(nccl=SimpleNamespace(oldest=lambda _, each=each: each)) for each in (second, first)]
    monkeypatch.setattr(monitor, "_all_comms", lambda: waiting)
    searches = []
    comm = SimpleNamespace(_broken="x", _one_of=str, _causes=lambda *search: searches.append(search))
    monitor.MonitoredComm._overdue(comm, second)
    assert not searches
    monitor.MonitoredComm._overdue(comm, first)
    assert len(searches) == 1
