"""What ranks tell each other before they exchange, and what is said when they do not agree."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Claim:
    """One rank's view of what it is about to start; `error` is what it finds wrong with its own arguments."""

    operation: str
    facts: dict[str, str]
    error: str | None = None

    @classmethod
    def of(cls, operation: str, facts: Mapping[str, object], error: str | None) -> Claim:
        """The claim in words, which is all that travels."""
        return cls(operation, {name: str(_plain(value)) for name, value in facts.items()}, error)

    @classmethod
    def from_json(cls, text: str | bytes) -> Claim:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """The claim as text, for a store that holds strings."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.operation}({facts})"


def remembered_as(operation: str, facts: Mapping[str, object]) -> Hashable:
    """The key under which an agreement is kept. Cheap: it is built on every call."""
    return operation, tuple((name, _plain(value)) for name, value in sorted(facts.items()))


def complaint(claims: Mapping[int, Claim]) -> str | None:
    """Why these claims (by rank) cannot go on together, or None when they agree.

    A rank's own error comes first: it explains the differences that it causes.
    """
    ranks = sorted(claims)
    said = _grouped({rank: claims[rank].error for rank in ranks if claims[rank].error is not None})
    if said:
        operation = claims[next(rank for rank in ranks if claims[rank].error is not None)].operation
        return f"{operation}: " + "; ".join(f"{error} (said by {in_words(by)})" for error, by in said.items())

    operations = {rank: claims[rank].operation for rank in ranks}
    if len(set(operations.values())) > 1:
        full = _grouped({rank: str(claims[rank]) for rank in ranks})
        return f"ranks are about to do different things: {_sides(full)}"

    names = dict.fromkeys(name for rank in ranks for name in claims[rank].facts)
    differing = []
    for name in names:
        sides = _grouped({rank: claims[rank].facts.get(name, "(not given)") for rank in ranks})
        if len(sides) > 1:
            differing.append(f"{name} is {_sides(sides)}")
    if differing:
        return f"{operations[ranks[0]]}: ranks disagree: " + "; ".join(differing)
    return None


def _plain(value: object) -> Hashable:
    """Equal for what means the same: a shape is a shape, whether list, tuple or torch.Size."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((str(key), _plain(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, Hashable) else str(value)


def _grouped(by_rank: Mapping[int, str | None]) -> dict[str | None, list[int]]:
    """The ranks behind each different value, in order of the first rank that has it."""
    groups: dict[str | None, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(value, []).append(rank)
    return groups


def _sides(groups: Mapping[str | None, list[int]]) -> str:
    return " but ".join(f"{value} on {in_words(ranks)}" for value, ranks in groups.items())


def in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
