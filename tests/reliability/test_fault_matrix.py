"""Faults of a rank at the moments of every program: the other ranks raise in time, or all results are right.

The ranks of a program go through its cells, each on a process group of its own. Killed ranks have worlds of their own,
with a timeout of minutes. Each cell prints a line: program, fault, moment, and the median and the longest seconds that
the other ranks took. `pytest -s -m sweep tests/reliability/test_fault_matrix.py` shows them.
"""

import random
from datetime import timedelta

import pytest
import torch.distributed as dist

import attnmesh as am
from helpers import faults
from helpers.cases import in_turn
from helpers.faults import FAULTS, PROGRAMS, Setting, moments


def new_comm(world, timeout):
    return am.comm_from(dist.new_group(list(range(world)), timeout=timedelta(seconds=timeout)))


SETTING = Setting(new_comm, timeout=4.0)  # in time by three seconds: machines are busy


def check_cells(program, cells):
    faults.check_cells(program, cells, SETTING, timeout=280)


def check_killed(program, moment):
    faults.check_killed(program, moment, SETTING)


def test_a_killed_rank_is_named_at_once():
    check_killed("ring", "between")


def test_a_rank_comes_in_time_or_too_late():
    cells = [("stopped for a while", "forward"), ("hung", "between"), ("raising", "forward")]
    soon = Setting(new_comm, timeout=3.0, late=0.5)
    faults.check_cells("kvdp", cells, soon, timeout=280)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "moment"), [(name, moments(name)[at % len(moments(name))]) for at, name in enumerate(PROGRAMS)]
)
def test_killed(program, moment):
    check_killed(program, moment)


@pytest.mark.sweep
@pytest.mark.parametrize("program", PROGRAMS)
def test_not_killed(program):
    first = list(PROGRAMS).index(program)
    check_cells(program, in_turn(FAULTS, moments(program)[first % 3 :] + moments(program)[: first % 3]))


@pytest.mark.sweep
@pytest.mark.parametrize("program", ["ring", "tp", "kvdp"])
def test_at_any_message(program):
    """Every program posts at least four batches of messages after its first step, tensor parallelism two."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chosen, batches = random.Random(seed), 2 if program == "tp" else 4
    check_killed(program, chosen.randrange(batches))
    check_cells(program, [(fault, chosen.randrange(batches)) for fault in ("raising", "sleeping", "hung", "late")])
