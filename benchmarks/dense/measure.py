"""The measurement: kernels compiled by many processes, every program checked, those that are right timed in turns."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.calibration.timing import Run, interleaved, reason
from attnmesh.cli.output import Rows
from benchmarks.dense import programs
from benchmarks.dense.cases import AnyCase, Case, Part, RingCase, random_inputs
from benchmarks.dense.checks import Expected, expected_backward, expected_forward
from benchmarks.dense.programs import FLEX, GLUON, SAME_BITS, STAGE, THEIRS, TRITON, Program, RefusalError
from benchmarks.dense.workers import NOW, TIME_UP, supervise, supervise_many
from benchmarks.one_rank import OneRankComm
from benchmarks.peers import PEERS
from benchmarks.peers import random_inputs as ring_inputs
from benchmarks.ring import measure_cuda, rank_program

_MOST_PROCESSES = 14  # each holds a context on the device
_SILENCE = 90.0  # seconds: more than any program takes to compile, or a case to be timed
_COMPILE_SHARE = 1 / 3  # of the time limit; what is not compiled by then is compiled when it is measured
_BACKENDS = ("auto",)  # of the ring
_TIMING = "timing"
OK, WRONG, FAILED, CANNOT = "ok", "WRONG", "FAILED", "cannot"
SUMMARY = "TFLOP/s of visible pairs; ratio: the best of Gluon over the peer that the goal refers to"
METHOD = "bf16, CUDA graphs replayed in turns for slices of 100 ms, medians"
Message = tuple[str, Any]
Timer = Callable[..., dict[Any, float]]


class Job(NamedTuple):
    """Some programs of a case: to be checked and timed, or, in no rounds, only to be compiled and checked."""

    case: AnyCase
    names: tuple[str, ...]
    rounds: int


class Verdict(NamedTuple):
    """What became of a program before it was timed."""

    name: str
    verdict: str
    error: float | str
    why: str = ""

    def __str__(self) -> str:
        error = f"error {self.error:.1e}" if isinstance(self.error, float) else ""
        return " ".join(filter(None, (self.name + ":", self.verdict, error, self.why)))


# In the measuring process.


def measure_job(job: Job) -> Iterator[Message]:
    """Check the programs of a job, then time those that are right."""
    if isinstance(job.case, RingCase):
        yield from _measure_ring(job)
        return
    torch.manual_seed(0)
    yield NOW, "inputs"
    x = random_inputs(job.case, "cuda")
    saved = None
    if job.case.part is Part.BACKWARD:
        saved = programs.save_forward(x)
        if not expected_forward(x).judge({"out": saved.out, "lse": saved.lse})[1]:
            raise RuntimeError("the forward before the backward is wrong")
    exact = expected_forward(x) if saved is None else expected_backward(x, saved)
    build = partial(programs.build, case=job.case, x=x, saved=saved)
    yield from check_and_time(job, build, exact, torch.cuda.synchronize, interleaved)
    del x, saved, exact, build
    gc.collect()
    torch.cuda.empty_cache()


def check_and_time(
    job: Job, build: Callable[[str], Program], exact: Expected, synchronize: Callable[[], object], timer: Timer
) -> Iterator[Message]:
    """The verdict on every program as it is known, then the rows of all; what is wrong is not timed."""
    verdicts: list[Verdict] = []
    good: dict[str, Program] = {}
    for name in job.names:
        yield NOW, name
        try:
            program = build(name)
            found = _check(name, program, exact, synchronize)
            if found.verdict == OK:
                good[name] = program
        except Exception as error:
            synchronize()  # raises if the device is lost to this process
            found = _failure(name, error)
        verdicts.append(found)
        yield "verdict", found
    if job.rounds:
        yield NOW, _TIMING
        failures: dict[Any, str] = {}
        times = timer(_runs(good), job.rounds, failures=failures)
        yield "rows", rows(job.case, verdicts, times, failures)


def _failure(name: str, error: Exception) -> Verdict:
    if isinstance(error, RefusalError):
        return Verdict(name, CANNOT, "", str(error))
    return Verdict(name, CANNOT if name in THEIRS else FAILED, "", reason(error))


def _check(name: str, program: Program, exact: Expected, synchronize: Callable[[], object]) -> Verdict:
    program.begin()
    found = program.run()
    synchronize()
    error, right = exact.judge(found)
    for x in found.values():
        x.fill_(torch.nan)  # the next program gets this memory, and must write all of it
    program.begin()
    return Verdict(name, OK if right else WRONG, error)


def _runs(good: Mapping[str, Program]) -> dict[Any, Run]:
    """What is timed, by name; (name, "less") is not counted."""
    found: dict[Any, Run] = {}
    for name, program in good.items():
        found[name] = partial(_first, program.run)
        if program.less is not None:
            found[name, "less"] = partial(_first, program.less)
    return found


def _first(run: Callable[[], Mapping[str, Tensor]]) -> Tensor:
    return next(iter(run().values()))


def rows(
    case: AnyCase, verdicts: Sequence[Verdict], times: Mapping[Any, float], failures: Mapping[Any, str]
) -> Rows:  # fmt: skip
    """A row for each program: its time and speed, or why there is none."""
    assert isinstance(case, Case)
    net = {name: ms - times.get((name, "less"), 0.0) for name, ms in times.items() if isinstance(name, str)}
    net = {name: ms for name, ms in net.items() if (name, "less") not in failures}
    found: Rows = []
    for name, verdict, error, why in verdicts:
        ms = net.get(name)
        if ms is None and verdict == OK:
            verdict, why = FAILED, failures.get(name) or failures.get((name, "less"), "")
        found.append(
            {
                "program": name,
                "ms": "" if ms is None else ms,
                "tflops": "" if ms is None else case.flops / ms / 1e9,
                **{f"of_{peer}": net[peer] / ms if ms and peer in net else "" for peer in ("cuDNN", FLEX)},
                "error": error,
                "verdict": " ".join(filter(None, (verdict, why))),
            }
        )
    return found


def _measure_ring(job: Job) -> Iterator[Message]:
    case = job.case
    assert isinstance(case, RingCase)
    backward = case.part is Part.BACKWARD
    measured: Rows = []
    for backend in job.names:
        yield NOW, backend
        found = Verdict(backend, OK, "")
        try:
            if job.rounds:
                (line,) = measure_cuda((case.length,), (case.world,), (backward,), backend)
                measured.append({"backend": backend, **line})
            else:
                for rank in (0, case.world - 1):  # compiles what the others launch, too
                    shard = ring_inputs(case.length // case.world, backward)
                    rank_program(OneRankComm(rank, case.world), case.length, shard, backend)()
                    torch.cuda.synchronize()
        except Exception as error:
            torch.cuda.synchronize()
            found = _failure(backend, error)
        yield "verdict", found
    if measured:
        yield "rows", measured
    gc.collect()
    torch.cuda.empty_cache()


# In the command's process.


def job_of(case: AnyCase, *, with_variants: bool, rounds: int) -> Job:
    """All programs of a case."""
    if isinstance(case, RingCase):
        return Job(case, _BACKENDS, rounds)
    return Job(case, tuple(programs.names(case, with_variants=with_variants)), rounds)


def compile_jobs(jobs: Sequence[Job]) -> list[Job]:
    """A job for each program that has to be compiled: ours for a short sequence, FlexAttention for its own length."""
    found = [
        Job(_compiled_as(job.case, name), (name,), 0) for job in jobs for name in job.names if name not in PEERS
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def _compiled_as(case: AnyCase, name: str) -> AnyCase:
    return case.shortened() if isinstance(case, Case) and name != FLEX else case


def without(job: Job, name: str) -> Job | None:
    """The job without a program that hung or ended its process; None if it was no program of the job."""
    return job._replace(names=tuple(x for x in job.names if x != name)) if name in job.names else None


def measure_dense(
    cases: Sequence[AnyCase], *, with_variants: bool, rounds: int, time_limit: float, say: Callable[[str], object]
) -> Iterator[tuple[str, Rows]]:
    """Yield titles and rows, and say what happens meanwhile."""
    begin = time.monotonic()
    deadline = begin + time_limit

    def tell(text: str) -> None:
        say(f"[{time.monotonic() - begin:5.1f}] {text}")

    jobs = [job_of(case, with_variants=with_variants, rounds=rounds) for case in cases]
    bad = _compile(jobs, begin + _COMPILE_SHARE * time_limit, tell)
    jobs = [
        job._replace(names=tuple(name for name in job.names if (_compiled_as(job.case, name), name) not in bad))
        for job in jobs
    ]
    summary: Rows = []
    for event in supervise(measure_job, jobs, silence=_SILENCE, deadline=deadline, retry=without):
        case = cases[event.job]
        if event.kind == "rows":
            yield f"{case.name} ({METHOD})", event.value
            if isinstance(case, Case):
                summary.append(summary_row(case, event.value))
        elif event.kind == "lost":
            name, why = event.value
            tell(f"{case.name}: {name}: {why}")
            bad[case, name] = why if why == TIME_UP else f"{FAILED} {why}"
        elif event.kind == "verdict":
            tell(f"{case.name}: {event.value}")
    if bad:
        yield "not measured", [{"case": case.name, "program": name, "why": why} for (case, name), why in bad.items()]
    yield SUMMARY, summary


def _compile(
    jobs: Sequence[Job], deadline: float, tell: Callable[[str], None]
) -> dict[tuple[AnyCase, str], str]:  # fmt: skip
    """Compile and check all programs; returns those that are not to be timed, and why."""
    todo = compile_jobs(jobs)
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) - 2))
    tell(f"compiling {len(todo)} programs in {min(processes, len(todo))} processes")
    bad: dict[tuple[AnyCase, str], str] = {}
    for event in supervise_many(measure_job, todo, processes, silence=_SILENCE, deadline=deadline):
        case, (name,), _ = todo[event.job]
        if event.kind == "lost" and (event.value[0] or event.value[1] != TIME_UP):
            bad[case, name] = f"{FAILED} {event.value[1]}"
        elif event.kind == "verdict" and event.value.verdict != OK:
            found = event.value
            bad[case, name] = f"{found.verdict} {found.why or found.error}"
        else:
            continue
        tell(f"{case.name}: {name}: {bad[case, name]}")
    tell("compiled")
    return bad


def summary_row(case: Case, measured: Rows) -> dict[str, object]:
    """One line of the last table."""
    speeds = {str(row["program"]): float(str(row["tflops"])) for row in measured if row["tflops"] != ""}
    ours = {name: speed for name, speed in speeds.items() if name.startswith(GLUON) and name not in (STAGE, SAME_BITS)}
    best = max(ours, key=lambda name: ours[name], default="")
    peer = speeds.get(case.peer)
    return {
        "case": case.name,
        **{name: speeds.get(name, "") for name in (*THEIRS, TRITON, GLUON, STAGE)},
        "best": best.removeprefix(f"{GLUON} "),
        "ratio": ours[best] / peer if best and peer else "",
        "goal": f"{case.goal} of {case.peer}",
    }


def wrong_rows(measured: Rows) -> Rows:
    """The rows of programs that were wrong, failed, or hung."""
    return [row for row in measured if str(row.get("verdict", row.get("why", ""))).startswith((WRONG, FAILED))]
