"""The content of a report as plain data, computed from the plans that the executors follow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from attnmesh.core.layouts import Balanced, Layout, check_layout
from attnmesh.core.masks import (
    And,
    BlockCausal,
    Chunked,
    Documents,
    Global,
    Mask,
    Or,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
    check_mask,
)
from attnmesh.generation.requests import GenerationStats
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards, why_not
from attnmesh.planner.auto import Choice, choose_schedule
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Load, imbalance
from attnmesh.planner.schedules import Step, is_step, loads, program, steps
from attnmesh.planner.simulator import simulate
from attnmesh.trace.timeline import Span
from attnmesh.utils.files import read_json
from attnmesh.utils.progress import reported
from attnmesh.utils.sizes import check_sizes
from attnmesh.utils.text import counted
from attnmesh.utils.validation import check_bool, check_count, check_device, check_list, check_type, shown
from attnmesh.verify.mode import Outcome

Rows = Sequence[Mapping[str, object]]
"""A table: one dictionary per row, keyed by column."""

MOST_ROWS = 16
"""The most rows of a table or drawing: more ranks are grouped by node."""

MOST_RANKS = 64
"""The most ranks a report covers."""

_MOST_RUNS = 256  # of positions, all ranks together: drawings of more show nothing


@dataclass(frozen=True)
class RankGroups:
    """How ranks are grouped into the rows of tables and drawings: consecutive ranks, `size` per row."""

    world: int
    size: int
    noun: str  # of a row: "rank", "node" or "group"

    @staticmethod
    def of(world: int, ranks_per_node: int) -> RankGroups:
        """One row per rank up to 16 ranks, then one per node; larger groups where that is still more than 16 rows."""
        if world <= MOST_ROWS:
            return RankGroups(world, 1, "rank")
        nodes = -(-world // ranks_per_node)
        if 1 < nodes <= MOST_ROWS:
            return RankGroups(world, ranks_per_node, "node")
        if nodes > MOST_ROWS:
            return RankGroups(world, ranks_per_node * -(-nodes // MOST_ROWS), "group")
        return RankGroups(world, -(-world // MOST_ROWS), "group")

    @property
    def ranks(self) -> list[range]:
        """The ranks of every row."""
        return [range(first, min(first + self.size, self.world)) for first in range(0, self.world, self.size)]


@dataclass(frozen=True)
class ScheduleView:
    """One schedule: its steps, the load of every rank and a simulated forward pass."""

    name: str
    steps: list[Step]  # of the forward
    forward: list[Load]  # by rank
    backward: list[Load]
    timeline: list[Span]  # of the simulated forward pass, first rank of every row

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank over the mean."""
        return imbalance(self.forward)


@dataclass(frozen=True)
class ScheduleReport:
    """What the ranks hold, compute and send under every schedule.

    Attributes:
        workload: the shards and the shape.
        length: tokens of the whole sequence.
        facts: shown first.
        schedules: steps, load of every rank and a simulated forward, of every schedule that can serve the workload.
        choice: the schedule that "auto" chooses, and why.
        hardware: what times are estimated for.
        timelines: read from trace files.
        outcomes: of checks against float64.
        figures: further tables by name.

    Examples:
        >>> report = schedule_report(am.Causal(), am.Contiguous(), 4096, 4, shape)
        >>> ring = next(view for view in report.schedules if view.name == "ring")
        >>> round(ring.imbalance, 2)  # the last rank has the most causal work
        1.75
    """

    workload: Workload
    length: int
    facts: Mapping[str, object]
    schedules: list[ScheduleView]
    choice: Choice
    hardware: str
    timelines: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    outcomes: Sequence[Outcome] = ()
    figures: Mapping[str, Rows] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The heading of the page."""
        return f"{_count(self.workload.shards.world, 'rank')}, {_count(self.length, 'token')}"

    @property
    def groups(self) -> RankGroups:
        """The rows of tables and drawings."""
        return RankGroups.of(self.workload.shards.world, self.workload.ranks_per_node)


@dataclass(frozen=True)
class GeneratedAnswer:
    """One prompt of a `generate` run and its answer.

    Attributes:
        question: the prompt.
        answer: the text that was generated.
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens of the answer.
        matching_tokens: leading tokens equal to the tokens of a single process; None if they were not compared.
        logit_difference: the largest, relative to the largest logit of the single process.

    Examples:
        >>> answer = GeneratedAnswer("Who wrote it?", "Ada", prompt_tokens=12, new_tokens=2)
        >>> answer.matching_tokens is None  # not compared
        True
    """

    question: str
    answer: str
    prompt_tokens: int
    new_tokens: int
    matching_tokens: int | None = None
    logit_difference: float | None = None


@dataclass(frozen=True)
class GenerationReport:
    """A `generate` run: its questions and answers, and what every rank held, sent and took.

    Examples:
        >>> answers = [GeneratedAnswer("Who wrote it?", "Ada", prompt_tokens=12, new_tokens=2)]
        >>> report = generation_report(answers, [am.generation.GenerationStats(0)], facts={"model": "llama"})
        >>> report.facts["model"], report.answers == answers
        ('llama', True)
    """

    answers: Sequence[GeneratedAnswer]
    stats: Sequence[GenerationStats]  # by rank
    facts: Mapping[str, object]
    speculative: bool
    groups: RankGroups

    @property
    def title(self) -> str:
        """The heading of the page."""
        return f"generate on {_count(len(self.stats), 'rank')}"


def schedule_report(
    mask: Mask,
    layout: Layout,
    length: int,
    world: int,
    shape: Shape,
    *,
    ranks_per_node: int | None = None,
    device: torch.device | str = "cuda",
    facts: Mapping[str, object] | None = None,
    timelines: Mapping[str, Sequence[Span]] | None = None,
    outcomes: Sequence[Outcome] = (),
    figures: Mapping[str, Rows] | None = None,
) -> ScheduleReport:
    """Return a report on attention over `length` tokens sharded over `world` ranks.

    Args:
        mask: which keys a query attends to.
        layout: which rank holds which tokens.
        length: tokens of the whole sequence.
        world: number of ranks, at most 64.
        shape: batch, heads and element sizes.
        ranks_per_node: a divisor of `world`; `default_ranks_per_node(world)` if None.
        device: "cuda" or "cpu", the kind of hardware that times are estimated for.
        facts: shown after the facts of the workload.
        timelines: measured timelines by name.
        outcomes: checks against float64.
        figures: further tables by name.

    Examples:
        >>> report = schedule_report(am.Causal(), am.Zigzag(), 4096, 4, shape)
        >>> report.title
        '4 ranks, 4,096 tokens'
    """
    _check(length, world, shape)
    check_mask("mask", mask)
    mask.check(length)
    check_layout("layout", layout)
    kind = check_device("device", device).type
    _check_tables(facts=facts, timelines=timelines, figures=figures)
    for i, outcome in enumerate(check_list("outcomes", outcomes, "outcomes")):
        check_type(f"outcomes[{i}]", outcome, Outcome)
    workload = Workload(shards(mask, layout, length, world), shape, _checked_node(world, ranks_per_node))
    runs = sum(map(len, workload.shards.queries))
    if runs > _MOST_RUNS:
        raise ValueError(f"layout must give at most {_MOST_RUNS} runs of positions for a report, got {runs}")
    served = [name for name in SCHEDULES if why_not(name, workload.shards, workload.ranks_per_node) is None]
    cluster = default_cluster(kind)
    choice = choose_schedule(workload, cluster)
    hardware = hardware_name(cluster, nodes=world // workload.ranks_per_node)
    return ScheduleReport(
        workload=workload,
        length=length,
        facts={
            "ranks": _ranks(world, workload.ranks_per_node), "sequence length": _count(length, "token"),
            "layout": in_words(layout), "mask": in_words(mask),
            "heads": f"{shape.q_heads} query, {shape.kv_heads} KV, head dimension {_head_dims(shape)}",
            "batch": shape.batch, "selected schedule": f"{choice.schedule}, the fastest by estimate",
            "estimates are for": hardware, **(facts or {}),
        },
        schedules=[_view(name, workload, cluster) for name in reported(served, len(served))],
        choice=choice,
        hardware=hardware,
        timelines=timelines or {},
        outcomes=outcomes,
        figures=figures or {},
    )  # fmt: skip


def generation_report(
    answers: Sequence[GeneratedAnswer],
    stats: Sequence[GenerationStats],
    *,
    facts: Mapping[str, object] | None = None,
    speculative: bool = False,
    ranks_per_node: int | None = None,
) -> GenerationReport:
    """Return a report on a `generate` run.

    Args:
        answers: the prompts of the run and their answers, in order.
        stats: what every rank held, sent and took, in rank order.
        facts: shown after the facts of the run.
        speculative: whether to show drafted and accepted tokens.
        ranks_per_node: all ranks if None.

    Examples:
        >>> answers = [GeneratedAnswer("Who wrote it?", "Ada", prompt_tokens=12, new_tokens=2)]
        >>> generation_report(answers, [am.generation.GenerationStats(rank) for rank in range(2)]).title
        'generate on 2 ranks'
    """
    for i, answer in enumerate(check_list("answers", answers, "answers")):
        check_type(f"answers[{i}]", answer, GeneratedAnswer)
    for i, each in enumerate(check_list("stats", stats, "GenerationStats, one per rank")):
        check_type(f"stats[{i}]", each, GenerationStats)
    if not stats:
        raise ValueError(f"stats must have an entry for every rank, got {shown(stats)}")
    check_bool(speculative=speculative)
    _check_tables(facts=facts)
    world = len(stats)
    node = _checked_node(world, world if ranks_per_node is None else ranks_per_node)
    prompts = sum(each.prompt_tokens for each in answers)
    described = {
        "ranks": _ranks(world, node),
        "prompts": f"{_count(len(answers), 'prompt')}, {_count(prompts, 'token')}",
        **(facts or {}),
    }
    return GenerationReport(answers, stats, described, speculative, RankGroups.of(world, node))


def hardware_name(cluster: Cluster, *, nodes: int) -> str:
    """Return the device and the links that an estimate is for."""
    intra_node, inter_node = (
        f"{link.name} ({link.bandwidth / 1e9:g} GB/s)" for link in (cluster.intra_node, cluster.inter_node)
    )
    within = f"{cluster.device.name}, {intra_node}"
    return within if nodes == 1 else f"{within} within a node, {inter_node} between nodes"


def default_ranks_per_node(world: int) -> int:
    """Return the middle divisor of `world`, so that both levels of a two-level schedule have something to do."""
    divisors = [n for n in range(2, world) if world % n == 0]
    return divisors[len(divisors) // 2] if divisors else world


def in_words(what: Layout | Mask) -> str:
    """Return a layout or a mask in words."""
    match what:
        case And(parts=parts):
            return " and ".join(f"({in_words(part)})" if isinstance(part, Or) else in_words(part) for part in parts)
        case Or(parts=parts):
            return " or ".join(f"({in_words(part)})" if isinstance(part, And) else in_words(part) for part in parts)
        case SlidingWindow(left=left, right=right):
            return f"window of {left:,} before" + (f" and {right:,} after" if right else "")
        case Documents(lengths=lengths, prefixes=prefixes):
            return f"{len(lengths):,} documents" + ("" if prefixes is None else ", causal after a prefix")
        case Prefix(n=n):
            return f"causal after a prefix of {n:,}"
        case Chunked(size=size):
            return f"causal in chunks of {size:,}"
        case BlockCausal(size=size):
            return f"causal by blocks of {size:,}"
        case Global(n=n, both=both):
            return f"{n:,} global tokens" + (" in both directions" if both else "")
        case Slices(slices=slices):
            return f"{len(slices):,} slices"
        case Padding(lengths=lengths, side=side):
            return f"{len(lengths):,} sequences padded on the {side}"
        case PerSequence(masks=masks):
            return f"{len(masks):,} masks, one per sequence"
        case Balanced():
            return "balanced for the mask"
    return repr(what).removesuffix("()").lower()


def read_figures(path: Path) -> dict[str, Rows]:
    """Return the tables in a JSON file: its lists of objects and groups of values. ValueError if there are none."""
    try:
        tables = dict(_tables(path.stem, read_json(path, f"figures {path}")))
    except RecursionError:
        raise ValueError(f"figures {path} is nested too deeply") from None
    if not tables:
        raise ValueError(f"figures {path} has no table: it must contain objects or lists of objects")
    return tables


def _tables(name: str, value: object) -> Iterator[tuple[str, Rows]]:
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict)]
        if rows:
            yield name, [{key: _plain(cell) for key, cell in row.items()} for row in rows]
    elif isinstance(value, dict):
        alone = {key: each for key, each in value.items() if not isinstance(each, (dict, list)) or _is_flat(each)}
        if alone:
            yield name, [{"": key, "value": _plain(each)} for key, each in alone.items()]
        for key, each in value.items():
            if key not in alone:
                yield from _tables(f"{name}: {key}", each)


def _is_flat(value: object) -> bool:
    return isinstance(value, list) and not any(isinstance(each, (dict, list)) for each in value)


def _plain(cell: object) -> object:
    return cell if isinstance(cell, (str, int, float)) else json.dumps(cell) if cell is not None else ""


def _view(name: str, workload: Workload, cluster: Cluster) -> ScheduleView:
    forward, backward = (loads(name, workload, backward=way) for way in (False, True))
    timeline = _simulated_forward(name, workload, cluster)
    return ScheduleView(name, steps(name, workload), forward, backward, timeline)


def _simulated_forward(schedule: str, workload: Workload, cluster: Cluster) -> list[Span]:
    """Simulate a forward pass; every span gets `args["step"]`, the step of the page that it belongs to."""
    whole = program(schedule, workload, backward=False)
    groups = RankGroups.of(whole.world, workload.ranks_per_node)
    ran = simulate(whole, cluster.with_ranks_per_node(workload.ranks_per_node), keep=range(0, whole.world, groups.size))
    compute: dict[str, int] = {}
    transfer: dict[str, int] = {}
    step = -1
    for part in whole.rounds():
        step += is_step(part)
        compute[part.name] = step
        transfer |= dict.fromkeys(part.starts, step)

    def step_of(span: Span) -> int | None:
        return compute.get(str(span.args.get("round"))) if span.track == "compute" else transfer.get(span.name)

    return [replace(span, args={**span.args, "step": step_of(span)}) for span in ran.spans]


def _checked_node(world: int, ranks_per_node: int | None) -> int:
    if ranks_per_node is None:
        return default_ranks_per_node(world)
    check_count("ranks_per_node", ranks_per_node, least=1)
    if world % ranks_per_node:
        raise ValueError(f"ranks_per_node must divide the {counted(world, 'rank')}, got {ranks_per_node}")
    return ranks_per_node


def _ranks(world: int, ranks_per_node: int) -> str:
    if ranks_per_node == world:
        return f"{world}"
    return f"{world}: {counted(world // ranks_per_node, 'node')}, {counted(ranks_per_node, 'rank')} per node"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _check_tables(**tables: object) -> None:
    for name, table in tables.items():
        if table is not None:
            check_type(name, table, Mapping, "a mapping by name")


def _head_dims(shape: Shape) -> str:
    widths = dict.fromkeys((shape.head_dim, shape.out_dim))
    return "/".join(map(str, widths))  # of keys and of values


def _check(length: int, world: int, shape: Shape) -> None:
    check_type("shape", shape, Shape)
    if not isinstance(world, int) or isinstance(world, bool) or not 1 <= world <= MOST_RANKS:
        raise ValueError(f"world must be 1 to {MOST_RANKS} ranks for a report, got {shown(world)}")
    heads = {name: getattr(shape, name) for name in ("batch", "q_heads", "kv_heads")}
    for width in (shape.head_dim, shape.out_dim):
        check_sizes(length=length, head_dim=width, **heads)
    if shape.q_heads % shape.kv_heads:
        raise ValueError(f"kv_heads must divide the {shape.q_heads} query heads, got {shape.kv_heads}")
