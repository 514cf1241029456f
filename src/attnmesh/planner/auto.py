"""What `auto` resolves to at run time: the schedule, the merge of CP ranks, the rows of the K and V projection.

The schedule is the one whose slowest rank finishes first by estimate. For the merge of CP ranks in a decode step:

| combine | rounds | messages per rank | bytes |
|---|---|---|---|
| all_to_all | 1 | cp - 1 | the fewest: each result once, to the rank that needs it |
| reduce_scatter | 2 x log2(cp) | 2 x log2(cp) | the lse of all heads to all ranks, then each result once |
| all_reduce | 3 x log2(cp) | 3 x log2(cp) | the same, then all results to all ranks |

An all-to-all is one round, but its cp - 1 messages are started one after another. The other two use recursive doubling
and halving, one message per round: better with many ranks and few bytes. An all-reduce also returns all heads to every
rank, which is not needed, so it always costs more than a reduce-scatter.

`ContextParallel.explain` says what every rank computes and sends, and why the schedule was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.plan.allgather import gather_plan
from attnmesh.plan.decode import COMBINES, Combine, DecodeShape, DecodeSharding
from attnmesh.plan.leaves import VERSION, leaf_size
from attnmesh.plan.shards import SCHEDULES, Workload, why_not
from attnmesh.planner.cost import Cost, bytes_sent, cost, is_tie
from attnmesh.planner.hardware import Cluster, Device, Link
from attnmesh.planner.program import Load, Program, Round, imbalance
from attnmesh.planner.schedules import loads, program
from attnmesh.planner.simulator import TooLongError
from attnmesh.planner.sizes import RankSizes
from attnmesh.planner.vectorized import vectorized
from attnmesh.utils.progress import reported_steps
from attnmesh.utils.text import counted, readable_seconds

# A ring computes run by run; with more runs per shard than this (packed documents) its blocks become too small.
_MAX_RING_RUNS = 4


@dataclass(frozen=True)
class Choice:
    """The chosen schedule, the cost of each (forward plus backward), and why others were not considered."""

    schedule: str
    costs: dict[str, Cost]
    unsupported: dict[str, str]
    slower: tuple[str, ...] = ()  # schedules whose costs are only known to be larger

    @property
    def seconds(self) -> dict[str, float]:
        """Estimated seconds by schedule."""
        return {name: cost.seconds for name, cost in self.costs.items()}

    def __str__(self) -> str:
        known = [f"{name} {readable_seconds(seconds)}" for name, seconds in self.seconds.items()]
        costs = ", ".join([*known, *(f"{name} more" for name in self.slower)])
        others = "".join(f"; {name} cannot: {why}" for name, why in self.unsupported.items())
        return f"{self.schedule}, the fastest by estimate ({costs}){others}"


@lru_cache(maxsize=256)
def choose_schedule(workload: Workload, cluster: Cluster, *, all_costs: bool = True) -> Choice:
    """The fastest schedule by estimate; the simplest of the schedules that tie.

    The cost of forward and backward counts even where no gradient is required: otherwise activation checkpointing,
    which recomputes a forward with gradients, could get other bits. Without `all_costs` a schedule is left once it has
    taken longer than another one: of thousands of ranks, few rounds of a ring show that.
    """
    costs, unsupported, slower = dict[str, Cost](), dict[str, str](), list[str]()
    for schedule in SCHEDULES:
        why = why_not(
            schedule, workload.shards, workload.ranks_per_node, reproducible=workload.reproducible
        ) or _unsuitable(schedule, workload)
        if why is not None:
            unsupported[schedule] = why
    able = [name for name in SCHEDULES if name not in unsupported]
    weights = {name: _weight(name, workload) for name in able}
    nodes = cluster.with_ranks_per_node(workload.ranks_per_node)
    at_least = {} if all_costs else dict.fromkeys(("ring", "ring+ring"), _seconds_of_rings(workload, nodes))
    order = able if all_costs else sorted(able, key=lambda name: weights[name])
    with reported_steps() as report:
        for schedule in order:
            # What differs by rounding is no reason to leave a schedule.
            limit = inf if all_costs or not costs else min(known.seconds for known in costs.values()) * (1 + 1e-9)
            if at_least.get(schedule, 0.0) > limit:
                slower.append(schedule)
                continue
            done = 2 * sum(weights[name] for name in (*costs, *slower))
            total = 2 * sum(weights[name] for name in able if name in slower or at_least.get(name, 0.0) <= limit)

            def watched(whole: Program, done: int = done, total: int = total) -> Program:
                def rounds() -> Iterator[Round]:
                    for at, round_ in enumerate(whole.rounds()):
                        report(done + at, total)
                        yield round_

                return replace(whole, make=rounds)

            backward, forward = (program(schedule, workload, backward=way) for way in (True, False))
            try:
                back = cost(watched(backward), nodes, limit)
                there = cost(watched(forward, done + weights[schedule]), nodes, limit - back.seconds)
                costs[schedule] = there + back
            except TooLongError:
                slower.append(schedule)
    best = min((name for name in able if name in costs), key=lambda name: costs[name].seconds)
    return Choice(best, costs, unsupported, tuple(slower))


def _weight(schedule: str, workload: Workload) -> int:
    """About how long a schedule takes to simulate, in rounds of a ring. Those grow with its ranks, or its nodes."""
    if not _is_ring(schedule):
        return 8 + workload.world // (16 if schedule == "allgather" else 256)
    return 8 + workload.world // (workload.ranks_per_node if schedule.startswith("ulysses") else 1)


def _seconds_of_rings(workload: Workload, cluster: Cluster) -> float:
    """Seconds that the slowest rank of a ring, or of a ring of rings, computes at least, forward and backward.

    For each rank whose keys it sees there is a call of its own. 0 for few ranks, whose rings are soon simulated.
    """
    arrays, sizes, most = vectorized(workload.shards), RankSizes.of_workload(workload), 0.0
    if arrays is None:
        return 0.0
    for rank in (0, workload.world - 1):  # under some layout and mask one of them sees the most keys
        pairs = arrays.pairs_of(rank)
        pairs[rank] = 0  # own keys may take several calls
        calls, none = (pairs > 0).astype(np.int64), np.zeros_like(pairs)
        seconds = 0.0
        for way in (False, True):
            alone, beside = (
                cluster.device.kernel_seconds(
                    sizes.attention(pairs, calls, backward=way, causal=(none, none), single=single)
                )
                for single in (True, False)
            )
            seconds += float(np.minimum(alone, beside).sum())
        most = max(most, seconds)
    return most


def _is_ring(schedule: str) -> bool:
    return schedule.split("+")[-1] == "ring"


def _unsuitable(schedule: str, workload: Workload) -> str | None:
    runs = max((len(shard) for side in (workload.shards.queries, workload.shards.keys) for shard in side), default=0)
    if _is_ring(schedule) and runs > _MAX_RING_RUNS:
        return f"shards of {runs} runs would make the blocks of a ring too small"
    return None


@lru_cache(maxsize=256)
def pick_combine(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> Combine:
    """The fastest combine by estimate; the same on all ranks, since the bytes of the largest rank count."""
    seconds = combine_seconds(sharding, shape, link)
    return min(COMBINES, key=lambda combine: seconds[combine])


def combine_seconds(sharding: DecodeSharding, shape: DecodeShape, link: Link) -> dict[Combine, float]:
    """Estimated seconds of every combine, for ranking only."""
    return {combine: _seconds(sharding, shape, link, combine) for combine in COMBINES}


def _seconds(sharding: DecodeSharding, shape: DecodeShape, link: Link, combine: Combine) -> float:
    halvings = (sharding.cp - 1).bit_length()  # log2, rounded up
    if combine == "all_to_all":
        rounds, messages = min(1, sharding.cp - 1), sharding.cp - 1
    else:
        rounds = messages = halvings * (2 if combine == "reduce_scatter" else 3)
    loads = [bytes_sent(sharding, shape, rank, combine=combine) for rank in range(sharding.ranks)]
    nbytes = max(load["cp lse"] + load["cp out"] for load in loads)
    return rounds * link.latency + messages * link.message + nbytes / link.bandwidth


@lru_cache(maxsize=1024)
def own_rows_pay(spared: int, weights: int, device: Device) -> bool:
    """Whether a KVDP rank should project K and V of its own sequences only, in a kernel of its own.

    That spares `spared` rows of a product with `weights` elements of W_k and W_v, and costs one more launch. The
    weights are read either way, so with few rows there is nothing to gain.
    """
    return float(device.curve("matmul").seconds(2.0 * spared * weights)) > device.launch


@dataclass(frozen=True)
class Explanation:
    """The plan of a workload under a schedule. `str()` prints it as a table."""

    schedule: str
    workload: Workload
    forward: list[Load]  # by rank
    backward: list[Load]
    cluster: Cluster
    choice: Choice | None  # None: the schedule was given explicitly

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean."""
        return imbalance(self.forward)

    def __str__(self) -> str:
        head = ("rank", "queries", "visible keys", "GFLOP forward", "backward", "MB sent forward", "backward")
        rows = [head, *(self._row(rank) for rank in range(self.workload.shards.world))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines = [
            f"{self.schedule} over {counted(self.workload.shards.world, 'rank')}",
            *table,
            f"imbalance {self.imbalance:.4f}",
        ]
        if self.workload.reproducible:
            leaf = leaf_size(self.workload.device)
            lines.append(f"reproducible=True, version {VERSION} of its bits: sums over leaves of {leaf} queries")
        return "\n".join([*lines, *self._reasons()])

    def _row(self, rank: int) -> tuple[str, ...]:
        shards, there, back = self.workload.shards, self.forward[rank], self.backward[rank]
        return (
            str(rank), brief(shards.queries[rank]), brief(gather_plan(shards).needed(rank)),
            f"{there.flops / 1e9:.4g}", f"{back.flops / 1e9:.4g}", _sent(there), _sent(back),
        )  # fmt: skip

    def _reasons(self) -> list[str]:
        if self.choice is None:
            return ["schedule given explicitly"]
        best = self.choice.seconds[self.choice.schedule]
        lines = []
        for name, seconds in sorted(self.choice.seconds.items(), key=lambda pair: pair[1]):
            tie = " (tie)" if name != self.choice.schedule and is_tie(seconds, best) else ""
            lines.append(f"  {name}: {1e3 * seconds:.3f} ms{tie}")
        lines += [f"  {name}: {why}" for name, why in self.choice.unsupported.items()]
        return [f"fastest by estimate for {self.cluster.device.name}, forward and backward:", *lines]


def explain_schedule(schedule: str, workload: Workload, cluster: Cluster, choice: Choice | None) -> Explanation:
    """The explanation of a schedule that can serve the workload."""
    forward, backward = (loads(schedule, workload, backward=way) for way in (False, True))
    return Explanation(schedule, workload, forward, backward, cluster, choice)


def _sent(load: Load) -> str:
    inter_node = f" ({load.inter_node / 1e6:.4g} between nodes)" if load.inter_node else ""
    return f"{load.sent / 1e6:.4g}{inter_node}"


def brief(positions: Ranges) -> str:
    """Positions in short: `0..31, 224..255`."""
    if not positions:
        return "none"
    runs = [f"{run[0]}..{run[-1]}" + (f" step {run.step}" if run.step > 1 else "") for run in positions]
    return ", ".join(runs) if len(runs) <= 3 else f"{runs[0]}, ... {len(runs)} runs, {ranges.size(positions)} positions"
