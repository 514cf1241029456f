"""Programs of different ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from attnmesh.plan.program import Round


def beside(programs: Sequence[Iterator[Round]]) -> Iterator[Round]:
    """The rounds of programs without a rank in common: a rank that has nothing to do in a round is past it at once."""
    for rounds in zip_longest(*programs):
        there = [part for part in rounds if part is not None]
        yield Round(
            there[0].name,
            {name: messages for part in there for name, messages in part.starts.items()},
            tuple(kernels for part in there for kernels in part.work),
            tuple(name for part in there for name in part.waits),
        )
