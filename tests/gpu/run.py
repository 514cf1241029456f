"""Run all tests that need a GPU on one GPU: `make test-gpu`, or `python -m tests.gpu.run [OPTIONS] [PYTEST ARGUMENTS]`.

Workers are processes that take tests one function after the other (schedule.py has the order). A test that takes
longer than its limit is stuck: its worker is killed, for a kernel that does not end cannot be interrupted, and another
one goes on with the other tests. So it does where a test ends the process or leaves an error in its CUDA context. The
run ends with a summary, whatever happens.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from . import summary
from .schedule import Chunk, Test, chunks
from .summary import Record, Result

LIMIT_START, LIMIT_COMPILE = 180, 240  # seconds, of a worker's start or the import of a file, and of one compilation
MOST_FAILED_STARTS = 3
MOST_STUCK = 3  # cases of a function, after which the others are not run: each takes a worker for its whole limit
OUT_OF_MEMORY = "out of memory"  # of the GPU, maybe because of others: the test runs again, alone
LAST_WORDS = 0.5  # seconds that a stuck worker gets to print where it is
PROGRESS = 5  # seconds between lines
GPU_SHARE = 0.9  # of the GPU's memory, for tests
NICE = 5  # workers that compile give way to ranks, which have timeouts


class EndedEarlyError(Exception):
    """The run ends before all tests have run."""


@dataclasses.dataclass
class Worker:
    """A process that runs tests."""

    number: int
    ranks: bool  # whether it runs the tests that start ranks, or the others
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    deadline: float
    ready: bool = False
    closed: bool = False  # its end of the pipe
    left: deque[Test] = dataclasses.field(default_factory=deque)  # of its chunk, the running test included
    imported: bool = False  # the file of its chunk
    running: bool = False  # the first test of `left`
    busy: Chunk | None = None
    begin: float = 0.0
    compilations: int = 0
    compiling_since: float = 0.0

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        for pid in (*family(self.process.pid), self.process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the end of the killed process."""
        with suppress(subprocess.TimeoutExpired):  # the driver may take long to end a kernel
            self.process.wait(5)
        self.pipe.close()

    def last_words(self) -> str:
        """Return the end of the worker's log."""
        return self.log.read_text(errors="replace")[-6000:]


def family(leader: int) -> list[int]:
    """Return the processes of a session and all their descendants, which may have sessions of their own."""
    parents: dict[int, int] = {}
    found = {leader}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            pid = int(stat.parent.name)
            parents[pid] = int(parent)
            if int(session) == leader:
                found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {leader})


class Runner:
    """The run: a queue of chunks of tests, workers, and results."""

    def __init__(self, options: argparse.Namespace, pytest_args: Sequence[str]) -> None:
        self.options, self.pytest_args = options, pytest_args
        self.start = time.monotonic()
        self.record = Record(date=datetime.now(UTC).isoformat(timespec="seconds"))
        self.tests: list[Test] = []
        self.results: dict[str, Result] = {}
        self.queue: list[Chunk] = []
        self.workers: list[Worker] = []
        self.started = self.failed_starts = 0
        self.told = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-tests-"))
        (self.folder / "locks").mkdir()

    # Workers.

    def add_worker(self, *, ranks: bool) -> Worker:
        self.started += 1
        folder = self.folder / f"worker-{self.started}"
        folder.mkdir()
        ours, theirs = socket.socketpair()
        here = str(Path(__file__).parents[1])
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.options.workers))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (here, os.getcwd(), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": threads,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        own = ["--pipe", str(theirs.fileno()), "--folder", str(folder), "--locks", str(self.folder / "locks")]
        own += ["--without-gpu"] if self.options.without_gpu else []
        with (folder / "log").open("wb") as log, theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpu.worker", *own, *self.pytest_args],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, pass_fds=[theirs.fileno()],
                start_new_session=True,
            )  # fmt: skip
        if not ranks:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        worker = Worker(
            self.started, ranks, process, Connection(ours.detach()), folder / "log", time.monotonic() + LIMIT_START
        )
        self.workers.append(worker)
        return worker

    def fill(self, tests: int, with_ranks: int) -> None:
        """Start as many workers of both kinds as there are chunks waiting for them."""
        workers, rank_workers = self.options.workers, self.options.rank_workers
        if not with_ranks and not any(worker.ranks and worker.busy for worker in self.workers):
            workers += rank_workers // 2  # the cores of ranks are free
        for ranks, most, waiting in ((False, workers, tests), (True, rank_workers, with_ranks)):
            wanted = min(most, waiting)
            free = [worker for worker in self.workers if worker.ranks == ranks and worker.busy is None]
            have = sum(worker.ranks == ranks for worker in self.workers)
            for _ in range(min(wanted - len(free), most - have)):
                self.add_worker(ranks=ranks)

    def fits(self, chunk: Chunk) -> bool:
        running = [worker.busy for worker in self.workers if worker.busy is not None]
        if not running:
            return True
        if chunk.exclusive or any(other.exclusive for other in running):
            return False
        total = self.record.machine["gpu_memory_gib"] * GPU_SHARE
        return not total or chunk.memory + sum(other.memory for other in running) <= total

    def assign(self) -> None:
        """Give every idle worker the first chunk that may run beside what runs now."""
        for worker in self.workers:
            if not worker.ready or worker.busy is not None:
                continue
            chunk = next((each for each in self.queue if each.ranks == worker.ranks and self.fits(each)), None)
            if chunk is None:
                continue
            self.queue.remove(chunk)
            worker.busy, worker.left, worker.imported = chunk, deque(chunk.tests), False
            worker.deadline = time.monotonic() + LIMIT_START
            with suppress(OSError):  # its death is noticed below
                worker.pipe.send(("run", [test.id for test in chunk.tests]))

    def replace(self, worker: Worker, result: str | None, message: str) -> None:
        """End a worker. The test that it ran has this result, and the rest of its chunk goes to another worker."""
        if result == "stuck":
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR1)
                time.sleep(LAST_WORDS)
        worker.kill()
        worker.reap()
        self.workers.remove(worker)
        if worker.ready:
            self.failed_starts = 0
        else:
            self.failed_starts += 1
            if self.failed_starts >= MOST_FAILED_STARTS:
                print(worker.last_words(), flush=True)
                raise EndedEarlyError(f"worker {worker.number} does not start: {message}")
        if result is not None and worker.running:
            seconds = time.monotonic() - worker.begin
            test = worker.left.popleft()
            self.add(Result(test.id, result, seconds, worker.number, message, worker.last_words()))
        elif result is not None and not worker.imported:
            for test in worker.left:
                self.add(Result(test.id, result, 0.0, worker.number, f"{message} in the import", worker.last_words()))
            worker.left.clear()
        if worker.left:
            self.queue.insert(0, Chunk(list(worker.left)))
        if result == "stuck" and worker.busy is not None:
            self.give_up(worker.busy.tests[0].function)

    def give_up(self, function: str) -> None:
        """Do not run the other cases of a function of which several are stuck."""
        stuck = [each for each in self.results.values() if each.result == "stuck" and each.function == function]
        if len(stuck) >= MOST_STUCK:
            for chunk in [chunk for chunk in self.queue if chunk.tests[0].function == function]:
                self.queue.remove(chunk)
                for test in chunk.tests:
                    self.results[test.id] = Result(test.id, "not run", message=f"{len(stuck)} other cases are stuck")

    # Messages.

    def handle(self, worker: Worker, message: tuple[Any, ...]) -> None:
        now = time.monotonic()
        match message:
            case "ready", machine:
                worker.ready = True
                self.record.machine = machine
            case "started", _:
                worker.imported = worker.running = True
                worker.begin, worker.compilations = now, 0
                worker.deadline = now + worker.left[0].limit(self.options.limit)
            case ("compiling",):
                worker.compilations += 1
                if worker.compilations == 1:
                    worker.compiling_since = now
            case ("compiled",):
                worker.compilations -= 1
                if worker.compilations == 0:
                    worker.deadline += now - worker.compiling_since
            case "finished", name, result, seconds, line, text, sticky:
                test = worker.left.popleft()
                worker.running, worker.deadline = False, now + LIMIT_START
                if result == "failed" and OUT_OF_MEMORY in text and not test.exclusive:
                    print(f"{name} runs again, alone: {line[:300]}", flush=True)
                    self.queue.append(Chunk([dataclasses.replace(test, exclusive=True)]))
                else:
                    self.add(Result(name, result, seconds, worker.number, line, text))
                if sticky:
                    print(f"worker {worker.number} is replaced: its CUDA context is in error", flush=True)
                    self.replace(worker, None, "")
            case ("idle",):
                worker.busy = None

    def collect(self, worker: Worker) -> None:
        """Fill the queue with what a worker finds."""
        self.handle(worker, self.receive(worker))
        if not self.record.machine["gpu"] and not self.options.without_gpu:
            raise SystemExit("make test-gpu needs a GPU, and PyTorch finds none")
        worker.pipe.send(("collect",))
        if not self.pytest_args:  # there is work for all: they start meanwhile
            self.fill(self.options.workers, self.options.rank_workers)
        _, tests, problems = self.receive(worker)
        self.tests = [Test(**each) for each in tests]
        for name, outcome, text in problems:
            line = text.strip().rpartition("\n")[2]
            self.add(Result(name, outcome, message=line, text=text))
        self.queue = chunks(self.tests, summary.known_seconds(self.options.json))

    def receive(self, worker: Worker) -> tuple[Any, ...]:
        """Wait for a message of the first worker."""
        while not worker.pipe.poll(0.2):
            self.check_budget()
        try:
            message: tuple[Any, ...] = worker.pipe.recv()
        except (EOFError, OSError):
            print(worker.last_words(), flush=True)
            raise EndedEarlyError("the first worker does not start") from None
        return message

    def add(self, result: Result) -> None:
        self.results[result.id] = result
        if result.result in summary.BAD:
            print(f"{result.result.upper()} {result.id} ({result.seconds:.1f} s): {result.message[:300]}", flush=True)

    # The run.

    def check_budget(self) -> None:
        if time.monotonic() - self.start > self.options.budget:
            raise EndedEarlyError(f"the budget of {self.options.budget:g} s is spent")

    def check_workers(self) -> None:
        """Replace workers that died, and those whose test takes too long."""
        now = time.monotonic()
        for worker in list(self.workers):
            code = worker.process.poll()
            if worker.closed or (code is not None and not worker.pipe.poll()):
                code = worker.process.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                self.replace(worker, "crashed", f"the process ended with {how}")
            elif worker.compilations and now > worker.compiling_since + LIMIT_COMPILE:
                self.replace(worker, "stuck", f"a compilation took more than {LIMIT_COMPILE} s")
            elif now > worker.deadline and not worker.compilations and (worker.busy or not worker.ready):
                took = now - worker.begin if worker.running else LIMIT_START
                self.replace(worker, "stuck", f"no end after {took:.0f} s")

    def tell(self, *, now: bool = False) -> None:
        seconds = time.monotonic() - self.start
        if now or seconds - self.told >= PROGRESS:
            self.told = seconds
            count = Counter(each.result for each in self.results.values())
            busy = sum(worker.busy is not None for worker in self.workers)
            print(f"[{seconds:4.0f} s] {len(self.results)}/{len(self.tests)}: {summary.counts(count)}; {busy} running",
                  flush=True)  # fmt: skip

    def work(self) -> None:
        self.collect(self.add_worker(ranks=False))
        print(f"{len(self.tests)} tests in {len(self.queue)} parts; {summary.about(self.record.machine)}", flush=True)
        while self.queue or any(worker.busy for worker in self.workers):
            self.check_budget()
            with_ranks = sum(chunk.ranks for chunk in self.queue)
            self.fill(len(self.queue) - with_ranks, with_ranks)
            self.assign()
            by_pipe = {worker.pipe: worker for worker in self.workers}
            for pipe in wait(list(by_pipe), timeout=0.2):
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    by_pipe[pipe].closed = True
                else:
                    self.handle(by_pipe[pipe], message)
            self.check_workers()
            self.tell()

    def run(self) -> Record:
        """Run everything, and return the record of it."""

        def end(number: int, frame: object) -> None:
            raise EndedEarlyError(f"signal {signal.Signals(number).name}")

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            self.work()
        except EndedEarlyError as error:
            self.record.ended_by = str(error)
        except Exception as error:
            traceback.print_exc()
            self.record.ended_by = f"an error of the runner itself, {error!r}"
        finally:
            for number in before:
                signal.signal(number, signal.SIG_IGN)
            self.end_workers()
            shutil.rmtree(self.folder, ignore_errors=True)
            for number, handler in before.items():
                signal.signal(number, handler)
        self.record.workers = self.options.workers + self.options.rank_workers
        self.record.wall_seconds = time.monotonic() - self.start
        self.record.results = list(self.results.values())
        return self.record

    def end_workers(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.reap()
            if worker.running and worker.left:
                test = worker.left.popleft()
                self.results[test.id] = Result(
                    test.id, "not run", worker=worker.number, message=f"ran since {now - worker.begin:.0f} s"
                )
        for test in self.tests:
            self.results.setdefault(test.id, Result(test.id, "not run"))


def main(args: Sequence[str] | None = None) -> int:
    """Run the tests that the command line selects, print the summary, and return the exit code."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="make test-gpu", allow_abbrev=False, description="Run all tests that need a GPU on one GPU.",
        epilog="Other arguments are pytest's: files, folders, -k.",
    )  # fmt: skip
    add = parser.add_argument
    add("--budget", type=float, default=540, help="seconds after which the run ends (default 540)")
    add("--limit", type=float, default=60, help="seconds of a kernel's test without a mark `timeout` (default 60)")
    add("--workers", type=int, default=max(1, min(16, cores * 3 // 4)), help="processes for tests")
    add("--rank-workers", type=int, default=max(1, min(8, cores // 2)), help="processes for tests that start ranks")
    add("--json", type=Path, default=Path("build/test-gpu.json"), help="results; those of the last run set the order")
    add("--docs", type=Path, help="page whose table to write (default docs/gpu-tests.md, if all tests ran)")
    add("--without-gpu", action="store_true", help="run where there is no GPU: to test this program")
    options, pytest_args = parser.parse_known_args(args)

    record = Runner(options, pytest_args).run()
    whole = not pytest_args and not options.without_gpu and not record.ended_by
    page = options.docs or (Path("docs/gpu-tests.md") if whole else None)
    print(summary.as_text(record), flush=True)
    if record.results:
        summary.write_json(record, options.json)
        if page is not None:
            summary.write_table(record, page)
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
