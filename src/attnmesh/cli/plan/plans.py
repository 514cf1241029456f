"""`attnmesh plan prefill` and `attnmesh plan decode` for a model: ranked ways, or what would fit."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from attnmesh.cli import output as report
from attnmesh.cli.plan.advice import Leanest, advice
from attnmesh.cli.plan.machines import Machines
from attnmesh.cli.plan.show import as_json, table
from attnmesh.core.validation import parse_length
from attnmesh.ops.storage import bytes_per_token
from attnmesh.planner.decode import DecodeRequest, decode_memory, decode_ranking, shardings
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.models.config import ModelConfig
from attnmesh.planner.models.read import model as model_named
from attnmesh.planner.prefill import MAX_CP_RANKS, PrefillRequest, parallelisms, prefill_memory, prefill_ranking
from attnmesh.planner.ranking import Memory, Option, Ranking
from attnmesh.planner.units import readable_bytes, readable_seconds


@dataclass(frozen=True)
class Asked:
    """What a person asked for."""

    model: str
    context: str
    batch: int
    devices: int
    machines: Machines
    storage: str = "bf16"
    tokens: int = 1
    every: bool = False
    as_json: bool = False


def prefill(asked: Asked) -> bool:
    """Rank ways to read prompts; False where nothing fits. ValueError for what cannot be planned."""
    model, cluster = model_named(asked.model), asked.machines.cluster()
    length = parse_length(asked.context)
    task = PrefillRequest(model, length, asked.batch, asked.devices, cluster, _number(asked.storage, model))
    ranking = prefill_ranking(task)

    def leanest(devices: int) -> Memory | None:
        larger = replace(task, devices=devices)
        ways = (way for way in parallelisms(larger) if way.cp <= MAX_CP_RANKS)
        return min((prefill_memory(larger, way) for way in ways), key=_total, default=None)

    what = f"{_sequences(asked.batch)} of {length:,} positions, {model.name}: time until all are read"
    return _answer(asked, cluster, ranking, _Question(what, asked.batch * length, leanest, task.kv_itemsize))


def decode(asked: Asked) -> bool:
    """Rank ways to generate tokens; False where nothing fits. ValueError for what cannot be planned."""
    model, cluster = model_named(asked.model), asked.machines.cluster()
    length = parse_length(asked.context)
    number = _number(asked.storage, model)
    task = DecodeRequest(model, length, asked.batch, asked.devices, cluster, asked.tokens, number)
    ranking = decode_ranking(task)

    def leanest(devices: int) -> Memory | None:
        larger = replace(task, devices=devices)
        found = (decode_memory(larger, way, asked.batch // replicas) for replicas, way in shardings(larger))
        return min(found, key=_total, default=None)

    what = f"{_sequences(asked.batch)} that hold {length:,} positions, {model.name}: time of a step"
    return _answer(asked, cluster, ranking, _Question(what, asked.batch * asked.tokens, leanest, number))


@dataclass(frozen=True)
class _Question:
    what: str
    tokens: int  # that the time is for
    leanest: Leanest
    weight_bits: float  # bytes of a number in the cache


def _answer(asked: Asked, cluster: Cluster, ranking: Ranking, question: _Question) -> bool:
    best = ranking.best
    if best is None:
        ranking = replace(ranking, advice=advice(ranking, asked.devices, question.leanest, question.weight_bits))
    where = asked.machines.in_words(cluster, asked.devices)
    if asked.as_json:
        facts = {"question": question.what, "machines": where, **as_json(ranking)}
        print(json.dumps(facts, indent=2))
        return best is not None
    console = report.console()
    if best is None:
        console.print(ranking.advice, style="bold")
    else:
        rate = f"{question.tokens / best.seconds:,.0f} tokens a second"
        needs = f"{readable_bytes(best.memory.total)} of {readable_bytes(ranking.device_memory)} a device"
        console.print(f"{best.name}: {readable_seconds(best.seconds)}, {rate}, {needs}", style="bold")
        console.print("Because " + _because(best, ranking))
    console.print(where)
    table(console, question.what, ranking, every=asked.every)
    return best is not None


def _because(best: Option, ranking: Ranking) -> str:
    """What the best one spends its time on, and what the runner-up does worse."""
    shares = sorted(best.parts.items(), key=lambda part: -part[1])
    spent = ", ".join(
        f"{100 * seconds / best.seconds:.0f}% {part}" for part, seconds in shares if seconds > 0.005 * best.seconds
    )
    fitting = [option for option in ranking.options[1:] if option.fits(ranking.device_memory)]
    after = f"; next is {fitting[0].name}, {ranking.why(fitting[0])}" if fitting else "; nothing else fits"
    return f"its time is {spent}; the bottleneck is {best.bottleneck}{after}."


def _number(storage: str, model: ModelConfig) -> float:
    """Bytes of a number in the cache, scales included."""
    width = model.latent.cached if model.latent else model.head_dim
    return bytes_per_token(storage, width) / width


def _sequences(batch: int) -> str:
    return "1 sequence" if batch == 1 else f"{batch} sequences"


def _total(memory: Memory) -> float:
    return memory.total
