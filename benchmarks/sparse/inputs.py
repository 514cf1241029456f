"""Random inputs: normal numbers, and for every query distinct keys chosen uniformly, in a random order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.sparse.cases import Attention, Indexer

_AT_ONCE = 2**25  # random keys sorted at a time: memory does not grow with s_q x s_kv


class Attended(NamedTuple):
    """What attention reads; scores are about normal, too."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    scale: float


class Indexed(NamedTuple):
    """What an indexer reads."""

    iq: Tensor
    ik: Tensor
    w: Tensor


def attention_inputs(shape: Attention, device: str, dtype: torch.dtype) -> Attended:
    """Queries, keys and the slots of every query."""
    q = torch.randn(shape.s_q, shape.heads, shape.d, device=device, dtype=dtype)
    kv = torch.randn(shape.s_kv, shape.d, device=device, dtype=dtype)
    return Attended(q, kv, random_indices(shape.s_q, shape.s_kv, shape.topk, device), shape.d**-0.5)


def indexer_inputs(shape: Indexer, device: str, dtype: torch.dtype) -> Indexed:
    """Queries and keys; weights of either sign, such that scores are about normal."""
    iq = torch.randn(shape.s_q, shape.heads, shape.d, device=device, dtype=dtype)
    ik = torch.randn(shape.s_kv, shape.d, device=device, dtype=dtype)
    return Indexed(iq, ik, torch.randn(shape.s_q, shape.heads, device=device) * (shape.heads * shape.d) ** -0.5)


def random_indices(s_q: int, s_kv: int, topk: int, device: str) -> Tensor:
    """[s_q, topk] int32: the first `topk` of a random permutation of all keys, for each row."""
    step = max(1, _AT_ONCE // s_kv)
    rows = [
        torch.rand(min(step, s_q - start), s_kv, device=device).argsort(1)[:, :topk].int()
        for start in range(0, s_q, step)
    ]
    return torch.cat(rows)


def some_rows(s_q: int, device: str, count: int = 4) -> Tensor:
    """The rows whose results are held against float64: the first, the last, and some between."""
    return torch.linspace(0, s_q - 1, min(count, s_q), device=device).round().long()


def only(rows: Tensor, grad: Tensor) -> Tensor:
    """A gradient that is zero but in these rows: gradients of keys are then those rows' alone."""
    return torch.zeros_like(grad).index_copy(0, rows, grad[rows])
