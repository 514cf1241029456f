"""Every fault of a rank at every moment of every program: the other ranks raise in time, or all results are right.

The ranks of a program go through its cells, each on a process group of its own. Killed ranks have worlds of their own,
with a timeout of minutes. Each cell prints a line: program, fault, moment, and the median and the longest seconds that
the other ranks took. `pytest -s -m slow tests/reliability/test_fault_matrix.py` shows them.
"""

import os
import random
import signal
import statistics
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

import attnmesh as am
from helpers.faults import FAULTS, FAULTY, HARMLESS, PROGRAMS, STEPS, fail, moments, run_steps
from helpers.processes import Died, run_processes

TIMEOUT = 2.0
LATE = 1.0
AWAY = TIMEOUT + 10
LONG = 120.0  # seconds: the end of a process is noticed long before


def new_comm(world, timeout):
    return am.comm_from(dist.new_group(list(range(world)), timeout=timedelta(seconds=timeout)))


def run_cells(comm, program, cells):
    """The outcome of every cell on this rank. The rank that is away comes back when all others have raised."""
    comm.timeout = 60
    found = {"pid": os.getpid(), "expected": run_steps(comm, program, "cpu", "before", None)[3]}
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid {comm.rank}", str(os.getpid()))
    for fault, moment in cells:
        own, raised = new_comm(comm.world, TIMEOUT), f"raised {fault} {moment}"
        if comm.rank == FAULTY:
            is_over = partial(all_raised, store, raised, comm.world)
            injected = partial(fail, fault, own, late=LATE, away=AWAY, is_over=is_over)
        else:
            injected = None
        found[fault, moment] = run_steps(own, program, "cpu", moment, injected)
        if comm.rank != FAULTY and store.add(raised, 1) == comm.world - 1:
            os.kill(int(store.get(f"pid {FAULTY}")), signal.SIGCONT)
        comm.barrier()
    return found


def all_raised(store, key, world):
    return store.add(key, 0) == world - 1


def killed(comm, program, moment):
    comm.timeout = 60
    assert len(run_steps(comm, program, "cpu", "before", None)[3]) == STEPS  # what is imported and compiled takes time
    comm.barrier()
    own = new_comm(comm.world, LONG)
    fault = partial(fail, "killed", own, late=0, away=0) if comm.rank == FAULTY else None
    return run_steps(own, program, "cpu", moment, fault)


def problems_of(cell, found, expected):
    """What is wrong with the outcomes of a cell, by rank; empty if nothing is."""
    problems = []
    for rank, (kind, text, seconds, results) in enumerate(found):
        if cell[0] in HARMLESS:
            if len(results) != STEPS or results != expected[rank]:
                problems.append(f"rank {rank}: {kind} {text}, {results} instead of {expected[rank]}")
        elif cell[0] == "disagreeing":
            if kind not in ("CommError", "ValueError") or f"rank {FAULTY}" not in text:
                problems.append(f"rank {rank}: {kind} after {seconds:.1f} s: {text}")
        elif rank != FAULTY and (kind != "CommError" or seconds > TIMEOUT + 10 or f"rank {FAULTY}" not in text):
            problems.append(f"rank {rank}: {kind} after {seconds:.1f} s: {text}")
    return problems


def report(cell, found):
    """Print the seconds after which the other ranks raised."""
    seconds = [outcome[2] for rank, outcome in enumerate(found) if rank != FAULTY]
    print(f"cell | {' | '.join(map(str, cell))} | {statistics.median(seconds):.2f} | {max(seconds):.2f}")


def check_cells(program, cells):
    ranks = run_processes(PROGRAMS[program][0], run_cells, program, cells, timeout=280, ends=True)
    expected, problems = [rank["expected"] for rank in ranks], {}
    for cell in cells:
        found = [rank[cell] for rank in ranks]
        report((program, *cell), found)
        if wrong := problems_of(cell, found, expected):
            problems[cell] = wrong
    assert not problems
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank["pid"], 0)


def check_killed(program, moment):
    world, _ = PROGRAMS[program]
    ranks = run_processes(world, killed, program, moment, timeout=60, strict=False, ends=True)
    assert ranks[FAULTY] == Died(-9)
    survivors = [ranks[rank] for rank in range(world) if rank != FAULTY]
    for outcome in survivors:
        assert not isinstance(outcome, Died), outcome
        assert outcome[0] == "CommError", outcome
        assert f"rank {FAULTY}" in outcome[1], outcome
        assert outcome[2] < 10, outcome
    report((program, "killed", moment), [*survivors[:FAULTY], ("", "", 0.0, []), *survivors[FAULTY:]])


def test_a_killed_rank_is_named_at_once():
    check_killed("ring", "between")


def test_a_rank_comes_in_time_or_too_late():
    check_cells("kvdp", [("stopped for a while", "forward"), ("hung", "between"), ("raising", "forward")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "moment"), [(program, moment) for program in PROGRAMS for moment in moments(program)]
)
def test_killed(program, moment):
    check_killed(program, moment)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("faults", [HARMLESS, FAULTS[3:]], ids=["in time", "failed"])
def test_not_killed(program, faults):
    check_cells(program, [(fault, moment) for fault in faults for moment in moments(program)])


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_at_any_message(program):
    """Every program posts at least four batches of messages after its first step."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chosen = random.Random(seed)
    check_killed(program, chosen.randrange(4))
    check_cells(program, [(fault, chosen.randrange(4)) for fault in ("raising", "sleeping", "hung", "late")])
