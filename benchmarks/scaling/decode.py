"""A step of token generation over a long context: the best way of each kind, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from attnmesh.cli.output import Rows
from attnmesh.planner.decode import DecodeRequest, decode_ranking
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models.read import model as model_named
from attnmesh.planner.ranking import Option, Ranking
from benchmarks.scaling.cases import CONTEXT, Scope

KERNEL_KINDS = ("TP", "TP-CP", "TP-KVDP", "TP-KVDP-CP", "replicas")


def decode_rows(scope: Scope, cluster: Cluster) -> Iterator[Rows]:
    """The best of each kind for every model, batch and number of devices, the fastest that fits first."""
    for name, batch, devices in product(scope.models, scope.batches, scope.devices):
        ranking = decode_ranking(DecodeRequest(model_named(name), CONTEXT, batch, devices, cluster))
        best: dict[str, Option] = {}
        for option in ranking.options:
            best.setdefault(kind_of(option.name), option)
        yield [_row(name, batch, devices, kind, option, ranking) for kind, option in best.items()]


def kind_of(way: str) -> str:
    """What a way divides: copies of the model, or heads (TP), sequences (KVDP) and positions (CP) of one."""
    if " x " in way:
        return "replicas"
    return "-".join(["TP", *(part for part in ("KVDP", "CP") if part in way)])


def _row(model: str, batch: int, devices: int, kind: str, option: Option, ranking: Ranking) -> dict[str, object]:
    return {
        "model": model,
        "context": CONTEXT,
        "batch": batch,
        "devices": devices,
        "kind": kind,
        "way": option.name,
        "seconds": option.seconds,
        "tokens_per_second": batch / option.seconds,
        "computing": sum(s for part, s in option.parts.items() if part != "communication") / option.seconds,
        "weights": option.memory.weights,
        "cache": option.memory.cache,
        "total": option.memory.total,
        "fits": option.fits(ranking.device_memory),
        "bottleneck": option.bottleneck,
        "why": ranking.why(option),
    }
