"""What the sparse benchmark measures, as values: the shapes on each kind of device."""

from __future__ import annotations

from typing import NamedTuple


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
    few_heads: Attention  # of attention: a rank's share where heads are spread
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
