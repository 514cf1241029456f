"""Masks against independently written truths, by brute force."""

import time
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.core.mask import Intervals
from attnmesh.core.masks import (
    And,
    BlockCausal,
    Causal,
    Chunked,
    Coverage,
    Documents,
    Full,
    Global,
    Mask,
    Or,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
)
from helpers.cases import first
from helpers.masks import batch_masks, checkered_slices, falling_slices, masks

S = 9  # every mask of the list below is meant for this length
Sees = Callable[[int, int], bool]


def full(q: int, k: int) -> bool:
    return True


def causal(q: int, k: int) -> bool:
    return k <= q


def window(left: int, right: int) -> Sees:
    return lambda q, k: -left <= k - q <= right


def documents(*lengths: int) -> Sees:
    owner = [document for document, length in enumerate(lengths) for _ in range(length)]
    return lambda q, k: owner[q] == owner[k]


def both(*truths: Sees) -> Sees:
    return lambda q, k: all(sees(q, k) for sees in truths)


SIMPLE: list[tuple[Mask, Sees]] = [
    (Full(), full),
    (Causal(), causal),
    (SlidingWindow(0), window(0, 0)),
    (SlidingWindow(1), window(1, 0)),
    (SlidingWindow(4), window(4, 0)),
    (SlidingWindow(0, 1), window(0, 1)),
    (SlidingWindow(2, 1), window(2, 1)),
    (SlidingWindow(1, 3), window(1, 3)),
    (SlidingWindow(100, 100), window(100, 100)),
    (Documents([S]), documents(S)),
    (Documents([3, 2, 4]), documents(3, 2, 4)),
    (Documents([0, 1, 0, 0, 5, 3, 0]), documents(0, 1, 0, 0, 5, 3, 0)),
    (Documents([1] * S), documents(*[1] * S)),
    (
        Documents([3, 2, 4], prefixes=[2, 0, 3]),
        lambda q, k: documents(3, 2, 4)(q, k) and (k <= q or k in (0, 1, 5, 6, 7)),
    ),
    (Documents([4, 0, 5], prefixes=[4, 0, 0]), lambda q, k: documents(4, 5)(q, k) and (k <= q or k < 4)),
    (Prefix(0), causal),
    (Prefix(4), lambda q, k: k < 4 or k <= q),
    (Prefix(20), full),
    (Chunked(1), lambda q, k: k == q),
    (Chunked(4), lambda q, k: k <= q and k // 4 == q // 4),
    (BlockCausal(1), causal),
    (BlockCausal(4), lambda q, k: k // 4 <= q // 4),
]
PAIRS = [
    (a & b, both(sees_a, sees_b))
    for i, (a, sees_a) in enumerate(SIMPLE)
    for b, sees_b in SIMPLE[i + 1 :]
    if i in (1, 6, 10)
]
TRIPLES = [
    (Causal() & SlidingWindow(2, 1) & Documents([3, 2, 4]), both(causal, window(2, 1), documents(3, 2, 4))),
    (Documents([4, 5]) & SlidingWindow(1, 3) & Documents([2, 7]), both(window(1, 3), documents(2, 2, 5))),
    (SlidingWindow(3) & (SlidingWindow(1, 2) & Full()) & Documents([8, 1]), both(window(1, 0), documents(8, 1))),
]
MASKS = SIMPLE + PAIRS + TRIPLES

every_mask = pytest.mark.parametrize(("mask", "sees"), MASKS, ids=[str(mask) for mask, _ in MASKS])


@every_mask
def test_visible_is_the_definition(mask, sees):
    positions = torch.arange(S)
    truth = torch.tensor([[sees(q, k) for k in range(S)] for q in range(S)])
    assert torch.equal(mask.visible(positions[:, None], positions), truth)
    pairs = torch.tensor([[8, 0], [3, 3], [2, 3], [0, 8]])
    assert mask.visible(*pairs.T).tolist() == [sees(q, k) for q, k in pairs.tolist()]


def only_interval(mask: Mask) -> Intervals:
    (interval,) = mask.intervals(range(S))
    return interval


@every_mask
def test_an_interval_has_ends_that_never_move_back_and_contains_its_query(mask, sees):
    interval = only_interval(mask)
    first, end = interval.key_ranges(torch.arange(S))
    assert list(zip(first.tolist(), end.tolist(), strict=True)) == [interval.key_range(q) for q in range(S)]
    assert (first.diff() >= 0).all()
    assert (end.diff() >= 0).all()
    assert interval.contains_query
    assert all(interval.key_range(q)[0] <= q < interval.key_range(q)[1] for q in range(S))


def ranges(least: int, most: int, steps: tuple[int, ...] = (1, 2, 3)) -> list[range]:
    """Every ascending range inside [least, most) with the given steps, empty ones included."""
    return [
        range(start, stop, step) for step in steps for start in range(least, most) for stop in range(start, most + 1)
    ]


@pytest.mark.parametrize(("mask", "sees"), first(5, SIMPLE + TRIPLES), ids=[str(mask) for mask, _ in SIMPLE + TRIPLES])
def test_coverage_is_exact_for_every_query_range_and_key_range(mask, sees):
    everywhere = {k_range: sum(1 << k for k in k_range) for k_range in ranges(0, S, (1, 2))[::3]}
    for q_range in ranges(0, S, (1, 3)):
        seen_by = [sum(1 << k for k in range(S) if sees(q, k)) for q in q_range]
        by_any, by_all = 0, -1
        for seen in seen_by:
            by_any, by_all = by_any | seen, by_all & seen
        for k_range, keys in everywhere.items():
            if not q_range or not keys & by_any:
                truth = Coverage.EMPTY
            elif keys & by_all == keys:
                truth = Coverage.FULL
            else:
                truth = Coverage.PARTIAL
            assert mask.coverage(q_range, k_range) is truth, (q_range, k_range)


def test_coverage_is_full_below_the_diagonal():
    early, late = range(32), range(32, 64)
    assert Causal().coverage(q=late, k=early) is Coverage.FULL
    assert Causal().coverage(q=early, k=late) is Coverage.EMPTY
    assert Causal().coverage(q=early, k=early) is Coverage.PARTIAL
    assert Causal().coverage(q=range(31, 40), k=early) is Coverage.FULL  # touching the diagonal from below
    assert Causal().coverage(q=range(30, 40), k=early) is Coverage.PARTIAL


def test_zigzag_devices_compute_nine_of_36_chunk_pairs():
    chunks = [range(32 * i, 32 * (i + 1)) for i in range(8)]  # S = 256, 4 devices
    for device in range(4):
        mine = (chunks[device], chunks[7 - device])
        computed = [(q, k) for q in mine for k in chunks if Causal().coverage(q, k) is not Coverage.EMPTY]
        assert len(computed) == 9


@every_mask
def test_boundaries_include_the_places_where_a_document_begins(mask, sees):
    parts = mask.parts if isinstance(mask, And) else (mask,)
    begins = {b for part in parts if isinstance(part, Documents) for b in accumulate(part.lengths)}
    for q_range in ranges(0, S):
        inside = sorted(b for b in begins if q_range and q_range[0] < b <= q_range[-1])
        found = only_interval(mask).boundaries(q_range)
        assert set(inside) <= set(found)
        assert found == sorted(set(found))


def test_positions_past_the_last_document_see_nothing():
    mask = Documents([2, 3])
    positions = torch.arange(-2, 9)
    seen = mask.visible(positions[:, None], positions).any(1)
    assert positions[seen].tolist() == [0, 1, 2, 3, 4]
    assert [mask.key_range(p) for p in positions.tolist()] == list(
        zip(*(x.tolist() for x in mask.key_ranges(positions)), strict=True)
    )
    assert not Documents([]).visible(torch.arange(3), torch.arange(3)).any()


def test_and_flattens_whichever_way_it_is_bracketed():
    a, b, c = Causal(), SlidingWindow(2, 1), Documents([3, 6])
    assert (a & b) & c == a & (b & c) == And((a, b, c))


def test_and_drops_full():
    assert Full() & Full() == Full()
    assert Full() & Causal() == Causal() & Full() == Causal()
    assert Full() & Causal() & Full() & SlidingWindow(1, 1) == Causal() & SlidingWindow(1, 1)


def test_and_drops_what_it_already_has():
    assert Causal() & Causal() == Causal()
    twice = (Causal() & SlidingWindow(3, 3)) & (SlidingWindow(3, 3) & Causal())
    assert twice == And((Causal(), SlidingWindow(3, 3)))


def test_and_takes_masks_only():
    with pytest.raises(TypeError):
        Causal() & True
    for combine in (lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a):  # one of the two, otherwise
        with pytest.raises(TypeError, match=r"combine masks with & and \|, not .*, got Causal\(\)"):
            combine(Causal(), SlidingWindow(3))


@pytest.mark.parametrize("masks", [torch.tensor(1), Causal(), "causal", {Causal()}, 3], ids=repr)
def test_masks_of_sequences_are_a_list(masks):
    with pytest.raises(ValueError, match=r"PerSequence.masks must be a list of masks, got"):
        PerSequence(masks)


def test_masks_hash_and_compare_by_value():
    for make in (
        Full,
        Causal,
        lambda: SlidingWindow(2, 1),
        lambda: Documents([1, 2]),
        lambda: Causal() & Documents([3]),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
    assert len({mask for mask, _ in MASKS}) == len(dict.fromkeys(str(mask) for mask, _ in MASKS))
    assert SlidingWindow(2) != SlidingWindow(2, 1)
    assert Documents([1, 2]) != Documents([2, 1])
    assert Documents(iter((1, 2))) == Documents([1, 2]) == Documents(torch.tensor([1, 2]))


def test_asking_a_mask_anything_does_not_change_its_value():
    asked, fresh = Documents([1, 2]), Documents([1, 2])
    asked.key_range(1)
    asked.key_ranges(torch.arange(3))
    assert asked == fresh
    assert hash(asked) == hash(fresh)


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(1), Documents([3])], ids=str)
def test_masks_cannot_be_changed(mask):
    for name in ("left", "lengths"):
        with pytest.raises(AttributeError):
            setattr(mask, name, 5)


@pytest.mark.parametrize("width", [-1, True, False, 1.0, 2.5, None, "3"])
def test_a_window_that_is_no_count_is_refused(width):
    with pytest.raises(ValueError, match=r"SlidingWindow\.left must be an integer >= 0"):
        SlidingWindow(width)
    with pytest.raises(ValueError, match=r"SlidingWindow\.right must be an integer >= 0"):
        SlidingWindow(1, width)


def test_a_negative_document_is_refused():
    with pytest.raises(ValueError, match=r"Documents\.lengths must .*>= 0.*-2"):
        Documents([3, -2, 8])


@pytest.mark.parametrize("lengths", [[2.5, 3.5], [1.5], ["3", "4"], [True, 5]])
def test_document_lengths_that_are_no_counts_are_refused_not_rounded(lengths):
    with pytest.raises(ValueError, match=r"Documents\.lengths"):
        Documents(lengths)


def test_documents_that_do_not_add_up_are_refused_by_check():
    for mask in (
        Documents([3, 4]),
        Causal() & Documents([3, 4]),
        Documents([7]) & SlidingWindow(1) & Documents([3, 4]),
    ):
        mask.check(7)
        for length in (0, 6, 8):
            with pytest.raises(ValueError, match=f"sequence length {length}.*add up to 7"):
                mask.check(length)
    Documents([]).check(0)
    Documents([0, 0]).check(0)


def test_check_names_many_documents_briefly():
    with pytest.raises(ValueError, match=r"1, 1, \.\.\. 5000 in all") as caught:
        Documents([1] * 5000).check(4999)
    assert len(str(caught.value)) < 300


def test_masks_without_a_length_of_their_own_fit_any():
    for mask in (Full(), Causal(), SlidingWindow(5), Causal() & SlidingWindow(5, 5)):
        mask.check(0)
        mask.check(12345)


# Unions, and masks that are several intervals.

SEVERAL: list[tuple[Mask, Sees]] = [
    (Global(3), lambda q, k: k < 3),
    (Global(3, both=True), lambda q, k: k < 3 or q < 3),
    (Causal() & (Global(2) | SlidingWindow(2)), lambda q, k: k <= q and (k < 2 or q - k <= 2)),
    (Global(2, both=True) | SlidingWindow(1, 1), lambda q, k: min(q, k) < 2 or abs(q - k) <= 1),
    (Documents([4, 5]) | Chunked(3), lambda q, k: documents(4, 5)(q, k) or (k <= q and k // 3 == q // 3)),
    (Slices([]), lambda q, k: False),
    (Slices([((1, 4), (2, 9), "full")]), lambda q, k: q in range(1, 4) and k in range(2, 9)),
    (Slices([((0, 9), (0, 9), "causal")]), causal),
    (Slices([((2, 8), (5, 9), "causal")]), lambda q, k: 2 <= q < 8 and 5 <= k < 9 and k - 9 <= q - 8),
    (Slices([((2, 8), (5, 9), "inverse_causal")]), lambda q, k: 2 <= q < 8 and 5 <= k < 9 and k - 5 >= q - 2),
    (
        Slices([(range(1, 4), range(3, 9), "bidirectional_causal")]),
        lambda q, k: 1 <= q < 4 and 3 <= k < 9 and q - 1 <= k - 3 and k - 9 <= q - 4,
    ),
    (  # two slices that overlap, and one far behind
        Slices([((0, 6), (0, 6), "causal"), ((3, 9), (2, 8), "full"), ((7, 9), (0, 1), "full")]),
        lambda q, k: (k <= q < 6) or (q >= 3 and 2 <= k < 8) or (q >= 7 and k == 0),
    ),
]
several = pytest.mark.parametrize(("mask", "sees"), SEVERAL, ids=[str(mask) for mask, _ in SEVERAL])


@several
def test_masks_of_several_intervals_are_their_definition(mask, sees):
    truth = torch.tensor([[sees(q, k) for k in range(S)] for q in range(S)])
    positions = torch.arange(S)
    assert torch.equal(mask.visible(positions[:, None], positions), truth)
    check_intervals(mask, S)


def check_intervals(mask: Mask, length: int) -> None:
    """Intervals are disjoint, allow what the mask allows, and never move back; integers and tensors agree."""
    positions = torch.arange(length)
    count = torch.zeros(length, length, dtype=torch.long)
    for part in mask.intervals(range(length)):
        first, end = part.key_ranges(positions)
        assert list(zip(first.tolist(), end.tolist(), strict=True)) == [part.key_range(q) for q in positions.tolist()]
        assert (first.diff() >= 0).all(), (mask, part)
        assert (end.diff() >= 0).all(), (mask, part)
        seen = (first[:, None] <= torch.arange(length)) & (torch.arange(length) < end[:, None])
        count += seen
        if part.contains_query:
            assert seen.any(1).equal(seen.diagonal()), (mask, part)
        # Between boundaries an end moves by at most one per position, as the cut into squares requires.
        moves = {q + 1 for side in (first, end) for q in (side.diff() > 1).nonzero().flatten().tolist()}
        assert moves <= {*part.boundaries(range(-1, length))}, (mask, part)
    assert torch.equal(count, mask.visible(positions[:, None], torch.arange(length)).long()), mask


def check_any_mask(data):
    length = data.draw(st.integers(1, 30))
    check_intervals(data.draw(masks(length)), length)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_intervals_of_any_mask_are_disjoint_and_equal_its_definition(data):
    check_any_mask(data)


@pytest.mark.sweep
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_intervals_of_many_masks(data):
    check_any_mask(data)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_coverage_of_any_mask_is_exact(data):
    length = data.draw(st.integers(1, 14))
    mask = data.draw(batch_masks(length, 2))
    visible = mask.visible(torch.arange(length)[:, None], torch.arange(length))
    chosen, k_ranges = data.draw(st.randoms(use_true_random=False)), ranges(0, length, (1, 2))
    for q in ranges(0, length, (1, 3)):
        k = chosen.choice(k_ranges)
        pairs = visible[..., q.start : q.stop : q.step, k.start : k.stop : k.step]
        some = Coverage.FULL if pairs.all() else Coverage.PARTIAL if pairs.any() else Coverage.EMPTY
        assert mask.coverage(q, k) is (some if q and k else Coverage.EMPTY), (mask, q, k)


def test_a_window_with_global_tokens_is_two_intervals():
    assert len((Causal() & (Global(4) | SlidingWindow(1023))).intervals(range(10000))) == 2
    assert len((Global(4, both=True) | SlidingWindow(3, 3)).intervals(range(10000))) == 3
    shared = [((4 * i, 4 * i + 4), k, "full") for i in range(1, 50) for k in ((0, 4), (4 * i, 4 * i + 4))]
    assert len(Slices(shared).intervals(range(200))) == 2  # a question that all answers attend to, and each answer


def test_or_flattens_and_prints():
    a, b, c = Causal(), SlidingWindow(2, 1), Global(3)
    assert (a | b) | c == a | (b | c) == Or((a, b, c))
    assert a | a == a
    assert str(a & (b | c)) == "Causal() & (SlidingWindow(left=2, right=1) | Global(n=3, both=False))"
    assert eval(str((a & b) | c)) == (a & b) | c


def test_a_mask_per_sequence():
    mask = Causal() & PerSequence([Documents([3, 6]), Full()])
    assert mask.sequences == 2
    assert mask.of_sequence(0) == Causal() & Documents([3, 6])
    assert mask.of_sequence(1).visible(torch.tensor([8]), torch.tensor([0])).all()
    assert mask.visible(torch.tensor([8]), torch.tensor([0])).tolist() == [[False], [True]]
    with pytest.raises(ValueError, match="different numbers of sequences"):
        mask & Padding([1, 2, 3])
    with pytest.raises(ValueError, match=r"PerSequence\.masks\[0\] must be the mask of one sequence"):
        PerSequence([Padding([3])])
    with pytest.raises(ValueError, match="of_sequence"):
        mask.intervals(range(9))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_attends_to_nothing_and_nobody_attends_to_it(side):
    mask = Padding([0, 2, 5], side, length=5)
    visible = mask.visible(torch.arange(5)[:, None], torch.arange(5))
    for n, found in zip((0, 2, 5), visible, strict=True):
        real = torch.arange(5) >= 5 - n if side == "left" else torch.arange(5) < n
        assert torch.equal(found, real[:, None] & real)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Prefix(-1), r"Prefix\.n must be an integer >= 0, got -1"),
        (lambda: Chunked(0), r"Chunked\.size must be an integer >= 1, got 0"),
        (lambda: BlockCausal(True), r"BlockCausal\.size must be an integer >= 1, got True"),
        (lambda: Global(2, both=1), r"Global\.both must be .*, got 1"),
        (lambda: Documents([3], prefixes=[4]), r"Documents\.prefixes .* got \(4\) for lengths \(3\)"),
        (lambda: Padding([3], side="up"), r"Padding\.side must be .*'up'"),
        (lambda: Padding([3], side="left"), "requires length"),
        (lambda: Padding([3], length=2), r"Padding\.length must be .* >= 3, got 2"),
        (lambda: Slices([((0, 3), (0, 3))]), r"Slices\.slices\[0\] must be \(query range, key range, kind\)"),
        (lambda: Slices([((0, 3), (0, 3), "bicausal")]), r"kind of Slices\.slices\[0\].*bicausal"),
        (lambda: Slices([((3, 3), (0, 3), "full")]), r"0 <= start < stop"),
        (lambda: Slices([((0, 3), range(0, 4, 2), "full")]), r"0 <= start < stop"),
        (lambda: Slices([((0, 3), (0, 9), "full")]).check(8), r"keys in \[0, 8\), got range\(0, 9\)"),
        (lambda: Padding([3]).check(2), "does not fit sequences of 2 positions"),
    ],
)
def test_bad_arguments_of_masks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mask_may_have_more_chains_than_a_query_has_intervals():
    for mask, length, chains in (
        (falling_slices(70), 70, 70),
        (checkered_slices(40, 3), 120, 79),
        (Slices([((0, 5), (j, j + 1), "full") for j in range(100)]), 100, 1),  # intervals that touch are one
    ):
        check_intervals(mask, length)
        assert len(mask.intervals(range(length))) == chains


def test_too_many_intervals_are_refused():
    comb = Slices([((3, 9), (2 * j, 2 * j + 1), "full") for j in range(70)])
    with pytest.raises(ValueError, match=r"at most 64 intervals per query, and .* has 70 for the query at position 3"):
        comb.intervals(range(200))
    assert len(comb.intervals(range(120))) == 60  # the others have keys outside


def test_a_mask_that_falls_for_long_is_resolved_in_no_time():
    start = time.monotonic()
    assert len(falling_slices(5000).intervals(range(5000))) == 5000
    assert time.monotonic() - start < 5


def test_draw():
    mask = Causal() & (Global(1) | SlidingWindow(1))
    assert mask.draw(4) == "# . . .\n# # . .\n# # # .\n# . # #"
    assert mask.draw(8, size=4).splitlines()[2] == "+ + + ."
    assert Documents([1, 2]).draw() == "# . .\n. # #\n. # #"
    assert Padding([1, 2]).draw() == "sequence 0\n# .\n. .\nsequence 1\n# #\n# #"
