"""The backward of attention on Hopper in Gluon, host side.

The kernel is in `gluon_backward_kernel`. It adds to float32 gradients, or overwrites them if one program computes them.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attnmesh.ops.dense import triton_backward
from attnmesh.ops.dense.call import is_loadable, loadable
from attnmesh.ops.dense.gluon_backward_kernel import backward_kernel
from attnmesh.ops.dense.gluon_backward_memory import TILE, Shape
from attnmesh.ops.dense.triton_tiles import PLAIN, Bounds, ScoreTerms, padded
from attnmesh.ops.gluon_descriptor import descriptor
from attnmesh.ops.launch import Launch, Recent, cdiv, prepare, signature

MAX_WIDTH = 256  # of keys and values
_SHARED_MEMORY = 220 * 1024  # bytes of a program, without the terms of rows
_FULL = 0.7  # of the processors are enough programs
_FULL_CAUSAL = 1.9  # programs per processor, which is idle when it has had a long one and no short ones are left
_FULL_CAUSAL_SHARED = 4.0  # of 64 keys
_MOST_COLUMNS = 256  # of sums per key in registers, besides the scores of 64 rows
_LONG = 16384  # rows, from which pairs of steps are not faster
_CACHED = 40e6  # bytes of queries, grad_out and float32 gradients, which the L2 cache holds


class BackwardTiles(NamedTuple):
    """How a launch is divided, and how a step runs.

    `stages` of q and grad_out in shared memory. A program sums over `heads` query heads of a group (None: all of them;
    else programs add to grad_k and grad_v atomically). `paired`: ds is exchanged once in two steps, and a turn of the
    loop has two; not for wide heads. `held`: keys and values stay in registers. `shared_keys`: a program has 64 keys,
    of which one consumer has grad_v and the other grad_k, and `grad_out_stages`; for heads too wide for 128, always.
    Programs of `section` KV heads, or shares of their groups, run together (None: of as many as the L2 cache serves).
    `ordered`: key tiles add to grad_q one after another; only in pairs of steps.
    """

    stages: int = 2
    heads: int | None = None
    paired: bool = True
    held: bool = False
    shared_keys: bool = False
    grad_out_stages: int = 1
    section: int | None = None
    ordered: bool = False

    @classmethod
    def pick(cls, q: Tensor, v: Tensor, *, causal: bool = False, slopes: Tensor | None = None) -> "BackwardTiles":
        """The fastest tiles on an H200 for the head dims and lengths that leave room for the terms of slopes."""
        batch, q_heads, q_len, _ = q.shape
        kv_heads, kv_len, _ = v.shape[1:]
        key_width, value_width = _width(q), _width(v)
        columns = key_width + value_width
        no_room = slopes is not None and not causal  # for slopes and bounds
        shared_keys = _too_wide(key_width, value_width) or (no_room and columns > _MOST_COLUMNS)
        # Few keys: programs divide the heads of a group, until most processors have one, or two that are not equal.
        programs = batch * kv_heads * triton.cdiv(kv_len, TILE if shared_keys else 2 * TILE)
        full = (_FULL_CAUSAL_SHARED if shared_keys else _FULL_CAUSAL) if causal else _FULL
        group, enough = q_heads // kv_heads, full * _processors(q)
        splits = next((n for n in range(1, group) if group % n == 0 and n * programs >= enough), group)
        heads = None if splits == 1 else group // splits
        if shared_keys:
            return cls(heads=heads, shared_keys=True, grad_out_stages=2 if columns <= 384 else 1)
        if max(key_width, value_width) == 64:
            return cls(stages=4, heads=heads, held=True)
        return cls(heads=heads, paired=(q_len < _LONG or key_width > 128) and not no_room)


def _too_wide(key_width: int, value_width: int) -> bool:
    """Whether registers and shared memory do not hold 128 keys."""
    return key_width + value_width > _MOST_COLUMNS and (key_width > 192 or value_width > 128)


def _processors(q: Tensor) -> int:
    # One in the emulation and where kernels are only compiled.
    return torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1


def why_not(q: Tensor, v: Tensor) -> str | None:
    """The reason why the kernel cannot serve these queries and values on a Hopper GPU; None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its backward kernel takes fp16 and bf16, not {q.dtype}"
    if any(x.shape[-1] % 8 or x.shape[-1] > MAX_WIDTH for x in (q, v)):
        return (
            f"its backward kernel takes multiples of 8 up to {MAX_WIDTH} as head_dim, "
            f"not {q.shape[-1]} (keys) and {v.shape[-1]} (values)"
        )
    return None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    scale: float,
    causal: bool,
    bounds: tuple[Tensor, Tensor] | Bounds | None,
    grad_q: Tensor | None = None,
    grad_k: Tensor | None = None,
    grad_v: Tensor | None = None,
    overwrite: bool = False,
    overwrite_keys: bool = False,
    terms: ScoreTerms = PLAIN,
    deterministic: bool = False,
    tiles: BackwardTiles | None = None,
) -> None:
    """`triton_backward.backward` for arguments whose `why_not` is None, on Hopper.

    Programs add to grad_q in the order in which they come or, if `deterministic`, in the order of keys. With slopes,
    and for heads wider than 128, a second pass, in Triton, computes it then.
    """
    overwrite_keys |= overwrite
    if deterministic and grad_q is not None and not _takes_turns(q, v, terms, tiles):
        common: dict[str, Any] = {
            "scale": scale,
            "causal": causal,
            "bounds": bounds,
            "overwrite": overwrite,
            "terms": terms,
        }
        triton_backward.backward(q, k, v, grad_out, lse, delta, grad_q=grad_q, **common)
        grad_q = None
    if grad_q is grad_k is grad_v is None:
        return
    visible = Bounds.of(bounds)
    given = q, k, v, grad_out, lse, delta, visible.first, visible.end
    of_alibi = None if terms.slopes is None else signature(*terms[1:4])
    how = scale, causal, overwrite, overwrite_keys, terms.softcap, of_alibi, deterministic, tiles
    key = signature(*given, grad_q, grad_k, grad_v), *how
    grads = grad_q, grad_k, grad_v
    known = _known.get(key)
    if known is not None and known.in_place:
        for at in known.zeroed:
            grads[at].zero_()  # type: ignore[union-attr]
        if known.together is not None and grad_k is not None:
            torch.as_strided(grad_k, *known.together, grad_k.storage_offset()).zero_()
        _repeat(known, bounds, visible, given[:6], grads, terms)
        return
    written = overwrite, overwrite_keys, overwrite_keys
    if known is None:
        if q.numel() == 0 or k.numel() == 0:
            for grad, overwritten in zip(grads, written, strict=True):
                if grad is not None and overwritten:
                    grad.zero_()
            return
        q, k, v, grad_out = (loadable(x) for x in given[:4])
        tiles = _tiles(tiles, q, v, causal, terms, deterministic)
        once = overwrite_keys and tiles.heads is None and visible.parts == 1
    else:
        once = known.once
    sums = (
        None if grad_q is None else _sums(grad_q, overwrite, once=False),
        None if grad_k is None else _sums(grad_k, overwrite_keys, once),
        None if grad_v is None else _sums(grad_v, overwrite_keys, once),
    )
    if known is not None:
        _repeat(known, bounds, visible, given[:6], sums, terms)
    else:
        assert tiles is not None
        with torch.cuda.device_of(q):
            known = _launch(q, k, v, grad_out, lse, delta, *sums, scale, causal, visible, terms, once, tiles)
        if all(x is y for x, y in zip((q, k, v, grad_out), given, strict=False)):
            if all(x is y for x, y in zip(grads, sums, strict=True)):
                known = known.adding_in_place(grads, overwrite, overwrite_keys and not once)
            _known.add(key, known)
    for grad, total, overwritten in zip(grads, sums, written, strict=True):
        if grad is not None and total is not None and grad is not total:
            if overwritten:
                grad.copy_(total)
            else:
                grad.add_(total)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor, *, needs: tuple[bool, bool, bool],
    scale: float, causal: bool, bounds: tuple[Tensor, Tensor] | Bounds | None, terms: ScoreTerms = PLAIN,
    deterministic: bool = False, tiles: BackwardTiles | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of q, k and v, or None where they are not needed, in their dtype."""
    visible = Bounds.of(bounds)
    rows = q, k, v, grad_out, lse, delta
    of_alibi = None if terms.slopes is None else signature(*terms[1:4])
    how = scale, causal, terms.softcap, of_alibi, deterministic, tiles
    key = signature(*rows, visible.first, visible.end), needs, *how
    known = _known.get(key)
    once = False
    if known is not None:
        once = known.once
    else:
        apart = deterministic and not _takes_turns(q, v, terms, tiles)
        apart |= not q.numel() or not k.numel() or not all(is_loadable(x) for x in rows[:4])
        if apart or not any(needs):
            grads = [torch.empty_like(x) if need else None for x, need in zip(rows[:3], needs, strict=True)]
            grad_q, grad_k, grad_v = grads
            backward(
                *rows, scale=scale, causal=causal, bounds=bounds, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v,
                overwrite=True, terms=terms, deterministic=deterministic, tiles=tiles,
            )  # fmt: skip
            return grads
        tiles = _tiles(tiles, q, v, causal, terms, deterministic)
        once = tiles.heads is None and visible.parts == 1
    sums = _new_sums(q, k, v, needs, once)
    if known is not None:
        _repeat(known, bounds, visible, rows, sums, terms)
    else:
        assert tiles is not None
        with torch.cuda.device_of(q):
            _known.add(key, _launch(*rows, *sums, scale, causal, visible, terms, once, tiles))
    return [x if x is None or x.dtype == q.dtype else x.to(q.dtype) for x in sums]


def _tiles(
    tiles: BackwardTiles | None, q: Tensor, v: Tensor, causal: bool, terms: ScoreTerms, deterministic: bool
) -> BackwardTiles:  # fmt: skip
    """The tiles of a launch, in which, if `deterministic`, nothing is added in the order in which programs come."""
    tiles = tiles or BackwardTiles.pick(q, v, causal=causal, slopes=terms.slopes)
    if not deterministic:
        return tiles
    tiles = tiles._replace(heads=None)
    return tiles._replace(paired=True, ordered=True) if _takes_turns(q, v, terms, tiles) else tiles


def _takes_turns(q: Tensor, v: Tensor, terms: ScoreTerms, tiles: BackwardTiles | None) -> bool:
    """Whether key tiles can add to grad_q one after another."""
    return max(q.shape[-1], v.shape[-1]) <= 2 * TILE and terms.slopes is None and not (tiles and tiles.shared_keys)


def _new_sums(
    q: Tensor, k: Tensor, v: Tensor, needs: tuple[bool, bool, bool], once: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Where the kernel adds, in the layout of the inputs: float32 zeros, or memory that it writes once."""

    def summed(x: Tensor) -> Tensor:
        return torch.empty_like(x) if once else torch.zeros_like(x, dtype=torch.float32)

    return (
        torch.zeros_like(q, dtype=torch.float32) if needs[0] else None,
        summed(k) if needs[1] else None,
        summed(v) if needs[2] else None,
    )


class _Known(NamedTuple):
    """What a call launches: a kernel for each part of the mask, the keys of a program, and if it writes only once.

    `ordered`: key tiles add to grad_q one after another.

    `in_place`: it adds to the gradients themselves, of which some are `zeroed` first, the gradients of keys and values
    `together` (the shape and strides of both) where they are columns of the same rows.
    """

    launches: tuple[Launch, ...]
    keys: int
    once: bool
    ordered: bool
    in_place: bool = False
    zeroed: tuple[int, ...] = ()
    together: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def adding_in_place(self, grads: "_Three", zeroes_query: bool, zeroes_keys: bool) -> "_Known":
        """The launch with the gradients that it zeroes first."""
        _, k, v = grads
        if zeroes_keys and k is not None and v is not None and k.stride() == v.stride():
            width = k.shape[3] + v.shape[3]
            follows = v.data_ptr() - k.data_ptr() == k.shape[3] * k.element_size() and min(k.stride()[:3]) == width
            if follows and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr():
                zeroed = (0,) if zeroes_query and grads[0] is not None else ()
                return self._replace(in_place=True, zeroed=zeroed, together=((*k.shape[:3], width), k.stride()))
        wanted = zeroes_query, zeroes_keys, zeroes_keys
        return self._replace(in_place=True, zeroed=tuple(i for i in range(3) if wanted[i] and grads[i] is not None))


_known: Recent[_Known] = Recent()
_Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def _repeat(
    known: _Known, bounds: object, visible: Bounds, rows: Sequence[Tensor], sums: _Three, terms: ScoreTerms
) -> None:  # fmt: skip
    if bounds is None:
        known.launches[0](*rows, None, None, None, _turns(rows[0]) if known.ordered else None, *sums, *terms[1:4])
        return
    for part, launch in zip(visible.each(), known.launches, strict=True):
        ranges = triton_backward.rows_per_key_tile(part, rows[0].shape[2], rows[1].shape[2], known.keys)
        launch(*rows, part.first, part.end, ranges, _turns(rows[0]) if known.ordered else None, *sums, *terms[1:4])


def _turns(q: Tensor) -> Tensor:
    """The counters of a launch whose key tiles add to grad_q one after another; see `gluon_backward_memory.Turns`."""
    return torch.zeros(*q.shape[:2], cdiv(q.shape[2], TILE), dtype=torch.int32, device=q.device)


def _sums(grad: Tensor, overwrite: bool, once: bool) -> Tensor:
    """Where the kernel adds: to the gradient itself if it writes `once`, or if the copy engine can add to it."""
    if once:
        return grad
    if grad.dtype == torch.float32 and is_loadable(grad):
        return grad.zero_() if overwrite else grad
    return torch.zeros(grad.shape, dtype=torch.float32, device=grad.device)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor,
    grad_q: Tensor | None, grad_k: Tensor | None, grad_v: Tensor | None,
    scale: float, causal: bool, visible: Bounds, terms: ScoreTerms, overwrite: bool,
    tiles: BackwardTiles,
) -> _Known:  # fmt: skip
    """One launch for each part of the mask."""
    batch, q_heads, q_len, key_dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    members = tiles.heads or q_heads // kv_heads
    splits = q_heads // kv_heads // members
    streams = batch * kv_heads * splits
    # Read twice in 16 bits; gradients are added in 32 bits.
    cached = 2 * (q.numel() + grad_out.numel()) + 4 * q.numel() <= _CACHED
    section = min(streams, tiles.section or (streams if cached else _section(streams)))
    needs_q, scores = grad_q is not None, grad_q is not None or grad_k is not None
    widths = _width(q), _width(v)
    shared_keys = scores and (tiles.shared_keys or _too_wide(*widths))
    halved = scores and grad_v is not None and not shared_keys and (sum(widths) > _MOST_COLUMNS or widths[0] > 2 * TILE)
    wide = shared_keys or halved
    narrow = TILE if wide else 2 * TILE
    key_block, key_blocks = _blocks(key_dim, narrow)
    value_block, value_blocks = _blocks(value_dim, narrow)
    query_block = key_block if tiles.paired or wide else key_block // 2
    unrolled = 2 if tiles.paired and not wide and (needs_q or not scores) else 1
    keys = TILE if shared_keys else 2 * TILE
    stages = tiles.stages if scores else _stages_of_values(*widths)
    # With one use in a turn of the loop, ptxas 12.8 gives the registers of what is held to other values.
    held = tiles.held and tiles.paired and needs_q and not wide
    bounded, ordered = visible.first is not None, tiles.ordered and needs_q
    shape = Shape(
        needs_q, ordered, scores, grad_v is not None, shared_keys, halved, bounded, causal,
        splits > 1, overwrite,
        key_dim, key_block, key_blocks, value_dim, value_block, value_blocks, query_block,
        stages, tiles.grad_out_stages if shared_keys else stages, unrolled, tiles.paired, held,
    )  # fmt: skip
    blocks = (
        descriptor(q, [1, 1, TILE, key_block]), descriptor(grad_out, [1, 1, TILE, value_block]),
        descriptor(k, [1, 1, TILE, key_block]), descriptor(v, [1, 1, TILE, value_block]),
        None if grad_q is None else descriptor(grad_q, [1, 1, TILE, query_block]),
    )  # fmt: skip
    no_strides = (0, 0, 0)
    launches = []
    for part in visible.each():
        ranges = triton_backward.rows_per_key_tile(part, q_len, kv_len, keys) if bounded else None
        turns = _turns(q) if ordered else None
        launch = prepare(
            backward_kernel, (streams * triton.cdiv(kv_len, keys),),
            (
                *blocks, lse, lse.stride(), delta, delta.stride(), part.first, part.end, part.strides[1], ranges, turns,
                grad_k, no_strides if grad_k is None else grad_k.stride()[:3],
                grad_v, no_strides if grad_v is None else grad_v.stride()[:3],
                q_len, kv_len, kv_heads, splits, members, streams, section, scale, terms.softcap, *terms[1:4],
            ),
            (
                q, k, v, grad_out, lse, delta, part.first, part.end, ranges, turns, grad_q, grad_k, grad_v,
                *terms[1:4],
            ),
            SHAPE=shape, num_warps=4, launch_pdl=True,
        )  # fmt: skip
        launches.append(launch)
    return _Known(tuple(launches), keys, overwrite, ordered)


def _section(streams: int) -> int:
    """The KV heads, or shares of their groups, of which programs run together: no slower on an H200 than all."""
    return streams if streams <= 16 else 8 if streams <= 64 else 4


def _stages_of_values(key_width: int, value_width: int) -> int:
    """The stages of a launch that computes grad_v only, which has keys, queries and grad_out in shared memory."""
    return 4 if 4 * TILE * key_width + 4 * 2 * TILE * (key_width + value_width) < _SHARED_MEMORY else 2


def _blocks(head_dim: int, most: int = 2 * TILE) -> tuple[int, int]:
    """The columns of a block of a tile, a power of two, and how many there are."""
    return (TILE, triton.cdiv(head_dim, TILE)) if head_dim > most else (max(TILE, padded(head_dim)), 1)


def _width(x: Tensor) -> int:
    """The columns of a tile."""
    return math.prod(_blocks(x.shape[-1]))
