"""Dense attention over latents on Hopper: keys of 576 or 512 features whose first 512 are the values (MLA, absorbed).

One KV head has all query heads. The kernel of sparse attention serves it, with a range of keys per row instead of
indices: an item is 64 heads of one query, which share the keys that are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.core.state import State, add_sinks, merge_into
from attnmesh.ops.dense import triton_forward
from attnmesh.ops.dense.call import Scores, values_in_keys
from attnmesh.ops.dense.triton_tiles import PLAIN, Bounds, ScoreTerms
from attnmesh.ops.launch import Launch, Recent, signature
from attnmesh.ops.merge import stream_of
from attnmesh.ops.sparse.arguments import RowBounds
from attnmesh.ops.sparse.gluon_common import D_TAIL, D_V, HEADS
from attnmesh.ops.sparse.gluon_forward import launch_ranges

_LEAST_FILLED = 0.5  # of the rows of a tile: with fewer heads the kernel in Triton is faster


def why_not(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> str | None:
    """The reason why the kernel cannot serve these tensors on a Hopper GPU; None if it can."""
    heads, reason = q.shape[1], not_latents(q, k, v, scores)
    if reason is None and heads < _LEAST_FILLED * HEADS * -(-heads // HEADS):
        return f"it takes query heads that fill half of a tile of {HEADS}"
    return reason


def not_latents(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> str | None:
    """The reason why these are not queries and latents in 16 bits with plain scores; None if they are."""
    if q.dtype not in (torch.bfloat16, torch.float16) or v.shape[3] != D_V or q.shape[3] not in (D_V, D_V + D_TAIL):
        return f"it takes fp16 and bf16 keys of {D_V} or {D_V + D_TAIL} features and values of {D_V}"
    if not v.numel() or not values_in_keys(k, v):
        return f"values must be the first {D_V} features of the keys, v = k[..., :{D_V}]"
    if k.shape[1] != 1:
        return "it takes one KV head"
    return None if scores.plain else "it takes no softcap and no alibi_slopes"


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, bounds: tuple[Tensor, Tensor] | Bounds | None,
    state: State | None, out_dtype: torch.dtype, terms: ScoreTerms = PLAIN, sinks: Tensor | None = None,
) -> State:  # fmt: skip
    """`triton_forward.forward` for arguments whose `why_not` is None."""
    visible = Bounds.of(bounds)
    if visible.parts > 1 or not q.numel():
        return triton_forward.forward(
            q, k, v, scale=scale, causal=causal, bounds=bounds, state=state, out_dtype=out_dtype, terms=terms,
            sinks=sinks,
        )  # fmt: skip
    batch, heads, length, _ = q.shape
    rows, keys = _flat(q.transpose(1, 2)), _flat(k.transpose(1, 2))[:, 0]
    out = q.new_empty(batch, length, heads, D_V, dtype=out_dtype if state is None else torch.float32)
    lse = torch.empty(batch, length, heads, dtype=torch.float32, device=q.device)
    results = out.view(-1, heads, D_V), lse.view(-1, heads)
    last_sinks = None if sinks is None or state is not None else sinks.float().contiguous()
    ranges = _ranges(q, k, causal, visible)
    given = rows, keys, *ranges[:3], last_sinks, *results
    key = signature(*given), scale
    launch = _known.get(key)
    if launch is not None:
        launch(*given[:2], None, None, *given[2:])
    else:
        with torch.cuda.device_of(q):
            _known.add(key, launch_ranges(rows, keys, ranges, scale, last_sinks, results))
    new = State(out.transpose(1, 2), lse.transpose(1, 2))
    if state is None:
        return new
    merge_into(state, new)
    if sinks is not None:
        state = add_sinks(state, sinks[:, None])
    return state if out_dtype == torch.float32 else State(state.out.to(out_dtype), state.lse)


_known: Recent[Launch] = Recent()
_kept: Recent[RowBounds] = Recent(32)


def _flat(x: Tensor) -> Tensor:
    """The rows [B, S, H, D] of all sequences one after another [B * S, H, D]; copied where strides do not allow it."""
    if x.stride(3) != 1 or x.data_ptr() % 16 or any(n % 16 for n in x.stride()[1:3]):
        x = x.contiguous()
    return x.flatten(0, 1)


def _ranges(q: Tensor, k: Tensor, causal: bool, visible: Bounds) -> RowBounds:
    """The keys of every row of all sequences. Kept for each stream, as what has been computed on one."""
    batch, _, length, _ = q.shape
    keys, stream = k.shape[2], stream_of(q)
    kept = _kept if visible.first is None else visible.kept
    key = "ranges", batch, length, keys, causal, q.device, stream
    known: RowBounds | None = kept.get(key)
    if known is not None:
        return known
    if visible.first is not None and visible.end is not None:
        first, end = (x[0].expand(batch, -1).clamp(max=keys) for x in (visible.first, visible.end))
    else:
        end = torch.full((batch, length), keys, dtype=torch.int32, device=q.device)
        if causal:
            end = torch.arange(1, length + 1, dtype=torch.int32, device=q.device).expand(batch, -1)
        first = torch.zeros_like(end)
    count = (end - first).clamp(min=0)
    offset = keys * torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    lo = (first + offset).flatten()
    found = RowBounds(lo, lo + count.flatten(), count.flatten(), 0)
    if stream is not None:
        kept[key] = found
    return found
