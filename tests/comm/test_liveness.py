"""Processes that have ended are told from those that are slow."""

import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from attnmesh.comm import CommError, comm_from, process_group
from attnmesh.comm.health import liveness as liveness_module
from attnmesh.comm.health.liveness import ENDED, Liveness, Watch, liveness
from helpers.faults import fail
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
    assert ours.poll(60)
    address, child = ours.recv()
    try:
        watch = own.watch(address)
        await_until(lambda: watch.is_verified)
        os.kill(process.pid, signal.SIGSTOP)
        stopped = Watch(address, own._machine)  # the kernel connects in its place, but nothing tells that it is the one
        time.sleep(0.3)
        assert watch.verdict is stopped.verdict is None
        os.kill(process.pid, signal.SIGKILL)
        await_until(lambda: watch.verdict == stopped.verdict == ENDED)
        late = Watch(address, own._machine)
        await_until(lambda: late.verdict == ENDED)
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.join()


def test_a_slow_name_server_is_asked_once(monkeypatch):
    addresses = liveness_module._hosts(dist.HashStore())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(60))
    assert liveness_module._hosts(dist.HashStore()) == addresses


def test_those_who_watch_a_process_read_its_last_error():
    own, other = Liveness(), Liveness()
    watch = own.watch(other.address(dist.HashStore()))
    await_until(lambda: watch.is_verified)
    assert own.watch(other.address(dist.HashStore())) is watch  # one connection for all groups
    assert watch.last_error == ""
    for line in ("first", "x" * 10000, '["out of memory"]'):
        other.tell(line)
    await_until(lambda: watch.last_error == '["out of memory"]')
    for _ in range(2):
        assert len(other._visitors) == 1
        own.unwatch(watch)
    await_until(lambda: not other._visitors)
    assert watch.verdict is None


def await_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def dies_before_the_first_call(comm, dead, while_connecting=False):
    """The others wait for an agreement, or to connect after it, with a timeout of minutes."""
    comm.timeout = 300
    dist.barrier()  # every rank has connected over gloo
    if comm.rank == dead and while_connecting:
        process_group.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif comm.rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(CommError, match=rf"rank {dead} is dead: its process has ended"):
        comm.agree("first", {})
    return time.monotonic() - begin


def test_a_rank_that_dies_before_the_first_call_is_noticed_at_once():
    outcomes = run_processes(3, dies_before_the_first_call, 1, strict=False)
    assert isinstance(outcomes[1], Died)
    assert all(isinstance(seconds, float) and seconds < 10 for seconds in (outcomes[0], outcomes[2])), outcomes


@pytest.mark.sweep
def test_a_rank_that_dies_while_it_connects_is_noticed_at_once():
    outcomes = run_processes(3, dies_before_the_first_call, 1, True, strict=False)
    assert isinstance(outcomes[1], Died)
    assert all(isinstance(seconds, float) and seconds < 10 for seconds in (outcomes[0], outcomes[2])), outcomes


def is_away(comm, how):
    """Rank 1 does not run for 20 s, longer than a dead process would go unnoticed."""
    own = comm_from(dist.new_group(list(range(comm.world)), timeout=timedelta(seconds=60)))
    own.agree("first", {})
    if comm.rank == 1:
        fail(how, own, late=20, away=20)
    begin = time.monotonic()
    assert own.all_reduce(torch.ones(1)).item() == comm.world
    own.agree("second", {})
    return time.monotonic() - begin


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["holding the GIL", "stopped for a while"])
def test_a_rank_that_is_away_within_the_timeout_is_not_dead(how):
    seconds = run_processes(3, is_away, how)
    assert min(seconds[0], seconds[2]) > 15


def goes_on_without_rank_1(comm):
    """Ranks 0 and 2 wait for one another, in a group without rank 1 and in one with it, which has ended."""
    pair, all_ranks = dist.new_group([0, 2]), comm_from(dist.new_group([0, 1, 2]))
    all_ranks.agree("first", {})
    all_ranks.barrier()
    if comm.rank == 1:
        os._exit(0)
    if comm.rank == 0:
        time.sleep(7)
    comm_from(pair).agree("without it", {})
    got, other = torch.zeros(1), 2 - comm.rank
    if comm.rank == 2:
        time.sleep(7)
    all_ranks.exchange([(torch.ones(1), other)], [(got, other)]).wait()
    return got.item()


@pytest.mark.sweep
def test_a_rank_that_ends_after_its_part_is_not_missed():
    assert run_processes(3, goes_on_without_rank_1, strict=False) == [1.0, Died(0), 1.0]


def dies_with_a_file_store(rank, path, pipe):
    dist.init_process_group("gloo", store=dist.FileStore(path, 3), rank=rank, world_size=3)
    pipe.send(dies_before_the_first_call(comm_from(), 1))


@pytest.mark.sweep
def test_a_store_in_a_file(tmp_path):
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    ranks = [
        context.Process(target=dies_with_a_file_store, args=(rank, f"{tmp_path}/store", pipes[rank][1]), daemon=True)
        for rank in range(3)
    ]
    try:
        for process in ranks:
            process.start()
        for rank in (0, 2):
            assert pipes[rank][0].poll(30)
            assert pipes[rank][0].recv() < 10
    finally:
        for process in ranks:
            process.kill()
            process.join()
