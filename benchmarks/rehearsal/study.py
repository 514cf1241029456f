"""Runs on nodes, and what they must show: equal results, the plan's bytes on every link, the simulator's times."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from attnmesh.core.layouts import Zigzag
from attnmesh.core.masks import Causal
from attnmesh.plan.shards import SCHEDULES, shards, why_not
from attnmesh.planner.hardware import Cluster, Device, Link
from attnmesh.planner.program import Program
from attnmesh.planner.simulator import Slowdown, simulate
from benchmarks.rehearsal.failing import PROMISED, WITHOUT_STORE
from benchmarks.rehearsal.links import HEADERS, Counters, LinkBytes, counted_links, planned_links
from benchmarks.rehearsal.nodes import MTU, Namespace, Nodes
from benchmarks.rehearsal.programs import SCHEDULE, ProgramReport, losses_of_one_process, planned_programs
from benchmarks.rehearsal.ranks import Case, Outcome, Report

Row = dict[str, object]

WORLD = 4
LENGTH = 512
BYTES_WITHIN, TIME_WITHIN, ERROR_WITHIN, LOSS_WITHIN = 0.02, 0.20, 1e-5, 1e-4
TWO_LEVEL = {"ulysses+ring": "ring", "ulysses+allgather": "allgather", "ring+ring": "ring"}
"""The flat schedule that each schedule of two levels must send less than, between nodes."""

_PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
_LONGEST = 100.0  # seconds of any run


class RunError(RuntimeError):
    """A run on nodes that failed or did not end."""


@dataclass(frozen=True)
class Machine:
    """What ranks compute with on this machine, and how processes of one node exchange messages."""

    device: Device
    intra_node: Link

    def simulated_seconds(self, programs: Iterable[Program], nodes: int, link: Link) -> float:
        """The time of programs, one after the other, on nodes that share the cores of this machine."""
        ranks_per_node, cores = WORLD // nodes, self.device.cores or 1
        device = replace(self.device, cores=max(cores // nodes, 1))
        slower = Slowdown({rank: max(nodes / cores, 1.0) for rank in range(WORLD)})
        cluster = Cluster(device, self.intra_node, link, ranks_per_node, rails=1)
        return sum(simulate(program, cluster, slow=slower).seconds for program in programs)


def goodput(megabits: float) -> float:
    """Bytes of payload per second of a link whose packets are full."""
    frame = MTU + 14
    return megabits * 1e6 / 8 * (frame - HEADERS) / frame


def run_on(nodes: Nodes, words: Sequence[str], folder: Path, longest: float = _LONGEST) -> float:
    """Run a command on all nodes to its end; return its seconds. RunError has the end of the output."""
    begin = time.monotonic()
    agents = nodes.torchrun(WORLD // len(nodes.nodes), words, folder)
    for node, agent in zip(nodes.nodes, agents, strict=True):
        try:
            code: object = agent.wait(max(longest - (time.monotonic() - begin), 0.1))
        except subprocess.TimeoutExpired:
            code = f"none after {longest:g} s"
        if code != 0:
            said = (folder / node.name).read_text(errors="replace")[-2000:]
            raise RunError(f"{' '.join(words[:3])} on {node.name}: exit code {code}\n{said}")
    return time.monotonic() - begin


# Attention.


def cases(nodes: int, *, quick: bool) -> list[Case]:
    """Every schedule that such nodes can run, forward, and forward with backward."""
    held = shards(Causal(), Zigzag(), LENGTH, WORLD)
    able = [name for name in SCHEDULES if why_not(name, held, WORLD // nodes) is None]
    return [Case(name, LENGTH, backward) for backward in ((False,) if quick else (False, True)) for name in able]


def attention_sections(nodes: Nodes, machine: Machine, folder: Path, *, quick: bool) -> list[tuple[str, list[Row]]]:
    """Run attention under every schedule and compare it with one process, the plan and the simulator."""
    job, path, runs = folder / "job", folder / "report", 1 if quick else 2
    job.write_text(json.dumps({"cases": [asdict(case) for case in cases(len(nodes.nodes), quick=quick)], "runs": runs}))
    run_on(nodes, ["-m", "benchmarks.rehearsal.ranks", str(job), str(path)], folder)
    report = Report.load(path)
    link = Link("veth", "tc tbf", report.link.latency, goodput(nodes.megabits), report.link.message)
    speed = f"links of {nodes.megabits:g} Mbit/s"
    return [
        (
            f"attention over {speed}",
            [attention_row(each, runs, machine, len(nodes.nodes), link) for each in report.outcomes],
        ),
        (
            f"what must hold over {speed}",
            [_exchange_row(report.link.bandwidth / 2, link), *fewer_rows(report.outcomes, runs)],
        ),
    ]


def row(run: str, seen: str, wrong: Sequence[str] = ()) -> Row:
    """A row of a table: what was run, what was seen, and what is wrong with it."""
    return {"run": run, "seen": seen, "verdict": f"WRONG: {', '.join(wrong)}" if wrong else "ok"}


def is_wrong(cells: Row) -> bool:
    """Whether a row says that something is wrong."""
    return cells["verdict"] != "ok"


def outside(ratio: float, within: float) -> bool:
    """Whether two quantities differ by more than this share of the smaller one."""
    return not 1 / (1 + within) <= ratio <= 1 + within


def _exchange_row(rate: float, link: Link) -> Row:
    """Two ranks of different nodes that send to each other must get the whole link in each direction."""
    share = rate / link.bandwidth
    seen = f"{share:.2f} of the speed of a link in each direction, both at once"
    return row("exchange of two nodes", seen, ["time"] if outside(share, TIME_WITHIN) else [])


def attention_row(outcome: Outcome, runs: int, machine: Machine, nodes: int, link: Link) -> Row:
    """Bytes of the busiest link, the ratio of the link that differs most from the plan, and times."""
    programs = outcome.case.programs(WORLD, WORLD // nodes)
    return _compared_row(
        {"run": outcome.case.name, "schedule": outcome.case.schedule, "error": f"{outcome.error:.0e}"},
        planned_links(programs, WORLD // nodes),
        outcome.counters,
        runs,
        (machine.simulated_seconds(programs, nodes, link), min(outcome.seconds)),
        [] if outcome.error <= ERROR_WITHIN else ["result"],
    )


def _compared_row(
    first: Row,
    planned: LinkBytes,
    counters: Sequence[Counters],
    runs: int,
    times: tuple[float, float],
    wrong: Sequence[str],
    judge_time: bool = True,
) -> Row:
    """A row with bytes against the plan and the `times`, simulated and measured."""
    counted = counted_links(counters, runs)
    simulated, measured = times
    busiest, ratio = int(planned.sent.argmax()), counted.ratio_to(planned)
    wrong = list(wrong)
    if outside(ratio, BYTES_WITHIN):
        wrong.append("bytes")
    if judge_time and outside(measured / simulated, TIME_WITHIN):
        wrong.append("time")
    return {
        **first,
        "planned MB": f"{planned.sent[busiest] / 1e6:.2f}",
        "counted MB": f"{counted.sent[busiest] / 1e6:.2f}",
        "worst link": f"{ratio:.4f}",
        "headers": f"{sum(each.overhead for each in counters) / len(counters):.1%}",
        "simulated s": f"{simulated:.2f}",
        "measured s": f"{measured:.2f}",
        "ratio": f"{measured / simulated:.2f}",
        "verdict": row("", "", wrong)["verdict"],
    }


def fewer_rows(outcomes: Sequence[Outcome], runs: int) -> list[Row]:
    """Schedules of two levels must send fewer bytes between nodes than flat ones, by the counters."""
    sent = {(o.case.name, o.case.schedule): counted_links(o.counters, runs).between_nodes for o in outcomes}
    rows = []
    for (name, schedule), nbytes in sent.items():
        flat = TWO_LEVEL.get(schedule)
        if flat is not None:
            share = nbytes / sent[name, flat]
            seen = f"{share:.2f} of the bytes of {flat} between nodes"
            rows.append(row(f"{name}, {schedule}", seen, ["not fewer bytes"] if share >= 1 else []))
    return rows


# Whole programs.


def program_rows(nodes: Nodes, machine: Machine, folder: Path) -> list[Row]:
    """The training example, prefill and decode steps: bytes of every link against the plan, and times.

    A time is that of the model's own operations on all ranks at once, which is measured, and the simulator's for
    attention and messages. That of a decode step is mostly latency, and is not judged.
    """
    alone, path = folder / "losses-alone", folder / "programs"
    if not alone.exists():
        alone.write_text(json.dumps(losses_of_one_process()))
    run_on(nodes, ["-m", "benchmarks.rehearsal.programs", str(path)], folder)
    report, rows = ProgramReport.load(path), []
    link = Link("veth", "tc tbf", report.link.latency, goodput(nodes.megabits), report.link.message)
    per_node, expected = WORLD // len(nodes.nodes), json.loads(alone.read_text())
    for each in report.programs:
        programs = planned_programs(each, WORLD, per_node)
        simulated = each.own_seconds + machine.simulated_seconds(programs, len(nodes.nodes), link)
        pairs = list(zip(expected, each.losses, strict=True)) if each.losses else []
        error = max((abs(a - b) / a for a, b in pairs), default=0.0)
        rows.append(
            _compared_row(
                {"run": each.name, "schedule": SCHEDULE, "error": f"{error:.0e}" if pairs else "-"},
                planned_links(programs, per_node),
                each.counters,
                each.runs,
                (simulated, each.seconds),
                [] if error < LOSS_WITHIN else ["losses"],
                judge_time=each.name != "decode",
            )
        )
    return rows


def generate_row(nodes: Nodes, folder: Path, tokens: int) -> Row:
    """`attnmesh generate --check` must have the tokens of a single process."""
    words = ["-m", "attnmesh", "generate", "--prompt", _PROMPT, "--max-new-tokens", str(tokens), "--check"]
    before = _sent(nodes)
    wrong = []
    try:
        run_on(nodes, words, folder)
    except RunError as error:
        print(error, file=sys.stderr)
        wrong = ["tokens"]
    said = (folder / "node0").read_text(errors="replace")
    check = next((line.strip() for line in said.splitlines() if line.startswith("Check of answer")), "no check;")
    return row("generate", f"{check} {(_sent(nodes) - before) / 1e6:.2f} MB between nodes", wrong)


def _sent(nodes: Nodes) -> int:
    return sum(node.counters().sent for node in nodes.nodes)


# Nodes that fail.


def failure_rows(nodes: Nodes, folder: Path, what: str, fail: Callable[[Namespace], None]) -> list[Row]:
    """Every process that is left must raise CommError in time after the last node fails, on either side of a cut."""
    words = ["-m", "benchmarks.rehearsal.failing", str(folder)]
    per_node = WORLD // len(nodes.nodes)
    nodes.torchrun(per_node, words, folder)
    if _waited(folder, "attending", range(WORLD), 60):
        return [row(what, "ranks did not start", ["start"])]
    failed = time.time()
    fail(nodes.nodes[-1])
    survivors, lost = range(WORLD - per_node), range(WORLD - per_node, WORLD)
    rows = [_raised_row(what, folder, survivors, failed, PROMISED)]
    if nodes.nodes[-1].is_running:  # the store is on the first node
        rows.append(_raised_row(f"{what}: its own ranks", folder, lost, failed, WITHOUT_STORE))
    return rows


def _raised_row(what: str, folder: Path, ranks: Sequence[int], failed: float, promised: float) -> Row:
    silent = _waited(folder, "raised", ranks, promised + 10)
    raised = [json.loads((folder / f"raised-{rank}").read_text()) for rank in ranks if rank not in silent]
    after = max((each["time"] - failed for each in raised), default=0.0)
    wrong = [f"ranks {silent} raised nothing"] if silent else []
    if after > promised:
        wrong.append("late")
    said = f": {raised[0]['message']}" if raised else ""
    return row(
        what, f"{len(raised)} of {len(ranks)} ranks raised within {after:.1f} s (promised {promised:g}){said}", wrong
    )


def _waited(folder: Path, name: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait for a file of every rank; return the ranks that wrote none."""
    end = time.monotonic() + seconds
    while True:
        absent = [rank for rank in ranks if not (folder / f"{name}-{rank}").exists()]
        if not absent or time.monotonic() > end:
            return absent
        time.sleep(0.02)
