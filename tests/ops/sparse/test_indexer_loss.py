"""indexer_kl_loss: KL(p || softmax(I)) of every row and its gradients, against float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmesh import SparseMask, indexer_kl_loss, sparse_attention
from attnmesh.ops.sparse import indexer_loss, reference, torch_backend
from attnmesh.sparse import AttentionTarget, indexer_scores_at
from helpers.memory import peak_bytes
from helpers.sparse import (
    BACKENDS,
    INTERPRETED,
    KEY_MASKS,
    MASKS,
    AttentionCase,
    IndexerCase,
    assert_sparse_close,
    device_of,
    embedded,
    mask_on,
    normal,
    random_attention,
    random_indexer,
    with_dtypes,
)

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_mode = pytest.mark.parametrize("mode", ["sparse", "dense"])
NAMES = ["loss", "d_iq", "d_ik", "d_w"]
FAR = torch.float64


def both(mask: str = "all", s_q: int = 13, s_kv: int = 23, **how) -> tuple[AttentionCase, IndexerCase]:
    """Attention and the indexer that is to learn from it."""
    attention = random_attention(s_q, s_kv, mask=mask, **how)
    return attention, random_indexer(s_q, s_kv, mask=attention.mask, dtype=attention.q.dtype)


def lse_of(attention: AttentionCase, mode: str) -> Tensor:
    """Over the slots; of dense attention, over all keys that the mask shows."""
    if mode == "dense":
        first = attention.mask.k_offset
        every = torch.arange(first, first + attention.s_kv, dtype=torch.int32).expand(attention.q.shape[0], -1)
        attention = replace(attention, indices=every)
    return attention.exact()[1].to(torch.promote_types(attention.q.dtype, torch.float32))


def row_grads(s_q: int) -> Tensor:
    return normal(s_q, dtype=FAR, seed=55)


def over(p: Tensor, indexer: IndexerCase, indices: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Loss of every row and gradients; p is [s_q, s_kv] over all keys, or has a number for each slot."""
    leaves = [x.to(dtype).requires_grad_() for x in indexer.leaves]
    scores, seen = indexer.scores(leaves), indexer.visible
    if indices is not None:
        seen = reference.valid_slots(indices, indexer.s_kv, indexer.mask)
        scores = scores.gather(1, torch.where(seen, indices - indexer.mask.k_offset, 0).long())
    rows = reference.kl(p.to(dtype), scores, seen)
    grads = torch.autograd.grad(rows, leaves, row_grads(len(rows)).to(dtype))
    return [rows.detach(), *grads]


def by_definition(
    attention: AttentionCase, indexer: IndexerCase, mode: str, lse: Tensor, dtype: torch.dtype = FAR
) -> list[Tensor]:
    """In float64, or as simply as can be in another precision."""
    lse = lse.to(dtype)
    heads = reference.distribution(attention.q.to(dtype), attention.kv.to(dtype), lse, attention.scale)
    p = torch.where(lse.T[..., None].isinf(), 0.0, heads).sum(0)
    if mode == "dense":
        return over(p, indexer, None, dtype)
    at = torch.where(attention.valid, attention.indices - attention.mask.k_offset, 0).long()
    return over(p.gather(1, at), indexer, attention.indices, dtype)


def found(
    attention: AttentionCase,
    indexer: IndexerCase,
    mode: str,
    lse: Tensor | None,
    backend: str,
    lse_base: str = "e",
    **how: object,
) -> list[Tensor]:
    """Loss of every row and gradients where whatever nobody may look at is NaN; attention is left out without lse."""
    device = device_of(backend)
    if mode == "dense":
        read, blind = indexer.visible.any(0), indexer.empty_rows
    else:
        read, blind = (attention.times > 0).any(0), ~attention.valid.any(1)
    poison = {
        "iq": indexer.iq.masked_fill(blind[:, None, None], torch.nan),
        "ik": indexer.ik.masked_fill(~read[:, None], torch.nan),
        "w": indexer.w.masked_fill(blind[:, None], torch.nan),
        "q": attention.q.masked_fill(blind[:, None, None], torch.nan),
        "k": attention.kv.masked_fill(~read[:, None], torch.nan),
    }
    poison = {name: embedded(x.to(device)).detach() for name, x in poison.items()}
    leaves = [poison.pop(name).requires_grad_() for name in ("iq", "ik", "w")]
    if lse is not None:
        how = {"target": AttentionTarget(poison["q"], poison["k"], lse.to(device), attention.scale, lse_base)} | how
    rows = indexer_kl_loss(
        *leaves, attention.indices.to(device) if mode == "sparse" else None,
        mask=mask_on(indexer.mask, device), reduction="none", backend=backend, **indexer.how, **how,
    )  # fmt: skip
    assert rows.dtype == torch.promote_types(indexer.iq.dtype, torch.float32)
    grads = torch.autograd.grad(rows, leaves, row_grads(len(rows)).to(rows))
    return [x.detach().cpu() for x in (rows, *grads)]


def check(attention: AttentionCase, indexer: IndexerCase, mode: str, backend: str, lse: Tensor | None = None) -> None:
    lse = lse_of(attention, mode) if lse is None else lse
    exact = by_definition(attention, indexer, mode, lse)
    plain = by_definition(attention, indexer, mode, lse, indexer.iq.dtype)
    assert_sparse_close(NAMES, found(attention, indexer, mode, lse, backend), plain, exact)


# Every row against float64.


@pytest.mark.parametrize(("name", "backend", "dtype"), with_dtypes(MASKS))
def test_sparse_with_every_mask_in_every_dtype(name, backend, dtype):
    check(*both(name, dtype=dtype), "sparse", backend)


@pytest.mark.parametrize(("name", "backend", "dtype"), with_dtypes(KEY_MASKS))
def test_dense_with_every_mask_in_every_dtype(name, backend, dtype):
    check(*both(name, dtype=dtype), "dense", backend)


@each_backend
@pytest.mark.parametrize(
    ("s_q", "s_kv", "topk", "d", "mode"),
    [
        (1, 1, 1, 16, "sparse"), (3, 9, 20, 64, "dense"), (40, 200, 100, 24, "sparse"), (2, 5, 1, 8, "sparse"),
        (2, 5, 1, 8, "dense"),
    ],
)  # fmt: skip
def test_every_size(s_q, s_kv, topk, d, mode, backend):
    attention = random_attention(s_q, s_kv, topk=topk, d=d, mask="later", heads=5)
    check(attention, random_indexer(s_q, s_kv, mask=attention.mask, heads=7, d=d), mode, backend)


@each_backend
@each_mode
@pytest.mark.parametrize(("s_q", "s_kv"), [(0, 5), (4, 0), (0, 0)])
def test_no_rows_and_no_keys(s_q, s_kv, mode, backend):
    attention, indexer = both(s_q=s_q, s_kv=s_kv)
    rows, *grads = found(attention, indexer, mode, torch.zeros(s_q, 4), backend)
    assert rows.tolist() == [0.0] * s_q
    assert all(x.eq(0).all() for x in grads)


@each_backend
@each_mode
def test_an_lse_over_other_keys_than_these(mode, backend):
    """With a window or a sink heads differ in mass, and a row is normalized over all of them together."""
    attention, indexer = both("causal")
    lse = lse_of(attention, mode) + torch.tensor([0.0, 1.0, 2.0, 5.0])
    check(attention, indexer, mode, backend, lse)


@each_backend
@each_mode
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_a_head_without_mass_and_a_row_without_any(value, mode, backend):
    attention, indexer = both()
    lse = lse_of(attention, mode)
    lse[2::3, 1] = value
    lse[4] = value
    check(attention, indexer, mode, backend, lse)
    rows, d_iq, _, d_w = found(attention, indexer, mode, lse, backend)
    for x in (rows, d_iq, d_w):
        assert x[4].eq(0).all()
        assert x[5].ne(0).any()


@each_backend
@each_mode
def test_an_lse_in_base_two(mode, backend):
    attention, indexer = both("causal")
    lse = lse_of(attention, mode)
    natural = found(attention, indexer, mode, lse, backend)
    two = found(attention, indexer, mode, lse / math.log(2), backend, lse_base="2")
    for a, b in zip(natural, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@each_mode
def test_attention_may_have_another_dtype_than_the_indexer(mode):
    attention, indexer = both("causal", dtype=torch.float64)
    lse = lse_of(attention, mode)
    exact = by_definition(attention, indexer, mode, lse)
    narrow = replace(indexer, **{name: getattr(indexer, name).float() for name in ("iq", "ik", "w")})
    for a, b in zip(found(attention, narrow, mode, lse, "torch"), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


# A target that is given.


def given_target(attention: AttentionCase, *, seed: int = 3) -> Tensor:
    """Not normalized, with zeros; a row of zeros; something at slots that are not valid."""
    target = 3 * normal(*attention.indices.shape, dtype=torch.float64, seed=seed).relu().float()
    target[1] = 0.0
    return target


@pytest.mark.parametrize(("name", "backend", "dtype"), with_dtypes(MASKS))
def test_a_given_target_need_not_be_normalized(name, backend, dtype):
    attention, indexer = both(name, dtype=dtype)
    target = given_target(attention)
    assert target[attention.valid].eq(0).any()  # 0 log 0
    exact, plain = (over(target, indexer, attention.indices, x) for x in (FAR, dtype))
    result = found(attention, indexer, "sparse", None, backend, target=target.to(device_of(backend)))
    assert_sparse_close(NAMES, result, plain, exact)
    assert result[0][1] == 0
    assert result[1][1].eq(0).all()


@each_backend
def test_the_loss_is_zero_and_still_where_the_indexer_is_right(backend):
    attention, indexer = both("causal")
    indices, device = attention.indices.to(device_of(backend)), device_of(backend)
    leaves = [x.to(device).requires_grad_() for x in indexer.leaves]
    how = {"mask": indexer.mask, "backend": backend, **indexer.how}
    scores = indexer_scores_at(*leaves, indices, **how)
    target = torch.where(scores.isneginf(), 0.0, 7 * scores.softmax(-1).nan_to_num(0.0))
    rows = indexer_kl_loss(*leaves, indices, target, reduction="none", **how)
    assert rows.abs().max() < 1e-6
    for grad in torch.autograd.grad(rows.sum(), leaves):
        assert grad.abs().max() < 1e-5
    worse = indexer_kl_loss(*leaves, indices, target.roll(1, 1) + 0.1, reduction="none", **how)
    assert worse[attention.valid.sum(1).to(device) > 2].gt(1e-3).all()


@each_backend
def test_what_there_is_to_match_is_a_constant(backend):
    attention, indexer = both()
    device = device_of(backend)
    iq, ik, w, indices = (x.to(device) for x in (indexer.iq, indexer.ik, indexer.w, attention.indices))
    q, k, target = (x.to(device).requires_grad_() for x in (attention.q, attention.kv, given_target(attention)))
    lse = torch.zeros(13, 4, device=device, requires_grad=True)
    how, source = {"backend": backend}, AttentionTarget(q, k, lse, 0.3)
    assert not indexer_kl_loss(iq, ik, w, indices, target, **how).requires_grad
    assert not indexer_kl_loss(iq, ik, w, indices, source, **how).requires_grad
    assert not indexer_kl_loss(iq, ik, w, None, source, **how).requires_grad
    iq.requires_grad_()
    indexer_kl_loss(iq, ik, w, indices, source, **how).backward()
    indexer_kl_loss(iq, ik, w, None, source, **how).backward()
    assert iq.grad is not None
    assert q.grad is k.grad is lse.grad is None


@each_backend
def test_a_visible_score_that_is_nan_shows_in_the_loss(backend):
    _, indexer = both(s_q=2, s_kv=3)
    iq, ik, w = (x.to(device_of(backend)).clone() for x in (indexer.iq, indexer.ik, indexer.w))
    ik[1] = torch.nan
    indices = torch.tensor([[1], [2]], dtype=torch.int32, device=ik.device)
    rows = indexer_kl_loss(iq, ik, w, indices, torch.ones(2, 1, device=ik.device), reduction="none", backend=backend)
    assert rows.isnan().tolist() == [True, False]


# Dense.


@each_backend
def test_dense_is_sparse_over_all_keys(backend):
    attention, indexer = both("causal")
    lse = lse_of(attention, "dense")
    every = replace(attention, indices=torch.arange(23, dtype=torch.int32).repeat(13, 1))
    dense, sparse = (found(every, indexer, mode, lse, backend) for mode in ("dense", "sparse"))
    for a, b in zip(dense, sparse, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [
        ("causal", "torch", torch.float32), ("documents", "torch", torch.bfloat16), ("offset", "torch", torch.float64),
        pytest.param("later strided", "triton", torch.float16, marks=INTERPRETED),
    ],
)  # fmt: skip
def test_keys_come_in_chunks(name, backend, dtype, monkeypatch):
    """One cast at the end, however many there are: in low precision they cost nothing that one would not."""
    attention, indexer = both(name, s_q=13, s_kv=300, dtype=dtype)
    if name == "causal":
        mask = SparseMask(causal=True, q_positions=torch.arange(13) * 25)
        attention, indexer = replace(attention, mask=mask), replace(indexer, mask=mask)
    lse = lse_of(attention, "dense")
    d_iq = by_definition(attention, indexer, "dense", lse)[1]

    def error():
        return (found(attention, indexer, "dense", lse, backend)[1] - d_iq).norm()

    at_once = error()
    monkeypatch.setattr(indexer_loss, "_MAX_CHUNK_SLOTS", 1)  # 128 keys at a time
    check(attention, indexer, "dense", backend)
    if dtype in (torch.bfloat16, torch.float16):
        assert error() < 1.1 * at_once


@pytest.mark.sweep
def test_memory_on_a_cpu_stays_below_rows_times_keys(monkeypatch):
    """[s_q, s_kv] is 2 MB here, and a naive loss holds one for each head, and more."""
    monkeypatch.setattr(indexer_loss, "_MAX_CHUNK_SLOTS", 1)
    monkeypatch.setattr(torch_backend, "_MAX_GATHERED", 1 << 17)
    s_q, s_kv = 128, 4096
    q, k, iq, ik, w = (
        torch.randn(*shape) for shape in ((s_q, 2, 8), (s_kv, 8), (s_q, 2, 8), (s_kv, 8), (s_q, 2))
    )  # fmt: skip
    leaves = [x.requires_grad_() for x in (iq, ik, w)]
    target = AttentionTarget(q, k, torch.full((s_q, 2), 8.0), 0.3)
    assert peak_bytes(lambda: indexer_kl_loss(*leaves, None, target).backward()) < 0.75 * s_q * s_kv * 4


# Reductions.


@each_backend
@each_mode
def test_reductions_count_the_rows_they_are_told(mode, backend):
    attention, indexer = both("causal")
    lse, counted = lse_of(attention, mode), torch.arange(13) % 3 != 1
    rows = found(attention, indexer, mode, lse, backend)[0]
    device = device_of(backend)
    given_ = [x.to(device) for x in (indexer.iq, indexer.ik, indexer.w)]
    indices = attention.indices.to(device) if mode == "sparse" else None
    target = AttentionTarget(attention.q.to(device), attention.kv.to(device), lse.to(device), attention.scale)
    how = {"mask": indexer.mask, "backend": backend, **indexer.how}

    def loss(**more: object) -> Tensor:
        return indexer_kl_loss(*given_, indices, target, **how, **more).cpu()

    some = counted.to(device)
    pairs = [
        (loss(), rows.sum()),  # "sum" unless said
        (loss(reduction="sum"), rows.sum()),
        (loss(reduction="sum", row_mask=some), rows[counted].sum()),
        (loss(reduction="mean_rows"), rows.sum() / 13),
        (loss(reduction="mean_rows", row_mask=some), rows[counted].sum() / counted.sum()),
        (loss(reduction="none", row_mask=some), torch.where(counted, rows, 0.0)),
        (loss(reduction="mean_rows", row_mask=torch.zeros_like(some)), torch.tensor(0.0)),
    ]
    for a, b in pairs:
        assert a.shape == b.shape
        torch.testing.assert_close(a, b)


@each_backend
@each_mode
def test_rows_that_do_not_count_may_hold_anything(mode, backend):
    """Padding rows: NaN in their queries, weights, lse and target reaches neither the loss nor any gradient."""
    attention, indexer = both("causal")
    counted, device = torch.arange(13) % 3 != 1, device_of(backend)
    lse = lse_of(attention, mode)
    expected = by_definition(attention, indexer, mode, lse)
    weights = row_grads(13).masked_fill(~counted, 0.0)

    def run(spoil: bool) -> list[Tensor]:
        def side(x: Tensor) -> Tensor:
            bad = ~counted.view(-1, *[1] * (x.ndim - 1))
            return (x.masked_fill(bad, torch.nan) if spoil else x).to(device)

        leaves = [x.detach().requires_grad_() for x in (side(indexer.iq), indexer.ik.to(device), side(indexer.w))]
        rows = indexer_kl_loss(
            *leaves, attention.indices.to(device) if mode == "sparse" else None,
            AttentionTarget(side(attention.q), attention.kv.to(device), side(lse), attention.scale),
            mask=indexer.mask, reduction="none", row_mask=counted.to(device), backend=backend, **indexer.how,
        )  # fmt: skip
        return [rows, *torch.autograd.grad((rows * weights.to(rows)).sum(), leaves)]

    spoilt, clean = run(True), run(False)
    for a, b in zip(spoilt, clean, strict=True):
        torch.testing.assert_close(a, b)
    assert spoilt[0][~counted].eq(0).all()
    torch.testing.assert_close(spoilt[0][counted].cpu().double(), expected[0][counted], rtol=1e-4, atol=1e-5)
    for x in (spoilt[1], spoilt[3]):
        assert x[~counted].eq(0).all()


@each_backend
@each_mode
def test_the_sums_of_parts_of_the_rows_add_up(mode, backend):
    attention, indexer = both()
    lse, device = lse_of(attention, mode), device_of(backend)

    def loss(some: slice) -> list[Tensor]:
        leaves = [x.to(device).detach().requires_grad_() for x in (indexer.iq, indexer.ik, indexer.w)]
        indices = attention.indices[some].to(device) if mode == "sparse" else None
        value = indexer_kl_loss(
            leaves[0][some], leaves[1], leaves[2][some], indices,
            AttentionTarget(attention.q[some].to(device), attention.kv.to(device), lse[some].to(device), 0.25),
            backend=backend,
        )  # fmt: skip
        return [value, *torch.autograd.grad(value, leaves)]

    for whole, *parts in zip(loss(slice(0, 13)), loss(slice(0, 4)), loss(slice(4, 13)), strict=True):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-6)


@each_backend
@each_mode
def test_autocast_changes_nothing(mode, backend):
    attention, indexer = both("causal")
    lse = lse_of(attention, mode)
    plain = found(attention, indexer, mode, lse, backend)
    with torch.autocast(device_of(backend).type, dtype=torch.bfloat16):
        cast = found(attention, indexer, mode, lse, backend)
    for a, b in zip(plain, cast, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@each_backend
@each_mode
def test_deterministic_gives_the_same_bits_twice(mode, backend):
    attention, indexer = both(s_q=40, s_kv=7, topk=20)
    lse = lse_of(attention, mode)
    once, again = (found(attention, indexer, mode, lse, backend, deterministic=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_gradients_are_those_of_finite_differences():
    attention, indexer = both("later", s_q=4, s_kv=6, dtype=torch.float64)
    target = AttentionTarget(attention.q, attention.kv, lse_of(attention, "dense"), attention.scale)
    how = {"target": target, "mask": attention.mask, "reduction": "none", **indexer.how}
    assert torch.autograd.gradcheck(lambda *x: indexer_kl_loss(*x, None, **how), indexer.leaves)
    assert torch.autograd.gradcheck(lambda *x: indexer_kl_loss(*x, attention.indices, **how), indexer.leaves)


@each_backend
def test_a_step_of_training_as_it_is_meant(backend):
    """Attention's own lse, the default reduction, and a step downhill lowers the loss."""
    attention, indexer = both("causal")
    device = device_of(backend)
    q, kv, indices = (x.to(device) for x in (attention.q, attention.kv, attention.indices))
    how = {"mask": attention.mask, "backend": backend}
    _, lse = sparse_attention(q, kv, indices, scale=attention.scale, **how)
    how["target"] = AttentionTarget(q, kv, lse, attention.scale)
    leaves = [x.to(device).requires_grad_() for x in indexer.leaves]
    before = indexer_kl_loss(*leaves, indices, **how)
    grads = torch.autograd.grad(before, leaves)
    after = indexer_kl_loss(*(x - 1e-2 * g for x, g in zip(leaves, grads, strict=True)), indices, **how)
    assert 0 < after < before


def dense_inputs(dtype: torch.dtype, s_kv: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"iq": (6, 2, 4), "ik": (s_kv, 4), "w": (6, 2), "q": (6, 3, 8), "k": (s_kv, 8), "lse": (6, 3)}
    return {name: torch.randn(*shape, generator=g).to(dtype) for name, shape in shapes.items()}


def dense_gradients(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    leaves = {name: given[name].clone().requires_grad_() for name in ("iq", "ik", "w")}
    target = AttentionTarget(given["q"], given["k"], given["lse"], 0.4)
    loss = indexer_kl_loss(*leaves.values(), None, target)
    return list(torch.autograd.grad(loss, list(leaves.values())))


def test_many_chunks_of_keys_round_no_more_than_one(monkeypatch):
    given = dense_inputs(torch.bfloat16, 128 * 12)
    true = dense_gradients({name: x.double() for name, x in given.items()})
    whole = dense_gradients(given)
    monkeypatch.setattr(indexer_loss, "_MAX_CHUNK_SLOTS", 1)  # 128 keys per chunk
    for found, plain, exact in zip(dense_gradients(given), whole, true, strict=True):
        error, least = ((x.double() - exact).abs().mean() for x in (found, plain))
        assert error <= 1.02 * least
