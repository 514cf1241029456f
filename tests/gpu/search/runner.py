"""Runs cases in child processes, so that a stuck or crashed kernel costs one case and not the search."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch

from .cases import Case, Outcome, as_line, draw_case, run_case

START_SECONDS = 180  # to import the library, on a machine that others use


@dataclass
class Search:
    """What to search, and what was found."""

    family: str
    seed: int
    device: str
    workers: int = 1  # 0: in this process, without a watchdog
    limit: float = 60.0  # seconds that a case may take, with compiling
    verbose: bool = False
    case: Case | None = None  # this one instead of random ones
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def run(self, numbers: Iterator[int]) -> bool:
        """Run these cases and print those that fail. Return whether none did."""
        begin = time.monotonic()
        if self.workers:
            self._run_children(numbers)
        else:
            for number in numbers:
                self._record(number, run_case(self.family, self._drawn(number), self.device), 0.0)
        for reason, count in self.refusals.most_common():
            print(f"  refused {count}: {reason}")
        kinds = ", ".join(f"{self.counts[kind]} {kind}" for kind in ("passed", "refused", "failed", "stuck"))
        print(f"{self.family}: {self.counts.total()} cases in {time.monotonic() - begin:.0f} s: {kinds}", flush=True)
        return not self.counts["failed"] and not self.counts["stuck"]

    def _drawn(self, number: int) -> Case:
        return self.case or draw_case(self.family, self.seed, number, self.device)

    def _run_children(self, numbers: Iterator[int]) -> None:
        children: list[Child] = []
        given = iter(numbers)
        number = next(given, None)
        try:
            while number is not None or children:
                while number is not None and len(children) < self.workers:
                    children.append(Child(self.family, self.device))
                for child in children:
                    if child.is_idle and number is not None:
                        child.start(number, self._drawn(number), self.limit)
                        number = next(given, None)
                for child in [child for child in children if child.is_idle]:
                    children.remove(child)
                    child.stop()
                wait([child.pipe for child in children], timeout=0.5)
                for child in list(children):
                    self._look_at(child, children)
        finally:
            for child in children:
                child.kill()

    def _look_at(self, child: Child, children: list[Child]) -> None:
        """Record the outcome of a child that has one; replace one that is stuck, or dead, or of no more use."""
        number, outcome = child.number, child.outcome()
        if outcome is None:
            return
        if number is not None:
            self._record(number, outcome, child.seconds)
            child.number = None
        elif not child.ready:
            raise RuntimeError(f"a child process did not start: {outcome.why}")
        if outcome.fatal:
            child.kill()
            children.remove(child)

    def _record(self, number: int, outcome: Outcome, seconds: float) -> None:
        self.counts[outcome.status] += 1
        if outcome.status == "refused":
            self.refusals[outcome.why] += 1
        if outcome.status in ("failed", "stuck"):
            print(f"{outcome.status.upper()} {self._repeated(number)}: {outcome.why}", flush=True)
        elif self.verbose:
            print(f"{outcome.status} {seconds:.1f} s {self._repeated(number)} {outcome.why}", flush=True)

    def _repeated(self, number: int) -> str:
        """The command that repeats a case, and the case."""
        line = as_line(self._drawn(number))
        command = f"python -m tests.gpu.search {self.family}"
        device = "" if self.device == "cuda" else f" --device {self.device}"
        if self.case is not None:
            return f'{command} --case "{line}"{device}'
        return f"{command} --seed {self.seed} --number {number}{device}   # {line}"


class Child:
    """A process that runs one case after another."""

    def __init__(self, family: str, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, family, device), daemon=True)
        self.process.start()
        theirs.close()
        self.number: int | None = None
        self.ready = False
        self.began, self.limit = time.monotonic(), float(START_SECONDS)

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a case."""
        return self.ready and self.number is None

    @property
    def seconds(self) -> float:
        """Since it was given its case."""
        return time.monotonic() - self.began

    def start(self, number: int, case: Case, limit: float) -> None:
        """Give it a case."""
        self.number, self.began, self.limit = number, time.monotonic(), limit
        self.pipe.send(case)

    def outcome(self) -> Outcome | None:
        """Return what it said, if anything, or that it is dead or stuck."""
        try:
            if self.pipe.poll():
                self.ready = True
                return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
            return Outcome("failed", f"the process ended with exit code {self.process.exitcode}", fatal=True)
        if self.seconds > self.limit and not self.is_idle:
            return Outcome("stuck", f"no result after {self.limit:.0f} s", fatal=True)
        return None

    def stop(self) -> None:
        """Let it end by itself; kill it if it does not."""
        self.pipe.close()
        self.process.join(10)
        self.kill()

    def kill(self) -> None:
        """End it at once: a process that waits for a kernel handles no other signal."""
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, family: str, device: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
    if device == "cpu":
        torch.set_num_threads(1)
    pipe.send(Outcome("ready"))
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(run_case(family, case, device))
