"""What `attnmesh bench` runs: measure, show, save."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Sequence
from json import loads
from pathlib import Path

from rich.progress import Progress

from attnmesh.calibration.runs import all_runs
from attnmesh.cli import output as report
from attnmesh.cli.calibrate import calibrate
from attnmesh.cli.output import Rows
from attnmesh.core.optional import require
from attnmesh.planner.catalog import load
from benchmarks.accuracy import measure_accuracy
from benchmarks.decode.parts import Part, measure_decode
from benchmarks.decode.plot import plot_decode
from benchmarks.model_cpu import measure_model_cpu
from benchmarks.model_cuda import measure_model_cuda
from benchmarks.plot import plot_efficiency
from benchmarks.predicted import LENGTHS, measure_predicted_cpu
from benchmarks.predicted_cuda import LENGTHS as CUDA_LENGTHS
from benchmarks.predicted_cuda import measure_predicted_cuda
from benchmarks.prefill import measure_prefill
from benchmarks.query_distributed import measure_queries, measure_queries_memory
from benchmarks.ring import measure_cuda, measure_memory
from benchmarks.ring_cpu import measure_cpu
from benchmarks.scaling.markdown import put_into, tables
from benchmarks.scaling.parts import Part as ScalingPart
from benchmarks.scaling.parts import study
from benchmarks.scaling.plot import plot_scaling
from benchmarks.sharding import sections as sharding_sections
from benchmarks.sparse.parts import Part as SparsePart
from benchmarks.sparse.parts import measure_sparse, wrong
from benchmarks.sparse.plot import plot_sparse


def ring(device: str, json: Path | None) -> None:
    """Efficiency and memory of the ring."""
    if device == "cuda":
        sections = {
            "efficiency against one device with cuDNN (bf16, causal, zigzag, 32/8 heads, D=128)": measure_cuda(
                (32768, 131072), (4, 8)
            ),
            "peak memory a rank adds to its inputs, forward+backward": measure_memory(8192, (4, 8, 16)),
        }
    else:
        sections = {"efficiency of 2 processes x 1 thread against 1 x 2 (gloo, causal, zigzag)": measure_cpu(8192, 2)}
    _publish("ring", device, sections.items(), json)


def prefill(lengths: Sequence[int], worlds: Sequence[int], rounds: int, json: Path | None, plot: Path | None) -> None:
    """Every schedule side by side."""
    lines = measure_prefill(lengths, worlds, rounds=rounds)
    title = (
        "prefill and training: every schedule against one device with cuDNN (bf16, causal, zigzag, 32/8 heads, D=128)"
    )
    _publish("prefill", "cuda", [(title, lines)], json)
    if plot is not None:
        plot_efficiency(lines, plot)


def queries(lengths: Sequence[int], rings: Sequence[int], json: Path | None) -> None:
    """Query-distributed causal attention."""
    sections = {
        "queries distributed, against one device with cuDNN (bf16, causal, 32/8 heads, D=128)": measure_queries(
            lengths, rings
        ),
        "peak memory that a forward adds to replicated q, k and v": measure_queries_memory(max(lengths), rings),
    }
    _publish("queries", "cuda", sections.items(), json)


def accuracy(device: str, json: Path | None) -> None:
    """Error against the number of ranks."""
    backends = ("triton", "aten") if device == "cuda" else ("aten",)
    title = "relative RMS error against float64 (bf16, causal, zigzag, S=4096, 4/2 heads, D=128)"
    _publish("accuracy", device, [(title, measure_accuracy(device, backends, (1, 2, 4, 8, 16, 32)))], json)


def decode(device: str, parts: Collection[Part], json: Path | None, plots: Path | None) -> None:
    """One token a sequence over long caches."""
    if plots is not None:
        require("matplotlib.pyplot", extra="plot")  # before minutes are spent
    sections = _publish("decode", device, measure_decode(device, parts), json)
    if plots is not None:
        plot_decode(sections, plots)


def sharding(contexts: Sequence[int], batches: Sequence[int], json: Path | None) -> None:
    """One rank's step of token generation under every sharding."""
    _publish("sharding", "cuda", sharding_sections(contexts, batches), json)


def sparse(device: str, parts: Collection[SparsePart], quick: bool, json: Path | None, plot: Path | None) -> bool:
    """Sparse attention, its distribution, the indexer and its loss; whether every result was right."""
    if plot is not None:
        require("matplotlib.pyplot", extra="plot")  # before minutes are spent
    sections = _publish("sparse", device, measure_sparse(device, parts, quick=quick), json)
    if plot is not None:
        plot_sparse(sections, plot)
    return not any(wrong(rows) for rows in sections.values())


def scaling(
    parts: Collection[ScalingPart], quick: bool, hardware_file: Path | None, json: Path | None, plots: Path | None,
    into: Path | None,
) -> None:  # fmt: skip
    """Schedules and shardings at many ranks, simulated; the tables as Markdown."""
    if plots is not None:
        require("matplotlib.pyplot", extra="plot")  # before minutes are spent
    machine = report.machine("cpu")
    sections: dict[str, Rows] = {}
    with Progress(console=report.console(), transient=True) as progress:
        task = progress.add_task("simulating", total=None)
        for part, rows in study(parts, quick=quick, hardware_file=hardware_file):
            sections.setdefault(part.value, []).extend(rows)
            progress.update(task, description=f"{part.value}: {sum(map(len, sections.values()))} rows")
            if json is not None:  # the largest take a minute each: what is done is not lost
                report.save(json, {"benchmark": "scaling", "machine": machine, "sections": sections})
    _show_scaling(sections, plots, into)


def show_saved_scaling(source: Path, plots: Path | None, into: Path | None) -> None:
    """The tables and pictures of a study whose figures were saved."""
    _show_scaling(loads(source.read_text())["sections"], plots, into)


def _show_scaling(sections: dict[str, Rows], plots: Path | None, into: Path | None) -> None:
    print(tables(sections))
    if into is not None:
        into.write_text(put_into(into.read_text(), sections))
    if plots is not None:
        plot_scaling(sections, plots)


def model(device: str, prompts: Sequence[int], ranks: Sequence[int], json: Path | None) -> None:
    """A language model across ranks, beside Transformers' own attention."""
    if device == "cuda":
        sections = measure_model_cuda(prompts)
    else:
        sections = (section for prompt in prompts for section in measure_model_cpu(prompt, ranks))
    _publish("model", device, sections, json)


def predicted(device: str, hardware_file: Path | None, hardware: str, quick: bool, json: Path | None) -> None:
    """Predicted against measured times; without a file, this machine is calibrated first."""
    with tempfile.TemporaryDirectory() as folder:
        if hardware_file is None:
            hardware, hardware_file = "this-machine", Path(folder, "hardware.toml")
            hardware_file.write_text(calibrate(device, hardware, quick=quick), encoding="utf-8")
        cluster = load(hardware_file).cluster(hardware)
    if device == "cuda":
        title = "a rank's program by itself, measured and predicted (bf16, causal, zigzag, 32/8 heads, D=128)"
        rows = measure_predicted_cuda(cluster, (16384, 65536) if quick else CUDA_LENGTHS)
    else:
        title = "measured over predicted time of real processes (gloo, float32, causal, zigzag, 4/2 heads, D=64)"
        lengths, rounds = ((512,), 5) if quick else (LENGTHS, 9)
        rows = measure_predicted_cpu(cluster, all_runs(lengths), rounds=rounds)
    _publish("predicted", device, [(title, rows)], json)


def plot_saved_decode(source: Path, plots: Path) -> None:
    """The pictures of a run whose figures were saved."""
    plot_decode(loads(source.read_text())["sections"], plots)


def _publish(name: str, device: str, sections: Iterable[tuple[str, Rows]], json: Path | None) -> dict[str, Rows]:
    """Show and save each section as it comes: what was measured before something fails is not lost."""
    console = report.console()
    machine = report.machine(device)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    measured: dict[str, Rows] = {}
    for title, rows in sections:
        measured[title] = rows
        report.show(console, title, rows)
        if json is not None:
            report.save(json, {"benchmark": name, "machine": machine, "sections": measured})
    return measured
