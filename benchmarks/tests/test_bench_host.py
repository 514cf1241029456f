"""The benchmark of host time runs on the CPU, and its ratios are to torch's operator in the same direction."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks import host


@pytest.mark.sweep
def test_it_runs_on_the_cpu(tmp_path):
    file = tmp_path / "results.json"
    result = CliRunner().invoke(host.app, ["--device", "cpu", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    calls, ring = json.loads(file.read_text())["sections"].values()
    names = {row["call"] for row in calls}
    assert {"attention", "attention, aten", "paged_decode_attention", "sparse_attention", "merge"} <= names
    us = {(row["call"], row["direction"]): row["host_us"] for row in calls}
    for row in calls:
        torch_us = us[host._TORCH, row["direction"]]
        assert row["over_torch"] == pytest.approx(row["host_us"] / torch_us, rel=0.01)
    assert [row["direction"] for row in ring] == ["forward", "forward+backward"]
    assert all(row["us_per_stage"] > 0 for row in ring)


def test_calls_compute_what_torch_computes():
    """Otherwise the times are of other work."""
    calls = host.attention_calls("cpu")
    expected = calls[host._TORCH, False](), calls[host._TORCH, True]()
    for name in ("attention", "attention, aten", "ContextParallel.attention, one rank"):
        assert calls[name, False]().allclose(expected[0], atol=1e-5)
        assert calls[name, True]().allclose(expected[1], atol=1e-5)
