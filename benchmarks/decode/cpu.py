"""Decode on the CPU against torch's own attention: ratios of times taken in turns, float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F

from attnmesh.calibration.timing import wall
from benchmarks.decode.cases import Case, Shape
from benchmarks.decode.inputs import drawn
from benchmarks.decode.peers import checked


def measure_cpu_shapes(shapes: Sequence[Shape], rounds: int = 7) -> list[dict[str, object]]:
    """Ours over torch's time, on a contiguous cache and on shuffled blocks of 16; GB/s of keys and values."""
    rows: list[dict[str, object]] = []
    for shape in shapes:
        paged = drawn(Case(shape, "fp32"), "cpu")
        given = paged.gathered()
        sdpa = partial(F.scaled_dot_product_attention, given.q, given.k, given.v, enable_gqa=True)
        expected = sdpa()
        for ours in (given.attended, paged.attended):
            checked(ours, expected)()
        times = wall({"torch": sdpa, "contiguous": given.attended, "paged": paged.attended}, rounds)
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
