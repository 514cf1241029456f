"""`attnmesh plan`: ranks the plans for a model on a cluster, or recommends a sharding for given heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attnmesh.cli import output
from attnmesh.cli.errors import CommandGroup
from attnmesh.cli.options import (
    BatchOption,
    ClusterNodeOption,
    HardwareFileOption,
    HardwareOption,
    JsonFlag,
    LengthOption,
    LinksOption,
    ModelOption,
    OptionalLengthOption,
    RailsOption,
    bytes_argument,
    describe_cluster,
    resolve_cluster,
)
from attnmesh.cli.plan_tables import fitting_advice, ranking_facts, show_ranking, show_sharding
from attnmesh.cli.sharding import RunHere, kv_itemsize, not_run_here
from attnmesh.planner.counts import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_RANKS, MAX_TOKENS
from attnmesh.planner.decode import DecodeRequest, decode_memory, decode_ranking, shardings
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models.config import ModelConfig
from attnmesh.planner.models.read import model as known_model
from attnmesh.planner.models.read import read_config
from attnmesh.planner.prefill import MAX_CP_RANKS, PrefillRequest, parallelisms, prefill_memory, prefill_ranking
from attnmesh.planner.ranking import Memory, Ranking
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
        parser=bytes_argument,
        metavar="SIZE",
        show_default="that of the hardware",
        help="Memory per rank, such as 20GiB, with --model.",
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="Show all plans, not only the best twelve.")]


@plan_app.command("prefill")
def plan_prefill(
    model: ModelOption,
    length: LengthOption,
    ranks: RequiredRanksOption,
    batch: BatchOption = 1,
    hardware: HardwareOption = "h200",
    hardware_file: HardwareFileOption = None,
    links: LinksOption = None,
    ranks_per_node: ClusterNodeOption = None,
    rails: RailsOption = None,
    memory: DeviceMemoryOption = None,
    storage: StorageOption = "bf16",
    show_all: AllOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Rank plans to prefill prompts by time, with memory, bytes sent, bottleneck and reason.

    Exits with 1 if no plan fits into memory, and reports what would fit.
    """
    chosen = known_model(model)
    cluster = _with_memory(resolve_cluster(hardware, links, ranks_per_node, rails, hardware_file), memory)
    task = PrefillRequest(chosen, length, batch, ranks, cluster, kv_itemsize(storage, chosen))
    with output.counting(f"ranking plans for {chosen.name} on {counted(ranks, 'rank')}"):
        ranking = prefill_ranking(task)

        def least_memory(devices: int) -> Memory | None:
            larger = replace(task, devices=devices)
            plans = (plan for plan in parallelisms(larger) if plan.cp <= MAX_CP_RANKS)
            return min((prefill_memory(larger, plan) for plan in plans), key=_total, default=None)

        ranking = _with_advice(ranking, ranks, least_memory, task.kv_itemsize)
    title = f"prefill of {_sequences(batch)} of {length:,} tokens, {chosen.name}"
    _print_ranking(
        ranking, title, describe_cluster(cluster, ranks), tokens=batch * length, show_all=show_all, as_json=as_json
    )


@plan_app.command("decode")
def plan_decode(
    ranks: RequiredRanksOption,
    batch: BatchOption,
    model: Annotated[
        str | None, typer.Option(help="Model name, config.json file or its folder; plans are ranked by time.")
    ] = None,
    length: OptionalLengthOption = None,
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
    hardware_file: HardwareFileOption = None,
    links: LinksOption = None,
    ranks_per_node: ClusterNodeOption = None,
    rails: RailsOption = None,
    memory: DeviceMemoryOption = None,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="New tokens per sequence and step.")] = 1,
    storage: StorageOption = "bf16",
    show_all: AllOption = False,
    as_json: JsonFlag = False,
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
        cluster = resolve_cluster("h200" if hardware is None else hardware, links, ranks_per_node, rails, hardware_file)
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
    number = kv_itemsize(storage, chosen)
    cluster = _with_memory(cluster, memory)
    task = DecodeRequest(chosen, length, batch, ranks, cluster, tokens, number)
    with output.counting(f"ranking plans for {chosen.name} on {counted(ranks, 'rank')}"):
        ranking = decode_ranking(task)

        def least_memory(devices: int) -> Memory | None:
            larger = replace(task, devices=devices)
            found = (decode_memory(larger, plan, batch // replicas) for replicas, plan in shardings(larger))
            return min(found, key=_total, default=None)

        ranking = _with_advice(ranking, ranks, least_memory, number)
    title = f"one decode step of {_sequences(batch)} with {length:,} tokens in the KV cache, {chosen.name}"
    _print_ranking(
        ranking, title, describe_cluster(cluster, ranks), tokens=batch * tokens, show_all=show_all, as_json=as_json,
        not_run=not_run_here(chosen, storage), run_here=RunHere(task, ranking, storage),
    )  # fmt: skip


def _with_memory(cluster: Cluster, memory: int | None) -> Cluster:
    return cluster if memory is None else replace(cluster, device=replace(cluster.device, memory=float(memory)))


def _with_advice(
    ranking: Ranking, ranks: int, least_memory: Callable[[int], Memory | None], kv_itemsize: float
) -> Ranking:
    if ranking.best is not None:
        return ranking
    return replace(ranking, advice=fitting_advice(ranking, ranks, least_memory, kv_itemsize))


def _print_ranking(
    ranking: Ranking, title: str, cluster: str, *, tokens: int, show_all: bool, as_json: bool,
    not_run: Sequence[str] = (), run_here: RunHere | None = None,
) -> None:  # fmt: skip
    """Print the ranking, and what of it `attnmesh generate` and `attnmesh serve` run; exit with 1 if nothing fits."""
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


def _total(memory: Memory) -> float:
    return memory.total
