"""Recurrent layers on one device and over ranks: outputs, final states and every gradient.

Every two values of two axes occur together in some mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from attnmesh.comm import Comm
from attnmesh.core.layouts import Balanced, Contiguous, Layout, Zigzag
from attnmesh.core.masks import Causal
from attnmesh.parallel.context import ContextParallel
from attnmesh.testing.errors import Comparison
from attnmesh.testing.recurrent import (
    KINDS,
    comparisons,
    one_process,
    over_ranks,
    packed,
    random_layer,
    random_state,
    to_dtype,
)
from attnmesh.verify.mode import ALL_DTYPES, Mode, covering_rows

_LAYOUTS: dict[str, Layout] = {"zigzag": Zigzag(), "contiguous": Contiguous(), "balanced": Balanced(Causal())}
_AXES: dict[str, Sequence[Any]] = {
    "kind": KINDS,
    "documents": ("whole", "same", "rows"),
    "state": (False, True),  # whether there is an initial one
    "sizes": ((4, 2, 6, 5), (6, 6, 16, 8), (4, 2, 128, 128)),  # heads, heads of keys, widths; ranks gather small states
    "batch": (1, 2, 3),
    "length": (37, 150, 7),  # several ranks hold nothing of the last
    "dtype": ("fp32", "bf16", "fp64"),
}


def recurrent_modes(comm: Comm, device: str) -> Iterator[Mode]:
    """Yield every two of kind, documents, initial state, sizes, length and precision together, and of layouts."""
    backends = ("auto", "torch") if device == "cuda" else ("auto",)
    for row in covering_rows({**_AXES, "backend": backends}):
        yield _mode(f"recurrent {row['backend']}", row, comm, None)
    if comm.world > 1:
        for row in covering_rows({**_AXES, "layout": tuple(_LAYOUTS)}):
            yield _mode(f"recurrent over ranks {row['layout']}", row, comm, _LAYOUTS[row["layout"]])


def _mode(name: str, row: Mapping[str, Any], comm: Comm, layout: Layout | None) -> Mode:
    heads, groups, key_dim, value_dim = row["sizes"]
    state = " state" if row["state"] else ""
    shape = f"{row['batch']}x{heads}/{groups}x{row['length']}x{key_dim}/{value_dim} {row['dtype']}"
    run = partial(_compare, row, comm, layout)
    return Mode(f"{name} {row['kind']} {row['documents']}{state}", shape, run, collective=layout is not None)


def _compare(row: Mapping[str, Any], comm: Comm, layout: Layout | None, seed: int, device: str) -> list[Comparison]:
    heads, groups, key_dim, value_dim = row["sizes"]
    dtype, length = ALL_DTYPES[row["dtype"]], row["length"]
    drawn = random_layer(
        row["kind"], length, batch=row["batch"], groups=groups, heads=heads, key_dim=key_dim, value_dim=value_dim,
        seed=seed,
    )  # fmt: skip
    layer = to_dtype(drawn, dtype, device)
    state = random_state(layer, seed).to(device, layer.compute_dtype) if row["state"] else None
    documents = packed(length, row["batch"], row["documents"])
    sizes = None
    if layout is None:
        found = one_process(layer, state, documents, row["backend"])
    else:
        found, sizes = over_ranks(ContextParallel(comm, layout=layout), layer, state, documents, length)
        if comm.rank > 0:
            return []
    exact = one_process(
        to_dtype(layer, torch.float64), None if state is None else state.double(), documents, "reference"
    )
    plain = one_process(layer, state, documents, "reference" if layout is None else "auto")
    return comparisons(found, plain, exact, dtype, sizes)
