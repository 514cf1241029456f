"""A log of calls with a rolling digest: ranks that made the same calls in the same order have the same digest."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from attnmesh.utils.text import alternatives, counted

_KEPT, _LATEST, _EVERY = 4096, 16, 64  # calls
_BITS = (1 << 64) - 1
_MULTIPLIER = 0x5851F42D4C957F2D  # odd, of Knuth's MMIX generator


class LoggedCall(NamedTuple):
    """A call: its number, from 1, and the digest of all calls up to it."""

    number: int
    digest: int
    text: str


class CallLog:
    """The calls of one rank. Adding one costs about a microsecond; texts are formatted when they are read."""

    def __init__(self) -> None:
        self.count = 0
        self.digest = 0
        self._calls: deque[tuple[int, int, str, object]] = deque(maxlen=_KEPT)
        self._made: Counter[Hashable] = Counter()

    def add(self, operation: str, digest: int, detail: object = None) -> None:
        """Log a call whose arguments have this digest (`text_digest`, or `hash` of integers)."""
        self.count += 1
        self.digest = (self.digest * _MULTIPLIER + digest) & _BITS
        self._calls.append((self.count, self.digest, operation, detail))

    def number(self, *kind: Hashable) -> int:
        """The number of a new object of this kind, from 1: equal on ranks that make the same objects in the same order.

        Calls of objects with equal arguments differ by it. Numbers are not used again after an object is deleted:
        ranks collect garbage at different times.
        """
        self._made[kind] += 1
        return self._made[kind]

    def made(self, *kind: Hashable) -> int:
        """How many objects of this kind were numbered."""
        return self._made[kind]

    def latest(self, calls: int) -> list[LoggedCall]:
        """The latest calls, oldest first. May be called on another thread."""
        kept = list(self._calls)[-calls:]
        return [LoggedCall(number, digest, call_text(operation, detail)) for number, digest, operation, detail in kept]

    def digests(self) -> dict[int, int]:
        """The digests of all kept calls, by number. May be called on another thread."""
        return {number: digest for number, digest, _, _ in list(self._calls)}

    def sampled_digests(self) -> dict[int, int]:
        """The digests of the latest calls, and of some before: what another rank needs to compare with its own."""
        return {n: digest for n, digest in self.digests().items() if n > self.count - _LATEST or n % _EVERY == 0}

    @property
    def last_call(self) -> tuple[str, object] | None:
        """The operation and the detail of the latest call."""
        return self._calls[-1][2:] if self._calls else None


@lru_cache(maxsize=4096)
def text_digest(text: str) -> int:
    """A 64-bit digest of a text, equal in all processes; `hash` of a string is not."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def call_text(operation: str, detail: object) -> str:
    """`operation(name=value, ...)`. A detail of two parts is the arguments and the last call of the state.

    A detail that is a number is the number of a call.
    """
    if detail is None:
        return operation
    if isinstance(detail, int):
        return f"{operation}(call {detail})"
    if isinstance(detail, tuple):
        detail, last_call = detail
        return call_text(operation, detail) + (f" after {call_text(*last_call)}" if last_call else "")
    if isinstance(detail, Mapping):
        detail = ", ".join(f"{name}={_as_tuples(value)}" for name, value in detail.items())
    return f"{operation}({detail})"


def _as_tuples(value: object) -> object:
    """A torch.Size or a list as a tuple, as agreements compare them."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def out_of_step(by_rank: Mapping[int, Sequence[LoggedCall]], global_ranks: Sequence[int] | None = None) -> str | None:
    """How the calls of ranks differ; None if all that can be compared are equal.

    The first call that differs is described. A rank that is behind is not out of step. `global_ranks` as in
    `format_ranks`.
    """
    calls = {rank: {call.number: call for call in log} for rank, log in by_rank.items()}
    for number in sorted({number for log in calls.values() for number in log}):
        known = {rank: log[number] for rank, log in calls.items() if number in log}
        if len({call.digest for call in known.values()}) > 1:
            texts = {rank: call.text for rank, call in known.items()}
            if len(set(texts.values())) == 1:
                texts = {rank: f"{call.text} [digest {call.digest:016x}]" for rank, call in known.items()}
            earlier = "" if number - 1 in set().union(*calls.values()) or number == 1 else " or before"
            return f"ranks are out of step at call {number}{earlier}: {alternatives(texts, global_ranks)}"
    return None


def more_calls(by_rank: Mapping[int, Sequence[LoggedCall]], global_ranks: Sequence[int] | None = None) -> str:
    """How many calls ranks have made, if all calls that can be compared are equal."""
    texts = {
        rank: f"{counted(calls[-1].number, 'call')}, the last one {calls[-1].text}," if calls else "no call"
        for rank, calls in by_rank.items()
    }
    return f"ranks are out of step: {alternatives(texts, global_ranks)}"
