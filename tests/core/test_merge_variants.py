"""All merges and sink terms agree with `merge` and with each other; they differ in rounding only."""

import torch

from attnmesh.core.state import (
    State,
    add_sinks,
    discount_sinks,
    discount_sinks_batch_invariant,
    merge,
    merge_into,
    merge_sequential,
    merge_stacked,
    scale_for_sum,
    sink_gradient,
    unpack_state,
)

PARTS, B, H, S, D = 4, 2, 3, 5, 6


def random_states() -> list[State]:
    """States whose first row is empty everywhere, and whose second row is empty in the even parts."""
    states = [
        State(torch.randn(B, H, S, D, dtype=torch.float64), 20 * torch.randn(B, H, S, dtype=torch.float64))
        for _ in range(PARTS)
    ]
    for i, (out, lse) in enumerate(states):
        for row in range(1 + (i % 2 == 0)):
            out[:, :, row], lse[:, :, row] = 0.0, -torch.inf
    return states


def assert_equal(found: State, expected: State) -> None:
    torch.testing.assert_close(found.out, expected.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-12, atol=1e-12)


def test_every_merge_gives_the_same_state():
    states = random_states()
    expected = merge(states)
    total = State.identity((B, H, S, D), dtype=torch.float64)
    for state in states:
        merge_into(total, state)
    assert_equal(total, expected)
    assert_equal(merge_sequential(torch.stack([torch.cat([out, lse[..., None]], -1) for out, lse in states])), expected)
    assert_equal(merge_stacked(states, B), expected)
    lses = torch.stack([state.lse for state in states])
    scaled = [scale_for_sum(state, lses) for state in states]
    assert_equal(State(torch.stack([part.out for part in scaled]).sum(0), scaled[0].lse), expected)


def test_parts_of_one_sequence_merge_along_the_first_dimension():
    parts = [State(out[:1], lse[:1]) for out, lse in random_states()]
    assert_equal(merge_stacked(parts, 1), merge(parts))


def test_merge_into_changes_only_the_rows_of_the_part():
    total, part, _, _ = random_states()
    before = State(total.out.clone(), total.lse.clone())
    merge_into(total, State(part.out[:, :, :2], part.lse[:, :, :2]), row=3)
    assert torch.equal(total.out[:, :, :3], before.out[:, :, :3])
    rows = slice(3, 5)
    expected = merge(
        [State(before.out[:, :, rows], before.lse[:, :, rows]), State(part.out[:, :, :2], part.lse[:, :, :2])]
    )
    assert_equal(State(total.out[:, :, rows], total.lse[:, :, rows]), expected)


def test_every_sink_term_is_the_merge_with_a_key_without_a_value():
    state = random_states()[1]
    sinks = torch.tensor([0.5, -3.0, -torch.inf], dtype=torch.float64)[:, None]
    expected = merge([state, State(torch.zeros_like(state.out), sinks.expand(B, H, S).contiguous())])
    assert_equal(add_sinks(state, sinks), expected)
    torch.testing.assert_close(discount_sinks_batch_invariant(*state, sinks), expected.out)
    torch.testing.assert_close(discount_sinks(*state, sinks), expected.out)


def test_infinite_lses_outweigh_all_others_in_every_merge():
    states = random_states()
    expected = merge(states)
    for i in range(3):  # row 2 + i: the first 1 + i states
        for state in states[: 1 + i]:
            state.lse[:, :, 2 + i] = torch.inf
        expected.out[:, :, 2 + i] = torch.stack([state.out[:, :, 2 + i] for state in states[: 1 + i]]).mean(0)
        expected.lse[:, :, 2 + i] = torch.inf
    assert_equal(merge(states), expected)
    assert_equal(merge(reversed(states)), expected)
    packed = torch.stack([torch.cat([out, lse[..., None]], -1) for out, lse in states])
    assert_equal(merge_sequential(packed), expected)
    assert_equal(merge_sequential(packed.flip(0)), expected)
    assert_equal(merge_stacked(states, B), expected)
    lses = torch.stack([state.lse for state in states])
    scaled = [scale_for_sum(state, lses) for state in states]
    assert_equal(State(torch.stack([part.out for part in scaled]).sum(0), scaled[0].lse), expected)
    # Pairwise, only two infinite parts have equal weights: the total does not know how many it has.
    total = State.identity((B, H, S, D), dtype=torch.float64)
    for state in states:
        merge_into(total, state)
    assert_equal(State(*(x[:, :, :4] for x in total)), State(*(x[:, :, :4] for x in expected)))
    assert total.out.isfinite().all()


def test_an_infinite_sink_takes_all_weight_and_shares_it_with_an_infinite_lse():
    state = random_states()[1]
    state.lse[:, :, 3:] = torch.inf
    sinks = torch.tensor([torch.inf, 2.0, -torch.inf], dtype=torch.float64)[:, None]
    expected = merge([state, State(torch.zeros_like(state.out), sinks.expand(B, H, S).contiguous())])
    assert (expected.out[:, 0, :3] == 0).all()
    assert (expected.lse[:, 0] == torch.inf).all()
    assert_equal(State(expected.out[:, 0, 3:] * 2, expected.lse[:, 0, 3:]), State(*(x[:, 0, 3:] for x in state)))
    assert_equal(State(*(x[:, 1:, 3:] for x in expected)), State(*(x[:, 1:, 3:] for x in state)))
    assert_equal(add_sinks(state, sinks), expected)
    torch.testing.assert_close(discount_sinks_batch_invariant(*state, sinks), expected.out)
    torch.testing.assert_close(discount_sinks(*state, sinks), expected.out)


def test_the_gradient_of_an_infinite_lse_is_zero():
    states = [State(*(x.requires_grad_() for x in state)) for state in random_states()[:2]]
    with torch.no_grad():
        states[0].lse[:, :, 2:] = torch.inf
        states[1].lse[:, :, 3:] = torch.inf
    merged = merge(states)
    lses = [state.lse for state in states]
    for grad in torch.autograd.grad([merged.out.sum(), merged.lse.sum()], lses, retain_graph=True):
        assert grad.isfinite().all()
        assert (grad[:, :, 2:] == 0).all()
    first, second = torch.autograd.grad(merged.out.sum(), [state.out for state in states])
    assert (first[:, :, 2] == 1).all()
    assert (second[:, :, 2] == 0).all()
    assert (first[:, :, 3:] == 0.5).all()
    assert (second[:, :, 3:] == 0.5).all()


def test_sink_gradient_is_that_of_autograd():
    out, lse = (x[0].transpose(0, 1).contiguous() for x in random_states()[1])  # [S, H, D], [S, H]
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    merged = add_sinks(State(out, lse), sinks)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    (expected,) = torch.autograd.grad([merged.out, merged.lse], sinks, [grad_out, grad_lse])
    delta = (merged.out * grad_out).sum(-1) - grad_lse
    torch.testing.assert_close(sink_gradient(sinks, merged.lse, delta).detach(), expected)


def test_unpack_state_returns_views():
    packed = torch.zeros(H, B, S, D + 1)
    out, lse = unpack_state(packed)
    out.fill_(1.0)
    lse.fill_(2.0)
    assert (packed[..., :-1] == 1).all()
    assert (packed[..., -1] == 2).all()
