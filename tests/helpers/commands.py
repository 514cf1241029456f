"""Run a command in a process of its own, send it signals, and read what it says when it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

START = 150
"""Seconds in which a command begins its work: imports take minutes on a busy machine."""
ATTNMESH = [sys.executable, "-m", "attnmesh"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code as a shell shows it, its lines on stderr, and the seconds that it took."""

    code: int
    errors: list[str]
    seconds: float
    left: list[int]
    """Its processes that still run."""

    @property
    def noise(self) -> list[str]:
        """Lines on stderr besides those about progress."""
        return [line for line in self.errors if not re.fullmatch(r".* \.\.\.|\d+ of \d+: .*", line)]


class Command:
    """A command in a session of its own, whose processes all end with the `with` statement."""

    def __init__(self, *command: object, **environment: str) -> None:
        self._errors = tempfile.TemporaryFile("a+")  # noqa: SIM115 - closed by __exit__; it appends wherever we read
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            preexec_fn=default_signals,
        )  # fmt: skip
        self.pid = self._process.pid
        self._sessions = {self.pid}  # torchrun starts its ranks in sessions of their own

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def read(self, characters: int) -> str:
        """The next characters of its stdout."""
        return self._process.stdout.read(characters)

    def line(self) -> str:
        """The next line of its stdout."""
        return self._process.stdout.readline()

    def wait_until_starting(self) -> None:
        """Wait until it handles SIGTERM: before its imports, which take seconds."""
        deadline = time.monotonic() + START
        while not self._caught() >> (signal.SIGTERM - 1) & 1:
            assert time.monotonic() < deadline, f"the command did not begin within {START} s"
            time.sleep(0.02)

    def _caught(self) -> int:
        """The signals that it handles, as bits."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("SigCgt:")[2].split()[0], 16)

    def wait_until_says(self, text: str) -> None:
        """Wait until it has printed a text on stderr."""
        deadline = time.monotonic() + START
        while text not in self._said():
            assert time.monotonic() < deadline, f"{text!r} was not printed within {START} s: {self._said()}"
            time.sleep(0.02)

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def processes(self) -> list[int]:
        """All processes of its session that are alive, its ranks in rank order."""
        alive = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                name, _, rest = (folder / "stat").read_text().rpartition(")")
                state, parent, _, session = rest.split()[:4]
                if state != "Z":
                    alive[int(name.split()[0])] = int(parent), int(session)
        for _ in range(3):  # parent, agent and rank
            ours = {process for process, (_, session) in alive.items() if session in self._sessions}
            self._sessions |= {session for parent, session in alive.values() if parent in ours}
        return sorted(ours)

    def ranks(self, count: int = 2) -> list[int]:
        """The processes of its ranks in rank order, as soon as all have been started."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            ranks = []
            for process in self.processes():
                with suppress(OSError):
                    if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes():
                        ranks.append(process)
            if len(ranks) == count:
                return ranks
            time.sleep(0.02)
        raise AssertionError(f"{count} ranks were not started within {START} s")

    def signal(self, number: signal.Signals, process: int | None = None) -> None:
        """Send a signal to the command itself, or to one of its processes."""
        self.processes()
        os.kill(self.pid if process is None else process, number)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, as a terminal does."""
        self.processes()
        os.killpg(self.pid, number)

    def wait(self, timeout: float) -> Ended:
        """Wait for its end; AssertionError after `timeout` seconds."""
        began = time.monotonic()
        try:
            self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            states = {process: Path(f"/proc/{process}/wchan").read_text() for process in self.processes()}
            raise AssertionError(f"the command did not end within {timeout} s: {states}") from None
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 2  # processes that the kernel is about to end
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        code = self._process.returncode
        return Ended(128 - code if code < 0 else code, self._said().splitlines(), seconds, left)


def default_signals() -> None:
    """Undo what the tests were started with: nohup and a shell's `&` ignore signals, and processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
