"""`paged_indexer_topk`: the exact top-k keys of a decode step, from an indexer's keys in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse import dispatch, torch_backend
from attnmesh.ops.sparse.arguments import RowBounds, TopKIndices
from attnmesh.ops.sparse.call import IndexerCall
from attnmesh.ops.sparse.decode import check_tokens
from attnmesh.ops.sparse.paged import IndexerStep, PagedKeys, check_per_row, check_pool, check_table, refuse_gradient
from attnmesh.ops.storage import Stored
from attnmesh.utils.validation import check_bool, check_number, check_positive, check_tensor, shown

KeyRange = tuple[Tensor, Tensor]
_BLOCK_SIZE = 4096  # keys that are scored at a time on a CPU


def paged_indexer_topk(
    iq: Tensor, pool: Stored, block_table: Tensor, w: Tensor, topk: int, *,
    cur_pos: Sequence[int] | Tensor | None = None, key_range: KeyRange | None = None, scale: float = 1.0,
    relu: bool = True, backend: str = "auto",
) -> TopKIndices:  # fmt: skip
    """The exact top-k keys of the new tokens of a decode step: `indices` int32 [B, T, topk], positions in the cache.

    As `indexer_topk`: ascending, then -1; of equal scores the lowest position; a key whose score is NaN is never
    selected; `scores` [B, T, topk] and `lengths` [B, T]. There is no gradient.

    Args:
        iq: [B, T, heads, D], the queries of T new tokens of each of B sequences.
        pool: [num_blocks, block_size, 1, D], the `index_keys` of a `BlockCache`: in the dtype of iq, or fp8_token.
        block_table: int32 [B, blocks]; position p of sequence b is in block `block_table[b, p // block_size]`.
        w: [B, T, heads], the weights of the heads.
        cur_pos: position of the last of the T tokens of each sequence, a list or a tensor on the device of iq; token t
            selects among the positions up to its own. -1 skips a sequence.
        key_range: (first, end), integers [B, T] each, instead: token t of sequence b selects among
            `first[b, t] <= p < end[b, t]`, as needed where the cache holds only a part of the sequence.
        scale, relu: as in `indexer_topk`.
        backend: "auto", "gluon", "triton" or "torch".

    Only keys that some token selects among are read. A block outside the pool, or a position beyond the table, is never
    read. On the CPU it raises ValueError. On a GPU the sequence selects nothing, and a later decode call, or
    `check_decode_errors()`, raises the ValueError.

    Examples:
        >>> pool, table = torch.randn(4, 16, 1, 8), torch.tensor([[3, 0]], dtype=torch.int32)
        >>> iq, w = torch.randn(1, 1, 2, 8), torch.rand(1, 1, 2)
        >>> top = am.sparse.paged_indexer_topk(iq, pool, table, w, topk=4, cur_pos=[2])
        >>> top.indices.tolist()  # three keys up to position 2
        [[[0, 1, 2, -1]]]
    """
    return select(indexer_step(iq, pool, block_table, w, topk, cur_pos, key_range, scale, relu, backend))


def indexer_step(
    iq: Tensor, pool: Stored, block_table: Tensor, w: Tensor, topk: int, cur_pos: Sequence[int] | Tensor | None,
    key_range: KeyRange | None, scale: float, relu: bool, backend: str,
) -> IndexerStep:  # fmt: skip
    """Validates the arguments. Does not read tensors on a device."""
    iq = check_tokens("iq", iq)
    keys = PagedKeys(check_pool("pool", pool, iq, "fp8_token"), check_table(block_table, iq))
    check_positive(topk=topk)
    check_bool(relu=relu)
    bounds = _bounds(cur_pos, key_range, iq)
    return IndexerStep(
        iq,
        keys,
        _check_weights(w, iq),
        topk,
        *bounds,
        check_number("scale", scale),
        relu,
        dispatch.choose_paged("paged_topk", iq, keys, backend),
    )


def select(step: IndexerStep) -> TopKIndices:
    """The top-k of a validated call."""
    if step.backend == "torch":
        return _on_torch(step)
    from attnmesh.ops.sparse import gluon_paged_scores, triton_paged_topk

    return triton_paged_topk.paged_topk(step, gluon_paged_scores if step.backend == "gluon" else None)


def slots_read(step: IndexerStep) -> tuple[Tensor, Tensor]:
    """The slots of the positions that each sequence reads, [B, longest], and their ends. Raises ValueError for a fault.

    Reads tensors on the host: for the CPU.
    """
    iq, keys, batch = step.iq, step.keys, step.iq.shape[0]
    first, end = step.first.clamp(min=0), step.end
    begins = torch.where(first < end, first, torch.iinfo(torch.int32).max).amin(1)
    ends = torch.where(first < end, end, 0).amax(1)
    longest = int(ends.max()) if batch else 0
    assert keys.table is not None
    capacity = keys.table.shape[1] * keys.block_size
    for sequence in (ends > capacity).nonzero():
        raise ValueError(
            f"cur_pos, or the end of key_range, of sequence {int(sequence)} needs position {int(ends[sequence]) - 1}, "
            f"but the block table has space for {capacity}"
        )
    positions = torch.arange(longest, dtype=torch.int32, device=iq.device)[None, None]
    read = (positions >= begins[:, None, None]) & (positions < ends[:, None, None])
    return keys.slots(positions.expand(batch, 1, -1), read)[:, 0], ends


def _on_torch(step: IndexerStep) -> TopKIndices:
    """Sequence by sequence, over its keys in order: the bits are those of `indexer_topk` over the same keys."""
    iq, keys, w, topk, first, end, scale, relu, _ = step
    batch, tokens = iq.shape[:2]
    slots, ends = slots_read(step)
    first = first.clamp(min=0)
    wide = accumulation_dtype(iq.dtype)
    found = []
    for b in range(batch):
        length = int(ends[b])
        own = keys.gather(slots[b, :length], wide).masked_fill(slots[b, :length, None] < 0, 0.0)
        bounds = RowBounds(first[b].int(), end[b].clamp(0, length).int(), torch.full_like(first[b], topk).int(), 0)
        call = IndexerCall(iq[b], own, w[b], None, bounds, scale, relu, False, "torch")
        with torch.no_grad():
            found.append(torch_backend.topk(call, topk, _BLOCK_SIZE))
    if not found:
        scores = iq.new_empty(0, tokens, topk, dtype=wide)
        return TopKIndices(scores.int(), scores, scores[..., 0].int())
    indices, scores, lengths = (torch.stack(each) for each in zip(*found, strict=True))
    return TopKIndices(indices, scores, lengths)


def _check_weights(w: object, iq: Tensor) -> Tensor:
    w = check_tensor("w", w, "[batch, tokens, heads]")
    if w.shape != iq.shape[:3] or not w.is_floating_point() or w.device != iq.device:
        raise ValueError(f"w must be floating point {list(iq.shape[:3])} on {iq.device}, got {shown(w)}")
    refuse_gradient("w", w)
    return w


def _bounds(cur_pos: object, key_range: object, iq: Tensor) -> tuple[Tensor, Tensor]:
    """The keys [first, end) of every token, integers [B, T]. Does not read tensors on a device."""
    batch, tokens = iq.shape[:2]
    if (cur_pos is None) == (key_range is None):
        raise ValueError(
            f"exactly one of cur_pos and key_range must be given, got cur_pos={shown(cur_pos)} and "
            f"key_range={shown(key_range)}"
        )
    if key_range is not None:
        if not isinstance(key_range, tuple) or len(key_range) != 2:
            raise ValueError(f"key_range must be a tuple of two tensors, (first, end), got {shown(key_range)}")
        first, end = (
            check_per_row(f"key_range {name}", x, iq) for name, x in zip(("first", "end"), key_range, strict=True)
        )
        return first, end
    if isinstance(cur_pos, Tensor):
        if (
            cur_pos.dtype not in (torch.int32, torch.int64)
            or list(cur_pos.shape) != [batch]
            or cur_pos.device != iq.device
        ):
            raise ValueError(f"cur_pos must be int32 or int64 [{batch}] on {iq.device}, got {shown(cur_pos)}")
        last = check_tensor("cur_pos", cur_pos).long()
    else:
        if not isinstance(cur_pos, Sequence) or len(cur_pos) != batch or not all(type(at) is int for at in cur_pos):
            raise ValueError(f"cur_pos must be {batch} integers, one per sequence, got {shown(cur_pos)}")
        if any(not -1 <= at < 2**31 - 1 for at in cur_pos):
            raise ValueError(f"cur_pos must be positions below {2**31 - 1}, or -1, got {shown(cur_pos)}")
        if iq.is_cuda and torch.cuda.is_current_stream_capturing():  # a replay would copy from freed memory
            raise ValueError("cur_pos must be a tensor on the device while a CUDA graph is captured, got a list")
        last = torch.tensor(list(cur_pos), dtype=torch.int64, device="cpu").to(iq.device, non_blocking=True)
    end = last[:, None] + torch.arange(2 - tokens, 2, device=iq.device)  # at most 0 for a sequence that is skipped
    return torch.zeros_like(end), end
