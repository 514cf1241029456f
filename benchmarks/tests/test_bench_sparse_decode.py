"""The benchmark of sparse decode runs on the CPU, its results are right, and wrong ones are detected."""

import json

from typer.testing import CliRunner

from benchmarks import sparse_decode
from benchmarks.sparse_decode import Part, app, cases


def test_it_runs_on_the_cpu(tmp_path):
    file = tmp_path / "results.json"
    result = CliRunner().invoke(app, ["--device", "cpu", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    sections = json.loads(file.read_text())["sections"]
    assert len(sections) == 4
    for rows in sections.values():
        for row in rows:
            assert row["verdict"] == "ok"
            assert row["us"] > 0


def test_wrong_results_are_detected(monkeypatch):
    monkeypatch.setattr(sparse_decode, "LIMITS", dict.fromkeys(sparse_decode.LIMITS, -1.0))
    result = CliRunner().invoke(app, ["--device", "cpu", "--only", "topk"])
    assert result.exit_code == 1
    assert "WRONG" in result.output


def test_cases_of_a_gpu():
    assert len(cases(Part.ATTENTION, "cuda", quick=False)) == 12
    assert [case.batch for case in cases(Part.TOPK, "cuda", quick=False)] == [1, 8, 64]
