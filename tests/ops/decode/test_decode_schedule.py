"""The partitions of the list of units, against brute force: every unit in one of them, none empty, splits counted."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from attnmesh.ops.decode import triton as host  # noqa: E402
from attnmesh.ops.decode.triton import count_partitions, pick_merge_tile, pick_tiles  # noqa: E402
from attnmesh.ops.decode.triton_kernels import partition_units, select, units_before  # noqa: E402
from attnmesh.testing.decode import random_decode  # noqa: E402
from helpers.decode import problem_for  # noqa: E402


@triton.jit
def partitions_kernel(counts, out, partitions, max_splits, N: tl.constexpr):
    index = tl.arange(0, N)
    count = tl.load(counts + index)
    total, partitions = partition_units(count, partitions, max_splits)
    tl.store(out, total)
    tl.store(out + 1, partitions)
    for sequence in range(N):
        # As the merge does it.
        units = select(count, index, sequence)
        begin = units_before(count, index, sequence)
        safe = tl.maximum(total, 1)
        first = ((begin + 1) * partitions - 1) // safe
        tl.store(out + 2 + 2 * sequence, first)
        tl.store(out + 3 + 2 * sequence, ((begin + units) * partitions - 1) // safe - first + 1)


@pytest.mark.parametrize(
    ("counts", "partitions", "max_splits"),
    [
        ([1, 0, 0, 0], 1, None),
        ([0, 0, 7, 0], 5, 2),
        ([64, 0, 0, 0], 33, 3),
        ([5, 1, 0, 30], 1, 7),
        ([9, 9, 9, 9], 5, 64),
        ([0, 100, 3, 1], 33, None),
        ([0, 0, 0, 0], 1, 2),
    ],
)
def test_partitions_and_pieces(counts, partitions, max_splits, device):
    out = torch.zeros(2 + 2 * len(counts), dtype=torch.int64, device=device)
    partitions_kernel[(1,)](
        torch.tensor(counts, dtype=torch.int32, device=device), out, partitions, max_splits, N=len(counts)
    )
    total, cuts, *pieces = out.tolist()
    assert total == sum(counts)
    assert 1 <= cuts <= partitions
    line = [sequence for sequence, count in enumerate(counts) for _ in range(count)]
    parts = [line[s * total // cuts : (s + 1) * total // cuts] for s in range(cuts)]
    assert [unit for part in parts for unit in part] == line
    assert all(parts) or not line
    for sequence, count in enumerate(counts):
        if count:
            holders = [s for s, part in enumerate(parts) if sequence in part]
            assert pieces[2 * sequence] == holders[0]
            assert pieces[2 * sequence + 1] == len(holders) <= (max_splits or partitions)


def test_a_sequence_alone_gets_as_many_splits_as_it_may(device):
    out = torch.zeros(4, dtype=torch.int64, device=device)
    partitions_kernel[(1,)](torch.tensor([2048], dtype=torch.int32, device=device), out, 264, 2, N=1)
    assert out[1] == 2


@pytest.mark.parametrize(
    ("sequences", "heads", "slots", "partitions"),
    [
        (1, 8, 264, 33),
        (16, 8, 264, 32),
        (64, 8, 264, 32),
        (128, 8, 264, 32),
        (8, 1, 396, 392),
        (7, 300, 264, 7),
        (5, 8, 264, 30),
        (40, 8, 264, 33),
    ],
)
def test_equal_sequences_are_not_cut_where_that_fills_the_chip(sequences, heads, slots, partitions):
    assert count_partitions(sequences, heads, slots) == partitions


@pytest.mark.parametrize("pieces", [1, 3, 33, 1000])
def test_the_merge_of_fixed_splits_does_not_know_how_many_there_are(pieces):
    assert pick_merge_tile(pieces, 8, 128, fixed=True) == pick_merge_tile(7, 8, 128, fixed=True)
    tile = pick_merge_tile(pieces, 8, 128, fixed=False)
    assert tile.splits * tile.rows * tile.columns <= 4096


def test_one_long_sequence_has_more_programs_of_the_same_tile(monkeypatch):
    monkeypatch.setattr(host, "multiprocessors", lambda device: 2)
    how = {"dims": (128, 128), "kv_heads": 1, "block_size": 16}
    long = problem_for("triton", [5], capacity=2**14, **how).call()
    short, two = problem_for("triton", [5], capacity=2**13, **how), problem_for("triton", [5, 6], capacity=2**14, **how)
    assert pick_tiles(long)[3:] == (2, 3, 1)
    assert pick_tiles(short.call()) == pick_tiles(two.call()) == pick_tiles(long)._replace(stages=3, resident=2)


def test_a_program_reads_two_heads_whose_rows_fill_one_tile(monkeypatch):
    monkeypatch.setattr(host, "multiprocessors", lambda device: 2)

    def heads(positions=(5, 6), **how):
        how = {"dims": (128, 128), "kv_heads": 2, "group": 4, "block_size": 16, "dtype": torch.float16} | how
        return pick_tiles(random_decode(positions, **how).call()).heads

    two = ({}, {"kv_heads": 4, "group": 1, "tokens": 4}, {"window": 9}, {"group": 2, "share": "cache"},
           {"split_size": 64, "share": "cache"}, {"split_size": 64, "positions": [5], "capacity": 2**14})  # fmt: skip
    assert [heads(**how) for how in two] == [2] * len(two)
    one = (
        {"group": 5}, {"tokens": 2}, {"kv_heads": 1}, {"kv_heads": 3}, {"dims": (128, 64)}, {"dims": (64, 64)},
        {"block_size": None}, {"key_range": "bool h"}, {"storage": "int8"}, {"dtype": torch.float32},
        {"share": "cache"}, {"positions": [5], "capacity": 2**14},
    )  # fmt: skip
    assert [heads(**how) for how in one] == [1] * len(one)
