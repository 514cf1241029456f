"""Taking turns: threads of which exactly one runs, until it waits for something that another must do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from attnmesh.comm.base import CommError


@dataclass
class _Waiting:
    ready: Callable[[], bool]
    what: Callable[[], str]


class Scheduler:
    """Hands one baton around `world` threads.

    Only the holder runs, so state shared between ranks needs no locks, cores are not oversubscribed, and
    the order of events is the same on every run: a rank runs until it must wait, then the next one in rank
    order that can go on. Who holds the baton also knows everybody's state, which makes deadlock a fact to
    look up, not a time-out to guess.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.broken: str | None = None
        """Why ranks cannot go on, once they cannot."""
        self.all_finished = threading.Event()
        self._turn = [threading.Semaphore(0) for _ in range(world)]
        self._waiting: dict[int, _Waiting] = {}
        self._finished: dict[int, str] = {}

    def start(self) -> None:
        """Give the baton to rank 0."""
        self._turn[0].release()

    def enter(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._turn[rank].acquire()

    def wait_until(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Let others run until `ready()`. Raise CommError as soon as it is known that this will never be."""
        if ready():
            return
        self._waiting[rank] = _Waiting(ready, what)
        self._pass_on(rank)
        self._turn[rank].acquire()
        del self._waiting[rank]
        if not ready():
            raise CommError(f"rank {rank} was waiting for {what()}; {self.broken}")

    def finish(self, rank: int, error: BaseException | None) -> None:
        """Leave for good; an error ends the wait of every other rank."""
        self._finished[rank] = "returned" if error is None else f"raised {type(error).__name__}"
        if error is not None and self.broken is None:
            self.broken = f"rank {rank} raised {type(error).__name__}: {error}"
        if len(self._finished) == self.world:
            self.all_finished.set()
        else:
            self._pass_on(rank)

    def abandon(self, why: str) -> None:
        """Nobody needs the results any more: ranks that wait, or will, raise instead."""
        self.broken = why

    def unfinished(self) -> str:
        """What every rank that has not finished is doing, in words."""
        ranks = [rank for rank in range(self.world) if rank not in self._finished]
        return "; ".join(f"rank {rank} is {self._doing(rank)}" for rank in ranks)

    def _pass_on(self, rank: int) -> None:
        """Give the baton to the next rank that can go on; if there is none, break: then all can, to raise."""
        order = [(rank + step) % self.world for step in range(1, self.world + 1)]
        chosen = next((other for other in order if self._can_run(other)), None)
        if chosen is None:
            states = "; ".join(f"rank {r} is {self._doing(r)}" for r in range(self.world))
            self.broken = f"deadlock: no rank can go on: {states}"
            chosen = next(other for other in order if self._can_run(other))
        self._turn[chosen].release()

    def _can_run(self, rank: int) -> bool:
        if rank in self._finished:
            return False
        waiting = self._waiting.get(rank)
        return waiting is None or self.broken is not None or waiting.ready()

    def _doing(self, rank: int) -> str:
        if rank in self._finished:
            return f"gone ({self._finished[rank]})"
        waiting = self._waiting.get(rank)
        return "running" if waiting is None else f"waiting for {waiting.what()}"
