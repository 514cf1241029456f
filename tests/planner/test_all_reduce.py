"""Sums over all ranks: followed slice by slice, both ways."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.planner.decode import all_reduce_rounds
from helpers.clusters import link

DIRECT, PAIRS = link(latency=1.0, message=0.0), link(latency=0.0, message=1.0)


def rounds(nbytes, ranks, over):
    return [(part.name, *part.starts.values()) for part in all_reduce_rounds("sum", nbytes, ranks, over)]


@given(ranks=st.integers(1, 33), nbytes=st.integers(0, 200), pairs=st.booleans())
def test_all_bytes_are_sent_twice_by_all_but_one(ranks, nbytes, pairs):
    sent = np.zeros(ranks, dtype=np.int64)
    names = []
    for name, messages in rounds(nbytes, ranks, PAIRS if pairs else DIRECT):
        np.add.at(sent, messages.source, messages.nbytes)
        assert (messages.nbytes > 0).all()
        assert (messages.source != messages.target).all()
        names.append(name)
    assert sent.sum() == 2 * (ranks - 1) * nbytes
    assert len(set(names)) == len(names)
    if nbytes % ranks == 0:
        assert set(sent.tolist()) <= {2 * (ranks - 1) * nbytes // ranks}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_pairs_meet_once_a_step_and_neighbours_hand_over_most(ranks):
    steps = rounds(64 * ranks, ranks, PAIRS)
    halvings = ranks.bit_length() - 1
    assert len(steps) == 2 * halvings
    there = steps[:halvings]
    for bit, (_, messages) in enumerate(there):
        assert (messages.source ^ messages.target == 1 << bit).all()
        assert set(messages.nbytes.tolist()) == {64 * ranks >> (bit + 1)}
        assert Counter(messages.source.tolist()) == dict.fromkeys(range(ranks), 1)
    back = [sorted(zip(m.target, m.source, m.nbytes, strict=True)) for _, m in steps[halvings:]]
    assert back == [sorted(zip(m.source, m.target, m.nbytes, strict=True)) for _, m in reversed(there)]


def test_few_ranks_and_odd_numbers_send_to_all_at_once():
    usual = link(latency=2e-6, message=5e-7, bandwidth=1e9)
    assert [len(rounds(1 << 20, ranks, usual)) for ranks in (1, 2, 8, 64, 63)] == [0, 2, 2, 12, 2]
    _, messages = rounds(80, 8, usual)[0]
    assert len(messages) == 56
