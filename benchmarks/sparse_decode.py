"""`python -m benchmarks.sparse_decode`: sparse decode and the indexer's top-k from a block cache, as in DeepSeek-V3.2.

Every row is timed with a cold L2 and compared with float32 for some tokens. `bytes_gb` are the selected keys of every
token, read once (attention), or all keys of every sequence (top-k); FLOPs are 2 * heads * topk * (D + d_v) per token.
The two ways in which the kernels can attend are measured side by side; `auto` is what a call does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from attnmesh.calibration import timing
from attnmesh.cli import output
from attnmesh.cli.options import MeasuredDeviceOption, default_device
from attnmesh.cli.output import Rows
from attnmesh.ops.sparse.decode import attend, decode_call, indexer_step, select
from attnmesh.ops.sparse.paged import IndexerStep, SparseDecodeCall
from attnmesh.ops.storage import Stored, bytes_per_token, unpack_index_keys, unpack_latent
from benchmarks import timers
from benchmarks.common import JsonOption, QuickOption, make_app, publish

BLOCK, DIM, VALUES, INDEX_DIM, INDEX_HEADS = 64, 576, 512, 128, 64
CHECKED = 2  # tokens that are compared
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # of the largest error, relative to the largest value


class Case(NamedTuple):
    """A decode step: sequences of a length, each with `tokens` new tokens."""

    batch: int
    length: int
    heads: int = 128
    tokens: int = 1
    topk: int = 2048
    storage: str = "fp8_ds_mla"


class Part(enum.StrEnum):
    """What to measure."""

    ATTENTION = "attention"
    TOPK = "topk"


def cases(part: Part, device: str, quick: bool) -> list[Case]:
    """The cases of a part."""
    if device == "cpu":
        return [Case(2, 256, 4, 1, 64, storage) for storage in ("fp8_ds_mla", "plain")]
    if part is Part.TOPK:
        return [Case(batch, 131072) for batch in ((1,) if quick else (1, 8, 64))]
    if quick:
        return [Case(128, 8192), Case(1, 32768, 16)]
    shapes = [(128, 128, 1), (64, 128, 2), (16, 128, 1), (1, 128, 1), (128, 16, 1), (1, 16, 1)]
    return [
        Case(batch, 16384, heads, t, storage=kind) for kind in ("fp8_ds_mla", "plain") for batch, heads, t in shapes
    ]


def main(
    device: MeasuredDeviceOption = None,
    only: Annotated[
        list[Part] | None, typer.Option("--only", help="What to measure. Repeatable; everything by default.")
    ] = None,
    quick: QuickOption = False,
    json: JsonOption = None,
) -> None:
    """Measure sparse decode and the indexer's top-k from a block cache. Exits with status 1 if a result is wrong."""
    chosen = default_device(device)
    sections = publish("sparse_decode", chosen, measure(chosen, only or tuple(Part), quick=quick), json)
    if any(row["verdict"] != "ok" for rows in sections.values() for row in rows):
        output.console().print("WRONG results: see the verdicts above")
        raise typer.Exit(1)


def measure(device: str, parts: Collection[Part], *, quick: bool) -> Iterator[tuple[str, Rows]]:
    """Yield one section per case, as soon as it is measured."""
    for part in parts:
        for case in cases(part, device, quick):
            title = f"{part} " + ", ".join(f"{name} {value}" for name, value in case._asdict().items())
            rows = _attention(case, device) if part is Part.ATTENTION else _topk(case, device)
            yield title, rows
            if device == "cuda":
                torch.cuda.empty_cache()


def _times(runs: dict[str, Callable[[], Tensor]], device: str) -> dict[str, float]:
    """Microseconds of each run."""
    if device == "cuda":
        return timing.cold(runs)
    return {name: 1e6 * seconds for name, seconds in timers.wall(runs, rounds=1).items()}


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def random_table(case: Case, device: str) -> Tensor:
    """Blocks in random order."""
    blocks = -(-case.length // BLOCK)
    return torch.randperm(case.batch * blocks, device=device).int().view(case.batch, blocks)


def latent_pool(case: Case, device: str) -> Stored:
    """Random latents in all blocks."""
    blocks = case.batch * -(-case.length // BLOCK)
    if case.storage == "plain":
        return torch.randn(blocks, BLOCK, 1, DIM, dtype=_dtype(device), device=device)
    raw = torch.randint(0, 256, (blocks, BLOCK, 1, 656), dtype=torch.uint8, device=device)
    pool = unpack_latent(raw)
    pool.values.view(torch.uint8).bitwise_and_(0xF7)  # no NaN: not all bits of the exponent and the mantissa are set
    pool.scales.fill_(2.0**-6)
    assert pool.rope is not None
    pool.rope.copy_(torch.randn(pool.rope.shape, dtype=torch.bfloat16, device=device))
    return pool


def _attention(case: Case, device: str) -> Rows:
    q = torch.randn(case.batch, case.tokens, case.heads, DIM, dtype=_dtype(device), device=device)
    indices = torch.rand(case.batch, case.tokens, case.length, device=device).argsort(-1)[..., : case.topk].int()
    call = decode_call(
        q, latent_pool(case, device), random_table(case, device), indices, DIM**-0.5, VALUES, None, None, None, None
    )
    some = decode_call(
        q[:CHECKED].float(), _widened(call), call.keys.table[:CHECKED] if call.keys.table is not None else None,
        indices[:CHECKED], DIM**-0.5, VALUES, None, None, None, None,
    )  # fmt: skip
    expected = attend(some, "torch")[0]
    ways: dict[str, Callable[[SparseDecodeCall], tuple[Tensor, ...]]] = {"auto": lambda call: attend(call, "auto")}
    if device == "cuda":
        from attnmesh.ops.sparse import decode_kernels
        from attnmesh.ops.sparse.triton_forward import ForwardTiles

        ways |= {
            way.value: (lambda call, way=way: decode_kernels.run(call, way=way))
            for way in decode_kernels.Way
            if way is not decode_kernels.Way.GLUON or case.storage != "plain"
        }
        if case.storage != "plain":
            more = {"in place, 64 keys": (16, 64, 8, 1), "in place, 16 keys": (16, 16, 4, 1)}
            ways |= {
                name: (
                    lambda call, t=tiles: decode_kernels.run(
                        call, way=decode_kernels.Way.IN_PLACE, tiles=ForwardTiles(*t)
                    )
                )
                for name, tiles in more.items()
            }
    times = _times({name: (lambda way=way: way(call)[0]) for name, way in ways.items()}, device)
    tokens = case.batch * case.tokens
    flops = 2 * tokens * case.heads * case.topk * (DIM + VALUES)
    width = DIM * q.element_size() if case.storage == "plain" else bytes_per_token(case.storage, DIM)
    read = tokens * case.topk * width
    rows = []
    for name, way in ways.items():
        error = float((way(call)[0][:CHECKED].float() - expected).abs().max() / expected.abs().max())
        rows.append({
            "way": name, "us": times[name], "tflops": flops / times[name] / 1e6, "bytes_gb": read / 1e9,
            "tb_per_s": read / times[name] / 1e6, "error": error,
            "verdict": "ok" if error <= LIMITS[q.dtype] else "WRONG",
        })  # fmt: skip
    return rows


def _widened(call: SparseDecodeCall) -> Stored:
    pool = call.keys.pool
    return pool.float() if isinstance(pool, Tensor) and pool.dtype != torch.float32 else pool


def topk_arguments(case: Case, device: str) -> dict[str, Any]:
    """Random arguments of `paged_indexer_topk`."""
    blocks = case.batch * -(-case.length // BLOCK)
    pool = unpack_index_keys(
        torch.randint(0, 256, (blocks, BLOCK * (INDEX_DIM + 4)), dtype=torch.uint8, device=device), BLOCK
    )
    pool.values.view(torch.uint8).bitwise_and_(0xF7)
    pool.scales.fill_(2.0**-6)
    shape = (case.batch, case.tokens, INDEX_HEADS)
    iq = torch.randn(*shape, INDEX_DIM, dtype=_dtype(device), device=device)
    w = torch.rand(shape, dtype=torch.float32, device=device)
    last = torch.full((case.batch,), case.length - 1, device=device)
    table = random_table(case, device)
    return {"iq": iq, "pool": pool, "block_table": table, "w": w, "topk": case.topk, "cur_pos": last}


def _topk(case: Case, device: str) -> Rows:
    given = topk_arguments(case, device)
    step = indexer_step(**given, key_range=None, scale=1.0, relu=True, backend="auto")
    iq = step.iq
    times = _times({"auto": lambda: select(step).indices}, device)
    read = case.batch * case.length * bytes_per_token("fp8_token", INDEX_DIM)
    error = _topk_error(step)
    return [{
        "way": "auto", "us": times["auto"],
        "tflops": 2 * case.batch * case.tokens * case.length * INDEX_HEADS * INDEX_DIM / times["auto"] / 1e6,
        "bytes_gb": read / 1e9, "tb_per_s": read / times["auto"] / 1e6, "error": error,
        "verdict": "ok" if error <= LIMITS[iq.dtype] else "WRONG",
    }]  # fmt: skip


def _topk_error(step: IndexerStep) -> float:
    """How far the lowest selected score of one sequence lies below the k-th of all scores in float32, relative."""
    found = select(step)
    assert found.scores is not None
    assert step.keys.table is not None
    length = int(step.end[0].max())
    positions = torch.arange(length, dtype=torch.int32, device=step.iq.device)[None, None]
    one = type(step.keys)(step.keys.pool, step.keys.table[:1])
    keys = one.gather(one.slots(positions, positions >= 0)[0, 0], torch.float32)
    scores = torch.einsum("hd,nd->hn", step.iq[0, -1].float(), keys).relu()
    scores = (scores * step.w[0, -1][:, None]).sum(0)
    selected = scores[found.indices[0, -1][found.indices[0, -1] >= 0].long()]
    kth = scores.topk(min(step.topk, length)).values[-1]
    return float((kth - selected.min()).clamp(min=0) / kth)


app = make_app(main)

if __name__ == "__main__":
    app()
