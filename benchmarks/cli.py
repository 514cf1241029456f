"""`python -m benchmarks NAME`: the command line of the benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli import output as report
from attnmesh.cli.options import Device, check_device, default_device
from attnmesh.cli.options import MeasuredDeviceOption as DeviceOption
from benchmarks import main
from benchmarks.decode.parts import ON_CPU, Part
from benchmarks.scaling.parts import Part as ScalingPart
from benchmarks.sparse.parts import Part as SparsePart
from benchmarks.sparse.plot import FORMATS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure attnmesh against its peers; every table names the machine.",
)

LengthsOption = Annotated[
    list[int] | None, typer.Option("--length", min=1, help="Length of the whole sequence. Repeatable.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this JSON file.")]


@app.command("predicted")
def bench_predicted(
    hardware_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="What `attnmesh calibrate` wrote; it runs first without."),
    ] = None,
    hardware: Annotated[str, typer.Option(help="The name of the device in it.")] = "this-machine",
    device: DeviceOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths and rounds.")] = False,
    json: JsonOption = None,
) -> None:
    """Predicted against measured: processes over gloo on the CPU, a rank's program by itself on a GPU."""
    try:
        main.predicted(default_device(device), hardware_file, hardware, quick, json)
    except ValueError as error:
        typer.echo(f"benchmarks predicted: {error}", err=True)
        raise typer.Exit(2) from None


@app.command("ring")
def bench_ring(
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Efficiency of ring context parallelism against one device; on CUDA, memory too."""
    main.ring(default_device(device), json)


@app.command("prefill")
def bench_prefill(
    lengths: LengthsOption = None,
    worlds: Annotated[
        list[int] | None, typer.Option("--ranks", min=4, help="Number of ranks, even. Repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every program is timed.")] = 3,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw efficiency against world and length.")] = None,
) -> None:
    """Every schedule side by side on one GPU: time, efficiency, bytes a rank."""
    check_device(Device.CUDA)
    if any(world % 2 for world in worlds or ()):
        raise typer.BadParameter("must be even: two-level schedules use two ranks per node", param_hint="--ranks")
    main.prefill(lengths or (16384, 32768, 65536, 131072), worlds or (4, 8, 16), rounds, json, plot)


@app.command("queries")
def bench_queries(
    lengths: LengthsOption = None,
    rings: Annotated[list[int] | None, typer.Option("--ranks", min=2, help="Number of ranks. Repeatable.")] = None,
    json: JsonOption = None,
) -> None:
    """Query-distributed causal attention on one GPU: speed-up, balance, memory."""
    check_device(Device.CUDA)
    main.queries(lengths or (32768, 131072), rings or (4, 8), json)


@app.command("decode")
def bench_decode(
    device: DeviceOption = None,
    parts: Annotated[
        list[Part] | None, typer.Option("--part", help="What to measure; repeat it. All by default.")
    ] = None,
    json: JsonOption = None,
    plots: Annotated[Path | None, typer.Option(help="Also draw pictures into this folder.")] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", exists=True, dir_okay=False, help="Measure nothing: draw from a --json file."),
    ] = None,
) -> None:
    """A new token a sequence over long caches: speed, peers, storage types, splits, accuracy."""
    if source is not None:
        if plots is None or json is not None or parts or device:
            raise typer.BadParameter("draws what was measured: give --plots and nothing else", param_hint="--from")
        main.plot_saved_decode(source, plots)
        return
    chosen = default_device(device)
    there = tuple(Part) if chosen == Device.CUDA else ON_CPU
    if missing := [part for part in parts or () if part not in there]:
        raise typer.BadParameter(f"{', '.join(missing)}: measured on a GPU only", param_hint="--part")
    main.decode(chosen, parts or there, json, plots)


@app.command("sharding")
def bench_sharding(
    contexts: Annotated[
        list[int] | None, typer.Option("--length", min=2, help="Tokens per sequence. Repeatable.")
    ] = None,
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Sequences; repeat it.")] = None,
    json: JsonOption = None,
) -> None:
    """Token generation over 64 ranks, one rank's step on one GPU: TP, KVDP, CP and mixed forms."""
    check_device(Device.CUDA)
    main.sharding(contexts or (8192, 32768, 131072), batches or (1, 8, 64, 512), json)


@app.command("scaling")
def bench_scaling(
    only: Annotated[
        list[ScalingPart] | None, typer.Option("--only", help="What to study; repeat it. All by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="8 and 16 ranks: to see that it runs.")] = False,
    hardware_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A TOML file that changes figures of the hardware."),
    ] = None,
    json: JsonOption = None,
    plots: Annotated[Path | None, typer.Option(help="Also draw pictures into this folder.")] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", exists=True, dir_okay=False, help="Simulate nothing: show what a --json file has."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Put the tables into this document, at its comments."),
    ] = None,
) -> None:
    """Schedules on 8 to 4,096 GPUs, shardings of token generation, slow ranks: simulated; tables as Markdown."""
    if source is not None:
        if only or quick or hardware_file or json is not None:
            raise typer.BadParameter("shows what was simulated: give --plots and --into only", param_hint="--from")
        main.show_saved_scaling(source, plots, into)
        return
    main.scaling(only or tuple(ScalingPart), quick, hardware_file, json, plots, into)


@app.command("sparse")
def bench_sparse(
    device: DeviceOption = None,
    only: Annotated[
        list[SparsePart] | None, typer.Option("--only", help="What to measure; repeat it. All by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, few rounds: to see that it runs.")] = False,
    json: JsonOption = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Also draw everything into this file.")] = None,
) -> None:
    """Sparse attention, its distribution, the indexer's top-k and loss, beside the roofline; 1 if a result is wrong."""
    if plot is not None and plot.suffix not in FORMATS:
        raise typer.BadParameter(f"must end in one of {', '.join(FORMATS)}, got {plot.name!r}", param_hint="--plot")
    if not main.sparse(default_device(device), only or tuple(SparsePart), quick, json, plot):
        report.console().print("WRONG results: see the verdicts above")
        raise typer.Exit(1)


@app.command("model")
def bench_model(
    device: DeviceOption = None,
    prompts: Annotated[
        list[int] | None,
        typer.Option("--prompt", min=128, help="Tokens to read; repeat it. 2048; 32k and 128k on CUDA."),
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", min=1, help="On the CPU; repeat it. 1, 2 and 4.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """A language model across ranks: prefill, decode and KV cache a rank, beside Transformers' own attention."""
    chosen = default_device(device)
    main.model(chosen, prompts or ([32768, 131072] if chosen == "cuda" else [2048]), ranks or [1, 2, 4], json)


@app.command("accuracy")
def bench_accuracy(
    device: DeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Error of ring context parallelism in bf16 against the number of ranks."""
    main.accuracy(default_device(device), json)
