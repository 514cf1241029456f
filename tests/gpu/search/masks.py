"""Random masks of the whole grammar, written as short expressions: `causal&docs(12)`.

An expression names how many documents or slices there are; their bounds are random numbers of the case's seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.core.masks import SLICE_KINDS

from .cases import chance, draw_length, pick


@dataclass(frozen=True)
class Jumps(am.CustomMask):
    """Intervals that jump from query to query: forward, back, some empty."""

    step: int
    width: int

    def key_ranges(self, q: Tensor) -> tuple[Tensor, Tensor]:
        first = q * self.step % 251 + q // 2
        return first, torch.where(q % 7 == 3, first, first + self.width)


SIMPLE = {
    "causal": 8, "window": 4, "docs": 6, "docs_prefix": 2, "prefix": 2, "chunked": 2, "blocks": 2, "slices": 3,
    "full": 3, "jumps": 1,
}  # fmt: skip
# "global" allows so little that it is drawn in unions only.


def draw_mask(random: Random, length: int, batch: int) -> str:
    """Return an expression: one mask, several combined by & and |, padding, or a mask for every sequence."""
    kind = pick(random, {"one": 8, "and": 6, "or": 3, "both": 2, "padding": 2, "each": 1})
    if kind == "one":
        return _simple(random, length)
    if kind == "and":
        return f"causal&{_simple(random, length)}"
    if kind == "or":
        return f"{_simple(random, length)}|{_in_union(random, length)}"
    if kind == "both":
        return f"causal&({_simple(random, length)}|{_in_union(random, length)})"
    if kind == "padding":
        return f"{random.choice(('causal', _simple(random, length)))}&padding({random.choice((0, 1))})"
    return f"each({','.join(_simple(random, length) for _ in range(batch))})"


def _simple(random: Random, length: int) -> str:
    kind = pick(random, SIMPLE)
    size = draw_length(random, max(length, 1))
    if kind in ("causal", "full"):
        return kind
    if kind == "window":
        return f"window({size - 1},{random.choice((0, 0, 3, size))})"
    if kind in ("docs", "docs_prefix"):
        return f"{kind}({random.choice((1, 3, 12, 40))})"
    if kind == "slices":
        return f"slices({random.randint(0, 5)})"
    if kind == "jumps":
        return f"jumps({random.choice((0, 1, 3))},{min(size, 40)})"  # wider ones overlap, which takes many passes
    return f"{kind}({size})"


def _in_union(random: Random, length: int) -> str:
    few = random.choice((0, 1, 4, 70))
    return random.choice((f"global({few},{int(chance(random, 0.3))})", _simple(random, length)))


def make_mask(expression: str, seed: int, length: int, batch: int) -> am.Mask:
    """Return the mask of an expression, for keys of this length."""
    random = Random(seed)

    def documents(count: int) -> list[int]:
        edges = sorted([0, *(random.randint(0, length) for _ in range(count - 1)), length])
        lengths = [b - a for a, b in pairwise(edges)]
        for i in range(count - 1):  # some of a single position
            if lengths[i] > 1 and random.random() < 0.2:
                lengths[i], lengths[i + 1] = 1, lengths[i + 1] + lengths[i] - 1
        return lengths

    def with_prefixes(count: int) -> am.Mask:
        lengths = documents(count)
        return am.Documents(lengths, [random.randint(0, n) for n in lengths])

    def span() -> tuple[int, int]:
        start = random.randrange(length)
        return start, random.randint(start + 1, length)

    def padding(left: int) -> am.Mask:
        lengths = [random.choice((0, 1, length, random.randint(0, length))) for _ in range(batch)]
        return am.Padding(lengths, "left" if left else "right", length)

    names = {
        "causal": am.Causal(), "full": am.Full(), "window": am.SlidingWindow, "prefix": am.Prefix,
        "chunked": am.Chunked, "blocks": am.BlockCausal, "jumps": Jumps, "padding": padding,
        "docs": lambda count: am.Documents(documents(count)), "docs_prefix": with_prefixes,
        "slices": lambda count: am.Slices([(span(), span(), random.choice(SLICE_KINDS)) for _ in range(count)]),
        "global": lambda n, both: am.Global(n, bool(both)), "each": lambda *masks: am.PerSequence(masks),
    }  # fmt: skip
    names["global_"] = names.pop("global")
    return eval(expression.replace("global(", "global_("), {"__builtins__": {}}, names)
