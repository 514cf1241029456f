"""Decode on a GPU, part by part: at a server's shapes beside its peers, against length, storage, tokens and splits.

Every time is `cold`'s: a graph between two events, the L2 flushed before it, the median of some rounds, nothing
subtracted. Bytes are those of keys and values as they are stored; operations are 4 x B x L x D x Hq.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from attnmesh.calibration.timing import Run, cold
from attnmesh.cli.output import Rows
from benchmarks.decode.cases import Case, Shape
from benchmarks.decode.inputs import drawn, program
from benchmarks.decode.peers import Cell, checked, jax_paged, plain_softmax, runs_plain, sdpa, torch_peers

OURS = ("paged", "contiguous")
PEER_COLUMNS = (*OURS, "cuDNN", "FlashAttention-2", "FlexDecoding", "plain softmax", "JAX Pallas")
_FEW = 7  # rounds of a grid, whose curves show what is noise


def measure_shapes(shapes: Sequence[Shape], *, every_peer: bool) -> list[dict[str, Cell]]:
    """Microseconds by program at every shape: ours, cuDNN, and the other peers if they are wanted."""
    jax = jax_paged(shapes) if every_peer else [""] * len(shapes)
    times = []
    for shape, cell in zip(shapes, jax, strict=True):
        times.append(_side_by_side(shape, every_peer) | ({"JAX Pallas": cell} if every_peer else {}))
    return times


def _side_by_side(shape: Shape, every_peer: bool) -> dict[str, Cell]:
    paged = drawn(Case(shape), "cuda")
    given = paged.gathered()
    expected = plain_softmax(given.q.float(), given.k.float(), given.v.float())
    peers: dict[str, Run] = torch_peers(given) if every_peer else {"cuDNN": partial(sdpa, "cuDNN", given)}
    runs: dict[str, Run] = {"paged": paged.attended, "contiguous": given.attended, **peers}
    failures: dict[str, str] = {}
    times = cold({name: checked(run, expected) for name, run in runs.items()}, failures=failures)
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
        rows.append({**shape._asdict(), **shape.speeds(us), "of_read": share, "times_cudnn": over})
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
    paged = drawn(Case(shape, storage), "cuda")
    runs: dict[str, Run] = {"ours": paged.attended}
    if storage == "bf16" and runs_plain(shape.length):
        given = paged.gathered()
        runs["plain"] = partial(plain_softmax, given.q, given.k, given.v)
    times = cold(runs, rounds=_FEW)
    speeds = shape.speeds(times["ours"], storage)
    over = times["plain"] / times["ours"] if "plain" in times else "not run"
    return {"storage": storage, **shape._asdict(), **speeds, "speed_up_over_plain": over}


def measure_storages(shapes: Iterable[Shape], storages: Sequence[str]) -> Rows:
    """Time and real bytes a second of every storage type, and how much faster than bf16 it is."""
    rows: Rows = []
    for shape in shapes:
        times = cold({storage: program(Case(shape, storage), "cuda") for storage in storages})
        for storage, us in times.items():
            speeds = shape.speeds(us, storage)
            rows.append({**shape._asdict(), "storage": storage, **speeds, "speed_up_over_bf16": times["bf16"] / us})
    return rows


def measure_tokens(shapes: Iterable[Shape], tokens: Sequence[int]) -> Rows:
    """Time of several new tokens a sequence against that of one."""
    rows: Rows = []
    for shape in shapes:
        times = cold({count: program(Case(shape, tokens=count), "cuda") for count in tokens})
        rows += [{**shape._asdict(), "tokens": n, "us": us, "times_one": us / times[1]} for n, us in times.items()]
    return rows


def measure_splits(shapes: Iterable[Shape], most_splits: Sequence[int | None]) -> Rows:
    """Time against the most splits a sequence and head may have: where more stop helping."""
    rows: Rows = []
    for shape in shapes:
        paged = drawn(Case(shape), "cuda")
        times = cold({most: partial(paged.attended, most) for most in most_splits})
        best = min(times.values())
        rows += [
            {**shape._asdict(), "max_splits": most or "free", "us": us, "times_best": us / best}
            for most, us in times.items()
        ]
    return rows


def _number(cell: Cell) -> float:
    if isinstance(cell, str):
        raise ValueError(f"a time was expected, got {cell!r}")
    return cell
