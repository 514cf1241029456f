"""A machine is measured, the catalogue reads what was found, and what it predicts is about what happens."""

import os
import statistics
from dataclasses import replace

import pytest
import torch

from attnmesh import run_virtual
from attnmesh.calibration import cpu, kernels
from attnmesh.calibration.cpu import LinkFigures
from attnmesh.calibration.kernels import KernelSample, kernel_curves, kernel_samples
from attnmesh.planner.catalog import cluster, load
from attnmesh.planner.hardware import Cluster, Link
from attnmesh.planner.program import KERNEL_KINDS
from benchmarks import predicted
from helpers.cli import run as run_command


def run(*arguments):
    return run_command(*arguments)


def check_file(path) -> None:
    """The catalogue reads the file, which has every kind of kernel and names what it was measured on."""
    found = load(path)
    device = found.device("here")
    assert [kind for kind, _ in device.curves] == list(KERNEL_KINDS)
    assert [kind for kind, _ in device.causal] == ["attention", "attention backward"]
    assert device.cores == len(os.sched_getaffinity(0))
    assert 0 < device.launch < 1e-3
    assert 0 <= device.round < 0.1
    assert device.memory > 1e8
    machine = found.cluster("here")
    assert machine.intra_node.shared
    assert 0 < machine.intra_node.latency < 0.1
    assert 1e7 < machine.intra_node.bandwidth < 1e12
    assert machine.ranks_per_node == device.cores
    for word in (f"torch {torch.__version__}", "python ", "cores "):
        assert word in path.read_text()


@pytest.fixture
def tiny_and_virtual(monkeypatch):
    """The smallest sizes, on virtual ranks: everything that a calibration does but for its processes."""
    tiny = replace(
        kernels._CPU_QUICK, sides=(16, 64), matmuls=(32, 128), copies=(16, 64), caches=(64, 256), sparse_rows=(2,),
        sparse_keys=128, sparse=(2, 64, 32, 32), indexer=(2, 32, 16),
    )  # fmt: skip
    monkeypatch.setattr(kernels, "_CPU_QUICK", tiny)
    monkeypatch.setattr(
        cpu.launch, "run", lambda fn, ranks, threads, **options: run_on_virtual_ranks(fn, ranks, options)
    )


def run_on_virtual_ranks(fn, ranks, options):
    return run_virtual(ranks, lambda comm: fn(comm, **options))


@pytest.mark.usefixtures("tiny_and_virtual")
def test_the_file_is_read_and_has_every_kind(tmp_path):
    out = tmp_path / "hardware.toml"
    ran = run("calibrate", "--device", "cpu", "--quick", "--out", out, "--name", "Here")
    assert ran.exit_code == 0, ran.output
    assert f"Hardware file: {out} (device Here)" in ran.stdout.replace("\n", "")
    check_file(out)


@pytest.mark.sweep
def test_what_is_predicted_for_two_processes_is_about_what_they_take(tmp_path):
    # Other programs on the machine only add to the times that are calibrated: one of three calibrations is enough.
    for attempt in range(3):
        rows = measured_and_predicted(tmp_path / f"hardware-{attempt}.toml")
        if all(ours / 2.5 < ratio < 2.5 / ours for ours, ratio in rows):
            return
    pytest.fail(f"share of the CPU, and measured over predicted time: {rows}")


def measured_and_predicted(out) -> list[tuple[float, float]]:
    """This program's share of the CPU, and measured over predicted time, of three schedules."""
    ran = run("calibrate", "--device", "cpu", "--quick", "--out", out, "--name", "Here")
    assert ran.exit_code == 0, ran.output
    check_file(out)
    device = load(out).device("here")
    for kind in ("attention", "attention backward", "matmul"):
        times = [seconds for _, seconds in device.curve(kind).samples]
        assert times == sorted(times)  # larger calls take longer
        assert 1e8 < 1e9 / device.seconds(kind, 1e9) < 1e13  # operations per second
    # Short runs, the best of many, and the share of other programs taken off.
    of = [
        cpu.ScheduleRun("ring", 256, True),
        cpu.ScheduleRun("allgather", 256, False),
        cpu.ScheduleRun("ulysses", 256, False),
    ]
    rows = predicted.measure_predicted_cpu(load(out).cluster("here"), of, (2,), rounds=40, best=True)
    others = [row["cpu_share_of_other_processes"] for row in rows]
    shares = [1 - min(share, 0.8) if isinstance(share, float) else 1.0 for share in others]
    return [(ours, row["measured_over_predicted"]) for ours, row in zip(shares, rows, strict=True)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_every_kind_is_timed_at_ascending_sizes(device, quick):
    timed = kernel_samples(device, quick=quick)
    for causal in (False, True):
        curves = dict(kernel_curves(timed, [1.0] * len(timed), causal=causal))
        assert set(curves) == ({"attention", "attention backward"} if causal else set(KERNEL_KINDS))
    if not quick:
        sizes = [sample.size for sample in timed if sample.kind == "attention"]
        assert max(sizes) > 1e3 * min(sizes)


def test_a_backward_is_timed_without_the_forward_before_it():
    assert all(sample.before for sample in kernel_samples("cuda", quick=True) if sample.kind.endswith("backward"))


def test_curves_are_by_kind_and_by_form():
    timed = [
        KernelSample("copy", 2.0, None),
        KernelSample("attention", 3.0, None, causal=True),
        KernelSample("copy", 1.0, None),
    ]
    assert dict(kernel_curves(timed, [20.0, 30.0, 10.0], causal=False))["copy"].samples == ((1.0, 10.0), (2.0, 20.0))
    assert dict(kernel_curves(timed, [20.0, 30.0, 10.0], causal=True))["attention"].samples == ((3.0, 30.0),)


def test_a_link_is_told_from_its_exchanges():
    latency, message, bandwidth = 1e-4, 1e-5, 2e9
    sizes = (2**16, 2**20, 2**22)
    seconds = {(1, n): latency + 2 * n / bandwidth for n in sizes} | {
        (1, 64): latency,
        (17, 64): latency + 16 * message,
    }
    figures = LinkFigures.from_times(seconds)
    assert figures.latency == pytest.approx(latency)
    assert figures.message == pytest.approx(message)
    assert figures.bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize("world", [2, 3])
def test_what_rounds_take_is_found_again(world):
    device, link = cluster("cpu").device, Link("toy", "made up", 1e-4, 1e9, message=1e-4, shared=True)
    known = replace(device, round=3e-4, cores=world)
    machine = Cluster(known, link, link, world, world)
    took = [
        sum(statistics.mean(part.computed) for part in run.simulate(world, machine))
        for run in cpu.all_runs((cpu._SHORT_ROWS * world,))
    ]
    assert cpu.round_seconds(device, link, took, world) == pytest.approx(3e-4)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    ran = run("calibrate", "--device", "cpu", "--out", tmp_path / "nowhere" / "hardware.toml")
    assert ran.exit_code == 2
    assert "--out must be in an existing folder" in ran.output
    ran = run("calibrate", "--device", "cpu", "--out", tmp_path)
    assert ran.exit_code == 2
    assert "--out must be a file, got the folder" in ran.output


@pytest.mark.parametrize(("name", "why"), [("h200", "got 'h200'"), ("two words", "got 'two words'"), ("", "got ''")])
def test_names_that_are_taken_or_cannot_be_typed_are_refused(name, why, tmp_path):
    ran = run("calibrate", "--device", "cpu", "--out", tmp_path / "hardware.toml", "--name", name)
    assert ran.exit_code == 2
    assert why in ran.output
