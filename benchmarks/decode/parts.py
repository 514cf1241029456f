"""The parts of the decode benchmark: what each is called, needs compiled, and measures."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from itertools import product

from attnmesh.calibration.timing import measured_floor
from attnmesh.cli.output import Rows
from attnmesh.ops.storage import STORAGES
from benchmarks.decode import cases as given
from benchmarks.decode.accuracy import measure_storage_accuracy
from benchmarks.decode.cases import Case
from benchmarks.decode.compile import compile_kernels
from benchmarks.decode.cpu import measure_cpu_shapes
from benchmarks.decode.measure import (
    measure_lengths,
    measure_shapes,
    measure_splits,
    measure_storages,
    measure_tokens,
    peer_rows,
    speed_rows,
)


class Part(enum.StrEnum):
    """What to measure."""

    SHAPES = "shapes"
    PEERS = "peers"
    GRIDS = "grids"
    STORAGE = "storage"
    TOKENS = "tokens"
    SPLITS = "splits"
    ACCURACY = "accuracy"


ON_CPU = (Part.SHAPES, Part.ACCURACY)
_METHOD = "bf16, blocks of 16 in random order, L2 flushed, graph replays"
FLOOR = "what the clock reads with an empty graph (in every figure), and for a plain sum over 1 GiB"
SHAPES = f"decode at a server's shapes ({_METHOD}); times_cudnn: its time on a contiguous cache over ours"
PEERS = (
    "the same run, microseconds: ours paged and contiguous; peers contiguous, but JAX (paged, its own process, "
    "wall clock over 20 chained calls, L2 warm)"
)
GRID = "8 query heads on 1 kv head, against cache length"
LLAMA = "Llama-3.1-8B's heads at batch 1, divided among 1, 2, 4 and 8 devices, against cache length (bf16)"
STORAGE = "storage types; tb_per_s of real bytes"
TOKENS = "several new tokens a sequence (bf16); times_one: against one token"
SPLITS = "the most splits a sequence and head may have (bf16); times_best: against the fastest"
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
    Part.SPLITS: [Case(shape, max_splits=most) for shape, most in product(given.SPLIT_SHAPES, given.MOST_SPLITS)],
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
        (Part.SPLITS, SPLITS, lambda: measure_splits(given.SPLIT_SHAPES, given.MOST_SPLITS)),
        (Part.ACCURACY, ACCURACY, lambda: _accuracy("cuda")),
    ]
    for part, title, measure in rest:
        if part in parts:
            yield title, measure()


def _accuracy(device: str) -> Rows:
    return measure_storage_accuracy(device, given.ACCURACY_SHAPE, STORAGES)
