"""Masks against independently written truths, by brute force."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from attnmesh.core.masks import And, Causal, Coverage, Documents, Full, Mask, SlidingWindow

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
def test_allows_is_the_truth(mask, sees):
    positions = torch.arange(S)
    truth = torch.tensor([[sees(q, k) for k in range(S)] for q in range(S)])
    assert torch.equal(mask.allows(positions[:, None], positions), truth)
    pairs = torch.tensor([[8, 0], [3, 3], [2, 3], [0, 8]])
    assert mask.allows(*pairs.T).tolist() == [sees(q, k) for q, k in pairs.tolist()]


@every_mask
def test_visible_equals_sees_and_its_ends_never_move_back(mask, sees):
    first, end = mask.key_ranges(torch.arange(S))
    assert list(zip(first.tolist(), end.tolist(), strict=True)) == [mask.key_range(q) for q in range(S)]
    assert (first.diff() >= 0).all()
    assert (end.diff() >= 0).all()


@every_mask
def test_every_query_sees_itself(mask, sees):
    assert all(mask.key_range(q)[0] <= q < mask.key_range(q)[1] for q in range(S))


def ranges(least: int, most: int, steps: tuple[int, ...] = (1, 2, 3)) -> list[range]:
    """Every ascending range inside [least, most) with the given steps, empty ones included."""
    return [
        range(start, stop, step) for step in steps for start in range(least, most) for stop in range(start, most + 1)
    ]


@every_mask
def test_coverage_is_exact_for_every_query_range_and_key_range(mask, sees):
    everywhere = {k_range: sum(1 << k for k in k_range) for k_range in ranges(0, S, (1, 2))}
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
def test_cuts_are_the_places_where_a_document_begins(mask, sees):
    parts = mask.parts if isinstance(mask, And) else (mask,)
    begins = {b for part in parts if isinstance(part, Documents) for b in accumulate(part.lengths)}
    for q_range in ranges(0, S):
        inside = sorted(b for b in begins if q_range and q_range[0] < b <= q_range[-1])
        assert mask.boundaries(q_range) == inside


def test_positions_past_the_last_document_see_nothing():
    mask = Documents([2, 3])
    positions = torch.arange(-2, 9)
    seen = mask.allows(positions[:, None], positions).any(1)
    assert positions[seen].tolist() == [0, 1, 2, 3, 4]
    assert [mask.key_range(p) for p in positions.tolist()] == list(
        zip(*(x.tolist() for x in mask.key_ranges(positions)), strict=True)
    )
    assert not Documents([]).allows(torch.arange(3), torch.arange(3)).any()


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
