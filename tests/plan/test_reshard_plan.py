"""The plan of a move, without ranks: everything arrives once, from a rank that has it, and nothing else is sent."""

import itertools

import pytest

from attnmesh.core.ranges import size
from attnmesh.kv_cache.block_manager import root_hash
from attnmesh.parallel.reshard.contents import CacheContents, SequenceContents
from attnmesh.parallel.reshard.goal import Goal
from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.reshard import Part, Piece, plan_moves

KV_HEADS = 4
SHARDINGS = [
    DecodeSharding(),
    DecodeSharding(tp=2, kvdp=2),
    DecodeSharding(tp=8),
    DecodeSharding(cp=8, interleave=3),
    DecodeSharding(tp=2, cp=2, kvdp=2, interleave=16),
]


def needs(contents: CacheContents, sharding: DecodeSharding, block_size: int) -> list[Part]:
    """What each rank is to hold of a cache that it makes."""
    return Goal(contents, sharding, 1, block_size, contents.placements(sharding, block_size)).needs()


def contents(*sequences: tuple[int, int, int]) -> CacheContents:
    """Sequences of a length, with a base and the positions in common with it."""
    root = root_hash("").hex()
    rows = [
        SequenceContents(row, length, 0, length, (), root, base, common)
        for row, (length, base, common) in enumerate(sequences)
    ]
    return CacheContents(len(rows), 1, KV_HEADS, 8, 8, 1 << 20, "fp32", None, None, tuple(rows))


CONTENTS = contents((37, -1, 0), (5, -1, 0), (40, 0, 24), (0, -1, 0), (24, 2, 12))


def cells(part: Part | None) -> set[tuple[int, int, int]]:
    """The content, position and head of everything that a rank holds."""
    if part is None:
        return set()
    return {(one.content, p, head) for one in part.pieces for run in one.positions for p in run for head in part.heads}


@pytest.mark.parametrize(("a", "b"), itertools.product(SHARDINGS, SHARDINGS), ids=str)
def test_everything_arrives_once_and_only_what_is_missing_is_sent(a, b):
    world = max(a.ranks, b.ranks)
    sources = [*CONTENTS.parts(a), *[None] * (world - a.ranks)]
    targets = [*needs(CONTENTS, b, 4), *[None] * (world - b.ranks)]
    moves = plan_moves(sources, targets)
    arrived = {rank: [] for rank in range(world)}
    for move in moves:
        for piece in move.pieces:
            for run in piece.positions:
                arrived[move.target] += [(piece.row, piece.content, p, head) for p in run for head in move.heads]
        assert {(content, p, head) for _, content, p, head in arrived[move.target]} <= cells(targets[move.target])
        moved = {
            (one.content, p, head) for one in move.pieces for run in one.positions for p in run for head in move.heads
        }
        assert moved <= cells(sources[move.source])
        if move.source != move.target:
            assert not moved & cells(sources[move.target])
    for rank, target in enumerate(targets):
        wanted = [] if target is None else [
            (one.row, one.content, p, head)
            for one in target.pieces for run in one.positions for p in run for head in target.heads
        ]  # fmt: skip
        assert sorted(arrived[rank]) == sorted(wanted)
        assert sorted(plan_moves(sources, targets, rank), key=repr) == sorted(
            (move for move in moves if rank in (move.source, move.target)), key=repr
        )


def test_replicas_share_the_work():
    moves = plan_moves([*CONTENTS.parts(DecodeSharding(tp=8)), *[None] * 4], [
        *[None] * 8, *needs(CONTENTS, DecodeSharding(kvdp=4), 4),
    ])  # fmt: skip
    assert len({move.source for move in moves}) == 8  # 2 ranks have each head


def test_chunks_have_a_number_of_tokens_across_sequences():
    (move,) = plan_moves([None, *CONTENTS.parts(DecodeSharding())], [*needs(CONTENTS, DecodeSharding(cp=1), 4), None])
    for tokens in (1, 7, 1000):
        chunks = list(move.chunks(tokens))
        sizes = [sum(size(piece.positions) for piece in chunk) for chunk in chunks]
        assert sum(sizes) == move.tokens
        assert sizes[:-1] == [tokens] * (len(sizes) - 1)
        flat = [(one.row, one.content, p) for chunk in chunks for one in chunk for run in one.positions for p in run]
        assert flat == [(one.row, one.content, p) for one in move.pieces for run in one.positions for p in run]


def test_what_no_rank_holds_is_an_error():
    piece = Piece(0, 0, (range(8),))
    with pytest.raises(ValueError, match=r"sources must hold kv heads range\(0, 4\) of sequence 0 exactly once at 8"):
        plan_moves([Part(range(2), (piece,)), Part(range(4, 6), (piece,))], [Part(range(4), (piece,)), None])


def test_a_plan_of_a_million_tokens_is_small():
    long = contents((1 << 20, -1, 0))
    a, b = DecodeSharding(cp=8, interleave=16), DecodeSharding(tp=2, cp=4, interleave=64)
    moves = plan_moves(long.parts(a), needs(long, b, 64), 3)
    assert sum(len(piece.positions) for move in moves for piece in move.pieces) < 20_000
    assert sum(move.tokens for move in moves if move.target == 3) == 1 << 18
