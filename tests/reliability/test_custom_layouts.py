"""Layouts of one's own: right ones are exact, and those that are no partition are refused on every rank."""

import random
import threading
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import attnmesh as am
from helpers.processes import run_processes

LENGTH, WORLD = 24, 3


@dataclass(frozen=True)
class Dealt(am.Layout):
    """The ranges of every rank, as they are given."""

    shards: tuple[tuple[range, ...], ...]

    def assign(self, length, world, rank):
        return self.shards[rank]


@dataclass(frozen=True)
class Blocks(am.Layout):
    """Blocks of `size` positions in turn: a right one, for any length and number of ranks."""

    size: int

    def assign(self, length, world, rank):
        starts = range(rank * self.size, length, world * self.size)
        return [range(start, min(start + self.size, length)) for start in starts]


def random_partition(rng):
    """Cuts at random places, each part in one piece or with a step, to random ranks in ascending order."""
    shards, at = [[] for _ in range(WORLD)], 0
    while at < LENGTH:
        end = min(LENGTH, at + rng.randint(1, 8))
        step = rng.choice([1, 1, WORLD])
        order = rng.sample(range(WORLD), step)
        for offset, rank in enumerate(order):
            if run := range(at + offset, end, step):
                shards[rank].append(run)
        at = end
    return shards


def damaged(shards, rng):
    """A partition with one fault."""
    rank = rng.choice([rank for rank, shard in enumerate(shards) if shard])
    at = rng.randrange(len(shards[rank]))
    run = shards[rank][at]
    fault = rng.choice(["gap", "overlap", "lost", "twice", "beyond", "negative", "order"])
    if fault == "gap":
        shards[rank][at] = run[1:]
    elif fault == "overlap":
        taken = rng.choice([p for p in range(LENGTH) if p not in run])
        other = next(r for r, shard in enumerate(shards) if any(taken in x for x in shard))
        shards[(other + 1) % WORLD].append(range(taken, taken + 1))
    elif fault == "lost":
        del shards[rank][at]
    elif fault == "twice":
        shards[(rank + 1) % WORLD].append(run)
    elif fault == "beyond":
        shards[rank].append(range(LENGTH, LENGTH + 1))
    elif fault == "negative":
        shards[rank].insert(0, range(-1, 0))
    else:
        shards[rank][at] = run[::-1] if len(run) > 1 else range(run[0] + 1, run[0], 1)
    return shards


def as_layout(shards):
    return Dealt(tuple(tuple(shard) for shard in shards))


def attend(comm, layout, schedule="ring"):
    """The whole output, from the shards that the layout describes, which are made without its checks."""
    torch.manual_seed(5)
    whole = torch.randn(3, 1, 3, LENGTH, 8)
    cp = am.ContextParallel(comm, layout=layout, schedule=schedule)
    mine = [p for run in layout.assign(LENGTH, comm.world, comm.rank) for p in run if 0 <= p < LENGTH]
    q, k, v = (x[:, :, mine] for x in whole)
    out = cp.attention(q, k, v, length=LENGTH)
    return cp.unshard(out, 2, LENGTH), am.attention(*whole, mask=am.Causal())


@pytest.mark.parametrize("schedule", ["ring", "allgather", "ulysses"])
def test_random_partitions_are_exact_and_damaged_ones_are_refused(schedule):
    for seed in range(4):
        rng = random.Random(seed)
        shards = random_partition(rng)
        right = as_layout(shards)
        for out, expected in am.run_virtual(WORLD, partial(attend, layout=right, schedule=schedule)):
            assert torch.allclose(out, expected, atol=1e-5), (seed, right)
        wrong = as_layout(damaged(shards, rng))

        def outcome(comm, wrong=wrong):
            try:
                attend(comm, wrong, schedule)
            except ValueError as error:
                return str(error)

        assert all("must give" in str(text) for text in am.run_virtual(WORLD, outcome)), (seed, wrong)


def test_a_right_layout_of_ones_own_at_any_length():
    for size, length, world in ((1, 7, 3), (4, 33, 4), (8, 3, 5), (3, 0, 2)):
        layout, x = Blocks(size), torch.arange(length)
        shards = [layout.shard(x, 0, world, rank) for rank in range(world)]
        assert torch.equal(layout.unshard(shards, 0), x)


def wrong_layouts(comm, layouts):
    """The error of this rank for each layout; the group serves the next one."""
    texts = []
    for layout in layouts:
        try:
            attend(comm, layout)
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_processes_refuse_a_gap_and_an_overlap():
    gap = Dealt(((range(11),), (range(12, LENGTH),)))
    overlap = Dealt(((range(13),), (range(12, LENGTH),)))
    for texts in run_processes(2, wrong_layouts, [gap, overlap, Blocks(4)]):
        assert "position 11 belongs to no rank" in texts[0]
        assert "position 12 belongs to ranks 0, 1" in texts[1]
        assert texts[2] == ""


@dataclass(frozen=True)
class Hidden(am.Layout):
    """Depends on what ranks do not compare: the rank that asks."""

    def assign(self, length, world, rank):
        turn = int(threading.current_thread().name.split()[-1])
        return [range(*((0, length // 2), (length // 2, length))[(rank + turn) % 2])]


def test_layouts_with_the_same_text_and_other_positions_are_refused():
    def run(comm):
        am.core.layouts._partition.cache_clear()  # of the other virtual rank, which has a process of its own elsewhere
        cp = am.ContextParallel(comm, layout=Hidden(), schedule="ring")
        x = torch.randn(1, 2, 4, 8)
        cp.attention(x, x, x, length=8)

    with pytest.raises(ValueError, match=r"ranks disagree: positions of layout"):
        am.run_virtual(2, run)


def test_a_layout_is_a_frozen_dataclass_with_hashable_fields():
    class Plain(am.Layout):
        def assign(self, length, world, rank):
            return [range(length)] if rank == 0 else []

    with pytest.raises(ValueError, match=r"Plain, a layout, must be a frozen dataclass"):
        Plain()
    with pytest.raises(ValueError, match=r"must be hashable"):
        Dealt([[range(4)]]).ranges(4, 1, 0)


@pytest.mark.parametrize("given", [range(4), [4], None, [range(4, 0, -1)], [range(2, 4), range(2)]], ids=str)
def test_what_is_no_list_of_ascending_ranges_is_refused(given):
    with pytest.raises(ValueError, match=r"assign of Dealt.* must give (a list|ascending ranges)"):
        Dealt((tuple(given) if isinstance(given, list) else given,)).ranges(4, 1, 0)


def test_the_check_of_many_ranks_and_positions_takes_no_time_per_position():
    assert [Blocks(2**20).local_length(2**30, 1024, rank) for rank in (0, 1023)] == [2**20, 2**20]
