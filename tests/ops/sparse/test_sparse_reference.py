"""The specification of the sparse family against the textbook: loops over numbers, no tensor operations."""

import math
import random

import pytest
import torch
from torch import Tensor

from attnmesh import SparseMask
from attnmesh.ops.sparse import reference
from helpers.sparse import MASKS, random_attention, random_indexer

S_Q, S_KV, TOPK = 6, 9, 7


def read_by(name: str) -> list[list[int]]:
    """For each row the keys in memory that its slots read, again and again if named so; the rules in words."""
    case = random_attention(S_Q, S_KV, topk=TOPK, mask=name)
    mask, keys = case.mask, []
    for i, row in enumerate(case.indices.tolist()):
        found = []
        for slot, j in enumerate(row):
            if j < mask.k_offset or j >= mask.k_offset + S_KV:
                continue  # not in memory
            if mask.topk_length is not None and slot >= mask.topk_length[i]:
                continue
            if mask.k_start is not None and j < mask.k_start[i]:
                continue
            if mask.k_end is not None and j >= mask.k_end[i]:
                continue
            position = mask.q_start + i if mask.q_positions is None else int(mask.q_positions[i])
            tokens = range(j * mask.k_stride, (j + 1) * mask.k_stride)
            if mask.causal and not all(token <= position for token in tokens):
                continue
            found.append(j - mask.k_offset)
        keys.append(found)
    return keys


def dot(a: Tensor, b: Tensor) -> float:
    return sum(x * y for x, y in zip(a.tolist(), b.tolist(), strict=True))


def attended(keys: list[list[int]], q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None):
    """out and lse, a row and a head at a time, as sums over slots."""
    s_q, h, _ = q.shape
    out, lse = torch.zeros(s_q, h, v.shape[1], dtype=torch.float64), torch.zeros(s_q, h, dtype=torch.float64)
    for i in range(s_q):
        for head in range(h):
            scores = [scale * dot(q[i, head], k[j]) for j in keys[i]]
            total = sum(map(math.exp, scores)) + (0.0 if sink is None else math.exp(sink[head]))
            lse[i, head] = math.log(total) if total else -math.inf
            for score, j in zip(scores, keys[i], strict=True):
                for e in range(v.shape[1]):
                    out[i, head, e] += math.exp(score) / total * float(v[j, e])
    return out, lse


@pytest.mark.parametrize(
    ("name", "sink"),
    [
        ("all", False),
        ("length", True),
        ("causal", False),
        ("later", False),
        ("strided", True),
        ("later strided", True),
        ("positions", False),
        ("strided positions", True),
        ("documents", False),
        ("offset", False),
        ("everything", True),
    ],
)
def test_attention_is_a_softmax_over_the_slots_that_the_rules_allow(name, sink):
    case = random_attention(S_Q, S_KV, topk=TOPK, mask=name, dtype=torch.float64, heads=2, d=3, d_v=2, sink=sink)
    keys = read_by(name)
    out, lse = attended(keys, case.q, case.kv, case.kv[:, :2], case.scale, case.sink)
    found = case.exact()
    torch.testing.assert_close(found[0], out)
    torch.testing.assert_close(found[1], lse)
    assert case.valid.sum(1).tolist() == [len(row) for row in keys]


def test_the_masks_of_these_tests_are_not_idle():
    """Every mask but the first rules something out and lets something through, and rows that see nothing are there."""
    named = {name: random_attention(mask=name) for name in MASKS}
    for name, case in named.items():
        free = reference.valid_slots(case.indices, case.s_kv, SparseMask(k_offset=case.mask.k_offset))
        assert case.valid.any()
        assert (case.valid.sum() < free.sum()) == (name not in ("all", "offset"))
    blind = {name for name, case in named.items() if not case.valid.any(1).all()}
    assert blind >= {"length", "strided", "positions", "strided positions", "documents", "everything"}
    assert (named["all"].times > 1).any()  # a key named twice


def test_gradients_of_the_specification_are_those_of_finite_differences():
    case = random_attention(
        3, 4, topk=5, mask="causal", dtype=torch.float64, heads=2, d=3, d_v=2, own_values=True, sink=True
    )
    leaves = [x.requires_grad_() for x in (case.q, case.kv, case.v, case.sink)]

    def attend(q, k, v, sink):
        out, lse = reference.attend(q, k, v, case.times, case.scale, sink)
        return out, lse

    assert torch.autograd.gradcheck(attend, leaves)


def test_the_distribution_is_the_probability_of_each_key():
    case = random_attention(3, 5, dtype=torch.float64, heads=2, d=3)
    lse = torch.arange(6.0, dtype=torch.float64).view(3, 2)
    found = reference.distribution(case.q, case.kv, lse, case.scale)
    for head in range(2):
        for i in range(3):
            for j in range(5):
                p = math.exp(case.scale * dot(case.q[i, head], case.kv[j]) - lse[i, head])
                assert found[head, i, j].item() == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize("relu", [False, True])
def test_index_scores_are_weighted_sums_over_heads(relu):
    case = random_indexer(3, 5, dtype=torch.float64, relu=relu)
    scores = case.scores()
    for i in range(3):
        for j in range(5):
            dots = [dot(head, case.ik[j]) for head in case.iq[i]]
            score = sum(float(w) * (max(x, 0.0) if relu else x) for w, x in zip(case.w[i], dots, strict=True))
            assert scores[i, j].item() == pytest.approx(case.scale * score, rel=1e-12, abs=1e-14)


def test_the_best_keys_are_better_than_all_others_or_equal_and_lower():
    draw = random.Random(0)
    scores = torch.tensor([[float(draw.randint(-2, 2)) for _ in range(12)] for _ in range(20)])
    seen = torch.tensor([[draw.random() < 0.7 for _ in range(12)] for _ in range(20)])
    for topk in (1, 4, 20):
        for row, visible, best in zip(scores, seen, reference.topk_keys(scores, seen, topk), strict=True):
            assert best == sorted(set(best))
            assert len(best) == min(topk, int(visible.sum()))
            others = [j for j in range(12) if visible[j] and j not in best]
            assert all((-row[a], a) < (-row[b], b) for a in best for b in others)
            assert all(visible[a] for a in best)


def test_kl_is_the_sum_of_p_log_p_by_q_over_keys_seen():
    p = torch.tensor([[0.5, 1.5, 0.0, 9.0], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]).double()
    scores = torch.tensor([[0.3, -1.0, 2.0, 7.0], [1.0, 2.0, 3.0, 4.0], [0.0, 5.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    scores = scores.double().requires_grad_()
    seen = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    z = math.exp(0.3) + math.exp(-1.0) + math.exp(2.0)
    first = sum(x * math.log(x / (math.exp(s) / z)) for x, s in ((0.25, 0.3), (0.75, -1.0)))
    z = 3 + math.exp(5.0)
    third = sum(x * math.log(x * z) for x in (0.125, 0.375, 0.5))
    rows = reference.kl(p, scores, seen)
    torch.testing.assert_close(rows, torch.tensor([first, 0.0, third, 0.0]).double())
    (grad,) = torch.autograd.grad(rows.sum(), scores)
    assert grad[3].eq(0).all()
    assert grad[1].eq(0).all()
    assert torch.equal(grad[0, 3:], torch.zeros(1).double())
