"""A rank fails over NCCL: every other rank raises CommError in time, also where its thread waits for the device.

Three or four ranks share one GPU. The ranks of a program go through all its cells, each on a process group of its own;
a rank that was stopped goes on later. Killed ranks have worlds of their own.
"""

import faulthandler
import os
import signal
import subprocess
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.comm import CommError
from attnmesh.testing.block import random_block
from helpers.faults import FAULTY, STEPS, WITH_BACKWARD, InjectedError
from helpers.faults import PROGRAMS as SHARED
from helpers.processes import Died, run_processes

pytestmark = [
    pytest.mark.cuda, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]  # fmt: skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TIMEOUT = 5.0
AWAY = TIMEOUT + 9  # seconds that a rank is stopped or sleeps: the others must have raised before
LATE = 1.5


PROGRAMS = {
    name: SHARED[name]
    for name in ("ring", "allgather", "ulysses", "two-level", "compiled", "sparse", "tp", "kvdp", "cp", "generate")
}
MOMENTS = ("before", "forward", "backward", "between")
FAULTS = ("late", "disagreeing", "raising", "sleeping", "hung")


def do(fault, comm):
    """What the faulty rank does."""
    if fault == "raising":
        raise InjectedError("injected")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hung":
        subprocess.Popen(["sh", "-c", f"sleep {AWAY}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "disagreeing":
        comm.note("something else")
    else:
        time.sleep(LATE if fault == "late" else AWAY)


def inject(comm, fault, moment):
    """Let the next operation in forward or backward meet the fault, once."""
    watch, done = comm._watch, []

    def watch_or_fail(*args):
        watch(*args)
        if not done and (torch._C._current_graph_task_id() != -1) == (moment == "backward"):
            done.append(True)
            do(fault, comm)

    comm._watch = watch_or_fail


def run_cell(comm, program, fault, moment):
    """What this rank raises, after how many seconds from the fault, and its results."""
    torch.manual_seed(7)
    faulty, results = comm.rank == FAULTY and fault is not None, []
    faulthandler.dump_traceback_later(TIMEOUT + 12)  # where a rank is stuck
    begin = time.monotonic()
    try:
        if faulty and moment == "before":
            do(fault, comm)
        step = PROGRAMS[program][1](comm, DEVICE)
        if moment != "before":
            results.append(step().detach().double().sum().item())
            begin = time.monotonic()
            if faulty and moment == "between":
                do(fault, comm)
            elif faulty:
                inject(comm, fault, moment)
        while len(results) < STEPS or (fault == "disagreeing" and time.monotonic() < begin + 20):
            out = step()
            if program in ("ring", "cp", "sparse", "compiled"):
                torch.cuda.synchronize()
            results.append(out.detach().double().sum().item())
            if fault == "disagreeing":
                time.sleep(0.02)
    except (CommError, InjectedError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin, []
    finally:
        faulthandler.cancel_dump_traceback_later()
    return "nothing", "", time.monotonic() - begin, results


def new_comm(comm):
    """A group of all ranks whose communicator exists: many of them start at the same time on one GPU."""
    torch.cuda.set_device(0)
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torch ends no process, so that it can go on after an error
    group = dist.new_group(list(range(comm.world)), backend="nccl", timeout=timedelta(seconds=TIMEOUT))
    new = am.comm_from(group, timeout=60)
    new.agree("warm up", {"device": "cuda"})
    new.timeout = TIMEOUT
    comm.barrier()  # no rank fails before all have connected
    return new


def cells(comm, program, faults, moments):
    comm.timeout = 60
    found = {}
    for fault in (None, *faults):
        for moment in moments if fault else ("before",):
            outcome = run_cell(new_comm(comm), program, fault, moment)
            if outcome[0] == "nothing":
                outcome = (*outcome[:3], outcome[3][:STEPS])
            found[fault, moment] = outcome
            print(program, fault, moment, "rank", comm.rank, outcome[0], f"{outcome[2]:.1f} s", outcome[1], flush=True)
            with suppress(CommError):  # a comm that raised may raise once more: not in the next cell
                time.sleep(0.05)
            comm.barrier()
    return found


def wrong(found, baseline, fault, moment):
    """What is wrong with the outcomes of a cell, by rank; empty if nothing is."""
    problems = []
    for rank, (kind, text, seconds, results) in enumerate(found):
        if fault in (None, "late"):
            pairs = list(zip(results, baseline[rank], strict=False))
            if len(pairs) < STEPS or any(abs(a - b) > 1e-4 * (1 + abs(b)) for a, b in pairs):
                problems.append(f"rank {rank}: {kind} {text}, {results} instead of {baseline[rank]}")
        elif fault == "disagreeing":
            if kind not in ("CommError", "ValueError"):
                problems.append(f"rank {rank}: {kind}")
        elif rank == FAULTY:
            continue
        elif kind != "CommError" or seconds > TIMEOUT + 10:
            problems.append(f"rank {rank}: {kind} after {seconds:.1f} s: {text}")
        elif fault in ("sleeping", "hung") and f"rank {FAULTY}" not in text:
            problems.append(f"rank {rank} does not name rank {FAULTY}: {text}")
    return problems


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_other_rank_raises_in_time(program):
    world, _ = PROGRAMS[program]
    moments = [moment for moment in MOMENTS if moment != "backward" or program in WITH_BACKWARD]
    ranks = run_processes(world, cells, program, FAULTS, moments, timeout=500, backend="nccl")
    baseline = [rank[None, "before"][3] for rank in ranks]
    problems = {}
    for cell in ranks[0]:
        if found := wrong([rank[cell] for rank in ranks], baseline, *cell):
            problems[cell] = found
    print(f"{program}: {len(ranks[0])} cells, {len(problems)} wrong")
    assert not problems


def killed(comm, program, moment):
    return run_cell(new_comm(comm), program, "killed", moment)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_killed_rank_is_reported(program, moment):
    if moment == "backward" and program not in WITH_BACKWARD:
        pytest.skip("has no backward")
    world, _ = PROGRAMS[program]
    ranks = run_processes(world, killed, program, moment, timeout=100, strict=False, backend="nccl")
    assert isinstance(ranks[FAULTY], Died)
    survivors = [ranks[rank] for rank in range(world) if rank != FAULTY]
    for outcome in survivors:
        assert isinstance(outcome, tuple), outcome
        kind, text, seconds, _ = outcome
        print(f"{program} killed {moment}: {kind} {seconds:.1f} s {text}")
        assert kind == "CommError"
        assert seconds < TIMEOUT + 10 or moment == "before"  # which includes building a model, and compiling


# Subgroups: a rank hangs in one dimension of a mesh, and all ranks of the others raise too.


def hang_in_a_mesh(comm):
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("cp", "kvdp"))
    for name in (None, "cp", "kvdp"):
        am.comm_from(None if name is None else mesh[name], timeout=TIMEOUT)
    sharding = am.DecodeSharding(1, 2, 2, interleave=2)
    config, weights = random_block(q_heads=4, kv_heads=2, head_dim=16, hidden=48, device=DEVICE)
    mine = weights.shard(config, sharding, am.decode_rank(mesh, sharding))
    block = am.AttentionBlock(config, mine, sharding, mesh)
    cache = block.make_cache(batch=2, num_blocks=32, block_size=4, max_length=64)
    sequences = [cache.allocate(0) for _ in range(2)]
    begin = time.monotonic()
    try:
        for step in range(4):
            if step == 2 and comm.rank == 3:
                time.sleep(AWAY)
            if step == 2:
                begin = time.monotonic()
            block(torch.ones(2, 1, 48, device=DEVICE), cache, cache.append(sequences, 1)).sum().item()
    except CommError as error:
        return str(error), time.monotonic() - begin
    return "nothing", 0.0


def test_a_rank_that_hangs_in_a_mesh_ends_all_its_groups():
    ranks = run_processes(4, hang_in_a_mesh, timeout=100, backend="nccl")
    print(ranks)
    for text, seconds in ranks[:3]:
        assert "did not arrive" in text
        assert seconds < TIMEOUT + 10
