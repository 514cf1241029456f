"""SparseMask: one range of keys and one count a row say all that the rules say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh import SparseMask
from attnmesh.ops.sparse import reference
from helpers.sparse import HIGH, LOW, MASKS, random_indices

CPU = torch.device("cpu")


def agrees(mask: SparseMask, indices: torch.Tensor, s_kv: int) -> None:
    rows = mask.bounds(indices.shape[0], s_kv, indices.shape[1], CPU)
    assert all(x.dtype == torch.int32 and x.shape == indices.shape[:1] for x in (rows.lo, rows.hi, rows.slots))
    assert torch.equal(rows.valid(indices), reference.valid_slots(indices, s_kv, mask))
    for start, stop in ((0, 2), (1, 4)):
        assert torch.equal(rows.narrow(start, stop).valid(indices[start:stop]), rows.valid(indices)[start:stop])


@pytest.mark.parametrize("s_kv", [0, 1, 23])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_says_what_its_words_say(name, s_kv):
    mask = MASKS[name](13, s_kv, 17)
    agrees(mask, random_indices(13, s_kv, 17, k_offset=mask.k_offset), s_kv)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
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
    ({"q_start": -1, "causal": True}, "q_start must be a non-negative integer, got -1"),
    ({"q_start": 1.5, "causal": True}, "q_start must be a non-negative integer, got 1.5"),
    ({"k_offset": -2}, "k_offset must be a non-negative integer, got -2"),
    ({"k_offset": False}, "k_offset must be a non-negative integer, got False"),
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
