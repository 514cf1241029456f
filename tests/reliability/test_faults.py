"""A rank dies, stops, hangs or raises while it sends a message: every other rank raises CommError in time."""

import itertools
import os
import random
import signal
import subprocess
import time

import pytest
import torch

import attnmesh as am
from attnmesh.comm import CommError
from attnmesh.comm.monitor import GRACE
from attnmesh.testing.block import poisoned_cache, random_block, shard_block
from helpers.processes import Died, Raised, run_processes

TIMEOUT = 2.0
WORLD = 3
FAULTS = ("exit", "kill", "stop", "hang", "raise")


class InjectedError(RuntimeError):
    """What a rank raises in the middle of its work."""


def inject(comm, fault, at):
    """Let this rank fail instead of posting its message number `at`."""
    post, posted = comm._post, itertools.count()

    def post_or_fail(op, messages):
        if next(posted) == at:
            if fault == "exit":
                os._exit(3)
            elif fault == "raise":
                raise InjectedError("injected")
            elif fault == "hang":
                time.sleep(TIMEOUT + 2)
            else:
                subprocess.Popen(
                    ["sh", "-c", f"sleep {TIMEOUT + 2 * GRACE}; kill -9 {os.getpid()}"]
                )  # the test goes on
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        return post(op, messages)

    comm._post = post_or_fail


# What ranks do: each program sends at least four messages.


def training(schedule):
    def program(comm):
        context = am.ContextParallel(comm, schedule=schedule)
        q, k, v = (torch.randn(1, 3, 8, 8, requires_grad=True) for _ in range(3))
        for _ in range(2):
            context.attention(q, k, v, mask=am.Full()).sum().backward()

    return program


def gather(comm):
    context = am.ContextParallel(comm)
    for _ in range(6):
        context.unshard(torch.randn(4, requires_grad=True), 0, 4 * comm.world).sum().backward()


def queries(comm):
    q, k, v = (torch.randn(1, 2, 12, 8, requires_grad=True) for _ in range(3))
    for _ in range(4):
        out = am.ring_distributed_attention(q, k, v, group=comm)
        am.gather_ring_outputs(out, length=12, group=comm).sum().backward()


def sparse(comm):
    parallel = am.SparseParallel(cp=comm)
    q, kv = torch.randn(4, 2, 8, requires_grad=True), torch.randn(4, 1, 8, requires_grad=True)
    for _ in range(4):
        out, _ = parallel.sparse_attention(q, kv, torch.zeros(4, 2, dtype=torch.int32), scale=0.3, d_v=8)
        out.sum().backward()


def decode(tp, kvdp, cp):
    def program(comm):
        config, weights = random_block(q_heads=6, kv_heads=3 if tp > 1 else 2, head_dim=8, hidden=16)
        block = shard_block(config, weights, am.DecodeSharding(tp, kvdp, cp, interleave=2), comm)
        cache = poisoned_cache(block, 3, 16)
        sequences = [cache.allocate(0) for _ in range(3)]
        for _ in range(6):
            block(torch.randn(3, 1, 16), cache, cache.append(sequences, 1))

    return program


PROGRAMS = {
    **{schedule: training(schedule) for schedule in ("ring", "allgather", "ulysses")},
    "unshard": gather,
    "query-distributed": queries,
    "sparse": sparse,
    "tp decode": decode(3, 1, 1),
    "kvdp decode": decode(1, 3, 1),
    "cp decode": decode(1, 1, 3),
}


def run_program(comm, program, fault, rank, at):
    """What this rank raised, and after how many seconds."""
    am.comm_from(comm, timeout=TIMEOUT)
    comm.barrier()
    begin = time.monotonic()
    if comm.rank == rank:
        inject(comm, fault, at)
    try:
        PROGRAMS[program](comm)
    except (CommError, InjectedError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", time.monotonic() - begin


def check(program, fault, rank, at):
    """Assert that every other rank raises CommError in time, and names a rank."""
    outcomes = run_processes(WORLD, run_program, program, fault, rank, at, timeout=90, strict=False)
    if fault in ("exit", "kill", "stop"):
        assert isinstance(outcomes[rank], Died)
    elif fault == "raise":
        assert outcomes[rank][:2] == ("InjectedError", "injected")
    for survivor in set(range(WORLD)) - {rank}:
        assert not isinstance(outcomes[survivor], Raised | Died), outcomes[survivor]
        kind, text, seconds = outcomes[survivor]
        assert kind == "CommError", (survivor, kind, text)
        assert "rank" in text
        assert seconds < TIMEOUT + GRACE + 3


@pytest.mark.parametrize(("program", "fault", "rank", "at"), [("ring", "kill", 0, 1), ("cp decode", "raise", 2, 2)])
def test_a_fault_is_reported_by_every_other_rank(program, fault, rank, at):
    check(program, fault, rank, at)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_at_any_message(program, fault):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chosen = random.Random(seed)
    for _ in range(3):
        case = chosen.randrange(WORLD), chosen.randrange(4)
        print(program, fault, *case)
        check(program, fault, *case)
