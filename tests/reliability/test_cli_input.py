"""Hostile input: every command answers with one line and an exit code, and shows nothing that a terminal would obey."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from io import StringIO

import pytest
import typer

from attnmesh import launch
from attnmesh.cli import output, simulate
from attnmesh.cli.errors import Terminated, _reported
from attnmesh.cli.generate import Display
from attnmesh.comm import CommError
from attnmesh.generation.requests import GenerationStats
from attnmesh.report import GeneratedAnswer, generation_report
from attnmesh.report.page import page
from helpers.cases import first
from helpers.cli import run

EVIL = "\x1b]0;owned\x07\x1b[31m[red]x[/red]\r\u202e"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LONG = "a" * 5000
COUNTS = ["0", "-1", "1.5", "nan", "", "10000000000", str(2**63), "9" * 5000, EVIL]

SIMULATE = ("simulate", "--ranks", "8", "--length", "8k")
PREFILL = ("plan", "prefill", "--model", "llama-3.1-8b", "--ranks", "2", "--length", "8k")
DECODE = ("plan", "decode", "--q-heads", "8", "--kv-heads", "2", "--ranks", "2", "--batch", "2")
REPORT = ("report", "--no-check", "--out", "report.html")
TRACE = ("trace", "--out", "trace.json")
GENERATE = ("generate", "--prompt", "the secret prompt")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to work in, where no rank starts."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("ranks were started"))
    return tmp_path


def refused(*arguments: object, code: int = 2) -> str:
    """Assert one line on stderr, nothing on stdout, and the exit code; return the line."""
    ran = run(*arguments)
    assert ran.exit_code == code, (ran.output, ran.exception)
    assert ran.stdout == ""
    lines = ran.stderr.splitlines()
    assert len(lines) == 1, ran.stderr
    assert lines[0].startswith("attnmesh"), ran.stderr
    assert not UNSAFE.search(lines[0]), repr(lines[0])
    assert len(lines[0]) < 2200
    assert "Traceback" not in lines[0]
    return lines[0]


# Options.

COUNT_OPTIONS = [
    *(
        (SIMULATE, option)
        for option in ("--ranks", "--length", "--batch", "--q-heads", "--kv-heads", "--head-dim", "--ranks-per-node")
    ),
    (SIMULATE, "--rails"),
    *((PREFILL, option) for option in ("--ranks", "--length", "--batch", "--ranks-per-node", "--rails")),
    *((DECODE, option) for option in ("--ranks", "--length", "--batch", "--q-heads", "--kv-heads", "--head-dim")),
    *((DECODE, option) for option in ("--hidden", "--tokens")),
    *((REPORT, option) for option in ("--ranks", "--length", "--batch", "--q-heads", "--head-dim", "--ranks-per-node")),
    *((TRACE, option) for option in ("--ranks", "--length", "--q-heads", "--kv-heads", "--head-dim")),
    *((GENERATE, option) for option in ("--ranks", "--max-new-tokens", "--prefill-chunk")),
    (("verify",), "--ranks"),
]


@pytest.mark.parametrize(
    ("command", "option"), first(4, COUNT_OPTIONS), ids=lambda x: x if isinstance(x, str) else x[0]
)
def test_counts_have_limits_that_are_stated(command, option):
    for count in COUNTS:
        line = refused(*command, option, count)
        assert option in line
        if count.isascii() and count.isdigit() and 0 < len(count) < 4000 and int(count):
            assert re.search(r"<=x<=\d+|at most \d+|length must be", line), line


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        (SIMULATE, "--mask", ["window:" + "9" * 5000, "window:0", "window:-1", "prefix", "+" * 5000, EVIL, LONG]),
        (SIMULATE, "--hardware", [EVIL, LONG, "", "[red]"]),
        (SIMULATE, "--links", [EVIL, LONG, "a,b,c", ",", "[red],x"]),
        (SIMULATE, "--schedule", [EVIL, LONG, ""]),
        (SIMULATE, "--layout", [EVIL, LONG, ""]),
        (SIMULATE, "--model", [EVIL, LONG, "", "/nowhere/x", "a\0b", "\udcff", "." * 300 + "/x"]),
        (SIMULATE, "--slow-rank", ["0:nan", "0:inf", "0:1e400", "0:-1", "0:0", "x", "1:2:3", "9" * 5000 + ":1", EVIL]),
        (SIMULATE, "--slow-link", ["8:2", "-1:2", "0:", ":", "0:1e300", EVIL]),
        (
            (*SIMULATE, "--trace", "t.json"),
            "--trace-ranks",
            ["0-99999999999", "٣", "²", "-", "", "1-0", "8", "9" * 5000, EVIL],
        ),
        (PREFILL, "--storage", [EVIL, LONG, "fp4"]),
        (DECODE, "--storage", [EVIL, LONG, "fp4"]),
        (DECODE, "--config", [EVIL, LONG, "nowhere", "."]),
        (REPORT, "--mask", [EVIL, "window:" + "9" * 5000]),
        (TRACE, "--schedule", [EVIL, LONG]),
        (TRACE, "--dtype", [EVIL]),
        (GENERATE, "--timeout", ["nan", "inf", "-inf", "1e10", "0", "-1", "soon", "1e400", EVIL]),
        (GENERATE, "--model", [EVIL, LONG, "nowhere", "[red]", "a\0b", "\udcff"]),
        (GENERATE, "--question", ["", "   ", "\n"]),
        (GENERATE, "--temperature", ["nan", "inf", "-1", "hot"]),
        (GENERATE, "--top-p", ["nan", "0", "2", EVIL]),
        (GENERATE, "--seed", ["-1", "9" * 40, "x", EVIL]),
        (("verify",), "--seed", ["-1", "9" * 40, "x", EVIL]),
        (("verify",), "--only", ["(", "*", "[", "a{99999999999}"]),
        (("verify",), "--time-limit", ["nan", "-1", "inf", "soon", EVIL]),
        (("verify",), "--timeout", ["nan", "0", "inf", EVIL]),
        (TRACE, "--timeout", ["nan", "0", "inf", EVIL]),
        (("calibrate", "--device", "cpu"), "--name", ["", "h200", "a b", EVIL, "-x"]),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_text_that_makes_no_sense_is_refused(command, option, values):
    for value in values:
        refused(*command, option, value)


def test_unknown_commands_and_options_are_one_line():
    for arguments in (
        [EVIL],
        [f"--{EVIL}"],
        ["plan", EVIL],
        ["plan", f"--{EVIL}"],
        ["verify", f"--{EVIL}"],
        ["verify", EVIL],
    ):
        refused(*arguments)


def test_no_option_needs_more_elements_than_an_integer_counts():
    large = ("--batch", 65536, "--q-heads", 65536, "--kv-heads", 65536, "--head-dim", 65536, "--length", "128M")
    assert "must be at most 2**56, got " in refused(*SIMULATE, *large)
    assert "must be at most 2**56, got " in refused(*REPORT, *large)


def test_a_trace_that_does_not_fit_into_memory_is_refused():
    assert "do not fit: about" in refused(*TRACE, "--length", "128M", "--q-heads", 4096, "--head-dim", 4096)


# Files to read.

DEEP = "[" * 100_000
CONFIG = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99,
    "intermediate_size": 64,
}  # fmt: skip
EVENT = {"ph": "X", "pid": 0, "cat": "send", "name": "x", "ts": 1, "dur": 2.5, "args": {}}
NOT_TEXT = [
    b"\x7fELF\0\1\2",
    "a text".encode("utf-16"),
    "a text".encode("utf-16-le"),
    b"\xff\xfe",
    bytes(range(256)),
    b"",
]


def contents(kind: str) -> list[bytes]:
    """Files of a kind that cannot be used."""
    if kind == "trace":
        wrong = [
            {"ts": math.nan},
            {"dur": math.inf},
            {"pid": 2**63},
            {"pid": "0"},
            {"name": 3},
            {"args": None},
            {"cat": []},
        ]
        texts = [json.dumps({"traceEvents": [{**EVENT, **each}]}) for each in wrong]
        return [*NOT_TEXT, *(text.encode() for text in (*texts, DEEP, "3", "{}", '{"traceEvents": [3]}', "9" * 5000))]
    if kind == "figures":
        return [*NOT_TEXT, *(text.encode() for text in (DEEP, '{"a":' * 100_000, "3", "[]", "{}", "9" * 5000))]
    if kind == "config":
        wrong = [
            {"num_hidden_layers": 10**5}, {"num_hidden_layers": -1}, {"num_hidden_layers": math.nan},
            {"hidden_size": "64"},
            {"num_attention_heads": 2**70}, {"head_dim": [64]}, {"num_key_value_heads": 3}, {"vocab_size": 1e30},
            {"layer_types": DEEP}, {"num_experts": 10**9}, {"dtype": EVIL}, {"quantization_config": EVIL},
            {"sliding_window": -1}, {"sliding_window": 4, "sliding_window_pattern": EVIL}, {"intermediate_size": True},
        ]  # fmt: skip
        texts = [json.dumps({**CONFIG, **each}) for each in wrong]
        return [
            *NOT_TEXT,
            *(text.encode() for text in (*texts, DEEP, '{"text_config":' * 100_000, "3", "{}", "9" * 5000)),
        ]
    fields = [
        "memory_gb = nan", "memory_gb = inf", "memory_gb = 1e999999", "memory_gb = -1", 'memory_gb = "141"',
        "memory_gb = " + "9" * 5000, "launch_us = [1]", "source = 3", "copy = [[1]]", "copy = {a=1}", f"copy = {DEEP}",
        "rails = 1e9", "cores = 99999999999", "x = 1", '"\\u001b[31m" = 1', "intra_node = '\\u202e'",
    ]  # fmt: skip
    texts = [f"[device.h200]\n{field}" for field in fields]
    texts += [
        "device = 3",
        "[device]\nh200 = 3",
        "[[device]]",
        "x = 1",
        "[device.'\\u001b']\nsource = 'x'",
        "= 3",
        DEEP,
    ]
    return [*NOT_TEXT[:-1], *(text.encode() for text in texts)]


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("trace", (*REPORT, "--trace")),
        ("figures", (*REPORT, "--figures")),
        ("config", (*SIMULATE, "--model")),
        ("config", ("plan", "prefill", "--ranks", "2", "--length", "8k", "--model")),
        ("config", ("plan", "decode", "--ranks", "2", "--batch", "2", "--config")),
        ("hardware", (*SIMULATE, "--hardware-file")),
        ("hardware", (*PREFILL, "--hardware-file")),
        ("prompt", ("generate", "--prompt-file")),
    ],
)
@pytest.mark.timeout(60)
def test_files_that_cannot_be_used_are_refused(folder, kind, command):
    path = folder / f"evil{EVIL.replace('/', '')}.json"
    for content in NOT_TEXT if kind == "prompt" else contents(kind):
        path.write_bytes(content)
        if kind == "config" and command[-1] == "--config" and b"num_attention_heads" in content:
            ran = run(*command, path)  # heads alone may be enough
            assert ran.exit_code in (0, 2)
            assert not UNSAFE.search(ran.output)
        else:
            assert r"evil\x1b" in refused(*command, path)
    path.unlink()
    os.mkfifo(path)
    for other in (path, folder, "/dev/zero", folder / LONG, folder / "nowhere", folder / "report.html" / "x"):
        refused(*command, other)


# Files to write.


@pytest.mark.parametrize(
    "command",
    [
        (*SIMULATE, "--trace"),
        ("report", "--no-check", "--out"),
        ("trace", "--out"),
        ("calibrate", "--device", "cpu", "--out"),
        (*GENERATE, "--report"),
    ],
    ids=lambda command: " ".join((command[0], command[-1])),
)
def test_a_file_that_cannot_be_written_is_noticed_before_the_run(folder, command, monkeypatch):
    for name in (
        "attnmesh.cli.simulate.simulate",
        "attnmesh.cli.report.schedule_report",
        "attnmesh.cli.calibrate.measure_cpu",
    ):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("it ran"))
    (folder / "file").touch()
    os.mkfifo(folder / "fifo")
    for path in (
        folder,
        folder / "no" / "x",
        folder / "file" / "x",
        "/proc/x",
        folder / LONG,
        folder / "fifo",
        folder / f"no{EVIL}/x",
    ):
        assert command[-1] in refused(*command, path)
    assert sorted(found.name for found in folder.iterdir()) == ["fifo", "file"]


@pytest.mark.parametrize(
    "command", [("report", "--no-check", "--ranks", 2, "--length", 64, "--out"), (*SIMULATE, "--trace")]
)
def test_a_full_disk_is_one_line_with_the_name_of_the_file(command):
    assert "No space left on device: '/dev/full'" in refused(*command, "/dev/full", code=1)


def test_a_full_disk_under_standard_output_is_one_line(monkeypatch, capsys):
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        with pytest.raises(typer.Exit) as ended, _reported("attnmesh simulate"):
            output.console().print("x" * 10_000)
    assert ended.value.exit_code == 1
    said = "[Errno 28] No space left on device: standard output, or a temporary file"
    assert capsys.readouterr().err == f"attnmesh simulate: {said}\n"


def test_a_length_that_no_integer_counts_is_refused_for_its_size():
    for length in (2**63, "9" * 17 + "M", "9" * 5000):
        assert "a length must be at most 134217728, got " in refused("simulate", "--ranks", "8", "--length", length)
    assert "at most 2147483647, such as" in refused(*SIMULATE, "--mask", f"window:{2**63}")


@pytest.mark.parametrize("arguments", [["pln"], ["plan", "prefil"]])
def test_a_misspelt_command_gets_one_suggestion(arguments):
    line = refused(*arguments)
    assert line.count("did you mean") == 1
    assert "?." not in line


def test_a_file_that_exists_is_not_touched_by_a_run_that_fails(folder):
    (folder / "report.html").write_text("before")
    refused(*REPORT, "--figures", "nowhere")
    assert (folder / "report.html").read_text() == "before"


# Errors that nobody expected.


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            RuntimeError(f"first\nsecond {EVIL}"),
            1,
            r"RuntimeError: first second \\x1b.* \(attnmesh simulate --debug prints",
        ),
        (RecursionError("deep"), 1, "RecursionError: deep"),
        (MemoryError(), 1, "MemoryError: "),
        (KeyError("x"), 1, "KeyError: 'x'"),
        (AssertionError(), 1, "AssertionError: "),
        (CommError("rank 1 of 2 failed"), 1, r"rank 1 of 2 failed\. See docs/debugging\.md#commerror$"),
        (ValueError("x" * 10_000), 2, "x{1000}"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 2, "'utf-8' codec"),
        (OSError(28, "No space left on device"), 1, r"\[Errno 28\] No space left on device: standard output, or a"),
        (PermissionError(13, "Permission denied", "x"), 2, r"\[Errno 13\] Permission denied: 'x'"),
        (KeyboardInterrupt(), 130, "interrupted$"),
        (Terminated(), 143, "terminated$"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else None,
)
def test_an_unexpected_error_is_one_line_without_locals(monkeypatch, error, code, said):
    def fail(*_, **__):
        secret = "the secret prompt"
        raise error from ValueError(secret)

    monkeypatch.setattr(simulate, "_simulate", fail)
    line = refused(*SIMULATE, code=code)
    assert re.match(f"attnmesh simulate: {said}", line), line
    assert "secret" not in line
    for before, after, env in ((["--debug"], [], {}), ([], ["--debug"], {}), ([], [], {"ATTNMESH_DEBUG": "1"})):
        ran = run(*before, *SIMULATE, *after, env=env)
        assert ran.exit_code == code
        assert "Traceback (most recent call last)" in ran.stderr
        assert "secret = " in ran.stderr or "raise error" in ran.stderr  # the source, not the values
        assert not UNSAFE.search(ran.stderr)
        assert ran.stderr.splitlines()[-1] == line


def test_each_rank_of_torchrun_reports_what_it_alone_knows(monkeypatch):
    error = RuntimeError("broken")
    monkeypatch.setattr(simulate, "_simulate", lambda *_: (_ for _ in ()).throw(error))
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    ran = run(*SIMULATE)
    assert (ran.exit_code, ran.output) == (1, "")  # local rank 0 reports for all
    error.add_note("raised on rank 3 of 4")
    assert refused(*SIMULATE, code=1).startswith("attnmesh simulate: rank 3: RuntimeError: broken")


def test_sigterm_is_handled_as_sigint_is(monkeypatch):
    from attnmesh.cli import errors

    before = signal.getsignal(signal.SIGTERM)
    try:
        monkeypatch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as ended:
            errors.run_command(lambda **_: signal.raise_signal(signal.SIGTERM))
        assert ended.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, before)


# What is shown.


def shown_by(*arguments: object) -> str:
    ran = run(*arguments)
    assert ran.exit_code == 0, ran.output
    assert not UNSAFE.search(ran.output), repr(ran.output)
    return ran.output


def test_names_from_files_and_paths_are_shown_as_they_are(folder):
    name = json.dumps(f"mine{EVIL}")
    hardware = folder / "hardware.toml"
    hardware.write_text(
        f"[device.{name}]\nsource = {name}\nmemory_gb = 80\nlaunch_us = 2\npeak_tflops = 100\npeak_gbs = 1000\n"
        f"intra_node = {name}\ninter_node = {name}\nranks_per_node = 4\nrails = 1\n"
        f"[link.{name}]\nsource = {name}\nbandwidth_gbs = 10\nlatency_us = 2\n",
        encoding="utf-8",
    )
    model = folder / f"model{EVIL.replace('/', '')}"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    trace = folder / f"out{EVIL.replace('/', '')}"
    by_file = ("--hardware-file", hardware, "--hardware", f"mine{EVIL}")
    text = shown_by(*SIMULATE, *by_file, "--trace", trace, "--schedule", "ring")
    assert r"mine\x1b]0;owned\x07\x1b[31m[red]x[/red]\r\u202e" in text.replace("\n", "")
    assert r"out\x1b" in text
    text = shown_by(*PREFILL[:2], *PREFILL[4:], *by_file, "--model", model)
    assert r"model\x1b]0;owned\x07\x1b[31m[red]x[red]" in text.replace("\n", "")
    out = folder / f"report{EVIL.replace('/', '')}"
    assert r"report\x1b" in shown_by(
        "report", "--no-check", "--ranks", 2, "--length", 64, "--out", out, "--trace", trace
    )
    written = out.read_text(encoding="utf-8")
    assert not UNSAFE.search(written)
    assert r"out\\x1b" in written


def test_answers_and_questions_are_shown_as_they_are(monkeypatch):
    shown = StringIO()
    monkeypatch.setattr(output, "console", lambda **_: output.PlainConsole(file=shown, width=200))
    display = Display(visible=True)
    display.question(EVIL)
    display.answer(f"two\nlines {EVIL} :smile:")
    display.note(EVIL)
    assert not UNSAFE.search(shown.getvalue())
    escaped = r"\x1b]0;owned\x07\x1b[31m[red]x[/red]\r\u202e"
    assert shown.getvalue() == f"\n> {escaped}\ntwo\nlines {escaped} :smile:{escaped}\n"


def test_a_status_is_shown_as_it_is(capsys, monkeypatch):
    monkeypatch.setattr(output, "_LINE_EVERY", 0.0)
    with output.status(EVIL):
        while not (shown := capsys.readouterr().err):
            pass
    assert not UNSAFE.search(shown)
    terminal = output.PlainConsole(force_terminal=True, width=120, file=StringIO())
    monkeypatch.setattr(output, "console", lambda **_: terminal)
    with output.status(EVIL):
        pass
    assert "]0;owned\x07" not in terminal.file.getvalue()
    assert r"\x07\x1b[31m[red]x[/red]" in terminal.file.getvalue()


def test_characters_that_a_terminal_lacks_are_escaped(folder, monkeypatch):
    path = folder / "out"
    with path.open("w", encoding="ascii") as ascii_only:
        monkeypatch.setattr("sys.stdout", ascii_only)
        output.console().print("naïve 🙂")
    assert path.read_text() == "na\\xefve \\U0001f642\n"


def test_reports_show_no_control_characters():
    report = generation_report([GeneratedAnswer(EVIL, f"<b>{EVIL}", 3, 4)], [GenerationStats(0)], facts={EVIL: EVIL})
    text = page(report)
    assert not UNSAFE.search(text)
    assert r"&lt;b&gt;\x1b]0;owned\x07\x1b[31m[red]x[/red]\r\u202e" in text


@pytest.mark.parametrize("timeout", [math.inf, math.nan, 1e10, "8", 0])
def test_launch_refuses_a_timeout(monkeypatch, timeout):
    monkeypatch.undo()
    with pytest.raises(ValueError, match="timeout must be positive seconds, at most 1,000,000"):
        launch.run(print, 2, timeout=timeout)


@pytest.mark.parametrize("ranks", [0, -1, 1025, 10**7, 2**63, 2.5, "4", True])
@pytest.mark.parametrize("virtual", [False, True])
def test_launch_refuses_a_number_of_ranks(monkeypatch, ranks, virtual):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"ranks must be (an integer >= 1|at most 1024), got "):
        launch.run(print, ranks, virtual=virtual)
