"""Run a command in a process of its own, send it signals, and read what it says when it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # it may be ignored here
        )  # fmt: skip
        self.pid = self._process.pid

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def read(self, characters: int) -> str:
        """The next characters of its stdout."""
        return self._process.stdout.read(characters)

    def line(self) -> str:
        """The next line of its stdout."""
        return self._process.stdout.readline()

    def processes(self) -> list[int]:
        """All processes of its session that are alive, its ranks in rank order."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                name, _, rest = (folder / "stat").read_text().rpartition(")")
                state, _, _, session = rest.split()[:4]
                if int(session) == self.pid and state != "Z":
                    found.append(int(name.split()[0]))
        return sorted(found)

    def ranks(self, count: int = 2) -> list[int]:
        """The processes of its ranks in rank order, as soon as all have been started."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ranks = []
            for process in self.processes():
                with suppress(OSError):
                    if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes():
                        ranks.append(process)
            if len(ranks) == count:
                return ranks
            time.sleep(0.02)
        raise AssertionError(f"{count} ranks were not started within 60 s")

    def signal(self, number: signal.Signals, process: int | None = None) -> None:
        """Send a signal to the command itself, or to one of its processes."""
        os.kill(self.pid if process is None else process, number)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, as a terminal does."""
        os.killpg(self.pid, number)

    def wait(self, timeout: float) -> Ended:
        """Wait for its end; AssertionError after `timeout` seconds."""
        began = time.monotonic()
        try:
            _, errors = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            states = {process: Path(f"/proc/{process}/wchan").read_text() for process in self.processes()}
            raise AssertionError(f"the command did not end within {timeout} s: {states}") from None
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 2  # processes that the kernel is about to end
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        code = self._process.returncode
        return Ended(128 - code if code < 0 else code, errors.splitlines(), seconds, left)
