"""What `attnmesh plan` prints: rankings as tables and JSON, advice where no plan fits, and shardings of given heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple

from rich.console import Console

from attnmesh.cli import output
from attnmesh.cli.sharding import RunHere
from attnmesh.ops.storage import bytes_per_token
from attnmesh.planner.counts import MAX_RANKS
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models.config import ModelConfig
from attnmesh.planner.ranking import Memory, Option, Ranking, usable_memory
from attnmesh.planner.recommend import ShardingOption, compare_shardings, recommend_sharding
from attnmesh.planner.units import readable_bytes, readable_seconds
from attnmesh.utils.text import counted

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
