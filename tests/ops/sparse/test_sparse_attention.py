"""sparse_attention: out, lse and every gradient against float64, over every mask, shape and dtype."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh import SparseMask, State, attention_distribution, merge, sparse_attention
from attnmesh.ops.sparse import torch_backend
from helpers.sparse import (
    BACKENDS,
    HIGH,
    LOW,
    MASKS,
    AttentionCase,
    check_backend,
    device_of,
    mask_on,
    random_attention,
    with_dtypes,
)

each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize(("name", "backend", "dtype"), with_dtypes(MASKS))
def test_every_mask_in_every_dtype(name, backend, dtype):
    check_backend(random_attention(mask=name, dtype=dtype), backend)
    check_backend(random_attention(mask=name, dtype=dtype, sink=True, own_values=True, d_v=8, seed=5), backend)


@each_backend
@pytest.mark.parametrize(
    ("s_q", "s_kv", "topk"),
    [(0, 5, 3), (4, 0, 3), (1, 1, 1), (2, 5, 40), (3, 300, 100), (70, 9, 4)],
)
def test_every_length(s_q, s_kv, topk, backend):
    for how in ({}, {"sink": True}, {"own_values": True, "d_v": 24}):
        check_backend(random_attention(s_q, s_kv, topk=topk, **how), backend)


@each_backend
@pytest.mark.parametrize("heads", [1, 24, 64, 128])
def test_every_number_of_heads(heads, backend):
    check_backend(random_attention(3, 19, heads=heads, mask="causal", sink=True), backend)


@pytest.mark.parametrize(
    ("d", "d_v", "backend", "dtype"), with_dtypes([(64, 64), (96, 32), (128, 128), (192, 128), (576, 512)])
)
def test_every_width_of_keys_and_values(d, d_v, backend, dtype):
    check_backend(random_attention(3, 21, heads=3, d=d, d_v=d_v, dtype=dtype), backend)
    check_backend(random_attention(3, 21, heads=3, d=d, d_v=d_v, dtype=dtype, own_values=True), backend)


@each_backend
def test_the_value_is_the_whole_key_but_at_most_512_unless_said(backend):
    for d, d_v in ((64, 64), (576, 512)):
        case = random_attention(2, 5, heads=2, d=d)
        q, kv, indices = (x.to(device_of(backend)) for x in (case.q, case.kv, case.indices))
        out, _ = sparse_attention(q, kv, indices, scale=0.1, backend=backend)
        same, _ = sparse_attention(q, kv, indices, scale=0.1, d_v=d_v, backend=backend)
        assert out.shape == (2, 2, d_v)
        assert torch.equal(out, same)


@each_backend
@pytest.mark.parametrize("scale", [0.0, 1, -0.6])
def test_a_scale_of_ones_own(scale, backend):
    check_backend(replace(random_attention(mask="causal", sink=True), scale=scale), backend)


@each_backend
def test_scores_of_thousands_overflow_nothing(backend):
    case = random_attention(5, 9)
    case = replace(case, q=200 * case.q, kv=20 * case.kv, indices=torch.tensor([[4], [2], [0], [8], [3]]).int())
    out, lse, dq, dkv = case.run(backend)  # of one key each: what comes out is known
    s = torch.einsum("ihd,id->ih", case.q.double(), case.kv[case.indices[:, 0]].double()) * case.scale
    torch.testing.assert_close(lse.double(), s, rtol=1e-5, atol=1e-5)
    assert s.abs().max() > 1000
    torch.testing.assert_close(out, case.kv[case.indices].expand_as(out), rtol=1e-6, atol=0.0)
    assert dq.isfinite().all()
    assert dkv.isfinite().all()


# Slots.


@each_backend
def test_a_slot_that_names_no_key_is_as_good_as_none_whatever_it_holds(backend):
    case = replace(random_attention(6, 12, topk=9), deterministic=True)  # bits are compared
    named = torch.stack([torch.randperm(12)[:5] for _ in range(6)]).int()
    found = [
        replace(case, indices=torch.cat((named, torch.full((6, 4), pad).int()), 1)).run(backend)
        for pad in (-1, 12, 13, HIGH, LOW)
    ]
    length = SparseMask(topk_length=torch.full((6,), 5))
    found.append(replace(case, indices=torch.cat((named, named[:, :4]), 1), mask=length).run(backend))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    check_backend(replace(case, indices=named), backend)


@each_backend
def test_a_key_named_twice_counts_twice(backend):
    case = random_attention(1, 6, topk=3, heads=2)
    twice = replace(case, indices=torch.tensor([[4, 2, 4]]).int())
    check_backend(twice, backend)
    once = replace(case, indices=torch.tensor([[4, 2, -1]]).int())
    assert (twice.run(backend)[1] > once.run(backend)[1]).all()


@each_backend
def test_the_order_of_slots_does_not_matter(backend):
    case = random_attention(7, 15, topk=8, dtype=torch.float32)
    turned = replace(case, indices=case.indices[:, torch.randperm(8)])
    for a, b in zip(case.run(backend), turned.run(backend), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@each_backend
def test_indices_that_all_rows_share_take_no_memory_of_their_own(backend):
    """One row of indices, expanded: as in dense attention. A NaN that one row may see stays in that row."""
    case = random_attention(6, 9, mask="causal")
    case = replace(case, indices=torch.arange(9, dtype=torch.int32).expand(6, 9))
    check_backend(case, backend)
    kv = case.kv.clone()
    kv[5] = torch.nan
    q, kv, indices = (x.to(device_of(backend)) for x in (case.q, kv, case.indices))
    q.requires_grad_()
    out, lse = sparse_attention(q, kv, indices, scale=0.3, mask=case.mask, backend=backend)
    assert out.isfinite().all(-1).all(-1).tolist() == [True] * 5 + [False]
    (dq,) = torch.autograd.grad(out[:5].sum() + lse[:5].sum(), q)
    assert dq[:5].isfinite().all()


def test_a_few_rows_at_a_time_give_the_same(monkeypatch):
    """The torch backend gathers as many keys at once as memory allows; here two rows, and less than one."""
    for case in (random_attention(mask="everything", sink=True), random_attention(mask="causal", own_values=True)):
        whole = case.run("torch")
        for most in (2 * 11 * 20, 1):
            monkeypatch.setattr(torch_backend, "_MAX_GATHERED", most)
            for a, b in zip(whole, case.run("torch"), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        monkeypatch.undo()


# Shapes and strides.


@each_backend
def test_one_kv_head_may_have_a_dimension(backend):
    case = random_attention(mask="causal", own_values=True, d_v=8)
    q, kv, v, indices = (x.to(device_of(backend)) for x in (case.q, case.kv, case.v, case.indices))
    kv, v = kv[:, None].requires_grad_(), v[:, None].requires_grad_()
    how = {"scale": case.scale, "mask": case.mask, "backend": backend}
    out, lse = sparse_attention(q, kv, indices[:, None], v=v, **how)
    grads = torch.autograd.grad(out.sum() + lse.nan_to_num(neginf=0.0).sum(), [kv, v])
    flat = [x.detach()[:, 0].requires_grad_() for x in (kv, v)]
    plain_out, plain_lse = sparse_attention(q, flat[0], indices, v=flat[1], **how)
    plain = torch.autograd.grad(plain_out.sum() + plain_lse.nan_to_num(neginf=0.0).sum(), flat)
    assert torch.equal(out, plain_out)
    assert torch.equal(lse, plain_lse)
    for one, other in zip(grads, plain, strict=True):
        assert one.shape == (23, 1, other.shape[1])
        torch.testing.assert_close(one[:, 0], other)


@each_backend
def test_any_strides(backend):
    """Features that lie apart, heads before rows, indices transposed, gradients expanded from a sum."""
    case = random_attention(5, 14, heads=3, d=16, topk=6)
    q, kv, indices = (x.to(device_of(backend)) for x in (case.q, case.kv, case.indices))

    def run(q, kv, indices):
        q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
        out, lse = sparse_attention(q, kv, indices, scale=0.3, backend=backend)
        return [out, lse, *torch.autograd.grad(out.sum() + lse.nan_to_num(neginf=0.0).sum(), [q, kv])]

    expected = run(q, kv, indices)
    for other in (
        run(q.transpose(0, 1).contiguous().transpose(0, 1), kv.T.contiguous().T, indices.T.contiguous().T),
        run(q.movedim(2, 0).contiguous().movedim(0, 2), kv, indices.repeat_interleave(2, 1)[:, ::2]),
    ):
        for a, b in zip(other, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# Sinks.


@each_backend
def test_a_sink_at_minus_infinity_is_none(backend):
    case = random_attention(mask="strided", sink=True)
    gone = replace(case, sink=torch.full_like(case.sink, -torch.inf)).run(backend)
    without = replace(case, sink=None).run(backend)
    for a, b in zip(gone, without, strict=False):
        torch.testing.assert_close(a, b)
    assert gone[-1].eq(0).all()


@each_backend
@pytest.mark.parametrize("size", [1e4, torch.inf])
def test_a_sink_that_takes_everything_leaves_nothing(size, backend):
    case = random_attention(mask="strided", sink=True)
    case = replace(case, sink=torch.full_like(case.sink, size))
    out, lse, dq, dkv, _ = found = case.run(backend)
    assert lse.eq(size).all()
    for x in (out, dq, dkv):
        assert x.eq(0).all()
    if size == torch.inf:
        assert found[-1].eq(0).all()
    else:
        torch.testing.assert_close(found[-1].double(), case.grads[1].sum(0), rtol=1e-5, atol=1e-5)


@each_backend
def test_a_row_that_sees_nothing_has_its_sink_for_an_lse(backend):
    case = random_attention(4, 9, sink=True, mask=SparseMask(topk_length=torch.zeros(4, dtype=torch.int32)))
    out, lse, dq, dkv, d_sink = case.run(backend)
    torch.testing.assert_close(lse, case.sink.float().expand_as(lse))
    for x in (out, dq, dkv):
        assert x.eq(0).all()
    torch.testing.assert_close(d_sink.double(), case.grads[1].sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_out_is_rounded_once(dtype):
    """With a sink and without: almost everywhere it is the float64 answer, rounded. (Kernels round weights, too.)"""
    for sink in (False, True):
        case = random_attention(40, 30, dtype=dtype, sink=sink, d=32)
        equal = case.run("torch")[0] == case.exact()[0].to(dtype)
        assert equal.float().mean() > 0.97


# What flows back.


def test_gradients_are_those_of_finite_differences():
    case = random_attention(
        4, 6, heads=2, d=4, topk=5, dtype=torch.float64, mask="later", own_values=True, d_v=3, sink=True
    )
    assert case.valid.any(1).all()  # differences of -inf are no number
    leaves = [x.requires_grad_() for x in (case.q, case.kv, case.v, case.sink)]

    def attend(q, kv, v, sink):
        return sparse_attention(q, kv, case.indices, v=v, sinks=sink, scale=case.scale, mask=case.mask, backend="torch")

    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradcheck(lambda q, kv: attend(q, kv, None, None), leaves[:2])


@each_backend
@pytest.mark.parametrize("wanted", ["q", "kv", "v", "sink"])
def test_one_input_alone_may_want_a_gradient(wanted, backend):
    case = random_attention(mask="causal", own_values=True, sink=True)
    device = device_of(backend)
    given_ = {"q": case.q, "kv": case.kv, "v": case.v, "sink": case.sink}
    given_ = {name: x.to(device) for name, x in given_.items()}
    given_[wanted].requires_grad_()
    out, lse = sparse_attention(
        given_["q"], given_["kv"], case.indices.to(device), v=given_["v"], sinks=given_["sink"],
        scale=case.scale, mask=case.mask, backend=backend,
    )  # fmt: skip
    do, dl = (x.to(device) for x in case.grads)
    (grad,) = torch.autograd.grad([out, lse], [given_[wanted]], [do, dl.to(lse.dtype)])
    torch.testing.assert_close(grad.cpu(), case.run(backend)[["q", "kv", "v", "sink"].index(wanted) + 2])


@each_backend
def test_out_alone_and_lse_alone_may_be_used(backend):
    case = random_attention(mask="causal", sink=True)
    for drop in (0, 1):
        grads = [x if n != drop else torch.zeros_like(x) for n, x in enumerate(case.grads)]
        device = device_of(backend)
        leaves = [x.to(device).requires_grad_() for x in (case.q, case.kv, case.sink)]
        results = sparse_attention(
            *leaves[:2], case.indices.to(device), sinks=leaves[2], scale=case.scale, mask=case.mask,
            backend=backend,
        )  # fmt: skip
        kept = 1 - drop
        alone = torch.autograd.grad(results[kept], leaves, grads[kept].to(results[kept]), retain_graph=True)
        both = torch.autograd.grad(results, leaves, [g.to(x) for g, x in zip(grads, results, strict=True)])
        for a, b in zip(alone, both, strict=True):
            torch.testing.assert_close(a, b)


@each_backend
def test_whatever_comes_back_for_a_row_that_sees_nothing_goes_nowhere(backend):
    """Its out is 0 and its lse -inf, of which the rest of a program may well make NaN."""
    case = random_attention(mask="strided")
    blind = ~case.valid.any(1)
    device = device_of(backend)
    q, kv = (x.to(device).requires_grad_() for x in (case.q, case.kv))
    out, lse = sparse_attention(q, kv, case.indices.to(device), scale=case.scale, mask=case.mask, backend=backend)
    do, dl = case.grads
    do, dl = do.masked_fill(blind[:, None, None], torch.nan), dl.masked_fill(blind[:, None], torch.nan)
    grads = torch.autograd.grad([out, lse], [q, kv], [do.to(out), dl.to(lse)])
    for a, b in zip(grads, case.run(backend)[2:], strict=True):
        torch.testing.assert_close(a.cpu(), b)
    assert 0 < blind.sum() < 13


@each_backend
def test_autocast_changes_nothing(backend):
    case = random_attention(mask="causal", own_values=True, sink=True)
    plain = case.run(backend)
    with torch.autocast(device_of(backend).type, dtype=torch.bfloat16):
        cast = case.run(backend)
    for a, b in zip(plain, cast, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@each_backend
def test_no_second_derivative(backend):
    case = random_attention(3, 5)
    q, kv = (x.to(device_of(backend)).requires_grad_() for x in (case.q, case.kv))
    out, _ = sparse_attention(q, kv, case.indices.to(q.device), scale=0.3, backend=backend)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@each_backend
def test_deterministic_gives_the_same_bits_twice(backend):
    case = replace(random_attention(40, 7, heads=8, topk=30), deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(case.run(backend), case.run(backend), strict=True))
    check_backend(case, backend)


@each_backend
@pytest.mark.parametrize("name", ["all", "causal", "strided positions", "documents"])
def test_states_over_two_chunks_of_the_keys_merge_to_the_whole(name, backend):
    case = random_attention(mask=name, own_values=True)
    exact, plain, device, cut = case.exact(), case.exact(torch.float32), device_of(backend), 9
    leaves = [x.to(device).requires_grad_() for x in (case.q, case.kv, case.v)]
    states = [
        State(
            *sparse_attention(
                leaves[0], leaves[1][some], case.indices.to(device), v=leaves[2][some], scale=case.scale,
                mask=replace(case.mask, k_offset=some.start), backend=backend,
            )
        )
        for some in (slice(0, cut), slice(cut, 23))
    ]  # fmt: skip
    out, lse = merge(states)
    grads = torch.autograd.grad([out, lse], leaves, [x.to(lse) for x in case.grads])
    for name_, found, simple, right in zip(case.names, [out, lse, *grads], plain, exact, strict=True):
        error = (found.detach().cpu().double() - right).nan_to_num(neginf=0.0).norm()
        allowed = (simple.double() - right).nan_to_num(neginf=0.0).norm()
        assert error <= 3 * allowed + 2e-6, name_
        assert torch.equal(found.isfinite().cpu(), right.isfinite()), name_


@each_backend
@pytest.mark.parametrize("sink", [False, True])
def test_the_distribution_of_the_same_pass(sink, backend):
    case: AttentionCase = random_attention(mask="everything", sink=sink)
    device = device_of(backend)
    q, kv, indices = (x.to(device) for x in (case.q, case.kv, case.indices))
    how = {"scale": case.scale, "mask": case.mask, "backend": backend}
    q.requires_grad_()
    out, lse, dist = sparse_attention(
        q, kv, indices, sinks=case.sink.to(device) if sink else None, return_attn_sum=True, **how
    )
    assert not dist.requires_grad
    assert torch.equal(dist, attention_distribution(q, kv, indices, lse, **how))
    alone = sparse_attention(q, kv, indices, sinks=case.sink.to(device) if sink else None, **how)
    assert torch.equal(out, alone[0])
    assert torch.equal(lse, alone[1])


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_call_is_right(data):
    s_q, s_kv = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 20)))
    check_backend(
        random_attention(
            s_q, s_kv,
            heads=data.draw(st.integers(1, 5)),
            d=8 * data.draw(st.integers(1, 4)),
            topk=data.draw(st.integers(1, 24)),
            mask=data.draw(st.sampled_from(sorted(MASKS))),
            own_values=data.draw(st.booleans()),
            sink=data.draw(st.booleans()),
            dtype=data.draw(st.sampled_from([torch.float64, torch.float32])),
            seed=data.draw(st.integers(0, 100)),
        ),
        "torch",
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [False, True])
def test_largest_scores(backend, sink):
    """Of the valid slots, without sinks; out, lse and their gradients stay what they are."""
    case = random_attention(mask="everything", sink=sink)
    inputs = [x.to(device_of(backend)).requires_grad_() for x in (case.q, case.kv)]
    how = {"scale": case.scale, "mask": mask_on(case.mask, device_of(backend)), "backend": backend}
    sinks = None if case.sink is None else case.sink.to(device_of(backend))
    indices = case.indices.to(device_of(backend))
    out, lse, attn_sum, largest = sparse_attention(
        *inputs, indices, sinks=sinks, return_attn_sum=True, return_max_logits=True, **how
    )
    assert not largest.requires_grad
    scores = torch.einsum("ihd,jd->ihj", case.q.double(), case.kv.double()) * case.scale
    exact = scores.masked_fill(case.times[:, None] == 0, -torch.inf).amax(-1)
    assert (exact == -torch.inf).any()
    torch.testing.assert_close(largest.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    plain = sparse_attention(*inputs, indices, sinks=sinks, return_attn_sum=True, **how)
    for x, y in zip((out, lse, attn_sum), plain, strict=True):
        assert torch.equal(x, y)
    grads, expected = (
        torch.autograd.grad([x[0].sum(), x[1][x[1].isfinite()].sum()], inputs) for x in ((out, lse), plain)
    )
    assert all(torch.equal(x, y) for x, y in zip(grads, expected, strict=True))
