"""Query heads that CP ranks project alike: nothing of them has to be gathered among CP ranks."""

import pytest

from attnmesh.plan.decode import DecodeSharding


@pytest.mark.parametrize(
    ("tp", "kvdp", "cp", "q_heads"),
    [(1, 1, 1, 24), (1, 1, 4, 24), (1, 3, 1, 28), (1, 2, 3, 28), (2, 1, 1, 40), (2, 2, 2, 40)],
)
def test_kvdp_peers_project_the_group_and_cp_peers_the_same(tp, kvdp, cp, q_heads):
    sharding = DecodeSharding(tp, kvdp, cp)
    for rank in range(sharding.ranks):
        heads = [list(sharding.replicated_q_heads(peer, q_heads)) for peer in sharding.kvdp_peers(rank)]
        assert [head for run in heads for head in run] == list(
            sharding.group_heads(rank, q_heads)
        )  # in order, each once
        assert max(map(len, heads)) - min(map(len, heads)) <= 1
        for peer in sharding.cp_peers(rank):
            assert sharding.replicated_q_heads(peer, q_heads) == sharding.replicated_q_heads(rank, q_heads)
        if cp == 1:
            assert sharding.replicated_q_heads(rank, q_heads) == sharding.q_heads(rank, q_heads)


def test_an_uneven_group():
    sharding = DecodeSharding(tp=2, kvdp=2, cp=2)
    assert [sharding.replicated_q_heads(rank, 10) for rank in range(8)] == [
        range(2), range(2, 5), range(2), range(2, 5), range(5, 7), range(7, 10), range(5, 7), range(7, 10)
    ]  # fmt: skip
