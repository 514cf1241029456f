"""One rank's weights: cut from the whole in the order of ranks, copied, and checked for what the rank should have."""

import dataclasses

import pytest
import torch

from attnmesh.decode import AttentionConfig, AttentionWeights, Norm
from attnmesh.plan.decode import DecodeSharding
from helpers.cases import in_turn

HIDDEN, Q, KV, D = 20, 12, 4, 3
NORM = Norm(1e-6)
CONFIG = AttentionConfig(HIDDEN, Q, KV, D, norm=NORM, norm_before_rope=NORM, norm_after_rope=NORM)
SHARDINGS = [
    DecodeSharding(), DecodeSharding(tp=2), DecodeSharding(tp=4), DecodeSharding(tp=8), DecodeSharding(kvdp=3),
    DecodeSharding(cp=5), DecodeSharding(tp=2, kvdp=2, cp=2), DecodeSharding(kvdp=2, cp=3), DecodeSharding(tp=4, cp=3),
]  # fmt: skip


def whole() -> AttentionWeights:
    """Every number another one, so that any exchange is seen."""
    numbers = iter(range(10**6))

    def unique(*shape):
        return torch.tensor([next(numbers) for _ in range(torch.Size(shape).numel())], dtype=torch.float64).view(shape)

    q, k, v = (unique(n * D, HIDDEN) for n in (Q, KV, KV))
    biases = tuple(unique(n * D) for n in (Q, KV, KV))
    norms = {f"{x}_norm_{when}_rope": unique(D) for x in "qk" for when in ("before", "after")}
    return AttentionWeights.whole(
        q,
        k,
        v,
        biases,
        out=unique(HIDDEN, Q * D),
        out_bias=unique(HIDDEN),
        norm=unique(HIDDEN),
        sinks=unique(Q),
        **norms,
    )


def heads_of(weights, q, kv):
    """The rows of Q, K and V by head."""
    return weights.qkv.unflatten(0, (-1, D)).split([q, kv, kv])


@pytest.mark.parametrize(("sharding", "replicate_q"), in_turn(SHARDINGS, [True, False]), ids=str)
def test_shards_are_the_rows_and_columns_of_their_heads(sharding, replicate_q):
    full = whole()
    full_q, full_k, full_v = heads_of(full, Q, KV)
    full_bias = full.qkv_bias.unflatten(0, (-1, D)).split([Q, KV, KV])
    columns, seen = [], []
    for rank in range(sharding.ranks):
        shard = full.shard(CONFIG, sharding, rank, replicate_q=replicate_q)
        shard.check(CONFIG, sharding, rank, replicate_q=replicate_q)
        q = (sharding.replicated_q_heads if replicate_q else sharding.q_heads)(rank, Q)
        kv = sharding.kv_heads(rank, KV)
        seen += q
        own_q, own_k, own_v = heads_of(shard, len(q), len(kv))
        assert torch.equal(own_q, full_q[list(q)])
        assert torch.equal(own_k, full_k[list(kv)])
        assert torch.equal(own_v, full_v[list(kv)])
        biases = zip(shard.qkv_bias.unflatten(0, (-1, D)).split([len(q), len(kv), len(kv)]), full_bias, strict=True)
        for (own, all_of_it), heads in zip(biases, (q, kv, kv), strict=True):
            assert torch.equal(own, all_of_it[list(heads)])
        columns.append(shard.out)
        assert (shard.out_bias is None) == (rank > 0)
        for name in ("norm", "sinks", *(f"{x}_norm_{when}_rope" for x in "qk" for when in ("before", "after"))):
            assert torch.equal(getattr(shard, name), getattr(full, name)), name
    assert torch.equal(torch.cat(columns, 1), full.out)  # ranks in order, each column once
    assert sorted(seen) == sorted([*range(Q)] * (sharding.cp if replicate_q else 1))


@pytest.mark.parametrize("sharding", [DecodeSharding(), DecodeSharding(tp=2, kvdp=2)], ids=str)
def test_the_parts_of_the_output_add_up(sharding):
    full = whole()
    x = torch.randn(7, Q * D, dtype=torch.float64)
    right = torch.nn.functional.linear(x, full.out, full.out_bias)
    total = torch.zeros_like(right)
    for rank in range(sharding.ranks):
        shard = full.shard(CONFIG, sharding, rank)
        q = sharding.q_heads(rank, Q)
        total += torch.nn.functional.linear(x[:, q.start * D : q.stop * D], shard.out, shard.out_bias)
    torch.testing.assert_close(total, right)


def test_shards_are_contiguous_copies_without_gradients():
    full = whole()
    given = {name: x.requires_grad_() for name, x in vars(full).items() if x is not None}
    shard = dataclasses.replace(full, **given).shard(CONFIG, DecodeSharding(tp=2), 0)
    memory = {x.untyped_storage().data_ptr() for x in given.values()}
    for name in given:
        x = getattr(shard, name)
        assert x.is_contiguous(), name
        assert not x.requires_grad, name
        assert x.untyped_storage().data_ptr() not in memory, name
        assert x.untyped_storage().nbytes() == x.numel() * 8, name


def test_what_is_missing_stays_missing():
    full = AttentionWeights(torch.zeros((Q + 2 * KV) * D, HIDDEN))
    shard = full.shard(CONFIG, DecodeSharding(tp=2), 0)
    assert [name for name, x in vars(shard).items() if x is not None] == ["qkv"]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("qkv", (59, HIDDEN), r"qkv must be \[60, 20\] on rank 0, got \[59, 20\]"),
        ("qkv_bias", (61,), r"qkv_bias must be \[60\] on rank 0, got \[61\]"),
        ("out", (HIDDEN, 35), r"out must be \[20, 36\] on rank 0, got \[20, 35\]"),
        ("out_bias", (1,), r"out_bias must be \[20\] on rank 0, got \[1\]"),
        ("norm", (D,), r"norm must be \[20\] on rank 0, got \[3\]"),
        ("k_norm_after_rope", (Q * D,), r"k_norm_after_rope must be \[3\] on rank 0, got \[36\]"),
        ("sinks", (KV,), r"sinks must be \[12\] on rank 0, got \[4\]"),
    ],
)
def test_a_wrong_shape_is_named(name, shape, message):
    wrong = dataclasses.replace(whole(), **{name: torch.zeros(shape)})
    with pytest.raises(ValueError, match=message):
        wrong.check(CONFIG)
    with pytest.raises(ValueError, match=message):
        wrong.shard(CONFIG, DecodeSharding(tp=2), 1)


def test_a_shard_is_of_its_rank_and_its_way_to_project():
    sharding = DecodeSharding(tp=2, cp=2)
    shard = whole().shard(CONFIG, sharding, 1)
    with pytest.raises(ValueError, match=r"qkv must be \[60, 20\] on rank 0, got \[21, 20\]"):
        shard.check(CONFIG)
    with pytest.raises(ValueError, match=r"qkv must be \[30, 20\] on rank 1, got \[21, 20\]"):
        shard.check(CONFIG, sharding, 1, replicate_q=True)
    with pytest.raises(
        ValueError, match="out_bias must be given on rank 0 only, together with out, but this is rank 1"
    ):
        dataclasses.replace(shard, out_bias=torch.zeros(HIDDEN)).check(CONFIG, sharding, 1)
    with pytest.raises(ValueError, match="out_bias must be given on rank 0 only, together with out, but out is None"):
        dataclasses.replace(whole(), out=None).check(CONFIG)


@pytest.mark.parametrize("stage", ["norm", "norm_before_rope", "norm_after_rope"])
def test_a_weight_without_its_stage_is_refused(stage):
    with pytest.raises(ValueError, match=f"norm.* must be None, since config.{stage} is None"):
        whole().check(dataclasses.replace(CONFIG, **{stage: None}))


def test_heads_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="q_heads=12"):
        whole().shard(CONFIG, DecodeSharding(kvdp=13), 0)
