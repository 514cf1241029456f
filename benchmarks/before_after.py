"""Whether a change made anything slower: the calls of two checkouts of attnmesh, timed in turns in one run.

`python -m benchmarks.before_after ../attnmesh-before` runs the same programs, those of this file, with the package of
each checkout, in processes of its own. They build all programs first, side by side. Then one program runs at a time,
and the checkouts take turns, so that clocks drift for both alike. New processes do so again, since the same code has
differed by 3% from one process to another. A ratio is the median over all rounds of the time of this checkout over the
time that the other one took right before or after it.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import typer
from torch import Tensor

import attnmesh as am
from attnmesh.calibration.timing import Run, reason
from attnmesh.cli.options import MeasuredDeviceOption, default_device
from attnmesh.cli.output import Rows
from benchmarks import recurrent, sparse_decode
from benchmarks.common import JsonOption, make_app, publish
from benchmarks.decode import cases as decode
from benchmarks.decode.latent import Latent, random_run
from benchmarks.dense import cases as dense
from benchmarks.one_rank import OneRankComm
from benchmarks.peers import random_inputs, run_backward
from benchmarks.ring import rank_program
from benchmarks.sparse import cases as sparse

_SLICE_MS = 20.0
_MOST_SLOWER = 1.01
_NO_MEMORY = "out of memory"
_SILENCE = 120.0  # seconds: more than any program takes to compile
_HERE = Path(__file__).resolve().parents[1]
_K = 1024
Make = Callable[[str], Run]


def programs(device: str) -> dict[str, Make]:
    """What is timed, by name, with random inputs on the device."""
    if device == "cpu":
        tiny = dense.Case(dense.Part.BACKWARD, "causal", 256, 4, 2, 32, 32)
        return {
            tiny.name: partial(_dense, tiny),
            "decode": partial(_decode, decode.Case(decode.Shape(2, 4, 2, 64, 32))),
        }
    forward = dense.Part.FORWARD
    found: dict[str, Make] = {
        case.name: partial(_dense, case)
        for case in dense.CASES
        if isinstance(case, dense.Case) and case.length <= 32 * _K
    }
    found |= {f"ring of 8, rank {rank}, {n}k, {_direction(grad)}": partial(_ring, rank, n * _K, grad)
              for n in (16, 32) for grad in (False, True) for rank in (0, 7)}  # fmt: skip
    found |= {f"{_direction(grad)} latents, {heads} heads, {n}k": partial(_latents, heads, n * _K, grad)
              for grad in (False, True) for heads, n in ((16, 8), (128, 4))}  # fmt: skip
    alike = dense.Case(forward, "causal", 8 * _K)
    for part in dense.Part:
        of = alike._replace(part=part)
        found[f"{of.name}, ALiBi"] = partial(_dense, of, slopes=True)
        found[f"{of.name}, softcap"] = partial(_dense, of, softcap=30.0)
        found[f"{of.name}, reproducible"] = partial(_dense, of, reproducible=True)
        found[f"{of.name}, fp16"] = partial(_dense, of, dtype=torch.float16)
        found[f"{of.name}, rows of unequal length"] = partial(
            _dense, of._replace(length=8 * _K - 77, mask="documents:1111")
        )
    for width in (64, 128):
        case = dense.Case(dense.Part.BACKWARD, "causal", 8 * _K, key_dim=width, value_dim=width)
        found[f"{case.name}, deterministic"] = partial(_deterministic, case)
    for shape in decode.SHAPES:
        found |= {
            f"decode {tuple(shape)} {kind}": partial(_decode, decode.Case(shape, kind)) for kind in ("bf16", "fp8")
        }
    found |= {
        f"decode {decode.SHAPES[1]}, {n} tokens": partial(_decode, decode.Case(decode.SHAPES[1], tokens=n))
        for n in (4,)
    }
    found |= {f"latents {tuple(each)}": partial(_latent_decode, each) for each in (
        Latent(128, 128, 4096), Latent(128, 16, 4096), Latent(1, 128, 131072), Latent(1, 16, 131072),
        Latent(16, 64, 8192), Latent(128, 128, 4096, fp8=True), Latent(128, 16, 4096, fp8=True),
        Latent(1, 16, 131072, fp8=True), Latent(32, 128, 8192, fp8=True))}  # fmt: skip
    found |= {f"sparse decode {case}": partial(_sparse_decode, case) for case in (
        sparse_decode.Case(128, 16384), sparse_decode.Case(1, 16384), sparse_decode.Case(128, 16384, 16),
        sparse_decode.Case(128, 16384, storage="plain"))}  # fmt: skip
    found |= {f"top-k of {batch} tokens, {n}k keys": partial(_paged_topk, sparse_decode.Case(batch, n * _K))
              for batch, n in ((1, 8), (1, 128), (4, 32), (32, 128), (128, 128))}  # fmt: skip
    sizes = sparse.sizes("cuda", quick=False)
    for shape in (*sizes.lengths[:2], sizes.few_heads):
        for part in ("forward", "with backward", "distribution"):
            found[f"sparse {part}, {shape.heads} heads, {shape.s_kv // _K}k"] = partial(_sparse, shape, part)
    found |= {f"indexer top-k, {x.s_kv // _K}k": partial(_topk, x) for x in sizes.indexers}
    found["indexer loss, sparse"] = partial(_loss, *sizes.loss)
    for kind, what in ((kind, what) for kind in recurrent.LAYERS for what in recurrent.FULL):
        found[f"{kind}, {what}"] = partial(_recurrent, kind, what)
    return found


def _direction(grad: bool) -> str:
    return "with backward" if grad else "forward"


def _normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=grad)


def _dense(
    case: dense.Case, device: str, *, slopes: bool = False, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Run:
    grad = case.part is dense.Part.BACKWARD
    x = dense.random_inputs(case, device, dtype if device == "cuda" else torch.float32)
    inputs = tuple(each.requires_grad_(grad) for each in (x.q, x.k, x.v))
    if slopes:
        options["alibi_slopes"] = 2.0 ** -torch.linspace(1, 8, case.q_heads, device=device)
    attend = partial(am.attention, *inputs, mask=case.visible, scale=x.scale, **options)
    return lambda: run_backward(attend(), inputs, x.grad_out if grad else None)


def _deterministic(case: dense.Case, device: str) -> Run:
    run = _dense(case, device)

    def deterministic() -> Tensor:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return run()
        finally:
            torch.use_deterministic_algorithms(False)

    return deterministic


def _latents(heads: int, length: int, grad: bool, device: str) -> Run:
    q, k = (
        _normal(1, heads, length, 576, device=device, grad=grad),
        _normal(1, 1, length, 576, device=device, grad=grad),
    )
    towards = _normal(1, heads, length, 512, device=device) if grad else None
    attend = partial(am.attention, q, mask=am.Causal(), scale=192**-0.5)
    return lambda: run_backward(attend(k=k, v=k[..., :512]), (q, k), towards)


def _ring(rank: int, length: int, grad: bool, device: str) -> Run:
    return rank_program(OneRankComm(rank, 8), length, random_inputs(length // 8, grad), "auto")


def _decode(case: decode.Case, device: str) -> Run:
    return decode.make_run(case._replace(storage=case.storage if device == "cuda" else "fp32"), device)


def _latent_decode(shape: Latent, device: str) -> Run:
    return random_run(shape, device)["gluon"]


def _sparse_decode(case: sparse_decode.Case, device: str) -> Run:
    q = _normal(case.batch, case.tokens, case.heads, 576, device=device)
    chosen = torch.rand(case.batch, case.tokens, case.length, device=device).argsort(-1)[..., : case.topk].int()
    pool, table = sparse_decode.latent_pool(case, device), sparse_decode.random_table(case, device)
    return lambda: am.sparse.paged_sparse_decode_attention(q, pool, table, chosen, scale=576**-0.5, d_v=512)[0]


def _paged_topk(case: sparse_decode.Case, device: str) -> Run:
    given = sparse_decode.topk_arguments(case, device)
    return lambda: am.sparse.paged_indexer_topk(**given).indices


def _sparse(shape: sparse.Attention, part: str, device: str) -> Run:
    x = sparse.attention_inputs(shape, device, torch.bfloat16)
    inputs = tuple(each.requires_grad_(part == "with backward") for each in (x.q, x.kv))
    attend = partial(am.sparse_attention, *inputs, x.indices, scale=x.scale, d_v=shape.d_v)
    if part == "distribution":
        lse = attend()[1]
        return partial(am.attention_distribution, x.q, x.kv, x.indices, lse, scale=x.scale)
    towards = _normal(shape.s_q, shape.heads, shape.d_v, device=device) if part == "with backward" else None
    return lambda: run_backward(attend()[0], inputs, towards)


def _topk(shape: sparse.Indexer, device: str) -> Run:
    x = sparse.indexer_inputs(shape, device, torch.bfloat16)
    return lambda: am.indexer_topk(*x, shape.topk).indices


def _loss(attention: sparse.Attention, indexer: sparse.Indexer, device: str) -> Run:
    x = tuple(each.requires_grad_() for each in sparse.indexer_inputs(indexer, device, torch.bfloat16))
    indices = sparse.random_indices(attention.s_q, attention.s_kv, attention.topk, device)
    target = torch.rand(indices.shape, device=device)
    return lambda: torch.autograd.grad(am.indexer_kl_loss(*x, indices, target), x)[0]


def _recurrent(kind: str, what: str, device: str) -> Run:
    return recurrent.step(recurrent.LAYERS[kind](recurrent.LENGTH), recurrent.ours, what)


# In a process of one checkout: requests and answers are lines of JSON.


def serve(device: str, names: Sequence[str], requests: IO[str], answers: IO[str]) -> None:
    """Build the programs, answering each name with the error or None; then answer each name with milliseconds."""
    makes, made = programs(device), dict[str, Callable[[], object]]()
    runs = []  # they hold the inputs, which graphs read
    for name in names:
        error = None
        try:
            runs.append(makes[name](device))
            made[name] = _captured(runs[-1], device)
        except Exception as failure:
            error = reason(failure)
        print(json.dumps([name, error]), file=answers, flush=True)
    for line in requests:
        print(json.dumps(_milliseconds(made[line.strip()], device)), file=answers, flush=True)


def _captured(run: Run, device: str) -> Callable[[], object]:
    if device == "cpu":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        run()
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = run()
    graph.replay()
    if not result.isfinite().all():
        raise ValueError("the result is not finite")
    return graph.replay


def _milliseconds(run: Callable[[], object], device: str) -> float:
    """The mean of a slice of time, on the GPU by its events."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(count: int) -> float:
        start.record()
        for _ in range(count):
            run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / count

    return timed(max(1, round(_SLICE_MS / timed(1))))


# In the process that compares.


class Worker:
    """A process that runs a share of the programs with the package of one checkout."""

    def __init__(self, checkout: Path, device: str, names: Sequence[str]) -> None:
        source = checkout / "src"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(source), str(_HERE)))}
        command = [sys.executable, "-c", _SERVE.format(source=str(source), device=device, names=list(names))]
        self._process = subprocess.Popen(
            command, env=environment, cwd=_HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def answer(self) -> Any:
        """The next answer. Raises RuntimeError if the process ends, or says nothing for long."""
        try:
            found = self._answers.get(timeout=_SILENCE)
        except queue.Empty:
            self.stop()  # a later answer would be taken for that of the next program
            raise RuntimeError(f"a process said nothing for {_SILENCE} s") from None
        if found is None:
            self._answers.put(None)
            raise RuntimeError(f"a process ended with status {self._process.wait()}")
        return found

    def milliseconds(self, name: str) -> float:
        """Time a program."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self.answer())

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


_SERVE = """
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer
import attnmesh
assert attnmesh.__file__.startswith({source!r}), attnmesh.__file__
from benchmarks.before_after import serve
serve({device!r}, {names!r}, sys.stdin, answers)
"""


class Comparison:
    """The times of programs of two checkouts, before and after, and why programs have none."""

    def __init__(self, names: Sequence[str]) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        self.failed: dict[str, str] = {}

    def run(
        self, names: Sequence[str], checkouts: Sequence[Path], device: str, rounds: int, processes: int, deadline: float
    ) -> None:
        """Build these programs side by side, and time them in turns."""
        shares = [share for n in range(processes) if (share := names[n::processes])]
        workers = [[Worker(checkout, device, share) for share in shares] for checkout in checkouts]
        try:
            for pair, share in zip(zip(*workers, strict=True), shares, strict=True):
                for worker, where in zip(pair, ("before", "after"), strict=True):
                    self._build(worker, share, where, deadline)
            for turn in range(rounds):
                _say(deadline, f"round {turn + 1}")
                for n, name in enumerate(names):
                    if name not in self.failed and time.monotonic() < deadline:
                        self._time(name, [each[n % processes] for each in workers], turn % 2 == 1)
        finally:
            for worker in (worker for each in workers for worker in each):
                worker.stop()

    def _build(self, worker: Worker, names: Sequence[str], where: str, deadline: float) -> None:
        for name in names:
            try:
                _, error = worker.answer()
            except RuntimeError as ended:
                error = str(ended)
            _say(deadline, f"built {name}, {where}{f': {error}' if error else ''}")
            if error is not None:
                self.failed[name] = f"{where}: {error}"
                self.times[name].clear()

    def _time(self, name: str, pair: Sequence[Worker], reverse: bool) -> None:
        try:
            first, second = (each.milliseconds(name) for each in (reversed(pair) if reverse else pair))
        except (RuntimeError, OSError) as error:  # the process, and the other programs that it has
            self.failed[name] = str(error)
            self.times[name].clear()
        else:
            self.times[name].append((second, first) if reverse else (first, second))


def _say(deadline: float, text: str) -> None:
    print(f"{deadline - time.monotonic():5.1f} s left: {text}", file=sys.stderr, flush=True)


def compare(
    before: Path, device: str, names: Sequence[str], *, rounds: int, builds: int, processes: int, seconds: float
) -> Iterator[tuple[str, Rows]]:
    """Yield one table, slowest first; a program that one of the checkouts cannot run has the reason.

    The GPU holds the inputs of all programs. Those for which it has no memory left run again, without the others.
    """
    deadline = time.monotonic() + seconds
    comparison, left = Comparison(names), list(names)
    while left:
        for build in range(builds):
            if build == 0 or time.monotonic() < deadline:
                comparison.run(left, (before, _HERE), device, rounds, processes, deadline)
        lacked = [name for name in left if _NO_MEMORY in comparison.failed.get(name, "")]
        if len(lacked) == len(left):
            break
        left = lacked
        for name in left:
            del comparison.failed[name]
    yield f"time after over time before, {builds} times {rounds} rounds", rows(comparison.times, comparison.failed)


def rows(times: dict[str, list[tuple[float, float]]], failed: dict[str, str]) -> Rows:
    """One row per program: medians, and the median of the ratios of each round."""
    timed = {name: statistics.median(b / a for a, b in pairs) for name, pairs in times.items() if pairs}
    found: Rows = [
        {"program": name, "before_ms": "", "after_ms": "", "ratio": failed.get(name, "no time left")}
        for name in times
        if name not in timed
    ]
    for name, ratio in sorted(timed.items(), key=lambda each: -each[1]):
        before, after = (statistics.median(each) for each in zip(*times[name], strict=True))
        found.append({"program": name, "before_ms": before, "after_ms": after, "ratio": ratio})
    return found


def main(
    before: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A checkout of attnmesh.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Programs whose name contains this. Repeatable.")
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option("--except", help="Leave out programs whose name contains this. Repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times each program is timed in its processes.")] = 5,
    builds: Annotated[int, typer.Option(min=1, help="How often new processes build and time each program.")] = 3,
    processes: Annotated[int, typer.Option(min=1, help="Processes of each checkout, which build programs.")] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Start no program after this time.")] = 600.0,
    device: MeasuredDeviceOption = None,
    json: JsonOption = None,
) -> None:
    """Compare the speed of another checkout of attnmesh with this one."""
    if not (before / "src" / "attnmesh").is_dir():
        raise typer.BadParameter(f"has no src/attnmesh: {before}", param_hint="BEFORE")
    chosen = default_device(device)
    every = programs(chosen)
    names = [
        name
        for name in every
        if (not only or any(part in name for part in only)) and not any(part in name for part in leave_out or ())
    ]
    if not names:
        raise typer.BadParameter(f"leave none of: {'; '.join(every)}", param_hint="--only and --except")
    how = {"rounds": rounds, "builds": builds, "processes": processes}
    measured = compare(before.resolve(), chosen, names, **how, seconds=seconds)
    found = publish("before_after", chosen, measured, json)
    for row in (row for section in found.values() for row in section):
        if isinstance(row["ratio"], str) or row["ratio"] > _MOST_SLOWER:
            raise typer.Exit(1)


app = make_app(main)

if __name__ == "__main__":
    app()
