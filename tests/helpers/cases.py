"""Masks, layouts and heads by name, the pairs a mask allows without the masks' own code, and which cases are sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from attnmesh.core.layouts import Contiguous, Striped, Zigzag
from attnmesh.core.masks import And, Causal, Documents, Full, Mask, SlidingWindow

HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}
LAYOUTS = {"contiguous": Contiguous(), "zigzag": Zigzag(), "striped": Striped()}
MASKS = ("full", "causal", "window", "documents", "causal & documents", "causal & window", "all three")


def make_mask(name: str, length: int) -> Mask:
    """Return the mask of that name for `length` positions; one of the documents is empty."""
    documents = Documents([length // 5, 0, length // 2, length - length // 5 - length // 2])
    return {
        "full": Full(),
        "causal": Causal(),
        "window": SlidingWindow(9, 3),
        "documents": documents,
        "causal & documents": Causal() & documents,
        "causal & window": Causal() & SlidingWindow(11),
        "all three": Causal() & SlidingWindow(6, 2) & documents,
    }[name]


def device_of(backend: str) -> str:
    """Return the device to test a backend on: for Triton the GPU, if there is one."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def allowed_pairs(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """Return [q, k]: which query positions see which key positions."""
    q, k = q[:, None], k[None]
    match mask:
        case Full():
            return torch.ones(len(q), k.shape[1], dtype=torch.bool)
        case Causal():
            return k <= q
        case SlidingWindow(left=left, right=right):
            return (k - q <= right) & (q - k <= left)
        case Documents(lengths=lengths):
            # The number of documents that end at or before a position is the same within a document.
            ends = torch.tensor(list(accumulate(lengths)), dtype=torch.long)
            return (ends <= q[..., None]).sum(-1) == (ends <= k[..., None]).sum(-1)
        case And(parts=parts):
            return torch.stack([allowed_pairs(part, q[:, 0], k[0]) for part in parts]).all(0)
    raise AssertionError(mask)


def in_turn(*lists: Iterable) -> list[tuple]:
    """Rows with a value of each list, as many as the longest list has; the others start again. Every value occurs."""
    lists = [list(values) for values in lists]
    return [tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))]


def sweep(*values: object, **options: object) -> Any:
    """A case that only `make sweep` runs: `pytest.param` with the mark."""
    return pytest.param(*values, marks=pytest.mark.sweep, **options)


def first(count: int, cases: Iterable) -> list:
    """The cases, of which only the first `count` that are no sweeps stay so."""
    found: list = []
    for case in cases:
        one = isinstance(case, ParameterSet)
        if one and any(mark.name == "sweep" for mark in case.marks):
            found.append(case)
        elif count > 0:
            found.append(case)
            count -= 1
        else:
            values = case.values if one else case if isinstance(case, tuple) else (case,)
            found.append(sweep(*values, id=case.id if one else None))
    return found


def else_sweep(cases: Iterable[tuple], stays: Callable[..., bool]) -> list:
    """The cases as parameters; those that do not stay are sweeps: they repeat the code paths of the others."""
    return [pytest.param(*case, marks=[] if stays(*case) else [pytest.mark.sweep]) for case in cases]
