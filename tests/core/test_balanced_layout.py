"""The balanced layout: every position once, as many for each rank, and even work for any mix of documents."""

import random
import time
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.core.layouts import Balanced, Contiguous, Layout, Zigzag, _balanced_shards
from attnmesh.core.masks import (
    BlockCausal,
    Causal,
    Chunked,
    Documents,
    Full,
    Global,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
)
from attnmesh.core.visibility import Patch
from attnmesh.testing.attention import assert_attention_close, random_inputs, virtual_results
from helpers.cases import first, make_mask, sweep
from helpers.masks import batch_masks, visible_pairs

S = 65536
WORLDS = (4, 8, 16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of a mix are small: a second thread only waits
    yield
    torch.set_num_threads(before)


def shares_of(layout: Layout, length: int, world: int) -> list[tuple[range, ...]]:
    return [layout.ranges(length, world, rank) for rank in range(world)]


def work_of(shares: list[tuple[range, ...]], keys_seen: Tensor) -> list[int]:
    """The keys that each rank's positions see, from the keys that every position sees."""
    return [sum(int(keys_seen[span.start : span.stop].sum()) for span in ranges) for ranges in shares]


def imbalance(work: list[int]) -> float:
    """The largest distance from the mean, as a part of the mean."""
    mean = sum(work) / len(work)
    return max(abs(mine - mean) for mine in work) / mean


# Any mask, any length, any world.


def keys_seen(mask: Mask, length: int) -> Tensor:
    """The keys that every position sees, in all sequences, by the definition of the mask."""
    keys, seen = (range(length),), []
    for start in range(0, length, 512):
        rows = range(start, min(start + 512, length))
        seen.append(visible_pairs(mask, (rows,), keys).sum((0, 2)))
    return torch.cat(seen) if seen else torch.zeros(0, dtype=torch.int64)


@st.composite
def problems(draw: st.DrawFn, lengths=(0, 120)) -> tuple[Mask, int, int]:
    """A mask of any kind, the length it is for, and a world."""
    length = draw(st.integers(*lengths))
    return draw(batch_masks(length, draw(st.integers(1, 3)))), length, draw(st.integers(1, 20 if length < 1000 else 8))


def check_even(mask: Mask, length: int, world: int) -> None:
    """Work is within 1% of the mean and the weight of one position: within 2% where none weighs more than 1%."""
    seen = keys_seen(mask, length)
    work = work_of(shares_of(Balanced(mask), length, world), seen)
    mean = sum(work) / world
    assert all(abs(mine - mean) <= 0.01 * mean + max(seen.tolist(), default=0) for mine in work)


@given(problems())
@settings(max_examples=30, deadline=None)
def test_shares_ascend_partition_the_sequence_and_differ_by_one_position_at_most(problem):
    mask, length, world = problem
    shares = shares_of(Balanced(mask), length, world)
    held = [[p for span in ranges for p in span] for ranges in shares]
    assert all(mine == sorted(mine) for mine in held)
    assert sorted(p for mine in held for p in mine) == list(range(length))
    assert max(map(len, held)) - min(map(len, held)) <= 1


@given(problems())
@settings(max_examples=30, deadline=None)
def test_runs_are_few_and_do_not_touch(problem):
    mask, length, world = problem
    shares = shares_of(Balanced(mask), length, world)
    assert sum(map(len, shares)) < 2 * world
    assert all(before.stop < after.start for ranges in shares for before, after in pairwise(ranges))


@given(problems())
@settings(max_examples=15, deadline=None)
def test_work_is_off_the_mean_by_no_more_than_the_heaviest_position_and_the_slack(problem):
    check_even(*problem)


@pytest.mark.sweep
@given(problems(lengths=(2000, 6000)))
@settings(max_examples=15, deadline=None)
def test_work_of_long_sequences_is_even_under_any_mask(problem):
    check_even(*problem)


L = 4001
OTHERS = {
    "prefix": Prefix(L // 3),
    "chunked": Chunked(L // 5),
    "block-causal": BlockCausal(37),
    "window and sinks": Causal() & (Global(4) | SlidingWindow(100)),
    "global to both sides": Global(8, both=True) | SlidingWindow(500),
    "shared question": Slices([(range(L // 2), range(L // 2), "causal"), (range(L // 2, L), range(L // 2), "full")]),
    "rows without keys": Slices([(range(L // 4), range(L // 4), "causal"), (range(3000, L), range(L // 2), "full")]),
    "left padding": Causal() & Padding([L // 3, L // 2, L], "left", L),
    "right padding": Padding([L // 3, L // 2, L], "right", L),
    "a mask per sequence": PerSequence([Causal(), Chunked(100), Prefix(50)]),
}


@pytest.mark.parametrize("mask", first(5, [*OTHERS, "full", "all three"]))
def test_every_kind_of_mask_is_even(mask):
    sight = OTHERS[mask] if mask in OTHERS else make_mask(mask, L)
    seen = keys_seen(sight, L)
    for world in (2, 3, 5, 8):
        shares = shares_of(Balanced(sight), L, world)
        work = work_of(shares, seen)
        assert imbalance(work) <= 0.01 + int(seen.max()) * world / sum(work)
        assert work == [Patch(sight, ranges, (range(L),)).pairs for ranges in shares]


# Packed documents.


def mix(seed: int) -> list[int]:
    """Lengths of documents that fill 64k tokens: many short and few long, and the ends of what can be met."""
    draw = random.Random(seed)
    middle, shards = draw.uniform(4, 8), draw.uniform(0.3, 2.2)
    kinds = {
        "log-normal": lambda: draw.lognormvariate(middle, shards),
        "tiny": lambda: draw.randint(0, 200),
        "of the size of a share": lambda: draw.randint(1000, 20000),
        "one giant among crumbs": lambda: draw.randint(0, 300),
    }
    kind = draw.choices(list(kinds), weights=[7, 1, 1, 1])[0]
    lengths = [draw.randint(S // 4, S)] if kind == "one giant among crumbs" else []
    left = S - sum(lengths)
    while left:
        lengths.append(min(left, int(kinds[kind]())))
        left -= lengths[-1]
    draw.shuffle(lengths)
    return lengths


def keys_seen_in(lengths: list[int], *, causal: bool) -> Tensor:
    """What every position sees, counted from the documents."""
    sizes = torch.tensor(lengths)
    begins = torch.tensor([0, *accumulate(lengths)][:-1])
    return torch.arange(S) - begins.repeat_interleave(sizes) + 1 if causal else sizes.repeat_interleave(sizes)


def check_mix(seed: int, world: int) -> None:
    lengths = mix(seed)
    causal = seed % 4 != 0
    documents = Documents(lengths)
    shares = shares_of(Balanced(Causal() & documents if causal else documents), S, world)
    keys_seen = keys_seen_in(lengths, causal=causal)
    work = work_of(shares, keys_seen)
    assert sum(work) == keys_seen.sum()
    assert imbalance(work) <= 0.02, (seed, world)
    assert {sum(map(len, ranges)) for ranges in shares} == {S // world}, (seed, world)


@pytest.mark.parametrize("mixes", [range(30), sweep(range(30, 200))], ids=str)
def test_mixes_are_even(mixes):
    for seed in mixes:
        check_mix(seed, WORLDS[seed % len(WORLDS)])


@pytest.mark.parametrize("world", first(2, WORLDS))
def test_the_plan_counts_the_same_pairs(world):
    for seed in (0, 1, 2, 3):
        lengths = mix(seed)
        mask = Causal() & Documents(lengths)
        shares = shares_of(Balanced(mask), S, world)
        pairs = [Patch(mask, ranges, (range(S),)).pairs for ranges in shares]
        assert pairs == work_of(shares, keys_seen_in(lengths, causal=True))
        assert imbalance(pairs) <= 0.02


def foreign_keys(shares: list[tuple[range, ...]], mask: Mask) -> int:
    """How many keys ranks see that other ranks hold: what must travel."""
    first, end = (seen.clamp(0, S).tolist() for seen in mask.intervals(range(S))[0].key_ranges(torch.arange(S)))
    foreign = 0
    for ranges in shares:
        reached = 0
        for span in ranges:
            begin, stop = max(reached, first[span[0]]), end[span[-1]]
            foreign += max(0, stop - begin) - len(span)
            reached = max(reached, stop)
    return foreign


@pytest.mark.parametrize("world", first(2, WORLDS))
def test_a_third_of_the_keys_travel_that_a_zigzag_of_each_document_would_send(world):
    # There every rank holds a late piece of every document, and needs the document up to it.
    of_each_document = 3 * (world - 1) * S // 4
    travel = []
    for seed in range(8):
        draw = random.Random(seed)
        lengths = [1 + int(draw.lognormvariate(6.2, 1.4)) for _ in range(1000)]
        edges = [0, *(min(S, edge) for edge in accumulate(lengths))]
        mask = Causal() & Documents(b - a for a, b in pairwise(edges))
        travel.append(foreign_keys(shares_of(Balanced(mask), S, world), mask))
    assert sum(travel) / len(travel) < of_each_document / 3


def test_documents_that_could_stay_whole_do():
    mask = Causal() & Documents([100] * 64)
    assert shares_of(Balanced(mask), 6400, 4) == shares_of(Contiguous(), 6400, 4)
    # Two long ones of equal work lie one on each rank, crumbs or not.
    mask = Causal() & Documents([1000, *[10] * 20, 1000])
    assert shares_of(Balanced(mask), 2200, 2) == shares_of(Contiguous(), 2200, 2)


# Plain masks.


@pytest.mark.parametrize("world", range(1, 10))
def test_a_causal_mask_gives_a_zigzag(world):
    for base in (1, 2, 33, 500):
        length = 2 * world * base
        assert set(shares_of(Balanced(Causal()), length, world)) == set(shares_of(Zigzag(), length, world))


@pytest.mark.parametrize("world", first(4, range(2, 10)))
def test_causal_work_is_even_where_the_length_does_not_divide(world):
    for length in [*range(64 * world, 66 * world), 100 * world + 1, 1009 * world + 5]:
        work = work_of(shares_of(Balanced(Causal()), length, world), torch.arange(1, length + 1))
        assert imbalance(work) <= (0.022 if length < 100 * world else 0.015), length


@pytest.mark.parametrize(
    ("mask", "world"),
    [
        (Full(), 1),
        (SlidingWindow(3), 3),
        (Causal() & SlidingWindow(5), 4),
        (SlidingWindow(2, 4), 6),
        (Full(), 7),
        (SlidingWindow(3), 9),
    ],
    ids=str,
)
def test_what_is_even_already_stays_in_one_piece(mask, world):
    length = 1000 * world
    assert shares_of(Balanced(mask), length, world) == shares_of(Contiguous(), length, world)


def test_the_picture_in_the_module_is_right():
    owners = [None] * 16
    for rank, ranges in enumerate(shares_of(Balanced(Causal()), 16, 4)):
        for p in (p for span in ranges for p in span):
            owners[p] = rank
    assert owners == [3, 3, 2, 2, 1, 1, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3]


# A layout like any other.


def test_equal_masks_make_equal_layouts():
    one, same, other = (Balanced(Causal() & Documents(lengths)) for lengths in ([5, 3], (5, 3), [3, 5]))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != Zigzag()


def test_shares_depend_on_nothing_but_mask_length_and_world():
    for seed in (0, 1):
        mask = Causal() & Documents(mix(seed))
        first = shares_of(Balanced(mask), S, 8)
        _balanced_shards.cache_clear()
        torch.set_num_threads(2)
        assert shares_of(Balanced(Causal() & Documents(mix(seed))), S, 8) == first


@pytest.mark.parametrize("mask", [None, "causal", Causal, [5, 3], Zigzag()], ids=str)
def test_what_is_no_mask_is_refused(mask):
    with pytest.raises(ValueError, match=r"Balanced\.mask must be an attnmesh mask"):
        Balanced(mask)


def test_a_length_that_does_not_fit_the_documents_is_refused():
    layout = Balanced(Causal() & Documents([5, 3]))
    with pytest.raises(ValueError, match=r"must add up to the sequence length 9, but \(5, 3\) add up to 8"):
        layout.ranges(9, 2, 0)
    with pytest.raises(ValueError, match="add up to 8"):
        layout.shard(torch.zeros(7), 0, 2, 0)
    with pytest.raises(ValueError, match="rank"):
        layout.ranges(8, 2, 2)


def test_shards_come_together_again():
    x = torch.randn(3, 130)
    layout = Balanced(make_mask("all three", 130))
    for world in (1, 2, 7):
        assert torch.equal(layout.unshard([layout.shard(x, 1, world, rank) for rank in range(world)], 1), x)


def test_a_layout_of_64k_positions_takes_no_time_to_speak_of():
    mask = Causal() & Documents(mix(1))
    taken = []
    for _ in range(5):
        _balanced_shards.cache_clear()
        begin = time.process_time()
        Balanced(mask).ranges(S, 16, 0)
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.05


# Exact attention.


@pytest.mark.parametrize(
    ("mask", "world", "length"),
    [
        ("full", 2, 64),
        ("causal & window", 2, 64),
        sweep("causal", 3, 67),
        sweep("causal & documents", 3, 67),
        sweep("window", 8, 130),
        sweep("all three", 8, 130),
        sweep("documents", 4, 3),
    ],
)
def test_attention_is_exact(mask, world, length):
    inputs = random_inputs(length)
    sight = make_mask(mask, length)
    assert_attention_close(virtual_results(world, inputs, sight, Balanced(sight)), inputs, sight)


def test_attention_under_another_mask_than_the_balanced_one_is_as_exact():
    inputs = random_inputs(67)
    layout = Balanced(make_mask("causal & documents", 67))
    assert_attention_close(virtual_results(4, inputs, Causal(), layout), inputs, Causal())
