"""Kernels compiled before anything is measured, by many processes at once.

A kernel takes seconds to compile and the benchmark needs dozens. Each process runs its share of the cases once, which
leaves their kernels in Triton's cache on disk, where the measuring process finds them.
"""

from __future__ import annotations

import enum
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby, product

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.calibration.timing import Run, cold
from attnmesh.cli.output import Rows
from attnmesh.ops.decode.api import paged_decode_attention
from attnmesh.ops.storage import PLAIN, STORAGES, quantize
from benchmarks.decode import cases as given
from benchmarks.decode.cases import BLOCK_SIZE, Case, Shape, backend_on, kernel_key, make_run, random_case
from benchmarks.decode.peers import Cell, check_result, jax_paged, plain_fits, plain_softmax, sdpa, torch_peers
from benchmarks.timers import measured_floor, wall

_MOST_PROCESSES = 12  # each holds a context and a cache on the device


def compile_kernels(cases: Iterable[Case], device: str) -> None:
    """Run every case once, in processes. What fails here is left to the measurement, which will say so."""
    shares = group_by_kernel(cases)
    workers = min(len(shares), _MOST_PROCESSES, os.cpu_count() or 1)
    if not workers:
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as processes:
        for running in [processes.submit(run_once, share, device) for share in shares]:
            running.exception()


def group_by_kernel(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that share kernels together: two processes at once would both compile them."""
    return [list(group) for _, group in groupby(sorted(set(cases), key=kernel_key), key=kernel_key)]


def run_once(cases: Sequence[Case], device: str) -> None:
    """One process's work."""
    for case in cases:
        make_run(case, device)()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


OURS = ("paged", "contiguous")
PEER_COLUMNS = (*OURS, "cuDNN", "FlashAttention-2", "FlexDecoding", "plain softmax", "JAX Pallas")
_GRID_ROUNDS = 7  # rounds of a grid, whose curves show what is noise


def measure_shapes(shapes: Sequence[Shape], *, every_peer: bool) -> list[dict[str, Cell]]:
    """Microseconds by program at every shape: ours, cuDNN, and the other peers if they are wanted."""
    jax = jax_paged(shapes) if every_peer else [""] * len(shapes)
    times = []
    for shape, cell in zip(shapes, jax, strict=True):
        times.append(_side_by_side(shape, every_peer) | ({"JAX Pallas": cell} if every_peer else {}))
    return times


def _side_by_side(shape: Shape, every_peer: bool) -> dict[str, Cell]:
    paged = random_case(Case(shape), "cuda")
    given = paged.to_contiguous()
    expected = plain_softmax(given.q.float(), given.k.float(), given.v.float())
    peers: dict[str, Run] = torch_peers(given) if every_peer else {"cuDNN": partial(sdpa, "cuDNN", given)}
    runs: dict[str, Run] = {"paged": paged.decode, "contiguous": given.decode, **peers}
    failures: dict[str, str] = {}
    times = cold({name: check_result(run, expected) for name, run in runs.items()}, failures=failures)
    for name in OURS:
        if name in failures:
            raise RuntimeError(f"{name} decode at {shape}: {failures[name]}")
    return {**times, **failures}


def speed_rows(shapes: Sequence[Shape], times: Sequence[dict[str, Cell]], read_tb_per_s: float) -> Rows:
    """How fast ours is, paged: against the device and against cuDNN."""
    rows: Rows = []
    for shape, found in zip(shapes, times, strict=True):
        us, peer = _number(found["paged"]), found["cuDNN"]
        share = shape.cache_bytes("bf16") / us / 1e6 / read_tb_per_s
        over = peer / us if isinstance(peer, float) else peer
        rows.append({**shape._asdict(), **shape.speeds(us), "share_of_read_bandwidth": share, "cudnn_over_ours": over})
    return rows


def peer_rows(shapes: Sequence[Shape], times: Sequence[dict[str, Cell]]) -> Rows:
    """Microseconds of every program; where there are none, the reason."""
    return [
        {**shape._asdict(), **{name: found.get(name, "not run") for name in PEER_COLUMNS}}
        for shape, found in zip(shapes, times, strict=True)
    ]


def measure_lengths(shapes: Iterable[Shape], storages: Sequence[str]) -> Rows:
    """Speed against the length of the cache; for bf16 also the speed-up over the plain softmax computation."""
    return [_at_length(shape, storage) for storage in storages for shape in shapes]


def _at_length(shape: Shape, storage: str) -> dict[str, object]:
    paged = random_case(Case(shape, storage), "cuda")
    runs: dict[str, Run] = {"ours": paged.decode}
    if storage == "bf16" and plain_fits(shape.length):
        given = paged.to_contiguous()
        runs["plain"] = partial(plain_softmax, given.q, given.k, given.v)
    times = cold(runs, rounds=_GRID_ROUNDS)
    speeds = shape.speeds(times["ours"], storage)
    over = times["plain"] / times["ours"] if "plain" in times else "not run"
    return {"storage": storage, **shape._asdict(), **speeds, "speed_up_over_plain": over}


def measure_storages(shapes: Iterable[Shape], storages: Sequence[str]) -> Rows:
    """Time and achieved bytes per second of every storage type, and how much faster than bf16 it is."""
    rows: Rows = []
    for shape in shapes:
        times = cold({storage: make_run(Case(shape, storage), "cuda") for storage in storages})
        for storage, us in times.items():
            speeds = shape.speeds(us, storage)
            rows.append({**shape._asdict(), "storage": storage, **speeds, "speed_up_over_bf16": times["bf16"] / us})
    return rows


def measure_tokens(shapes: Iterable[Shape], tokens: Sequence[int]) -> Rows:
    """Time of several new tokens per sequence against that of one."""
    rows: Rows = []
    for shape in shapes:
        times = cold({count: make_run(Case(shape, tokens=count), "cuda") for count in tokens})
        rows += [{**shape._asdict(), "tokens": n, "us": us, "over_one_token": us / times[1]} for n, us in times.items()]
    return rows


def measure_splits(shapes: Iterable[Shape], max_splits_values: Sequence[int | None]) -> Rows:
    """Time against maximum splits per sequence and head: where more stop helping."""
    rows: Rows = []
    for shape in shapes:
        paged = random_case(Case(shape), "cuda")
        times = cold({most: partial(paged.decode, most) for most in max_splits_values})
        best = min(times.values())
        rows += [
            {**shape._asdict(), "max_splits": most or "free", "us": us, "over_fastest": us / best}
            for most, us in times.items()
        ]
    return rows


def _number(cell: Cell) -> float:
    if isinstance(cell, str):
        raise ValueError(f"a time was expected, got {cell!r}")
    return cell


def measure_cpu_shapes(shapes: Sequence[Shape], rounds: int = 7) -> list[dict[str, object]]:
    """Ours over torch's time, on a contiguous cache and on shuffled blocks of 16; GB/s of keys and values."""
    rows: list[dict[str, object]] = []
    for shape in shapes:
        paged = random_case(Case(shape, "fp32"), "cpu")
        given = paged.to_contiguous()
        sdpa = partial(F.scaled_dot_product_attention, given.q, given.k, given.v, enable_gqa=True)
        expected = sdpa()
        for ours in (given.decode, paged.decode):
            check_result(ours, expected)()
        times = wall({"torch": sdpa, "contiguous": given.decode, "paged": paged.decode}, rounds)
        gigabytes = shape.cache_bytes("fp32") / 1e9
        rows.append(
            {
                **shape._asdict(),
                "torch_ms": 1e3 * times["torch"],
                "contiguous_over_torch": times["contiguous"] / times["torch"],
                "paged_over_torch": times["paged"] / times["torch"],
                **{f"{name}_gb_per_s": gigabytes / seconds for name, seconds in times.items()},
            }
        )
    return rows


_OUTLIERS = 3  # channels of every head
_LOUDER = 20.0


def measure_storage_accuracy(device: str, shape: Shape, storages: Sequence[str]) -> list[dict[str, object]]:
    """Relative RMS errors of out and lse by data and storage type, seed 0.

    Queries are exact in bf16, so that none of the error is theirs; out is rounded to their dtype, which alone is 1.7e-3
    in bf16. With outliers, three channels of every kv head are twenty times as large, in keys and in values, which is
    what a scale shared by many values suffers from.
    """
    generator = torch.Generator().manual_seed(0)
    batch, q_heads, kv_heads, length, head_dim = shape
    slots = length // BLOCK_SIZE

    def pool() -> Tensor:
        return torch.randn(batch * slots, BLOCK_SIZE, kv_heads, head_dim, generator=generator).to(device)

    q = torch.randn(batch, q_heads, 1, head_dim, generator=generator).bfloat16().to(device)
    k, v = pool(), pool()
    loud = torch.ones(kv_heads, head_dim, device=device)
    for head in range(kv_heads):
        loud[head, torch.randperm(head_dim, generator=generator)[:_OUTLIERS].to(device)] = _LOUDER
    table = torch.randperm(batch * slots, generator=generator).view(batch, slots).int().to(device)
    last = torch.full((batch,), length - 1, dtype=torch.int32, device=device)

    rows: list[dict[str, object]] = []
    for data, keys, values in (("normal", k, v), ("outlier channels", k * loud, v * loud)):
        exact = paged_decode_attention(
            q.double(), keys.double(), values.double(), table, cur_pos=last, return_lse=True, backend="reference"
        )
        for storage in storages:
            dtype = PLAIN.get(storage, torch.bfloat16)
            k_pool, v_pool = (quantize(x, storage, head_axis=2) for x in (keys, values))
            found = paged_decode_attention(
                q.to(dtype), k_pool, v_pool, table, cur_pos=last, return_lse=True, backend=backend_on(q)
            )
            out, lse = (float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
            rows.append({"data": data, "storage": storage, "queries": str(dtype)[6:], "out": out, "lse": lse})
    return rows


class Part(enum.StrEnum):
    """What to measure."""

    SHAPES = "shapes"
    PEERS = "peers"
    GRIDS = "grids"
    STORAGE = "storage"
    TOKENS = "tokens"
    SPLITS = "splits"
    ACCURACY = "accuracy"


CPU_PARTS = (Part.SHAPES, Part.ACCURACY)
_METHOD = "bf16, blocks of 16 in random order, L2 flushed, graph replays"
FLOOR = "time of an empty graph (included in every figure), and bandwidth of a sum over 1 GiB"
SHAPES = f"decode at serving shapes ({_METHOD}); cudnn_over_ours: cuDNN's time on a contiguous cache over ours"
PEERS = (
    "the same run, microseconds: ours paged and contiguous; peers contiguous, but JAX (paged, its own process, "
    "wall clock over 20 chained calls, L2 warm)"
)
GRID = "8 query heads on 1 kv head, against cache length"
LLAMA = "Llama-3.1-8B's heads at batch 1, divided among 1, 2, 4 and 8 devices, against cache length (bf16)"
STORAGE = "storage types; tb_per_s of real bytes"
TOKENS = "several new tokens per sequence (bf16); over_one_token: over the time of one token"
SPLITS = "maximum splits per sequence and head (bf16); over_fastest: over the fastest"
ACCURACY = f"relative RMS error against the unquantized cache in float64, shape {tuple(given.ACCURACY_SHAPE)}"
CPU = "decode on the CPU against torch's scaled_dot_product_attention with enable_gqa (float32, one run, in turns)"

_KERNELS: dict[Part, list[Case]] = {
    Part.SHAPES: [Case(shape, paged=paged) for shape, paged in product(given.SHAPES, (True, False))],
    Part.PEERS: [Case(shape, paged=paged) for shape, paged in product(given.SHAPES, (True, False))],
    Part.GRIDS: [
        *(Case(shape, storage) for shape, storage in product(given.GRID, given.GRID_STORAGES)),
        *(Case(shape) for shape in given.LLAMA),
    ],
    Part.STORAGE: [Case(shape, storage) for shape, storage in product(given.STORAGE_SHAPES, given.STORED_AS)],
    Part.TOKENS: [Case(shape, tokens=count) for shape, count in product(given.TOKEN_SHAPES, given.TOKENS)],
    Part.SPLITS: [Case(shape, max_splits=most) for shape, most in product(given.SPLIT_SHAPES, given.MAX_SPLITS)],
    Part.ACCURACY: [Case(given.ACCURACY_SHAPE, storage) for storage in STORAGES],
}


def cases(parts: Collection[Part]) -> list[Case]:
    """Every call of ours that these parts make on a GPU."""
    return [case for part in Part if part in parts for case in _KERNELS[part]]


def measure_decode(device: str, parts: Collection[Part]) -> Iterator[tuple[str, Rows]]:
    """A title and its rows at a time, as they are known."""
    if device == "cuda":
        yield from _measure_cuda(parts)
        return
    if Part.SHAPES in parts:
        yield CPU, measure_cpu_shapes(given.CPU_SHAPES)
    if Part.ACCURACY in parts:
        yield ACCURACY, _accuracy("cpu")


def _measure_cuda(parts: Collection[Part]) -> Iterator[tuple[str, Rows]]:
    compile_kernels(cases(parts), "cuda")
    floor = measured_floor()
    yield FLOOR, [dict(floor)]
    if Part.SHAPES in parts or Part.PEERS in parts:
        times = measure_shapes(given.SHAPES, every_peer=Part.PEERS in parts)
        yield SHAPES, speed_rows(given.SHAPES, times, floor["read_tb_per_s"])
        if Part.PEERS in parts:
            yield PEERS, peer_rows(given.SHAPES, times)
    rest: list[tuple[Part, str, Callable[[], Rows]]] = [
        (Part.GRIDS, GRID, lambda: measure_lengths(given.GRID, given.GRID_STORAGES)),
        (Part.GRIDS, LLAMA, lambda: measure_lengths(given.LLAMA, ("bf16",))),
        (Part.STORAGE, STORAGE, lambda: measure_storages(given.STORAGE_SHAPES, given.STORED_AS)),
        (Part.TOKENS, TOKENS, lambda: measure_tokens(given.TOKEN_SHAPES, given.TOKENS)),
        (Part.SPLITS, SPLITS, lambda: measure_splits(given.SPLIT_SHAPES, given.MAX_SPLITS)),
        (Part.ACCURACY, ACCURACY, lambda: _accuracy("cuda")),
    ]
    for part, title, measure in rest:
        if part in parts:
            yield title, measure()


def _accuracy(device: str) -> Rows:
    return measure_storage_accuracy(device, given.ACCURACY_SHAPE, STORAGES)
