"""attention_distribution: the head-summed probability of every slot, against float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmesh import SparseMask, attention_distribution, sparse_attention
from attnmesh.ops.sparse import reference, torch_backend
from attnmesh.sparse import convert_lse
from helpers.memory import peak_bytes
from helpers.sparse import (
    BACKENDS,
    CUDA,
    HIGH,
    LOW,
    MASKS,
    AttentionCase,
    assert_sparse_close,
    device_of,
    embedded,
    mask_on,
    normal,
    random_attention,
    random_indices,
    with_dtypes,
)

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def slots_of(case: AttentionCase, lse: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """[heads, s_q, topk] by definition, in float64 or as simply as can be; an infinite lse is a head without mass."""
    lse = lse.to(dtype)
    kept = torch.where(lse.isinf(), 0.0, lse)
    every = reference.distribution(case.q.to(dtype), case.kv.to(dtype), kept, case.scale)
    every = torch.where(lse.T[..., None].isinf(), 0.0, every)
    if not case.s_kv:
        return every.new_zeros(case.q.shape[1], *case.indices.shape)
    valid = case.valid
    at = torch.where(valid, case.indices - case.mask.k_offset, 0).long()
    return torch.where(valid, every.gather(2, at.expand(every.shape[0], -1, -1)), 0.0)


def found(case: AttentionCase, lse: Tensor, backend: str, **how: object) -> Tensor:
    """What comes out where keys that no slot may read are NaN, and queries and lse of rows that see nothing."""
    device, unread, blind = device_of(backend), ~(case.times > 0).any(0), ~case.valid.any(1)
    q, lse = case.q.masked_fill(blind[:, None, None], torch.nan), lse.masked_fill(blind[:, None], torch.nan)
    kv = case.kv.masked_fill(unread[:, None], torch.nan)
    q, kv = (embedded(x.to(device)) for x in (q, kv))
    how = {"scale": case.scale, "mask": mask_on(case.mask, device)} | how
    return attention_distribution(q, kv, case.indices.to(device), lse.to(device), backend=backend, **how).cpu()


def check(case: AttentionCase, backend: str, lse: Tensor | None = None) -> None:
    lse = case.exact()[1].to(torch.promote_types(case.q.dtype, torch.float32)) if lse is None else lse
    result = found(case, lse, backend)
    exact, plain = (slots_of(case, lse, dtype).sum(0) for dtype in (torch.float64, case.q.dtype))
    assert result.dtype == torch.promote_types(case.q.dtype, torch.float32)
    assert result[~case.valid].eq(0).all()
    assert_sparse_close(["distribution"], [result], [plain], [exact])


@pytest.mark.parametrize(("name", "backend", "dtype"), with_dtypes(MASKS))
def test_every_mask_in_every_dtype(name, backend, dtype):
    check(random_attention(mask=name, dtype=dtype), backend)


@each_backend
@pytest.mark.parametrize(("topk", "heads"), [(1, 1), (100, 8), (600, 24), (100, 128)])
def test_every_number_of_heads_and_slots(topk, heads, backend):
    check(
        random_attention(3, 300, heads=heads, topk=topk, d=16, mask="later strided" if topk == 600 else "all"), backend
    )


@pytest.mark.parametrize(("d", "backend", "dtype"), with_dtypes([64, 80, 192, 320, 576]))
def test_every_width(d, backend, dtype):
    check(random_attention(4, 30, d=d, topk=10, dtype=dtype, mask="causal"), backend)


@each_backend
@pytest.mark.parametrize(("s_q", "s_kv"), [(0, 4), (3, 0), (1, 1)])
def test_no_rows_and_no_keys(s_q, s_kv, backend):
    check(random_attention(s_q, s_kv, topk=3), backend)


# The base and the set of lse.


@each_backend
def test_both_bases_say_the_same_by_name(backend):
    case = random_attention(mask="causal")
    lse = case.exact()[1].float()
    natural = found(case, lse, backend)
    two = found(case, lse / math.log(2), backend, lse_base="2")
    torch.testing.assert_close(two, natural, rtol=1e-5, atol=1e-7)
    assert natural.sum() > 1  # nor are they the same without a name
    assert not torch.allclose(found(case, lse / math.log(2), backend), natural, rtol=1e-3)
    torch.testing.assert_close(found(case, convert_lse(lse, "e", "2"), backend, lse_base="2"), two)


def test_an_lse_of_little_precision_is_converted_with_more():
    case = random_attention(4, 9)
    lse = (case.exact()[1] / math.log(2)).to(torch.bfloat16)
    exact = slots_of(case, lse.double() * math.log(2)).sum(0)
    torch.testing.assert_close(found(case, lse, "torch", lse_base="2").double(), exact, rtol=1e-5, atol=1e-7)


@each_backend
def test_the_mass_of_a_row_is_its_heads_if_lse_is_over_the_same_slots(backend):
    case = random_attention(mask="everything", heads=6)
    mass = found(case, case.exact()[1].float(), backend).sum(1)
    expected = torch.where(case.valid.any(1), 6.0, 0.0)
    assert 0 < expected.sum() < 6 * 13
    torch.testing.assert_close(mass, expected, rtol=1e-5, atol=1e-6)


@each_backend
def test_an_lse_over_more_keys_and_sinks_leaves_heads_with_different_mass(backend):
    case = random_attention(sink=True)
    dense = replace(case, indices=torch.arange(23, dtype=torch.int32).expand(13, 23))
    lse = dense.exact()[1].float()
    check(case, backend, lse)
    heads = slots_of(case, lse).sum(2)
    assert (heads.amax(0) - heads.amin(0) > 0.01).any()


@each_backend
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinite_lse_is_a_head_without_mass(value, backend):
    case = random_attention(mask="causal")
    lse = case.exact()[1].float()
    lse[::2, 1] = value
    lse[5] = value
    result = found(case, lse, backend)
    assert result.isfinite().all()
    assert result[5].eq(0).all()
    check(case, backend, lse)
    assert found(case, torch.full_like(lse, value), backend, normalize=True, lse_base="2").eq(0).all()


# Slots.


@each_backend
def test_all_ways_to_leave_a_slot_empty_give_the_same_bits(backend):
    case = random_attention(6, 12, topk=9)
    named = torch.stack([torch.randperm(12)[:5] for _ in range(6)]).int()
    lse = replace(case, indices=named).exact()[1].float()
    results = [
        found(replace(case, indices=torch.cat((named, torch.full((6, 4), pad).int()), 1)), lse, backend)
        for pad in (-1, -7, 12, 13, HIGH, LOW)
    ]
    length = SparseMask(topk_length=torch.full((6,), 5))
    results.append(found(replace(case, indices=torch.cat((named, named[:, :4]), 1), mask=length), lse, backend))
    assert results[0][:, 5:].eq(0).all()
    assert results[0][:, :5].gt(0).all()
    for other in results[1:]:
        assert torch.equal(other, results[0])


@each_backend
def test_slots_may_come_in_any_order_and_more_than_once(backend):
    case = random_attention(mask="causal", topk=8)
    lse = case.exact()[1].float()
    result, turn = found(case, lse, backend), torch.randperm(8)
    turned = found(replace(case, indices=case.indices[:, turn]), lse, backend)
    torch.testing.assert_close(turned, result[:, turn], rtol=1e-6, atol=1e-8)
    twice = found(replace(case, indices=case.indices.repeat(1, 2)), lse, backend)
    torch.testing.assert_close(twice, result.repeat(1, 2), rtol=1e-6, atol=1e-8)


@each_backend
def test_a_row_that_sees_nothing_is_zero(backend):
    case = random_attention(6, 40, mask="strided", topk=30)
    case = replace(case, indices=torch.arange(30).expand(6, 30).int().contiguous())
    result = found(case, case.exact()[1].float(), backend)
    assert result[:3].eq(0).all()
    assert result[3:, 0].gt(0).all()
    assert result[3:, 1:].eq(0).all()
    none = found(replace(case, indices=torch.full((6, 3), -1).int()), torch.zeros(6, 4), backend, normalize=True)
    assert none.eq(0).all()


# Groups of heads, and rows that sum to one.


@each_backend
@pytest.mark.parametrize(("heads", "group", "groups"), [(96, 64, 2), (8, 64, 1), (6, 2, 3)])
def test_groups_of_heads_add_up(heads, group, groups, backend):
    case = random_attention(4, 20, heads=heads, mask="causal", topk=10)
    lse = case.exact()[1].float()
    result = found(case, lse, backend, head_group=group)
    assert result.shape == (groups, 4, 10)
    per_head = slots_of(case, lse)
    for n in range(groups):
        torch.testing.assert_close(
            result[n].double(), per_head[n * group : (n + 1) * group].sum(0), rtol=1e-5, atol=1e-6
        )
    torch.testing.assert_close(result.sum(0), found(case, lse, backend), rtol=1e-5, atol=1e-6)


@each_backend
@pytest.mark.parametrize("group", [None, 2])
def test_normalized_rows_sum_to_one_or_stay_zero(group, backend):
    case = random_attention(mask="everything")
    lse = case.exact()[1].float() + 3 + torch.arange(4.0)  # heads hold less than their whole mass
    raw = found(case, lse, backend, head_group=group)
    result = found(case, lse, backend, head_group=group, normalize=True)
    seen = case.valid.any(1).expand(result.shape[:-1])
    torch.testing.assert_close(result.sum(-1), seen.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result * raw.sum(-1, keepdim=True), raw, rtol=1e-5, atol=1e-6)
    assert 0 < seen.float().mean() < 1


@each_backend
def test_a_row_of_next_to_no_mass_still_sums_to_one(backend):
    case = random_attention(3, 9, heads=2, topk=4)
    result = found(case, case.exact()[1].float() + 85, backend, normalize=True)
    torch.testing.assert_close(result.sum(-1), case.valid.any(1).float(), rtol=1e-4, atol=1e-4)


@each_backend
def test_no_gradient_flows(backend):
    case = random_attention(3, 9)
    q, kv, lse = (x.to(device_of(backend)).requires_grad_() for x in (case.q, case.kv, case.exact()[1].float()))
    dist = attention_distribution(q, kv, case.indices.to(q.device), lse, scale=0.3, backend=backend)
    assert not dist.requires_grad


# Many rows, and little memory.


@pytest.mark.parametrize("backend", ["torch", *["triton"] * CUDA])  # interpreted, so many programs take an hour
def test_seventy_thousand_rows(backend):
    s_q, s_kv, device = 70_000, 50, device_of(backend)
    q, k = normal(s_q, 2, 16, dtype=torch.float32), normal(s_kv, 16, dtype=torch.float32)
    indices = random_indices(s_q, s_kv, 2)
    q, k, indices = q.to(device), k.to(device), indices.to(device)
    mask = SparseMask(causal=True, k_stride=1000)
    out, lse, dist = sparse_attention(q, k, indices, scale=0.25, mask=mask, return_attn_sum=True, backend=backend)
    some = torch.tensor([0, 999, 1000, 31_000, 65_535, 65_536, 69_999])
    positions = SparseMask(causal=True, q_positions=some, k_stride=1000)
    case = AttentionCase(q[some].cpu(), k.cpu(), indices[some].cpu(), positions, 0.25, 16)
    exact = case.exact()
    torch.testing.assert_close(out[some].cpu().double(), exact[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[some].cpu().double(), exact[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dist[some].cpu().double(), slots_of(case, exact[1]).sum(0), rtol=1e-5, atol=1e-6)
    expected = 2.0 * torch.isfinite(lse[:, 0]).float()
    torch.testing.assert_close(dist.sum(1), expected, rtol=1e-5, atol=1e-6)
    assert 0.5 < torch.isfinite(lse).float().mean() < 1


def test_memory_on_a_cpu_grows_with_the_output_only(monkeypatch):
    """Neither [s_q, heads, topk] nor the gathered keys [s_q, topk, d] are ever whole."""
    monkeypatch.setattr(torch_backend, "_MAX_GATHERED", 1 << 15)

    def peak(s_q: int) -> int:
        case, lse = random_attention(s_q, 64, heads=16, d=16, topk=64), torch.zeros(s_q, 16)
        how = {"scale": 0.1, "backend": "torch"}
        return peak_bytes(lambda: attention_distribution(case.q, case.kv, case.indices, lse, **how))

    output_row = 64 * 4
    assert peak(512) - peak(128) < (512 - 128) * output_row * 1.5
