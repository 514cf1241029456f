"""Ranks that fail: programs over ranks, faults of one rank, moments of a program, and what the other ranks raise."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attnmesh as am
from attnmesh.comm import Comm, CommError, process_group
from attnmesh.testing.block import poisoned_cache, random_block, shard_block
from helpers.processes import Died, run_processes

FAULTY = 1
"""The rank that fails."""
STEPS = 3
Step = Callable[[], Tensor]
"""One step of a program, and a tensor of this rank."""


class InjectedError(RuntimeError):
    """What a rank raises in the middle of its work."""


# Programs: (comm, device) -> a function that makes one step.


def training(schedule: str, **options: Any) -> Callable[[Comm, str], Step]:
    """Attention forward and backward under one schedule."""

    def make(comm: Comm, device: str) -> Step:
        context = am.ContextParallel(comm, schedule=schedule, **options)
        q, k, v = (torch.randn(1, 12, 64, 16, device=device, requires_grad=True) for _ in range(3))

        def step() -> Tensor:
            context.attention(q, k, v, mask=am.Full()).sum().backward()
            return q.grad

        return step

    return make


def compiled(comm: Comm, device: str) -> Step:
    """The ring inside of a compiled function."""
    context = am.ContextParallel(comm, schedule="ring")
    q, k, v = (torch.randn(1, 4, 64, 16, device=device, requires_grad=True) for _ in range(3))

    @torch.compile(backend="aot_eager")
    def attend(q, k, v):
        return context.attention(q, k, v, mask=am.Causal(), length=64 * comm.world)

    def step() -> Tensor:
        attend(q, k, v).sum().backward()
        return q.grad

    return step


def sparse(comm: Comm, device: str) -> Step:
    """Sparse attention over a sharded sequence."""
    parallel = am.SparseParallel(cp=comm)
    q = torch.randn(8, 16, 64, device=device, requires_grad=True)
    kv = torch.randn(8, 1, 64, device=device, requires_grad=True)
    indices = torch.zeros(8, 2, dtype=torch.int32, device=device)

    def step() -> Tensor:
        out, _ = parallel.sparse_attention(q, kv, indices, scale=0.3, d_v=64)
        out.sum().backward()
        return q.grad

    return step


def decode(tp: int, kvdp: int, cp: int) -> Callable[[Comm, str], Step]:
    """Steps of an attention block with a sharded cache."""

    def make(comm: Comm, device: str) -> Step:
        config, weights = random_block(q_heads=6, kv_heads=3 if tp > 1 else 2, head_dim=16, hidden=48, device=device)
        block = shard_block(config, weights, am.DecodeSharding(tp, kvdp, cp, interleave=2), comm)
        cache = poisoned_cache(block, 3, 64)
        sequences = [cache.allocate(0) for _ in range(3)]
        return lambda: block(torch.ones(3, 1, 48, device=device), cache, cache.append(sequences, 1))

    return make


def generate(comm: Comm, device: str) -> Step:
    """Prefill and decode of a Transformers model."""
    import transformers

    am.register_attention()
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, attn_implementation="attnmesh",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    logits: list[Tensor] = []
    generator = am.Generator(
        model, None, comm, cache_tokens=400, sharding=am.DecodeSharding(cp=comm.world),
        callbacks=am.generation.Callbacks(on_logits=lambda _, row: logits.append(row)),
    )  # fmt: skip

    def step() -> Tensor:
        list(generator.generate([list(range(24))], max_new_tokens=2, stop=[]))
        return logits[-1]

    return step


def gather(comm: Comm, device: str) -> Step:
    """The parts of a sharded tensor, and the gradient of that."""
    context = am.ContextParallel(comm)

    def step() -> Tensor:
        x = torch.randn(4, device=device, requires_grad=True)
        context.unshard(x, 0, 4 * comm.world).sum().backward()
        return x.grad

    return step


def queries(comm: Comm, device: str) -> Step:
    """Attention with distributed queries."""
    q, k, v = (torch.randn(1, 2, 12, 8, device=device, requires_grad=True) for _ in range(3))

    def step() -> Tensor:
        out = am.ring_distributed_attention(q, k, v, group=comm)
        am.gather_ring_outputs(out, length=12, group=comm).sum().backward()
        return q.grad

    return step


PROGRAMS: dict[str, tuple[int, Callable[[Comm, str], Step]]] = {
    "ring": (3, training("ring")),
    "allgather": (3, training("allgather")),
    "ulysses": (3, training("ulysses")),
    "two-level": (4, training("ring+ring", ranks_per_node=2)),
    "compiled": (3, compiled),
    "sparse": (3, sparse),
    "tp": (3, decode(3, 1, 1)),
    "kvdp": (3, decode(1, 3, 1)),
    "cp": (3, decode(1, 1, 3)),
    "generate": (3, generate),
    "unshard": (3, gather),
    "query-distributed": (3, queries),
}
"""The number of ranks of each program, and how it is made."""

WITH_BACKWARD = ("ring", "allgather", "ulysses", "two-level", "compiled", "sparse", "unshard", "query-distributed")


def moments(program: str) -> list[str]:
    """When a rank of the program can fail."""
    return ["before", "forward", *(["backward"] if program in WITH_BACKWARD else []), "between"]


# Faults.

FAULTS = ("late", "stopped for a while", "holding the GIL", "disagreeing", "raising", "sleeping", "hung")
"""Besides "killed". The first three end within the timeout: all ranks succeed."""
HARMLESS = FAULTS[:3]


def fail(fault: str, comm: Comm, *, late: float, away: float, is_over: Callable[[], bool] = lambda: False) -> None:
    """What the faulty rank does: for `late` seconds, after which it goes on in time, or `away`, unless it `is_over`.

    Another rank may continue a process that hangs, because it is stopped.
    """
    if fault == "raising":
        raise InjectedError("injected")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault in ("hung", "stopped for a while"):
        seconds = away if fault == "hung" else late
        alarm = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(alarm.pid, signal.SIGKILL)
        alarm.wait()
    elif fault == "disagreeing":
        comm.note("something else")
    elif fault == "holding the GIL":
        ctypes.PyDLL(None).usleep(int(late * 1e6))
    elif fault == "late":
        time.sleep(late)
    else:
        end = time.monotonic() + away
        while time.monotonic() < end and not is_over():
            time.sleep(0.05)


def inject(comm: Comm, moment: str | int, fault: Callable[[], None]) -> Callable[[], bool]:
    """Let the next operation in forward or backward, or that with a number, meet the fault, once.

    Returns a function that tells whether it has.
    """
    done, posted = [], itertools.count()

    def is_due() -> bool:
        if isinstance(moment, int):
            return next(posted) == moment
        return (torch._C._current_graph_task_id() != -1) == (moment == "backward")

    def failing(post: Callable[..., Any]) -> Callable[..., Any]:
        def post_or_fail(*args: Any) -> Any:
            if not done and is_due():
                done.append(True)
                fault()
            return post(*args)

        return post_or_fail

    comm._exchange_with = failing(comm._exchange_with)  # type: ignore[method-assign]
    comm._native = failing(comm._native)  # type: ignore[attr-defined]
    exchange, failing_exchange = process_group.exchange_in_memory, failing(process_group.exchange_in_memory)

    def exchange_in_memory(by: Any, *args: Any) -> None:
        (failing_exchange if by is comm else exchange)(by, *args)

    process_group.exchange_in_memory = exchange_in_memory
    return lambda: bool(done)


def run_steps(
    comm: Comm,
    program: str,
    device: str,
    moment: str | int,
    fault: Callable[[], None] | None,
    seconds: float = 0,
) -> tuple[str, str, float, list[float]]:
    """Make the steps of a program, with a fault of this rank if one is given, for so many seconds at least.

    Returns the type and the message of what it raises, the seconds since the step of the fault began, and the results.
    """
    torch.manual_seed(7)
    results: list[float] = []
    has_met: Callable[[], bool] = lambda: True  # noqa: E731
    begin = time.monotonic()
    try:
        if fault is not None and moment == "before":
            fault()
        step = PROGRAMS[program][1](comm, device)
        if moment != "before":
            results.append(step().detach().double().sum().item())
            begin = time.monotonic()
            if fault is not None and moment == "between":
                fault()
            elif fault is not None:
                has_met = inject(comm, moment, fault)
        while len(results) < STEPS or time.monotonic() < begin + seconds:
            result = step().detach().double().sum()
            if device == "cuda" and len(results) % 2:
                torch.cuda.synchronize()
            results.append(result.item())
        if device == "cuda":
            torch.cuda.synchronize()  # what it has sent may not have arrived: that too raises here, not later
    except (CommError, InjectedError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin, []
    assert has_met(), f"{program} posts nothing at {moment}"
    return "nothing", "", time.monotonic() - begin, results


# Cells: a fault at a moment, each on a process group of its own.

Cell = tuple[str, str | int]
LONG = 120.0
"""Seconds: the timeout of a group in which the end of a process is noticed long before."""


@dataclass(frozen=True)
class Setting:
    """Where cells run. `new_comm(world, timeout)` makes a comm on all ranks, whose default group is on gloo."""

    new_comm: Callable[[int, float], Comm]
    device: str = "cpu"
    timeout: float = 2.0
    late: float = 1.0
    disagreeing: float = 0.0  # seconds in which ranks that disagree may go on
    tolerance: float = 0.0

    @property
    def away(self) -> float:
        """Seconds that a rank is stopped or sleeps: the others must have raised before."""
        return self.timeout + 10

    def is_named(self, error: str) -> bool:
        """Whether an error names the rank that fails, first of all if it was found on the host."""
        return error.startswith(f"rank {FAULTY} ") or (self.device == "cuda" and f"rank {FAULTY}" in error)


def run_cells(comm: Comm, program: str, cells: list[Cell], setting: Setting) -> dict[Any, Any]:
    """The outcome of every cell on this rank. The rank that is away comes back when all others have raised."""
    comm.timeout = 60
    found: dict[Any, Any] = {"pid": os.getpid()}
    found["expected"] = run_steps(setting.new_comm(comm.world, 60), program, setting.device, "before", None)[3]
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid {comm.rank}", str(os.getpid()))
    for fault, moment in cells:
        own, raised = setting.new_comm(comm.world, setting.timeout), f"raised {fault} {moment}"
        if comm.rank == FAULTY:
            is_over = partial(_all_raised, store, raised, comm.world)
            injected = partial(fail, fault, own, late=setting.late, away=setting.away, is_over=is_over)
        else:
            injected = None
        seconds = setting.disagreeing if fault == "disagreeing" else 0
        found[fault, moment] = outcome = run_steps(own, program, setting.device, moment, injected, seconds)
        print(program, fault, moment, "rank", comm.rank, *outcome[:3], flush=True)
        if comm.rank != FAULTY and store.add(raised, 1) == comm.world - 1:
            os.kill(int(store.get(f"pid {FAULTY}")), signal.SIGCONT)
        comm.barrier()
    return found


def _all_raised(store: Any, key: str, world: int) -> bool:
    return store.add(key, 0) == world - 1


def run_killed(comm: Comm, program: str, moment: str | int, setting: Setting) -> tuple[str, str, float, list[float]]:
    """The outcome on a rank that is left after one was killed."""
    comm.timeout = 60
    warm = run_steps(setting.new_comm(comm.world, 60), program, setting.device, "before", None)
    assert len(warm[3]) == STEPS, warm  # what is imported and compiled takes time
    comm.barrier()
    own = setting.new_comm(comm.world, LONG)
    fault = partial(fail, "killed", own, late=0, away=0) if comm.rank == FAULTY else None
    return run_steps(own, program, setting.device, moment, fault)


def problems_of(cell: Cell, found: list[Any], expected: list[list[float]], setting: Setting) -> list[str]:
    """What is wrong with the outcomes of a cell, by rank; empty if nothing is."""
    problems = []
    for rank, (kind, text, seconds, results) in enumerate(found):
        wanted = [pytest.approx(value, rel=setting.tolerance, abs=setting.tolerance) for value in expected[rank]]
        if cell[0] in HARMLESS:
            if len(wanted) != STEPS or results != wanted:
                problems.append(f"rank {rank}: {kind} {text}, {results} instead of {expected[rank]}")
        elif cell[0] == "disagreeing":
            if kind not in ("CommError", "ValueError") or f"rank {FAULTY}" not in text:
                problems.append(f"rank {rank}: {kind} after {seconds:.1f} s: {text}")
        elif rank == FAULTY:  # away, and back: it may have everything that it needs, but nothing else
            if kind == "nothing" and results != wanted:
                problems.append(f"rank {rank}: {results} instead of {expected[rank]}")
        elif kind != "CommError" or seconds > setting.away or not setting.is_named(text):
            problems.append(f"rank {rank}: {kind} after {seconds:.1f} s: {text}")
    return problems


def report(cell: tuple[Any, ...], found: list[Any]) -> None:
    """Print the seconds after which the other ranks raised."""
    seconds = [outcome[2] for rank, outcome in enumerate(found) if rank != FAULTY]
    print(f"cell | {' | '.join(map(str, cell))} | {statistics.median(seconds):.2f} | {max(seconds):.2f}")


def check_cells(program: str, cells: list[Cell], setting: Setting, *, timeout: float, backend: str = "gloo") -> None:
    """Run cells on processes, all of which end."""
    world = PROGRAMS[program][0]
    ranks = run_processes(world, run_cells, program, cells, setting, timeout=timeout, backend=backend, ends=True)
    expected, problems = [rank["expected"] for rank in ranks], {}
    for cell in cells:
        found = [rank[cell] for rank in ranks]
        report((program, *cell), found)
        if wrong := problems_of(cell, found, expected, setting):
            problems[cell] = wrong
    assert not problems, problems
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank["pid"], 0)


def check_killed(
    program: str, moment: str | int, setting: Setting, *, timeout: float = 200, backend: str = "gloo", limit: float = 10
) -> None:
    """Kill a rank: the others raise within so many seconds."""
    world, _ = PROGRAMS[program]
    ranks = run_processes(
        world, run_killed, program, moment, setting, timeout=timeout, strict=False, ends=True, backend=backend
    )
    assert ranks[FAULTY] == Died(-signal.SIGKILL)
    survivors = [ranks[rank] for rank in range(world) if rank != FAULTY]
    for outcome in survivors:
        assert isinstance(outcome, tuple), outcome
        assert outcome[0] == "CommError", outcome
        assert setting.is_named(outcome[1]), outcome
        assert outcome[2] < limit, outcome
    report((program, "killed", moment), [*survivors[:FAULTY], ("", "", 0.0, []), *survivors[FAULTY:]])
