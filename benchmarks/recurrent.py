"""Recurrent layers on a GPU: kernels against those of flash-linear-attention and Mamba, their error, and one rank of 8.

Peers are measured where they can be imported (`fla` and `mamba_ssm`, each with einops). `--compile` compiles everything
in processes side by side, for a run that follows; with TRITON_CACHE_AUTOTUNING=1 it also keeps what peers have tuned.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import attnmesh as am
from attnmesh.calibration.timing import interleaved, queued
from attnmesh.cli import output
from attnmesh.ops.recurrent import kernels
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.testing.errors import relative_error
from benchmarks.common import JsonOption, make_app
from benchmarks.one_rank import OneRankComm
from benchmarks.timers import host_ms

DEVICE = "cuda"
LENGTH, RANKS, EXACT_LENGTH, ROUNDS = 32 * 1024, 8, 1024, 3
Step = Callable[[], Tensor]
Row = dict[str, Any]


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
    """In a process of its own: compile, and tune where the implementation does that, what is timed later."""
    step(LAYERS[kind](LENGTH), implementations(kind)[name], what)()
    torch.cuda.synchronize()


def compile_variant(kind: str, launch: str, number: int) -> None:
    attempt(parts(kind, 256, VARIANTS[launch][number])[launch])


def compiled(seconds: float) -> Iterator[Row]:
    """Compile everything side by side; what is not ready in time is compiled when it is first called."""
    context, begin = multiprocessing.get_context("spawn"), time.perf_counter()
    jobs: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (compile_first, (kind, name, what))
        for kind in LAYERS
        for name in implementations(kind)
        for what in (FULL if name == "attnmesh" else FULL[:1])
    ]
    jobs += [
        (compile_variant, (kind, launch, number))
        for kind in list(LAYERS)[:1]
        for launch, tiles in VARIANTS.items()
        for number in range(len(tiles))
    ]
    waiting = {args: context.Process(target=target, args=args, daemon=True) for target, args in jobs}
    for process in waiting.values():
        process.start()
    while waiting and time.perf_counter() - begin < seconds:
        for args in [args for args, process in waiting.items() if not process.is_alive()]:
            exit_code, after = waiting.pop(args).exitcode, round(time.perf_counter() - begin, 1)
            yield {"compiled": ", ".join(map(str, args)), "seconds": after, "exit": exit_code}
        time.sleep(0.1)
    for args, process in waiting.items():
        process.terminate()
        yield {"compiled": ", ".join(map(str, args)), "seconds": "not ready"}


def attempt(run: Callable[[], Any]) -> Any:
    """The result, or the error in words: what fails leaves the others their turn."""
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"


def errors(kind: str) -> Iterator[Row]:
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
        return {"out": out.detach(), **{f"d{name}": x for name, x in zip(names, grads, strict=True)}}

    truth = results(exact, lambda layer: ours(layer, "torch"))
    found = attempt(lambda: results(layer, ours))
    row: Row = {"error": kind, "length": EXACT_LENGTH}
    yield row | (
        {"failed": found}
        if isinstance(found, str)
        else {each: f"{relative_error(x, truth[each]):.1e}" for each, x in found.items()}
    )


def milliseconds(timer: Callable[..., dict[str, float]], run: Step) -> Any:
    found = attempt(lambda: timer({"": run}, ROUNDS)[""])
    return round(found, 3) if isinstance(found, float) else found


def times(kind: str, name: str, length: int, whats: Sequence[str] = FULL) -> Iterator[Row]:
    """Milliseconds of an implementation: replayed as a graph, called, and of the host."""
    torch.manual_seed(0)
    layer = LAYERS[kind](length)
    for what in whats:
        made = attempt(lambda what=what: step(layer, implementations(kind)[name], what))
        row: Row = {"layer": kind, "length": length, "implementation": name, "what": what}
        if isinstance(made, str):
            yield row | {"failed": made}
            continue
        begin = time.perf_counter()
        first = attempt(lambda made=made: made().isfinite().all().item())
        row |= {"first call s": round(time.perf_counter() - begin, 2), "finite": first}
        if not isinstance(first, str):
            row |= {"replayed ms": milliseconds(interleaved, made), "called ms": milliseconds(queued, made)}
            row["host ms"] = attempt(lambda made=made: round(host_ms(made), 3))
        yield row
        gc.collect()


def parts(kind: str, length: int, tiles: kernels.Tiles | None = None) -> dict[str, Step]:
    """Every launch of a forward and a backward alone."""
    layer = LAYERS[kind](length)
    chunks: Any = layer._chunks(None, True)
    if tiles is not None:
        chunks._tiles = tiles
    state = torch.zeros(layer.state_shape, device=DEVICE)
    grad = torch.randn_like(getattr(layer, layer._OUTPUT))
    prepared = chunks._prepare(for_gradients=True)
    states, values, out = chunks._new_states(prepared), torch.zeros_like(prepared.u), torch.empty_like(grad)
    states.zero_()
    by_states, by_values, final = torch.zeros_like(states), torch.zeros_like(values), torch.empty_like(state)

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


def part_times(kind: str, length: int) -> Iterator[Row]:
    for name, run in parts(kind, length).items():
        yield {"layer": kind, "length": length, "launch": name, "ms": milliseconds(interleaved, run)}


# Other tiles, which `--tune` times.
_TILES = kernels.TILES[2]
_PASSES = [_TILES._replace(columns=n, states=(w, s), state_gradients=(w, s)) for n, w, s in ((64, 4, 2), (32, 4, 3))]
VARIANTS: dict[str, list[kernels.Tiles]] = {
    "states and outputs": _PASSES,
    "state gradients": _PASSES,
    "prepare": [_TILES._replace(prepare=(8, 1))],
    "gradients": [_TILES._replace(gradients=(w, s), delta_gradients=(w, s)) for w, s in ((8, 2), (8, 1), (4, 1))],
}


def tuned(kind: str, length: int) -> Iterator[Row]:
    for launch, variants in VARIANTS.items():
        for tiles in variants:
            ms = attempt(lambda tiles=tiles, launch=launch: parts(kind, length, tiles)[launch])
            ms = ms if isinstance(ms, str) else milliseconds(interleaved, ms)
            yield {"layer": kind, "launch": launch, "tiles": tuple(tiles), "ms": ms}
            gc.collect()


def one_rank(kind: str, length: int) -> Iterator[Row]:
    """The share of one rank of 8, with the scan but without what is sent, against an eighth of one device's time."""
    whole = LAYERS[kind](length)
    rank = 3
    cp = am.ContextParallel(OneRankComm(rank, RANKS, copies=True), layout=am.Contiguous())
    share = whole.rows(range(rank * length // RANKS, (rank + 1) * length // RANKS))
    for what in FULL:
        ms = {
            "one device": milliseconds(queued, step(whole, ours, what)),
            "one rank": milliseconds(
                queued, step(share, lambda layer: lambda: cp.recurrent(layer, length=length), what)
            ),
        }
        row: Row = {"layer": kind, "length": length, "ranks": RANKS, "what": what, **ms}
        if all(isinstance(each, float) for each in ms.values()):
            row["efficiency"] = round(ms["one device"] / RANKS / ms["one rank"], 3)
        yield row
        gc.collect()


def measured(length: int, tune: bool) -> Iterator[Row]:
    """Everything, this library first."""
    for kind in LAYERS:
        yield from errors(kind)
        yield from times(kind, "attnmesh", length)
    for kind in LAYERS:
        yield from part_times(kind, length)
    yield from one_rank("gated delta rule", RANKS * length)
    for kind in LAYERS:
        for name in PEERS[kind]:
            if name in implementations(kind):
                yield from times(kind, name, length, FULL[:1])
    if tune:
        yield from tuned("gated delta rule", length)
    yield from one_rank("mamba2", RANKS * length)
    for kind in LAYERS:
        for name in PEERS[kind]:
            if name in implementations(kind):
                yield from times(kind, name, length, FULL[1:])


def main(
    length: Annotated[int, typer.Option(help="Positions.")] = LENGTH,
    compile_only: Annotated[float, typer.Option("--compile", help="Only compile, for so many seconds.")] = 0.0,
    tune: Annotated[bool, typer.Option(help="Time other tiles, too.")] = False, json: JsonOption = None,
) -> None:  # fmt: skip
    """Time recurrent layers on a GPU. Every row is printed as soon as it is measured."""
    machine, rows = output.machine(DEVICE), []
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    for row in compiled(compile_only) if compile_only else measured(length, tune):
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
        if json is not None:
            output.save(json, {"benchmark": "recurrent", "machine": machine, "sections": {"recurrent layers": rows}})


app = make_app(main)

if __name__ == "__main__":
    app()
