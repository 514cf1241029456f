"""`reshard(into=)`: sequences join a cache in use, with every bit; what does not fit is refused and nothing is lost."""

import pytest
import torch
from sharded_model import Mesh, arguments

import attnmesh as am
from attnmesh.parallel.reshard.contents import CacheTokens
from attnmesh.plan.decode import DecodeSharding
from helpers.caches import cache_sizes

pytestmark = pytest.mark.usefixtures("poisoned_pools")

PAIRS = [
    (DecodeSharding(cp=3, interleave=2), DecodeSharding(tp=2, kvdp=2)),
    (DecodeSharding(kvdp=2), DecodeSharding(tp=2, kvdp=1, cp=2, interleave=3)),
    (DecodeSharding(kvdp=2, cp=2), DecodeSharding(kvdp=3, cp=2)),
    (DecodeSharding(tp=4), DecodeSharding()),
]


def two_meshes(a: DecodeSharding, b: DecodeSharding) -> tuple[Mesh, Mesh]:
    """Caches that are moved from, and those that are moved into. Equal prefixes have equal keys in both."""
    source = Mesh(a, num_blocks=20, block_size=2, batch=3)
    target = Mesh(b, seed=1, num_blocks=26, batch=8)
    target.numbers, target.fresh = source.numbers, source.fresh
    return source, target


def join(source: Mesh, target: Mesh, others: int = 0, rows: list[int] | None = None) -> bool:
    """Move all sequences of one mesh, or those of some rows, into the other; False if full.

    The ranks of the other one are `others` or more further on.
    """
    before = [[mesh.metadata(rank) for rank in range(len(mesh.caches))] for mesh in (source, target)]
    ranks = [others + rank for rank in range(target.sharding.ranks)]

    def program(comm):
        cache = source.caches[comm.rank] if comm.rank < source.sharding.ranks else None
        into = target.caches[comm.rank - others] if comm.rank in ranks else None
        try:
            own = None if cache is None else rows
            joined = am.decode.reshard(cache, target.sharding, comm, ranks=ranks, rows=own, into=into, message_bytes=64)
        except am.decode.CacheFull as full:
            return str(full)
        assert (joined is None) == (into is None)
        return joined

    results = am.run_virtual(max(source.sharding.ranks, others + target.sharding.ranks), program)
    if any(isinstance(each, str) for each in results):
        assert len(set(results)) == 1, "some ranks are full, others are not"
        assert before == [[mesh.metadata(rank) for rank in range(len(mesh.caches))] for mesh in (source, target)]
        return False
    moved = {each: tokens for each, tokens in source.live.items() if rows is None or each[0].row in rows}
    assert all(len(each) == len(moved) for each in results if each is not None)
    for handles, tokens in moved.items():
        new = tuple(results[rank][handles[0].row] for rank in ranks)
        assert new not in target.live
        assert (new[0].length, new[0].cached) == (handles[0].length, handles[0].cached)
        target.live[new], target.prompts[new] = list(tokens), list(source.prompts[handles])
    assert before[0] == [source.metadata(rank) for rank in range(len(source.caches))]
    target.check()
    return True


@pytest.mark.parametrize(
    ("a", "b"), [pytest.param(*pair, marks=[pytest.mark.sweep] * (pair is not PAIRS[0])) for pair in PAIRS], ids=str
)
def test_sequences_join_a_cache_in_use(a, b):
    source, target = two_meshes(a, b)
    done = {True: 0, False: 0}
    for number in range(7):
        for _ in range(6):
            source.step()
            target.step()
        joined = join(source, target, others=(number % 2) * a.ranks)
        done[joined] += 1
        while source.live and joined:
            source.free()
    for _ in range(30):
        target.step()
    assert min(done.values()) > 0
    assert target.done["found"] > 0  # of prefixes, some of which were moved


def test_forks_share_blocks_and_their_prefixes_serve_prompts():
    source, target = two_meshes(DecodeSharding(cp=2), DecodeSharding(kvdp=2))
    first = source.allocate(list(range(100, 113)))
    source.append([first], 13)
    for _ in range(2):
        source.each(lambda cache, rank: cache.fork(first[rank]))
    for row, one in source.caches[0].sequences.items():
        source.live.setdefault(tuple(cache.sequences[row] for cache in source.caches), source.live[first])
        source.prompts.setdefault(tuple(cache.sequences[row] for cache in source.caches), [])
        assert one.length == 13
    target.append([target.allocate([1, 2, 3])], 3)
    used = [stats.used for stats in target.caches[0].stats()]
    assert join(source, target)
    after = [stats.used for stats in target.caches[0].stats()]
    assert sorted(x - y for x, y in zip(after, used, strict=True)) == [0, 5]  # those of one
    assert target.caches[0].allocate([*range(100, 112), 1]).cached == 12


def test_some_rows_move_also_those_whose_prefix_stays():
    source, target = two_meshes(DecodeSharding(cp=2), DecodeSharding(kvdp=2))
    first = source.allocate(list(range(100, 113)))
    source.append([first], 13)
    second = source.allocate([*range(100, 112), 7, 8])  # shares the blocks of its prefix with the first one
    source.append([second], 2)
    source.append([source.allocate([5, 6, 7])], 3)
    assert source.caches[0].sequences[second[0].row].cached == 12
    assert join(source, target, rows=[second[0].row])
    assert join(source, target, others=1, rows=[0, 2])
    assert join(source, target, rows=[])


def test_rows_that_are_not_there_are_refused_on_every_rank():
    def rank(comm):
        cache = filled(DecodeSharding(cp=2), comm.rank, (4, 9))
        for rows, message in (
            ([2], r"rows must be among \[0, 1\], got \[2\]"),
            ([-1], "rows must be"),
            (3, "rows must be a list of rows, got 3"),
            ([comm.rank], "cache must be the same, after the same operations, on all ranks that hold it"),
        ):
            with pytest.raises(ValueError, match=message):
                am.decode.reshard(cache, DecodeSharding(kvdp=2), comm, rows=rows)
        with pytest.raises(ValueError, match="rows must be None without a ShardedCache that they are of"):
            am.decode.reshard(None if comm.rank else cache, DecodeSharding(kvdp=2), comm, rows=[0])
        return sorted(am.decode.reshard(cache, DecodeSharding(kvdp=2), comm, rows=[1]).sequences)

    assert am.run_virtual(2, rank) == [[1], [1]]


def filled(sharding: DecodeSharding, rank: int, lengths: tuple[int, ...], **more) -> am.ShardedCache:
    cache = am.ShardedCache(sharding, rank, **arguments(**more))
    for length in lengths:
        step = cache.append([cache.allocate(length)], length)
        for layer in range(cache.layers):
            k = torch.full(
                (len(cache.rows), len(sharding.kv_heads(rank, cache.spec.kv_heads)), length, cache.spec.head_dim), 2.0
            )
            cache.write(layer, step, k, k)
    return cache


REFUSED = [
    ({"layers": 3}, {}, ValueError, "into must be a cache for the same model and storage, with layers=2, got 3"),
    ({"storage": "fp16"}, {}, ValueError, "with storage='fp32', got 'fp16'"),
    ({"kv_heads": 4}, {}, ValueError, "with kv_heads=2, got 4"),
    ({"max_length": 8}, {}, ValueError, "into must have a max_length of at least 9, the longest sequence, got 8"),
    ({"lengths": (4,) * 9}, {}, am.decode.CacheFull, "2 more sequences needed, 1 of batch=10 are free"),
    ({"lengths": (30, 30, 6, 6)}, {}, am.decode.CacheFull, "3 more blocks needed, 0 are free and 0 can be evicted"),
    ({}, {"block_size": 4}, ValueError, "block_size must be None with into, whose own it is, got 4"),
    ({}, {"max_length": 40}, ValueError, "max_length must be None with into, whose own it is, got 40"),
    ({}, {"to": DecodeSharding(cp=2)}, ValueError, r"into must be the part of rank 0 of DecodeSharding\(.*cp=2.*got"),
    ({}, {"ranks": [2, 1]}, ValueError, "into must be the part of rank [01] of .* on this rank, got that of rank"),
    ({}, {"into": None}, ValueError, "into must be given on all ranks of the sharding, ranks 1, 2, got it on rank 1"),
    ({"free": True}, {}, ValueError, "into must be the same, after the same operations, on all its ranks, got"),
]


def test_what_does_not_fit_is_refused_on_every_rank():
    source, target = DecodeSharding(cp=2), DecodeSharding(kvdp=2)

    def program(comm):
        cache = filled(source, comm.rank, (9, 5)) if comm.rank < 2 else None
        for change, options, kind, message in REFUSED:
            change = {"lengths": (4, 5, 6), "batch": 10, **change}
            lengths, free = change.pop("lengths"), change.pop("free", False)
            into = filled(target, comm.rank - 1, lengths, **change) if comm.rank else None
            if free and comm.rank == 2:
                into.free(into.sequences[0])
            given = {"into": into, "to": target, "ranks": [1, 2], **(options if "into" not in options else {})}
            if "into" in options and comm.rank == 2:
                given["into"] = None
            rows, used = into and into.sequences, into and into.stats()
            with pytest.raises(kind, match=message):
                am.decode.reshard(cache, comm=comm, **given)
            assert rows == (into and into.sequences)
            assert used == (into and into.stats())
        with pytest.raises(
            ValueError, match=r"into must be another cache than the one that is moved|must be a Sharded"
        ):
            am.decode.reshard(cache, source, comm, into=cache if comm.rank < 2 else 3)
        into = filled(target, comm.rank - 1, (4, 5, 6), batch=10) if comm.rank else None
        joined = am.decode.reshard(cache, target, comm, ranks=[1, 2], into=into)
        return joined and {row: one.row for row, one in joined.items()}

    assert am.run_virtual(3, program) == [None, {0: 6, 1: 2}, {0: 6, 1: 2}]


def test_a_failure_on_the_way_leaves_the_cache_as_it_was(monkeypatch):
    source, target = two_meshes(DecodeSharding(cp=2), DecodeSharding(kvdp=2))
    source.append([source.allocate(list(range(50, 70)))], 20)
    target.append([target.allocate([1, 2, 3, 4])], 4)
    used = [stats.used for stats in target.caches[0].stats()]
    write = CacheTokens.write

    def failing(self, pieces, heads, tokens):
        if self.tensors[0].shape[1] == 26 and failing.calls:
            raise OSError("gone")
        failing.calls += 1
        write(self, pieces, heads, tokens)

    failing.calls = 0
    monkeypatch.setattr(CacheTokens, "write", failing)
    with pytest.raises(OSError, match="gone"):
        join(source, target)
    target.check()
    assert [stats.used for stats in target.caches[0].stats()] == used
    assert [part.find_prefix(list(range(50, 70))) for part in target.caches[0].by_kvdp_rank] == [0, 0]
    monkeypatch.setattr(CacheTokens, "write", write)
    assert join(source, target)


@pytest.mark.parametrize("storage", ["fp32", "fp8_ds_mla"])
def test_latents_move_and_are_saved(storage, tmp_path):
    before, after, width = DecodeSharding(cp=2), DecodeSharding(kvdp=2, cp=1), 136
    shape = {"batch": 2, "layers": 2, "num_blocks": 12, "block_size": 4, "kv_heads": 1, "head_dim": width}
    shape |= {"max_length": 40, "latent": True, "storage": storage, "value_dim": 128, "device": "cpu"}

    def program(comm):
        cache = am.ShardedCache(before, comm.rank, **cache_sizes(**shape))
        for row, length in enumerate((13, 22)):
            step = cache.append([cache.allocate(list(range(row, row + length)))], length)
            for layer in range(2):
                k = torch.randn(2, 1, length, width, generator=torch.Generator().manual_seed(10 * row + layer))
                cache.write(layer, step, k, None)
        am.decode.save_cache(cache, tmp_path / "latents", comm)
        moved, loaded = am.decode.reshard(cache, after, comm), am.decode.load_cache(tmp_path / "latents", after, comm)
        raw = [each.local.stored_tensors for each in (cache, moved, loaded)]
        found = []
        for each, tensors in zip((cache, moved, loaded), raw, strict=True):
            shard, rows = each.sharding.position_shard(comm.rank), {}
            for row, sequence in each.sequences.items():
                if row in each.rows:
                    at = torch.arange(shard.length(sequence.length))
                    blocks = torch.tensor(sequence.blocks)[at // 4]
                    rows[row] = dict(
                        zip(shard.position(at).tolist(), tensors[0][:, blocks, at % 4].unbind(1), strict=True)
                    )
            found.append(rows)
        return found

    ranks = am.run_virtual(2, program)
    tokens = {}
    for found in ranks:
        for row, by_position in found[0].items():
            tokens.setdefault(row, {}).update(by_position)
    assert {row: len(each) for row, each in tokens.items()} == {0: 13, 1: 22}
    for found in ranks:
        for rows in found[1:]:
            for row, by_position in rows.items():
                assert by_position.keys() == tokens[row].keys()
                assert all(torch.equal(x, tokens[row][position]) for position, x in by_position.items())


@pytest.mark.parametrize(
    ("more", "message"),
    [({"windows": (None, 4), "window_blocks": 9}, "must have the same blocks in every layer, got one with a window")],
)
def test_windows_are_refused_on_every_rank(more, message, tmp_path):
    sharding, target = DecodeSharding(cp=2), DecodeSharding(kvdp=2)

    def program(comm):
        cache = am.ShardedCache(sharding, comm.rank, **arguments(**more)) if comm.rank < 2 else None
        with pytest.raises(ValueError, match=f"cache {message}"):
            am.decode.reshard(cache, target, comm, ranks=[1, 2])
        plain = am.ShardedCache(sharding, comm.rank, **arguments()) if comm.rank < 2 else None
        into = am.ShardedCache(target, comm.rank - 1, **arguments(**more)) if comm.rank else None
        with pytest.raises(ValueError, match=f"into {message}"):
            am.decode.reshard(plain, target, comm, ranks=[1, 2], into=into)

    am.run_virtual(3, program)
    with pytest.raises(ValueError, match=f"cache {message}"):
        am.run_virtual(
            2,
            lambda comm: am.decode.save_cache(
                am.ShardedCache(sharding, comm.rank, **arguments(**more)), tmp_path / "x", comm
            ),
        )
    assert not (tmp_path / "x").exists()
