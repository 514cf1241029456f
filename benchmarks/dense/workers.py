"""Jobs in processes that may hang or die: a kernel that never ends, or ends its process, loses its own job only."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from attnmesh.calibration.timing import reason

Work = Callable[[Any], Iterable[tuple[str, Any]]]
Retry = Callable[[Any, str], Any]
TIME_UP = "the time is up"
NOW = "now"  # what a job does next: the value is a name, which is reported if it never ends


class Event(NamedTuple):
    """What happened to job number `job`: a kind and value that it yielded, "done", or "lost" with (NOW's name, why)."""

    job: int
    kind: str
    value: Any = None


def no_retry(job: Any, name: str) -> None:
    """A lost job is not repeated."""


def supervise(
    work: Work, jobs: Sequence[Any], *, silence: float, deadline: float, retry: Retry = no_retry, start: str = "spawn"
) -> Iterator[Event]:
    """Run `work(job)` for one job after another in one other process, and yield what they yield.

    A process that raises, dies, or yields nothing for `silence` seconds is replaced by one that goes on after the lost
    job, or with what `retry` makes of it (None: nothing). At the `deadline` (of `time.monotonic`) all that is left is
    lost.
    """
    context: Any = multiprocessing.get_context(start)
    left = deque(enumerate(jobs))
    while left and time.monotonic() < deadline:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(work, list(left), sending))
        process.start()
        sending.close()
        name, why = "", ""
        try:
            while left and not why:
                wait = deadline - time.monotonic()
                if not receiving.poll(max(0.0, min(silence, wait))):
                    why = TIME_UP if wait < silence else f"no answer for {silence:g} s"
                    break
                try:
                    event = receiving.recv()
                except EOFError:
                    process.join()
                    why = f"its process ended with status {process.exitcode}"
                    break
                if event.kind == "lost":
                    why = event.value
                elif event.kind == NOW:
                    name = event.value
                else:
                    yield event
                    if event.kind == "done":
                        left.popleft()
                        name = ""
            if not why:
                process.join(10)
        finally:
            if process.is_alive():
                process.kill()
            process.join()
            receiving.close()
        if why:
            number, job = left.popleft()
            yield Event(number, "lost", (name, why))
            if (again := retry(job, name)) is not None:
                left.appendleft((number, again))
    yield from (Event(number, "lost", ("", TIME_UP)) for number, _ in left)


def supervise_many(
    work: Work, jobs: Sequence[Any], processes: int, *, silence: float, deadline: float, start: str = "spawn"
) -> Iterator[Event]:
    """`supervise` in several processes at once, each with its share of the jobs; events in the order they come."""
    events: queue.Queue[Event | None] = queue.Queue()
    shares = [range(len(jobs))[n::processes] for n in range(min(processes, len(jobs)))]

    def follow(share: range) -> None:
        try:
            given = [jobs[n] for n in share]
            for event in supervise(work, given, silence=silence, deadline=deadline, start=start):
                events.put(event._replace(job=share[event.job]))
        finally:
            events.put(None)

    for share in shares:
        threading.Thread(target=follow, args=(share,), daemon=True).start()
    running = len(shares)
    while running:
        event = events.get()
        if event is None:
            running -= 1
        else:
            yield event


def _serve(work: Work, jobs: Sequence[tuple[int, Any]], connection: Connection) -> None:
    for number, job in jobs:
        try:
            for kind, value in work(job):
                connection.send(Event(number, kind, value))
        except Exception as error:  # it may have left the device unusable: the next job gets a new process
            connection.send(Event(number, "lost", reason(error)))
            return
        connection.send(Event(number, "done"))
