"""The options that divide a language model over ranks, and what of `attnmesh plan decode` the commands can run."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Annotated

import typer

from attnmesh.cli.options import bytes_argument
from attnmesh.generation.models import BLOCK_SIZE, CacheBlocks
from attnmesh.models.sharded import is_sharded_type
from attnmesh.ops.storage import PLAIN, bytes_per_token
from attnmesh.plan.decode import DecodeSharding
from attnmesh.planner.cost import Option, Ranking, usable_memory
from attnmesh.planner.decode import DecodeRequest, decode_memory
from attnmesh.planner.models import ModelConfig, WeightBits
from attnmesh.utils.text import readable_bytes


class ShardingChoice(enum.StrEnum):
    """How a sharding is chosen where it is not given."""

    AUTO = "auto"


ShardingOption = Annotated[
    ShardingChoice | None,
    typer.Option(
        "--sharding", help="auto: divide weights and KV cache by the fastest plan that fits into the ranks' memory."
    ),
]
TpOption = Annotated[
    int | None, typer.Option("--tp", min=1, help="Ranks that divide the KV heads; divides the weights.")
]
KvdpOption = Annotated[
    int | None, typer.Option("--kvdp", min=1, help="Ranks that divide the sequences; divides the weights.")
]
CpOption = Annotated[
    int | None,
    typer.Option("--cp", min=1, help="Ranks that divide the positions of a sequence; divides the weights."),
]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=bytes_argument,
        metavar="SIZE",
        show_default="what is free, divided by the ranks of a device",
        help="Memory per rank, such as 20GiB, that weights and KV cache must fit into.",
    ),
]


def given_sharding(
    choice: ShardingChoice | None, tp: int | None, kvdp: int | None, cp: int | None, ranks: int
) -> DecodeSharding | None:
    """The sharding that the options give; None if they give none, or leave it to be chosen.

    The ranks that are left are CP ranks.
    """
    given = {name: n for name, n in (("--tp", tp), ("--kvdp", kvdp), ("--cp", cp)) if n is not None}
    if not given:
        return None
    shown = ", ".join(f"{name} {n}" for name, n in given.items())
    if choice is not None:
        raise ValueError(f"--sharding auto chooses all of --tp, --kvdp and --cp, got {shown}")
    fixed = (tp or 1) * (kvdp or 1)
    chosen = DecodeSharding(tp or 1, kvdp or 1, cp or max(1, ranks // fixed))
    if chosen.ranks != ranks:
        raise ValueError(f"--tp x --kvdp x --cp must be the number of ranks, {ranks}, got {shown}")
    return chosen


def sharding_note(sharding: DecodeSharding, why: str) -> str:
    """A sentence about the sharding that is used."""
    return f"Weights and KV cache: {sharding}, {why}." if why else f"Weights and KV cache: {sharding}."


def kv_itemsize(storage: str, model: ModelConfig) -> float:
    """Bytes of one number in the KV cache, scales included."""
    width = model.latent.cached if model.latent else model.head_dim
    return bytes_per_token(storage, width) / width


def not_run_here(model: ModelConfig, storage: str) -> list[str]:
    """Why `attnmesh generate` and `Generator` cannot run a planned decode as it is estimated; empty if they can."""
    reasons = []
    if not _is_sharded_here(model):
        reasons.append(f"models of type {model.model_type} are not generated from with sharded weights")
    if not _is_plain(model.weight_bits):
        reasons.append("quantized weights are not loaded in parts: store them as bf16, which takes more memory")
    if not _is_stored_here(model, storage):
        reasons.append(f"latents are not stored as {storage}")
    return reasons


class RunHere:
    """Which plans of a ranking a command runs as it is: one replica, in the memory that it takes here."""

    def __init__(self, request: DecodeRequest, ranking: Ranking, storage: str) -> None:
        bits = request.model.weight_bits if _is_plain(request.model.weight_bits) else WeightBits()
        stored_here = _is_stored_here(request.model, storage)
        itemsize = request.kv_itemsize if stored_here else max(2.0, request.kv_itemsize)
        self._request = replace(request, model=replace(request.model, weight_bits=bits), kv_itemsize=itemsize)
        self._usable = usable_memory(ranking.device_memory)
        self.problems = {option.name: self._problem(option) for option in ranking.options}
        """By the name of a plan, what is against it; empty if nothing is."""
        self.best = next((option for option in ranking.options if not self.problems[option.name]), None)

    def _problem(self, option: Option) -> str:
        if not _is_sharded_here(self._request.model):
            return "not supported here"
        if option.replicas > 1:
            return f"run as {option.replicas} commands"
        assert option.sharding is not None
        # Layers with a window keep more than that: whole blocks, and two runs of them while a prompt is computed.
        context, shard = self._request.context, option.sharding.position_shard(0)
        blocks = CacheBlocks(self._request.model.windows, shard, context, 1, context)
        kept = blocks.windowed * BLOCK_SIZE * option.sharding.cp
        windows = tuple(None if window is None else kept for window in blocks.layer_windows)
        as_run = replace(self._request, model=replace(self._request.model, windows=windows))
        needed = decode_memory(as_run, option.sharding, self._request.batch).total
        return "" if needed <= self._usable else f"takes {readable_bytes(needed)} here"


def _is_sharded_here(model: ModelConfig) -> bool:
    return model.model_type is None or is_sharded_type(model.model_type)


def _is_stored_here(model: ModelConfig, storage: str) -> bool:
    return storage in PLAIN or (storage == "fp8_ds_mla") == (model.latent is not None)


def _is_plain(bits: WeightBits) -> bool:
    return bits.projections == bits.experts == bits.rest and bits.rest in (16, 32)
