"""Virtual ranks: a world of ranks inside one process, on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from attnmesh.comm.agreement import Claim, complaint, in_words
from attnmesh.comm.base import Comm, CommError, Message, Pending
from attnmesh.comm.hub import Hub, Letter
from attnmesh.comm.recording import NotedPending
from attnmesh.comm.surroundings import Surroundings

T = TypeVar("T")


def run_virtual(world: int, fn: Callable[[Comm], T], *, timeout: float = 300) -> list[T]:
    """Run `fn(comm)` on `world` virtual ranks and return their results in rank order.

    The same program runs on real ranks, forward and backward. Ranks are threads that take turns, so
    runs repeat exactly. They share the caller's device, CUDA stream, autocast and gradient mode, and
    torch's global random numbers: a rank that needs its own takes a Generator.

    The first error on any rank ends the run and is raised here with the rank as a note. A deadlock is
    found at once and raised as a CommError that says what each rank waits for. After `timeout` seconds,
    ranks that still run are left behind with a CommError.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    hub = Hub(world)
    comms = [VirtualComm(hub, rank, timeout) for rank in range(world)]
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}  # in the order in which they were raised
    surroundings = Surroundings()

    def run_rank(comm: VirtualComm) -> None:
        comm.enter()
        error: BaseException | None = None
        try:
            with surroundings.recreated():
                results[comm.rank] = fn(comm)
        except BaseException as caught:
            error = errors[comm.rank] = caught
            error.add_note(f"raised on virtual rank {comm.rank} of {world}")
        finally:
            comm.leave(error)

    for comm in comms:
        threading.Thread(target=run_rank, args=(comm,), name=f"virtual rank {comm.rank}", daemon=True).start()
    hub.scheduler.start()
    try:
        in_time = hub.scheduler.all_finished.wait(timeout)
    except BaseException:  # the caller was interrupted
        hub.scheduler.abandon("run_virtual was interrupted")
        raise
    if not in_time:
        still = hub.scheduler.unfinished()
        hub.scheduler.abandon(f"run_virtual gave up after {timeout} s")
        raise CommError(f"virtual ranks did not finish within {timeout} s: {still}")
    if errors:
        raise _blamed(errors, world)
    return [results[rank] for rank in range(world)]


def _blamed(errors: Mapping[int, BaseException], world: int) -> BaseException:
    """The first error caused the others, unless all ranks made the same one: then rank 0 speaks for all."""
    alike = len({type(error) for error in errors.values()}) == 1
    return errors[0] if alike and len(errors) == world else next(iter(errors.values()))


class VirtualComm(Comm):
    """One virtual rank's end. It works only on the thread that runs the rank."""

    shares_stream = True

    def __init__(self, hub: Hub, rank: int, timeout: float) -> None:
        super().__init__(rank, hub.world, timeout)
        self._hub = hub
        self._thread: int | None = None
        self._round = 0  # of agreements; every rank counts the same

    def enter(self) -> None:
        """Wait for the first turn on the thread that is to be this rank."""
        self._thread = threading.get_ident()
        self._hub.scheduler.enter(self.rank)

    def leave(self, error: BaseException | None) -> None:
        """End this rank's run."""
        self._thread = None
        self._hub.scheduler.finish(self.rank, error)

    def _exchange(self, verb: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        self._check_in()
        letters = [Letter(verb, self.rank, peer, tensor.detach(), send=True) for tensor, peer in sends]
        letters += [Letter(verb, peer, self.rank, tensor.detach(), send=False) for tensor, peer in recvs]
        pending: Pending = _Letters(self, letters)
        if self.recorder is not None:
            for letter in letters:
                letter.noted_by(self.recorder)
            pending = NotedPending(pending, verb, self.recorder, letters[0].tensor.device)
        for letter in letters:
            self._hub.post(letter)
        return pending

    def _compare(self, claim: Claim) -> Mapping[int, Claim]:
        self._check_in()
        self._round += 1
        claims = self._hub.claims[self._round]
        claims[self.rank] = claim
        if len(claims) == self.world:
            self._hub.claims.pop(self._round - 1, None)  # all are in this round, none needs the last one

        def settled() -> bool:
            return len(claims) == self.world or any(known.error is not None for known in claims.values())

        self._hub.scheduler.wait_until(self.rank, settled, lambda: f"{self._absent()} to agree on {claim}")
        return dict(claims)

    def _check_in(self) -> None:
        """Refuse to run on another thread, or out of step with ranks that missed an agreement's error."""
        self._check_thread()
        claims = self._hub.claims[self._round] if self._round else {}
        if self._round and len(claims) < self.world:
            self._hub.scheduler.wait_until(
                self.rank,
                lambda: len(claims) == self.world,
                lambda: f"{self._absent()} to hear that {complaint(claims)}",
            )

    def _absent(self) -> str:
        return in_words([rank for rank in range(self.world) if rank not in self._hub.claims[self._round]])

    def wait_for(self, letters: Sequence[Letter]) -> None:
        """Let other ranks run until all letters are delivered."""
        self._check_thread()

        def what() -> str:
            return " and ".join(str(letter) for letter in letters if not letter.delivered)

        self._hub.scheduler.wait_until(self.rank, lambda: all(letter.delivered for letter in letters), what)
        for letter in letters:
            if letter.misfit is not None:
                raise ValueError(letter.misfit)

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise RuntimeError(
                f"virtual rank {self.rank} was used outside its own thread or after its run: a virtual comm "
                "belongs to the fn that run_virtual calls, and to backwards that stay on its thread"
            )


@dataclass(frozen=True)
class _Letters(Pending):
    comm: VirtualComm
    letters: Sequence[Letter]

    def wait(self) -> None:
        self.comm.wait_for(self.letters)
