"""The commands `attnmesh plan prefill`, `attnmesh plan decode` and `attnmesh simulate`."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli.plan import plans, show_sharding, simulation
from attnmesh.cli.plan.machines import Machines
from attnmesh.plan.workload import Shape
from attnmesh.planner.models.config import ModelConfig
from attnmesh.planner.models.read import model as model_named
from attnmesh.planner.models.read import read_config

plan_app = typer.Typer(no_args_is_help=True, help="Say what ranks would do, before anything runs.")


class LayoutName(enum.StrEnum):
    """Which rank has which tokens."""

    ZIGZAG = "zigzag"
    STRIPED = "striped"
    CONTIGUOUS = "contiguous"


ModelOption = Annotated[str, typer.Option(help="A model by name (llama-3.1-70b), or its config.json or folder.")]
ContextOption = Annotated[str, typer.Option(help="Positions a sequence: 100000, 128k, 1M.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences.")]
DevicesOption = Annotated[int, typer.Option("--gpus", min=1, help="Devices to spread them over.")]
HardwareOption = Annotated[
    str, typer.Option(help="h200, h100, b200, a100, mi300x, trainium2, cpu, or one of the file.")
]
FileOption = Annotated[
    Path | None, typer.Option("--hardware-file", help="A TOML file, as `attnmesh calibrate` writes it.")
]
LinksOption = Annotated[str | None, typer.Option(help="Within nodes, between: nvlink4,infiniband. One name is both.")]
NodeOption = Annotated[int | None, typer.Option(min=1, help="Devices a node.")]
RailsOption = Annotated[int | None, typer.Option(min=1, help="Network ports a node.")]
StorageOption = Annotated[str, typer.Option(help="How keys and values are stored.")]
AllOption = Annotated[bool, typer.Option("--all", help="Show every way, not only the best dozen.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@plan_app.command("prefill")
def plan_prefill(
    model: ModelOption,
    context: ContextOption,
    gpus: DevicesOption,
    batch: BatchOption = 1,
    hardware: HardwareOption = "h200",
    hardware_file: FileOption = None,
    links: LinksOption = None,
    node: NodeOption = None,
    rails: RailsOption = None,
    storage: StorageOption = "bf16",
    every: AllOption = False,
    json: JsonFlag = False,
) -> None:
    """Ways to read long prompts, ranked: time, memory, bytes, bottleneck, and why the others lose.

    Exits with 1 if nothing fits, and says what would.
    """
    machines = Machines(hardware, links, node, rails, hardware_file)
    asked = plans.Asked(model, context, batch, gpus, machines, storage, every=every, as_json=json)
    with _plainly():
        if not plans.prefill(asked):
            raise typer.Exit(1)


@plan_app.command("decode")
def plan_decode(
    gpus: Annotated[int, typer.Option("--gpus", "--ranks", min=1, help="Devices to spread the KV cache over.")],
    batch: BatchOption,
    model: Annotated[str | None, typer.Option(help="A model by name, or its config; ranked by time with it.")] = None,
    context: Annotated[str | None, typer.Option(help="Positions a sequence: 100000, 128k, 1M.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Heads from a config.json: who holds and sends what."),
    ] = None,
    q_heads: Annotated[int | None, typer.Option(min=1, help="Query heads, without a model.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of keys and values, without a model.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Of one head; 128 without it.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="The model's width; q-heads x head-dim without it.")] = None,
    hardware: Annotated[
        str | None, typer.Option(help="As of prefill; h200 with --model. With heads and a context: goes by time, too.")
    ] = None,
    hardware_file: FileOption = None,
    links: LinksOption = None,
    node: NodeOption = None,
    rails: RailsOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens a sequence and step.")] = 1,
    storage: StorageOption = "bf16",
    every: AllOption = False,
    json: JsonFlag = False,
) -> None:
    """Ways to generate tokens.

    With --model they are ranked by time: memory, bytes, bottleneck, and why the others lose; exits with 1 if nothing
    fits. Without (--config, or heads) it says which sharding follows from the heads, who holds and sends what; with
    --hardware and --context also, which one is the fastest for a layer's attention.
    """
    machines = Machines("h200" if hardware is None else hardware, links, node, rails, hardware_file)
    with _plainly():
        if model is not None:
            if config is not None or any((q_heads, kv_heads, head_dim, hidden)):
                raise ValueError("heads and widths come from --model: leave them and --config out")
            if context is None:
                raise ValueError("--context is missing: how many positions the sequences hold")
            asked = plans.Asked(model, context, batch, gpus, machines, storage, tokens, every, json)
            if not plans.decode(asked):
                raise typer.Exit(1)
            return
        heads = _heads(config, q_heads, kv_heads, head_dim, hidden)
        known = any(part is not None for part in (hardware, links, node, rails, hardware_file))
        if known and context is None:
            raise ValueError("--context is missing: times on machines are those of some context")
        show_sharding.decode(
            heads, batch, gpus, context=context, tokens=tokens, storage=storage,
            cluster=machines.cluster() if known else None, as_json=json,
        )  # fmt: skip


def simulate_command(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks; up to thousands.")],
    length: Annotated[str, typer.Option(help="Positions of the whole sequence: 128k, 100M.")],
    schedule: Annotated[str, typer.Option(help="As in ContextParallel; auto chooses.")] = "ring",
    model: Annotated[str | None, typer.Option(help="Heads of a model by name or config; or give them.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads; 32 without it.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of keys and values; 8 without it.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Of one head; 128 without it.")] = None,
    batch: BatchOption = 1,
    layout: Annotated[LayoutName, typer.Option(help="Which rank has which tokens.")] = LayoutName.ZIGZAG,
    mask: Annotated[str, typer.Option(help="causal, full or window:N.")] = "causal",
    backward: Annotated[bool, typer.Option("--backward", help="Gradients as well.")] = False,
    hardware: HardwareOption = "h200",
    hardware_file: FileOption = None,
    links: LinksOption = None,
    node: NodeOption = None,
    rails: RailsOption = None,
    slow_ranks: Annotated[list[str] | None, typer.Option("--slow-rank", help="3:1.5 takes 1.5 times as long.")] = None,
    slow_links: Annotated[
        list[str] | None, typer.Option("--slow-link", help="7:4: rank 7's ports have a quarter of the bandwidth.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")] = None,
    trace_ranks: Annotated[str | None, typer.Option(help="Of the trace: 0-7,12; the first 16 without it.")] = None,
    json: JsonFlag = False,
) -> None:
    """One layer's attention under a schedule, simulated on a cluster: every rank, port and message."""
    with _plainly():
        shape = Shape(batch, heads or 32, kv_heads or 8, head_dim or 128, itemsize=2, sum_itemsize=4)
        if model is not None:
            if any((heads, kv_heads, head_dim)):
                raise ValueError("heads and widths come from --model: leave them out")
            of = model_named(model)
            kv = of.q_heads if of.latent else of.kv_heads
            shape = Shape(batch, of.q_heads, kv, (of.head_dim + of.value_dim) // 2, itemsize=2, sum_itemsize=4)
        if shape.q_heads % shape.kv_heads:
            raise ValueError(f"the {shape.kv_heads} kv heads must divide the {shape.q_heads} query heads")
        machines = Machines(hardware, links, node, rails, hardware_file)
        asked = simulation.Asked(
            schedule, length, ranks, machines, shape, layout.value, mask, backward, slow_ranks or (), slow_links or (),
            trace, trace_ranks, json,
        )  # fmt: skip
        simulation.run(asked)


def _heads(
    config: Path | None, q_heads: int | None, kv_heads: int | None, head_dim: int | None, hidden: int | None
) -> ModelConfig:
    if config is not None:
        if any((q_heads, kv_heads, head_dim, hidden)):
            raise ValueError("heads and widths come from --config: leave them out")
        return read_config(config)
    if q_heads is None or kv_heads is None:
        raise ValueError("give --model, or --config, or --q-heads and --kv-heads")
    head_dim = head_dim or 128
    return ModelConfig(q_heads, kv_heads, head_dim, hidden or q_heads * head_dim)


@contextmanager
def _plainly() -> Iterator[None]:
    """What cannot be done is said in a sentence, and ends with exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
