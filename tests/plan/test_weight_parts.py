"""Which part of every weight each rank holds: all of it somewhere, in order, and only where it is needed."""

import pytest
import torch

from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.weights import FIRST_RANK, Heads, Split, weight_part

HEADS = Heads(q=12, kv=4)
# One rank; one kv head for each; kv heads on two ranks each; ranks that do not divide; a rank for each query head; all.
SHARDINGS = [DecodeSharding(*each) for each in ((1, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 5), (4, 3, 1), (2, 3, 2))]


def parts_of(shape, split, sharding):
    whole = torch.arange(torch.Size(shape).numel(), device="cpu").reshape(shape)
    parts = [weight_part("w", shape, split, sharding, rank, HEADS) for rank in range(sharding.ranks)]
    taken = [torch.cat([whole[index] for index in part.indices()], part.dim) for part in parts]
    assert [part.shape for part in parts] == [tuple(each.shape) for each in taken]
    return whole, parts, taken


@pytest.mark.parametrize(
    ("shape", "split", "width"),
    [
        ((36, 5), Split(0, "q_heads"), 3),
        ((5, 36), Split(-1, "q_heads"), 3),
        ((97, 5), Split(0, "ranks"), 1),
        ((3, 5, 208), Split(-1, "ranks", unit=2, aligned=True), 8),
        ((3, 96, 5), Split(-2, "ranks", aligned=True), 4),
    ],
)
def test_all_ranks_together_have_all_of_it_once_and_in_order(shape, split, width):
    for sharding in SHARDINGS:
        whole, parts, taken = parts_of(shape, split, sharding)
        assert torch.equal(torch.cat(taken, parts[0].dim), whole), sharding
        sizes = [part.shape[part.dim] for part in parts]
        assert all(size % width == 0 for size in sizes), sharding
        assert max(sizes) - min(sizes) <= 2 * width * split.unit, sharding


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_packed_tensors_are_divided_each(sharding):
    whole, _, taken = parts_of((2, 128, 3), Split(-2, "ranks", packed=2, aligned=True), sharding)
    gate, up = (torch.cat([part.chunk(2, 1)[i] for part in taken], 1) for i in (0, 1))
    assert torch.equal(torch.cat([gate, up], 1), whole)


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_kv_heads_are_those_of_the_tp_rank(sharding):
    whole, _, taken = parts_of((8, 3), Split(0, "kv_heads"), sharding)
    for rank, part in enumerate(taken):
        heads = sharding.kv_heads(rank, HEADS.kv)
        assert torch.equal(part, whole[2 * heads.start : 2 * heads.stop])
        queries = {head // 3 for head in sharding.q_heads(rank, HEADS.q)}  # 3 query heads for each kv head
        assert queries <= set(heads)


def test_what_is_replicated_and_what_is_added_once():
    sharding = DecodeSharding(tp=2)
    assert not any(weight_part("w", (5,), None, sharding, rank, HEADS).zeros for rank in range(2))
    assert [weight_part("w", (5,), FIRST_RANK, sharding, rank, HEADS).zeros for rank in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("shape", "split", "message"),
    [
        (
            (3, 4),
            Split(0, "ranks"),
            r"layers\.0\.w must be divisible in dimension 0 over 4 ranks, got the shape",
        ),
        ((4, 37), Split(-1, "q_heads"), r"in dimension 1 over 12 query heads, got the shape \[4, 37\] under TP2-CP2"),
        ((5, 3), Split(0, "kv_heads"), "in dimension 0 over 4 kv heads"),
        ((2, 7, 3), Split(-2, "ranks", packed=2), "in dimension 1 over 4 ranks"),
        ((2, 12, 3), Split(-2, "ranks", aligned=True), "in dimension 1 over 4 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(shape, split, message):
    sharding = DecodeSharding(tp=2, cp=2)

    def all_parts():
        return [weight_part("layers.0.w", shape, split, sharding, rank, HEADS) for rank in range(4)]

    with pytest.raises(ValueError, match=message):
        all_parts()
