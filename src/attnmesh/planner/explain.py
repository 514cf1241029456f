"""`ContextParallel.explain`: what every rank computes and sends, the imbalance, and why the schedule was chosen."""

from __future__ import annotations

from dataclasses import dataclass

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.plan.allgather import gather_plan
from attnmesh.plan.workload import Workload
from attnmesh.planner.auto import Choice
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.program import Load, imbalance
from attnmesh.planner.ranking import is_tie
from attnmesh.planner.schedules import loads
from attnmesh.utils.text import counted


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
        return "\n".join([*lines, *self._reasons()])

    def _row(self, rank: int) -> tuple[str, ...]:
        shards, there, back = self.workload.shards, self.forward[rank], self.backward[rank]
        return (
            str(rank), _brief(shards.queries[rank]), _brief(gather_plan(shards).needed(rank)),
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
        lines += [f"  {name}: {why}" for name, why in self.choice.refusals.items()]
        return [f"fastest by estimate for {self.cluster.device.name}, forward and backward:", *lines]


def explain_schedule(schedule: str, workload: Workload, cluster: Cluster, choice: Choice | None) -> Explanation:
    """The explanation of a schedule that can serve the workload."""
    forward, backward = (loads(schedule, workload, backward=way) for way in (False, True))
    return Explanation(schedule, workload, forward, backward, cluster, choice)


def _sent(load: Load) -> str:
    inter_node = f" ({load.inter_node / 1e6:.4g} between nodes)" if load.inter_node else ""
    return f"{load.sent / 1e6:.4g}{inter_node}"


def _brief(positions: Ranges) -> str:
    """Positions in short: `0..31, 224..255`."""
    if not positions:
        return "none"
    runs = [f"{run[0]}..{run[-1]}" + (f" step {run.step}" if run.step > 1 else "") for run in positions]
    return ", ".join(runs) if len(runs) <= 3 else f"{runs[0]}, ... {len(runs)} runs, {ranges.size(positions)} positions"
