"""Collectives as exchanges: by messages and by sums they say the same, and all-reduces what comm counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.plan.program import Bundle
from attnmesh.plan.rounds import collectives
from attnmesh.plan.rounds.collectives import Groups, all_ranks


def by_rank(exchange, world, node):
    """near_out, near_in, far_out, far_in"""
    if isinstance(exchange, Bundle):
        return [x.tolist() for x in (exchange.near_out, exchange.near_in, exchange.far_out, exchange.far_in)]
    near = exchange.source // node == exchange.target // node
    return [
        np.bincount(ranks[at], exchange.nbytes[at], world).astype(int).tolist()
        for at in (near, ~near)
        for ranks in (exchange.source, exchange.target)
    ]


def all_of(groups, values):
    return [groups.gathered(values), groups.scattered(values), *groups.summed(values // 7 * 0 + values.max())]


@given(
    st.integers(1, 4), st.integers(2, 6), st.integers(1, 6), st.booleans(),
    st.lists(st.integers(0, 60_000), min_size=24, max_size=24),
)  # fmt: skip
def test_sums_are_those_of_the_messages(number, size, node, strided, values):
    world = number * size
    ranks = np.arange(world).reshape(size, number).T if strided else np.arange(world).reshape(number, size)
    groups, values = Groups(ranks, node), np.array(values[:world])
    apart = all_of(groups, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MOST_MESSAGES", 0)
        together = all_of(groups, values)
    assert len(apart) == len(together)
    for messages, bundle in zip(apart, together, strict=True):
        assert isinstance(bundle, Bundle)
        assert by_rank(messages, world, node) == by_rank(bundle, world, node)
        assert all(
            s in ranks[np.nonzero(ranks == t)[0][0]] for s, t in zip(messages.source, messages.target, strict=True)
        )


@given(st.integers(2, 9), st.integers(1, 200_000))
def test_a_sum_is_what_comm_counts_and_takes_one_round_where_it_is_small(world, nbytes):
    steps = all_ranks(world).summed(np.full(world, nbytes))
    sent = sum(np.bincount(step.source, step.nbytes, world) for step in steps)
    assert sent.tolist() == [round(2 * (world - 1) / world * nbytes)] * world
    assert len(steps) == (1 if nbytes * world <= 1 << 16 else 2)


def test_a_rank_alone_sends_nothing():
    one = all_ranks(1)
    assert not one.summed(np.array([9]))
    assert not len(one.gathered(np.array([9])))
    assert not len(one.shifted(np.array([9])))
