"""Processes that have ended are told from those that are slow."""

import multiprocessing
import os
import signal
import time

import pytest
import torch.distributed as dist

from attnmesh.comm import CommError
from attnmesh.comm.liveness import ENDED, Liveness, liveness
from helpers.processes import Died, run_processes


def watched_process(pipe):
    """A process with a child of its own, which outlives it and holds copies of its sockets unless they are closed."""
    own = liveness()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    pipe.send((own.address(dist.HashStore()), child))
    time.sleep(60)


def test_the_end_of_a_process_is_noticed_and_nothing_else():
    own, context = Liveness(), multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=watched_process, args=(theirs,), daemon=True)
    process.start()
    address, child = ours.recv()
    try:
        watch = own.watch(address)
        await_until(lambda: watch.state == "verified")
        os.kill(process.pid, signal.SIGSTOP)
        stopped = own.watch(address)  # the kernel connects in its place, but nothing tells that it is the one
        time.sleep(0.3)
        assert watch.verdict is stopped.verdict is None
        os.kill(process.pid, signal.SIGKILL)
        await_until(lambda: watch.verdict == stopped.verdict == ENDED)
        late = own.watch(address)
        await_until(lambda: late.verdict == ENDED)
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.join()


def await_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def dies_before_the_first_call(comm, dead):
    """The others wait for an agreement with a timeout of minutes."""
    comm.timeout = 300
    if comm.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(CommError, match=rf"rank {dead} is dead: its process has ended"):
        comm.agree("first", {})
    return time.monotonic() - begin


def test_a_rank_that_dies_before_the_first_call_is_noticed_at_once():
    outcomes = run_processes(3, dies_before_the_first_call, 1, strict=False)
    assert isinstance(outcomes[1], Died)
    assert all(isinstance(seconds, float) and seconds < 5 for seconds in (outcomes[0], outcomes[2])), outcomes
