"""The backward of sparse attention in plain Triton: any heads, widths and number of slots; 16-bit or float32.

Three kernels, over chunks of rows, recompute the weights p from the log-sum-exp::

    scores_kernel      p = exp(scale * q @ k^T - lse)     ds = p * (dout @ v^T - delta)    to workspaces
    grad_query_kernel  dq = scale * ds @ k
    grad_key_kernel    dk += scale * ds^T @ q             dv += p^T @ dout                 scattered to the keys

What the backward costs is not the products but what goes to the keys: 4 bytes for each slot and column, 19 GB for 4096
rows of 2048 slots and 576 columns. That is summed over all heads before it leaves a processor. One kernel for
everything could not do so: q, dout and dq of 128 heads and 576 columns are more than a processor holds, and half of the
heads at a time sends twice as much. p and ds, on their way from kernel to kernel, take 2 bytes for each slot and head,
and every product is a plain tile that reads each key once for 64 heads or more.

dk and dv are summed by atomics, or, if `deterministic`, written slot by slot and then added key by key in the order
of rows and slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attnmesh.ops.sparse.mask import Rows
from attnmesh.ops.sparse.triton_backward_kernels import delta_kernel, grad_key_kernel, grad_query_kernel, scores_kernel
from attnmesh.ops.sparse.triton_by_key import ByKey, add_by_key, by_key

_Factors = tuple[Tensor, Tensor]  # a workspace, and the q or dout that it is multiplied with


class Tiles(NamedTuple):
    """What a program of one kernel holds at a time, and the warps and pipeline stages that run it."""

    heads: int  # at most: fewer heads take a smaller tile, and so do fewer slots and columns
    keys: int
    columns: int
    warps: int
    stages: int


# By bytes of an element. Fixed rather than autotuned: the order of the sums must not depend on a timing. 16 bits: the
# fastest of some tried on an H200 with 128 heads of 576 columns. float32 runs without tensor cores (tf32 would not be
# float32): a thread then holds rows of both operands, which wants small tiles. The others' keys must divide those of
# SCORES: a tile reads only what a tile of the scores has written.
SCORES = {2: Tiles(64, 128, 64, 4, 3), 4: Tiles(32, 32, 32, 4, 1)}
SCORES_UNALIGNED = {2: Tiles(64, 64, 64, 4, 1), 4: Tiles(32, 32, 32, 4, 1)}  # rows that 16 bytes at a time do not fit
GRAD_QUERY = {2: Tiles(128, 64, 128, 4, 3), 4: Tiles(32, 32, 64, 4, 1)}
GRAD_KEY = {2: Tiles(128, 64, 128, 8, 3), 4: Tiles(16, 32, 64, 4, 1)}
GRAD_KEY_MANY_HEADS = {2: Tiles(64, 64, 128, 8, 3), 4: Tiles(16, 32, 64, 4, 1)}  # q and dout are then read anew
# Bytes that the workspaces of a chunk of rows may take. Some waves of programs: few places idle in the last one.
WORKSPACE = 1 << 29
WORKSPACE_DETERMINISTIC = 1 << 30
_DELTA_ELEMENTS = 4096  # per program of the memory-bound delta kernel


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """`sum(out * dout)` over the value's columns: float32 [s_q, h] from two [s_q, h, d_v]."""
    rows, heads, width = out.shape
    _check_contiguous(out=out, dout=dout)
    result = torch.empty((rows, heads), dtype=torch.float32, device=out.device)
    if result.numel() == 0:
        return result
    columns = _power_of_two(width)
    pairs = max(1, _DELTA_ELEMENTS // columns)
    with torch.cuda.device_of(out):
        delta_kernel[(triton.cdiv(rows * heads, pairs),)](
            out, out.stride()[:2], dout, dout.stride()[:2], result, rows * heads,
            H=heads, DV=width, PAIRS=pairs, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return result


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    lo: Tensor,
    hi: Tensor,
    slots: Tensor,
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    *,
    k_offset: int,
    scale: float,
    d_v: int,
    deterministic: bool,
    dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients (dq, dk, dv) of sparse attention; dq in `dtype` (that of q unless said), dk and dv in float32.

    q [s_q, h, d], k [s_kv, d] and v [s_kv, d_v], or None: the value is then the first d_v columns of k, dk holds both
    gradients and dv is None. Slot j of row i is valid if j < slots[i] and lo[i] <= indices[i, j] < hi[i], and names
    the key `indices[i, j] - k_offset`. lse [s_q, h], natural and float32, may be of more keys than these; where it is
    -inf or +inf the row has no weights. delta [s_q, h], float32, is `row_delta` less the gradient of lse.

    The work is done `chunk_rows` rows at a time, by default as many as fill the workspaces; if `deterministic`, no bit
    of the result depends on it.
    """
    _check_contiguous(q=q, k=k, v=v, indices=indices, dout=dout)
    rows, heads, width = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype if dtype is None else dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = None if v is None else torch.zeros(v.shape, dtype=torch.float32, device=q.device)
    if 0 in (*q.shape, *k.shape, *indices.shape):
        return dq.zero_(), dk, dv

    strides = [stride for x in (q, k, v, dout) if x is not None for stride in x.stride()[:-1]]
    plan = _plan(q, indices, all(stride % 16 == 0 for stride in strides), deterministic, chunk_rows)
    workspace = (plan.rows, plan.padded_heads, plan.padded_slots)
    weights, grad_scores = (torch.empty(workspace, dtype=q.dtype, device=q.device) for _ in range(2))
    listed = (indices, indices.stride(0), lo, hi, slots)
    for_k, for_v = (grad_scores, q), (weights, dout)
    sums: list[tuple[Tensor, float, _Factors, _Factors | None]] = [(dk, scale, for_k, for_v if dv is None else None)]
    if dv is not None:
        sums.append((dv, 1.0, for_v, None))

    with torch.cuda.device_of(q):
        for begin in range(0, rows, plan.rows):
            count = min(plan.rows, rows - begin)
            where = (begin, plan.padded_slots, k_offset)
            tiles = plan.scores
            scores_kernel[(count * (plan.padded_heads // tiles.heads) * (plan.padded_slots // tiles.keys),)](
                q, q.stride()[:2], k, k.stride(0), k if v is None else v, k.stride(0) if v is None else v.stride(0),
                dout, dout.stride()[:2], *listed, lse, lse.stride(), delta, delta.stride(), weights, grad_scores,
                *where, scale, width,
                D=width, DV=d_v, V_IN_K=v is None, H=heads, PADDED_HEADS=plan.padded_heads,
                HEADS=tiles.heads, KEYS=tiles.keys, COLUMNS=tiles.columns,
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
            tiles = plan.grad_query
            parts = _parts(width, tiles.columns)
            grad_query_kernel[(count * (plan.padded_heads // tiles.heads) * parts.number,)](
                grad_scores, k, k.stride(0), *listed, dq, dq.stride()[:2], *where, scale,
                D=width, H=heads, PADDED_HEADS=plan.padded_heads, HEADS=tiles.heads, KEYS=tiles.keys,
                PARTS=parts.number, MAIN=parts.main, EXTRA=parts.extra,
                num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
            order = None
            if deterministic:
                order = by_key(
                    indices[begin : begin + count], Rows(lo, hi, slots, k_offset).part(begin, begin + count), k.shape[0]
                )
            for target, factor, product, second in sums:
                _add_to_keys(target, factor, product, second, listed, where, count, plan, order)
    return dq, dk, dv


def _add_to_keys(
    target: Tensor,
    scale: float,
    product: _Factors,
    second: _Factors | None,
    listed: tuple[Tensor | int, ...],
    where: tuple[int, int, int],
    count: int,
    plan: _Plan,
    order: ByKey | None,
) -> None:
    """Adds `scale * left^T @ right`, and a second such product, of a chunk's rows to the keys they name."""
    width = target.shape[1]
    left, right = product
    left_v, right_v = second or (None, right)
    tiles = plan.grad_key
    parts = _parts(width, tiles.columns)
    into = target
    if order is not None:
        into = torch.empty((count * plan.slots, width), dtype=torch.float32, device=target.device)
    grad_key_kernel[(count * parts.number,)](
        left, right, right.stride()[:2], left_v, right_v, right_v.stride()[:2], *listed,
        into, into.stride(0), *where, plan.slots, scale,
        WIDTH=width, WIDTH_V=right_v.shape[2], H=right.shape[1], PADDED_HEADS=plan.padded_heads,
        HEADS=tiles.heads, KEYS=tiles.keys, PARTS=parts.number, MAIN=parts.main, EXTRA=parts.extra,
        ATOMIC=order is None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if order is not None:
        add_by_key(target, into, order)


class _Plan(NamedTuple):
    """How many rows make a chunk, how wide a row's workspaces are, and every kernel's tiles."""

    rows: int
    slots: int
    padded_heads: int
    padded_slots: int
    scores: Tiles
    grad_query: Tiles
    grad_key: Tiles


def _plan(q: Tensor, indices: Tensor, aligned: bool, deterministic: bool, chunk_rows: int | None) -> _Plan:
    rows, heads, width = q.shape
    slots = indices.shape[1]
    size = q.element_size()
    scores = SCORES if aligned else SCORES_UNALIGNED
    grad_key = GRAD_KEY if heads <= GRAD_KEY[size].heads else GRAD_KEY_MANY_HEADS
    every = [_fitted(table[size], heads, slots, width) for table in (scores, GRAD_QUERY, grad_key)]
    most_heads, most_keys = max(tiles.heads for tiles in every), max(tiles.keys for tiles in every)
    padded_heads = triton.cdiv(heads, most_heads) * most_heads
    padded_slots = triton.cdiv(slots, most_keys) * most_keys
    budget, row_bytes = WORKSPACE, 2 * padded_heads * padded_slots * size
    if deterministic:
        budget, row_bytes = WORKSPACE_DETERMINISTIC, row_bytes + slots * width * 4
    return _Plan(min(rows, chunk_rows or max(1, budget // row_bytes)), slots, padded_heads, padded_slots, *every)


def _fitted(tiles: Tiles, heads: int, slots: int, width: int) -> Tiles:
    """Tiles no larger than the operands need; 16 is the least that a product of Triton's takes."""
    heads, keys, columns = (
        min(most, max(16, _power_of_two(size))) for most, size in zip(tiles, (heads, slots, width), strict=False)
    )
    return Tiles(heads, keys, columns, tiles.warps, tiles.stages)


class _Parts(NamedTuple):
    """Columns cut into parts, each of `main` of the first number * main and `extra` of the rest."""

    number: int
    main: int
    extra: int


def _parts(width: int, most: int) -> _Parts:
    """Parts of at most `most` columns and half as many: 576 = 4 * (128 + 16). Triton's tiles are powers of two."""
    main = max(16, min(most, _power_of_two(width)))
    while True:
        number = max(1, width // main)
        rest = max(0, width - number * main)
        extra = max(16, _power_of_two(-(-rest // number))) if rest else 0
        if main == 16 or (width >= main and extra <= main // 2):
            return _Parts(number, main, extra)
        main //= 2


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _check_contiguous(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} along its last dimension; the Triton kernels need 1")
