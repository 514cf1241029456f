"""Agreement between ranks: they compare the operation and its arguments before they exchange data."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from attnmesh.comm.liveness import liveness
from attnmesh.core.call_log import LoggedCall, alternatives, format_ranks, ranks_by_value

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")


class CommError(RuntimeError):
    """A peer died, raised, or did not arrive in time. The comm cannot be used any more."""


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


def disagreement(signatures: Mapping[int, Signature]) -> str | None:
    """The error message for signatures (by rank) that do not agree; None if they do.

    An error that a rank reports about its own arguments comes first, because it explains other differences.
    """
    ranks = sorted(signatures)
    errors = ranks_by_value({rank: error for rank in ranks if (error := signatures[rank].error) is not None})
    if errors:
        operation = signatures[next(rank for rank in ranks if signatures[rank].error is not None)].operation
        return f"{operation}: " + "; ".join(f"{error} (on {format_ranks(by)})" for error, by in errors.items())

    operations = {rank: signatures[rank].operation for rank in ranks}
    if len(set(operations.values())) > 1:
        calls = {rank: str(signatures[rank]) for rank in ranks}
        return f"ranks called different operations: {alternatives(calls)}"

    names = dict.fromkeys(name for rank in ranks for name in signatures[rank].values)
    differing = []
    for name in names:
        values = {rank: signatures[rank].values.get(name, "(not given)") for rank in ranks}
        if len(set(values.values())) > 1:
            differing.append(f"{name} is {alternatives(values)}")
    if differing:
        return f"{operations[ranks[0]]}: ranks disagree: " + "; ".join(differing)
    return None


_MIN_POLL_INTERVAL, _MAX_POLL_INTERVAL = 0.0005, 0.05  # seconds

# Written over a signature to withdraw it. Deleting the key would race with a peer that is about to read its value.
_WITHDRAWN = ""


class AgreementStore:
    """Signatures and failure notices of all ranks of a process group, in the group's key-value store.

    The store works next to the data, with any backend. Keys are polled rather than waited for: a store's own `wait`
    cannot watch for the failure of a peer at the same time, and logs to stderr when it times out.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._prefix: str | None = None
        self._round = 0  # number of agreements so far; the same on every rank

    @property
    def round(self) -> int:
        """The number of agreements that this rank has entered."""
        return self._round

    def compare(
        self, signature: Signature, timeout: float, check_missing_ranks: Callable[[], None] = lambda: None
    ) -> dict[int, Signature]:
        """Publish this rank's signature and return those of all ranks, or those so far as soon as one has an error.

        While ranks are missing, `check_missing_ranks` is called again and again; it raises CommError to give up.
        """
        self._round += 1
        self._set(self._signature_key(self._round, self._rank), signature.to_json())
        try:
            signatures = self._collect(signature, timeout, check_missing_ranks)
        except CommError:
            with suppress(CommError):  # withdraw it, so that a rank that arrives later does not take it for agreement
                self._set(self._signature_key(self._round, self._rank), _WITHDRAWN)
            raise
        if len(signatures) == self._world and self._round > 1:
            # All ranks have entered this round, so none reads the previous one any more.
            self._delete(self._signature_key(self._round - 1, self._rank))
        return signatures

    def _collect(
        self, signature: Signature, timeout: float, check_missing_ranks: Callable[[], None]
    ) -> dict[int, Signature]:
        def read(ranks: Iterable[int]) -> dict[int, Signature]:
            return self._signatures(self._round, ranks)

        def is_enough(signatures: Mapping[int, Signature]) -> bool:
            return any(known.error is not None for known in signatures.values())

        known, ranks = {self._rank: signature}, range(self._world)
        return self._gather(known, ranks, read, f"start {signature}", timeout, check_missing_ranks, is_enough)

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
        """Read what `ranks` publish until all of it is known; CommError if a rank has failed, ended or is late.

        `purpose` is what this rank is about to do, for the error. `meanwhile` is called while ranks are missing; it
        may raise CommError too.
        """
        deadline, interval = time.monotonic() + timeout, _MIN_POLL_INTERVAL
        while (missing := set(ranks) - known.keys()) and not is_enough(known):
            new = read(missing)
            known |= new
            if new:
                continue
            problem = self.failures()
            # A rank that has ended may have taken part before: what it published is complete.
            if not problem and (ended := self.ended().keys() & missing) and not read(ended):
                problem = self.describe_ended(ended)
            if not problem and time.monotonic() > deadline:
                problem = (
                    f"{format_ranks(sorted(missing))} did not arrive to agree within {timeout:g} s: dead, stuck, or "
                    "running something agreed on before"
                )
            if problem:
                raise CommError(f"rank {self._rank} was about to {purpose}, but {problem}")
            meanwhile()
            time.sleep(interval)
            interval = min(2 * interval, _MAX_POLL_INTERVAL)
        return known

    def all_arrived(self, timeout: float, watch_neighbors: Callable[[], None]) -> bool:
        """Whether every rank has entered the latest round within the timeout. `watch_neighbors` as in `share`."""
        deadline, missing = time.monotonic() + timeout, set(range(self._world)) if self._round else set()
        while True:
            missing -= self._signatures(self._round, missing).keys()
            if not missing or time.monotonic() > deadline or self.failures() or self.ended().keys() & missing:
                return not missing
            watch_neighbors()
            time.sleep(_MAX_POLL_INTERVAL)

    def report_failure(self, message: str) -> None:
        """Publish that this rank has failed. Best effort: the store may have died with the rank that hosts it."""
        with suppress(CommError):
            self._set(f"failure/{self._rank}", message)
            self._set("failure", "yes")  # the one key that every rank polls

    def failures(self) -> str:
        """The failures that other ranks reported; empty if there are none."""
        if not self._check("failure"):
            return ""
        others = [rank for rank in range(self._world) if rank != self._rank]
        messages = [(rank, self._get(f"failure/{rank}")) for rank in others if self._check(f"failure/{rank}")]
        return "; ".join(f"rank {rank} failed: {message}" for rank, message in messages)

    def report_end(self, rank: int, how: str) -> None:
        """Publish that the process of another rank has ended."""
        self._set(f"ended/{rank}", how)
        self._set("failure", "yes")

    def ended(self) -> dict[int, str]:
        """The ranks whose processes have ended, and how. They need not be missed: they may have done their part."""
        if not self._check("failure"):
            return {}
        keys = {rank: f"ended/{rank}" for rank in range(self._world)}
        return {rank: self._get(key) for rank, key in keys.items() if self._check(key)}

    def describe_ended(self, ranks: Iterable[int]) -> str:
        """Which ranks are dead, and why, for an error message."""
        ended = self.ended()
        return "; ".join(f"rank {rank} is dead: {ended[rank]}" for rank in sorted(ranks))

    def publish_address(self) -> None:
        """Publish how other ranks reach the process of this rank."""
        own = liveness()
        if own is not None:
            self._set(f"address/{self._rank}", own.address(self._store))

    def address(self, rank: int) -> str | None:
        """How to reach the process of a rank; None if it has not been published yet."""
        return self._get(key) if self._check(key := f"address/{rank}") else None

    def explain(self) -> str:
        """Why a peer may not respond: its reported failure, or the agreement it waits for. Never raises."""
        try:
            if failures := self.failures():
                return f"; {failures}"
            if ended := self.ended():
                return f"; {self.describe_ended(ended)}"
            waiting = self.waiting(set(range(self._world)) - {self._rank})
        except CommError:
            return ""
        return "".join(
            f"; rank {rank} is about to start {signature}"
            + (f" with error: {signature.error}" if signature.error else "")
            for rank, signature in waiting.items()
        )

    def waiting(self, ranks: Iterable[int]) -> dict[int, Signature]:
        """The agreement that `ranks` wait for and that this rank has not entered."""
        return self._signatures(self._round + 1, ranks)

    def share(
        self, name: str, value: str, ranks: Iterable[int], timeout: float, watch_neighbors: Callable[[], None]
    ) -> dict[int, str]:
        """Publish a value of this rank under a name that is used once, and return those of `ranks`.

        While ranks are missing, `watch_neighbors` is called again and again, which reports those that have ended.
        """
        self._set(f"{name}/{self._rank}", value)

        def read(others: Iterable[int]) -> dict[int, str]:
            return {rank: self._get(f"{name}/{rank}") for rank in others if self._check(f"{name}/{rank}")}

        return self._gather({self._rank: value}, ranks, read, "connect with other ranks", timeout, watch_neighbors)

    def publish(self, calls: str) -> None:
        """Publish the calls of this rank, instead of those published before."""
        self._set(f"calls/{self._rank}", calls)

    def published(self, ranks: Iterable[int]) -> dict[int, str]:
        """The calls that `ranks` have published."""
        keys = {rank: f"calls/{rank}" for rank in ranks}
        return {rank: self._get(key) for rank, key in keys.items() if self._check(key)}

    def _signatures(self, round_: int, ranks: Iterable[int]) -> dict[int, Signature]:
        keys = {rank: self._signature_key(round_, rank) for rank in sorted(ranks)}
        texts = {rank: self._get(key) for rank, key in keys.items() if self._check(key)}
        return {rank: Signature.from_json(text) for rank, text in texts.items() if text != _WITHDRAWN}

    def _signature_key(self, round_: int, rank: int) -> str:
        return f"agree/{round_}/{rank}"

    # Access to the store, with every failure as a CommError.

    def _key(self, name: str) -> str:
        if self._prefix is None:
            # A group that is created again after its destruction may get its old store with all keys. How often this
            # rank has joined distinguishes the generations, also if the new group is smaller.
            self._prefix = f"attnmesh/{self._store.add(f'attnmesh/joined/{self._rank}', 1)}"
        return f"{self._prefix}/{name}"

    def _set(self, name: str, value: str) -> None:
        with _store_errors(self._rank):
            self._store.set(self._key(name), value)

    def _get(self, name: str) -> str:
        with _store_errors(self._rank):
            return str(self._store.get(self._key(name)), "utf-8")

    def _check(self, name: str) -> bool:
        with _store_errors(self._rank):
            return bool(self._store.check([self._key(name)]))

    def _delete(self, name: str) -> None:
        with _store_errors(self._rank):
            self._store.delete_key(self._key(name))


@contextmanager
def _store_errors(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CommError(f"rank {rank} lost the group's store (has the rank that hosts it died?): {reason}") from error
