"""`attnmesh warmup`: compiles the kernels of a model's attention, so that the first call of a program does not."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer

from attnmesh.cli import options, output
from attnmesh.compilation.calls import Call, Layer, Step, layers_of
from attnmesh.compilation.run import MOST_PROCESSES, Outcome, compile_calls
from attnmesh.planner.models import model as model_config
from attnmesh.utils.optional import require
from attnmesh.utils.sizes import MAX_HEAD_DIM, MAX_HEADS, MAX_RANKS
from attnmesh.utils.text import counted

_LENGTH = 8192


def warmup_command(
    steps: Annotated[
        list[Step] | None, typer.Argument(metavar="[train] [prefill] [decode]", help="What the program does.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model name (such as llama-3.1-8b), config.json or its folder; or give heads."),
    ] = None,
    q_heads: Annotated[int | None, typer.Option("--q-heads", min=1, max=MAX_HEADS, help="Query heads.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", min=1, max=MAX_HEADS, show_default="--q-heads", help="KV heads.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", min=1, max=MAX_HEAD_DIM, help="Head dimension of keys.")
    ] = None,
    value_dim: Annotated[
        int | None,
        typer.Option(
            "--value-dim", min=1, max=MAX_HEAD_DIM, show_default="--head-dim", help="Head dimension of values."
        ),
    ] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Sliding window, the token itself included.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Bound of the scores.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="Heads have sinks.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="Heads have ALiBi slopes.")] = False,
    dtype: Annotated[options.Precision, typer.Option(help="Dtype of activations.")] = options.Precision.BF16,
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length", parser=options.length_argument, metavar="LENGTH", show_default="8k",
            help="Tokens per sequence, such as 8k. Repeatable.",
        ),
    ] = None,
    batch: options.BatchOption = 1,
    ranks: Annotated[
        int, typer.Option(min=1, max=MAX_RANKS, help="Ranks of context parallelism; this GPU computes for each.")
    ] = 1,
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens per block of the KV cache.")] = 32,
    storage: Annotated[
        str | None, typer.Option("--storage", show_default="--dtype", help="Storage type of the KV cache.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that compile at once.")] = MOST_PROCESSES,
    print_json: options.JsonFlag = False,
) -> None:  # fmt: skip
    """Compile the kernels of a model's attention into Triton's cache on disk, in parallel. Needs the GPU."""
    if model is not None:
        given = {"--q-heads": q_heads, "--kv-heads": kv_heads, "--head-dim": head_dim, "--value-dim": value_dim}
        extra = [name for name, value in given.items() if value is not None]
        extra += [name for name, value in {"--window": window, "--softcap": softcap}.items() if value is not None]
        extra += [name for name, value in {"--sinks": sinks, "--alibi": alibi}.items() if value]
        if extra:
            raise ValueError(f"{extra[0]} must not be given with --model, whose configuration has it")
        layers = layers_of(model_config(model), dtype.value)
    else:
        if q_heads is None or head_dim is None:
            raise ValueError("--model, or --q-heads and --head-dim, must be given")
        layers = [
            Layer(
                q_heads, kv_heads or q_heads, head_dim, value_dim or head_dim, dtype.value,
                window=window, softcap=softcap, sinks=sinks, alibi=alibi,
            )
        ]  # fmt: skip
    calls = [
        Call(step, layer, length, batch, 1 if step is Step.DECODE else ranks, block_size, storage)
        for step in dict.fromkeys(steps or Step)
        for layer in layers
        for length in dict.fromkeys(lengths or [_LENGTH])
    ]
    options.check_device(options.Device.CUDA)
    require("triton", extra="triton")
    begin = time.monotonic()
    outcomes = []
    with output.Progress(every_step=True, quiet=print_json) as progress:
        for outcome in compile_calls(calls, processes):
            outcomes.append(outcome)
            progress(str(outcome.call), len(outcomes), len(calls))
    outcomes.sort(key=lambda each: calls.index(each.call))
    _show(outcomes, time.monotonic() - begin, print_json=print_json)
    if any(outcome.error is not None for outcome in outcomes):
        raise typer.Exit(1)


def _show(outcomes: list[Outcome], seconds: float, *, print_json: bool) -> None:
    from triton import knobs

    console, folder = output.console(), knobs.cache.dir
    if print_json:
        found = {"seconds": seconds, "cache": folder, "calls": [asdict(outcome) for outcome in outcomes]}
        typer.echo(json.dumps(found, indent=2))
        return
    rows = [
        [str(outcome.call), kernel.name, "in the cache" if kernel.was_cached else "compiled", kernel.seconds]
        for outcome in outcomes
        for kernel in outcome.kernels
    ]
    console.print(output.table("attnmesh warmup", ["call", "kernel", "", "seconds"], rows))
    for outcome in outcomes:
        if outcome.error is not None:
            console.print(f"failed: {outcome.call}: {outcome.error}", soft_wrap=True)
    compiled = [kernel for outcome in outcomes for kernel in outcome.compiled]
    console.print(
        f"{counted(len(compiled), 'kernel')} compiled in {seconds:.1f} s "
        f"({sum(kernel.seconds for kernel in compiled):.1f} s of one process), into {folder}",
        soft_wrap=True,
    )
