"""The command line: `attnmesh generate`, `verify`, `plan`, `trace`, `report` and `calibrate`."""

from __future__ import annotations

import enum
import os
import secrets
import sys
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from attnmesh.cli import calibrate
from attnmesh.cli import output as report
from attnmesh.cli import trace as trace_run
from attnmesh.cli.generate.bad_input import BadInput
from attnmesh.cli.generate.command import Asked, generate
from attnmesh.cli.generate.ranks import RanksLost
from attnmesh.cli.plan.app import LayoutName, plan_app, simulate_command
from attnmesh.comm import Comm, launch, run_virtual
from attnmesh.integrations.problem import ModelError
from attnmesh.plan.workload import Shape
from attnmesh.report import command as report_command
from attnmesh.verify import run as verify

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Exact attention over a mesh of devices.")
app.add_typer(plan_app, name="plan")
app.command("simulate")(simulate_command)


class Device(enum.StrEnum):
    """Where to compute."""

    CPU = "cpu"
    CUDA = "cuda"


class Precision(enum.StrEnum):
    """What is computed in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


DeviceOption = Annotated[Device | None, typer.Option(help="Where to measure; a GPU if there is one.")]


@app.command("verify")
def verify_command(
    ranks: Annotated[int | None, typer.Option(min=1, help="How many ranks to start; 4 without it.")] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.CPU,
    virtual: Annotated[bool, typer.Option("--virtual", help="Ranks as threads of this process.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the random inputs; drawn anew without it.")] = None,
) -> None:
    """Check every mode against float64 on fresh random inputs; exit with 1 if anything is wrong."""
    check_device(device)
    if launch.under_torchrun():
        if virtual or ranks is not None:
            raise typer.BadParameter("torchrun says how many ranks there are", param_hint="--ranks, --virtual")
        launch.join(device, _verify, device.value, seed)
        return
    ranks = ranks or 4
    if virtual:
        run_virtual(ranks, lambda comm: _verify(comm, device.value, seed), timeout=3600)  # a GPU's kernels are compiled
        return
    try:
        launch.start(ranks, device, _verify, device.value, seed)
    except ProcessExitedException as ended:
        raise typer.Exit(ended.exit_code) from None


def _verify(comm: Comm, device: str, seed: int | None) -> None:
    """One rank's part; rank 0 speaks, and ends with exit status 1 if anything is wrong."""
    if seed is None:  # rank 0 draws one for all
        drawn = torch.tensor([secrets.randbelow(2**31)], device=device)
        seed = int(comm.all_gather(drawn, [(1,)] * comm.world)[0])
    # torch says so on CPUs without bf16 instructions, at length and on every rank, and then computes all the same.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    outcomes = []
    console = report.console(quiet=comm.rank > 0)
    total = len(verify.modes(comm, device))
    with Progress(console=console, transient=True, disable=comm.rank > 0) as progress:
        task = progress.add_task(f"verifying on {comm.world} ranks", total=total)
        for outcome in verify.run(comm, device, seed):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=outcome.mode.name)
    if comm.rank > 0:
        return
    rows = [[o.mode.name, o.mode.shape, o.worst, o.error, o.bound, "ok" if o.passed else "WRONG"] for o in outcomes]
    failed = sum(not o.passed for o in outcomes)
    title = f"attnmesh verify: {comm.world} ranks, {device}, seed {seed}"
    console.print(report.table(title, ["mode", "shape", "worst", "error", "bound", "verdict"], rows))
    console.print(f"{len(outcomes) - failed} passed, {failed} failed")
    if failed:
        sys.exit(1)


@app.command("trace")
def trace_command(
    out: Annotated[Path, typer.Option(help="The file to write, in a folder that exists.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="How many ranks to start; 4 without it.")] = None,
    schedule: Annotated[str, typer.Option(help="How ranks work together, as in ContextParallel.")] = "ring",
    length: Annotated[int, typer.Option(min=1, help="Of the whole sequence.")] = 8192,
    layout: Annotated[LayoutName, typer.Option(help="Which rank has which tokens.")] = LayoutName.ZIGZAG,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of keys and values.")] = 2,
    head_dim: Annotated[int, typer.Option(min=1, help="Of one head.")] = 64,
    backward: Annotated[bool, typer.Option("--backward", help="Gradients as well.")] = False,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks a node, for schedules of two levels.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.CPU,
    dtype: Annotated[Precision | None, typer.Option(help="In what; fp32 on a CPU, bf16 on a GPU without it.")] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="Ranks as threads of this process.")] = False,
) -> None:
    """Run attention over ranks and write when every rank computed, sent, received and waited, for a trace viewer."""
    check_device(device)
    precision = dtype or (Precision.BF16 if device is Device.CUDA else Precision.FP32)
    asked = trace_run.Attending(
        out,
        schedule,
        length,
        layout.value,
        heads,
        kv_heads,
        head_dim,
        backward,
        ranks_per_node,
        device.value,
        precision.value,
    )
    joined = launch.under_torchrun()
    if joined and (virtual or ranks is not None):
        raise typer.BadParameter("torchrun says how many ranks there are", param_hint="--ranks, --virtual")
    ranks = int(os.environ["WORLD_SIZE"]) if joined else ranks or 4
    try:
        asked.check(ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if joined:
        launch.join(device, trace_run.run, asked)
    elif virtual:
        run_virtual(ranks, lambda comm: trace_run.run(comm, asked, virtual=True))
    else:
        try:
            launch.start(ranks, device, trace_run.run, asked)
        except ProcessExitedException as ended:
            raise typer.Exit(ended.exit_code) from None


@app.command("generate")
def generate_command(
    model: Annotated[
        Path | None, typer.Option(help="A folder as save_pretrained writes it, or a GGUF file; else the default model.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="How many ranks to start; 4 without it.")] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.CPU,
    dtype: Annotated[Precision, typer.Option(help="In what precision.")] = Precision.FP32,
    prompt: Annotated[str | None, typer.Option(help="The text to read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the text to read.")] = None,
    questions: Annotated[
        list[str] | None, typer.Option("--question", help="About the text; repeat it. Without, the text is continued.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer, at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens that make up so much.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    speculative: Annotated[bool, typer.Option("--speculative", help="Guess from the text, verify many.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Ask one plain process, too, and compare.")] = False,
    layout: Annotated[LayoutName, typer.Option(help="Which rank reads which tokens.")] = LayoutName.ZIGZAG,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens read in one pass; 512 a rank on a CPU, 8192 on a GPU without it.")
    ] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="Ranks as threads of this process.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until ranks give up on one another.")] = launch.TIMEOUT,
    report_to: Annotated[
        Path | None, typer.Option("--report", help="Also write a page about the run: who held, computed and sent what.")
    ] = None,
) -> None:
    """Read a text with a language model over ranks, and answer questions about it.

    Exits with 1 if --check finds another token or a rank is lost, with 2 if something asked for cannot be done.
    """
    check_device(device)
    asked = Asked(
        model, ranks, device.value, dtype.value, prompt, prompt_file, questions or (), max_new_tokens, temperature,
        top_p, seed, speculative, check, layout.value, prefill_chunk, virtual, timeout, report_to,
    )  # fmt: skip
    try:
        if not generate(asked):
            raise typer.Exit(1)
    except (BadInput, ModelError) as problem:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the others of torchrun's would say the same
            typer.echo(f"attnmesh generate: {problem}", err=True)
        raise typer.Exit(2) from None
    except RanksLost as lost:
        typer.echo(f"attnmesh generate: {lost}", err=True)
        raise typer.Exit(1) from None


@app.command("report")
def report_page(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    ranks: Annotated[int, typer.Option(min=1, help="Over how many ranks.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Of the whole sequence.")] = 131072,
    layout: Annotated[LayoutName, typer.Option(help="Which rank has which tokens.")] = LayoutName.ZIGZAG,
    mask: Annotated[str, typer.Option(help="causal, full, or window:N for the last N keys.")] = "causal",
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of keys and values.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Of one head.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    node: Annotated[
        int | None, typer.Option(min=1, help="Ranks a node; a divisor of --ranks is taken without it.")
    ] = None,
    device: Annotated[Device, typer.Option(help="The kind of machine to rank schedules for.")] = Device.CUDA,
    traces: Annotated[list[Path] | None, typer.Option("--trace", help="A trace to show; repeat it.")] = None,
    figures: Annotated[Path | None, typer.Option(help="A JSON file of figures to show.")] = None,
    check: Annotated[bool, typer.Option(help="Compute a small case, too, and compare with float64.")] = True,
) -> None:
    """Write a page on who holds, computes and sends what, and why; any browser opens it."""
    shape = Shape(batch, heads, kv_heads, head_dim, itemsize=2, sum_itemsize=4)  # bf16, summed in float32
    asked = report_command.Asked(
        out, ranks, length, layout.value, mask, shape, node, device.value, traces or (), figures, check
    )
    try:
        report_command.write(asked)
    except (ValueError, OSError) as error:
        typer.echo(f"attnmesh report: {error}", err=True)
        raise typer.Exit(2) from None
    report.console().print(f"Written: {out}", soft_wrap=True)


@app.command("calibrate")
def calibrate_command(
    device: DeviceOption = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("hardware.toml"),
    name: Annotated[str, typer.Option(help="What the device is called in it.")] = "this-machine",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds; less exact.")] = False,
) -> None:
    """Measure this machine, kernels and messages, and write what was found as a file for --hardware-file."""
    chosen = default_device(device)
    try:
        calibrate.check_name(name)
        calibrate.check_out(out)
        out.write_text(calibrate.calibrate(chosen, name, quick=quick), encoding="utf-8")
    except (ValueError, OSError) as error:
        typer.echo(f"attnmesh calibrate: {error}", err=True)
        raise typer.Exit(2) from None
    except (ProcessExitedException, ProcessRaisedException) as ended:
        typer.echo(f"attnmesh calibrate: the processes that measure did not come through: {ended}", err=True)
        raise typer.Exit(1) from None
    report.console().print(f"Written: {out} (device {name})", soft_wrap=True)


def default_device(device: Device | None) -> str:
    device = device or (Device.CUDA if torch.cuda.is_available() else Device.CPU)
    check_device(device)
    return device.value


def check_device(device: Device) -> None:
    if device is Device.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is available", param_hint="--device")


if __name__ == "__main__":
    app()
