"""Sparse decode over a paged cache of latents by kernels.

`triton_decode.locate` maps the indices of a token to slots of the pool, without padding and keys of other ranks, and
finds faults. Then there are three ways to attend:

- `triton_decode.attend` attends over some slots of a token for some of its heads, and `triton_decode.merge` merges the
  states where the slots of a token are split among programs. A key is read once per tile of heads: its first columns
  are also the value. An fp8_ds_mla key is dequantized in registers, in float32, and rounded to the dtype of q.
- On Hopper over fp8_ds_mla, the kernel in `gluon_decode` attends in the same way.
- Where many heads and tokens fill the GPU, and for fp8_ds_mla with float32 queries, the kernel of sparse prefill
  attends: over the pool itself if it is plain, otherwise over keys that `triton_decode.gather` has dequantized to a
  workspace, once for all heads.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from attnmesh.ops.decode.device_errors import raise_device_error
from attnmesh.ops.launch import cdiv, multiprocessors
from attnmesh.ops.sparse import dispatch, gluon_common, gluon_decode, triton_decode
from attnmesh.ops.sparse.arguments import RowBounds, SparseCall
from attnmesh.ops.sparse.paged import PagedKeys, SparseDecodeCall
from attnmesh.ops.sparse.triton_forward import ForwardTiles
from attnmesh.ops.storage import Quantized

_WORKSPACE = 512 << 20  # bytes of dequantized keys


class Way(enum.StrEnum):
    """Which kernel attends."""

    IN_PLACE = "in place"
    GLUON = "gluon"
    AS_PREFILL = "as prefill"


def run(
    call: SparseDecodeCall, *, backend: str = "auto", tiles: ForwardTiles | None = None, way: Way | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Out, lse and largest scores of a call. Raises errors that earlier calls have recorded.

    `way` and `tiles` are by default what is fastest among the kernels of a backend.
    """
    q, device = call.q, call.q.device
    raise_device_error(device)
    (batch, tokens, heads, _), topk = q.shape, call.indices.shape[2]
    out = torch.empty(batch, tokens, heads, call.d_v, dtype=call.out_dtype, device=device)
    lse, top = (torch.empty(batch, tokens, heads, dtype=torch.float32, device=device) for _ in range(2))
    results = out, lse, top
    if not out.numel():
        return results
    with torch.cuda.device_of(q):
        slots, lengths = triton_decode.locate(call.keys, call.indices, call.counts)
        way = way or fastest_way(call, backend)
        if way is Way.AS_PREFILL:
            _attend_as_prefill(call, slots, lengths, results, backend)
            return results
        tiles = tiles or triton_decode.tiles_of(call)
        gluon = way is Way.GLUON
        tile_heads, tile_keys = (gluon_common.HEADS, gluon_common.KEYS) if gluon else tiles[:2]
        span = call.split_size or _span(batch * tokens * cdiv(heads, tile_heads), topk, tile_keys, device)
        splits = cdiv(topk, span)
        parts: tuple[Tensor, ...] | None = None
        if splits > 1:  # out, lse and largest scores of the splits of every token
            part = torch.empty(batch * tokens, splits, heads, call.d_v, dtype=torch.float32, device=device)
            parts = part, torch.empty_like(part[..., 0]), torch.empty_like(part[..., 0])
        sinks = None if call.sinks is None else call.sinks.contiguous()
        if gluon:
            gluon_decode.attend(call, slots, lengths, sinks, parts or results, span=span, splits=splits)
        else:
            triton_decode.attend(call, slots, lengths, sinks, results, parts, span, splits, tiles)
        if parts is not None:
            triton_decode.merge(parts, lengths, sinks, results, span)
    return results


def _span(programs: int, topk: int, keys: int, device: torch.device) -> int:
    """The number of slots of one program: all of a token's, or fewer where few programs would leave the GPU idle."""
    wanted = max(1, multiprocessors(device, 8) // programs)
    tiles = cdiv(topk, keys)
    return int(cdiv(tiles, min(wanted, max(1, tiles // 2)))) * keys


def fastest_way(call: SparseDecodeCall, backend: str) -> Way:
    """Gluon where it can; the prefill's kernel for many tokens and more heads than a tile of `triton_decode` has."""
    if call.q.dtype == torch.float32 and isinstance(call.keys.pool, Quantized):
        return Way.AS_PREFILL  # without tensor cores, both operands of a product are in registers, too
    rows, heads = call.q.shape[0] * call.q.shape[1], call.q.shape[2]
    if backend != "triton" and gluon_decode.supports(call.q, call.keys.pool, call.d_v):
        return Way.GLUON
    enough = 2 * rows * cdiv(heads, gluon_common.HEADS) >= multiprocessors(call.q.device, 8)
    return Way.AS_PREFILL if call.q.is_cuda and call.split_size is None and heads > 32 and enough else Way.IN_PLACE


def _attend_as_prefill(
    call: SparseDecodeCall, slots: Tensor, lengths: Tensor, results: tuple[Tensor, ...], backend: str
) -> None:
    """Some tokens at a time, so that the workspace stays small."""
    q, topk, width = call.q.flatten(0, 1), call.indices.shape[2], call.keys.width
    q = q if q.stride(0) % 16 == 0 else q.contiguous()
    flat = _flat_pool(call.keys)
    rows = len(q) if flat is not None else max(1, min(len(q), _WORKSPACE // (topk * width * q.element_size())))
    workspace = q.new_empty(0) if flat is not None else q.new_empty(rows * topk, width)
    for start in range(0, len(q), rows):
        some = slice(start, start + rows)
        keys, indices, counts = flat, slots[some], lengths[some]
        if keys is None:
            keys = workspace[: len(counts) * topk]
            triton_decode.gather(call.keys, indices, counts, keys)
            indices = torch.arange(len(keys), dtype=torch.int32, device=q.device).view(-1, topk)
        low = torch.zeros_like(counts)
        bounds = RowBounds(low, torch.full_like(low, len(keys)), counts, 0)
        prefill = SparseCall(q[some], keys, None, indices, bounds, call.scale, call.d_v, False, backend)
        state = dispatch.forward(prefill, call.out_dtype, call.sinks, max_logits=True)
        fault = counts < 0
        for result, part in zip(results, state, strict=True):
            part = part.to(result.dtype).masked_fill_(fault.view(-1, *[1] * (part.ndim - 1)), torch.nan)
            result.flatten(0, 1)[some] = part


def _flat_pool(keys: PagedKeys) -> Tensor | None:
    """A plain pool as [slots, D], if its blocks follow one another."""
    pool = keys.pool
    if not isinstance(pool, Tensor) or pool.stride(0) != pool.shape[1] * pool.stride(1):
        return None
    return pool.as_strided((pool.shape[0] * pool.shape[1], pool.shape[3]), (pool.stride(1), 1))
