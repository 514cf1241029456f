"""What the command does before torch is imported: signals and closed streams, in its own processes only."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnmesh.cli import errors, starting
from helpers.commands import default_signals

PYTHON = "/usr/bin/python3"
ALONE = Path(starting.__file__).parent  # where the module is found without the package, which imports torch


def run(code: str, *redirections: str) -> subprocess.CompletedProcess:
    whole = f"import sys; sys.path.insert(0, {str(ALONE)!r}); import starting; {code}"
    shell = ["sh", "-c", f'"$0" "$@" {" ".join(redirections)}', sys.executable, "-S", "-E", "-c", whole]
    return subprocess.run(shell, text=True, capture_output=True, timeout=60, check=False, preexec_fn=default_signals)


@pytest.mark.parametrize(
    ("argv", "original", "command"),
    [
        (["-m", "plan"], [PYTHON, "-m", "attnmesh", "plan"], True),
        (["-m"], [PYTHON, "-X", "dev", "-m", "attnmesh"], True),
        (["-m", "plan"], [PYTHON, "-mattnmesh", "plan"], True),
        (["-m", "attnmesh"], [PYTHON, "-m", "pytest", "attnmesh"], False),
        (["/bin/attnmesh", "plan"], [PYTHON, "/bin/attnmesh", "plan"], True),
        (["/bin/attnmesh", "plan"], [PYTHON, "-c", "from multiprocessing", "--multiprocessing-fork"], False),
        (["train.py"], [PYTHON, "train.py"], False),
        ([""], [PYTHON], False),
        ([], [], False),
    ],
)
def test_it_knows_its_own_processes(argv, original, command):
    assert starting.is_command(argv, original) == command


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_is_one_line_and_its_exit_code(number, said):
    ran = run(f"import signal; starting.end_at_signals(); signal.raise_signal({int(number)}); print('alive')")
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, "", f"attnmesh: {said}\n")


def test_a_signal_that_is_ignored_stays_ignored():
    ran = run(
        "import signal; signal.signal(2, signal.SIG_IGN); starting.end_at_signals(); signal.raise_signal(2);"
        "print(starting.raise_at_interrupt())"
    )
    assert (ran.returncode, ran.stdout) == (0, "False\n")


def test_streams_that_are_closed_are_opened():
    ran = run("starting.open_streams(); print(1); open('/dev/null'); print(2, file=sys.stderr)", "<&-", ">&-", "2>&-")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    ran = run("starting.open_streams(); print(sys.stdin.read() == '', file=sys.stderr)", "<&-", ">&-")
    assert (ran.returncode, ran.stderr) == (0, "True\n")


def test_other_programs_are_left_alone(monkeypatch):
    monkeypatch.setattr(starting, "end_at_signals", lambda: pytest.fail("signals were changed"))
    starting.start()
    assert not starting.raise_at_interrupt()


@pytest.mark.parametrize("code", [130, 143])
def test_an_interrupted_command_does_not_wait_for_its_threads(code, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        errors.run_command(lambda prog_name: sys.exit(code))
    assert ended == [code]
