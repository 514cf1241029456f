"""The command line as a whole: version, help, options with one name and one form, and errors in one line."""

import io
import pickle
import re
import runpy
import sys
from importlib import metadata

import pytest
import torch
import typer.completion

from attnmesh.cli import options, output
from attnmesh.utils.progress import reported
from helpers.cli import assert_refused, run

COMMANDS = [
    ("generate",),
    ("verify",),
    ("trace",),
    ("plan", "prefill"),
    ("plan", "decode"),
    ("simulate",),
    ("report",),
    ("calibrate",),
    ("warmup",),
]
OLD_NAMES = ("--gpus", "--context", "--heads", "--node", "--world", "--devices", "--inner")


def help_of(*command: str) -> str:
    return run(*command, "--help", env={"COLUMNS": "200"}).output


def test_the_package_is_a_module_that_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attnmesh", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("attnmesh", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out == f"attnmesh {metadata.version('attnmesh')}\n"


def test_help_lists_the_commands():
    shown = run().output
    assert all(command[0] in shown for command in COMMANDS)
    assert "bench" not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(shell, monkeypatch):
    # typer offers the shell's name as an argument only where it does not look for the shell that runs it
    monkeypatch.setattr(typer.completion, "_get_shell_name", lambda: shell)
    shown = run("--show-completion").output
    assert f"_ATTNMESH_COMPLETE=complete_{shell}" in shown
    assert "attnmesh" in shown


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("attnmesh ver", ["verify"]),
        ("attnmesh plan ", ["prefill", "decode"]),
        ("attnmesh verify --dev", ["--device"]),
        ("attnmesh verify --device c", ["cpu", "cuda"]),
    ],
)
def test_the_shell_completes_commands_options_and_values(line, completed):
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    assert run(env={"_ATTNMESH_COMPLETE": "complete_bash", **words}).output.split() == completed


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_options_have_one_name_and_a_sentence(command):
    shown = help_of(*command)
    options = re.findall(r"(--[a-z][a-z-]*)", shown)
    assert not set(options) & set(OLD_NAMES)
    rows: list[str] = []
    for line in shown.splitlines():
        if re.match(r"│ \*? *--", line):
            rows.append(line.strip("│ "))
        elif line.startswith("│") and rows:
            rows[-1] += " " + line.strip("│ ")
    assert rows
    for row in rows:
        help_text = re.sub(r"\[(default:|required).*", "", row).strip()
        assert help_text.endswith("."), row


@pytest.mark.parametrize(
    ("command", "length"),
    [
        (("trace", "--out", "x.json"), "lots"),
        (("plan", "prefill", "--model", "llama-3.1-8b", "--ranks", 2), "0"),
        (("report",), "0"),
        (("plan", "decode", "--model", "llama-3.1-8b", "--ranks", 2, "--batch", 1), "1.5"),
        (("simulate", "--ranks", 2), ""),
    ],
)
def test_a_length_is_a_number_with_an_optional_suffix(command, length):
    assert_refused(run(*command, "--length", length), "--length", f"got '{length}'")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command", [("verify",), ("trace", "--out", "x"), ("generate", "--prompt", "a"), ("calibrate",)]
)
def test_a_missing_gpu_is_reported(command):
    assert_refused(run(*command, "--device", "cuda"), "--device", "cuda: no CUDA device is available")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--ranks", "0"), "0 is not in the range"),
        (("verify", "--device", "tpu"), "'tpu' is not one of"),
        (("verfy",), "No such command 'verfy': did you mean 'verify'? See attnmesh --help."),
        (("bench", "ring"), "No such command 'bench': the commands are generate, serve, verify, trace, simulate"),
        (("plan", "dcode"), "No such command 'dcode': did you mean 'decode'? See attnmesh plan --help."),
        (("explain",), "No such command 'explain': attnmesh report shows why a schedule is chosen"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    assert_refused(run(*arguments), message)


@pytest.mark.parametrize("command", [("verify",), ("trace", "--out", "x"), ("generate", "--prompt", "a")])
def test_the_number_of_ranks_is_torchruns(command, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert_refused(run(*command, "--ranks", "3"), "torchrun sets the number of ranks (2)", "got ranks=3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    silent = run(*command, "--virtual")
    assert (silent.exit_code, silent.output) == (2, "")  # local rank 0 reports for all


def test_figures_name_their_machine():
    machine = output.machine("cpu")
    assert {"processor", "cores", "python", "torch", "triton"} <= machine.keys()
    assert machine["torch"] == torch.__version__
    assert all(isinstance(value, str) and value for value in machine.values())


def test_progress_is_a_line_every_two_seconds_without_a_terminal(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with output.Progress() as progress:
        for done in range(8):
            progress(f"step {done}", done, 7)
            now[0] += 0.75
    assert capsys.readouterr().err == "3 of 7: step 3, about 3 s left\n6 of 7: step 6, about 1 s left\n"


def test_a_loop_tells_how_far_it_is_and_how_long_it_will_take(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])

    def work() -> None:
        for _ in reported(range(1000), 1000):
            now[0] += 2.0
            for _ in reported(range(3), 3):  # only the outermost loop is shown
                pass

    with output.counting("counting"):
        work()
        for _ in reported(iter("abc"), 8):  # another loop has a clock of its own
            now[0] += 1.5
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["1 of 1000: counting, about 33 min left", "2 of 1000: counting, about 33 min left"]
    assert lines[950] == "951 of 1000: counting, about 98 s left"
    assert lines[-1] == "2 of 8: counting, about 9 s left"
    work()
    assert capsys.readouterr().err == ""


def test_status_is_a_line_only_if_it_takes_long(capsys, monkeypatch):
    with output.status("working"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "_LINE_EVERY", 0.0)
    shown = ""
    with output.status("working"):
        for _ in range(1000):
            shown += capsys.readouterr().err
            if shown:
                break
            output.time.sleep(0.001)
    assert shown == "working ...\n"


def test_progress_is_a_bar_on_a_terminal_and_goes_away(monkeypatch):
    shown = io.StringIO()
    terminal = output.Console(force_terminal=True, width=80, file=shown)
    monkeypatch.setattr(output, "console", lambda **_: terminal)
    with output.status("waiting"):
        pass
    progress = output.Progress()
    for done in range(3):
        pickle.loads(pickle.dumps(output.Progress()))
        progress(f"step {done}", done, 2)
    assert "step 2" in shown.getvalue()
    assert shown.getvalue().count("\x1b[?25l") == shown.getvalue().count("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize(
    ("device", "virtual", "got"), [("cpu", False, "device 'cpu'"), ("cuda", True, "virtual ranks")]
)
def test_ranks_that_cannot_share_a_gpu_are_a_usage_error(device, virtual, got):
    with pytest.raises(typer.BadParameter, match=f"share_gpu requires .* got {got}") as caught:
        options.check_share_gpu(True, device, virtual)
    assert caught.value.param_hint == "--share-gpu"
    options.check_share_gpu(False, device, virtual)
