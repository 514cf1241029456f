"""With `split_size` a sequence's bits depend on the sequence alone: not on who else is in the batch, or where."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.storage import Quantized, Stored
from attnmesh.testing.decode import DecodeProblem
from helpers.cases import sweep
from helpers.decode import BACKENDS, check_backend, interpreted, problem_for

ON_EACH = pytest.mark.parametrize("backend", BACKENDS)
LENGTHS = [37, 5, 70, 16]
# What one sequence may find itself among: the order of the batch, -1 for a sequence that is skipped.
BATCHES = ([0], [0, 1], [1, 0], [2, 0], [0, -1], [3, 2, 1, 0], [0, 2, 2, 3, 1], [-1, -1, 0], [0, 0])


def only(stored: Stored, rows: list[int]) -> Stored:
    """Some sequences of a cache."""
    if isinstance(stored, Tensor):
        return stored[rows]
    bits = stored.values.view(torch.uint8)[rows].view(stored.values.dtype)
    return Quantized(bits, stored.scales if stored.storage == "fp8" else stored.scales[rows])


def batch_of(problem: DecodeProblem, order: list[int]) -> DecodeProblem:
    """The sequences of `problem` in that order, again and again if it says so."""
    rows = [max(row, 0) for row in order]
    options = dict(problem.options)
    options["cur_pos"] = [problem.options["cur_pos"][row] if row >= 0 else -1 for row in order]
    for name in ("mask", "tree"):
        if name in options and options[name].shape[0] == problem.q.shape[0] > 1:
            options[name] = options[name][rows]
    if "key_range" in options:
        options["key_range"] = tuple(x[rows] for x in options["key_range"])
    clear = tuple(x[rows] for x in problem.valid)
    if problem.table is None:
        caches = {"k": only(problem.k, rows), "v": only(problem.v, rows), "table": None}
    else:
        caches = {"table": problem.table[rows]}
    return replace(problem, q=problem.q[rows], options=options, valid=clear, **caches)


def assert_same(found: State, row: int, alone: State, what: object) -> None:
    assert torch.equal(found.out[row], alone.out[0]), f"out differs: {what}"
    assert torch.equal(found.lse[row], alone.lse[0]), f"lse differs: {what}"


def assert_bits_stay(problem: DecodeProblem, backend: str, batches: tuple[list[int], ...] = BATCHES) -> None:
    """Sequence 0 has one answer in every batch, which is right."""
    alone = check_backend(batch_of(problem, [0]), backend)
    assert alone.out.any()
    for order in batches:
        found = check_backend(batch_of(problem, order), backend)
        for row, sequence in enumerate(order):
            if sequence == 0:
                assert_same(found, row, alone, order)


@pytest.mark.parametrize(
    ("split_size", "block_size", "tokens", "backend"),
    [
        (16, None, 1, "cpu"),
        sweep(16, None, 4, "triton"),
        sweep(16, 16, 1, "triton"),
        sweep(24, None, 4, "cpu"),
        sweep(24, 16, 1, "cpu"),
        (24, 16, 4, "triton"),
    ],
)
def test_in_any_batch(split_size, block_size, tokens, backend):
    how = {"tokens": tokens, "block_size": block_size, "split_size": split_size}
    batches = BATCHES[1:6] if interpreted(backend) else BATCHES
    if interpreted(backend) and split_size == 24:
        batches = ([2, 0],)
    assert_bits_stay(problem_for(backend, LENGTHS, dims=(32, 16), **how), backend, batches)


@pytest.mark.parametrize(
    ("dtype", "storage", "backend"),
    [
        (torch.float32, "plain", "cpu"),
        sweep(torch.float32, "int8", "triton"),
        sweep(torch.float16, "fp8", "triton"),
        sweep(torch.float16, "bfp8", "cpu"),
        sweep(torch.bfloat16, "plain", "triton"),
        sweep(torch.bfloat16, "fp8 heads", "cpu"),
    ],
)
def test_of_any_storage(dtype, storage, backend):
    if interpreted(backend) and dtype == torch.bfloat16:
        pytest.skip("the interpreter's bfloat16 products are wrong")
    for block_size in (None, 16):
        problem = problem_for(
            backend, LENGTHS, tokens=2, block_size=block_size, storage=storage, dtype=dtype, split_size=32
        )
        assert_bits_stay(problem, backend, ([2, 0],))


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ({"window": 9}, "cpu"),
        sweep({"sinks": True}, "triton"),
        sweep({"key_range": "trees"}, "triton"),
        sweep({"key_range": "added bt"}, "cpu"),
    ],
    ids=str,
)
def test_under_any_option(how, backend):
    batches = ([3, 0],) if interpreted(backend) else BATCHES
    for block_size in (None, 16)[: 1 if interpreted(backend) and "group" in how else 2]:
        how = how | {"tokens": 3, "block_size": block_size, "split_size": 16, "dims": (16, 16)}
        assert_bits_stay(problem_for(backend, LENGTHS, **how), backend, batches)


@pytest.mark.parametrize(("tokens", "backend"), [(1, "cpu"), sweep(1, "triton"), sweep(4, "cpu"), sweep(4, "triton")])
def test_with_any_capacity_of_a_cache(tokens, backend):
    problem = problem_for(backend, LENGTHS[:2], tokens=tokens, split_size=16, capacity=41)
    expected = check_backend(problem, backend)
    for capacity in (38, 100, 1000):
        k, v = (torch.full((2, x.shape[1], capacity, 32), torch.nan).to(x) for x in (problem.k, problem.v))
        k[:, :, :38], v[:, :, :38] = problem.k[:, :, :38], problem.v[:, :, :38]
        found = replace(problem, k=k, v=v).run(backend)
        assert torch.equal(found.out, expected.out), capacity
        assert torch.equal(found.lse, expected.lse), capacity


@pytest.mark.parametrize(("tokens", "backend"), [(1, "cpu"), sweep(1, "triton"), sweep(4, "cpu"), sweep(4, "triton")])
def test_with_any_width_of_a_table_and_any_blocks(tokens, backend):
    problem = problem_for(backend, LENGTHS[:2], tokens=tokens, split_size=16, block_size=16)
    expected = check_backend(problem, backend)
    for slots in (3, 5, 40):
        table = torch.full((2, slots), -1, dtype=torch.int32, device=problem.q.device)
        table[:, :3] = problem.table
        found = replace(problem, table=table).run(backend)
        assert torch.equal(found.out, expected.out), slots
        assert torch.equal(found.lse, expected.lse), slots
    # The same tokens in other blocks of a larger pool.
    blocks = problem.k.shape[0]
    k, v = (torch.cat([torch.full_like(x, torch.nan), x.flip(0)]) for x in (problem.k, problem.v))
    live = (problem.table >= 0) & (problem.table < blocks)
    table = torch.where(live, 2 * blocks - 1 - problem.table.clamp(0, blocks), -1).int()
    found = replace(problem, k=k, v=v, table=table).run(backend)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize(
    ("block_size", "backend"), [(None, "cpu"), sweep(None, "triton"), sweep(16, "cpu"), sweep(16, "triton")]
)
def test_with_a_shared_cache(block_size, backend):
    """Sequences of one cache, with others and alone."""
    problem = problem_for(backend, [37, 60, 3], tokens=2, split_size=16, share="cache", block_size=block_size)
    together = check_backend(problem, backend)
    for row, last in enumerate([37, 60, 3]):
        alone = replace(problem, q=problem.q[row : row + 1]).with_options(cur_pos=[last])
        assert_same(together, row, check_backend(alone, backend), last)


@pytest.mark.parametrize(("backend"), [("cpu"), sweep("triton")])
def test_with_any_type_of_cur_pos(backend):
    problem = problem_for(backend, LENGTHS[:2], tokens=2, split_size=16, block_size=16)
    expected = check_backend(problem, backend)
    for dtype in (torch.int32, torch.int64):
        cur_pos = torch.tensor(LENGTHS[:2], dtype=dtype, device=problem.q.device)
        found = check_backend(problem, backend, cur_pos=cur_pos)
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.lse, expected.lse)


@pytest.mark.sweep
@ON_EACH
@pytest.mark.parametrize(("block_size", "tokens"), [(None, 4), (16, 1), (64, 8)])
def test_in_many_batches(block_size, tokens, backend):
    if interpreted(backend):
        pytest.skip("minutes in the interpreter")
    generator = torch.Generator().manual_seed(tokens)
    lengths = [1500, *torch.randint(0, 3000, (11,), generator=generator).tolist()]
    problem = problem_for(backend, lengths, tokens=tokens, block_size=block_size, split_size=256, dims=(64, 64))
    batches = []
    for _ in range(8):
        others = torch.randint(-1, 12, (int(torch.randint(0, 16, (), generator=generator)),), generator=generator)
        order = others.tolist()
        order.insert(int(torch.randint(0, len(order) + 1, (), generator=generator)), 0)
        batches.append(order)
    assert_bits_stay(problem, backend, tuple(batches))
