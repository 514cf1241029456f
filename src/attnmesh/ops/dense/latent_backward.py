"""The backward of dense attention over latents on Hopper: weights by a kernel in Triton, products by cuBLAS.

A row is one query head at one position: all heads share one KV head, so that sums over heads are a part of the
products. For a chunk of rows and the keys that they attend to, the kernel computes the weights p and the gradients ds
of the scores from the log-sum-exp of the whole softmax, in memory, and the products add to the gradients::

    grad_v += p^T @ grad_out        ds = p * (grad_out @ v^T - delta)
    grad_k += scale * ds^T @ q      grad_q += scale * ds @ k

The memory of a chunk is bounded. The sums are float32, and have an order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.core.visibility import Patch
from attnmesh.ops.dense import gluon_latent
from attnmesh.ops.dense.call import Call, loadable
from attnmesh.ops.dense.triton_backward import as_bounds
from attnmesh.ops.dense.triton_tiles import LOG2_E, PLAIN, Bounds, ScoreTerms
from attnmesh.ops.gluon_descriptor import tile_descriptor
from attnmesh.ops.launch import cdiv

_LOG2_E = tl.constexpr(LOG2_E)
_ALIGNED = 128  # keys, to which a chunk is extended: rows of the weights begin at multiples of 256 bytes
_ROW_TILES = 8  # whose programs run together
_MOST_WEIGHTS = 16384 * 8192  # of a chunk: 256 MiB, and as much for the gradients of scores
_ROWS = 16384, 32768  # of a chunk: the least for which products are fast, and the most
_CHUNKS = 8  # of a long sequence: under a causal mask, 1/8 of the weights that are computed are zeros
_LEAST_WEIGHTS = 1 << 19  # of a sequence: with fewer, the time of the host's launches decides
_MOST_WASTE = 7  # pairs that are multiplied for each visible one: products are some 8 times as fast as Triton's kernels


class LatentTiles(NamedTuple):
    """The rows and keys of a chunk, and of one program of the kernel, with its warps and pipeline stages.

    Without `chunk_rows`, as many as are fastest on an H200.
    """

    chunk_rows: int | None = None
    chunk_keys: int = 8192
    rows: int = 64
    keys: int = 128
    columns: int = 64
    warps: int = 4
    stages: int = 2


def why_not(call: Call) -> str | None:
    """The reason why the backward cannot serve a call on a Hopper GPU; None if it can."""
    reason = gluon_latent.not_latents(call.q, call.k, call.v, call.scores)
    if reason is None and torch.are_deterministic_algorithms_enabled():
        return "torch has settings of its own for deterministic matrix products (CUBLAS_WORKSPACE_CONFIG)"
    return reason


def why_slower(call: Call) -> str | None:
    """The reason why Triton's kernels are faster for a call whose `why_not` is None; None if they are not."""
    q, k = call.q, call.k
    if q.shape[1] * q.shape[2] * k.shape[2] < _LEAST_WEIGHTS:
        return "Triton's kernels are faster for so few rows and keys"
    if isinstance(call.visibility, Patch) and _is_mostly_waste(call.visibility, q, k):
        return "Triton's kernels are faster where a row attends to so few keys"
    return None


def _is_mostly_waste(patch: Patch, q: Tensor, k: Tensor) -> bool:
    """Whether most of the pairs that chunks multiply are not visible.

    The keys of a chunk are those of one row, and up to one more for each other row.
    """
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    rows = q_len * (patch.mask.sequences or 1)
    return rows * min(_positions(heads, q_len, kv_len, LatentTiles()), q_len) > _MOST_WASTE * patch.pairs


def backward(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, *, scale: float, causal: bool,
    bounds: tuple[Tensor, Tensor] | Bounds | None, grad_q: Tensor | None = None, grad_k: Tensor | None = None,
    grad_v: Tensor | None = None, overwrite: bool = False, overwrite_keys: bool = False, terms: ScoreTerms = PLAIN,
    tiles: LatentTiles | None = None,
) -> None:  # fmt: skip
    """`triton_backward.backward` for arguments whose `why_not` is None."""
    overwrite_keys |= overwrite
    if not q.numel() or not k.numel():
        for grad, overwritten in ((grad_q, overwrite), (grad_k, overwrite_keys), (grad_v, overwrite_keys)):
            if grad is not None and overwritten:
                grad.zero_()
        return
    tiles = tiles or LatentTiles()
    visible = as_bounds(causal, q, k) if bounds is None else Bounds.of(bounds)
    sum_k, sum_v = (None if grad is None else _sums(grad, overwrite_keys) for grad in (grad_k, grad_v))
    chunks, most = _chunks(visible, q, k, tiles)
    weights, grad_scores = q.new_empty(2, most)
    for sequence in range(q.shape[0]):
        keys = loadable(k[sequence, 0])
        # Under a causal mask the last rows have the most work, during which the host launches that of the others.
        for positions, parts in reversed(chunks[sequence % len(chunks)]):
            rows, grad_out_rows = (_rows(x[sequence], positions) for x in (q, grad_out))
            row_terms = lse[sequence, :, positions], delta[sequence, :, positions]
            sum_q = None if grad_q is None else _RowSums(grad_q[sequence], positions, overwrite)
            for part, span in parts:
                seen = keys[span]
                # Rows begin at multiples of 256 bytes.
                p, ds = (x.as_strided((len(rows), len(seen)), (_aligned(len(seen)), 1)) for x in (weights, grad_scores))
                interval = visible.of_rows(part, sequence, positions)
                _launch(rows, grad_out_rows, seen, *row_terms, *interval, p, ds, span.start, scale, tiles)
                if sum_v is not None:
                    _add_product(sum_v[sequence, 0, span], p.T, grad_out_rows)
                if sum_k is not None:
                    _add_product(sum_k[sequence, 0, span], ds.T, rows, scale)
                if sum_q is not None:
                    sum_q.add(ds, seen, scale)
            if sum_q is not None:
                sum_q.finish()
    for grad, total in ((grad_k, sum_k), (grad_v, sum_v)):
        if grad is not None and total is not None and grad is not total:
            if overwrite_keys:
                grad.copy_(total)
            else:
                grad.add_(total)


class _RowSums:
    """The sum of the products that are the gradient of a chunk of rows, in float32."""

    def __init__(self, grad: Tensor, positions: slice, overwrite: bool) -> None:
        self._grad, self._overwrite = grad[:, positions].transpose(0, 1), overwrite
        _, heads, width = self._grad.shape
        # In place where the gradient is float32 and its rows follow one another.
        in_place = grad.dtype == torch.float32 and self._grad.stride() == (heads * width, width, 1)
        self._sum = self._grad.flatten(0, 1) if in_place else None
        self._in_place, self._empty = in_place, overwrite or not in_place

    def add(self, ds: Tensor, keys: Tensor, scale: float) -> None:
        """Adds ds @ keys."""
        if self._sum is None:
            self._sum = ds.new_empty(len(ds), keys.shape[1], dtype=torch.float32)
        _add_product(self._sum, ds, keys, scale, overwrite=self._empty)
        self._empty = False

    def finish(self) -> None:
        """Rounds the sum to the gradient, unless it is in place."""
        if self._empty:
            if self._overwrite:
                self._grad.zero_()
        elif not self._in_place:
            total = self._sum.view(self._grad.shape)  # type: ignore[union-attr]
            if self._overwrite:
                self._grad.copy_(total)
            else:
                self._grad.add_(total)


def _sums(grad: Tensor, overwrite: bool) -> Tensor:
    """Where products are added: the gradient itself if it is float32."""
    if grad.dtype != torch.float32:
        return torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)
    return grad.zero_() if overwrite else grad


def _add_product(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, *, overwrite: bool = False) -> None:
    """Adds scale * a @ b to float32 sums, or overwrites them."""
    beta = 0.0 if overwrite else 1.0
    if total.is_cuda:
        torch.addmm(total, a, b, beta=beta, alpha=scale, out_dtype=torch.float32, out=total)
    else:  # where kernels are interpreted
        torch.addmm(total, a.float(), b.float(), beta=beta, alpha=scale, out=total)


def _rows(x: Tensor, positions: slice) -> Tensor:
    """The rows [positions * H, D] of some positions of [H, S, D]; copied where strides do not allow it."""
    return loadable(x[:, positions].transpose(0, 1).flatten(0, 1))


def _aligned(keys: int) -> int:
    return cdiv(keys, _ALIGNED) * _ALIGNED


_Parts = list[tuple[int, slice]]  # of the mask, and keys


def _chunks(visible: Bounds, q: Tensor, k: Tensor, tiles: LatentTiles) -> tuple[list[list[tuple[slice, _Parts]]], int]:
    """For each sequence of the bounds, positions and the keys that they attend to; and the most elements of a matrix.

    All keys where the host does not know the bounds.
    """
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    key = "chunks", heads, kv_len, tiles
    if key in visible.kept:
        return visible.kept[key]  # type: ignore[no-any-return]
    length = _positions(heads, q_len, kv_len, tiles)
    starts = range(0, q_len, length)
    assert visible.first is not None
    first = torch.zeros(visible.first.shape, dtype=torch.int32, device="cpu")
    hull = _hull(*(visible.on_host or (first, first + kv_len)), length)
    chunks, most = [], 0
    for sequence in range(visible.first.shape[1]):
        of_sequence = []
        for number, start in enumerate(starts):
            positions = slice(start, min(start + length, q_len))
            parts = []
            for part in range(visible.parts):
                low, high = hull[part][sequence][number]
                low, high = low // _ALIGNED * _ALIGNED, min(_aligned(high), kv_len)
                for begin in range(low, high, tiles.chunk_keys):
                    parts.append((part, slice(begin, min(begin + tiles.chunk_keys, high))))
                    most = max(most, (positions.stop - start) * heads * _aligned(parts[-1][1].stop - begin))
            of_sequence.append((positions, parts))
        chunks.append(of_sequence)
    visible.kept[key] = chunks, most
    return chunks, most


def _positions(heads: int, q_len: int, kv_len: int, tiles: LatentTiles) -> int:
    """The positions of a chunk."""
    rows = tiles.chunk_rows
    if rows is None:
        least, most = _ROWS
        rows = min(most, _MOST_WEIGHTS // min(_aligned(kv_len), tiles.chunk_keys), max(least, q_len // _CHUNKS * heads))
    return max(1, rows // heads)


def _hull(first: Tensor, end: Tensor, length: int) -> list[list[list[tuple[int, int]]]]:
    """By part and sequence, the keys from the first to the last that any of `length` rows sees."""
    seen = first < end
    padding = 0, -first.shape[2] % length
    low = torch.nn.functional.pad(torch.where(seen, first, 1 << 30), padding, value=1 << 30)
    high = torch.nn.functional.pad(torch.where(seen, end, 0), padding)
    low, high = (x.unflatten(2, (-1, length)) for x in (low, high))
    return torch.stack([low.amin(3), high.amax(3)], 3).tolist()


def _launch(
    rows: Tensor, grad_out: Tensor, keys: Tensor, lse: Tensor, delta: Tensor, first: Tensor, end: Tensor,
    weights: Tensor, grad_scores: Tensor, begin: int, scale: float, tiles: LatentTiles,
) -> None:  # fmt: skip
    """Writes the weights and the gradients of the scores [rows, keys] of a chunk."""
    grid = (cdiv(len(rows), tiles.rows) * cdiv(len(keys), tiles.keys),)
    of_rows, of_keys, of_weights = ([tiles.rows, tiles.columns], [tiles.keys, tiles.columns], [tiles.rows, tiles.keys])
    with torch.cuda.device_of(rows):
        _weights_kernel[grid](
            tile_descriptor(rows, of_rows), tile_descriptor(grad_out, of_rows), tile_descriptor(keys, of_keys),
            lse, *lse.stride(), delta, *delta.stride(), first, end,
            tile_descriptor(weights, of_weights), tile_descriptor(grad_scores, of_weights),
            len(rows), len(keys), lse.shape[0], begin, scale,
            D=keys.shape[1], COLUMNS=tiles.columns, ROWS=tiles.rows, KEYS=tiles.keys, GROUP=_ROW_TILES,
            STAGES=tiles.stages, num_warps=tiles.warps,
        )  # fmt: skip


# Chunks begin anywhere and have any size, and each would recompile.
@triton.jit(
    do_not_specialize=[
        "lse_head", "lse_row", "delta_head", "delta_row", "row_count", "key_count", "heads", "key_begin",
    ],
    do_not_specialize_on_alignment=["lse", "delta", "first", "end"],
)  # fmt: skip
def _weights_kernel(
    q, grad_out, k, lse, lse_head, lse_row, delta, delta_head, delta_row, first, end, weights, grad_scores,
    row_count, key_count, heads, key_begin, scale,
    D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of the weights and of the gradients of scores; zeros where a row does not attend to a key."""
    # Programs that run together share the keys of a few tiles and the rows of GROUP tiles.
    row_tiles, key_tiles, program = tl.cdiv(row_count, ROWS), tl.cdiv(key_count, KEYS), tl.program_id(0)
    group = program // (GROUP * key_tiles)
    size = tl.minimum(GROUP, row_tiles - group * GROUP)
    program -= group * GROUP * key_tiles
    row_begin, key_at = (group * GROUP + program % size) * ROWS, program // size * KEYS

    row = row_begin + tl.arange(0, ROWS)
    position, head, real = row // heads, row % heads, row < row_count
    row_lse = tl.load(lse + head * lse_head + position * lse_row, mask=real, other=float("-inf"))
    row_delta = tl.load(delta + head * delta_head + position * delta_row, mask=real, other=0.0)
    attends = row_lse != float("-inf")
    row_first = tl.load(first + position, mask=attends, other=0)
    row_end = tl.load(end + position, mask=attends, other=0)
    tile_begin = key_begin + key_at
    some = tl.max(tl.where(tl.maximum(row_first, tile_begin) < tl.minimum(row_end, tile_begin + KEYS), 1, 0), 0)

    products = tl.zeros((ROWS, KEYS), tl.float32)
    grad_weights = tl.zeros((ROWS, KEYS), tl.float32)
    for column in tl.range(0, some * D, COLUMNS, num_stages=STAGES):
        k_tile = k.load([key_at, column]).T
        products = tl.dot(q.load([row_begin, column]), k_tile, products, input_precision="ieee")
        # The columns of keys beyond those of values meet zeros: faster than a loop of their own.
        grad_weights = tl.dot(grad_out.load([row_begin, column]), k_tile, grad_weights, input_precision="ieee")

    keys = tile_begin + tl.arange(0, KEYS)
    visible = (keys >= row_first[:, None]) & (keys < row_end[:, None])
    p = tl.exp2(products * (scale * _LOG2_E) - (row_lse * _LOG2_E)[:, None])
    p = tl.where(visible, p, 0.0)
    ds = tl.where(visible, p * (grad_weights - row_delta[:, None]), 0.0)
    weights.store([row_begin, key_at], p.to(weights.dtype))
    grad_scores.store([row_begin, key_at], ds.to(grad_scores.dtype))
