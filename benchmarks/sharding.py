"""One rank's decode step under every sharding, on one device: time, KV cache bytes, bytes exchanged.

The shapes are GPT-OSS-120B's attention (64 query and 8 kv heads of 64, hidden 2880) on 64 ranks. What is timed is the
real program of the busiest rank, whose peers always agree and never send.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from attnmesh.calibration.timing import Run, cold
from attnmesh.cli.options import Device, check_device, length_argument
from attnmesh.cli.output import Rows
from attnmesh.kv_cache.sharded import ShardedCache, Step
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.norm_rope import Norm, Rope
from attnmesh.ops.decode.api import paged_decode_attention
from attnmesh.ops.storage import bytes_per_token, values_of
from attnmesh.parallel.decode.block import AttentionBlock
from attnmesh.plan.decode import DecodeShape, DecodeSharding
from attnmesh.planner.cost import bytes_sent, cache_bytes
from benchmarks.common import JsonOption, make_app, publish
from benchmarks.one_rank import OneRankComm

Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, RANKS = 64, 8, 64, 2880, 64
SHARDINGS = (
    DecodeSharding(tp=64),
    DecodeSharding(tp=8, kvdp=8),
    DecodeSharding(tp=8, kvdp=4, cp=2, interleave=64),
    DecodeSharding(tp=8, kvdp=2, cp=4, interleave=64),
    DecodeSharding(tp=8, cp=8, interleave=64),
)
_BLOCK_SIZE = 64


@dataclass(frozen=True)
class Link:
    """The assumed cost of a collective: a latency, and a rank's bytes at a bandwidth."""

    name: str
    bandwidth: float  # bytes per second and rank
    latency: float  # seconds per collective

    def __str__(self) -> str:
        return f"{self.name}: {self.bandwidth / 1e9:g} GB/s per rank, {self.latency * 1e6:g} us per collective"


LINKS = (Link("NVLink", 450e9, 8e-6), Link("400 Gb/s", 50e9, 15e-6))


def measure_shardings(contexts: Sequence[int], batches: Sequence[int]) -> Rows:
    """A row for every context, batch and sharding, vanilla tensor parallelism first."""
    rows: Rows = []
    for context in contexts:
        for batch in batches:
            found = [_measured(context, batch, sharding) for sharding in SHARDINGS]
            rows += [_row(measured, found[0]) for measured in found]
    return rows


def measure_overhead(context: int, batch: int) -> Rows:
    """Return the cost of a block's step beyond its two projections and its attention, without the exchanges."""
    return [
        {"sharding": str(sharding), "length": context, "batch": batch} | _overhead(context, batch, sharding)
        for sharding in (DecodeSharding(), *SHARDINGS[:2], SHARDINGS[-1])
    ]


@dataclass(frozen=True, eq=False)
class RankStep:
    """One rank's block and a step of it that can be repeated."""

    comm: OneRankComm
    block: AttentionBlock
    x: Tensor
    cache: ShardedCache
    step: Step

    @classmethod
    def create(cls, context: int, batch: int, sharding: DecodeSharding) -> RankStep:
        """Every sequence has `context` tokens, the newest of them new."""
        rank = busiest_rank(sharding, batch, context)
        config = AttentionConfig(
            HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, norm=Norm(1e-5), rope=Rope.plain(HEAD_DIM, 150000.0)
        )
        comm = OneRankComm(rank, sharding.ranks)
        block = AttentionBlock(config, _weights(config, sharding, rank), sharding, comm)
        slots = -(-sharding.position_shard(0).length(context, 0) // _BLOCK_SIZE)
        rows = max(len(sharding.sequences(peer, batch)) for peer in range(sharding.ranks))
        cache = block.make_cache(batch=batch, num_blocks=slots * rows, block_size=_BLOCK_SIZE, max_length=context)
        for pool in (cache.keys(0), cache.values(0)):
            values_of(pool).normal_()
        sequences = [cache.allocate(context) for _ in range(batch)]
        for sequence in sequences:  # one at a time: a step of all of them would be a large table
            cache.mark_written(cache.append([sequence], context - 1))
        x = torch.randn(batch, 1, HIDDEN, device="cuda", dtype=torch.bfloat16)
        return cls(comm, block, x, cache, cache.append(sequences, 1))

    def run(self) -> Tensor:
        """The whole step. Its tokens are as if they were new every time."""
        for part in self.step.parts.values():
            part.unwritten_layers.add(0)
        self.comm.begin()
        return self.block(self.x, self.cache, self.step)


def busiest_rank(sharding: DecodeSharding, batch: int, context: int) -> int:
    """The rank with most keys to read; the first of equals."""
    kept = [
        len(sharding.sequences(r, batch)) * sharding.position_shard(r).length(context) for r in range(sharding.ranks)
    ]
    return kept.index(max(kept))


@dataclass(frozen=True)
class _Measured:
    """A rank's step: microseconds, bytes it keeps, and what it sends by collective."""

    context: int
    batch: int
    sharding: DecodeSharding
    attention: float
    step: float
    kv_bytes: int
    sent: dict[str, int]

    def over(self, link: Link) -> float:
        """Microseconds of the step when a link carries the exchanges, with nothing computed meanwhile."""
        sharding = self.sharding
        collectives = 2 * (sharding.kvdp > 1) + 2 * (sharding.cp > 1) + (sharding.ranks > 1)
        return self.step + 1e6 * (collectives * link.latency + sum(self.sent.values()) / link.bandwidth)


def _row(measured: _Measured, vanilla: _Measured) -> dict[str, object]:
    return {
        "length": measured.context, "batch": measured.batch, "sharding": str(measured.sharding),
        "kv_bytes_per_rank": measured.kv_bytes, "kv_saving": vanilla.kv_bytes / measured.kv_bytes,
        "attention_us": measured.attention, "attention_speedup": vanilla.attention / measured.attention,
        "step_us": measured.step, "sent_bytes_per_rank": sum(measured.sent.values()),
    } | {f"step_{link.name}_us": measured.over(link) for link in LINKS}  # fmt: skip


def _measured(context: int, batch: int, sharding: DecodeSharding) -> _Measured:
    torch.cuda.empty_cache()
    create = RankStep.create(context, batch, sharding)
    rank = create.block.rank
    times = cold({"step": create.run, "attention": _attention_alone(create)})
    shape = DecodeShape(batch, 1, Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN)
    kv_bytes = cache_bytes(sharding, shape, rank, context, round(2 * bytes_per_token("bf16", HEAD_DIM)))
    sent = bytes_sent(sharding, shape, rank)
    return _Measured(context, batch, sharding, times["attention"], times["step"], kv_bytes, sent)


def _attention_alone(create: RankStep) -> Run:
    """Return attention of the query heads of the rank's KV heads over its cache: the cost of reading the cache."""
    block, cache, step = create.block, create.cache, create.step
    heads = len(block.sharding.group_heads(block.rank, Q_HEADS))
    q = torch.randn(len(cache.rows), heads, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return partial(paged_decode_attention, q, cache.keys(0), cache.values(0), cache.block_table, cur_pos=step.cur_pos)


def _overhead(context: int, batch: int, sharding: DecodeSharding) -> dict[str, object]:
    torch.cuda.empty_cache()
    create = RankStep.create(context, batch, sharding)
    attend, weights = _attention_alone(create), create.block.weights
    qkv, out = weights.qkv, weights.out
    assert out is not None
    heads = torch.randn(batch, 1, out.shape[1], device="cuda", dtype=torch.bfloat16)

    def needed() -> Tensor:
        F.linear(create.x, qkv, weights.qkv_bias)
        attend()
        return F.linear(heads, out, weights.out_bias)

    times = cold({"step": create.run, "needed": needed, "attention": attend}, rounds=31)
    return {
        "step_us": times["step"], "projections_and_attention_us": times["needed"], "attention_us": times["attention"],
        "overhead": 1 - times["needed"] / times["step"],
    }  # fmt: skip


def _weights(config: AttentionConfig, sharding: DecodeSharding, rank: int) -> AttentionWeights:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.05

    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    whole = AttentionWeights(
        drawn(q + 2 * kv, config.hidden), drawn(q + 2 * kv), drawn(config.hidden, q), drawn(config.hidden),
        drawn(config.hidden), sinks=drawn(config.q_heads),
    )  # fmt: skip
    return whole.shard(config, sharding, rank)


def sections(contexts: Sequence[int], batches: Sequence[int]) -> Iterator[tuple[str, Rows]]:
    """Yield titles and rows."""
    yield "overhead of the block beyond projections and attention", measure_overhead(32768, 8)
    links = "; ".join(map(str, LINKS))
    yield (
        f"one rank of 64, GPT-OSS-120B's attention ({Q_HEADS}/{KV_HEADS} heads, D={HEAD_DIM}, hidden {HIDDEN}, bf16); "
        f"steps over links assume {links}",
        measure_shardings(contexts, batches),
    )


def main(
    lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--length", parser=length_argument, metavar="LENGTH", help="Tokens per sequence, such as 128k. Repeatable."
        ),
    ] = None,
    batches: Annotated[list[int] | None, typer.Option("--batch", min=1, help="Sequences. Repeatable.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure one of 64 ranks in token generation on one GPU, under TP, KVDP, CP and mixed shardings."""
    check_device(Device.CUDA)
    publish("sharding", "cuda", sections(lengths or (8192, 32768, 131072), batches or (1, 8, 64, 512)), json)


app = make_app(main)

if __name__ == "__main__":
    app()
