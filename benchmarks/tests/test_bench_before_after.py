"""Two checkouts are compared program by program, with the reason where one of them has no figure."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import before_after

HERE = Path(before_after.__file__).parents[1]


def test_the_ratio_is_the_median_over_rounds_of_runs_beside_each_other():
    drifting = [(1.0, 1.1), (2.0, 2.2), (4.0, 3.0)]
    found = before_after.rows({"same": [(1.0, 1.0)], "drifting": drifting, "lost": []}, {"lost": "after: OSError"})
    assert [row["program"] for row in found] == ["lost", "drifting", "same"]
    assert [row["ratio"] for row in found] == ["after: OSError", pytest.approx(1.1), 1.0]


def test_every_kind_of_call_is_timed_on_a_gpu():
    names = list(before_after.programs("cuda"))
    for part in ("forward causal", "backward causal", "ring", "decode", "sparse", "top-k", "gated delta rule", "ALiBi"):
        assert any(part in name for name in names), part


def test_a_folder_without_the_package_is_refused(tmp_path):
    result = CliRunner().invoke(before_after.app, [str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 2
    assert "has no src/attnmesh" in result.output


def test_programs_are_chosen_and_left_out_by_parts_of_their_names():
    command = [str(HERE), "--device", "cpu", "--only", "decode", "--except", "dec"]
    result = CliRunner().invoke(before_after.app, command, terminal_width=200)
    assert result.exit_code == 2
    assert "leave none of: backward causal" in result.output


def test_a_late_answer_is_not_taken_for_the_time_of_the_next_program(monkeypatch):
    program = "import sys, time\nfor name in sys.stdin: time.sleep(0.8 * (name == 'slow\\n')); print(1.0, flush=True)"
    monkeypatch.setattr(before_after, "_SERVE", program)
    monkeypatch.setattr(before_after, "_SILENCE", 0.5)
    worker = before_after.Worker(HERE, "cpu", [])
    with pytest.raises(RuntimeError, match="said nothing for"):
        worker.milliseconds("slow")
    with pytest.raises((RuntimeError, OSError)):
        worker.milliseconds("next")


def test_programs_without_memory_run_again_without_the_others(monkeypatch):
    """The largest of three fits only alone; the fourth fits nowhere."""
    built = []

    class Worker:
        def __init__(self, checkout, device, names):
            built.append(names)
            self.answers = [[name, self.error(name, names)] for name in names]

        def error(self, name, names):
            large = name == "huge" or (name == "large" and len(names) > 2)
            return "OutOfMemoryError: CUDA out of memory" if large else "no kernel" if name == "broken" else None

        def answer(self):
            return self.answers.pop(0)

        def milliseconds(self, name):
            return 2.0

        def stop(self):
            pass

    monkeypatch.setattr(before_after, "Worker", Worker)
    names = ["small", "large", "broken", "huge"]
    compared = before_after.compare(HERE, "cpu", names, rounds=1, builds=1, processes=1, seconds=60)
    ((_, found),) = compared
    assert built[::2] == [names, ["large", "huge"], ["huge"]]
    assert {row["program"]: row["ratio"] for row in found} == {
        "small": 1.0, "large": 1.0, "broken": "after: no kernel", "huge": "after: OutOfMemoryError: CUDA out of memory",
    }  # fmt: skip


@pytest.mark.sweep
def test_a_checkout_is_compared_with_itself():
    result = CliRunner().invoke(before_after.app, [str(HERE), "--device", "cpu", "--rounds", "2", "--builds", "1"])
    assert result.exit_code in (0, 1), result.output  # two runs of one program may differ by more than 1%
    for name in before_after.programs("cpu"):
        assert name in result.output
    assert "Error" not in result.output
