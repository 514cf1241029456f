"""Recurrent layers on a GPU: kernels against those of flash-linear-attention and Mamba, their error, and one rank of 8.

Peers are measured where they can be imported (`fla` and `mamba_ssm`, each with einops). Their kernels tune themselves:
processes of their own compile everything first, side by side.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import attnmesh as am
from attnmesh.calibration.timing import interleaved, queued
from attnmesh.ops.recurrent import kernels
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.testing.errors import relative_error
from benchmarks.common import JsonOption, LengthsOption, make_app, publish
from benchmarks.one_rank import OneRankComm
from benchmarks.timers import host_ms

DEVICE = "cuda"
LENGTH, RANKS, WARM_LENGTH, EXACT_LENGTH = 32 * 1024, 8, 2048, 1024
Step = Callable[[], Tensor]


def delta_rule(length: int) -> am.recurrent.GatedDeltaRule:
    """16 key heads and 32 value heads of 128, as in Qwen3-Next; every tensor is [B, S, H, D] in memory."""
    q, k = (F.normalize(torch.randn(1, length, 16, 128, device=DEVICE), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(1, length, 32, 128, device=DEVICE).bfloat16()
    g, beta = F.logsigmoid(torch.randn(1, length, 32, device=DEVICE) + 3), torch.rand(1, length, 32, device=DEVICE)
    return am.recurrent.GatedDeltaRule(*(x.transpose(1, 2) for x in (q, k, v, g, beta.bfloat16())))


def mamba2(length: int) -> am.recurrent.Mamba2:
    """64 heads of 64 with a state of 128 and one group."""
    x = torch.randn(1, length, 64, 64, device=DEVICE).bfloat16()
    dt = F.softplus(torch.randn(1, length, 64, device=DEVICE) - 2)
    B, C = torch.randn(2, 1, length, 1, 128, device=DEVICE).bfloat16()
    A = -torch.empty(64, device=DEVICE).uniform_(1, 16)
    x, dt, B, C = (y.transpose(1, 2) for y in (x, dt, B, C))
    return am.recurrent.Mamba2(x, dt, A, B, C)


LAYERS: dict[str, Callable[[int], RecurrentLayer]] = {"gated delta rule": delta_rule, "mamba2": mamba2}


def ours(layer: RecurrentLayer, backend: Any = "triton") -> Callable[[], Tensor]:
    return lambda: am.recurrent.scan(layer, backend=backend)


def fla(layer: RecurrentLayer) -> Callable[[], Tensor]:
    """flash-linear-attention. Its backward refuses Triton before 3.7.1 on Hopper, where it is wrong: timed anyway."""
    import fla.ops.common.chunk_o as chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True
    if isinstance(layer, am.recurrent.GatedDeltaRule):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k, v, g, beta = (x.transpose(1, 2) for x in layer._tensors().values())
        return lambda: chunk_gated_delta_rule(q, k, v, g, beta)[0].transpose(1, 2)
    from fla.ops.simple_gla import chunk_simple_gla

    x, dt, A, B, C = (y.transpose(1, 2) if y.ndim > 1 else y for y in layer._tensors().values())
    heads = x.shape[2]

    def run() -> Tensor:
        q, k = (y.expand(-1, -1, heads, -1) for y in (C, B))
        v = (dt[..., None] * x).to(x.dtype)
        return chunk_simple_gla(q, k, v, dt * A, scale=1.0)[0].transpose(1, 2)

    return run


def mamba(layer: RecurrentLayer) -> Callable[[], Tensor]:
    """The Triton kernels of mamba_ssm, in chunks of 256."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, dt, A, B, C = (y.transpose(1, 2) if y.ndim > 1 else y for y in layer._tensors().values())
    return lambda: mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=256).transpose(1, 2)


PEERS = {"gated delta rule": {"fla": fla}, "mamba2": {"fla": fla, "mamba_ssm": mamba}}
FULL = ("forward", "forward and backward")


def with_gradients(layer: RecurrentLayer) -> RecurrentLayer:
    return replace(layer, **{name: x.detach().requires_grad_() for name, x in layer._tensors().items()})


def step(layer: RecurrentLayer, make: Callable[[RecurrentLayer], Callable[[], Tensor]], what: str) -> Step:
    """One of `FULL`; a backward returns the gradient of the first input."""
    if what == "forward":
        run = make(layer)

        def forward() -> Tensor:
            with torch.no_grad():
                return run()

        return forward
    leaves = with_gradients(layer)
    run, inputs = make(leaves), list(leaves._tensors().values())
    grad = torch.randn_like(getattr(layer, layer._OUTPUT))

    def backward() -> Tensor:
        return torch.autograd.grad(run(), inputs, grad)[0]

    return backward


def implementations(kind: str) -> dict[str, Callable[[RecurrentLayer], Callable[[], Tensor]]]:
    found = {name: make for name, make in PEERS[kind].items() if importlib.util.find_spec(name) is not None}
    return {"attnmesh": ours, **found}


def compile_first(kind: str, name: str, what: str) -> None:
    """In a process of its own: compile and tune what this process will time."""
    step(LAYERS[kind](WARM_LENGTH), implementations(kind)[name], what)()
    torch.cuda.synchronize()


def compiled(seconds: float) -> dict[str, float | str]:
    """Seconds until everything was compiled."""
    context, begin = multiprocessing.get_context("spawn"), time.perf_counter()
    processes = {
        (kind, name, what): context.Process(target=compile_first, args=(kind, name, what), daemon=True)
        for kind in LAYERS
        for name in implementations(kind)
        for what in FULL
    }
    for process in processes.values():
        process.start()
    done: dict[str, float | str] = {}
    for (kind, name, what), process in processes.items():
        process.join(max(0.0, seconds - (time.perf_counter() - begin)))
        state = "not ready" if process.is_alive() else f"exit {process.exitcode}"
        done[f"{kind}, {name}, {what}"] = time.perf_counter() - begin if process.exitcode == 0 else state
        if process.is_alive():
            process.terminate()
    return done


def attempt(run: Callable[[], Any]) -> Any:
    """The result, or the error in words: a peer that fails leaves the others their turn."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"


def errors(kind: str) -> list[dict[str, Any]]:
    """The relative error of the output and of every gradient against float64."""
    torch.manual_seed(0)
    layer = LAYERS[kind](EXACT_LENGTH)
    exact = replace(layer, **{name: x.double() for name, x in layer._tensors().items()})
    grad = torch.randn_like(getattr(layer, layer._OUTPUT))

    def results(layer: RecurrentLayer, make: Callable[[RecurrentLayer], Callable[[], Tensor]]) -> dict[str, Tensor]:
        leaves = with_gradients(layer)
        out = make(leaves)()
        names = leaves._tensors()
        grads = torch.autograd.grad(out, list(names.values()), grad.to(out.dtype))
        return {"out": out, **{f"d{name}": x for name, x in zip(names, grads, strict=True)}}

    truth = results(exact, lambda layer: ours(layer, "torch"))
    rows = []
    for name, make in implementations(kind).items():
        found = attempt(lambda make=make: results(layer, make))
        row = {"implementation": name}
        row |= {"error": found} if isinstance(found, str) else {
            each: f"{relative_error(x, truth[each]):.1e}" for each, x in found.items()
        }  # fmt: skip
        rows.append(row)
    return rows


def times(kind: str, length: int) -> list[dict[str, Any]]:
    """Milliseconds of every implementation: replayed in turns, called, and of the host."""
    torch.manual_seed(0)
    layer = LAYERS[kind](length)
    rows = {name: {"implementation": name} for name in implementations(kind)}
    for what in FULL:
        runs = {}
        for name, make in implementations(kind).items():
            run = step(layer, make, what)
            found = attempt(run)
            if isinstance(found, str):
                rows[name][f"{what} ms"] = found
            else:
                runs[name] = run
        failures: dict[str, str] = {}
        replayed = attempt(lambda runs=runs, failures=failures: interleaved(runs, 3, failures=failures))
        called = attempt(lambda runs=runs: queued(runs, 3))
        for name, run in runs.items():
            ms = replayed.get(name, failures.get(name)) if isinstance(replayed, dict) else replayed
            rows[name][f"{what} ms"] = round(ms, 3) if isinstance(ms, float) else ms
            rows[name][f"{what} called ms"] = round(called[name], 3) if isinstance(called, dict) else called
            rows[name][f"{what} host ms"] = attempt(lambda run=run: round(host_ms(run), 3))
    return list(rows.values())


def parts(kind: str, length: int, tiles: kernels.Tiles | None = None) -> dict[str, Callable[[], Tensor]]:
    """Every launch of a forward and a backward alone."""
    layer = LAYERS[kind](length)
    chunks: Any = layer._chunks(None, True)
    if tiles is not None:
        chunks._tiles = tiles
        chunks._chunks = kernels.cdiv(length, tiles.chunk)
    state = torch.zeros(layer.state_shape, device=DEVICE)
    grad = torch.randn_like(getattr(layer, layer._OUTPUT))
    prepared = chunks._prepare(for_gradients=True)
    states, values, out = chunks._new_states(prepared), torch.empty_like(prepared.u), torch.empty_like(grad)
    by_states, by_values, final = torch.empty_like(states), torch.empty_like(values), torch.empty_like(state)
    chunks._states(prepared, initial=state, states=states, values=values)
    chunks._state_gradients(prepared, grad, None, final, by_states, by_values)

    def prepare(for_gradients: bool) -> Tensor:
        chunks._prepared = None
        result: Tensor = chunks._prepare(for_gradients=for_gradients).u
        return result

    def states_and(result: Tensor, **into: Tensor) -> Tensor:
        chunks._states(prepared, initial=state, final=final, **into)
        return result

    def state_gradients() -> Tensor:
        chunks._state_gradients(prepared, grad, None, final, by_states, by_values)
        return final

    return {
        "prepare": lambda: prepare(False),
        "states and outputs": lambda: states_and(out, out=out),
        "segment": lambda: chunks.total().update,
        "prepare for gradients": lambda: prepare(True),
        "states": lambda: states_and(final, states=states, values=values),
        "state gradients": state_gradients,
        "gradients": lambda: chunks._gradients(prepared, grad, states, values, by_states, by_values)[0],
    }


def part_times(kind: str, length: int) -> list[dict[str, Any]]:
    failures: dict[str, str] = {}
    found = interleaved(parts(kind, length), 3, failures=failures)
    return [{"launch": name, "ms": round(ms, 3)} for name, ms in found.items()] + [
        {"launch": name, "ms": text} for name, text in failures.items()
    ]


# What `--tune` tries: the launches, and values of their tiles.
PASSES = [(columns, warps, stages) for columns, warps in ((64, 4), (32, 2), (32, 4), (16, 1)) for stages in (2, 3)]
VARIANTS: dict[str, list[kernels.Tiles]] = {
    "states and outputs": [kernels.TILES[2]._replace(columns=n, states=(w, s)) for n, w, s in PASSES],
    "states": [kernels.TILES[2]._replace(columns=n, states=(w, s)) for n, w, s in PASSES],
    "state gradients": [kernels.TILES[2]._replace(columns=n, state_gradients=(w, s)) for n, w, s in PASSES],
    "prepare": [kernels.TILES[2]._replace(prepare=(w, 1)) for w in (2, 4, 8)],
    "gradients": [kernels.TILES[2]._replace(gradients=(w, s), delta_gradients=(w, s)) for w in (4, 8) for s in (1, 2)],
}


def compile_variant(kind: str, launch: str, numbers: list[int]) -> None:
    for number in numbers:
        attempt(lambda number=number: parts(kind, 256, VARIANTS[launch][number])[launch]())


def tuned(kind: str, length: int) -> list[dict[str, Any]]:
    """Every launch with other tiles."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=compile_variant, args=(kind, launch, list(range(at, len(variants), 4))), daemon=True)
        for launch, variants in VARIANTS.items()
        for at in range(min(4, len(variants)))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    rows = []
    for launch, variants in VARIANTS.items():
        for tiles in variants:
            ms = attempt(lambda tiles=tiles, launch=launch: interleaved({0: parts(kind, length, tiles)[launch]}, 1)[0])
            row = {"launch": launch, "tiles": str(tuple(tiles)), "ms": ms}
            print(row, flush=True)
            rows.append(row)
            gc.collect()
    return rows


def one_rank(kind: str, length: int) -> list[dict[str, Any]]:
    """The share of one rank of 8, with the scan but without what is sent, against an eighth of one device's time."""
    whole = LAYERS[kind](length)
    rank, rows = 3, []
    cp = am.ContextParallel(OneRankComm(rank, RANKS, copies=True), layout=am.Contiguous())
    share = whole.rows(range(rank * length // RANKS, (rank + 1) * length // RANKS))
    for what in FULL:
        runs = {
            "one device": step(whole, ours, what),
            "one rank": step(share, lambda layer: lambda: cp.recurrent(layer, length=length), what),
        }
        found = attempt(lambda runs=runs: queued(runs, 3))
        row: dict[str, Any] = {"what": what}
        if isinstance(found, str):
            row["error"] = found
        else:
            row |= {f"{name} ms": round(ms, 3) for name, ms in found.items()}
            row["efficiency"] = round(found["one device"] / RANKS / found["one rank"], 3)
        rows.append(row)
    return rows


def main(
    length: LengthsOption = None, tune: Annotated[bool, typer.Option(help="Time other tiles instead.")] = False,
    peers: Annotated[bool, typer.Option(help="Time peers that can be imported.")] = True, json: JsonOption = None,
) -> None:  # fmt: skip
    """Time recurrent layers on a GPU."""
    if not peers:
        for each in PEERS.values():
            each.clear()
    lengths = length or [LENGTH]

    def sections() -> Iterator[tuple[str, list[dict[str, Any]]]]:
        if tune:
            for kind in LAYERS:
                yield f"{kind}, other tiles", tuned(kind, lengths[0])
            return
        yield "compiled after seconds", [compiled(90)]
        for kind in LAYERS:
            yield f"{kind}, error at {EXACT_LENGTH} positions", errors(kind)
            yield f"{kind}, launches at {lengths[0]}", part_times(kind, lengths[0])
        for n in lengths:
            for kind in LAYERS:
                yield f"{kind} at {n}", times(kind, n)
                gc.collect()
        for kind in LAYERS:
            yield f"{kind}, one rank of {RANKS} at {RANKS * lengths[0]}", one_rank(kind, RANKS * lengths[0])

    publish("recurrent", DEVICE, sections(), json)
    sys.stdout.flush()


app = make_app(main)

if __name__ == "__main__":
    app()
