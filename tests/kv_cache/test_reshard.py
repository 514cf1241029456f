"""`reshard` of caches in any state: every bit arrives, sharing is kept, and later operations go on as before."""

import pytest
from sharded_model import LAYERS, Mesh

import attnmesh as am
from attnmesh.plan.decode import DecodeSharding
from helpers.blocks import factorizations
from helpers.caches import cache_sizes
from helpers.cases import first

pytestmark = pytest.mark.usefixtures("poisoned_pools")

KV_HEADS = 2
SHARDINGS = [
    DecodeSharding(*each, interleave=1 + (sum(each) * ranks) % 4)
    for ranks in range(1, 9)
    for each in factorizations(ranks)
    if KV_HEADS % each[0] == 0 or each[0] % KV_HEADS == 0
]
PAIRS = [
    (DecodeSharding(cp=8, interleave=3), DecodeSharding(tp=2, kvdp=2)),
    (DecodeSharding(tp=4), DecodeSharding(kvdp=3)),
    (DecodeSharding(tp=2, kvdp=2, cp=2, interleave=2), DecodeSharding(cp=3, kvdp=2)),
]


def resharded(mesh: Mesh, to: DecodeSharding, **options) -> tuple[Mesh, list[int]]:
    """The model with the caches after `reshard`, and the bytes that each rank sent as tokens."""
    world = max(mesh.sharding.ranks, to.ranks)
    everywhere = mesh.sharding.ranks == world

    def program(comm):
        cache = mesh.caches[comm.rank] if comm.rank < mesh.sharding.ranks else None
        new = am.decode.reshard(cache, to, comm, **options)
        return new, comm.traffic.by_op.get("exchange", (0, 0))[1] if everywhere or comm.rank else None

    results = am.run_virtual(world, program)
    return moved(mesh, to, [cache for cache, _ in results]), [sent for _, sent in results]


def moved(mesh: Mesh, to: DecodeSharding, results: list) -> Mesh:
    """The model with the caches that its sequences were moved to, all of which are checked."""
    caches = results[: to.ranks]
    assert not any(results[to.ranks :])
    after = Mesh.__new__(Mesh)
    vars(after).update(vars(mesh), sharding=to, caches=caches, live={}, prompts={}, addresses={})
    after.sizes = {**mesh.sizes, "block_size": caches[0].block_size, "num_blocks": caches[0].num_blocks}
    for handles, tokens in mesh.live.items():
        row = handles[0].row
        new = tuple(cache.sequences[row] for cache in caches)
        assert (new[0].length, new[0].cached, new[0].row) == (handles[0].length, handles[0].cached, row)
        after.live[new], after.prompts[new] = list(tokens), list(mesh.prompts[handles])
    assert [len(cache.sequences) for cache in caches] == [len(after.live)] * to.ranks
    after.check()
    return after


def bytes_needed(before: Mesh, after: Mesh) -> list[int]:
    """The bytes that each rank lacks, counted slot by slot: every slot of a new cache that its own old one has not."""
    lacking = [0] * max(before.sharding.ranks, after.sharding.ranks)
    for rank, cache in enumerate(after.caches):
        shard, heads = after.sharding.position_shard(rank), after.sharding.kv_heads(rank, KV_HEADS)
        wanted = {}  # by slot: one of the sequences and positions it stores
        for row, one in cache.sequences.items():
            for position in range(one.length if row in cache.rows else 0):
                if shard.owner(position) == shard.rank:
                    index = shard.index(position)
                    slot = (one.blocks[index // cache.block_size], index % cache.block_size)
                    wanted.setdefault(slot, (row, position))
        held, old = range(0), None
        if rank < before.sharding.ranks:
            held, old = before.sharding.kv_heads(rank, KV_HEADS), before.sharding.position_shard(rank)
        for row, position in wanted.values():
            has = old is not None and row in before.caches[rank].rows and old.owner(position) == old.rank
            lacking[rank] += sum(not (has and head in held) for head in heads) * LAYERS * 8  # a key and a value
    return lacking


def check_pair(a: DecodeSharding, b: DecodeSharding, steps: int = 40, rounds: int = 1) -> None:
    mesh = Mesh(a, num_blocks=20)
    for number in range(rounds):
        for _ in range(steps):
            mesh.step()
        before = mesh
        mesh, sent = resharded(before, b if number % 2 == 0 else a, block_size=(3, 2)[number % 2])
        if None not in sent:
            assert sum(sent) == sum(bytes_needed(before, mesh))
    for _ in range(steps):
        mesh.step()


@pytest.mark.parametrize(
    ("a", "b"),
    first(1, [pytest.param(*pair, marks=[pytest.mark.sweep] * (pair is PAIRS[2])) for pair in PAIRS]),
    ids=str,
)
def test_a_cache_in_use_moves_there_and_back(a, b):
    check_pair(a, b, steps=25, rounds=2)


@pytest.mark.sweep
@pytest.mark.parametrize("next_one", [1, 7])
def test_every_sharding_with_another(next_one):
    for at, a in enumerate(SHARDINGS):
        check_pair(a, SHARDINGS[(at + next_one) % len(SHARDINGS)], steps=20)


def test_a_prompt_keeps_its_tokens_and_blocks_for_them():
    """Also if its last block is begun: under another sharding the rest of the prompt may take further blocks."""
    prompt = list(range(100, 116))
    sizes = {"batch": 1, "layers": 1, "num_blocks": 4, "block_size": 4, "kv_heads": 1, "head_dim": 8, "max_length": 16}

    def rank(comm):
        cache = am.ShardedCache(
            am.DecodeSharding(cp=2), comm.rank, **cache_sizes(device="cpu", storage="fp32", **sizes)
        )
        cache.mark_written(cache.append([cache.allocate(prompt)], 9))  # of 16 that fit into the two blocks
        moved = am.decode.reshard(cache, am.DecodeSharding(), comm)
        return None if moved is None else (moved.sequences[0].ids.tolist(), len(moved.sequences[0].blocks))

    assert am.run_virtual(2, rank) == [(prompt, 4), None]
