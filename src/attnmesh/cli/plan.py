"""`attnmesh plan`: ranks the plans for a model on a cluster, or recommends a sharding for given heads.

It prints rankings as tables and JSON, and advice where no plan fits.

`AutoSharding` is `--sharding auto` of `generate` and `serve`: the plan of `attnmesh plan decode` that is the fastest
that fits into the ranks' memory. Times are the planner's; bytes of weights and KV cache are what ranks will have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from attnmesh.cli import options, output
from attnmesh.cli.errors import CommandGroup
from attnmesh.cli.language_model import DeviceMemory, local_ranks
from attnmesh.cli.sharding import RunHere, kv_itemsize, not_run_here
from attnmesh.generation.models import ShardedMemory, cache_storage, latent_widths
from attnmesh.models.checkpoint import CONFIG
from attnmesh.ops.storage import bytes_per_token
from attnmesh.plan.decode import DecodeSharding
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.cost import Memory, Option, Ranking, ranked, usable_memory
from attnmesh.planner.decode import DecodeRequest, decode_memory, decode_option, decode_ranking, shardings
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models import ModelConfig, WeightBits, model_from_config, read_config
from attnmesh.planner.models import model as known_model
from attnmesh.planner.prefill import MAX_CP_RANKS, PrefillRequest, parallelisms, prefill_memory, prefill_ranking
from attnmesh.planner.recommend import ShardingOption, compare_shardings, recommend_sharding
from attnmesh.utils.sizes import MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_RANKS, MAX_TOKENS
from attnmesh.utils.text import counted, readable_bytes, readable_seconds

SHOWN = 12
_MEDIUM, _WIDE = 100, 130  # terminal widths from which more columns are shown
_WIDE_COLUMNS = ("weights", "KV cache", "bottleneck")
_MEDIUM_COLUMNS = ("bytes sent",)


def show_ranking(
    console: Console, ranking: Ranking, title: str, cluster: str, *, tokens: int, show_all: bool,
    run_here: RunHere | None = None,
) -> None:  # fmt: skip
    """Print the best plan and why it is the best, then all plans with the time and memory of each, best first.

    `tokens` is what the plans process in their time.
    """
    best = ranking.best
    if best is None:
        console.print(ranking.advice, style="bold")
    else:
        rate = f"{tokens / best.seconds:,.0f} tokens/s"
        memory = f"{readable_bytes(best.memory.total)} of {readable_bytes(ranking.device_memory)} per rank"
        console.print(f"{best.name}: {readable_seconds(best.seconds)}, {rate}, {memory}", style="bold")
        console.print(_reason(best, ranking))
        if run_here is not None:
            console.print(_runs(run_here, best, ranking), soft_wrap=True)
    console.print(cluster)
    shown = ranking.options if show_all else ranking.options[:SHOWN]
    rows = [
        {
            "plan": option.name,
            "time": readable_seconds(option.seconds),
            "memory": readable_bytes(option.memory.total),
            "weights": readable_bytes(option.memory.weights),
            "KV cache": readable_bytes(option.memory.cache),
            "bytes sent": readable_bytes(option.sent),
            "bottleneck": option.bottleneck,
            "reason": _why(option, ranking, run_here),
        }
        for option in shown
    ]
    left_out = (*_WIDE_COLUMNS * (console.width < _WIDE), *_MEDIUM_COLUMNS * (console.width < _MEDIUM))
    output.show(console, title, [{name: cell for name, cell in row.items() if name not in left_out} for row in rows])
    if left_out:
        console.print(f"A wider terminal also shows {', '.join(left_out)}.", style="dim")
    hidden = len(ranking.options) - len(shown)
    if hidden:
        console.print(f"{hidden} more plans are hidden (show them with --all).")
    for name, why in ranking.refused.items():
        console.print(f"{name}: {why}", style="dim")


def ranking_facts(ranking: Ranking, run_here: RunHere | None = None) -> dict[str, object]:
    """The ranking as JSON data."""

    def facts(option: Option) -> dict[str, object]:
        memory = option.memory
        return {
            "plan": option.name,
            "seconds": option.seconds,
            "parts": option.parts,
            "bytes_sent": option.sent,
            "memory": {
                "total": memory.total,
                "weights": memory.weights,
                "kv_cache": memory.cache,
                "activations": memory.working,
            },
            "fits": option.fits(ranking.device_memory),
            "bottleneck": option.bottleneck,
            "reason": ranking.why(option),
            **({} if run_here is None else {"not_run_here": run_here.problems[option.name]}),
        }

    best = ranking.best
    runs = {} if run_here is None else {"best_run_here": None if run_here.best is None else run_here.best.name}
    return {
        "best": None if best is None else best.name,
        **runs,
        "plans": [facts(option) for option in ranking.options],
        "refused": ranking.refused,
        "device_memory": ranking.device_memory,
        "advice": ranking.advice,
    }


def _runs(run_here: RunHere, best: Option, ranking: Ranking) -> str:
    """Which plan `--sharding auto` would take on this hardware."""
    ours = run_here.best
    if ours is None:
        return "attnmesh generate and attnmesh serve run none of these plans."
    slower = "" if ours == best else f" ({ranking.why(ours)})"
    return f"attnmesh generate and attnmesh serve with --sharding auto run {ours.name}{slower}."


def _why(option: Option, ranking: Ranking, run_here: RunHere | None) -> str:
    why = ranking.why(option)
    if run_here is None or not option.fits(ranking.device_memory) or not run_here.problems[option.name]:
        return why
    return f"{why}; {run_here.problems[option.name]}"


def _reason(best: Option, ranking: Ranking) -> str:
    """What the best plan spends its time on, and why the next one loses."""
    shares = sorted(best.parts.items(), key=lambda part: -part[1])
    spent = ", ".join(
        f"{100 * seconds / best.seconds:.0f}% {part}" for part, seconds in shares if seconds > 0.005 * best.seconds
    )
    fitting = [option for option in ranking.options[1:] if option.fits(ranking.device_memory)]
    following = f"Next: {fitting[0].name}, {ranking.why(fitting[0])}." if fitting else "No other plan fits."
    return f"Time: {spent}. Bottleneck: {best.bottleneck}. {following}"


def fitting_advice(
    ranking: Ranking, ranks: int, least_memory: Callable[[int], Memory | None], kv_itemsize: float
) -> str:
    """What would fit where no plan does: a number of ranks, or an 8-bit KV cache.

    `least_memory` returns the memory per rank of the smallest plan on so many ranks, or None if there is none;
    `kv_itemsize` is the bytes of one number in the KV cache.
    """
    needed = least_memory(ranks)
    if needed is None:
        most = next((n for n in range(ranks - 1, 0, -1) if least_memory(n) is not None), 0)
        why = next(iter(ranking.refused.values()), "no division is even")
        return f"No plan for {counted(ranks, 'rank')}: {why}. At most {counted(most, 'rank')} can be used."
    parts = {"weights": needed.weights, "KV cache": needed.cache, "activations": needed.working}
    largest = max(parts, key=lambda part: parts[part])
    usable = usable_memory(ranking.device_memory)
    advice = [
        f"No plan fits: the smallest needs {readable_bytes(needed.total)} per rank ({largest}: "
        f"{readable_bytes(parts[largest])}), and {readable_bytes(usable)} are usable."
    ]
    advice.append(enough_ranks(ranks, least_memory, usable))
    if kv_itemsize > 1 and needed.cache > needed.weights:
        advice.append("An 8-bit KV cache (--storage fp8) takes half the memory.")
    return " ".join(advice)


def enough_ranks(ranks: int, least_memory: Callable[[int], Memory | None], usable: float) -> str:
    """How many ranks would be enough, if more than `ranks` are; the arguments are as for `fitting_advice`."""
    most = None
    for n in _larger_clusters(ranks):
        needed = least_memory(n)
        if needed is not None and needed.total <= usable:
            return f"{n} ranks would be enough."
        most = most if needed is None else n
    if most is None:
        return "No plan uses more ranks."
    return f"Even {counted(most, 'rank')}, the most that a plan can use, would not be enough."


def _larger_clusters(ranks: int) -> list[int]:
    """Multiples of `ranks` by powers of two, and powers of two, which divide most numbers of heads."""
    doubled = {ranks << n for n in range(1, MAX_RANKS.bit_length())}
    powers = {1 << n for n in range(MAX_RANKS.bit_length())}
    return sorted(n for n in doubled | powers if ranks < n <= MAX_RANKS)


def show_sharding(
    model: ModelConfig,
    batch: int,
    ranks: int,
    *,
    length: int | None,
    tokens: int = 1,
    storage: str = "bf16",
    cluster: Cluster | None = None,
    as_json: bool = False,
) -> None:
    """Print a sharding for decode, the reasons for it, and its alternatives."""
    q_heads, kv_heads = model.q_heads, model.kv_heads
    kv_bytes = round(2 * bytes_per_token(storage, model.head_dim) * model.layers)  # K and V
    found = recommend_sharding(
        batch, q_heads, kv_heads, ranks, length,
        head_dim=model.head_dim, hidden=model.hidden, tokens=tokens, kv_bytes=kv_bytes,
        layers=model.layers, cluster=cluster,
    )  # fmt: skip
    if as_json:
        options = [_sharding_facts(option) for option in (found.choice, *found.alternatives)]
        print(json.dumps({"best": str(found.choice.sharding), "ranks": ranks, "plans": options}, indent=2))
        return
    console = output.console()
    console.print(f"{found.choice.sharding} over {counted(ranks, 'rank')}", style="bold")
    console.print(found.reason)
    sent = ", ".join(f"{name} {readable_bytes(nbytes)}" for name, nbytes in found.choice.sent.items() if nbytes)
    console.print(f"Bytes sent per rank, step and layer, with 16-bit activations: {sent or 'none'}")
    layers = "one layer" if model.layers == 1 else f"{model.layers} layers"
    title = f"KV cache of {layers} in {storage}" + ("" if length is None else f", {length:,} tokens per sequence")
    output.show(console, title, [dict(option.row()) for option in (found.choice, *found.alternatives)])
    names, *properties = zip(*map(astuple, compare_shardings(q_heads, kv_heads, ranks)), strict=True)
    labels = ("W_kv replication", "W_q replication", "W_out replication", "X input activation", "KV cache per rank")
    rows = [[label, *cells] for label, cells in zip(labels, properties, strict=True)]
    console.print(output.table(f"{q_heads} query heads, {kv_heads} KV heads", ["", *names], rows))


def _sharding_facts(option: ShardingOption) -> dict[str, object]:
    return {
        "plan": str(option.sharding),
        "seconds": option.seconds,
        "cache_bytes": option.kv_bytes,
        "bytes_sent": option.sent,
        "copies": option.copies._asdict(),
        "reason": option.reason,
    }


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


# `--sharding auto`: the plan of `attnmesh plan decode` that is the fastest that fits into the ranks' memory.


@dataclass(frozen=True)
class AutoSharding:
    """What a sharding is chosen for: decode steps of `batch` sequences of `context` tokens on `ranks` ranks."""

    folder: Path
    config: Any  # of Transformers
    dtype: torch.dtype
    ranks: int
    batch: int
    context: int
    rank_memory: ShardedMemory  # what ranks will have
    device_memory: DeviceMemory
    storage: str | None = None  # of the KV cache; None: the dtype

    def choose(self) -> tuple[DecodeSharding, str]:
        """The fastest sharding that fits, and why. Raises ValueError if none fits."""
        request = self._request()
        options = list(self._options(request))
        available = self.device_memory.planned
        best = ranked(options, available, {}).best
        if best is None:
            raise ValueError(self._problem(request, options, available))
        assert best.sharding is not None
        fitting = sum(option.fits(available) for option in options)
        which = f"the fastest of {fitting} that fit" if fitting > 1 else "the only one that fits"
        return best.sharding, f"{which}, {readable_bytes(best.memory.total)} of {readable_bytes(available)} per rank"

    def _request(self) -> DecodeRequest:
        values = {**self.config.get_text_config().to_dict(), "dtype": None, "quantization_config": None}
        bits = 8 * self.dtype.itemsize
        model = replace(model_from_config(values, self.folder / CONFIG), weight_bits=WeightBits(bits, bits, bits))
        cluster = default_cluster(self.device_memory.device).with_ranks_per_node(local_ranks(self.ranks))
        storage = cache_storage(latent_widths(self.config), self.dtype, self.storage)
        itemsize = kv_itemsize(storage, model)
        return DecodeRequest(model, self.context, self.batch, self.ranks, cluster, kv_itemsize=itemsize)

    def _options(self, request: DecodeRequest) -> Iterator[Option]:
        """All shardings of one replica that the model can be divided by, with the memory that they take here."""
        for replicas, sharding in shardings(request):
            if replicas > 1:
                continue
            try:
                held = self.rank_memory.of(sharding)
            except ValueError:  # heads or weights that cannot be divided this way
                continue
            option = decode_option(request, replicas, sharding)
            yield replace(option, memory=Memory(held.weights, held.kv_cache, option.memory.working))

    def _problem(self, request: DecodeRequest, options: list[Option], available: float) -> str:
        usable = usable_memory(available)

        def least_memory(ranks: int) -> Memory | None:
            larger = self._options(replace(request, devices=ranks))
            return min((option.memory for option in larger), key=lambda memory: memory.total, default=None)

        if not options:
            return (
                f"no sharding divides {self.folder} over {counted(self.ranks, 'rank')}: it has "
                f"{request.model.q_heads} query heads and {request.model.kv_heads} kv heads"
            )
        least = min(options, key=lambda option: option.memory.total)
        memory = least.memory
        return (
            f"no sharding of {self.folder} fits: {least.name}, the smallest, takes {readable_bytes(memory.total)} per "
            f"rank ({readable_bytes(memory.weights)} of weights, {readable_bytes(memory.cache)} of KV cache, "
            f"{readable_bytes(memory.working)} of activations), and {readable_bytes(usable)} are usable, nine tenths "
            f"of {readable_bytes(available)} ({self.device_memory}). {enough_ranks(self.ranks, least_memory, usable)}"
        )
