"""What the sparse family refuses: ValueError with the argument's name, its value and what is allowed."""

import re

import pytest
import torch

from attnmesh import SparseMask, attention_distribution, indexer_kl_loss, indexer_topk, sparse_attention
from attnmesh.sparse import AttentionTarget, indexer_scores_at
from attnmesh.utils.validation import shown

Q, KV = torch.zeros(4, 2, 8), torch.zeros(6, 8)
INDICES = torch.zeros(4, 3, dtype=torch.int32)
LSE = torch.zeros(4, 2)
TARGET = torch.ones(4, 3)
ELSEWHERE = torch.device("meta")

INDEXER = {"iq": Q, "ik": KV, "w": LSE}
SLOTS = {"indices": INDICES}
ATTENTION = {"q": Q, "k": KV, "lse": LSE}


def loss(iq, ik, w, indices=None, target=None, mask=SparseMask(), **given):  # noqa: B008
    """`indexer_kl_loss` with the fields of an `AttentionTarget` as arguments."""
    fields = {key: given.pop(f"target.{key}") for key in AttentionTarget._fields if f"target.{key}" in given}
    return indexer_kl_loss(iq, ik, w, indices, AttentionTarget(**fields) if fields else target, mask=mask, **given)


SOURCE = {"target.q": Q, "target.k": KV, "target.lse": LSE, "target.scale": 0.5}
CALLS = {
    "attention": (sparse_attention, {"q": Q, "kv": KV, "scale": 0.5, **SLOTS}),
    "distribution": (attention_distribution, {**ATTENTION, **SLOTS, "scale": 0.5}),
    "scores": (indexer_scores_at, INDEXER | SLOTS),
    "topk": (indexer_topk, INDEXER | {"topk": 3}),
    "sparse loss": (loss, INDEXER | SLOTS | SOURCE),
    "given loss": (indexer_kl_loss, INDEXER | SLOTS | {"target": TARGET}),
    "dense loss": (loss, INDEXER | SOURCE),
}
WITH_SLOTS = ["attention", "distribution", "scores", "sparse loss", "given loss"]


def refuses(name: str, said: str, **given: object) -> None:
    call, usual = CALLS[name]
    with pytest.raises(ValueError, match=re.escape(said)):
        call(**usual | given)


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_these_tests_are_good_ones(name):
    call, usual = CALLS[name]
    call(**usual)


# Indices.


@pytest.mark.parametrize("name", WITH_SLOTS)
@pytest.mark.parametrize(
    ("indices", "said"),
    [
        (INDICES.long(), "indices must be an int32 tensor, got torch.int64"),
        (INDICES.float(), "indices must be an int32 tensor, got torch.float32"),
        ([[0]], "indices must be an int32 tensor, got list"),
        (INDICES[0], "indices must be [4, topk] or [4, 1, topk] with topk >= 1, got [3]"),
        (INDICES[:3], "indices must be [4, topk] or [4, 1, topk] with topk >= 1, got [3, 3]"),
        (INDICES[:, :0], "with topk >= 1, got [4, 0]"),
        (INDICES[:, None].expand(4, 2, 3), "got [4, 2, 3]"),
        (INDICES.to(ELSEWHERE), "indices must be on cpu like q, got meta"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_indices_of_the_wrong_type_or_shape(name, indices, said):
    refuses(name, said, indices=indices)


# Queries and keys.

QUERIES = {"attention": "q", "distribution": "q", "scores": "iq", "topk": "iq", "dense loss": "iq"}
QUERIES["sparse loss"] = "target.q"
KEYS = {"attention": "kv", "distribution": "k", "scores": "ik", "topk": "ik", "dense loss": "ik"}
KEYS["sparse loss"] = "target.k"


@pytest.mark.parametrize("name", QUERIES)
@pytest.mark.parametrize(
    ("q", "said"),
    [
        (Q[0], "must be a tensor [s_q, heads, d], got [2, 8]"),
        (Q[:, :0], "must be a tensor [s_q, heads, d], got [4, 0, 8]"),
        (Q[..., :0], "must be a tensor [s_q, heads, d], got [4, 2, 0]"),
        ("q", "must be a tensor [s_q, heads, d], got str"),
        (Q.int(), "must be float16, bfloat16, float32 or float64, got torch.int32"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_queries(name, q, said):
    refuses(name, f"{QUERIES[name]} {said}", **{QUERIES[name]: q})


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(
    ("k", "said"),
    [
        (KV[:, :7], "must be [s_kv, 8] or [s_kv, 1, 8] (one kv head), got [6, 7]"),
        (KV[None], "must be [s_kv, 8] or [s_kv, 1, 8] (one kv head), got [1, 6, 8]"),
        (KV[0], "must be [s_kv, 8] or [s_kv, 1, 8] (one kv head), got [8]"),
        (None, "must be"),
        (KV.double(), "must be torch.float32 on cpu like its queries, got torch.float64 on cpu"),
        (KV.to(ELSEWHERE), "must be torch.float32 on cpu like its queries, got torch.float32 on meta"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_keys(name, k, said):
    refuses(name, f"{KEYS[name]} {said}", **{KEYS[name]: k})


# Values, sinks, lse, weights.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"d_v": 0}, "d_v must be a positive integer, got 0"),
        ({"d_v": 2.0}, "d_v must be a positive integer, got 2.0"),
        ({"d_v": 9}, "d_v must be at most the width of a key, 8, got 9"),
        ({"v": KV[:5]}, "v must have 6 rows, one per key, got 5"),
        ({"v": KV, "d_v": 4}, "v must be [s_kv, 4] or [s_kv, 1, 4] (one kv head), got [6, 8]"),
        ({"v": KV[:, :0]}, "v must be [s_kv, d] or [s_kv, 1, d] (one kv head), got [6, 0]"),
        ({"v": KV.half()}, "v must be torch.float32 on cpu like its queries, got torch.float16 on cpu"),
        ({"sinks": torch.zeros(3)}, "sinks must be [heads] = [2], got [3]"),
        ({"sinks": 1.0}, "sinks must be a tensor [heads], got float"),
        ({"sinks": torch.zeros(2, dtype=torch.int32)}, "sinks must be floating point on cpu, got torch.int32"),
        ({"sinks": torch.zeros(2, device=ELSEWHERE)}, "sinks must be floating point on cpu, got torch.float32"),
    ],
    ids=str,
)
def test_values_and_sinks(given, said):
    refuses("attention", said, **given)


@pytest.mark.parametrize("name", ["distribution", "sparse loss", "dense loss"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lse": LSE.T}, "lse must be [s_q, heads] = [4, 2], got [2, 4]"),
        ({"lse": LSE[None]}, "lse must be [s_q, heads] = [4, 2], got [1, 4, 2]"),
        ({"lse": LSE[:, :1]}, "lse must be [s_q, heads] = [4, 2], got [4, 1]"),
        ({"lse": LSE.int()}, "lse must be floating point on cpu, got torch.int32"),
        ({"lse": LSE.to(ELSEWHERE)}, "lse must be floating point on cpu, got torch.float32 on meta"),
        ({"lse_base": "10"}, "lse_base must be 'e' (natural) or '2', got '10'"),
        ({"lse_base": 2}, "lse_base must be 'e' (natural) or '2', got 2"),
        ({"lse_base": None}, "lse_base must be 'e' (natural) or '2', got None"),
    ],
    ids=str,
)
def test_lse_of_the_wrong_shape_or_an_unnamed_base(name, given, said):
    of = "" if name == "distribution" else "target."
    refuses(name, of + said, **{of + key: x for key, x in given.items()})


@pytest.mark.parametrize("name", ["scores", "topk", "sparse loss", "dense loss"])
def test_weights(name):
    refuses(name, "w must be [s_q, heads] = [4, 2], got [4, 3]", w=torch.zeros(4, 3))
    refuses(name, "w must be floating point on cpu, got torch.int64", w=LSE.long())


@pytest.mark.parametrize("group", [0, -64, 1.5, True])
def test_groups_of_heads(group):
    refuses("distribution", f"head_group must be a positive integer, got {group}", head_group=group)


# What every call has.


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", torch.tensor(1.0), True])
def test_scales(name, scale):
    for argument in {"target.scale"} & CALLS[name][1].keys() | {"scale"}:
        refuses(name, f"{argument} must be a finite number, got {shown(scale)}", **{argument: scale})


@pytest.mark.parametrize("name", CALLS)
def test_masks_and_backends(name):
    refuses(name, "mask must be a SparseMask, got NoneType", mask=None)
    refuses(name, "backend must be one of auto, gluon, triton, torch, got 'cuda'", backend="cuda")
    short = SparseMask(k_end=torch.zeros(3, dtype=torch.int64))
    refuses(name, "k_end must be [4], one number per row of q, got [3]", mask=short)


@pytest.mark.parametrize("name", CALLS)
def test_kernels_do_not_compute_in_float64(name):
    usual = CALLS[name][1]
    wide = {key: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for key, x in usual.items()}
    refuses(name, "backend='triton' cannot serve this call", **wide, backend="triton")


# The top-k.


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_numbers_of_the_top_k(value):
    refuses("topk", f"topk must be a positive integer, got {value!r}", topk=value)
    refuses("topk", f"block_size must be a positive integer, got {value!r}", block_size=value)


def test_the_top_k_has_no_slots_to_count():
    refuses(
        "topk",
        "mask.topk_length must be None for indexer_topk",
        mask=SparseMask(topk_length=torch.ones(4, dtype=torch.int32)),
    )


# The loss.


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("sparse loss", {"reduction": "mean"}, "reduction must be one of sum, mean_rows, none, got 'mean'"),
        ("given loss", {"indices": None}, "target must be an AttentionTarget with indices=None, got Tensor float32"),
        ("dense loss", {"mask": SparseMask(topk_length=torch.ones(4).int())}, "mask.topk_length must be None"),
        ("given loss", {"target": TARGET[:, :2]}, "on cpu like indices, got float32 tensor [4, 2] on cpu"),
        ("given loss", {"target": 1.0}, "target must be a tensor or an AttentionTarget, got float 1.0"),
        ("given loss", {"target": TARGET.to(ELSEWHERE)}, "on cpu like indices, got float32 tensor [4, 3] on meta"),
        ("sparse loss", {"target.q": Q[:3], "target.lse": LSE[:3]}, "q has 3 rows and iq 4, k has 6 keys and ik 6"),
        ("dense loss", {"target.k": KV[:5]}, "q has 4 rows and iq 4, k has 5 keys and ik 6"),
        (
            "dense loss",
            {f"target.{key}": x.to(ELSEWHERE) for key, x in ATTENTION.items()},
            "target.q must be on cpu like iq, got meta",
        ),
        ("given loss", {"row_mask": torch.ones(4)}, "row_mask must be bool [4], got torch.float32 [4]"),
        ("given loss", {"row_mask": torch.ones(3).bool()}, "row_mask must be bool [4], got torch.bool [3]"),
        ("dense loss", {"row_mask": [True]}, "row_mask must be bool [4], got [True]"),
    ],
    ids=lambda x: str(x)[:30],
)  # fmt: skip
def test_the_loss(name, given, said):
    refuses(name, said, **given)
