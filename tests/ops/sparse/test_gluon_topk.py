"""The indexer's kernels for Hopper in Gluon, emulated: schedules, bounds, ties, NaN, workspaces, planted faults.

Scores are whole numbers, so that they are exact and many are equal.
"""

import pytest
import torch
from torch import Tensor

from helpers.gluon import emulated

pytest.importorskip("triton")

from attnmesh.ops.sparse import gluon_paged_scores, gluon_topk
from attnmesh.ops.sparse.arguments import TopKIndices
from attnmesh.ops.sparse.paged import PagedKeys
from attnmesh.sparse import unpack_index_keys
from helpers.cases import sweep
from helpers.sparse_kernels import paged_topk, topk

SMALL = ("\nPART = 1024", "\nPART = 32")  # values at a time, so that short rows have several parts


def whole(s_q: int, s_kv: int, heads: int, dim: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    iq = torch.randint(-1, 2, (s_q, heads, dim), generator=draw).to(dtype)
    ik = torch.randint(-1, 2, (s_kv, dim), generator=draw).to(dtype)
    return iq, ik, torch.randint(0, 3, (s_q, heads), generator=draw).float()


def definition(iq: Tensor, ik: Tensor, w: Tensor, k: int, lo: Tensor, hi: Tensor, relu: bool) -> TopKIndices:
    dots = torch.einsum("qhd,kd->qhk", iq.double(), ik.double())
    scores = ((dots.relu() if relu else dots) * w.double()[..., None]).sum(1) * 0.5
    key = torch.arange(ik.shape[0])
    scores[(key < lo[:, None]) | (key >= hi[:, None]) | scores.isnan()] = -torch.inf
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    order = torch.nn.functional.pad(order, (0, k - order.shape[1]))
    chosen = (scores.gather(1, order) > -torch.inf) & (torch.arange(k) < ik.shape[0])
    indices, back = order.masked_fill(~chosen, 2**31 - 1).sort(1)
    chosen, found = chosen.gather(1, back), scores.gather(1, order).gather(1, back)
    return TopKIndices(
        indices.masked_fill(~chosen, -1).int(), found.masked_fill(~chosen, -torch.inf).float(), chosen.sum(1).int()
    )


def bounds(s_q: int, s_kv: int) -> tuple[Tensor, Tensor]:
    """A causal mask with a first key; one row sees nothing, one everything, one has bounds outside of the keys."""
    lo, hi = torch.arange(s_q) * 7 % 60, (torch.arange(s_q) + 1) * s_kv // s_q
    lo[1], hi[1] = s_kv // 2, 3
    lo[2], hi[2] = 0, s_kv
    lo[4], hi[4] = -5, s_kv + 100
    return lo.int(), hi.int()


def check(s_q, s_kv, heads, dim, k, seed, planted=SMALL, relu=True, dtype=torch.float16, **how) -> None:
    iq, ik, w = whole(s_q, s_kv, heads, dim, dtype, seed)
    ik[5] = torch.nan
    lo, hi = bounds(s_q, s_kv)
    kernels = emulated(gluon_topk, seed, planted)
    found = topk(kernels, iq, ik, w, k, lo, hi, scale=0.5, relu=relu, **how)
    expected = definition(iq, ik, w, k, lo, hi, relu)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


# Rows, keys, heads, head dim, k, and how: blocks of candidates, units of some tiles, workspaces, programs.
CASES = [
    (5, 260, 64, 64, 9, {"block": 32, "unit_tiles": 2, "workspace": 1, "programs": 1}),
    (9, 700, 64, 128, 20, {"block": 64, "unit_tiles": 2, "workspace": 1}),
    (5, 300, 128, 64, 350, {"block": 512, "unit_tiles": 1, "workspace": 1 << 15, "relu": False}),
    (7, 900, 40, 96, 33, {"block": 64, "unit_tiles": 3, "workspace": 1, "programs": 1, "dtype": torch.bfloat16}),
    (19, 520, 20, 128, 10, {"block": 32, "unit_tiles": 2, "workspace": 1 << 15, "programs": 2}),
]


@pytest.mark.parametrize("case", [CASES[0], *(sweep(x) for x in CASES[1:])])
def test_the_topk_is_that_of_the_definition(case):
    *sizes, how = case
    check(*sizes, seed=1, **how)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2, 7))
def test_hostile_schedules(seed):
    *sizes, how = CASES[seed % len(CASES)]
    check(*sizes, seed=seed, **how)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", [
    # A row is selected from before it is scored.
    ("_wait_for(counters.scored + group, sizes.items)", "pass"),
    # A part of the workspace is used again before all of its rows are selected from.
    ("_wait_for(counters.selected + (group - sizes.ring), SHAPE.rows)", "pass"),
])  # fmt: skip
def test_the_emulation_finds_planted_faults(fault):
    def many_times() -> None:  # a race is lost sooner or later
        for seed in range(40):
            check(13, 300, 128, 64, 20, seed, fault, block=1024, unit_tiles=2, workspace=1, programs=1)

    with pytest.raises((AssertionError, IndexError)):
        many_times()


def test_calls_that_the_kernels_do_not_serve():
    iq, ik, _ = whole(4, 200, 64, 128, torch.float16, 0)
    assert not gluon_topk.supports(iq, ik, 10)  # not on a GPU
    assert not gluon_paged_scores.supports(iq[None], ik[None, :, None])


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "length", "block_size", "k"),
    [
        (2, 1, 64, 300, 64, 20),
        (2, 1, 40, 4500, 64, 100),
        *(sweep(*case)
          for case in [(1, 2, 64, 500, 128, 33), (1, 4, 40, 400, 64, 10), (2, 1, 128, 300, 64, 400)]),
    ],
)  # fmt: skip
def test_a_decode_step_over_fp8_keys(batch, tokens, heads, length, block_size, k):
    """Against the Triton kernels; a scale is NaN, bounds are inside of blocks, and blocks of others are NaN.

    From rows of more than 2,048 keys Gluon selects, too; in parts, programs of 64 keys share maxima of groups.
    """
    draw = torch.Generator().manual_seed(length + heads)
    blocks = -(-length // block_size)
    pool = unpack_index_keys(torch.zeros(batch * blocks + 3, block_size * 132, dtype=torch.uint8), block_size)
    pool.values.copy_(torch.randint(-1, 2, pool.values.shape, generator=draw).float())
    pool.scales.copy_(torch.randint(1, 3, pool.scales.shape, generator=draw))
    order = torch.randperm(batch * blocks + 3, generator=draw).int()
    table = order[3:].view(batch, blocks)
    pool.scales[order[:3].long()] = torch.nan
    pool.scales[int(table[0, 0]), 3] = torch.nan
    iq = torch.randint(-1, 2, (batch, tokens, heads, 128), generator=draw).half()
    w = torch.randint(0, 3, (batch, tokens, heads), generator=draw).float()
    first = torch.randint(0, 90, (batch, tokens), generator=draw)
    end = torch.randint(length // 2, length + 1, (batch, tokens), generator=draw)
    how, kernels = {"scale": 0.5, "relu": True, "block": 64}, emulated(gluon_paged_scores, length)
    ways = [how | {"gluon": kernels}, how]
    if length > 2048:
        how |= {"block": 2048}
        ways = [how | {"gluon": kernels, "parts": 0}, how | {"gluon": kernels, "parts": 4, "span": 64}, how]
    found = [paged_topk(iq, PagedKeys(pool, table), w, k, first, end, **way) for way in ways]
    for other in found[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], other, strict=True))
    assert (found[0].lengths > 0).all()


@pytest.mark.parametrize("kind", ["whole", sweep("large"), "not in fp16", "infinite"])
def test_a_decode_step_with_queries_in_bf16(kind):
    """They are multiplied in fp16 where a power of two makes all of them fp16 numbers, and else as they are."""
    draw = torch.Generator().manual_seed(1)
    pool = unpack_index_keys(torch.zeros(6, 64 * 132, dtype=torch.uint8), 64)
    pool.values.copy_(torch.randint(-1, 2, pool.values.shape, generator=draw).float())
    pool.scales.fill_(1.0)
    iq = torch.randint(-1, 2, (1, 1, 64, 128), generator=draw).float()
    w = torch.randint(0, 3, (1, 1, 64), generator=draw).float()
    if kind == "large":
        iq *= 2.0**12
    if kind == "not in fp16":  # one head, with a large weight
        iq[..., 5, :], w[..., 5] = iq[..., 5, :] * 2.0**-40, 2.0**40
    if kind == "infinite":
        iq[..., 5, 7] = torch.inf
    table, bounds = torch.randperm(6, generator=draw).int()[None], (torch.tensor([[9]]), torch.tensor([[350]]))
    how = {"scale": 0.5, "relu": True, "span": 1024}
    found = paged_topk(iq.bfloat16(), PagedKeys(pool, table), w, 20, *bounds, gluon=emulated(gluon_paged_scores), **how)
    keys = pool.values.float()[table[0].long()].flatten(0, 2)
    expected = definition(iq[0], keys, w[0], 20, bounds[0][0], bounds[1][0], True)
    assert all(torch.equal(mine[0], theirs) for mine, theirs in zip(found, expected, strict=True))
