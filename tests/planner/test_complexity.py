"""Compute, bytes, rounds and memory against the number of ranks N come out of the programs.

S positions, B sequences, Hq and Hkv heads of D, `e` bytes an element; of one forward:

    ring, full mask, contiguous
        operations a rank    4 B Hq (S/N) S D
        bytes a rank         (N-1)/N x 2 B Hkv S D e
        bytes of all ranks   (N-1) x 2 B Hkv S D e
        bytes a round        2 B Hkv (S/N) D e
        rounds of exchange   N-1
        memory beside inputs O(S/N x D), never (S/N)^2
    ring, causal, zigzag     half the operations, three quarters of the bytes
    all-gather               as many bytes, in one round for each group of heads
    Ulysses                  two rounds; bytes fall as 1/N
"""

from dataclasses import replace

import numpy as np
import pytest

from attnmesh.core.layouts import Contiguous, Layout, Zigzag
from attnmesh.core.masks import Causal, Full, Mask
from attnmesh.plan.shards import Shape, Workload, shards
from attnmesh.planner.program import MessageTotals
from attnmesh.planner.schedules import loads, peak_bytes, program, workload_head_groups
from helpers.cases import first, sweep

B, HQ, HKV, D, E = 2, 64, 64, 16, 2  # as many heads as ranks, so that Ulysses divides them
SHAPE = Shape(B, HQ, HKV, D, E, sum_itemsize=4)
S = 1 << 14
ALL_KEYS = 2 * B * HKV * S * D * E
RANKS = (1, 2, 4, 8, 16, 64)
MORE = (*RANKS, 512)


def workload(n: int, mask: Mask = Full(), layout: Layout = Contiguous(), length: int = S) -> Workload:  # noqa: B008
    return Workload(shards(mask, layout, length, n), SHAPE, n)


def exchanges(schedule: str, where: Workload) -> list:
    """The messages of every round in which something travels."""
    rounds = program(schedule, where, backward=False).rounds()
    found = [messages for part in rounds for messages in part.starts.values()]
    return [m for m in found if (m.sends.any() if isinstance(m, MessageTotals) else len(m))]


@pytest.mark.parametrize("n", first(2, MORE))
def test_operations_of_a_rank_fall_as_1_over_n(n):
    each = loads("ring", workload(n), backward=False)
    assert {load.flops for load in each} == {4 * B * HQ * (S // n) * S * D}


@pytest.mark.parametrize("n", first(2, MORE))
def test_bytes_of_a_rank_stay_and_those_of_all_grow_with_n(n):
    each = [load.sent for load in loads("ring", workload(n), backward=False)]
    assert set(each) == {(n - 1) * ALL_KEYS // n}
    assert sum(each) == (n - 1) * ALL_KEYS


@pytest.mark.parametrize("n", RANKS)
def test_a_ring_takes_one_round_less_than_it_has_ranks_each_with_one_block(n):
    rounds = exchanges("ring", replace(workload(n), device="cpu"))  # GPUs of a node join small blocks
    assert len(rounds) == n - 1
    for messages in rounds:
        assert sorted(messages.source.tolist()) == list(range(n))
        assert set(messages.nbytes.tolist()) == {2 * B * HKV * (S // n) * D * E}


@pytest.mark.parametrize("backward", [False, sweep(True)])
def test_memory_of_a_ring_is_proportional_to_its_rows(backward):
    """Twice the ranks halve it; twice the rows double it and no more: no square of scores is ever held."""

    def largest(n: int, length: int = S) -> int:
        where = replace(workload(n, length=length), device="cpu")  # GPUs of a node join small blocks
        return int(peak_bytes("ring", where, backward=backward).max())

    peaks = {n: largest(n) for n in (4, 8, 16, 64, 512)}
    for n, peak in peaks.items():
        assert peak * n == pytest.approx(peaks[4] * 4, rel=0.01)
        twice = largest(n, 2 * S)
        assert twice == pytest.approx(2 * peak, rel=0.001)
        rows = S // n
        assert peak < 24 * B * (HQ + 2 * HKV) * rows * D * 4  # some copies of q, k and v in float32


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
def test_a_causal_zigzag_has_half_the_work_and_three_quarters_of_the_bytes(n):
    full, causal = (loads("ring", where, backward=False) for where in (workload(n), workload(n, Causal(), Zigzag())))
    work = np.array([load.flops for load in causal])
    assert work.max() == work.min()
    assert work[0] == pytest.approx(full[0].flops / 2, rel=n / S + 1e-9)
    assert sum(load.sent for load in causal) == pytest.approx(0.75 * sum(load.sent for load in full), rel=0.001)


@pytest.mark.parametrize("n", RANKS)
def test_an_all_gather_moves_as_much_in_a_round_for_each_group_of_heads(n):
    where = workload(n)
    assert [load.sent for load in loads("allgather", where, backward=False)] == [(n - 1) * ALL_KEYS // n] * n
    if n > 1:
        assert len(exchanges("allgather", where)) == len(workload_head_groups(where, where.shards, SHAPE))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 64])
def test_ulysses_takes_two_rounds_and_its_bytes_fall_as_1_over_n(n):
    where = workload(n)
    assert len(exchanges("ulysses", where)) == 2
    traded = B * S * D * E * (2 * HQ + 2 * HKV)  # q, k, v and out of the whole sequence
    assert {load.sent for load in loads("ulysses", where, backward=False)} == {(n - 1) * traded // n // n}
