"""Partial states of shards of the positions, combined over ranks: three ways, one result."""

import pytest
import torch

from attnmesh import State, merge, run_virtual
from attnmesh.core.state import discount_sinks_batch_invariant, unpack_state
from attnmesh.ops.merge import merge_packed
from attnmesh.parallel.decode.core import StateExchange


def drawn_states(world, heads, rows=3, tokens=2, dim=5, dtype=torch.float64):
    """Packed states [H, B, S, D + 1] of every rank; some rows see nothing on some ranks, one row nothing anywhere."""
    packed = torch.randn(world, heads, rows, tokens, dim + 1, dtype=dtype)
    packed[..., -1] *= 20  # some dominate
    blind = torch.rand(world, heads, rows, tokens) < 0.3
    blind[:, 0, 0, 0] = True
    packed[..., :-1].masked_fill_(blind.unsqueeze(-1), 0.0)
    packed[..., -1].masked_fill_(blind, -torch.inf)
    return packed


def merged(packed, sinks):
    """What it should be, [H, B, S, D], by the library's own merge."""
    states = [State(part[..., :-1], part[..., -1]) for part in packed]
    if sinks is not None:
        shape = packed.shape[1:-1]
        blind = (packed[..., -1] == -torch.inf).all(0)
        lse = sinks[:, None, None].expand(shape).masked_fill(blind, -torch.inf)
        states.append(State(torch.zeros_like(states[0].out), lse))
    return merge(states).out


@pytest.mark.parametrize(
    ("way", "heads", "sunk"),
    [
        ("all_to_all", (3,), False),
        ("all_to_all", (2, 2), True),
        ("reduce_scatter", (1, 1, 1, 1), False),
        ("reduce_scatter", (3, 1, 2), True),
        ("all_reduce", (2, 2), False),
        ("all_reduce", (1, 1, 1, 1), True),
    ],
)
def test_every_way_gives_the_own_heads_over_all_positions(way, heads, sunk):
    world = len(heads)
    packed = drawn_states(world, sum(heads))
    sinks = torch.randn(sum(heads), dtype=torch.float64) if sunk else None
    expected = merged(packed, sinks)

    def rank(comm):
        cp = StateExchange(comm, heads)
        out = cp.combine(packed[comm.rank].contiguous(), sinks, torch.float64, way)
        assert out.shape == (3, heads[comm.rank], 2, 5)
        torch.testing.assert_close(out.transpose(0, 1), expected[cp.own], rtol=1e-12, atol=1e-12)
        return comm.traffic.bytes

    rows = 3 * 2 * 8
    for me, sent in enumerate(run_virtual(world, rank)):
        others = sum(heads) - heads[me]
        if way == "all_to_all":
            assert sent == others * rows * (5 + 1)
        elif way == "reduce_scatter":
            assert sent == (world - 1) * sum(heads) * rows + others * rows * 5
        else:
            assert sent == (world - 1) * sum(heads) * rows + round(2 * (world - 1) / world * sum(heads) * rows * 5)


def test_heads_are_gathered_in_order():
    q = torch.randn(6, 3, 2, 4)
    starts = (0, 3, 4)
    heads = (3, 1, 2)

    def rank(comm):
        cp = StateExchange(comm, heads)
        return cp.gather_heads(q[starts[comm.rank] : starts[comm.rank] + heads[comm.rank]].contiguous())

    for gathered in run_virtual(3, rank):
        assert torch.equal(gathered, q)


def test_identities_do_not_change_a_bit():
    packed = drawn_states(5, 4, dtype=torch.float32)
    whole = merge_packed(packed, None, torch.float32)
    nothing = torch.zeros_like(packed[:1])
    nothing[..., -1] = -torch.inf
    padded = torch.cat([nothing, packed[:2], nothing, nothing, packed[2:], nothing])
    assert torch.equal(merge_packed(padded, None, torch.float32), whole)
    assert not torch.equal(merge_packed(packed.flip(0), None, torch.float32), whole)  # the order does


def test_sinks_are_one_more_key_without_a_value():
    out, lse, sinks = torch.ones(2, 3, 1, 4), torch.tensor([0.0, 1000.0, -torch.inf]), torch.tensor([0.0, -torch.inf])
    share = discount_sinks_batch_invariant(out, lse.view(1, 3, 1).expand(2, 3, 1), sinks[:, None, None])[..., 0, 0]
    assert torch.equal(share, torch.tensor([[0.5, 1.0, 0.0], [1.0, 1.0, 0.0]]))


def test_sinks_of_a_row_do_not_depend_on_the_others():
    out, lse, sinks = torch.ones(3, 67, 1, 1), 3 * torch.randn(3, 67, 1), torch.randn(3)
    alone = [
        discount_sinks_batch_invariant(out[:, row : row + 1], lse[:, row : row + 1], sinks[:, None, None])
        for row in range(67)
    ]
    assert torch.equal(discount_sinks_batch_invariant(out, lse, sinks[:, None, None]), torch.cat(alone, 1))


def test_a_state_is_written_where_it_is_sent_from():
    packed = torch.full((4, 3, 2, 6), torch.nan)
    out, lse = unpack_state(packed)
    assert out.shape == (3, 4, 2, 5)
    assert lse.shape == (3, 4, 2)
    out.fill_(1.0)
    lse.fill_(2.0)
    assert torch.equal(packed, torch.tensor([1.0] * 5 + [2.0]).expand(4, 3, 2, 6))
