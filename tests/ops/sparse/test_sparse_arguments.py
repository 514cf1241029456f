"""Arguments of the sparse functions: masks, top-k indices and bases of an lse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh import SparseMask
from attnmesh.ops.sparse import reference
from attnmesh.ops.sparse.arguments import RowBounds
from attnmesh.sparse import canonicalize, convert_lse
from helpers.sparse import HIGH, LOW, MASKS, device_of, random_indices

# Masks.

CPU = torch.device("cpu")


def agrees(mask: SparseMask, indices: torch.Tensor, s_kv: int) -> None:
    rows = mask.bounds(indices.shape[0], s_kv, indices.shape[1], CPU)
    assert all(x.dtype == torch.int32 and x.shape == indices.shape[:1] for x in (rows.lo, rows.hi, rows.slots))
    assert torch.equal(rows.valid(indices), reference.valid_slots(indices, s_kv, mask))
    for start, stop in ((0, 2), (1, 4)):
        assert torch.equal(rows.narrow(start, stop).valid(indices[start:stop]), rows.valid(indices)[start:stop])


def in_one_launch(mask: SparseMask, s_q: int, s_kv: int, topk: int) -> RowBounds:
    """What `bounds` does on a GPU."""
    pytest.importorskip("triton")
    from attnmesh.ops.sparse import triton_bounds

    device = device_of("triton")
    rows = (mask.k_start, mask.k_end, mask.q_positions, mask.topk_length)
    found = triton_bounds.bounds(
        s_q, *(None if x is None else x.to(device) for x in rows), first=mask.k_offset, end=mask.k_offset + s_kv,
        q_start=mask.q_start, k_stride=mask.k_stride, topk=topk, causal=mask.causal, device=device,
    )  # fmt: skip
    return RowBounds(*(x.cpu() for x in found), mask.k_offset)


EXTREME = torch.tensor([2**63 - 1, -(2**63), -1, 7, 40])


@pytest.mark.parametrize(
    "mask",
    [
        SparseMask(),
        SparseMask(k_offset=3, causal=True, q_start=9, k_stride=4),
        SparseMask(causal=True, q_start=2**62),
        SparseMask(causal=True, q_positions=EXTREME, k_stride=2**31 - 1),
        SparseMask(k_start=EXTREME, k_end=EXTREME.flip(0), topk_length=EXTREME.clamp(-5, 40).int(), k_offset=5),
        SparseMask(causal=True, q_positions=EXTREME, k_end=torch.stack([EXTREME, EXTREME], 1)[:, 1]),  # strided
    ],
)
def test_bounds_in_one_launch_are_those_of_torch(mask):
    """Twice: the second launch is a prepared one."""
    for _ in range(2):
        found, expected = in_one_launch(mask, 5, 30, 16), mask.bounds(5, 30, 16, CPU)
        assert found.k_offset == expected.k_offset
        assert all(torch.equal(x, y) for x, y in zip(found[:3], expected[:3], strict=True))
    assert in_one_launch(SparseMask(), 0, 30, 16).lo.shape == (0,)


@pytest.mark.parametrize(
    ("name", "s_kv"),
    [
        ("all", 0),
        ("length", 1),
        ("causal", 23),
        ("later", 0),
        ("strided", 1),
        ("later strided", 23),
        ("positions", 0),
        ("strided positions", 1),
        ("documents", 23),
        ("offset", 0),
        ("everything", 1),
    ],
)
def test_every_mask_says_what_its_words_say(name, s_kv):
    mask = MASKS[name](13, s_kv, 17)
    agrees(mask, random_indices(13, s_kv, 17, k_offset=mask.k_offset), s_kv)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_numbers_that_fit_an_integer(data):
    s_q, s_kv, topk = data.draw(st.tuples(*[st.integers(0, 6)] * 2, st.integers(1, 6)))
    wild = st.one_of(st.integers(-3, 20), st.sampled_from([LOW, HIGH, -(2**63), 2**63 - 1, 2**32, -(2**32) + 5]))

    def numbers() -> torch.Tensor | None:
        given_ = data.draw(st.none() | st.lists(wild, min_size=s_q, max_size=s_q))
        return None if given_ is None else torch.tensor(given_, dtype=torch.int64)

    causal = data.draw(st.booleans())
    positions = numbers() if causal else None
    mask = SparseMask(
        causal=causal,
        q_positions=positions,
        q_start=data.draw(st.sampled_from([0, 3, 2**40])) if causal and positions is None else 0,
        k_stride=data.draw(st.integers(1, 5)) if causal else 1,
        k_start=numbers(),
        k_end=numbers(),
        topk_length=numbers(),
        k_offset=data.draw(st.sampled_from([0, 2, HIGH - 6])),
    )
    rows = [[data.draw(st.integers(-2, 8) | st.sampled_from([LOW, HIGH, HIGH - 5])) for _ in range(topk)]] * s_q
    agrees(mask, torch.tensor(rows, dtype=torch.int32).view(s_q, topk), s_kv)


def test_a_compressed_key_is_seen_once_its_last_token_is_there():
    indices = torch.arange(4, dtype=torch.int32).expand(17, 4)
    seen = SparseMask(causal=True, k_stride=4).bounds(17, 4, 4, CPU).valid(indices)
    assert seen.sum(1).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]


def test_keys_that_no_int32_can_name_are_refused():
    with pytest.raises(ValueError, match=r"k_offset=2147483640 plus 8 keys"):
        SparseMask(k_offset=HIGH - 7).bounds(1, 8, 1, CPU)


REFUSED = [
    ({"k_stride": 0, "causal": True}, "k_stride must be a positive integer, got 0"),
    ({"k_stride": -4, "causal": True}, "k_stride must be a positive integer, got -4"),
    ({"k_stride": 2.0, "causal": True}, "k_stride must be a positive integer, got 2.0"),
    ({"k_stride": True, "causal": True}, "k_stride must be a positive integer, got True"),
    ({"q_start": -1, "causal": True}, "q_start must be an integer >= 0, got -1"),
    ({"q_start": 1.5, "causal": True}, "q_start must be an integer >= 0, got 1.5"),
    ({"k_offset": -2}, "k_offset must be an integer >= 0, got -2"),
    ({"k_offset": False}, "k_offset must be an integer >= 0, got False"),
    ({"k_start": torch.zeros(3)}, r"k_start must be an int32 or int64 tensor \[s_q\], got torch.float32 \[3\]"),
    ({"k_end": [1, 2]}, r"k_end must be an int32 or int64 tensor \[s_q\], got \[1, 2\]"),
    ({"topk_length": torch.zeros(3, 1, dtype=torch.int32)}, r"topk_length must .* got torch.int32 \[3, 1\]"),
    ({"q_positions": torch.zeros(3, dtype=torch.bool), "causal": True}, "q_positions must .* got torch.bool"),
    ({"q_start": 3, "causal": True, "q_positions": torch.arange(4)}, "q_start=3 and q_positions exclude"),
    ({"q_start": 3}, "q_start=3, .* require causal=True"),
    ({"k_stride": 2}, "k_stride=2 require causal=True"),
    ({"q_positions": torch.arange(4)}, "q_positions .* require causal=True"),
]


@pytest.mark.parametrize(("given_", "said"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_a_mask_is_refused_by_name_and_value(given_, said):
    with pytest.raises(ValueError, match=said):
        SparseMask(**given_)


@pytest.mark.parametrize("name", ["topk_length", "q_positions", "k_start", "k_end"])
def test_a_number_for_each_row_or_an_error(name):
    mask = SparseMask(causal=True, **{name: torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(ValueError, match=rf"{name} must be \[5\], one number per row of q, got \[4\]"):
        mask.bounds(5, 3, 2, CPU)


# canonicalize.


def by_hand(row, scores, s_kv, unique):
    """Slots (key, score) that name a key, ascending; the first of each if unique."""
    named = [
        (key, score) for key, score in zip(row, scores, strict=True) if 0 <= key < (HIGH if s_kv is None else s_kv)
    ]
    if unique:
        named = [slot for n, slot in enumerate(named) if slot[0] not in [key for key, _ in named[:n]]]
    return sorted(named, key=lambda slot: slot[0])


@given(
    rows=st.integers(1, 9).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-2, 9) | st.sampled_from([LOW, HIGH, HIGH - 1]), min_size=n, max_size=n), max_size=4
        ).map(lambda rows: (rows, n))
    ),
    s_kv=st.none() | st.integers(0, 8),
    unique=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_ascending_with_what_names_no_key_at_the_end(rows, s_kv, unique):
    rows, n = rows
    indices = torch.tensor(rows, dtype=torch.int32).view(len(rows), n)
    scores = torch.arange(indices.numel(), dtype=torch.float32).view(indices.shape)
    slots = canonicalize(indices, scores, s_kv=s_kv, unique=unique)
    assert slots.indices.dtype == slots.lengths.dtype == torch.int32
    for row, given_, found, found_scores, length in zip(
        rows, scores.tolist(), *map(list, slots[:2]), slots.lengths, strict=True
    ):
        expected = by_hand(row, given_, s_kv, unique)
        rest = n - len(expected)
        assert int(length) == len(expected)
        assert found.tolist() == [key for key, _ in expected] + [-1] * rest
        assert found_scores.tolist() == [score for _, score in expected] + [-torch.inf] * rest
    again = canonicalize(*slots[:2], s_kv=s_kv, unique=unique)
    assert torch.equal(again.indices, slots.indices)
    assert torch.equal(again.scores, slots.scores)


def test_rows_that_chose_the_same_keys_come_out_the_same():
    keys = torch.stack([torch.randperm(40)[:15] for _ in range(6)]).int()
    turned = keys[:, torch.randperm(15)]
    a, b = canonicalize(keys), canonicalize(turned)
    assert torch.equal(a.indices, b.indices)
    assert a.scores is None
    assert a.lengths.tolist() == [15] * 6


def test_a_gradient_flows_through_the_scores():
    indices = torch.tensor([[3, -1, 0, 3]], dtype=torch.int32)
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    slots = canonicalize(indices, scores, unique=True)
    (grad,) = torch.autograd.grad(slots.scores[slots.indices >= 0] @ torch.tensor([5.0, 7.0]), scores)
    assert grad.tolist() == [[7.0, 0.0, 5.0, 0.0]]


def test_one_kv_head_may_have_a_dimension_and_no_rows_are_no_mistake():
    assert canonicalize(torch.tensor([[[2, 1]]], dtype=torch.int32)).indices.tolist() == [[1, 2]]
    assert canonicalize(torch.zeros(0, 3, dtype=torch.int32)).lengths.shape == (0,)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"indices": torch.zeros(2, 3)}, "indices must be an int32 tensor, got torch.float32"),
        ({"indices": torch.zeros(2, 3, dtype=torch.int64)}, "indices must be an int32 tensor, got torch.int64"),
        ({"indices": torch.zeros(3, dtype=torch.int32)}, r"indices must be \[s_q, topk\] .* got \[3\]"),
        ({"indices": torch.zeros(3, 0, dtype=torch.int32)}, r"with topk >= 1, got \[3, 0\]"),
        ({"scores": torch.zeros(2, 2)}, r"scores must be \[2, 3\], .* got float32 tensor \[2, 2\]"),
        ({"scores": [1.0]}, r"scores must be a tensor, got list"),
        ({"s_kv": -1}, "s_kv must be an integer >= 0, got -1"),
        ({"s_kv": 2.5}, "s_kv must be an integer >= 0, got 2.5"),
    ],
    ids=str,
)
def test_refusals(how, said):
    with pytest.raises(ValueError, match=said):
        canonicalize(**{"indices": torch.zeros(2, 3, dtype=torch.int32)} | how)


# convert_lse.


def test_there_and_back():
    lse = torch.randn(50, 3, dtype=torch.float64) * 30
    two = convert_lse(lse, "e", "2")
    torch.testing.assert_close(torch.exp2(two), torch.exp(lse))
    torch.testing.assert_close(convert_lse(two, "2", "e"), lse)
    assert torch.equal(convert_lse(lse, "e", "e"), lse)
    assert torch.equal(convert_lse(lse, "2", "2"), lse)
    assert convert_lse(torch.tensor(1.0), "2", "e").item() == pytest.approx(math.log(2))


def test_infinities_stay_what_they_are():
    lse = torch.tensor([torch.inf, -torch.inf, 0.0])
    for src, dst in (("e", "2"), ("2", "e"), ("e", "e")):
        assert torch.equal(convert_lse(lse, src, dst), lse)


def test_a_gradient_flows():
    lse = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: convert_lse(x, "2", "e"), lse)


@pytest.mark.parametrize("base", ["10", "ln", 2, None, "E", ""])
def test_a_base_without_a_name_is_refused(base):
    for bases in ((base, "e"), ("e", base)):
        with pytest.raises(ValueError, match=r"(src|dst) must be 'e' \(natural\) or '2', got "):
            convert_lse(torch.zeros(1), *bases)
