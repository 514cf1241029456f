"""A process that runs tests for `gpu.run`: pytest, with a loop that takes tests from a pipe and reports results."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from .compile_lock import share_compilations
from .schedule import Test

# Errors after which every call of the process fails.
STICKY = re.compile(
    r"illegal memory access|illegal instruction|illegal address|misaligned address|unspecified launch failure"
    r"|device-side assert|invalid program counter|hardware stack error|launch timed out|uncorrectable ECC"
    r"|CUDA_ERROR_(ILLEGAL|LAUNCH|MISALIGNED|ASSERT|HARDWARE|INVALID_PC|ECC)|context is destroyed"
)


class Loop:
    """The plugin that replaces pytest's collection and its loop over tests."""

    def __init__(self, pipe: Connection, locks: Path, needs_gpu: bool) -> None:
        self.pipe, self.locks, self.needs_gpu = pipe, locks, needs_gpu
        self._sending = threading.Lock()  # virtual ranks are threads, which compile too
        self._reports: list[pytest.TestReport] = []
        self._problems: list[tuple[str, str, str]] = []
        self._items: dict[str, dict[str, pytest.Item]] = {}

    def send(self, *message: Any) -> None:
        with self._sending:
            self.pipe.send(message)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Compilation is not counted as time of the test."""
        self.send("compiling")
        try:
            yield
        finally:
            self.send("compiled")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # later, and only the files whose tests run here

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._problems.append((report.nodeid, report.outcome, report.longreprtext))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        machine = describe_machine(self.needs_gpu)
        if machine["gpu"]:
            share_compilations(self.locks, self.compiling)
        self.send("ready", machine)
        while True:
            try:
                command, *args = self.pipe.recv()
            except EOFError:  # the runner is gone
                return True
            if command == "collect":
                self.collect(session)
            else:
                self.run(session, *args)

    def collect(self, session: pytest.Session) -> None:
        """Report what the arguments select, and what could not be imported. Files without the mark are not imported."""
        try:
            files = files_with_mark(session.config)
            tests = [asdict(describe_test(item)) for item in session.perform_collect(files)] if files else []
        except pytest.UsageError as error:
            tests = []
            self._problems.append((" ".join(session.config.args), "failed", str(error)))
        self.send("collected", tests, self._problems)

    def run(self, session: pytest.Session, tests: list[str]) -> None:
        file = tests[0].partition("::")[0]
        if file not in self._items:
            path = str(session.config.rootpath / file)
            self._items[file] = {item.nodeid: item for item in session.perform_collect([path])}
        items = [self._items[file][test] for test in tests]
        for item, after in zip(items, [*items[1:], None], strict=True):
            self._reports.clear()
            self.send("started", item.nodeid)
            begin = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            result, message, text = outcome(self._reports)
            if problem := error_of_gpu():
                result, message, text = "failed", message or problem, f"{text}\nAfter the test: {problem}"
            sticky = result == "failed" and bool(problem or STICKY.search(text))
            if after is None or sticky:
                free_memory()
            self.send("finished", item.nodeid, result, time.monotonic() - begin, message, text, sticky)
            if sticky:
                os._exit(0)  # another process goes on, with a context of its own
        self.send("idle")


def describe_test(item: pytest.Item) -> Test:
    """Return the test with what its marks say."""

    def number(mark: str) -> float | None:
        found = item.get_closest_marker(mark)
        return float(found.args[0] if found.args else next(iter(found.kwargs.values()))) if found else None

    return Test(
        item.nodeid,
        ranks=item.get_closest_marker("ranks") is not None or "nccl_ranks" in getattr(item, "fixturenames", ()),
        exclusive=item.get_closest_marker("exclusive") is not None,
        timeout=number("timeout"),
        gpu_memory=number("gpu_memory"),
    )


def files_with_mark(config: pytest.Config) -> list[str]:
    """Return the arguments with each folder replaced by its test files that name the mark `cuda`: few of all.

    Pytest collects a file that is named, even one that its options ignore, so those are left out here.
    """

    def ignored(path: Path) -> bool:
        return any(config.hook.pytest_ignore_collect(collection_path=at, config=config) for at in (path, *path.parents))

    found = []
    for arg in config.args:
        path = config.rootpath / arg
        if path.is_dir():
            files = (file for file in sorted(path.rglob("test_*.py")) if not ignored(file))
            found += [str(file) for file in files if "mark.cuda" in file.read_text(encoding="utf-8")]
        else:
            found.append(arg)
    return found


def outcome(reports: list[pytest.TestReport]) -> tuple[str, str, str]:
    """Return the result of a test from the reports on its setup, its call and its teardown, a line, and a text."""
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext.strip().rpartition("\n")[2]
            output = "".join(f"\n--- {title}\n{text[-4000:]}" for title, text in report.sections)
            return "failed", message.strip().partition("\n")[0], report.longreprtext + output
    for report in reports:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            return "skipped", reason.removeprefix("Skipped: "), ""
    return "passed", "", ""


def _torch_on_gpu() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def error_of_gpu() -> str:
    """Wait for what the test left running on the GPU, and return its error, if any."""
    if (torch := _torch_on_gpu()) is None:
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:  # torch.AcceleratorError since 2.8
        return str(error).partition("\n")[0]
    return ""


def free_memory() -> None:
    """Give back what torch keeps: other processes use the same GPU."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)  # of the last failure, with all tensors of its frames
    gc.collect()
    if (torch := _torch_on_gpu()) is not None:
        try:
            torch.cuda.empty_cache()
        except Exception as error:
            print(error, file=sys.stderr)


def describe_machine(needs_gpu: bool) -> dict[str, Any]:
    """Return the GPU and the versions; nothing that names the machine. `gpu` is empty where there is none."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "none"

    about = {"gpu": "", "gpu_memory_gib": 0.0, "driver": "", "cuda": "", "cores": len(os.sched_getaffinity(0))}
    if needs_gpu:
        import torch

        about["cuda"] = torch.version.cuda or ""
        if torch.cuda.is_available():
            _, total = torch.cuda.mem_get_info()
            about |= {"gpu": torch.cuda.get_device_name(), "gpu_memory_gib": total / 2**30, "driver": driver()}
    versions = {package: version(package) for package in ("torch", "triton", "pytest")}
    return about | versions | {"python": ".".join(map(str, sys.version_info[:3]))}


def driver() -> str:
    """Return the version of the GPU's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.partition("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def main() -> None:
    """Run pytest with the options of the command line until the runner closes its end of the pipe."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--locks", type=Path, required=True)
    parser.add_argument("--without-gpu", action="store_true")
    own, pytest_args = parser.parse_known_args()

    os.set_inheritable(own.pipe, False)
    stderr = os.fdopen(os.dup(2), "w")
    faulthandler.enable(stderr)
    faulthandler.register(signal.SIGUSR1, stderr)  # the runner asks where a stuck test is before it kills the process
    options = [
        "-o", "addopts=",  # no --strict-config: it needs every plugin whose options pyproject.toml has
        *(part for plugin in ("cacheprovider", "faulthandler", "timeout", "xdist") for part in ("-p", f"no:{plugin}")),
        "--capture=sys",  # what C++ says before it aborts is in the log
        f"--basetemp={own.folder / 'tmp'}",
        "-m", "cuda and not sweep",
    ]  # fmt: skip
    if Path("conftest.py").exists():
        # As a plugin: pytest 9.1 gives the fixtures of a conftest.py only to the files that it collects first.
        options += ["--noconftest", "-p", "conftest"]
    loop = Loop(Connection(own.pipe), own.locks, not own.without_gpu)
    sys.exit(pytest.main([*options, *pytest_args], plugins=[loop]))


if __name__ == "__main__":
    main()
