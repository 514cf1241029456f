"""`BlockCache` with windows: what layers with a window keep, free and reuse, in blocks of their own."""

from collections import Counter
from itertools import product

import pytest
import torch
from position_shards_model import OPERATIONS, drive

from attnmesh import BlockCache
from attnmesh.core.ranges import InterleavedShard
from attnmesh.decode import CacheFull
from attnmesh.generation.models import BLOCK_SIZE, CacheBlocks
from attnmesh.kv_cache import block_manager
from attnmesh.kv_cache.block_manager import BlockCopies, BlockLayout, BlockManager, LayerKind, max_window_blocks
from helpers.caches import cache_sizes
from helpers.cases import in_turn, sweep

WINDOW = 4
SHARDS = [(1, 1, 2), (2, 1, 2), (2, 4, 2), (3, 4, 4), (3, 1, 1), (2, 8, 1)]  # ranks, interleave, block_size


@pytest.fixture(autouse=True)
def margin(monkeypatch):
    """A margin as small as the other sizes here."""
    monkeypatch.setattr(block_manager, "WINDOW_MARGIN", 3)


# Random operations.


@pytest.mark.parametrize("tight", [False, sweep(True)])
def test_ranks_in_lockstep_hold_their_windows(tight):
    done = Counter()
    for shard in SHARDS:
        done.update(drive(*shard, steps=40, seed=tight, window=WINDOW, tight=tight).done)
    assert min(done[name] for name in ("found", "full", "copied", "refused", *OPERATIONS)) >= 1, done


@pytest.mark.sweep
@pytest.mark.parametrize(("shard", "window", "tight"), in_turn(SHARDS, (1, 3, 9), (False, False, False, True)))
def test_windows_for_longer(shard, window, tight):
    drive(*shard, steps=1500, seed=1, window=window, tight=tight)


def free_early(monkeypatch):
    """What the next token attends to first is freed."""
    real = LayerKind.first_kept
    monkeypatch.setattr(LayerKind, "first_kept", lambda self, layout, length: real(self, layout, length + 6))


def never_free(monkeypatch):
    """What a window has passed stays."""
    monkeypatch.setattr(LayerKind, "first_kept", lambda *_: 0)


def reuse_without_window(monkeypatch):
    """A prefix is reused whether or not its window is there."""
    monkeypatch.setattr(
        LayerKind,
        "first_needed",
        lambda self, layout, length: 0 if self.window is None else layout.num_full_blocks(length),
    )
    monkeypatch.setattr(BlockManager, "check_truncate", lambda *_: None)


def truncate_anywhere(monkeypatch):
    """A sequence is truncated to where its window is gone."""
    monkeypatch.setattr(BlockManager, "check_truncate", lambda *_: None)


def copy_the_first_kind(monkeypatch):
    """Of two kinds of layers, only the blocks of the first are copied."""
    real = BlockManager.append
    monkeypatch.setattr(BlockManager, "append", lambda *args: [real(*args)[0], BlockCopies([], [])])


def write_to_the_first_kind(monkeypatch):
    """Layers with a window are written to the slots of the others."""
    monkeypatch.setattr(BlockCache, "slots_of", lambda self, new, layer: new.slots)


FAULTS = [
    free_early, never_free, reuse_without_window, truncate_anywhere, copy_the_first_kind, write_to_the_first_kind,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
        drive(2, 4, 2, steps=2000, window=WINDOW)


# Operation by operation.


def make(**more) -> BlockCache:
    sizes = {
        "layers": 2, "num_blocks": 30, "block_size": 2, "kv_heads": 1, "head_dim": 1, "storage": "fp32",
        "device": "cpu", "max_sequences": 3, "max_length": 60, "windows": (None, WINDOW), "window_blocks": 30,
    }  # fmt: skip
    return BlockCache(**cache_sizes(**sizes | more))


def fill(cache, sequence, ids):
    """Append tokens whose keys are their ids."""
    new = cache.append([sequence], [list(ids)])
    k = torch.tensor(list(ids), dtype=torch.float32)[None, None, :, None]
    for layer in (0, 1):
        cache.write(layer, new, k, -k)


def window_of(cache, sequence) -> dict[int, float]:
    """The keys of the layer with a window, by position."""
    pool, found = cache.keys(1)[..., 0, 0], {}
    for at in range(sequence.length):
        block = sequence.window_blocks[at // 2]
        if block >= 0:
            assert block == cache.block_tables[1, sequence.row, at // 2]
            found[at] = pool[block, at % 2].item()
    return found


def test_a_chunk_is_stored_where_the_next_tokens_attend_to_it():
    cache = make()
    a = cache.allocate(list(range(20)))
    fill(cache, a, range(10))
    assert window_of(cache, a) == {at: at for at in range(4, 10)}  # 10 + 1 - 4 - 3, from the start of its block
    fill(cache, a, range(10, 20))
    assert window_of(cache, a) == {at: at for at in range(14, 20)}
    fill(cache, a, [20])
    assert window_of(cache, a) == {at: at for at in range(14, 21)}
    fill(cache, a, [21])
    assert window_of(cache, a) == {at: at for at in range(16, 22)}


def test_a_prompt_reuses_what_both_kinds_of_layers_have():
    cache, prompt = make(), list(range(20))
    fill(cache, cache.allocate(prompt), prompt)
    again = cache.allocate([*prompt, 20])
    assert again.cached == 20
    assert window_of(cache, again) == {at: at for at in range(16, 20)}
    assert cache.find_prefix(prompt[:19]) == 18
    assert cache.find_prefix(prompt[:17]) == 0  # needs 13: no window has it
    fill(cache, again, [20])
    assert window_of(cache, again) == {at: at for at in range(16, 21)}


def test_what_a_window_has_passed_is_reused_until_it_is_evicted():
    cache, prompt = make(window_blocks=8), list(range(20))
    a = cache.allocate(prompt)
    for at in range(0, 20, 4):
        fill(cache, a, prompt[at : at + 4])
    assert [cache.find_prefix(prompt[:count]) for count in (7, 9, 13, 17, 21)] == [0, 8, 12, 16, 18]
    b = cache.allocate(prompt[:13])
    assert (b.cached, window_of(cache, b)) == (12, {at: at for at in range(8, 12)})
    cache.free(b)
    c = cache.allocate(5)
    fill(cache, c, range(50, 55))  # evicts what was passed or reused longest ago
    assert [cache.find_prefix(prompt[:count]) for count in (9, 13, 17, 21)] == [0, 12, 12, 18]
    cache.forget_cached()
    assert cache.find_prefix(prompt) == 18  # of a living sequence


def test_room_for_windows_is_looked_for_before_anything_changes():
    cache = make(window_blocks=5)
    a, b = cache.allocate(10), cache.allocate(10)
    fill(cache, a, range(10))
    before = cache.stats(), list(a.blocks), list(b.blocks), cache.block_tables.tolist()
    with pytest.raises(CacheFull, match="3 more blocks needed, 2 are free and 0 can be evicted of window_blocks=5"):
        cache.append([b], 10)
    assert before == (cache.stats(), list(a.blocks), list(b.blocks), cache.block_tables.tolist())
    fill(cache, b, range(3))
    assert window_of(cache, b) == {at: at for at in range(3)}


def test_forks_copy_in_both_kinds_of_layers():
    cache = make()
    a = cache.allocate(list(range(13)))
    fill(cache, a, range(13))
    b = cache.fork(a)
    assert a.window_blocks == b.window_blocks
    fill(cache, b, [77])
    fill(cache, a, [88])
    assert window_of(cache, a) == {**{at: at for at in range(8, 13)}, 13: 88}
    assert window_of(cache, b) == {**{at: at for at in range(8, 13)}, 13: 77}
    assert a.window_blocks[:-1] == b.window_blocks[:-1]
    for step in range(12):  # one passes what the other keeps
        fill(cache, a, [100 + step])
    assert window_of(cache, b) == {**{at: at for at in range(8, 13)}, 13: 77}
    cache.free(b)
    assert [block >= 0 for block in a.window_blocks] == [False] * 10 + [True] * 3
    pool = cache._manager._kinds[1].pool
    assert len(pool.cached_blocks) + len(pool.free_blocks) == 30 - 3


def test_truncation_reaches_back_as_far_as_the_margin():
    cache = make()
    a = cache.allocate(20)
    fill(cache, a, range(20))
    before = cache.stats(), a.length, list(a.window_blocks), cache.block_tables.tolist()
    with pytest.raises(ValueError, match="length must be 0, or at most 3 tokens less for layers with a window, got 15"):
        cache.truncate(a, 15)
    assert before == (cache.stats(), a.length, list(a.window_blocks), cache.block_tables.tolist())
    cache.truncate(a, 17)
    fill(cache, a, [1, 2])
    assert window_of(cache, a) == {14: 14, 15: 15, 16: 16, 17: 1, 18: 2}
    cache.truncate(a, 0)
    for at in range(0, 30, 5):  # from the first block on again: what a window passes is freed
        fill(cache, a, range(at, at + 5))
    assert window_of(cache, a) == {at: at for at in range(24, 30)}
    assert sum(block >= 0 for block in a.window_blocks) == 3


def test_no_prompt_reuses_what_is_forgotten():
    cache, prompt = make(), list(range(20))
    bad = cache.allocate(prompt)
    for at in range(0, 20, 4):
        fill(cache, bad, prompt[at : at + 4])
    cache.free(bad, forget=True)
    assert (cache.find_prefix(prompt), cache.stats().cached) == (0, 0)
    fill(cache, cache.allocate(prompt), prompt)
    assert cache.find_prefix(prompt[:13]) == 0  # the window there was of the forgotten sequence
    assert cache.find_prefix(prompt) == 18


def test_a_forgotten_sequence_leaves_others_as_they_are():
    cache, prompt = make(windows=(), window_blocks=0), list(range(11))
    a = cache.allocate(prompt)
    fill(cache, a, prompt)
    b = cache.fork(a)
    cache.free(a, forget=True)
    assert cache.find_prefix(prompt) == 0
    fill(cache, b, [11])
    table = cache.block_table[b.row, :6].long()
    assert cache.keys(0)[table].flatten().tolist() == list(range(12))
    cache.free(b)
    assert cache.stats().used == 0
    cache._pool.check_invariants([])


def test_cached_blocks_are_forgotten_and_used_ones_are_not():
    cache, prompt = make(num_blocks=10), list(range(8))
    a, b = cache.allocate(prompt), cache.allocate([9, *prompt])
    fill(cache, a, prompt)
    fill(cache, b, [9, *prompt])
    cache.free(a)
    assert (cache.stats().cached, cache.stats().free) == (4, 1)
    cache.forget_cached()
    assert (cache.stats().cached, cache.stats().free, cache.stats().evictions) == (0, 5, 0)
    assert (cache.find_prefix(prompt), cache.find_prefix([9, *prompt])) == (0, 8)
    for kind, blocks in zip(cache._manager._kinds, (b.blocks, b.window_blocks), strict=True):
        kind.pool.check_invariants([[block for block in blocks if block >= 0]])


def test_check_allocate_leaves_blocks_to_spare():
    cache, prompt = make(num_blocks=10), list(range(9))
    cache.check_allocate(prompt, spare=5)
    with pytest.raises(CacheFull, match="11 more blocks needed, 10 are free"):
        cache.check_allocate(prompt, spare=6)
    fill(cache, a := cache.allocate(prompt), prompt)
    cache.check_allocate(prompt, spare=4)  # 1 more, for 4 are reused
    with pytest.raises(CacheFull, match="6 more blocks needed, 5 are free and 0 can be evicted"):
        cache.check_allocate(prompt, spare=5)
    cache.free(a)  # the 4 are cached, and cannot be evicted for themselves
    cache.check_allocate(prompt, spare=5)
    with pytest.raises(CacheFull, match="7 more blocks needed, 6 are free and 0 can be evicted"):
        cache.check_allocate(prompt, spare=6)
    assert (cache.stats().used, cache.stats().lookups) == (0, 9)
    for _ in range(3):
        cache.allocate(1)
    with pytest.raises(CacheFull, match="all of max_sequences=3 are in use"):
        cache.check_allocate([])


@pytest.mark.parametrize(("ranks", "interleave", "block_size"), SHARDS)
def test_reusable_is_what_a_later_prompt_reuses(ranks, interleave, block_size):
    shard = InterleavedShard(ranks, 0, interleave)
    cache = make(shard=shard, block_size=block_size, windows=(), window_blocks=0, device="meta", num_blocks=60)
    prompt = list(range(60))
    cache.mark_written(cache.append([cache.allocate(prompt)], 60))
    for common in range(0, 60, 5):
        assert cache.find_prefix([*prompt[:common], -1]) == cache.reusable(common)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"windows": (4,)}, r"windows must have a window or None for each of 2 layers, got \(4,\)"),
        ({"windows": 4}, "windows must have a window or None for each of 2 layers, got 4"),
        ({"windows": (None, 0)}, r"windows\[1\] must be an integer >= 1, got 0"),
        ({"window_blocks": 0}, "window_blocks must be an integer >= 1, got 0"),
        (
            {"latent": True, "index_dim": 4},
            r"windows must be None in every layer of a cache with index_dim, got \(None, 4\)",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        make(**wrong)


def test_the_widest_window_counts():
    cache = make(layers=4, windows=[2, None, 7, None], window_blocks=5)
    assert (cache.window, cache.num_windowed, [cache.pools[layer].kind for layer in range(4)]) == (7, 2, [1, 0, 1, 0])
    assert [len(cache.keys(layer)) for layer in range(4)] == [5, 30, 5, 30]
    new = cache.append([cache.allocate(3)], 3)
    assert [cache.slots_of(new, layer) is new.window_slots for layer in range(4)] == [True, False, True, False]
    none = make(windows=(None, None), window_blocks=0)
    assert (none.window, none.num_windowed, len(none.block_tables)) == (None, 0, 1)


# Sizes.


@pytest.mark.parametrize(("ranks", "interleave", "block_size"), [(2, 32, 4), *SHARDS, (4, 3, 1), (3, 16, 2)])
def test_no_pass_needs_more_window_blocks_than_it_has(ranks, interleave, block_size):
    layout = BlockLayout(InterleavedShard(ranks, 0, interleave), block_size)
    for window, tokens in product((1, 5, 17), (1, 7, 100)):
        kind, most = LayerKind(1, None, window), max_window_blocks(layout, window, tokens)
        for length in range(100):
            end = kind.first_kept(layout, length + tokens)
            before = set(range(kind.first_kept(layout, length), layout.num_blocks(length)))
            after = {at for at in layout.touched(length, length + tokens) if at >= end}
            assert len(before | after) <= most


@pytest.mark.parametrize(("ranks", "interleave"), [(3, 256), (2, 1), (1, 1)])
def test_generation_gives_windows_blocks_enough(ranks, interleave, monkeypatch):
    monkeypatch.undo()  # the real margin
    shard, sequences, tokens, chunk = InterleavedShard(ranks, 0, interleave), 2, 16_000, 700
    blocks = CacheBlocks((None, 300), shard, tokens, sequences, chunk)
    assert 0 < blocks.windowed < blocks.full
    cache = make(
        num_blocks=2 * blocks.full, block_size=BLOCK_SIZE, window_blocks=blocks.windowed, max_sequences=sequences,
        max_length=tokens, shard=shard, device="meta",
    )  # fmt: skip
    both = [cache.allocate(tokens) for _ in range(sequences)]
    most = max_window_blocks(cache.layout, 300, chunk)
    for count in [chunk] * 5 + [1] * 70 + [33] * 9 + [chunk, 8, 8, 1] * 12:
        cache.mark_written(cache.append(both, count))
        if count == 8:
            cache.truncate(both[0], both[0].length - 8)
        assert all(sum(block >= 0 for block in each.window_blocks) <= most for each in both)
