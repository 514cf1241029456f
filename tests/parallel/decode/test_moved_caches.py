"""`reshard` and cache files with real attention, storage types, prefills and processes; what is refused; memory."""

import pytest
import torch

import attnmesh as am
from attnmesh.ops.storage import STORAGES
from attnmesh.parallel.reshard.contents import CacheTokens
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.reshard import Move, Piece
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, exact_weights, fed_lengths
from helpers.caches import cache_sizes
from helpers.cases import first
from helpers.memory import peak_bytes
from helpers.processes import run_processes

pytestmark = pytest.mark.usefixtures("poisoned_pools")

LENGTHS = (9, 23, 4)
SIZES = {"batch": 3, "layers": 2, "num_blocks": 20, "block_size": 4, "head_dim": 16, "device": "cpu", "max_length": 40}
PAIRS = [
    (DecodeSharding(tp=2, kvdp=2), DecodeSharding(cp=4, interleave=3)),
    (DecodeSharding(cp=2), DecodeSharding(tp=2, kvdp=2)),
]


def filled(sharding, rank, storage="fp32", layers=2, **more):
    """A rank's cache of three sequences with random keys and values, the same under any sharding."""
    sizes = {**SIZES, "kv_heads": 4, "storage": storage, "layers": layers, **more}
    cache = am.ShardedCache(sharding, rank, **cache_sizes(**sizes))
    generator = torch.Generator().manual_seed(7)
    heads = sharding.kv_heads(rank, 4)
    for length in LENGTHS:
        step = cache.append([cache.allocate(length)], length)
        for layer in range(layers):
            k, v = torch.randn(2, 1, 4, length, cache.spec.head_dim, generator=generator)[
                :, :, heads.start : heads.stop
            ]
            cache.write(layer, step, k.expand(len(cache.rows), -1, -1, -1), v.expand(len(cache.rows), -1, -1, -1))
    return cache


def stored(cache):
    """Everything that a rank stores, by sequence: bits [layers, tokens, heads, ...], in the order of positions."""
    if cache is None:
        return None
    tokens, shard = CacheTokens(cache), cache.sharding.position_shard(cache.rank)
    return {
        row: [
            x.numpy()
            for x in tokens.read([Piece(row, row, shard.ranges(one.length))], tokens.heads)
        ]
        for row, one in cache.sequences.items()
        if row in cache.rows and shard.length(one.length)
    }  # fmt: skip


def assert_same(some, others):
    assert some.keys() == others.keys()
    for row, tensors in some.items():
        for x, y in zip(tensors, others[row], strict=True):
            assert x.shape == y.shape
            assert (x == y).all()


def there_and_files(comm, a, b, folder, storage="fp32", **more):
    """What a rank stores after `reshard`, and after `save_cache` and `load_cache`."""
    cache = filled(a, comm.rank, storage, **more) if comm.rank < a.ranks else None
    moved = am.decode.reshard(cache, b, comm, message_bytes=1 << 12)
    again = am.decode.reshard(moved, a, comm) if b.ranks == comm.world else None
    if moved is not None and b.ranks == comm.world:
        am.decode.save_cache(moved, folder, comm)
        assert_same(stored(am.decode.load_cache(folder, b, comm)), stored(moved))
    if again is not None:
        assert_same(stored(again), stored(cache))
    spec = None if moved is None else moved.spec
    return stored(moved), None if spec is None else ((spec.k_scale, spec.v_scale), spec.kv_heads, spec.storage)


# Storage types.


@pytest.mark.parametrize("storage", first(2, STORAGES))
def test_every_storage_type_keeps_its_bits(storage, tmp_path):
    a, b = PAIRS[0]
    scales = {"k_scale": torch.tensor([1.0, 0.5, 0.25, 3.0]), "v_scale": 0.75} if storage == "fp8" else {}

    def program(comm):
        return there_and_files(comm, a, b, tmp_path / "cache", storage, **scales)

    for rank, (found, (kept, *_)) in enumerate(am.run_virtual(4, program)):
        wanted = filled(b, rank, storage, **scales)
        # In other rows, because the KVDP ranks of the first cache chose them: by length.
        assert_same({len(x[0][0]): x for x in found.values()}, {len(x[0][0]): x for x in stored(wanted).values()})
        if scales:
            assert kept[0].tolist() == [1.0, 0.5, 0.25, 3.0]
            assert kept[1] == 0.75


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=str)
def test_processes_do_as_virtual_ranks_do(a, b, tmp_path):
    there = run_processes(4, there_and_files, a, b, tmp_path / "processes", "int8")
    here = am.run_virtual(4, lambda comm: there_and_files(comm, a, b, tmp_path / "virtual", "int8"))
    for (one, _), (other, _) in zip(there, here, strict=True):
        assert_same(one, other)


# Decode goes on.

CONFIG, WEIGHTS = random_block(8, 4, 16, 32)
FEW_BITS, X = exact_weights(WEIGHTS, len(LENGTHS), 30)


def decode(comm, sharding, moves=(), folder=None):
    """The outputs of prompts and 5 steps, after each of the first of which the cache moves to another sharding."""
    runner = BlockRunner(
        shard_block(CONFIG, FEW_BITS, sharding, comm),
        poisoned_cache(shard_block(CONFIG, FEW_BITS, sharding, comm), 3, 30),
        X,
    )
    runner.allocate(*range(3), prompts=[[1] * 9, [2] * 23, [1] * 4])
    for i, length in enumerate(LENGTHS):
        runner.feed_until(i, length)
    for number in range(5):
        if number < len(moves):
            cache = am.decode.reshard(runner.cache, moves[number], comm)
            runner.sequences = {i: cache.sequences[one.row] for i, one in runner.sequences.items()}
            runner.cache, runner.block = cache, shard_block(CONFIG, FEW_BITS, moves[number], comm)
        runner.feed(range(3))
    return runner.outputs


def assert_all_close(out, exact):
    assert fed_lengths(out) == [length + 5 for length in LENGTHS]
    assert_outputs_close(out, exact)


def test_decode_goes_on_as_if_the_cache_had_always_been_there():
    first, *moves = (
        DecodeSharding(cp=4, interleave=2),
        DecodeSharding(tp=2, kvdp=2),
        DecodeSharding(kvdp=2, cp=2),
        DecodeSharding(tp=4),
    )
    exact = reference_block(CONFIG, FEW_BITS, X)
    outputs = am.run_virtual(4, lambda comm: decode(comm, first, moves))
    for out in outputs:
        assert_all_close(out, exact)
    never = am.run_virtual(4, lambda comm: decode(comm, moves[-1]))[0]
    torch.testing.assert_close(outputs[0], never, rtol=1e-5, atol=1e-6, equal_nan=True)


# Prefills.


@pytest.mark.parametrize("layout", [am.Zigzag(), am.Striped(), am.Contiguous()], ids=str)
def test_a_prefill_is_moved_from_its_layout(layout):
    world, length, to = 8, 29, DecodeSharding(tp=2, kvdp=2)
    k = torch.randn(3, 2, 4, length, 16).to(torch.bfloat16)  # layers, batch, heads
    v = torch.randn(3, 2, 4, length, 8).to(torch.bfloat16)
    ids = [[b] * length for b in range(2)]

    def program(comm):
        # As projections leave them: positions before heads in memory.
        kv = [layout.shard(x, 3, world, comm.rank).transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v)]
        prefill = am.decode.PrefillKV(list(kv[0]), list(kv[1]), layout, length, comm.rank, world, ids=ids)
        cache = am.decode.reshard(prefill, to, comm, max_length=40)
        if cache is None:
            return None
        assert cache.local.find_prefix([*ids[cache.rows.start][:20], 7]) == 16  # a block serves later prompts
        return stored(cache), cache.spec.storage, cache.max_length

    results = am.run_virtual(world, program)
    assert results[4:] == [None] * 4
    for rank, (found, storage, max_length) in enumerate(results[:4]):
        assert (storage, max_length) == ("bf16", 40)
        (row,) = to.sequences(rank, 2)
        heads = to.kv_heads(rank, 4)
        for x, whole in zip(found[row], (k, v), strict=True):
            wanted = whole[:, row, heads.start : heads.stop].transpose(1, 2).contiguous().view(torch.int16)
            assert (torch.from_numpy(x) == wanted).all()


# Other ranks.


def test_ranks_that_decode_are_other_ranks_than_those_that_prefill():
    a, b = DecodeSharding(cp=2), DecodeSharding(tp=2)

    def program(comm):
        cache = filled(a, 1 - comm.rank) if comm.rank < 2 else None  # in another order
        return stored(am.decode.reshard(cache, b, comm, ranks=[3, 2]))

    found = am.run_virtual(4, program)
    assert found[:2] == [None, None]
    for rank in range(2):
        assert_same(found[3 - rank], stored(filled(b, rank)))


# What is refused, on every rank; the cache does not change.


def pending(cache, comm):
    cache.append([cache.sequences[1]], 1)


def other_operations(cache, comm):
    if comm.rank == 1:
        cache.free(cache.sequences[0])


REFUSED = [
    (pending, {}, r"cache must be written in every layer, but Sequence\(row=1.*not from token 23 on"),
    (other_operations, {}, "cache must be the same, after the same operations, on all ranks that hold it"),
    (None, {"to": DecodeSharding(tp=3)}, "tp must divide the kv heads or be a multiple of them, got tp=3, kv_heads=4"),
    (None, {"to": DecodeSharding(cp=4)}, "to must have at most the 3 ranks of comm, got .* with 4 ranks"),
    (None, {"ranks": [0, 0]}, r"ranks must be 2 different ranks from 0 to 2, one for each of KVDP2, got \[0, 0\]"),
    (None, {"ranks": [0, 3]}, r"ranks must be 2 different ranks from 0 to 2, one for each of KVDP2, got \[0, 3\]"),
    (None, {"num_blocks": 9}, "num_blocks must be at least 10, what the sequences .* max_length=40 need"),
    (None, {"max_length": 22}, "max_length must be at least 23, the longest sequence, got 22"),
    (None, {"block_size": 257}, "block_size must be at most 256, got 257"),
    (None, {"message_bytes": 1023}, "message_bytes must be at least 1024, one token with 4 kv heads in 2 layers"),
    (None, {"cache": None}, "cache must be given on the ranks that hold it, got None on all 3 ranks"),
    (None, {"device": "meta"}, "device must be that of the cache, cpu, got meta"),
]


def test_what_does_not_fit_is_refused_on_every_rank():
    def program(comm):
        errors = []
        for change, options, _ in REFUSED:
            cache = filled(DecodeSharding(cp=2), comm.rank) if comm.rank < 2 else None
            if change is not None and cache is not None:
                change(cache, comm)
            if "device" in options and cache is None:
                options = {}
            arguments = {"cache": cache, "to": DecodeSharding(kvdp=2), **options}
            try:
                am.decode.reshard(**arguments, comm=comm)
            except ValueError as error:
                errors.append(str(error))
            else:
                errors.append("")
        good = am.decode.reshard(
            filled(DecodeSharding(cp=2), comm.rank) if comm.rank < 2 else None, DecodeSharding(), comm
        )
        return errors, None if good is None else len(good.sequences)

    results = am.run_virtual(3, program)
    assert [good for _, good in results] == [3, None, None]
    for errors, _ in results:
        for error, (_, _, message) in zip(errors, REFUSED, strict=True):
            with pytest.raises(ValueError, match=message):
                raise ValueError(error)


def test_a_part_that_is_missing_or_given_twice():
    def program(comm, part):
        with pytest.raises(ValueError, match="cache must be given for each of its 2 ranks once, got those of rank"):
            am.decode.reshard(filled(DecodeSharding(cp=2), part) if comm.rank < 2 else None, DecodeSharding(), comm)

    am.run_virtual(3, lambda comm: program(comm, 0))
    with pytest.raises(ValueError, match="got those of rank 0 without rank 1"):
        am.decode.reshard(filled(DecodeSharding(cp=2), 0), DecodeSharding())


# Memory.


def test_memory_is_bounded_by_the_messages():
    """Beyond both caches a rank alone needs one message, with others two; and 64 bytes of indices per token."""
    cache = filled(DecodeSharding(), 0, num_blocks=400, max_length=1000)
    long = cache.sequences[2]
    step = cache.append([long], 900)
    for layer in range(2):
        k = torch.randn(3, 4, 900, 16)
        cache.write(layer, step, k, -k)
    token, kept = 2 * 4 * 2 * 16 * 4, []
    for tokens in (8, 64):
        limit = tokens * token
        peak = peak_bytes(
            lambda limit=limit: kept.append(am.decode.reshard(cache, DecodeSharding(), message_bytes=limit))
        )
        pools = sum(x.nbytes for x in kept[-1].local.stored_tensors)
        assert peak - pools < limit + 64 * tokens + 40_000  # tables of max_length and lists of blocks
        assert_same(stored(kept[-1]), stored(cache))
    assert kept[-1].local.stored_tensors[0].data_ptr() != cache.local.stored_tensors[0].data_ptr()


def peak_of_a_move(comm, limit):
    """The peak memory of a rank beyond its new cache, while half of a long sequence is sent."""
    cache = filled(DecodeSharding(cp=2), comm.rank, num_blocks=400, max_length=1600)
    step = cache.append([cache.sequences[2]], 1500)
    for layer in range(2):
        cache.write(layer, step, *torch.randn(2, 3, 4, 1500, 16))
    kept = []
    peak = peak_bytes(lambda: kept.append(am.decode.reshard(cache, DecodeSharding(tp=2), comm, message_bytes=limit)))
    return peak - sum(x.nbytes for x in kept[0].local.stored_tensors)


@pytest.mark.sweep
def test_memory_between_processes_is_bounded_by_two_messages():
    limit = 64 * 1024
    for peak in run_processes(2, peak_of_a_move, limit):
        assert limit < peak < 2 * limit + 64 * 128 + 60_000  # both messages are 64 KiB; the cache is 1.6 MB


def test_a_cache_is_freed_with_its_last_reference():
    import weakref

    cache = filled(DecodeSharding(), 0)
    gone = weakref.ref(cache)
    new = am.decode.reshard(cache, DecodeSharding())
    del cache
    assert gone() is None
    assert len(new.sequences) == 3


# The tests themselves.


def drop_the_last_piece(monkeypatch):
    chunks = Move.chunks
    monkeypatch.setattr(Move, "chunks", lambda self, n: (chunk[:-1] or chunk for chunk in chunks(self, n)))


def forget_the_heads(monkeypatch):
    monkeypatch.setattr(CacheTokens, "_of", lambda self, x, heads: x[:, :, :, : len(heads)])


@pytest.mark.parametrize("fault", [drop_the_last_piece, forget_the_heads])
def test_a_planted_fault_is_found(fault, monkeypatch):
    moves = [DecodeSharding(tp=2)]
    fault(monkeypatch)
    out = am.run_virtual(2, lambda comm: decode(comm, DecodeSharding(cp=2), moves))[0]
    with pytest.raises(AssertionError):
        assert_all_close(out, reference_block(CONFIG, FEW_BITS, X))
