"""An interval of keys for each token: what is seen, that nothing else is read, and that shares of a sequence merge."""

import re
from dataclasses import replace

import pytest
import torch

from attnmesh import merge, paged_decode_attention
from attnmesh.core.ranges import InterleavedShard
from attnmesh.core.state import State
from attnmesh.decode import check_decode_errors
from attnmesh.ops.decode import triton as triton_backend
from attnmesh.ops.decode.triton import Triton
from attnmesh.ops.storage import Stored, dequantize, quantize
from attnmesh.testing.decode import DecodeProblem, random_decode
from helpers.cases import sweep
from helpers.decode import BACKENDS, assert_decode_close, check_backend, device_of, interpreted, problem_for

ON_EACH = pytest.mark.parametrize("backend", BACKENDS)
EVERYWHERE = pytest.mark.parametrize("backend", [*BACKENDS, "reference"])


def seeing(problem: DecodeProblem, first: list, end: list, dtype: torch.dtype = torch.int32) -> DecodeProblem:
    return problem.with_options(
        key_range=tuple(torch.tensor(x, dtype=dtype, device=problem.q.device) for x in (first, end))
    )


@pytest.mark.parametrize(
    ("block_size", "backend"),
    [
        (None, "cpu"),
        sweep(None, "triton"),
        (None, "reference"),
        sweep(16, "cpu"),
        (16, "triton"),
        sweep(16, "reference"),
    ],
)
def test_each_token_sees_its_interval(block_size, backend):
    """The lse of tokens whose every score is 0 counts the keys they see."""
    problem = problem_for(backend, [40, 20, 30], tokens=3, dtype=torch.float32, block_size=block_size)
    problem = seeing(problem, [[0, 3, 39], [0, 0, 0], [17, 17, 18]], [[1, 17, 41], [21, 21, 21], [18, 30, 31]])
    lse = check_backend(problem, backend, scale=0.0).lse
    seen = torch.tensor([[1.0, 14, 2], [21, 21, 21], [1, 13, 13]])
    torch.testing.assert_close(lse[:, 0].exp().cpu(), seen)


@pytest.mark.parametrize(
    ("tokens", "block_size", "backend"),
    [
        (1, None, "cpu"),
        (1, 16, "triton"),
        sweep(4, 1, "triton"),
        sweep(4, 64, "cpu"),
        sweep(8, None, "triton"),
        (8, 7, "cpu"),
    ],
)
def test_any_intervals(tokens, block_size, backend):
    """At random: some are empty, some begin before the first key or end past the last."""
    for seed in range(1 if interpreted(backend) else 8):
        positions = [45 + seed, 3, 20, -1]
        how = {"tokens": tokens, "block_size": block_size, "seed": 8 * tokens + seed, "sinks": bool(seed % 2)}
        check_backend(
            problem_for(backend, positions, key_range="intervals", dims=(16, 16), capacity=70, **how), backend
        )


@pytest.mark.parametrize(
    ("how", "storage", "backend"),
    [
        ({}, "plain", "cpu"),
        ({}, "int8", "triton"),
        ({"split_size": 16}, "fp8", "triton"),
        ({"split_size": 16}, "bfp8", "cpu"),
        ({"max_splits": 3, "sinks": True}, "plain", "triton"),
        ({"max_splits": 3, "sinks": True}, "fp8 heads", "cpu"),
    ],
    ids=str,
)
def test_any_storage_and_splits(how, storage, backend):
    how = how | {"storage": storage, "block_size": 16, "tokens": 3, "dims": (64, 32)}
    problem = problem_for(backend, [60, 40], key_range="intervals", seed=3, **how)
    assert (problem.options["key_range"][0][:, 0] >= 16).any()  # a block is left out
    check_backend(problem, backend)


@pytest.mark.parametrize(
    ("sinks", "block_size", "backend"),
    [
        (False, None, "cpu"),
        (False, None, "triton"),
        sweep(False, 16, "reference"),
        sweep(True, None, "reference"),
        sweep(True, 16, "cpu"),
        (True, 16, "triton"),
    ],
)
def test_who_sees_nothing(sinks, block_size, backend):
    """A token; a whole sequence, of which nothing is read; a skipped one, which has no sinks either."""
    problem = problem_for(backend, [40, 40, -1], tokens=2, sinks=sinks, block_size=block_size)
    nan, garbage = torch.full_like(problem.k, torch.nan), problem.table
    if block_size:
        garbage = garbage.clone()
        garbage[1] = -5
    else:
        nan[0] = problem.k[0]
    problem = replace(problem, k=problem.k if block_size else nan, table=garbage)
    for empty in ([5, 5], [90, 90]):
        out, lse = check_backend(seeing(problem, [[3, 3], empty, [0, 0]], [[3, 20], [5, 5], [9, 9]]), backend)
        alone = problem.options["sinks"].float() if sinks else torch.full((lse.shape[1],), -torch.inf).to(lse.device)
        for row in (lse[0, :, 0], lse[1, :, 0], lse[1, :, 1]):
            torch.testing.assert_close(row, alone)
        assert lse[0, :, 1].isfinite().all()
        assert (lse[2] == -torch.inf).all()
        assert not out[0, :, 0].any()
        assert not out[1:].any()


@pytest.mark.parametrize(
    ("block_size", "window", "backend"),
    [
        (None, None, "cpu"),
        (None, 1, "cpu"),
        (None, 5, "triton"),
        (16, None, "triton"),
        (16, 1, "triton"),
        (16, 17, "cpu"),
    ],
)
def test_causality_and_windows_are_intervals(block_size, window, backend):
    problem = problem_for(backend, [40, 2, 20], tokens=4, block_size=block_size, window=window)
    own = torch.tensor([40, 2, 20])[:, None] - 3 + torch.arange(4)
    first = torch.zeros_like(own) if window is None else (own - window + 1).clamp(0)
    key_range = tuple(x.to(problem.q.device) for x in (first, own + 1))
    expected, found = problem.run(backend), problem.run(backend, window=None, key_range=key_range)
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)


@EVERYWHERE
def test_bounds_of_any_type_stride_and_size(backend):
    problem = problem_for(backend, [40, 20], tokens=2, dtype=torch.float32)
    for dtype, low, high in ((torch.int32, -(2**31), 2**31 - 1), (torch.int64, -(2**40) + 7, 2**40 + 7)):
        expected = check_backend(seeing(problem, [[0, 4], [0, 0]], [[0, 30], [7, 21]], dtype), backend)
        far = seeing(problem, [[low, 4], [low, low]], [[low, 30], [7, high]], dtype).options["key_range"]
        strided = tuple(x.T.contiguous().T for x in far)
        assert not strided[0].is_contiguous()
        assert torch.equal(check_backend(problem, backend, key_range=strided).lse, expected.lse)


def test_sequences_that_end_alike_but_see_otherwise():
    """On the CPU they would be computed together."""
    problem = random_decode([39] * 4, tokens=2, group=4, kv_heads=8)
    check_backend(seeing(problem, [[0, 0], [0, 0], [5, 9], [5, 9]], [[39, 40], [39, 40], [30, 40], [30, 31]]), "cpu")


@ON_EACH
@pytest.mark.parametrize("block_size", [None, 16])
def test_more_sequences_than_a_launch_takes(block_size, backend, monkeypatch):
    monkeypatch.setattr(triton_backend, "_SEQUENCES_PER_LAUNCH", 2)
    check_backend(
        problem_for(backend, [40, 20, 30, 9, 25], tokens=2, key_range="intervals", block_size=block_size, seed=5),
        backend,
    )


# Table entries that are wrong.


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_only_entries_of_what_is_seen_are_looked_at(backend):
    for slot in range(4):
        problem = seeing(random_decode([60], tokens=2, block_size=16), [[16, 20]], [[25, 48]])  # slots 1 and 2
        problem.table[0, slot] = -9
        if slot in (1, 2):
            with pytest.raises(ValueError, match=re.escape(f"block_table[0, {slot}] is -9")):
                problem.run(backend)
        else:
            check_backend(problem, backend)


@pytest.mark.parametrize("how", [{}, {"split_size": 16}], ids=str)
def test_the_kernels_look_at_no_other_entries_either(how):
    """The front door refuses wrong entries on the CPU, so the backend is called itself."""
    problem = problem_for("triton", [60, 20], tokens=2, block_size=16, group=1, dims=(16, 16), **how)
    call = seeing(problem, [[16, 20], [0, 0]], [[25, 48], [21, 21]]).call()
    expected = Triton().run(call)
    for slot in range(4):
        table = call.table.clone()
        table[0, slot] = -9
        found = Triton().run(replace(call, table=table))
        assert torch.equal(found.lse[1], expected.lse[1])
        if slot in (1, 2):
            with pytest.raises(ValueError, match=re.escape(f"block_table[0, {slot}] is -9, outside the pool")):
                check_decode_errors()
            assert found.out[0].isnan().all()
        else:
            check_decode_errors()
            assert torch.equal(found.out, expected.out)


# Shares of a sequence.


def dealt(
    x: torch.Tensor, share: InterleavedShard, length: int, block_size: int, storage: str
) -> tuple[Stored, torch.Tensor]:
    """The positions of a rank's share, of x [1, Hkv, length, D], in blocks: NaN past the end; and the table."""
    mine = [at for at in range(length) if share.owner(at) == share.rank]
    slots = -(-len(mine) // block_size) or 1
    pool = torch.zeros(slots * block_size, x.shape[1], x.shape[3], dtype=x.dtype)
    pool[: len(mine)] = x[0, :, mine].transpose(0, 1)
    order = torch.arange(slots - 1, -1, -1)
    if storage == "plain":
        pool[len(mine) :] = torch.nan
    pool = pool.unflatten(0, (slots, block_size))[order]
    return pool if storage == "plain" else quantize(pool, storage, head_axis=2), order[None].int()


@pytest.mark.parametrize(
    ("ranks", "run", "window", "storage"),
    [
        (1, 1, None, "plain"),
        (1, 1, 30, "int8"),
        (2, 4, 1, "int8"),
        (2, 4, 6, "plain"),
        (3, 1, 6, "int8"),
        (3, 4, 30, "plain"),
    ],
)
def test_shares_of_a_sequence_merge_to_all_of_it(ranks, run, window, storage):
    """Each rank holds only its positions, counted from 0, and is told nothing of ranks."""
    for seed, (length, tokens, block_size) in enumerate([(1, 1, 4), (5, 8, 4), (37, 3, 7), (64, 8, 16), (65, 2, 16)]):
        assert_shares_merge("cpu", ranks, run, window, storage, length, tokens, block_size, seed)


@pytest.mark.parametrize(
    ("case", "run", "window"),
    [((1, 1, 4), 1, None), ((5, 8, 4), 4, 6), sweep((37, 3, 7), 1, 6), sweep((37, 3, 7), 4, None)],
    ids=str,
)
def test_shares_merge_in_triton(case, run, window):
    assert_shares_merge("triton", 3, run, window, "plain", *case, seed=1)


def assert_shares_merge(backend, ranks, run, window, storage, length, tokens, block_size, seed):
    where, dice = device_of(backend), torch.Generator().manual_seed(seed)
    q = torch.randn(1, 4, tokens, 32, generator=dice)
    k, v = (torch.randn(1, 2, length, 32, generator=dice) for _ in range(2))
    own = torch.arange(length - tokens, length)[None]  # [1, T]; below 0 it sees nothing
    states = []
    for rank in range(ranks):
        share = InterleavedShard(ranks, rank, run)
        (k_pool, table), (v_pool, _) = (dealt(x, share, length, block_size, storage) for x in (k, v))
        first = torch.zeros_like(own) if window is None else (own - window + 1).clamp(0)
        key_range = (share.length(first).int(), share.length((own + 1).clamp(0)).int())
        to = [x.to(where) for x in (q, k_pool, v_pool, table)] if storage == "plain" else [q, k_pool, v_pool, table]
        state = paged_decode_attention(
            *to, cur_pos=[share.length(length) - 1], key_range=tuple(x.to(where) for x in key_range),
            out_dtype=torch.float32, return_lse=True, backend=backend,
        )  # fmt: skip
        states.append(State(*(x.cpu() for x in state)))
    clear = [x.double() if storage == "plain" else dequantize(quantize(x, storage), torch.float64) for x in (k, v)]
    assert_decode_close(
        merge(states), DecodeProblem(q, k, v, None, {"cur_pos": [length - 1], "window": window}, tuple(clear))
    )
