"""Decode on a GPU: faults that only the kernel can see, steps captured in a graph, real sizes."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch

import attnmesh
from attnmesh.ops.storage import Quantized, Stored
from attnmesh.testing.decode import DecodeProblem, random_decode
from attnmesh.verify.decode import STORAGES
from attnmesh.verify.mode import covering_rows
from helpers.cases import else_sweep
from helpers.decode import CUDA, assert_decode_close, check_backend

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="needs a GPU")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCK = 16


@pytest.fixture(autouse=True)
def no_fault_left_over():
    if CUDA:
        attnmesh.decode.check_decode_errors()
    yield
    if CUDA:
        attnmesh.decode.check_decode_errors()


def made(positions: list[int], **how: object) -> DecodeProblem:
    return random_decode(positions, **{"device": "cuda", "dtype": torch.bfloat16, "at": "int32"} | how)


# Faults.


def assert_only(problem: DecodeProblem, broken: DecodeProblem, wrong: list[int], said: str, **more: object) -> None:
    """The wrong sequences are NaN, the others what they were, and the report names the first."""
    found = broken.run("triton", **more)
    with pytest.raises(ValueError, match=re.escape(said)):
        attnmesh.decode.check_decode_errors()
    attnmesh.decode.check_decode_errors()  # the record is cleared
    assert found.out[wrong].isnan().all()
    assert found.lse[wrong].isnan().all()
    others = [row for row in range(problem.q.shape[0]) if row not in wrong]
    expected = problem.run("triton", **more)
    assert_decode_close(expected, problem.with_options(**more))
    assert torch.equal(found.out[others], expected.out[others])
    assert torch.equal(found.lse[others], expected.lse[others])


@pytest.mark.parametrize("value", [-1, -2, -(2**31), "blocks", 2**31 - 1])
@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("how", [{}, {"split_size": 16}, {"max_splits": 1}], ids=str)
def test_an_entry_outside_the_pool_makes_its_sequence_nan_and_is_named(how, slot, value):
    problem = made([20, 40, -1, 33], tokens=2, block_size=BLOCK, split_size=how.get("split_size"), sinks=True)
    problem = problem.with_options(**{"split_size": None, "max_splits": None} | how)
    blocks = problem.k.shape[0]
    table = problem.table.clone()
    table[1, slot] = blocks if value == "blocks" else value
    said = f"block_table[1, {slot}] is {int(table[1, slot])}, outside the pool"
    assert_only(problem, replace(problem, table=table), [1], said)


@pytest.mark.parametrize("storage", STORAGES)
def test_faults_in_pools_of_every_storage(storage):
    problem = made([20, 40], tokens=2, block_size=BLOCK, storage=storage)
    table = problem.table.clone()
    table[0, 1] = 9999
    assert_only(problem, replace(problem, table=table), [0], "block_table[0, 1] is 9999")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size", [None, BLOCK])
@pytest.mark.parametrize("past", [48, 49, 1000, 2**31 - 1])
def test_a_position_past_the_cache_in_a_device_tensor(past, block_size, dtype):
    problem = made([20, 40], tokens=2, capacity=48, block_size=block_size)
    cur_pos = torch.tensor([past, 40], dtype=dtype, device="cuda")
    said = f"cur_pos[0] is {past}, beyond the cache"
    assert_only(problem, problem.with_options(cur_pos=cur_pos), [0], said)


def test_a_list_is_checked_at_once():
    problem = made([20, 40], block_size=BLOCK)
    with pytest.raises(ValueError, match=re.escape("cur_pos[1] is 48")):
        problem.run("triton", cur_pos=[20, 48])


def test_a_later_call_reports_too():
    """A server that never asks hears of it all the same, from one of the next calls."""
    problem = made([20, 40], block_size=BLOCK)
    table = problem.table.clone()
    table[1, 0] = -1
    replace(problem, table=table).run("triton")
    torch.cuda.synchronize()

    def serve() -> None:
        for _ in range(100):
            problem.run("triton")
            torch.cuda.synchronize()

    with pytest.raises(ValueError, match=re.escape("block_table[1, 0] is -1")):
        serve()
    check_backend(problem, "triton")


def test_entries_that_are_not_read_are_no_fault():
    """The factory puts garbage into them: past the end, behind a window, of skipped sequences."""
    for how in ({}, {"window": 5}, {"split_size": 16}):
        check_backend(made([20, 40, -1, 90], tokens=3, block_size=BLOCK, capacity=160, **how), "triton")
        attnmesh.decode.check_decode_errors()


def test_cur_pos_is_never_read_on_the_host():
    """Nothing waits for the device: a call is made while the device is busy."""
    problem = made([20, 40], block_size=BLOCK)
    problem.run("triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.run("triton")
        problem.run("triton", split_size=16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Graphs.


def overwrite(old: Stored, new: Stored) -> None:
    for x, y in zip(*([c.values, c.scales] if isinstance(c, Quantized) else [c] for c in (old, new)), strict=True):
        if x.itemsize == 1:
            x, y = x.view(torch.uint8), y.view(torch.uint8)
        x.copy_(y)


CAPTURED = {
    "block_size": [BLOCK, None],
    "storage": ["plain", "int8", "fp8 heads"],
    "tokens": [1, 4],
    "how": ["", "split_size", "max_splits", "window"],
}
HOW = {"": {}, "split_size": {"split_size": 32}, "max_splits": {"max_splits": 4}, "window": {"window": 20}}
CAPTURED_PAIRS = [tuple(case.values()) for case in covering_rows(CAPTURED)]


@pytest.mark.parametrize(tuple(CAPTURED), else_sweep(product(*CAPTURED.values()), lambda *case: case in CAPTURED_PAIRS))
def test_a_captured_step_replays_with_new_positions_tables_and_contents(block_size, storage, tokens, how):
    shape = {"tokens": tokens, "capacity": 320, "block_size": block_size, "storage": storage, "sinks": True, **HOW[how]}
    # One pool size for all steps: the last sequence uses up what the others leave.
    steps = [[3, 17, 40], [310, 0, 5], [-1, 100, 250], [60, 60, 60]]
    drawings = [made(step, seed=2 * seed, **shape) for seed, step in enumerate(steps)]
    held = made([319, 319, 319], seed=8, **shape)  # the largest: the memory that is captured
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        held.run("triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = held.run("triton")
    for problem in drawings:
        held.q.copy_(problem.q)
        held.options["cur_pos"].copy_(problem.options["cur_pos"])
        held.options["sinks"].copy_(problem.options["sinks"])
        if block_size:
            held.table.copy_(problem.table)
            blocks = (problem.k if storage == "plain" else problem.k.values).shape[0]
            for old, new in ((held.k, problem.k), (held.v, problem.v)):
                overwrite(first_blocks(old, blocks), new)
        else:
            overwrite(held.k, problem.k)
            overwrite(held.v, problem.v)
        graph.replay()
        torch.cuda.synchronize()
        assert_decode_close(attnmesh.State(out, lse), problem)
        if how == "split_size":  # and to the bit what a call by itself gives
            expected = problem.run("triton")
            assert torch.equal(out, expected.out)
            assert torch.equal(lse, expected.lse)


def first_blocks(stored: Stored, blocks: int) -> Stored:
    if isinstance(stored, Quantized):
        return Quantized(stored.values[:blocks], stored.scales if stored.storage == "fp8" else stored.scales[:blocks])
    return stored[:blocks]


def test_a_captured_step_reports_faults():
    problem = made([20, 40], block_size=BLOCK)
    problem.run("triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = problem.run("triton")
    right = problem.table.clone()
    problem.table[1, 2] = -9
    graph.replay()
    with pytest.raises(ValueError, match=re.escape("block_table[1, 2] is -9")):
        attnmesh.decode.check_decode_errors()
    assert out[1].isnan().all()
    problem.table.copy_(right)
    graph.replay()
    attnmesh.decode.check_decode_errors()
    assert_decode_close(attnmesh.State(out, lse), problem)


# Real sizes.


def is_of_its_own(how: dict, tokens: int, dtype: torch.dtype) -> bool:
    """Whether no other case has the same kernel and tiles: float32 has tiles of its own, fp16 those of bf16."""
    if dtype == torch.float32:
        return (tokens, how) in ((1, LAYOUTS[1]), (8, LAYOUTS[1]), (4, LAYOUTS[2]))
    return dtype == torch.bfloat16 or (tokens, how) == (8, LAYOUTS[1])


LAYOUTS = [{}, {"block_size": 64}, {"block_size": 16, "split_size": 512}, {"window": 1000}]


@pytest.mark.parametrize(
    ("how", "tokens", "dtype"), else_sweep(product(LAYOUTS, [1, 4, 8], DTYPES), is_of_its_own), ids=str
)
def test_long_caches(how, tokens, dtype):
    positions = [9000, 0, 4095, 4096, -1, 777]
    check_backend(made(positions, tokens=tokens, group=4, kv_heads=4, dims=(128, 128), dtype=dtype, **how), "triton")


SHAPES = [(8, 2, (128, 128)), (16, 1, (576, 512)), (64, 1, (64, 64)), (1, 8, (256, 256))]


@pytest.mark.parametrize(
    ("shape", "block_size", "storage"),
    else_sweep(  # every two values together: a shape and a storage with blocks, the next of them without
        product(SHAPES, [None, 64], STORAGES),
        lambda shape, block_size, storage: (
            (SHAPES.index(shape) + STORAGES.index(storage)) % 2 == (0 if block_size else 1)
        ),
    ),
)
def test_long_caches_of_every_storage_and_shape(shape, block_size, storage):
    group, kv_heads, dims = shape
    how = {"group": group, "kv_heads": kv_heads, "dims": dims, "v_in_k": dims[0] == 576}
    check_backend(made([3000, 1023, 1024], tokens=2, storage=storage, block_size=block_size, **how), "triton")


@pytest.mark.parametrize(
    ("tokens", "block_size"),
    else_sweep(
        product([1, 4], [None, BLOCK]), lambda tokens, block_size: (tokens, block_size) in ((1, BLOCK), (4, None))
    ),
)
def test_bits_at_real_sizes(tokens, block_size):
    """One sequence among 1, 8 and 64, with splits of a fixed size."""
    lengths = [5000, *range(10, 6300, 100)]
    problem = made(lengths, tokens=tokens, dims=(128, 128), block_size=block_size, split_size=512)
    alone = None
    for count in (1, 8, 64):
        part = replace(problem, q=problem.q[:count]).with_options(cur_pos=problem.options["cur_pos"][:count])
        if block_size:
            part = replace(part, table=problem.table[:count])
        else:
            part = replace(part, k=problem.k[:count], v=problem.v[:count])
        found = part.run("triton")
        alone = found if alone is None else alone
        assert torch.equal(found.out[0], alone.out[0])
        assert torch.equal(found.lse[0], alone.lse[0])


@pytest.mark.gpu_memory(gib=24)
def test_a_pool_of_more_than_two_gigabytes():
    """Offsets into it do not fit 32 bits: the blocks in use are its last ones."""
    small = made([40, 17], block_size=BLOCK, kv_heads=8, dims=(128, 128))
    blocks = small.k.shape[0]
    many = 2**31 // (BLOCK * 8 * 128) + 1000
    k, v = (torch.full((many, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device) for x in (small.k, small.v))
    k[-blocks:], v[-blocks:] = small.k, small.v
    live = (small.table >= 0) & (small.table < blocks)
    table = torch.where(live, small.table.clamp(0, blocks) + many - blocks, -1).int()
    check_backend(replace(small, k=k, v=v, table=table), "triton")


@pytest.mark.gpu_memory(gib=24)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_caches_whose_strides_are_more_than_two_gigabytes(dim):
    """The last sequence, head or key lies beyond what 32 bits reach."""
    problem = made([40, 17], kv_heads=2, dims=(64, 64))

    def far(x: torch.Tensor) -> torch.Tensor:
        stride = list(x.contiguous().stride())
        stride[dim] = 2**31 // (x.shape[dim] - 1) + 64
        size = 1 + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
        room = torch.full((size,), torch.nan, dtype=x.dtype, device=x.device)
        return room.as_strided(x.shape, stride).copy_(x)

    check_backend(replace(problem, k=far(problem.k), v=far(problem.v)), "triton")


def test_backends_are_chosen_by_device():
    problem = made([20, 40], block_size=BLOCK)
    with pytest.raises(ValueError, match="computes on the CPU"):
        problem.run("cpu")
    auto, triton = problem.run("auto"), problem.run("triton")
    assert torch.equal(auto.out, triton.out)
    check_backend(problem, "reference")


@pytest.mark.parametrize("block_size", [None, BLOCK])
@pytest.mark.parametrize("positions", [[70_000], [40_000, 1_000], [9_000] * 5])
def test_one_kv_head_alone_on_the_chip(positions, block_size):
    """As a rank of many holds it: every share of the keys is a piece of the same few heads."""
    problem = made(positions, group=8, kv_heads=1, dims=(64, 64), block_size=block_size, sinks=True)
    check_backend(problem, "triton")
    check_backend(problem.with_options(max_splits=100), "triton")
