"""`Joint`: several sequences joined into one, each spread by a layout of its own.

Joint attention lets image tokens and text tokens see one another. A rank holds its shard of the first sequence, then
its shard of the second, and so on; positions of later sequences follow those of earlier ones:

    Joint((8, Contiguous()), (4, Striped())), world = 2      rank 0: 0 1 2 3 8 10      rank 1: 4 5 6 7 9 11
"""

from __future__ import annotations

from dataclasses import dataclass

from attnmesh.layout import Layout
from attnmesh.spans import Spans


@dataclass(frozen=True, init=False, repr=False)
class Joint(Layout):
    """Sequences one after another, given as pairs of (length, layout). The length of the whole is their sum."""

    parts: tuple[tuple[int, Layout], ...]

    def __init__(self, *parts: tuple[int, Layout]) -> None:
        for part in parts:
            if not _is_part(part):
                raise ValueError(f"Joint's parts must be (length, layout) with an integer length >= 0, got {part!r}")
        object.__setattr__(self, "parts", tuple(map(tuple, parts)))

    def __repr__(self) -> str:
        return f"Joint({', '.join(map(repr, self.parts))})"

    def _spans(self, length: int, world: int, rank: int) -> Spans:
        lengths = [n for n, _ in self.parts]
        if sum(lengths) != length:
            raise ValueError(
                f"the lengths of Joint's parts must add up to the sequence length {length}, but {lengths} add up to "
                f"{sum(lengths)}"
            )
        runs: list[range] = []
        begin = 0
        for n, layout in self.parts:
            for span in layout.spans(n, world, rank):
                run = range(begin + span.start, begin + span.stop, span.step)
                # One run where the shards touch: fewer blocks to compute.
                if runs and runs[-1].step == run.step == 1 and runs[-1].stop == run.start:
                    run = range(runs.pop().start, run.stop)
                runs.append(run)
            begin += n
        return tuple(runs)


def _is_part(part: object) -> bool:
    match part:
        case (int(length), Layout()):
            return length >= 0 and not isinstance(length, bool)
    return False
