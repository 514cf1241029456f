"""paged_decode_attention(): pools, tables in any order, tables that are wrong."""

import re
from dataclasses import replace

import pytest
import torch

from attnmesh import decode_attention, paged_decode_attention
from attnmesh.ops.storage import values_of
from attnmesh.testing.decode import UNUSED_ENTRIES, random_decode
from helpers.cases import sweep
from helpers.decode import BACKENDS, check_backend, device_of, interpreted, problem_for

EDGES = [0, 1, 14, 15, 16, 17, 31, 32, 33, 36]  # positions at the ends of blocks of 16
ON_EACH = pytest.mark.parametrize("backend", BACKENDS)
ON_THE_CPU = pytest.mark.parametrize(
    "backend",
    [
        "cpu",
        "reference",
        "auto",
        pytest.param("triton", marks=pytest.mark.skipif(not interpreted("triton"), reason="a GPU")),
    ],
)


@pytest.mark.parametrize(
    ("how", "tokens", "backend"),
    [
        ({}, 1, "cpu"),
        sweep({}, 4, "triton"),
        sweep({"window": 5}, 1, "cpu"),
        sweep({"window": 5}, 4, "triton"),
        sweep({"split_size": 16}, 1, "triton"),
        sweep({"key_range": "tree"}, 4, "cpu"),
    ],
    ids=str,
)
def test_every_position_to_past_two_blocks_of_a_pool(how, tokens, backend):
    for first in range(0, 37, 37 if interpreted(backend) else 10):
        positions = EDGES if interpreted(backend) else list(range(first, min(first + 10, 37)))
        check_backend(problem_for(backend, positions, tokens=tokens, block_size=16, dims=(16, 16), **how), backend)


@pytest.mark.parametrize(
    ("tokens", "block_size", "backend"),
    [
        (1, 1, "cpu"),
        sweep(1, 7, "triton"),
        sweep(1, 64, "cpu"),
        sweep(3, 3, "triton"),
        sweep(3, 16, "cpu"),
        sweep(3, 256, "triton"),
    ],
)
def test_every_length_of_block(tokens, block_size, backend):
    at_the_edges = (
        [max(0, 2 * block_size + off) for off in (-1, 0, 1)] if block_size < 64 else [block_size, block_size - 1]
    )
    check_backend(problem_for(backend, at_the_edges, tokens=tokens, block_size=block_size, kv_heads=2), backend)
    check_backend(
        problem_for(backend, [min(40, block_size // 2), 0], tokens=tokens, block_size=block_size, window=9), backend
    )


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ({"kv_heads": 4, "group": 1, "tokens": 4, "window": 23}, "cpu"),
        sweep({"kv_heads": 4, "group": 1, "tokens": 4, "window": 23}, "triton"),
        sweep({"group": 3, "sinks": True, "split_size": 32}, "cpu"),
        sweep({"group": 3, "sinks": True, "split_size": 32}, "triton"),
    ],
    ids=str,
)
def test_two_heads_of_few_rows_read_together(how, backend):
    """Their rows fill one tile; neither sees the keys or values of the other, which may be NaN."""
    how = {"kv_heads": 2, "group": 4, "dims": (128, 128)} | how
    problem = problem_for(backend, [40, 17, -1], block_size=16, **how)
    found = check_backend(problem, backend)
    for cache in (problem.k, problem.v):
        broken = cache.clone()
        broken[:, :, 1] = torch.nan
        k, v = (broken if x is cache else x for x in (problem.k, problem.v))
        out = replace(problem, k=k, v=v).run(backend).out
        heads = problem.q.shape[1] // how["kv_heads"]
        assert torch.equal(out[:, :heads], found.out[:, :heads])
        if cache is problem.v or backend != "cpu":  # for keys that are all NaN, torch's kernel gives 0 on some CPUs
            assert out[:2, heads : 2 * heads].isnan().all()


@pytest.mark.parametrize(
    ("memory", "storage", "backend"),
    [
        ("own", "plain", "cpu"),
        ("own", "int8", "triton"),
        ("layer", "fp8", "triton"),
        sweep("layer", "bfp8", "cpu"),
        sweep("layer inside", "plain", "triton"),
        sweep("layer inside", "fp8 heads", "cpu"),
    ],
)
def test_pools_may_be_layers_of_larger_ones(memory, storage, backend):
    problem = problem_for(backend, [20, 33], tokens=3, block_size=16, kv_heads=2, memory=memory, storage=storage)
    assert values_of(problem.k).is_contiguous() == (memory != "layer inside")
    check_backend(problem, backend)


@pytest.mark.parametrize(
    ("storage", "backend"),
    [("plain", "cpu"), ("fp8", "triton"), ("fp8 heads", "cpu"), ("int8", "triton"), ("bfp8", "cpu")],
)
def test_sequences_may_name_the_same_blocks(storage, backend):
    problem = problem_for(backend, [50, 33, 20], tokens=2, block_size=16, storage=storage, share="blocks")
    table = problem.table.tolist()
    assert table[0][0] == table[1][0] == table[2][0]
    check_backend(problem, backend)


@ON_EACH
def test_all_rows_may_be_one_table(backend):
    """As beams before they part: the same row for every sequence, at different positions."""
    problem = problem_for(backend, [44, 44, 44], tokens=2, block_size=16, share="cache")
    found = check_backend(problem, backend)
    again = replace(problem.with_options(share_cache=False), table=problem.table.expand(3, -1)).run(backend)
    torch.testing.assert_close(again.out, found.out)
    torch.testing.assert_close(again.lse, found.lse)


@ON_EACH
def test_one_block_may_be_named_twice_by_one_sequence(backend):
    problem = problem_for(backend, [47], tokens=2, block_size=16)
    table = problem.table.clone()
    table[0, 1] = table[0, 0]
    clear = tuple(x.clone() for x in problem.valid)
    for x in clear:
        x[:, :, 16:32] = x[:, :, :16]
    check_backend(replace(problem, table=table, valid=clear), backend)


@ON_EACH
@pytest.mark.parametrize("strided", ["column", "wide", "expanded"])
def test_tables_may_be_views(strided, backend):
    problem = problem_for(backend, [20, 40], tokens=2, block_size=16)
    table = problem.table
    if strided == "column":
        view = table.T.contiguous().T
    elif strided == "wide":
        view = torch.stack([table, torch.full_like(table, UNUSED_ENTRIES[1])], -1).flatten(1)[:, ::2]
    else:
        problem = problem_for(backend, [20, 40], tokens=2, block_size=16, share="cache").with_options(share_cache=False)
        problem = replace(problem, valid=tuple(x.expand(2, -1, -1, -1) for x in problem.valid))
        view = problem.table.expand(2, -1)
    assert not view.is_contiguous()
    check_backend(replace(problem, table=view), backend)


@ON_EACH
def test_a_wider_table_changes_nothing(backend):
    narrow, wide = (problem_for(backend, [20, 40], tokens=2, block_size=16, capacity=n) for n in (48, 160))
    assert wide.table.shape[1] == 10
    assert narrow.table.shape[1] == 3
    check_backend(narrow, backend)
    check_backend(wide, backend)


@ON_EACH
def test_a_pool_of_one_block(backend):
    problem = problem_for(backend, [2], tokens=2, block_size=4)
    block = int(problem.table[0, 0])
    k, v = (x[block : block + 1] for x in (problem.k, problem.v))
    check_backend(replace(problem, k=k, v=v, table=0 * problem.table), backend)


# Tables that are wrong. On a GPU see test_decode_cuda.py.

WRONG = [-1, -2, -(2**31), 9999, 2**31 - 1, "blocks"]


@ON_THE_CPU
@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_an_entry_outside_the_pool_is_named(slot, value, backend):
    problem = random_decode([20, 40, -1], tokens=2, block_size=16)
    blocks = problem.k.shape[0]
    problem.table[1, slot] = blocks if value == "blocks" else value
    said = (
        f"block_table[1, {slot}] is {blocks if value == 'blocks' else value}, but the pool has blocks 0 to {blocks - 1}"
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        problem.run(backend)


@ON_THE_CPU
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_first_and_last_entries_in_use_are_checked_and_the_next_is_not(block_size, backend):
    last = 2 * block_size  # the first position of slot 2
    for position, slot, wrong in ((last, 2, True), (last - 1, 2, False), (last - 1, 1, True), (0, 0, True)):
        problem = random_decode([position], block_size=block_size, capacity=3 * block_size)
        problem.table[0, slot] = -5
        if wrong:
            with pytest.raises(ValueError, match=rf"block_table\[0, {slot}\] is -5"):
                problem.run(backend)
        else:
            check_backend(problem, backend)


@ON_THE_CPU
@pytest.mark.parametrize("tokens", [1, 3])
def test_entries_that_a_window_has_left_behind_are_not_checked(tokens, backend):
    window = 6
    for position in (21 + tokens - 1, 22 + tokens - 1):  # the first token's window begins at 16, at 17
        problem = random_decode([position], tokens=tokens, block_size=16, window=window)
        assert int(problem.table[0, 0]) in UNUSED_ENTRIES
        check_backend(problem, backend)
    problem = random_decode([20 + tokens - 1], tokens=tokens, block_size=16, window=window)  # at 15
    check_backend(problem, backend)
    problem.table[0, 0] = -1
    with pytest.raises(ValueError, match=re.escape("block_table[0, 0] is -1")):
        problem.run(backend)


@ON_THE_CPU
def test_a_wrong_entry_of_a_shared_table_is_named(backend):
    problem = random_decode([3, 40], block_size=16, share="cache")
    problem.table[0, 2] = 77
    with pytest.raises(ValueError, match=re.escape("block_table[1, 2] is 77")):  # by the sequence that reads it
        problem.run(backend)
    check_backend(problem.with_options(cur_pos=[3, 31]), backend)


@ON_THE_CPU
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_position_past_the_table_is_named(dtype, backend):
    problem = random_decode([20, 40], block_size=16)
    for cur_pos in ([20, 48], torch.tensor([20, 48], dtype=dtype)):
        with pytest.raises(ValueError, match=re.escape("cur_pos[1] is 48, but must be 0 to 47")):
            problem.run(backend, cur_pos=cur_pos)
        with pytest.raises(ValueError, match=re.escape("cur_pos[1] is 48")):  # before there is a call at all
            problem.with_options(cur_pos=cur_pos).call()
    problem.table[:] = problem.table.clamp(0, problem.k.shape[0] - 1)
    problem.run(backend, cur_pos=[20, 47])


@ON_EACH
def test_a_table_without_slots_holds_skipped_sequences(backend):
    device = device_of(backend)
    problem = problem_for(backend, [3, 3], block_size=16)
    table = torch.empty(2, 0, dtype=torch.int32, device=device)
    out, lse = replace(problem, table=table).run(backend, cur_pos=[-1, -1])
    assert not out.any()
    assert (lse == -torch.inf).all()


@ON_EACH
def test_an_empty_pool_holds_skipped_sequences(backend):
    problem = problem_for(backend, [-1, -1], block_size=16, capacity=32)
    out, lse = replace(problem, k=problem.k[:0], v=problem.v[:0]).run(backend)
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_pools_by_hand():
    """Without the helpers: three blocks of two tokens, in the order 2, 0, 1."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, 2, 1, 16, generator=generator) for _ in range(2))
    q = torch.randn(1, 2, 1, 16, generator=generator)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    found = paged_decode_attention(q, k, v, table, cur_pos=[4], backend="cpu")
    order = [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0)]
    k, v = (torch.stack([x[block, at] for block, at in order], 1)[None] for x in (k, v))
    torch.testing.assert_close(found, decode_attention(q, k, v, backend="reference"))
