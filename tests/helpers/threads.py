"""Ranks as threads that run at the same time, unlike those of `run_virtual`, which take turns."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnmesh.comm import Comm, CommError, Pending
from attnmesh.comm.base import Message, Signature


class _World:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int], list[Any]] = defaultdict(list)  # by source and target, in order
        self.signatures: dict[int, dict[int, Signature]] = defaultdict(dict)  # by round
        self.failed = False

    def wait(self, ready: Callable[[], bool], timeout: float) -> None:
        if not self.changed.wait_for(lambda: ready() or self.failed, timeout) or not ready():
            raise CommError("another rank has failed, or did not arrive")


class ThreadComm(Comm):
    """The comm of one thread."""

    def __init__(self, shared: _World, rank: int, world: int, timeout: float) -> None:
        super().__init__(rank, world, timeout)
        self._shared, self._round = shared, 0
        self._received: dict[int, int] = defaultdict(int)  # messages so far, by source

    def _exchange(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        with self._shared.changed:
            for tensor, peer in sends:
                self._shared.sent[self.rank, peer].append(tensor.detach().clone())
            self._shared.changed.notify_all()
        expected = []
        for tensor, peer in recvs:
            expected.append((tensor, peer, self._received[peer]))
            self._received[peer] += 1
        return _Expected(self, expected)

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        self._round += 1
        with self._shared.changed:
            signatures = self._shared.signatures[self._round]
            signatures[self.rank] = signature
            self._shared.changed.notify_all()
            self._shared.wait(
                lambda: len(signatures) == self.world or any(each.error for each in signatures.values()), self.timeout
            )
            return dict(signatures)


class _Expected(Pending):
    def __init__(self, comm: ThreadComm, messages: list[tuple[Any, int, int]]) -> None:
        self._comm, self._messages = comm, messages

    def wait(self) -> None:
        comm, messages, self._messages = self._comm, self._messages, []
        shared = comm._shared
        for tensor, peer, number in messages:
            with shared.changed:
                sent = shared.sent[peer, comm.rank]
                shared.wait(lambda sent=sent, number=number: len(sent) > number, comm.timeout)
                arrived, sent[number] = sent[number], None
            assert (arrived.shape, arrived.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(arrived)


def run_threads(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Run `fn(comm, *args)` on as many threads and return the results in rank order; raises the first error.

    After an error or the timeout, threads that do not use their comm are left to themselves.
    """
    shared = _World()
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def rank(comm: ThreadComm) -> None:
        error, result = None, None
        try:
            result = fn(comm, *args)
        except BaseException as raised:
            error = raised
        with shared.changed:
            if error is None:
                results[comm.rank] = result
            else:
                errors.append(error)
                shared.failed = True
            shared.changed.notify_all()

    for number in range(world):
        comm = ThreadComm(shared, number, world, timeout)
        threading.Thread(target=rank, args=(comm,), name=f"rank {number}", daemon=True).start()
    with shared.changed:
        shared.changed.wait_for(lambda: errors or len(results) == world, timeout)
    if errors:
        raise errors[0]
    assert len(results) == world, f"only ranks {sorted(results)} have ended after {timeout} s"
    return [results[number] for number in range(world)]
