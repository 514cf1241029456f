"""The random search: a fixed part of each family, and that it finds planted faults and names stuck cases."""

import os
import shlex

import pytest
import torch

import attnmesh as am
from helpers.cases import first
from tests.gpu.search.__main__ import main
from tests.gpu.search.cases import FAMILIES, as_line, draw_case, from_line

CUDA = torch.cuda.is_available()
# On a GPU most of the time is spent on compiling.
GPU_CASES = {"dense": 24, "ring": 12, "decode": 40, "sparse": 24, "sparse_decode": 24}
GPU_WORKERS = str(max(1, min(8, (os.cpu_count() or 1) // 2)))
CPU_CASES = {"dense": 6, "ring": 3, "decode": 6, "sparse": 4, "sparse_decode": 6}  # it is for GPUs


@pytest.mark.cuda
@pytest.mark.timeout(900)
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls_on_a_gpu(family, capfd):
    found = main(
        [family, "--cases", str(GPU_CASES[family]), "--seed", "1", "--workers", GPU_WORKERS, "--device", "cuda"]
    )
    assert found == 0, capfd.readouterr().out


@pytest.mark.parametrize("family", first(1, FAMILIES))
def test_random_calls_on_the_cpu(family, capfd):
    found = main([family, "--cases", str(CPU_CASES[family]), "--seed", "1", "--workers", "0", "--device", "cpu"])
    assert found == 0, capfd.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_line_is_its_case(family, device):
    for number in range(50):
        case = draw_case(family, 3, number, device)
        assert case == draw_case(family, 3, number, device)
        given = {name: value for name, value in case.items() if value is not None and value is not False}
        assert from_line(as_line(case)) == given


WRONG = {
    "dense": ("attention", 0), "decode": ("paged_decode_attention", 0), "sparse": ("sparse_attention", 1),
    "sparse_decode": ("paged_sparse_decode_attention", 1),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("family", first(1, WRONG))
def test_a_fault_is_found_and_its_line_repeats_it(family, capfd, monkeypatch):
    name, which = WRONG[family]
    module = am.sparse if family == "sparse_decode" else am
    if family == "decode":
        module = pytest.importorskip("attnmesh.testing.decode")
    right = getattr(module, name)

    def wrong(*args, **options):
        """One result is a little off in a single row."""
        results = list(right(*args, **options))
        spoiled = results[which].clone()
        spoiled.view(-1)[:1] += 0.3
        results[which] = spoiled
        return tuple(results)

    monkeypatch.setattr(module, name, wrong)
    assert main([family, "--cases", "5", "--seed", "1", "--workers", "0", "--device", "cpu"]) == 1
    failed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("FAILED")]
    command, _, case = failed[0].removeprefix("FAILED python -m tests.gpu.search ").partition("   # ")
    assert main([*shlex.split(command), "--workers", "0"]) == 1
    assert failed[0] in capfd.readouterr().out
    line, why = case.split(": ", 1)
    assert main([family, "--case", line, "--workers", "0", "--device", "cpu"]) == 1
    assert why in capfd.readouterr().out
    monkeypatch.undo()
    assert main([*shlex.split(command), "--workers", "0"]) == 0


@pytest.mark.sweep  # the limit of a case has to pass
def test_stuck_and_crashed_cases_are_named_and_the_search_goes_on(capfd):
    found = main(["helpers.planted_search", "--cases", "7", "--workers", "1", "--limit", "2", "--device", "cpu"])
    out = capfd.readouterr().out
    assert found == 1
    repeated = "python -m tests.gpu.search helpers.planted_search --seed 0 --number"
    assert f"STUCK {repeated} 1 --device cpu   # kind=sleep size=7: no result after 2 s" in out
    assert f"FAILED {repeated} 2 --device cpu   # kind=wrong size=7: out: error 3.1e-02 > 1.2e-02" in out
    assert f"FAILED {repeated} 4 --device cpu   # kind=crash size=7: the process ended with exit code -6" in out
    assert "refused 1: SlidingWindow.left must be" in out
    assert "7 cases" in out
    assert "3 passed, 1 refused, 2 failed, 1 stuck" in out
