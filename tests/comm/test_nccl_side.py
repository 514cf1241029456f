"""Batches of messages over NCCL are begun and ended together, and none is posted while its communicator is aborted."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from attnmesh.comm import CommError
from attnmesh.comm.nccl import NcclSide, QueuedOperation


class Group:
    """As a process group with NCCL: a batch that was begun is open, in this thread, until it is ended."""

    def __init__(self) -> None:
        self.open_batches = 0
        self.steps: list[str] = []
        self.options = SimpleNamespace(_timeout=timedelta(seconds=1))

    def post(self, error: BaseException) -> None:
        """`torch.distributed.batch_isend_irecv`, which leaves a batch open if a message in it fails."""
        self.open_batches += 1
        dist.distributed_c10d._world.pg_coalesce_state[self] = []
        raise error

    def _end_coalescing(self, _: torch.device) -> None:
        self.open_batches -= 1
        raise RuntimeError("NCCL error: remote process exited")  # as it does, after it has ended the batch

    def _get_backend(self, _: torch.device) -> "Group":
        return self

    def _set_default_timeout(self, _: timedelta) -> None:
        pass

    def abort(self) -> None:
        self.steps.append("aborted")


class Overdue:
    def note(self, operation) -> None:
        pass


def operation():
    return QueuedOperation("exchange", {1}, time.monotonic(), 60)


@pytest.mark.parametrize("error", [RuntimeError("NCCL error: remote process exited"), KeyboardInterrupt()])
def test_a_batch_that_fails_is_ended(monkeypatch, error):
    """The thread could send nothing any more, in any group."""
    group, overdue = Group(), Overdue()
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _: group.post(error))
    side = NcclSide(group, overdue.note)
    with pytest.raises(type(error)) as raised:
        side.post([SimpleNamespace(tensor=torch.zeros(1))], operation())
    assert raised.value is error
    assert group.open_batches == 0
    assert group not in dist.distributed_c10d._world.pg_coalesce_state
    assert side.oldest() is None


def test_an_abort_waits_for_a_call_that_posts_and_none_posts_after_it():
    group, overdue, begun = Group(), Overdue(), threading.Event()
    side = NcclSide(group, overdue.note)

    def post() -> None:
        with side.posting(operation()):
            begun.set()
            time.sleep(0.2)
            group.steps.append("posted")

    thread = threading.Thread(target=post)
    thread.start()
    assert begun.wait(5)
    side.abort()
    assert group.steps == ["posted", "aborted"]
    thread.join()
    with pytest.raises(CommError, match="have been ended"), side.posting(operation()):
        group.steps.append("posted")
    assert group.steps == ["posted", "aborted"]


def test_an_abort_does_not_wait_long_for_a_call_that_waits_for_other_ranks():
    group, overdue, begun, aborted = Group(), Overdue(), threading.Event(), threading.Event()
    side = NcclSide(group, overdue.note)

    def post() -> None:
        with side.posting(operation()):
            begun.set()
            aborted.wait(10)

    thread = threading.Thread(target=post)
    thread.start()
    assert begun.wait(5)
    begin = time.monotonic()
    side.abort()
    assert group.steps == ["aborted"]
    assert time.monotonic() - begin < 5
    aborted.set()
    thread.join()
