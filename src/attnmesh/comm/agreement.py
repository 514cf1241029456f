"""Agreement between the ranks of a process group: they compare signatures in its key-value store."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

from attnmesh.comm.base import Signature
from attnmesh.comm.health.group_store import CommError, FailureNotices, WaitStatus
from attnmesh.comm.health.liveness import liveness

T = TypeVar("T")

CAUSE_SEARCH = 1.0
"""Seconds in which ranks that wait for others say so, after one of them has waited for too long."""

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
