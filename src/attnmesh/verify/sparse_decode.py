"""Sparse decode from a block cache: the indexer's top-k and attention over it, on one rank and over all ranks.

Every rank writes a cache of the positions that it holds; unused slots are poisoned. Index scores of whole numbers are
exact in any order of summation, so the selected keys must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from attnmesh.comm import Comm, SoloComm
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.spec import CacheSpec
from attnmesh.ops.sparse import reference
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.parallel.sparse.decode import SparseDecode
from attnmesh.testing.decode import poison_cache
from attnmesh.testing.errors import Comparison
from attnmesh.verify.mode import DTYPES, Mode

_DIM, _VALUES, _INDEX_DIM, _INDEX_HEADS, _BLOCK, _TOPK, _TOKENS, _SCALE = 144, 128, 16, 3, 4, 9, 2, 0.1
_LENGTHS = (37, 2, 21)


def sparse_decode_modes(comm: Comm) -> Iterator[Mode]:
    """Yield sparse decode from plain and fp8 latents, on one rank and over all, with heads replicated and sharded."""
    for dtype in DTYPES:
        for storage in (dtype, "fp8_ds_mla"):
            shape = f"{comm.world + 3}/1x{_DIM}/{_VALUES} {dtype}"
            name = f"sparse decode {'plain' if storage == dtype else storage}"
            yield Mode(f"{name} one rank", shape, partial(_compare, SoloComm(), storage, dtype, 1, False))
            for interleave, sharded in ((1, False), (3, True)) if comm.world > 1 else ():
                heads = "heads sharded" if sharded else "heads replicated"
                run = partial(_compare, comm, storage, dtype, interleave, sharded)
                yield Mode(f"{name} CP{comm.world} interleave {interleave} {heads}", shape, run, collective=True)


def _compare(
    comm: Comm, storage: str, dtype: str, interleave: int, sharded: bool, seed: int, device: str
) -> list[Comparison]:
    heads = comm.world + 3
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(DTYPES[dtype])

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator, device="cpu").to(DTYPES[dtype])

    latents, index_keys = [normal(n, _DIM) for n in _LENGTHS], [whole(n, _INDEX_DIM) for n in _LENGTHS]
    batch = len(_LENGTHS), _TOKENS
    q, sinks = normal(*batch, heads, _DIM), normal(heads).float()
    iq, w = whole(*batch, _INDEX_HEADS, _INDEX_DIM), whole(*batch, _INDEX_HEADS)
    by_rank = [heads // comm.world + (rank < heads % comm.world) for rank in range(comm.world)]
    own = slice(sum(by_rank[: comm.rank]), sum(by_rank[: comm.rank + 1])) if sharded else slice(heads)
    decode = SparseDecode(comm, interleave=interleave, heads=by_rank if sharded else None)
    cache = _written_cache(decode, storage, latents, index_keys, device)
    top = decode.indexer_topk(
        iq.to(device), cache.index_keys(0), cache.block_table, w.to(device), _TOPK, cur_pos=[n - 1 for n in _LENGTHS]
    )
    out, lse = decode.attention(
        q[:, :, own].to(device), cache.keys(0), cache.block_table, top.indices, scale=_SCALE, d_v=_VALUES,
        sinks=sinks[own].to(device),
    )  # fmt: skip
    if comm.rank:
        return []
    index_storage = storage if storage in PLAIN else "fp8_token"
    keys = _best_keys([_stored(x, index_storage) for x in index_keys], iq, w)
    exact, plain = (
        _attention([_stored(x, storage) for x in latents], q[:, :, own], sinks[own], keys, precision)
        for precision in (torch.float64, DTYPES[dtype])
    )
    return [
        Comparison("indices", top.indices.cpu(), keys),
        Comparison("out", out.cpu(), exact[0], plain[0]),
        Comparison("lse", lse.cpu(), exact[1], plain[1]),
    ]


def _written_cache(
    decode: SparseDecode, storage: str, latents: list[Tensor], index_keys: list[Tensor], device: str
) -> BlockCache:
    cache = BlockCache(
        CacheSpec(
            layers=1, kv_heads=1, head_dim=_DIM, value_dim=_VALUES, index_dim=_INDEX_DIM, storage=storage, latent=True
        ),
        num_blocks=32, block_size=_BLOCK, max_sequences=len(_LENGTHS), max_length=64, device=device,
        shard=decode.shard,
    )  # fmt: skip
    poison_cache(cache.keys(0))
    poison_cache(cache.index_keys(0))
    for latent, index in zip(latents, index_keys, strict=True):
        new = cache.append([cache.allocate(len(latent))], len(latent))
        cache.write(0, new, latent.to(device)[None, None], index_k=index.to(device)[None, None])
    return cache


def _stored(x: Tensor, storage: str) -> Tensor:
    """Keys [n, D] in float64, as they come back from a cache."""
    return dequantize(quantize(x[:, None, None], storage), torch.float64, head_axis=2)[:, 0, 0]


def _best_keys(index_keys: list[Tensor], iq: Tensor, w: Tensor) -> Tensor:
    """The top-k of every token, ascending, then -1: int32 [B, T, topk]."""
    found = torch.full((*iq.shape[:2], _TOPK), -1, dtype=torch.int32, device="cpu")
    for b, keys in enumerate(index_keys):
        scores = reference.index_scores(iq[b].double(), keys, w[b].double())
        at = torch.arange(len(keys), device="cpu")
        visible = at <= at[-_TOKENS:, None]
        for t, row in enumerate(reference.topk_keys(scores, visible, _TOPK)):
            found[b, t, : len(row)] = torch.tensor(row, dtype=torch.int32, device="cpu")
    return found


def _attention(
    latents: list[Tensor], q: Tensor, sinks: Tensor, keys: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Out and lse by the plain computation in a precision, from one block per sequence."""
    pool = torch.zeros(len(latents), max(map(len, latents)), _DIM, dtype=dtype, device="cpu")
    for b, latent in enumerate(latents):
        pool[b, : len(latent)] = latent.to(dtype)
    table = torch.arange(len(latents), device="cpu")[:, None]
    out, lse, _ = reference.paged_attend(q.to(dtype), pool, table, keys, _SCALE, _VALUES, None, sinks.to(dtype))
    return out, lse
