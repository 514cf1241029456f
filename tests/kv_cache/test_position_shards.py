"""`BlockCache` with sharded positions: all ranks in lockstep against whole sequences, and prefix reuse."""

from collections import Counter
from itertools import product

import pytest
import torch
from position_shards_model import OPERATIONS, drive

from attnmesh import BlockCache
from attnmesh.core.ranges import InterleavedShard
from attnmesh.decode import CacheFull
from attnmesh.kv_cache import cache as cache_module
from attnmesh.kv_cache.block_manager import BlockLayout
from attnmesh.kv_cache.pools import DeviceTables, Pools
from helpers.caches import cache_sizes
from helpers.cases import first, in_turn, sweep

RUNS, BLOCK_LENS = (1, 2, 3, 4, 8), (1, 3, 4)


@pytest.mark.parametrize("ranks", first(1, [1, 3, *(sweep(ranks) for ranks in (2, 4))]))
def test_ranks_in_lockstep_hold_whole_sequences(ranks):
    done = Counter()
    for run, block_size in product(RUNS, BLOCK_LENS):
        done.update(drive(ranks, run, block_size, steps=150 // (ranks + 2)).done)
    assert min(done[name] for name in ("found", "full", "copied", *OPERATIONS)) >= 3, done


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "run", "block_size"), in_turn((1, 2, 3, 4), RUNS, BLOCK_LENS))
def test_ranks_in_lockstep_for_longer(ranks, run, block_size):
    drive(ranks, run, block_size, steps=1000, seed=1)


def find_anywhere(monkeypatch):
    """A found prefix may end where some rank has room left in a shared block."""
    monkeypatch.setattr(BlockLayout, "num_resumable", lambda self, blocks: blocks)


def touch_the_last(monkeypatch):
    """Only the block of the last new token is copied or forgotten."""
    real = BlockLayout.touched
    monkeypatch.setattr(BlockLayout, "touched", lambda *args: list(real(*args))[-1:])


def fill_the_first_rank(monkeypatch):
    """A block counts as full when rank 0 has filled it."""
    monkeypatch.setattr(
        BlockLayout, "num_full_blocks", lambda self, length: self.shard.length(length, 0) // self.block_size
    )


def count_own_blocks(monkeypatch):
    """Every rank takes the blocks that it needs for itself."""
    monkeypatch.setattr(
        BlockLayout, "num_blocks", lambda self, length: -(-self.shard.length(length) // self.block_size)
    )


def write_everything(monkeypatch):
    """Ranks write tokens that others hold, too."""
    monkeypatch.setattr(
        BlockLayout,
        "slots",
        lambda self, blocks, begin, end: [
            blocks[i // self.block_size] * self.block_size + i % self.block_size
            for i in (self.shard.index(p) for p in range(begin, end))
        ],
    )


def point_too_far(monkeypatch):
    """The position in the tables is that of the whole sequence."""
    real = DeviceTables.set_length
    monkeypatch.setattr(
        DeviceTables, "set_length", lambda self, row, length: real(self, row, length + 1 if length else 0)
    )


def forget_copy(monkeypatch):
    """A shared block is replaced, but its content does not come along."""
    monkeypatch.setattr(Pools, "copy_blocks", lambda *_: None)


FAULTS = [
    find_anywhere, touch_the_last, fill_the_first_rank, count_own_blocks, write_everything, point_too_far, forget_copy,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
        drive(2, 4, 2, steps=3000)


def make(share=None, **more):
    sizes = {
        "layers": 2, "num_blocks": 40, "block_size": 4, "kv_heads": 2, "head_dim": 8, "storage": "fp32",
        "device": "cpu", "max_sequences": 4, "max_length": 128, "shard": share or InterleavedShard(),
    }  # fmt: skip
    return BlockCache(**cache_sizes(**sizes | more))


def fill(cache, sequence, tokens):
    new = cache.append([sequence], tokens)
    x = torch.zeros(new.slots.shape[0], 2, new.slots.shape[1], 8)
    for layer in (0, 1):
        cache.write(layer, new, x, x)


@pytest.mark.parametrize(("ranks", "run", "block_size"), first(8, list(product((1, 2, 3, 4), RUNS, BLOCK_LENS))[::4]))
def test_a_prompt_reuses_the_longest_resumable_prefix(ranks, run, block_size):
    """The longest prefix that lies in full blocks of which no later token needs one, and that leaves a token over."""
    written, share = 100, InterleavedShard(ranks, 0, run)
    cache = make(share, block_size=block_size, device="meta", num_blocks=400, max_length=128)
    prompt = list(range(written))
    sequence = cache.allocate(prompt)
    cache.mark_written(cache.append([sequence], written))
    block = [share.index(position) // block_size for position in range(written + 2 * ranks * run)]
    per_block = Counter(block[:written])
    full = {b for b, tokens in per_block.items() if tokens == ranks * block_size}
    ends = [g for g in range(written + 1) if set(block[:g]) <= full and not set(block[:g]) & set(block[g:])]
    for length in range(1, written + 1, 2):
        wanted = max(g for g in ends if g < length)
        assert cache.find_prefix(prompt[:length]) == wanted
        assert cache.find_prefix([*prompt[:length], -1, -1]) == max(g for g in ends if g <= length)
        assert cache.find_prefix([*prompt[: length - 1], -1]) == wanted  # the last one differs


def test_a_run_of_many_blocks_is_copied_where_it_is_written():
    """A rank fills two blocks before the other begins them: a fork's next token copies the first of them again."""
    cache = make(InterleavedShard(ranks=2, rank=1, interleave=8), num_blocks=8)
    a = cache.allocate(8)
    fill(cache, a, 8)
    assert (len(a.blocks), cache.cur_pos[0].item()) == (2, -1)  # all of it is rank 0's
    b = cache.fork(a)
    new = cache.append([b], 1)
    assert b.blocks[0] != a.blocks[0]
    assert b.blocks[1] == a.blocks[1]
    assert new.slots.tolist() == [[4 * b.blocks[0]]]
    cache.append([a], 8)  # both blocks: the first is its own by now
    assert not set(a.blocks) & set(b.blocks)


def test_the_books_cost_no_tensor(monkeypatch):
    cache = make(InterleavedShard(2, 1), device="meta")
    a = cache.allocate(list(range(9)))
    cache.mark_written(cache.append([a], 9))
    cache.truncate(a, 5)
    cache.mark_written(cache.append([a], 4))
    c = cache.fork(a)
    cache.mark_written(cache.append([a, c], 4))  # all shapes were seen once: from now on they cost nothing
    cache.free(c)
    cache.truncate(a, 9)
    for name in ("tensor", "empty"):
        monkeypatch.setattr(cache_module.torch, name, lambda *_, **__: pytest.fail("a tensor was made"))

    class Nothing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if "__get__" not in function.__name__:  # shapes may be read
                pytest.fail(f"{function.__name__} was called")
            return function(*args, **(kwargs or {}))

    with Nothing():
        b = cache.fork(a)
        new = cache.append([b], 4)
        cache.write(0, new, None, None)
        cache.mark_written(new, 1)
        cache.truncate(b, 3)
        cache.append([a, b], [[1] * 4, [2] * 4])
        cache.truncate(b, 4)  # before it was written
        cache.free(a)
    assert cache.block_table.shape == (4, 16)
    assert cache.block_table.is_meta
    assert (b.length, b.written) == (4, 3)


def test_wrote_is_the_books_of_write():
    prompt = list(range(9))
    cache = make()
    new = cache.append([cache.allocate(prompt)], 9)
    before = cache.keys(0).clone()
    cache.mark_written(new, 1)
    assert cache.find_prefix(prompt) == 0
    with pytest.raises(ValueError, match=r"layer 1 of these tokens is already written, unwritten are \[0\]"):
        cache.mark_written(new, 1)
    cache.mark_written(new)
    assert cache.find_prefix(prompt) == 8
    assert torch.equal(cache.keys(0), before)
    cache.mark_written(new)  # nothing is missing
    with pytest.raises(ValueError, match="layer must be 0 to 1, got 2"):
        cache.mark_written(new, 2)
    with pytest.raises(ValueError, match="new must be what append of this cache returned"):
        make().mark_written(new)


def test_check_append_raises_what_append_would():
    cache = make(num_blocks=4)
    a, b = cache.allocate([1, 2, 3]), cache.allocate(5)
    for error, sequences, tokens, said in [
        (CacheFull, [a], 9, "2 more blocks needed, 1 are free"),
        (ValueError, [a], [[1, 3]], "token 1 of"),
        (ValueError, [a, a], 1, "different ones"),
        (ValueError, [a], 129, "would have 129 tokens"),
        (ValueError, [make().allocate(1)], 1, "belongs to another cache"),
    ]:
        for operation in (cache.check_append, cache.append):
            with pytest.raises(error, match=said):
                operation(sequences, tokens)
    cache.check_append([a, b], 3)
    assert (a.length, b.length, cache.stats().used) == (0, 0, 3)
    cache.append([a, b], 3)
    assert (a.length, b.length) == (3, 3)


def test_a_share_is_asked_for_by_type():
    with pytest.raises(ValueError, match="shard must be InterleavedShard, got 3"):
        make(3)
