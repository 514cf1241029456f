"""`ShardedCache` on all ranks of several shardings: equal block tables, whole sequences, steps at fixed addresses."""

import pytest
import torch
from sharded_model import OPERATIONS, Mesh, arguments

from attnmesh import ShardedCache, quantize
from attnmesh.decode import CacheFull
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.sharded import StepTensors
from attnmesh.ops.storage import STORAGES, dequantize
from attnmesh.plan.decode import DecodeSharding
from helpers.cases import first

SHARDINGS = {
    "one": (DecodeSharding(), {}),
    "heads": (DecodeSharding(tp=4), {}),
    "sequences": (DecodeSharding(kvdp=3), {"num_blocks": 14}),
    "positions": (DecodeSharding(cp=3), {}),
    "runs": (DecodeSharding(cp=2, interleave=4), {"block_size": 2, "num_blocks": 14}),
    "all": (DecodeSharding(tp=2, kvdp=2, cp=2), {"num_blocks": 7}),
    "few": (DecodeSharding(kvdp=4, cp=2, interleave=3), {"batch": 3, "num_blocks": 9}),
}


@pytest.mark.parametrize(
    "name",
    first(
        1,
        [
            pytest.param(name, marks=[pytest.mark.sweep] * (name not in ("positions", "all", "few")))
            for name in SHARDINGS
        ],
    ),
)
def test_ranks_in_lockstep_hold_whole_sequences(name):
    sharding, more = SHARDINGS[name]
    mesh = Mesh(sharding, **more)
    for _ in range(1400 // (sharding.ranks + 2)):
        mesh.step()
    assert min(mesh.done[each] for each in (*OPERATIONS, "found", "full")) >= 5, mesh.done


def forget_the_others(monkeypatch):
    """The caches of other KVDP ranks are not marked as written."""
    real = BlockCache.mark_written
    monkeypatch.setattr(
        BlockCache, "mark_written", lambda self, new, layer=None: None if new.slots.is_meta else real(self, new, layer)
    )


def skip_check(monkeypatch):
    """Caches of KVDP ranks append one after the other, until one of them is full."""
    monkeypatch.setattr(BlockCache, "check_extend", lambda *_: None)


def keep_old_key_range(monkeypatch):
    """What was asked for once is not filled again."""
    real = StepTensors._fill_first
    done = set()

    def fill(self, window):
        if (self, window) not in done:
            done.add((self, window))
            real(self, window)

    monkeypatch.setattr(StepTensors, "_fill_first", fill)


def move_tensors(monkeypatch):
    """Every step has tensors of its own."""
    monkeypatch.setattr(
        ShardedCache, "_tensors_for", lambda self, n: StepTensors(n, self.batch, self.rows, self._local_lengths)
    )


@pytest.mark.parametrize("fault", [forget_the_others, skip_check, keep_old_key_range, move_tensors])
def test_a_planted_fault_is_found(fault, monkeypatch):
    fault(monkeypatch)
    sharding, more = SHARDINGS["all"]
    mesh = Mesh(sharding, **more)

    def drive():
        for _ in range(300):
            mesh.step()

    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
        drive()


# KVDP ranks.


def test_a_prompt_goes_where_most_of_it_is_then_where_most_rows_are_free():
    mesh = Mesh(DecodeSharding(kvdp=2), batch=5, num_blocks=20)  # rows 0 1, rows 2 3 4
    first = mesh.allocate([1] * 10)
    assert first[0].row == 2  # more rows are free there
    mesh.append([first], 10)
    other = mesh.allocate([2] * 10)
    assert other[0].row == 0  # two and two: the first
    mesh.append([other], 10)
    again = [mesh.allocate([1] * 10), mesh.allocate([2] * 10)]
    assert [(each[0].row, each[0].cached) for each in again] == [(3, 9), (1, 9)]
    elsewhere = mesh.allocate([2] * 10)  # the KVDP rank that has it has no free row
    assert (elsewhere[0].row, elsewhere[0].cached) == (4, 0)
    assert mesh.allocate([2] * 10) is None
    mesh.check()
    for cache, taken, forked in zip(mesh.caches, first, again[0], strict=True):
        assert taken.kvdp_rank == forked.kvdp_rank == 1
        with pytest.raises(CacheFull, match="1 more sequences needed, all of batch=5 are in use") as full:
            cache.allocate([2] * 10)
        assert (full.value.resource, full.value.total) == ("sequences", 5)
        with pytest.raises(CacheFull, match=r"all of the 3 rows of KVDP rank 1 \(batch=5\) are in use") as full:
            cache.fork(forked)
        assert (full.value.resource, full.value.total) == ("sequences", 3)
    mesh.check()
    assert "row=3, length=9, cached=9" in repr(again[0][0])
    assert [stats.hits for stats in mesh.caches[1].stats()] == [9, 9]


def test_a_bank_without_room_leaves_a_prompt_to_the_next():
    mesh = Mesh(DecodeSharding(kvdp=2), batch=4, num_blocks=10)
    first = mesh.allocate([1] * 22)
    mesh.append([first], 22)
    found = mesh.allocate([1] * 30)  # 10 blocks, 7 of them found: 3 more would fit, and 2 are left
    assert (found[0].kvdp_rank, found[0].cached) == (1, 0)
    for cache in mesh.caches:
        with pytest.raises(CacheFull, match="7 more blocks needed, 2 are free"):  # from the preferred KVDP rank
            cache.allocate([5] * 21)


def test_a_step_is_on_all_banks_or_on_none():
    mesh = Mesh(DecodeSharding(kvdp=2, cp=2), batch=2, num_blocks=5)
    a, b = mesh.allocate([1] * 12), mesh.allocate([2] * 30)
    assert (a[0].kvdp_rank, b[0].kvdp_rank) == (0, 1)
    mesh.append([b], 30)
    with pytest.raises(ValueError, match=r"Sequence\(row=1, .* would have 31 tokens, max_length is 30"):
        mesh.caches[0].append([a[0], b[0]], 1)
    mesh.check()
    c = Mesh(DecodeSharding(kvdp=2), batch=4, num_blocks=10)
    full = [c.allocate([1] * 15) for _ in range(4)]  # both KVDP ranks: all 10 blocks
    assert c.append(full[:1], 15) is not None
    addresses = [cache.block_table.tolist() for cache in c.caches]
    assert c.append([full[0], full[1]], 1) is None  # the second KVDP rank has reserved blocks, the first has none
    assert c.append([full[1], full[0]], 1) is None
    assert [cache.block_table.tolist() for cache in c.caches] == addresses
    assert c.append([full[1]], 15) is not None
    c.check()


def test_a_batch_smaller_than_its_ranks():
    mesh = Mesh(DecodeSharding(kvdp=3), batch=1)
    assert [list(cache.rows) for cache in mesh.caches] == [[], [], [0]]
    for storage in STORAGES:
        cache = ShardedCache(DecodeSharding(kvdp=3), 0, **arguments(batch=1, storage=storage, head_dim=16))
        step = cache.append([cache.allocate(3)], 3)
        x = torch.zeros(0, 2, 3, 16)
        for layer in range(2):
            cache.write(layer, step, x, x)
        assert (step.positions.tolist(), step.slots.shape, step.cur_pos.shape) == ([[0, 1, 2]], (0, 3), (0,))
        assert [x.shape for x in step.key_range(2)] == [(0, 3)] * 2
        assert cache.block_table.shape == (0, 10)
    one = mesh.allocate([1, 2, 3])
    mesh.append([one], 3)
    mesh.append([one], 1)
    mesh.check()
    assert mesh.allocate([1]) is None


# Steps.


@pytest.fixture
def pair():
    """A cache with two sequences of 4 tokens, all written."""
    cache = ShardedCache(DecodeSharding(cp=2), 0, **arguments())
    a, b = cache.allocate(4), cache.allocate(4)
    cache.mark_written(cache.append([a, b], 4))
    return cache, a, b


NEW = torch.zeros(5, 2, 1, 1)


def test_a_step_serves_until_the_next(pair):
    cache, a, b = pair
    old = cache.append([a], 1)
    cache.write(0, old, NEW, NEW)
    with pytest.raises(ValueError, match=r"layer 0 of this step is already written, unwritten are \[1\]"):
        cache.write(0, old, NEW, NEW)
    cache.check_step(old, 0, written=True)  # it may be read
    with pytest.raises(ValueError, match="layer 1 of this step is not written yet"):
        cache.check_step(old, 1, written=True)
    cache.mark_written(old)
    cache.mark_written(old)  # nothing is missing
    cache.check_step(old, 1, written=True)
    new = cache.append([b], 1)
    for use in (
        lambda: cache.check_step(old, 0, written=True),
        lambda: cache.write(0, old, NEW, NEW),
        lambda: cache.mark_written(old),
        lambda: cache.mark_written(old, 1),
    ):
        with pytest.raises(ValueError, match="step must be the latest of this cache"):
            use()
    cache.check_step(new, 0)


@pytest.mark.parametrize("end", [lambda cache, a: cache.truncate(a, 4), lambda cache, a: cache.free(a)])
def test_a_step_ends_with_one_of_its_sequences(pair, end):
    cache, a, b = pair
    step = cache.append([a, b], 1)
    end(cache, a)
    with pytest.raises(ValueError, match="step must be the latest of this cache"):
        cache.write(0, step, NEW, NEW)


def test_a_step_outlives_what_happens_to_others(pair):
    cache, a, b = pair
    step = cache.append([a], 1)
    cache.truncate(cache.fork(b), 2)
    cache.free(b)
    cache.allocate([1, 2])
    with pytest.raises(ValueError, match="length must be 0 to 5"):
        cache.truncate(a, 6)
    cache.write(1, step, NEW, NEW)


def test_tokens_that_were_never_written_are_not_skipped(pair):
    cache, a, b = pair
    cache.mark_written(cache.append([a, b], 1), 0)
    step = cache.append([b], 1)
    cache.check_step(step, 0)
    cache.mark_written(step, 0)
    for use in (
        lambda: cache.check_step(step, 1),
        lambda: cache.write(1, step, NEW, NEW),
        lambda: cache.mark_written(step, 1),
        lambda: cache.mark_written(step),
    ):
        with pytest.raises(ValueError, match=r"row=1.* has earlier tokens .* layer 1: truncate it to 4 tokens"):
            use()
    assert step.unwritten_layers == {1}
    cache.truncate(b, 4)
    cache.mark_written(cache.append([b], 1))
    with pytest.raises(ValueError, match="truncate it to 4 tokens"):
        cache.mark_written(cache.append([a], 1))


def test_tensors_of_a_step_are_filled_in_and_out_of_inference_mode(pair):
    cache, a, _ = pair
    with torch.inference_mode():
        step = cache.append([a], 2)
        first, end = step.key_range(2)
        cache.mark_written(step)
    new = cache.append([a], 2)
    assert (first[0].tolist(), end[0].tolist()) == ([3, 3], [4, 4])
    assert new.key_range(2)[0] is first
    assert new.key_range(5)[0][0].tolist() == [1, 2]
    cache.mark_written(new)
    with torch.inference_mode():
        cache.append([a], 2)
    assert end[0].tolist() == [5, 5]


@pytest.mark.parametrize("window", [0, -1, 2.5])
def test_a_window_is_a_positive_integer(pair, window):
    cache, a, _ = pair
    with pytest.raises(ValueError, match="window must be a positive integer"):
        cache.append([a], 1).key_range(window)


def test_all_of_a_step_goes_up_at_once(pair, monkeypatch):
    cache, a, b = pair
    uploads, real = [], torch.tensor
    cache.append([a], 1).key_range(3)
    cache.mark_written(cache._current)
    monkeypatch.setattr(torch, "tensor", lambda data, **more: uploads.append(len(data)) or real(data, **more))
    cache.append([a, b], 1)
    assert uploads == [2 * 1 + 2 + 5 + 2]  # a position in the tables, two slots, where rows begin, which rows these are


# What is refused.


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch": 0}, "batch must be a positive integer, got 0"),
        ({"kv_heads": 3}, "tp must divide the kv heads or be a multiple of them, got tp=2, kv_heads=3"),
        ({"kv_heads": 0}, "kv_heads must be a positive integer"),
        ({"layers": 0}, "layers must be a positive integer"),
        ({"num_blocks": 4}, r"num_blocks must be at least 5, .* max_length=30 .* TP2-CP2 .* block_size=3, got 4"),
        ({"block_size": 257}, "block_size must be 1 to 256"),
        ({"storage": "fp4"}, "storage must be one of"),
        ({"storage": "fp8", "k_scale": torch.ones(3)}, r"k_scale must be a number or floating point \[\] or \[2\]"),
        ({"storage": "fp8", "v_scale": torch.ones(2, 1)}, r"v_scale must be a number or floating point \[\] or \[2\]"),
        ({"v_scale": torch.ones(2)}, "v_scale must be None except for storage 'fp8'"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        ShardedCache(DecodeSharding(tp=2, cp=2), 0, **arguments(**wrong))


@pytest.mark.parametrize(
    ("sharding", "rank", "said"),
    [
        (4, 0, "sharding must be DecodeSharding, got 4"),
        (DecodeSharding(cp=2), 2, "rank must be 0 to 1 for CP2, got 2"),
        (DecodeSharding(cp=2), -1, "rank must be 0 to 1"),
        (DecodeSharding(cp=2), "0", "rank must be 0 to 1 for CP2, got '0'"),
        (DecodeSharding(cp=2), True, "rank must be 0 to 1 for CP2, got True"),
    ],
)
def test_a_rank_that_is_not_there_is_refused(sharding, rank, said):
    with pytest.raises(ValueError, match=said):
        ShardedCache(sharding, rank, **arguments())


def test_bad_input_is_named_and_changes_nothing(pair):
    cache, a, b = pair
    step = cache.append([a, b], 1)
    stranger = ShardedCache(DecodeSharding(), 0, **arguments())
    theirs = stranger.allocate(1)
    freed = cache.allocate(1)
    cache.free(freed)
    before = [x.tolist() for x in (cache.block_table, step.positions, step.slots, step.cur_pos)], cache.stats()
    for use, said in [
        (lambda: cache.append([], 1), "at least one sequence"),
        (lambda: cache.append([a, a], 1), "different ones"),
        (lambda: cache.append([a, theirs], 1), "belongs to another cache"),
        (lambda: cache.append([a, freed], 1), "row=2, length=0, cached=0, freed.* was freed"),
        (lambda: cache.append([a], [[1], [2]]), "for each of 1 sequences"),
        (lambda: cache.append([a.row], 1), r"sequences\[0\] must be what allocate or fork returned, got 0"),
        (lambda: cache.fork(a), "not written in every layer"),
        (lambda: cache.fork(freed), "was freed"),
        (lambda: cache.free(theirs), "belongs to another cache"),
        (lambda: cache.truncate(freed, 0), "was freed"),
        (lambda: cache.keys(2), "layer must be 0 to 1"),
        (lambda: cache.check_step(step, 2), "layer must be 0 to 1, got 2"),
        (lambda: cache.check_step(None, 0), "step must be what append returned, got None"),
        (lambda: cache.write(0, step, NEW[:2], NEW), r"k must be \[5, 2, 1, 1\], got \[2, 2, 1, 1\]"),
        (lambda: cache.write(0, step, NEW, NEW.int()), "v must be one of"),
        (lambda: stranger.write(0, step, NEW, NEW), "must be the latest of this cache"),
        (lambda: cache.allocate([1] * 31), "prompt would have 31 tokens"),
        (lambda: cache.allocate([1], cache_key=3), "cache_key must be a string"),
    ]:
        with pytest.raises(ValueError, match=said):
            use()
    after = [x.tolist() for x in (cache.block_table, step.positions, step.slots, step.cur_pos)], cache.stats()
    assert after == before
    cache.write(0, step, NEW, NEW)


# Heads.


def test_scales_and_heads_are_a_ranks_own():
    sharding, scales = DecodeSharding(tp=2, kvdp=2), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for rank, wanted in enumerate([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]):
        cache = ShardedCache(sharding, rank, **arguments(kv_heads=4, storage="fp8", k_scale=scales, v_scale=0.5))
        assert cache.keys(0).scales.tolist() == wanted
        assert cache.values(1).scales.item() == 0.5
        assert cache.keys(0).values.shape == (12, 3, 2, 1)
    replicated = ShardedCache(DecodeSharding(tp=4), 3, **arguments(storage="fp8", k_scale=scales[:2], value_dim=3))
    assert replicated.keys(0).scales.tolist() == [2.0]
    assert replicated.values(0).values.shape == (12, 3, 1, 3)


# Latents and windows.


@pytest.mark.parametrize("storage", ["fp32", "fp8_ds_mla"])
def test_latents_of_a_sharded_cache(storage):
    """Every CP rank has its positions of the latents, whatever TP rank it is; values are not written."""
    sharding, dim = DecodeSharding(tp=2, cp=2, interleave=2), 144
    latents = torch.randn(2, 1, 7, dim, generator=torch.Generator().manual_seed(1))
    wanted = dequantize(quantize(latents.transpose(1, 2), storage), torch.float32)[:, :, 0]
    for rank in range(sharding.ranks):
        cache = ShardedCache(
            sharding, rank, **arguments(batch=2, kv_heads=1, head_dim=dim, value_dim=128, latent=True, storage=storage)
        )
        step = cache.append([cache.allocate(7), cache.allocate(7)], 7)
        with pytest.raises(ValueError, match="v must be None, for this cache does not store it"):
            cache.write(0, step, latents, latents[..., :128])
        for layer in range(2):
            cache.write(layer, step, latents)
        positions = [at for at in range(7) if at // 2 % 2 == sharding.place(rank).cp]
        index = torch.arange(len(positions))
        for row, layer in ((0, 0), (1, 1)):
            stored = dequantize(cache.keys(layer), torch.float32)
            read = stored[cache.block_table[row, index // 3].long(), index % 3, 0]
            assert torch.equal(read, wanted[row, positions])
    with pytest.raises(ValueError, match="a latent cache has one kv head"):
        ShardedCache(DecodeSharding(), 0, **arguments(latent=True))


def test_every_kvdp_rank_has_the_blocks_of_windows():
    """Windows are filled through the caches of the KVDP ranks: a step would have one slot per token."""
    sharding = DecodeSharding(kvdp=2, cp=2)
    caches = [
        ShardedCache(sharding, rank, **arguments(batch=4, windows=(None, 2), window_blocks=9))
        for rank in range(sharding.ranks)
    ]
    for cache in caches:
        own = [cache.allocate(5), cache.allocate(5)]
        assert [each.kvdp_rank for each in own] == [0, 1]
        with pytest.raises(ValueError, match=r"slots in every layer, got .* window of 2 in 1 of 2 layers: append to"):
            cache.append(own, 5)
        assert [each.length for each in own] == [0, 0]
        for each in own:
            local = cache.by_kvdp_rank[each.kvdp_rank]
            local.mark_written(local.append([each], 5))
        cache.truncate(own[0], 4)
        cache.free(own[1])
    assert [cache.sequences[0].window_blocks for cache in caches] == [[0]] * 4
    assert [cache.local.block_tables.shape[0] for cache in caches] == [2] * 4
    assert caches[0].local is caches[0].by_kvdp_rank[0]
    assert caches[0].by_kvdp_rank[1].block_table.is_meta
