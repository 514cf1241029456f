"""What `attnmesh plan decode` says of heads alone: the sharding to use, the others, and how ways to shard compare."""

from __future__ import annotations

import json
from dataclasses import astuple

from attnmesh.cli import output as report
from attnmesh.core.validation import parse_length
from attnmesh.ops.storage import bytes_per_token
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models.config import ModelConfig
from attnmesh.planner.recommend import ShardingOption, compare_shardings, recommend_sharding
from attnmesh.planner.units import readable_bytes


def decode(
    model: ModelConfig, batch: int, ranks: int, *, context: str | None, tokens: int = 1, storage: str = "bf16",
    cluster: Cluster | None = None, as_json: bool = False,
) -> None:  # fmt: skip
    """Print a sharding for token generation, its reasons and its alternatives."""
    q_heads, kv_heads = model.q_heads, model.kv_heads
    length = None if context is None else parse_length(context)
    kv_bytes = round(2 * bytes_per_token(storage, model.head_dim) * model.layers)  # K and V
    found = recommend_sharding(
        batch, q_heads, kv_heads, ranks, length,
        head_dim=model.head_dim, hidden=model.hidden, tokens=tokens, kv_bytes=kv_bytes,
        layers=model.layers, cluster=cluster,
    )  # fmt: skip
    if as_json:
        options = [_facts(option) for option in (found.choice, *found.alternatives)]
        print(json.dumps({"best": str(found.choice.sharding), "ranks": ranks, "options": options}, indent=2))
        return
    console = report.console()
    console.print(f"{found.choice.sharding} over {ranks} ranks", style="bold")
    console.print(found.reason)
    sent = ", ".join(f"{name} {readable_bytes(nbytes)}" for name, nbytes in found.choice.sent.items() if nbytes)
    console.print(f"a rank sends in a step and layer, with 16-bit activations: {sent or 'nothing'}")
    layers = "one layer" if model.layers == 1 else f"{model.layers} layers"
    title = f"KV cache of {layers} in {storage}" + ("" if length is None else f", {length} positions a sequence")
    report.show(console, title, [dict(option.row()) for option in (found.choice, *found.alternatives)])
    names, *properties = zip(*map(astuple, compare_shardings(q_heads, kv_heads, ranks)), strict=True)
    said = ("W_kv replication", "W_q replication", "W_out replication", "X input activation", "KV cache per rank")
    rows = [[name, *cells] for name, cells in zip(said, properties, strict=True)]
    console.print(report.table(f"{q_heads} query heads, {kv_heads} kv heads, side by side", ["", *names], rows))


def _facts(option: ShardingOption) -> dict[str, object]:
    return {
        "way": str(option.sharding), "seconds": option.seconds, "cache_bytes": option.kv_bytes,
        "bytes_sent": option.sent, "copies": option.copies._asdict(), "why": option.reason,
    }  # fmt: skip
