"""Which sharding `attnmesh generate` uses, and what of it `attnmesh plan` can promise."""

from __future__ import annotations

import enum
from typing import Any

from attnmesh.integrations.weight_splits import SHARDED_MODELS, heads_of
from attnmesh.ops.storage import PLAIN
from attnmesh.plan.decode import DecodeSharding
from attnmesh.planner.models.config import ModelConfig, WeightBits


class ShardingChoice(enum.StrEnum):
    """How a sharding is chosen where it is not given."""

    AUTO = "auto"


def choose_sharding(
    choice: ShardingChoice | None, tp: int | None, kvdp: int | None, cp: int | None, config: Any, ranks: int
) -> DecodeSharding | None:
    """The sharding of the weights and the KV cache for one sequence; None if every rank is to have all weights.

    "auto" is what `attnmesh plan decode` recommends for these heads and ranks. CP ranks are those that are left.
    """
    given = {name: n for name, n in (("--tp", tp), ("--kvdp", kvdp), ("--cp", cp)) if n is not None}
    if choice is not None:
        if given:
            raise ValueError(f"--sharding auto chooses all of --tp, --kvdp and --cp, got {_shown(given)}")
        from attnmesh.planner.recommend import recommend_sharding

        heads = heads_of(config)
        return recommend_sharding(1, heads.q, heads.kv, ranks).choice.sharding
    if not given:
        return None
    fixed = (tp or 1) * (kvdp or 1)
    chosen = DecodeSharding(tp or 1, kvdp or 1, cp or max(1, ranks // fixed))
    if chosen.ranks != ranks:
        raise ValueError(f"--tp x --kvdp x --cp must be the number of ranks, {ranks}, got {_shown(given)}")
    return chosen


def _shown(given: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in given.items())


def not_run_here(model: ModelConfig, storage: str) -> list[str]:
    """Why `attnmesh generate` and `Generator` cannot run a planned decode as it is estimated; empty if they can."""
    reasons = []
    if model.model_type is not None and model.model_type not in SHARDED_MODELS:
        reasons.append(f"models of type {model.model_type} are not generated from with sharded weights")
    if model.weight_bits != WeightBits():
        reasons.append("quantized weights are not loaded in parts: store them as bf16, which takes more memory")
    if storage not in PLAIN:
        reasons.append(f"the KV cache is not stored as {storage}")
    return reasons
