"""A rank that serves the group's store is stopped: the others raise in time, and end."""

import multiprocessing
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm import CommError
from attnmesh.comm.health.monitor import GRACE
from attnmesh.utils.text import without_link

TIMEOUT = 2.0


def waits_for_a_message(comm):
    comm.barrier()


def waits_to_agree(comm):
    comm.agree("something new", {"n": 1})


def fails_by_itself(comm):
    comm.fail("out of memory")
    comm.agree("something new", {"n": 1})


def rank_main(rank, world, port, waits, pipe):
    """Report to `pipe` what a rank raises after rank 0, which serves the store, has stopped."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    comm = am.comm_from(timeout=TIMEOUT)
    comm.agree("start", {})
    comm.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    begin = time.monotonic()
    try:
        waits(comm)
    except CommError as error:
        pipe.send((str(error), time.monotonic() - begin))
    else:
        pipe.send(("nothing was raised", time.monotonic() - begin))
    dist.destroy_process_group()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.sweep
@pytest.mark.parametrize("waits", [waits_for_a_message, waits_to_agree, fails_by_itself])
def test_the_rank_that_serves_the_store_is_stopped(waits):
    world, port, context = 3, free_port(), multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=rank_main, args=(rank, world, port, waits, pipes[rank][1]), daemon=True)
        for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        for rank in range(1, world):
            assert pipes[rank][0].poll(200), f"rank {rank} waits for ever"
            message, seconds = pipes[rank][0].recv()
            if waits is fails_by_itself:
                assert without_link(message) == "this comm has failed before: out of memory"
            else:
                assert f"rank {rank}" in message
                assert "did not answer within" in message or "rank 0" in message
            assert seconds < TIMEOUT + 2 * GRACE + 8  # on a busy machine
        for process in ranks[1:]:
            process.join(20)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
