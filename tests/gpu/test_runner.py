"""`gpu.run` names what is stuck or crashes, goes on with the rest, and always ends with a summary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu import compile_lock, schedule, summary, worker
from helpers.cases import sweep

PAGE = f"# Title\n\n{summary.BEGIN}\n\nnot run yet\n\n{summary.END}\n\nEnd\n"

TESTS = """
import ctypes, os, subprocess, sys, time
import pytest

pytestmark = pytest.mark.cuda

@pytest.mark.parametrize("n", range(3))
def test_passes(n): pass

@pytest.mark.timeout(1.5)
@pytest.mark.parametrize("n", range(3))
def test_the_second_one_hangs(n):
    if n == 1:
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        open("child", "w").write(str(child.pid))
        time.sleep(300)

@pytest.mark.parametrize("n", range(2))
def test_the_first_one_has_a_segmentation_fault(n):
    if n == 0:
        ctypes.string_at(0)

def test_exits(): os._exit(7)

def test_fails():
    print("said before")
    assert 1 == 2, "no equality"

@pytest.mark.parametrize("n", range(2))
def test_spoils_its_context(n):
    assert os.environ.setdefault("SPOILED", str(n)) == str(n), "spoiled by another test"
    assert n, "CUDA error: an illegal memory access was encountered"

@pytest.mark.ranks
def test_starts_ranks(): pass

def test_needs_the_memory_of_others():
    open("tries", "a").write("x")
    assert len(open("tries").read()) > 1, "CUDA out of memory"

@pytest.mark.skip(reason="because")
def test_skipped(): pass
"""


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "gpu.run", "--without-gpu", "--json", "out/run.json", *map(str, args)]


@pytest.fixture
def run(tmp_path):
    """Start the runner in an empty project with the given tests."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-config\ntimeout = 300\n")
    (tmp_path / "page.md").write_text(PAGE)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def start(tests: str, *args: object) -> subprocess.Popen[str]:
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / "test_them.py").write_text(tests)
        (tmp_path / "tests" / "test_others.py").write_text("raise AssertionError('not imported: it has no such mark')")
        return subprocess.Popen(
            command(*args), cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def results_in(folder: Path) -> dict[str, dict]:
    record = json.loads((folder / "out" / "run.json").read_text())
    return {each["id"].partition("::")[2]: each for each in record["results"]}


@pytest.mark.sweep
def test_what_hangs_or_crashes_is_named_and_the_rest_goes_on(run, tmp_path):
    process = run(TESTS, "--workers", 2, "--rank-workers", 1, "--docs", "page.md", "tests")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    found = results_in(tmp_path)
    assert {name: each["result"] for name, each in found.items()} == {
        "test_passes[0]": "passed", "test_passes[1]": "passed", "test_passes[2]": "passed",
        "test_the_second_one_hangs[0]": "passed", "test_the_second_one_hangs[1]": "stuck",
        "test_the_second_one_hangs[2]": "passed",
        "test_the_first_one_has_a_segmentation_fault[0]": "crashed",
        "test_the_first_one_has_a_segmentation_fault[1]": "passed",
        "test_exits": "crashed", "test_fails": "failed",
        "test_spoils_its_context[0]": "failed", "test_spoils_its_context[1]": "passed",
        "test_starts_ranks": "passed", "test_needs_the_memory_of_others": "passed", "test_skipped": "skipped",
    }  # fmt: skip
    # Another worker took the place of the one that was killed.
    assert found["test_the_second_one_hangs[1]"]["worker"] != found["test_the_second_one_hangs[2]"]["worker"]
    assert found["test_spoils_its_context[0]"]["worker"] != found["test_spoils_its_context[1]"]["worker"]
    # The reason, at once and in the summary: where the stuck test was, how the others ended.
    assert "STUCK tests/test_them.py::test_the_second_one_hangs[1]" in said
    assert "in test_the_second_one_hangs" in found["test_the_second_one_hangs[1]"]["text"]
    assert "SIGSEGV" in found["test_the_first_one_has_a_segmentation_fault[0]"]["message"]
    assert "exit code 7" in found["test_exits"]["message"]
    assert "no equality" in found["test_fails"]["message"]
    assert "said before" in said
    assert "slowest of" in said
    assert "2 failed, 9 passed, 1 stuck, 2 crashed, 1 skipped in" in said.splitlines()[-1]
    # The table, and nothing else of the page.
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Title")
    assert page.endswith("End\n")
    assert "not run yet" not in page
    assert "| `tests` | 9 | 2 | 1 | 2 | 1 |" in page
    assert str(tmp_path) not in page
    # Nothing that a killed test has started is left.
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z"


SLOW = """
import time, pytest

@pytest.mark.cuda
@pytest.mark.parametrize("n", range(4))
def test_slow(n):
    open(f"begun {n}", "w")
    time.sleep(60 if n else 0)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("how", [sweep("budget"), "signal"])
def test_a_run_that_ends_early_says_what_has_not_run(run, tmp_path, how):
    process = run(SLOW, "--workers", 1, "--budget", 2 if how == "budget" else 100)
    while how == "signal" and not (tmp_path / "begun 1").exists():
        time.sleep(0.05)
    if how == "signal":
        time.sleep(0.5)  # until the runner has heard of it, too
        process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert " not run in " in said.splitlines()[-1]
    if how == "budget":
        assert "the budget of 2 s is spent" in said
    else:
        assert "SIGTERM" in said
        assert said.splitlines()[-1].startswith("0 failed, 1 passed, 3 not run in")
        assert results_in(tmp_path)["test_slow[1]"]["message"].startswith("ran since")
        assert "not run (3):" in said


def test_a_file_that_cannot_be_imported_is_a_failure(run, tmp_path):
    process = run("import pytest\npytest.mark.cuda\nraise OSError('no such thing')\n", "--docs", "page.md")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "FAILED tests/test_them.py" in said
    assert "no such thing" in said


def test_every_file_has_the_fixtures_of_conftest(run, tmp_path):
    (tmp_path / "conftest.py").write_text("import pytest\n\n@pytest.fixture\ndef device(): return 'cuda'\n")
    test = "import pytest\n\n@pytest.mark.cuda\ndef test_it(device): assert device == 'cuda'\n"
    (tmp_path / "more").mkdir()
    for name in ("test_more.py", "test_most.py"):
        (tmp_path / "more" / name).write_text(test)
    process = run(test, "tests", "more", "--workers", 1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "3 passed" in out


def test_ignored_files_and_folders_do_not_run(run, tmp_path):
    test = "import pytest\n\n@pytest.mark.cuda\ndef test_it(): pass\n"
    for name in ("more/test_more.py", "more/test_most.py", "tests/slow/test_slow.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(test)
    process = run(test, "tests", "more", "--ignore=more/test_more.py", "--ignore", "tests/slow", "--workers", 1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "2 passed" in out
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert {each["id"] for each in record["results"]} == {"tests/test_them.py::test_it", "more/test_most.py::test_it"}


def test_without_a_gpu_one_line_says_so(tmp_path):
    """The worker says that torch, here a module that takes no seconds to import, found none."""
    (tmp_path / "torch.py").write_text(
        "class version: cuda = None\nclass cuda: is_available = is_initialized = staticmethod(lambda: False)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpu.run"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr == "make test-gpu needs a GPU, and PyTorch finds none\n"
    assert done.stdout == ""


STUCK = """
import time, pytest

@pytest.mark.cuda
@pytest.mark.timeout(0.3)
@pytest.mark.parametrize("n", range(9))
def test_stuck(n): time.sleep(60)

@pytest.mark.cuda
def test_other(): pass
"""


@pytest.mark.sweep  # three limits have to pass
def test_the_cases_of_a_function_are_given_up_after_some_are_stuck(run):
    said, _ = run(STUCK, "--workers", 1).communicate(timeout=60)
    assert said.splitlines()[-1].startswith("0 failed, 1 passed, 3 stuck, 6 not run in")
    assert "3 other cases are stuck" in said


def test_functions_stay_together_kernels_first_and_long_ones_before_short_ones():
    def cases(function: str, count: int, **marks: object) -> list[schedule.Test]:
        return [schedule.Test(f"{function}[{n}]", **marks) for n in range(count)]

    tests = [
        *cases("tests/cli/test_a.py::test_a", 1),
        *cases("tests/kv_cache/test_b.py::test_b", 2),
        *cases("tests/ops/test_c.py::test_c", 20),
        *cases("tests/ops/test_c.py::test_long", 3),
        *cases("tests/ops/test_c.py::test_quick", 30),
        *cases("tests/ops/test_c.py::test_alone", 1, exclusive=True),
        *cases("tests/reliability/test_d.py::test_d", 2, ranks=True),
    ]
    known = {f"tests/ops/test_c.py::test_long[{n}]": 14.0 for n in range(3)}
    known |= {f"tests/ops/test_c.py::test_quick[{n}]": 0.25 for n in range(30)}
    found = [(chunk.tests[0].function.rpartition("::")[2], len(chunk.tests)) for chunk in schedule.chunks(tests, known)]
    assert found == [
        *[("test_c", 6)] * 3, ("test_long", 2), ("test_long", 1), ("test_c", 2), ("test_quick", 24), ("test_quick", 6),
        ("test_b", 2), ("test_d", 1), ("test_d", 1), ("test_a", 1), ("test_alone", 1),
    ]  # fmt: skip


def test_one_process_compiles_a_kernel_and_others_wait(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    running: list[str] = []
    most: dict[str, int] = {}

    def compile_slowly(src, target=None, options=None):
        running.append(src.name)
        most[src.name] = max(most.get(src.name, 0), running.count(src.name))
        most["any"] = max(most.get("any", 0), len(running))
        time.sleep(0.05)
        running.remove(src.name)

    monkeypatch.setattr(triton.compiler, "compile", compile_slowly)
    monkeypatch.setattr(triton, "compile", compile_slowly)
    compile_lock.share_compilations(tmp_path)
    sources = [SimpleNamespace(name=name, hash=lambda name=name: name) for name in ("a", "b") for _ in range(3)]
    threads = [threading.Thread(target=triton.compile, args=(src, "sm_90", {"num_warps": 4})) for src in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == {"a": 1, "b": 1, "any": 2}


@pytest.mark.parametrize(
    ("text", "sticky"),
    [
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", True),
        ("CUDA error: device-side assert triggered", True),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("AssertionError: Tensor-likes are not close!", False),
    ],
)
def test_errors_that_stay_in_a_context(text, sticky):
    assert bool(worker.STICKY.search(text)) == sticky
