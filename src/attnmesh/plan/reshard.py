"""Which keys and values go from which rank to which, when a KV cache moves to another sharding. Pure data.

A rank holds some kv heads of some positions of some sequences: a `Part`. `plan_moves` compares the parts before with
the parts after, and returns a `Move` for every pair of ranks. What a rank holds already is a move to itself, so the
bytes sent are the least that messages between two ranks each can do: every rank receives what it lacks, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges


class Piece(NamedTuple):
    """Positions of a sequence. Sequences that share a prefix have one `content` there, stored as a part of one row.

    `row` is the sequence's own row, and `content` the row whose keys and values these are.
    """

    row: int
    content: int
    positions: Ranges


@dataclass(frozen=True)
class Part:
    """What a rank holds, or is to hold: kv heads `heads` of each piece."""

    heads: range
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Move:
    """What one rank sends to another, or copies if both are the same."""

    source: int
    target: int
    heads: range
    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens, each with `len(heads)` heads in every layer."""
        return sum(ranges.size(piece.positions) for piece in self.pieces)

    def chunks(self, tokens: int) -> Iterator[tuple[Piece, ...]]:
        """The pieces in order, cut into chunks of `tokens` tokens; the last one may be smaller."""
        chunk: list[Piece] = []
        room = tokens
        for piece in self.pieces:
            begin, size = 0, ranges.size(piece.positions)
            while begin < size:
                end = min(size, begin + room)
                chunk.append(piece._replace(positions=ranges.narrow(piece.positions, range(begin, end))))
                room -= end - begin
                begin = end
                if not room:
                    yield tuple(chunk)
                    chunk, room = [], tokens
        if chunk:
            yield tuple(chunk)


class _Holding(NamedTuple):
    """Ranks that hold the same: kv heads of positions of one content."""

    heads: range
    positions: Ranges
    ranks: list[int]


def plan_moves(sources: Sequence[Part | None], targets: Sequence[Part | None], rank: int | None = None) -> list[Move]:
    """The moves from what each rank holds to what each rank is to hold, by target and source; of one rank if given.

    `sources[r]` and `targets[r]` are the parts of rank r, None if it holds nothing. Parts of sources are equal or
    disjoint. Where several ranks hold the same, each serves other targets. Raises ValueError if something is held by no
    rank.
    """
    held = _holdings(sources)
    moves: dict[tuple[int, int], list[Piece]] = {}
    for target, part in enumerate(targets):
        for piece in () if part is None else part.pieces:
            assert part is not None
            found = 0
            for holding in held.get(piece.content, ()):
                heads = _overlap(holding.heads, part.heads)
                source = target if target in holding.ranks else holding.ranks[target % len(holding.ranks)]
                if not heads or rank not in (None, source, target):
                    continue
                positions = ranges.common(holding.positions, piece.positions)
                found += len(heads) * ranges.size(positions)
                if positions:
                    moves.setdefault((target, source), []).append(piece._replace(positions=positions))
            if rank in (None, target) and found != len(part.heads) * ranges.size(piece.positions):
                raise ValueError(
                    f"sources must hold kv heads {part.heads} of sequence {piece.content} exactly once at "
                    f"{ranges.size(piece.positions)} positions, which rank {target} needs"
                )
    return [
        Move(source, target, _overlap(_part(sources, source).heads, _part(targets, target).heads), tuple(pieces))
        for (target, source), pieces in sorted(moves.items())
    ]


def _holdings(sources: Sequence[Part | None]) -> dict[int, list[_Holding]]:
    """What is held of each content, and by which ranks."""
    held: dict[int, dict[tuple[range, Ranges], _Holding]] = {}
    for rank, part in enumerate(sources):
        for piece in () if part is None else part.pieces:
            assert part is not None
            of_content = held.setdefault(piece.content, {})
            holding = of_content.setdefault((part.heads, piece.positions), _Holding(part.heads, piece.positions, []))
            holding.ranks.append(rank)
    return {content: list(of_content.values()) for content, of_content in held.items()}


def _overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _part(parts: Sequence[Part | None], rank: int) -> Part:
    part = parts[rank]
    assert part is not None
    return part
