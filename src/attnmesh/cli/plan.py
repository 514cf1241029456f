"""`attnmesh plan`: ranks the plans for a model on a cluster, or recommends a sharding for given heads."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli import options, output
from attnmesh.cli.errors import CommandGroup
from attnmesh.cli.plan_tables import fitting_advice, ranking_facts, show_ranking, show_sharding
from attnmesh.cli.sharding import RunHere, kv_itemsize, not_run_here
from attnmesh.planner.counts import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_RANKS, MAX_TOKENS
from attnmesh.planner.decode import DecodeRequest, decode_memory, decode_ranking, shardings
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models.config import ModelConfig
from attnmesh.planner.models.read import model as known_model
from attnmesh.planner.models.read import read_config
from attnmesh.planner.prefill import MAX_CP_RANKS, PrefillRequest, parallelisms, prefill_memory, prefill_ranking
from attnmesh.planner.ranking import Memory
from attnmesh.utils.text import counted

plan_app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Rank the plans for a model on a cluster, without running anything."
)

RequiredRanksOption = Annotated[int, typer.Option("--ranks", min=1, max=MAX_RANKS, help="Number of ranks (devices).")]
StorageOption = Annotated[
    str,
    typer.Option(
        "--storage", help="Storage type of the KV cache: bf16, fp16, fp32, fp8, int8, bfp8 or (MLA) fp8_ds_mla."
    ),
]
DeviceMemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=options.bytes_argument,
        metavar="SIZE",
        show_default="that of the hardware",
        help="Memory per rank, such as 20GiB, with --model.",
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="Show all plans, not only the best twelve.")]


@plan_app.command("prefill")
def plan_prefill(
    model: options.ModelOption,
    length: options.LengthOption,
    ranks: RequiredRanksOption,
    batch: options.BatchOption = 1,
    hardware: options.HardwareOption = "h200",
    hardware_file: options.HardwareFileOption = None,
    links: options.LinksOption = None,
    ranks_per_node: options.ClusterNodeOption = None,
    rails: options.RailsOption = None,
    memory: DeviceMemoryOption = None,
    storage: StorageOption = "bf16",
    show_all: AllOption = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Rank plans to prefill prompts by time, with memory, bytes sent, bottleneck and reason.

    Exits with 1 if no plan fits into memory, and reports what would fit.
    """
    chosen = known_model(model)
    cluster = _with_memory(options.resolve_cluster(hardware, links, ranks_per_node, rails, hardware_file), memory)
    task = PrefillRequest(chosen, length, batch, ranks, cluster, kv_itemsize(storage, chosen))
    title = f"prefill of {_sequences(batch)} of {length:,} tokens, {chosen.name}"
    _rank(task, title, tokens=batch * length, show_all=show_all, as_json=as_json)


@plan_app.command("decode")
def plan_decode(
    ranks: RequiredRanksOption,
    batch: options.BatchOption,
    model: Annotated[
        str | None, typer.Option(help="Model name, config.json file or its folder; plans are ranked by time.")
    ] = None,
    length: options.OptionalLengthOption = None,
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="config.json file to take the heads from, without --model."),
    ] = None,
    q_heads: Annotated[
        int | None, typer.Option(min=1, max=MAX_HEADS, help="Number of query heads, without --model.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=MAX_HEADS, help="Number of key and value heads, without --model.")
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, max=MAX_HEAD_DIM, show_default="128", help="Head dimension.")
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_HIDDEN, show_default="q-heads x head-dim", help="Hidden size of the model."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            show_default="h200 with --model",
            help="Device, as in `plan prefill`. With heads instead of a model it ranks shardings by time.",
        ),
    ] = None,
    hardware_file: options.HardwareFileOption = None,
    links: options.LinksOption = None,
    ranks_per_node: options.ClusterNodeOption = None,
    rails: options.RailsOption = None,
    memory: DeviceMemoryOption = None,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="New tokens per sequence and step.")] = 1,
    storage: StorageOption = "bf16",
    show_all: AllOption = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Rank plans to decode tokens.

    With --model, plans for the whole model are ranked by time; exits with 1 if no plan fits into memory. With --config
    or heads, recommends a sharding of one attention layer: what each rank holds and sends, and with --hardware and
    --length which sharding is the fastest.
    """
    on_cluster = any(part is not None for part in (hardware, links, ranks_per_node, rails, hardware_file))
    if length is None and (model is not None or on_cluster):
        raise ValueError("--length is required with --model and with --hardware")
    cluster = None
    if model is not None or on_cluster:
        named = "h200" if hardware is None else hardware
        cluster = options.resolve_cluster(named, links, ranks_per_node, rails, hardware_file)
    if model is None:
        if memory is not None:
            raise ValueError(f"--memory requires --model, got {memory} bytes")
        heads = _heads(config, q_heads, kv_heads, head_dim, hidden)
        with output.counting(f"comparing shardings over {counted(ranks, 'rank')}"):
            show_sharding(
                heads, batch, ranks, length=length, tokens=tokens, storage=storage, cluster=cluster, as_json=as_json
            )
        return
    if config is not None or any((q_heads, kv_heads, head_dim, hidden)):
        raise ValueError("--config, --q-heads, --kv-heads, --head-dim and --hidden cannot be used with --model")
    assert length is not None
    assert cluster is not None
    chosen = known_model(model)
    itemsize, cluster = kv_itemsize(storage, chosen), _with_memory(cluster, memory)
    task = DecodeRequest(chosen, length, batch, ranks, cluster, tokens, itemsize)
    title = f"one decode step of {_sequences(batch)} with {length:,} tokens in the KV cache, {chosen.name}"
    _rank(task, title, tokens=batch * tokens, show_all=show_all, as_json=as_json, storage=storage)


def _with_memory(cluster: Cluster, memory: int | None) -> Cluster:
    return cluster if memory is None else replace(cluster, device=replace(cluster.device, memory=float(memory)))


def _rank(
    task: PrefillRequest | DecodeRequest, title: str, *, tokens: int, show_all: bool, as_json: bool,
    storage: str | None = None,
) -> None:  # fmt: skip
    """Print the ranking, and what of it `attnmesh generate` and `attnmesh serve` run; exit with 1 if nothing fits."""
    with output.counting(f"ranking plans for {task.model.name} on {counted(task.devices, 'rank')}"):
        ranking = decode_ranking(task) if isinstance(task, DecodeRequest) else prefill_ranking(task)
        if ranking.best is None:
            advice = fitting_advice(ranking, task.devices, partial(_least_memory, task), task.kv_itemsize)
            ranking = replace(ranking, advice=advice)
    cluster, run_here, not_run = options.describe_cluster(task.cluster, task.devices), None, list[str]()
    if isinstance(task, DecodeRequest) and storage is not None:
        run_here, not_run = RunHere(task, ranking, storage), not_run_here(task.model, storage)
    if as_json:
        facts = {"workload": title, "cluster": cluster, **ranking_facts(ranking, run_here)}
        print(json.dumps(facts if run_here is None else {**facts, "not_run": not_run}, indent=2))
    else:
        console = output.console()
        show_ranking(console, ranking, title, cluster, tokens=tokens, show_all=show_all, run_here=run_here)
        for reason in not_run:
            console.print(f"attnmesh generate does not run these plans as estimated: {reason}.", soft_wrap=True)
    if ranking.best is None:
        raise typer.Exit(1)


def _least_memory(task: PrefillRequest | DecodeRequest, devices: int) -> Memory | None:
    """The memory per rank of the smallest plan on other devices; None if there is no plan."""
    larger = replace(task, devices=devices)
    if isinstance(larger, DecodeRequest):
        found = [decode_memory(larger, plan, larger.batch // replicas) for replicas, plan in shardings(larger)]
    else:
        found = [prefill_memory(larger, plan) for plan in parallelisms(larger) if plan.cp <= MAX_CP_RANKS]
    return min(found, key=lambda memory: memory.total, default=None)


def _heads(
    config: Path | None, q_heads: int | None, kv_heads: int | None, head_dim: int | None, hidden: int | None
) -> ModelConfig:
    if config is not None:
        if any((q_heads, kv_heads, head_dim, hidden)):
            raise ValueError("--q-heads, --kv-heads, --head-dim and --hidden cannot be used with --config")
        return read_config(config)
    if q_heads is None or kv_heads is None:
        raise ValueError("--model, or --config, or --q-heads and --kv-heads are required")
    head_dim = head_dim or 128
    return ModelConfig(q_heads, kv_heads, head_dim, hidden or q_heads * head_dim)


def _sequences(batch: int) -> str:
    return "1 sequence" if batch == 1 else f"{batch} sequences"
