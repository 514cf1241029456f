"""What the sparse benchmark measures, as values: the shapes on each kind of device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Attention(NamedTuple):
    """Queries of `heads` heads, each reading `topk` of `s_kv` keys of width `d`, whose first `d_v` are the value."""

    s_q: int
    s_kv: int
    heads: int
    d: int
    d_v: int
    topk: int
    itemsize: int = 2  # bytes of a number


class Indexer(NamedTuple):
    """Queries of `heads` narrow heads that choose `topk` of `s_kv` keys of width `d`."""

    s_q: int
    s_kv: int
    heads: int
    d: int
    topk: int
    itemsize: int = 2


class Sizes(NamedTuple):
    """All shapes of a run, and how long to look at them."""

    lengths: tuple[Attention, ...]  # of the distribution and of attention
    few_heads: Attention  # of attention: a rank's share where heads are sharded
    indexers: tuple[Indexer, ...]  # of the top-k
    loss: tuple[Attention, Indexer]
    rounds: int
    matmul: int  # rows and columns
    copied: int  # bytes


def sizes(device: str, quick: bool) -> Sizes:
    """The shapes for a device; `quick`: to see that everything runs."""
    if device == "cuda":
        return _GPU_QUICK if quick else _GPU
    return _CPU_QUICK if quick else _CPU


def _sizes(
    attention: Attention, indexer: Indexer, s_kv: tuple[int, ...], indexed: tuple[int, ...], few: int, loss: int,
    *, rounds: int, matmul: int, copied: int,
) -> Sizes:  # fmt: skip
    return Sizes(
        tuple(attention._replace(s_kv=n) for n in s_kv),
        attention._replace(s_kv=loss, heads=few),
        tuple(indexer._replace(s_kv=n) for n in indexed),
        (attention._replace(s_kv=loss), indexer._replace(s_kv=loss)),
        rounds,
        matmul,
        copied,
    )


_K = 1024
_GPU_ATTENTION = Attention(4 * _K, 32 * _K, 128, 576, 512, 2 * _K)
_GPU_INDEXER = Indexer(4 * _K, 32 * _K, 64, 128, 2 * _K)
_GPU = _sizes(
    _GPU_ATTENTION, _GPU_INDEXER, (8 * _K, 32 * _K, 128 * _K), (32 * _K, 128 * _K), 16, 32 * _K,
    rounds=5, matmul=8 * _K, copied=2**32,
)  # fmt: skip
_GPU_QUICK = _sizes(
    _GPU_ATTENTION._replace(s_q=_K), _GPU_INDEXER._replace(s_q=_K), (8 * _K,), (8 * _K,), 16, 8 * _K,
    rounds=2, matmul=8 * _K, copied=2**30,
)  # fmt: skip
_CPU = _sizes(
    Attention(64, 512, 16, 144, 128, 128, itemsize=4), Indexer(64, 512, 8, 64, 128, itemsize=4),
    (512, 2048), (512, 2048), 4, 1024, rounds=3, matmul=512, copied=2**25,
)  # fmt: skip
_CPU_QUICK = _sizes(
    Attention(16, 96, 4, 40, 32, 24, itemsize=4), Indexer(16, 96, 4, 16, 24, itemsize=4),
    (64, 96), (96,), 2, 96, rounds=1, matmul=128, copied=2**20,
)  # fmt: skip


_CHUNK_VALUES = 2**25  # random keys sorted at a time: memory does not grow with s_q x s_kv


class AttentionInputs(NamedTuple):
    """What attention reads; scores are about normal, too."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    scale: float


class IndexerInputs(NamedTuple):
    """What an indexer reads."""

    iq: Tensor
    ik: Tensor
    w: Tensor


def attention_inputs(shape: Attention, device: str, dtype: torch.dtype) -> AttentionInputs:
    """Queries, keys and the slots of every query."""
    q = torch.randn(shape.s_q, shape.heads, shape.d, device=device, dtype=dtype)
    kv = torch.randn(shape.s_kv, shape.d, device=device, dtype=dtype)
    return AttentionInputs(q, kv, random_indices(shape.s_q, shape.s_kv, shape.topk, device), shape.d**-0.5)


def indexer_inputs(shape: Indexer, device: str, dtype: torch.dtype) -> IndexerInputs:
    """Queries and keys; weights of either sign, such that scores are about normal."""
    iq = torch.randn(shape.s_q, shape.heads, shape.d, device=device, dtype=dtype)
    ik = torch.randn(shape.s_kv, shape.d, device=device, dtype=dtype)
    return IndexerInputs(iq, ik, torch.randn(shape.s_q, shape.heads, device=device) * (shape.heads * shape.d) ** -0.5)


def random_indices(s_q: int, s_kv: int, topk: int, device: str) -> Tensor:
    """[s_q, topk] int32: the first `topk` of a random permutation of all keys, for each row."""
    step = max(1, _CHUNK_VALUES // s_kv)
    rows = [
        torch.rand(min(step, s_q - start), s_kv, device=device).argsort(1)[:, :topk].int()
        for start in range(0, s_q, step)
    ]
    return torch.cat(rows)


def sample_rows(s_q: int, device: str, count: int = 4) -> Tensor:
    """The rows whose results are held against float64: the first, the last, and some between."""
    return torch.linspace(0, s_q - 1, min(count, s_q), device=device).round().long()


def keep_rows(rows: Tensor, grad: Tensor) -> Tensor:
    """A gradient that is zero but in these rows: gradients of keys are then those rows' alone."""
    return torch.zeros_like(grad).index_copy(0, rows, grad[rows])
