"""Agreement between ranks: they compare the operation and its arguments before they exchange data.

Every rank has a log of its calls with a rolling digest: ranks that made the same calls in the same order have the same
digest.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, TypeVar

from attnmesh.comm.health.group_store import CommError, FailureNotices, WaitStatus
from attnmesh.comm.health.liveness import liveness
from attnmesh.utils.error_links import see, with_link
from attnmesh.utils.text import alternatives, counted, format_ranks, ranks_by_value

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


T = TypeVar("T")

_DISAGREE = "debugging.md#ranks-disagree"


@dataclass(frozen=True)
class Signature:
    """An operation that one rank is about to start, its arguments as strings, and the error it found in them."""

    operation: str
    values: dict[str, str]
    error: str | None = None
    calls: tuple[LoggedCall, ...] = ()
    """The latest calls of the rank before this one."""

    @classmethod
    def from_json(cls, text: str | bytes) -> Signature:
        """Parse the output of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "calls": tuple(LoggedCall(*call) for call in fields["calls"])})

    def to_json(self) -> str:
        """The signature as a string, for a key-value store."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{self.operation}({values})"

    @property
    def short(self) -> str:
        """The operation with the arguments that fit into a line."""
        text = str(self)
        return text if len(text) <= _SHORT else f"{text[:_SHORT].rpartition(', ')[0]}, ...)"


def disagreement(signatures: Mapping[int, Signature], global_ranks: Sequence[int] | None = None) -> str | None:
    """The error message for signatures (by rank) that do not agree; None if they do.

    `global_ranks` as in `format_ranks`. An error that a rank reports about its own arguments comes first, because it
    explains other differences.
    """
    ranks = sorted(signatures)
    errors = ranks_by_value({rank: error for rank in ranks if (error := signatures[rank].error) is not None})
    if errors:
        operation = signatures[next(rank for rank in ranks if signatures[rank].error is not None)].operation
        named = (f"{error} (on {format_ranks(by, global_ranks)})" for error, by in errors.items())
        return with_link(f"{operation}: {'; '.join(named)}")

    operations = {rank: signatures[rank].operation for rank in ranks}
    if len(set(operations.values())) > 1:
        calls = {rank: str(signatures[rank]) for rank in ranks}
        return f"ranks called different operations: {alternatives(calls, global_ranks)}{see(_DISAGREE)}"

    names = dict.fromkeys(name for rank in ranks for name in signatures[rank].values)
    differing = []
    for name in names:
        values = {rank: signatures[rank].values.get(name, "(not given)") for rank in ranks}
        if len(set(values.values())) > 1:
            differing.append(f"{name} is {alternatives(values, global_ranks)}")
    if differing:
        return f"{operations[ranks[0]]}: ranks disagree: {'; '.join(differing)}{see(_DISAGREE)}"
    return None


CAUSE_SEARCH = 1.0
"""Seconds in which ranks that wait for others say so, after one of them has waited for too long."""

_SHORT = 100  # characters
_MIN_POLL_INTERVAL, _MAX_POLL_INTERVAL = 0.0005, 0.05  # seconds

# Written over a signature to withdraw it. Deleting the key would race with a peer that is about to read its value.
_WITHDRAWN = ""


class _LateError(Exception):
    """The ranks that have not arrived within the timeout, and what for."""

    def __init__(self, missing: Collection[int], purpose: str) -> None:
        super().__init__()
        self.missing, self.purpose = missing, purpose


class AgreementStore(FailureNotices):
    """Signatures of all ranks of a process group, in the group's key-value store.

    The store works next to the data, with any backend. Keys are polled rather than waited for: a store's own `wait`
    cannot watch for the failure of a peer at the same time, and logs to stderr when it times out.
    """

    _round = 0  # number of agreements so far; the same on every rank
    missing: Collection[int] = ()
    """The ranks that have not arrived in the agreement that this rank waits in."""

    @property
    def round(self) -> int:
        """The number of agreements that this rank has entered."""
        return self._round

    def compare(
        self, signature: Signature, timeout: float, check_missing_ranks: Callable[[], None] = lambda: None
    ) -> dict[int, Signature]:
        """Publish this rank's signature and return all signatures, or the known ones as soon as one has an error.

        While ranks are missing, `check_missing_ranks` is called again and again; it may raise CommError.
        """
        self._round += 1
        self._set(self._signature_key(self._round, self._rank), signature.to_json())

        def read(ranks: Iterable[int]) -> dict[int, Signature]:
            return self._signatures(self._round, ranks)

        def is_enough(signatures: Mapping[int, Signature]) -> bool:
            return any(known.error is not None for known in signatures.values())

        known, ranks, purpose = {self._rank: signature}, range(self._world), f"start {signature.short}"
        try:
            signatures = self._gather(known, ranks, read, purpose, timeout, check_missing_ranks, is_enough)
        except (CommError, _LateError) as error:
            with suppress(CommError):  # withdraw it, so that a rank that arrives later does not take it for agreement
                self._set(self._signature_key(self._round, self._rank), _WITHDRAWN)
            if isinstance(error, _LateError):
                raise self._search(error, timeout, check_missing_ranks) from None
            raise
        finally:
            self.missing = ()
        if len(signatures) == self._world and self._round > 1:
            # All ranks have entered this round, so none reads the previous one any more.
            self._delete(self._signature_key(self._round - 1, self._rank))
        return signatures

    def _gather(
        self,
        known: dict[int, T],
        ranks: Iterable[int],
        read: Callable[[Iterable[int]], dict[int, T]],
        purpose: str,
        timeout: float,
        meanwhile: Callable[[], None],
        is_enough: Callable[[Mapping[int, T]], bool] = lambda _: False,
    ) -> dict[int, T]:
        """Read what `ranks` publish until every value is known; CommError if a rank has failed or ended, or _LateError.

        `purpose` is what this rank is about to do, for the error. `meanwhile` is called while ranks are missing; it
        may raise CommError too.
        """
        deadline, interval = time.monotonic() + timeout, _MIN_POLL_INTERVAL
        while (missing := set(ranks) - known.keys()) and not is_enough(known):
            self.missing = missing
            new = read(missing)
            known |= new
            if new:
                continue
            causes = self.causes()
            # A rank that has ended may have taken part before: what it published is complete.
            if not causes and (ended := self.ended().keys() & missing) and not read(ended):
                causes = self.causes_of_end(ended)
            if causes:
                raise self.error(causes, f"was about to {purpose}")
            if time.monotonic() > deadline:
                raise _LateError(missing, purpose)
            if self.is_searching():
                self.report_waiting(WaitStatus(self.globally(missing), purpose))
            meanwhile()
            time.sleep(interval)
            interval = min(2 * interval, _MAX_POLL_INTERVAL)
        return known

    def _search(self, late: _LateError, timeout: float, meanwhile: Callable[[], None]) -> CommError:
        """The error of this rank, which has waited for too long."""
        deadline = time.monotonic() + CAUSE_SEARCH
        self.begin_search(WaitStatus(self.globally(late.missing), late.purpose))
        while not (causes := self.causes()) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(_MAX_POLL_INTERVAL)
        how = f"did not arrive within {timeout:g} s"
        causes = causes or self.causes_of_absence(how) or [f"{self.names(late.missing)} {how}"]
        return self.error(causes, f"was about to {late.purpose}")

    def all_arrived(self, timeout: float, watch_neighbors: Callable[[], None]) -> bool:
        """Whether every rank has entered the latest round within the timeout. `watch_neighbors` as in `share`."""
        deadline, missing = time.monotonic() + timeout, set(range(self._world)) if self._round else set()
        while True:
            missing -= self._signatures(self._round, missing).keys()
            if not missing or time.monotonic() > deadline or self.causes() or self.ended().keys() & missing:
                return not missing
            watch_neighbors()
            time.sleep(_MAX_POLL_INTERVAL)

    def publish_address(self) -> None:
        """Publish how other ranks reach the process of this rank."""
        own = liveness()
        if own is not None:
            self._set(f"address/{self._rank}", own.address(self._store))

    def address(self, rank: int) -> str | None:
        """How to reach the process of a rank; None if it has not been published yet."""
        return self._get(key) if self._check(key := f"address/{rank}") else None

    def waiting(self, ranks: Iterable[int]) -> dict[int, Signature]:
        """The agreement that `ranks` wait for and that this rank has not entered."""
        return self._signatures(self._round + 1, ranks)

    def share(
        self, name: str, value: str, ranks: Iterable[int], timeout: float, watch_neighbors: Callable[[], None]
    ) -> dict[int, str]:
        """Publish a value of this rank under a name that is used once, and return the values of `ranks`.

        While ranks are missing, `watch_neighbors` is called again and again, which reports neighbors that have ended.
        """
        self._set(f"{name}/{self._rank}", value)

        def read(others: Iterable[int]) -> dict[int, str]:
            return self._values(name, others)

        try:
            return self._gather({self._rank: value}, ranks, read, "connect with other ranks", timeout, watch_neighbors)
        except _LateError as error:
            raise self._search(error, timeout, watch_neighbors) from None
        finally:
            self.missing = ()

    def publish(self, calls: str) -> None:
        """Publish the latest calls of this rank."""
        self._set(f"calls/{self._rank}", calls)

    def published(self, ranks: Iterable[int]) -> dict[int, str]:
        """The calls that `ranks` have published."""
        return self._values("calls", ranks)

    def _signatures(self, round_: int, ranks: Iterable[int]) -> dict[int, Signature]:
        texts = self._values(f"agree/{round_}", sorted(ranks))
        return {rank: Signature.from_json(text) for rank, text in texts.items() if text != _WITHDRAWN}

    def _signature_key(self, round_: int, rank: int) -> str:
        return f"agree/{round_}/{rank}"
