"""A notice board in a process group's store: claims and failures travel beside the data, on any backend."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from attnmesh.comm.agreement import Claim, in_words
from attnmesh.comm.base import CommError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.05  # seconds between two looks at the board

# Written over a claim. Deleting it would race with a peer that has seen the key and now asks for its value.
_WITHDRAWN = ""


class Board:
    """One rank's access to the notes of all ranks of a group.

    Notes are polled rather than waited for: a store's own wait cannot watch for a peer's failure at the
    same time, and complains on stderr when it times out.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._prefix: str | None = None
        self._round = 0  # of agreements; every rank counts the same

    def compare(self, claim: Claim, timeout: float) -> dict[int, Claim]:
        """Pin up this rank's claim and collect all, or what is there as soon as one holds an error."""
        self._round += 1
        self._set(self._claim_key(self._round, self._rank), claim.to_json())
        try:
            claims = self._collect(claim, timeout)
        except CommError:
            with suppress(CommError):  # withdrawn, so that nobody who comes later takes it for an agreement
                self._set(self._claim_key(self._round, self._rank), _WITHDRAWN)
            raise
        if len(claims) == self._world and self._round > 1:
            # Everybody is in this round, so nobody looks at the last one any more.
            self._delete(self._claim_key(self._round - 1, self._rank))
        return claims

    def _collect(self, claim: Claim, timeout: float) -> dict[int, Claim]:
        claims = {self._rank: claim}
        deadline, nap = time.monotonic() + timeout, _SHORTEST_NAP
        while len(claims) < self._world and all(known.error is None for known in claims.values()):
            missing = set(range(self._world)) - claims.keys()
            found = self._claims(self._round, missing)
            claims |= found
            if found:
                continue
            if reasons := self.failures():
                raise CommError(f"rank {self._rank} was about to start {claim}, but {reasons}")
            if time.monotonic() > deadline:
                absent = in_words(sorted(missing))
                raise CommError(
                    f"rank {self._rank} was about to start {claim}, but {absent} did not come to agree "
                    f"within {timeout} s: dead, stuck, or gone on with something agreed before"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return claims

    def all_came(self, timeout: float) -> bool:
        """Whether every rank has come to the latest round, within the timeout."""
        deadline, missing = time.monotonic() + timeout, set(range(self._world)) if self._round else set()
        while True:
            missing -= self._claims(self._round, missing).keys()
            if not missing or time.monotonic() > deadline or self.failures():
                return not missing
            time.sleep(_LONGEST_NAP)

    def report_failure(self, message: str) -> None:
        """Say that this rank gives up. Best effort: the store may have died with the rank that served it."""
        with suppress(CommError):
            self._set(f"failure/{self._rank}", message)
            self._set("failure", "yes")  # the one key that all look at

    def failures(self) -> str:
        """What other ranks said when they gave up; empty when nobody did."""
        if not self._check("failure"):
            return ""
        others = [rank for rank in range(self._world) if rank != self._rank]
        said = [(rank, self._get(f"failure/{rank}")) for rank in others if self._check(f"failure/{rank}")]
        return "; ".join(f"rank {rank} failed: {message}" for rank, message in said)

    def explain(self) -> str:
        """Why a peer may be silent: what it said as it failed, or what it waits to agree on. Never raises."""
        try:
            if reasons := self.failures():
                return f"; {reasons}"
            waiting = self._claims(self._round + 1, set(range(self._world)) - {self._rank})
        except CommError:
            return ""
        return "".join(
            f"; rank {rank} wants to agree on {claim}" + (f" and says: {claim.error}" if claim.error else "")
            for rank, claim in waiting.items()
        )

    def _claims(self, round_: int, ranks: Iterable[int]) -> dict[int, Claim]:
        keys = {rank: self._claim_key(round_, rank) for rank in sorted(ranks)}
        notes = {rank: self._get(key) for rank, key in keys.items() if self._check(key)}
        return {rank: Claim.from_json(note) for rank, note in notes.items() if note != _WITHDRAWN}

    def _claim_key(self, round_: int, rank: int) -> str:
        return f"agree/{round_}/{rank}"

    # The store, with every failure as a CommError.

    def _key(self, name: str) -> str:
        if self._prefix is None:
            # A group made again after its destruction may find its old store, notes and all. The count of
            # ranks that ever joined tells the generations apart, because a generation agrees on nothing
            # before all have joined.
            joined = self._store.add("attnmesh/joined", 1)
            self._prefix = f"attnmesh/{(joined - 1) // self._world}"
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
        why = str(error).splitlines()[0]
        raise CommError(f"rank {rank} lost the group's store (has the rank that serves it died?): {why}") from error
