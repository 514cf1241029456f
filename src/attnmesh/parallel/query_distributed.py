"""Query-distributed causal attention: K and V are whole on every device, and each device has a share of the queries.

    S = 256, four devices      queries                     visible pairs of chunks
    device 0                   [0, 32) and [224, 256)      1 + 8 = 9 of 36
    device 1                   [32, 64) and [192, 224)     2 + 7 = 9
    device 2                   [64, 96) and [160, 192)     3 + 6 = 9
    device 3                   [96, 128) and [128, 160)    4 + 5 = 9

The forward sends nothing: where K and V are on every device anyway, each device skips the queries of the others.

A prompt may continue a prefix: the queries are then at the positions from `q_offset` on, and K and V also hold
the positions before it. Only the new positions are divided, in the same chunks. Every chunk reads the prefix, so the
longer the prefix, the less the chunks differ.

    S = 256 after a prefix of 1024    queries                         keys that a query sees on average
    device 0                          [1024, 1056) and [1248, 1280)   1040.5 and 1264.5
    device 3                          [1120, 1152) and [1152, 1184)   1136.5 and 1168.5: the same sum

This differs from the ring-distributed text it is based on. There, the rule to skip a block is inverted: keys before all
queries of a chunk are fully visible (computed without a mask), keys after them are hidden (skipped), the others cross
the diagonal. A device computes 9 chunk pairs of 36, not 2 of 16. Only queries and outputs are local; K and V are whole.
Its limits on ring size and length come from one chip: here any ring size >= 1 and any length are supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, Unpack, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, SoloComm, check_on_all_ranks, propagate_failure
from attnmesh.core import ranges
from attnmesh.core.layouts import Zigzag
from attnmesh.core.mask import sequence_intervals
from attnmesh.core.masks import Causal, Mask, check_mask
from attnmesh.core.ranges import Ranges
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.core.visibility import Patch
from attnmesh.ops.dense import blockwise
from attnmesh.ops.dense.call import (
    Call,
    Grads,
    Result,
    ScoreOptions,
    Scores,
    check_batch,
    check_inputs,
    check_score_terms,
    contiguous_last_dim,
    resolve_scores,
)
from attnmesh.ops.dense.dispatch import choose_fused
from attnmesh.ops.merge import GradAccumulator
from attnmesh.ops.paged import PagedKV, check_calls, check_paged, paged_attention
from attnmesh.ops.storage import Quantized, Stored, storage_of, values_of
from attnmesh.parallel.executor import BACKENDS, Executor, attend, score_checks, unshard
from attnmesh.parallel.node_groups import context_comm
from attnmesh.utils.validation import (
    MAX_RANKS,
    check_bool,
    check_choice,
    check_count,
    check_index,
    check_options,
    check_tensor,
    shown,
)


def ring_chunks(length: int, ring_size: int, ring_id: int, pairs: int | tuple[int, ...] = 1) -> tuple[range, ...]:
    """The positions whose queries device `ring_id` of `ring_size` computes: an early chunk and a late one.

    The sequence is cut into 2 x ring_size chunks that differ by at most one position; device i has chunks i and
    2 x ring_size - 1 - i. Of 256 positions, device 0 of 4 has [0, 32) and [224, 256). Any ring size >= 1 and any
    length >= 0 are supported; with fewer than 2 x ring_size positions, some chunks are empty.

    `pairs` is as in `Zigzag`: a finer division, or uneven shares for uneven devices; 2 x pairs chunks, in ascending
    order.

    Examples:
        >>> am.ring_chunks(256, ring_size=4, ring_id=0)
        (range(0, 32), range(224, 256))
        >>> [sum(map(len, am.ring_chunks(100, 3, device))) for device in range(3)]
        [33, 33, 34]
        >>> am.ring_chunks(2, ring_size=4, ring_id=3)
        (range(2, 2), range(2, 2))
    """
    check_count("length", length)
    _check_ring(ring_size, ring_id)
    return Zigzag(pairs).chunks(length, ring_size, ring_id)


class RingOptions(ScoreOptions, total=False):
    """Arguments of `ring_distributed_attention` that few calls need, by keyword."""

    pairs: int | tuple[int, ...]


@overload
def ring_distributed_attention(
    q: Tensor, k: Stored, v: Stored, *, ring_size: int | None = ..., ring_id: int | None = ...,
    group: Comm | ProcessGroup | DeviceMesh | None = ..., q_offset: int | Sequence[int] = ...,
    block_table: Tensor | None = ..., mask: Mask = ..., scale: float | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[RingOptions],
) -> Tensor: ...  # fmt: skip
@overload
def ring_distributed_attention(
    q: Tensor, k: Stored, v: Stored, *, ring_size: int | None = ..., ring_id: int | None = ...,
    group: Comm | ProcessGroup | DeviceMesh | None = ..., q_offset: int | Sequence[int] = ...,
    block_table: Tensor | None = ..., mask: Mask = ..., scale: float | None = ...,
    return_lse: Literal[True], **options: Unpack[RingOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def ring_distributed_attention(
    q: Tensor,
    k: Stored,
    v: Stored,
    *,
    ring_size: int | None = None,
    ring_id: int | None = None,
    group: Comm | ProcessGroup | DeviceMesh | None = None,
    q_offset: int | Sequence[int] = 0,
    block_table: Tensor | None = None,
    mask: Mask = Causal(),  # noqa: B008  (immutable)
    scale: float | None = None,
    return_lse: bool = False,
    **options: Unpack[RingOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of this device's queries; q [B,Hq,S,D], k [B,Hkv,S,D], v [B,Hkv,S,Dv] are whole on every device.

    Returns out [B,Hq,n,Dv] for the n positions of `ring_chunks(S, ...)`, in that order, and with `return_lse` the
    float32 lse [B,Hq,n]; both are differentiable. `gather_ring_outputs` returns the whole output.

    A prompt that continues a prefix, or a chunk of a prompt, has `q_offset` positions before it: q are then the queries
    of positions `q_offset` to `q_offset + S - 1`, and k and v are at positions 0 to `q_offset + S - 1`.

    With a `block_table` k and v are a paged cache, as in `paged_decode_attention`: pools k [num_blocks,
    block_size, Hkv, D] and v [..., Dv], `Quantized` or in the dtype of q, with a table int32 [B, slots]. They already
    contain the S new positions. `q_offset` may then be a list of one number per sequence. The cache is read a part at a
    time; blocks that no query attends to are not read. There is no backward: tensors that require gradients raise
    ValueError. A block outside the pool raises ValueError on the CPU; on a GPU out and lse of the sequence are NaN.

    `mask` must be causal, and may hide more: `Chunked(8192)`, `Causal() & (Global(4) | SlidingWindow(1023))`,
    `Causal() & Documents(lengths)` with the documents of all `q_offset + S` positions, a mask per sequence. Every
    mask has the chunks of `ring_chunks`, which balance the work of `Causal`.

    Pass `ring_size` and `ring_id`, or a `group` (a ProcessGroup, a one-dimensional DeviceMesh, a comm), which implies
    them. With a group, ranks first compare their arguments, and dk and dv are summed over the group (in float32,
    rounded once), so all ranks must run the backward. Without one nothing is communicated, and dk and dv are this
    device's part of the sum. In both cases dq is zero except for this device's queries.

    `softcap`, `sinks` and `alibi_slopes` are as in `attention`, and compared as in `ContextParallel`. The gradient of
    `sinks` is the contribution of this device's queries, with a group too: it is a part of the sum over devices.

    `pairs` is as in `ring_chunks`, `backend` as in `ContextParallel`.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
        >>> out = am.ring_distributed_attention(q, k, v, ring_size=4, ring_id=0)
        >>> rows = [p for chunk in am.ring_chunks(100, 4, 0) for p in chunk]
        >>> torch.allclose(out, am.attention(q, k, v, mask=am.Causal())[:, :, rows], atol=1e-5)
        True
    """
    check_options("ring_distributed_attention", options, RingOptions)
    softcap, sinks, alibi_slopes = options.get("softcap"), options.get("sinks"), options.get("alibi_slopes")
    pairs, backend = options.get("pairs", 1), options.get("backend", "auto")
    comm = SoloComm() if group is None else context_comm(group)
    checks = score_checks(comm)

    def check_arguments() -> tuple[Callable[[], tuple[Tensor, Tensor]], SharedValues]:
        check_bool(return_lse=return_lse)
        check_choice("backend", backend, BACKENDS)
        kv = _checked_kv(q, k, v, block_table, scale, sinks)
        check_score_terms(q, softcap, sinks, alibi_slopes)
        offsets = _checked_offsets(q_offset, q, kv)
        _check_causal(mask, q, offsets)
        size, index = (ring_size, ring_id) if group is None else _place_in_group(comm, ring_size, ring_id)
        if size is None or index is None:
            raise ValueError(f"pass group, or both ring_size and ring_id, got ring_size={size} and ring_id={index}")
        _check_ring(size, index)
        chunks = Zigzag(pairs).ranges(q.shape[2], size, index)
        scores = resolve_scores(q, scale, softcap, alibi_slopes)
        run: Callable[[], tuple[Tensor, Tensor]]
        if isinstance(kv, PagedKV):
            cached = _CacheShare(chunks, offsets, mask, scores, sinks, backend, comm, kv)
            cached.check_calls(q)
            run = partial(cached.attend, q)
        else:
            share = _TensorShare(chunks, offsets[0], mask, backend, comm)
            for call in share.calls(q, *kv, scores):
                choose_fused(call, backend)  # raises if no backend serves it
            run = partial(attend, q, *kv, share, scores, sinks)
        grad = torch.is_grad_enabled()
        heads_dim = 2 if isinstance(kv, PagedKV) else 1
        return run, {
            "batch": q.shape[0], "query heads": q.shape[1], "kv heads": values_of(k).shape[heads_dim],
            "head_dim": q.shape[3], "value head_dim": values_of(v).shape[3],
            "length": q.shape[2], "q_offset": q_offset, "mask": mask, "dtype": q.dtype, "device": q.device.type,
            "scale": scores.scale, "softcap": softcap, "sinks": None if sinks is None else sinks.dtype,
            "alibi_slopes": alibi_slopes is not None, "pairs": pairs, "backend": backend,
            "block_size": kv.block_size if isinstance(kv, PagedKV) else None, "storage": storage_of(k),
            "gradient of q": grad and q.requires_grad, "gradient of k": grad and values_of(k).requires_grad,
            "gradient of v": grad and values_of(v).requires_grad,
            "gradient of sinks": grad and sinks is not None and sinks.requires_grad,
            **({} if comm.world == 1 else checks.compared(sinks=sinks, alibi_slopes=alibi_slopes)),
        }  # fmt: skip

    run = check_on_all_ranks(comm, "ring_distributed_attention", check_arguments)
    checks.count()
    out, lse = run()
    return (out, lse) if return_lse else out


def gather_ring_outputs(
    local_out: Tensor,
    *,
    length: int,
    group: Comm | ProcessGroup | DeviceMesh | None = None,
    pairs: int | tuple[int, ...] = 1,
) -> Tensor:
    """The whole out [B,Hq,length,D] (or lse [B,Hq,length]) in sequence order, on every rank of `group`.

    `local_out` is the result of `ring_distributed_attention` on this rank; ranks may hold different numbers of rows.
    None is the default process group, or a single rank if torch.distributed is not initialized.

    Gradients are summed over ranks, as if the loss were the sum of the losses of all ranks. If all ranks compute the
    same loss, divide it by the number of ranks.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 50, 16)
        >>> def rank(comm):
        ...     out = am.ring_distributed_attention(q, k, v, group=comm)
        ...     return am.gather_ring_outputs(out, length=50, group=comm)
        >>> torch.allclose(am.run_virtual(4, rank)[3], am.attention(q, k, v, mask=am.Causal()), atol=1e-5)
        True
    """
    comm = context_comm(group)

    def check_arguments() -> tuple[Zigzag, SharedValues]:
        layout = Zigzag(pairs)
        check_count("length", length)
        if check_tensor("local_out", local_out, "[batch, heads, rows, ...]").ndim < 3:
            raise ValueError(f"local_out must be [batch, heads, rows, ...], got shape {tuple(local_out.shape)}")
        expected = layout.local_length(length, comm.world, comm.rank)
        if local_out.shape[2] != expected:
            raise ValueError(
                f"local_out must have {expected} rows for rank {comm.rank} of {comm.world} at length={length}, "
                f"pairs={pairs}, got {local_out.shape[2]}"
            )
        return layout, {
            "length": length, "other dimensions": [*local_out.shape[:2], *local_out.shape[3:]],
            "dtype": local_out.dtype, "device": local_out.device.type, "pairs": pairs,
            "gradients": torch.is_grad_enabled() and local_out.requires_grad,
        }  # fmt: skip

    layout = check_on_all_ranks(comm, "gather_ring_outputs", check_arguments)
    return unshard(local_out, 2, length, layout, comm)


@dataclass(frozen=True)
class _TensorShare(Executor):
    """The executor of one device's share of the queries. dk and dv are summed over the ranks of `comm`."""

    chunks: Ranges  # rows of q
    q_offset: int
    mask: Mask
    backend: str
    comm: Comm

    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Call]:
        """One call per chunk, on views of its queries and of the keys up to its end."""
        calls = []
        for chunk in self.chunks:
            patch = _patch(self.mask, range(self.q_offset + chunk.start, self.q_offset + chunk.stop))
            queries = contiguous_last_dim(q[:, :, chunk.start : chunk.stop])
            keys, values = (contiguous_last_dim(x[:, :, : self.q_offset + chunk.stop]) for x in (k, v))
            calls.append(Call(queries, keys, values, patch, scores))
        return calls

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """The state of this device's queries."""
        calls = self.calls(q, k, v, scores)
        if not calls:
            shape = *q.shape[:2], 0, v.shape[3]
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
            return State(out, out[..., 0].to(accumulation_dtype(q.dtype))), (q, k, v)
        state = blockwise.forward(
            calls, self.backend, allow_two_streams=not self.comm.shares_stream, recorder=self.comm.recorder, sinks=sinks
        )
        return state, (q, k, v)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """dq of this device's queries, zero elsewhere; dk and dv summed over the ranks of `comm`."""
        q, k, v = saved
        wanted = [x if need else None for x, need in zip(saved, needs_grad, strict=True)]
        q_grads, kv_grads = blockwise.backward(
            self.calls(q, k, v, scores), result, self.backend, wanted, allow_two_streams=not self.comm.shares_stream,
            recorder=self.comm.recorder,
        )  # fmt: skip
        dq = None
        if needs_grad[0]:
            dq = GradAccumulator(q)
            for chunk, q_grad in zip(self.chunks, q_grads, strict=True):
                dq.add(q_grad.finish(), chunk.start)
        return Grads(dq, self._all_reduced(kv_grads.k, k), self._all_reduced(kv_grads.v, v))

    def _all_reduced(self, grad: GradAccumulator | None, x: Tensor) -> GradAccumulator | None:
        """A gradient of K or V summed over all ranks, in the accumulation dtype."""
        if grad is None or self.comm.world == 1:
            return grad
        return GradAccumulator.from_total(self.comm.all_reduce(grad.total()), x.dtype)


@dataclass(frozen=True)
class _CacheShare:
    """One device's share of the queries over a paged cache. Forward only."""

    chunks: Ranges  # rows of q
    q_offsets: tuple[int, ...]  # one for all sequences, or one per sequence
    mask: Mask
    scores: Scores
    sinks: Tensor | None
    backend: str
    comm: Comm
    kv: PagedKV

    def attend(self, q: Tensor) -> State:
        """The state of this device's queries."""
        with propagate_failure(self.comm), torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            states = [
                paged_attention(
                    own, positions, kv, mask=mask, scores=self.scores, sinks=self.sinks, backend=self.backend,
                    recorder=self.comm.recorder,
                )
                for own, positions, kv, mask in self._batches(self._own(q))
            ]  # fmt: skip
        return State(*(torch.cat(parts) for parts in zip(*states, strict=True))) if len(states) > 1 else states[0]

    def check_calls(self, q: Tensor) -> None:
        """Raise ValueError if no backend serves a call or, on the CPU, if a block is outside the pool."""
        for own, positions, kv, mask in self._batches(q[:, :, : ranges.size(self.chunks)]):
            check_calls(own, positions, kv, mask, self.scores, self.backend)

    def _own(self, q: Tensor) -> Tensor:
        """The queries of this device, with a contiguous last dimension."""
        parts = [q[:, :, chunk.start : chunk.stop] for chunk in self.chunks]
        return contiguous_last_dim(parts[0] if len(parts) == 1 else torch.cat(parts, 2) if parts else q[:, :, :0])

    def _batches(self, own: Tensor) -> Iterator[tuple[Tensor, Ranges, PagedKV, Mask]]:
        """Queries, positions, cache and mask: of all sequences together, or one by one if offsets or masks differ."""
        if len(self.q_offsets) == 1 and self.mask.sequences is None:
            yield own, self._positions(self.q_offsets[0]), self.kv, self.mask
            return
        for i in range(own.shape[0]):
            positions = self._positions(self.q_offsets[i % len(self.q_offsets)])
            yield own[i : i + 1], positions, self.kv.sequences(range(i, i + 1)), self.mask.of_sequence(i)

    def _positions(self, q_offset: int) -> Ranges:
        return tuple(range(q_offset + chunk.start, q_offset + chunk.stop) for chunk in self.chunks)


@lru_cache(maxsize=128)
def _patch(mask: Mask, q: range) -> Patch:
    # Cached, because every layer of a model needs the same few patches, and a patch caches its blocks.
    return Patch(mask, (q,), (range(q.stop),))


def _checked_kv(
    q: Tensor, k: Stored, v: Stored, block_table: Tensor | None, scale: float | None, sinks: Tensor | None
) -> PagedKV | tuple[Tensor, Tensor]:
    """K and V: whole tensors, or a paged cache if there is a block table."""
    if block_table is not None:
        kv = PagedKV(k, v, block_table)
        check_paged(q, kv, scale, sinks)
        return kv
    if isinstance(k, Quantized) or isinstance(v, Quantized):
        raise ValueError(f"k and v must be tensors without a block_table, got {shown(k)} and {shown(v)}")
    check_inputs(q, k, v, scale)
    return k, v


def _checked_offsets(q_offset: object, q: Tensor, kv: PagedKV | tuple[Tensor, Tensor]) -> tuple[int, ...]:
    """The offset of all sequences, or one per sequence if they differ. There must be keys up to the last query."""
    offsets = q_offset
    if not isinstance(offsets, list | tuple):
        offsets = [check_count("q_offset", q_offset)]
    elif not isinstance(kv, PagedKV):
        raise ValueError(f"q_offset must be an integer >= 0 without a block_table, got {shown(q_offset)}")
    elif len(offsets) != q.shape[0]:
        raise ValueError(f"q_offset must have one entry for each of {q.shape[0]} sequences, got {shown(q_offset)}")
    for offset in offsets:
        check_count("q_offset", offset)
        end = offset + q.shape[2]
        what = f"the positions up to the last query, {end} for q_offset={offset} and {q.shape[2]} queries"
        if isinstance(kv, PagedKV):
            if kv.capacity < end:
                slots = list(kv.block_table.shape)
                raise ValueError(
                    f"block_table must have slots for {what}, got {slots} slots of {kv.block_size} positions"
                )
        elif kv[0].shape[2] != end:
            raise ValueError(f"k must hold {what}, got {kv[0].shape[2]}")
    return tuple(offsets[:1] if len(set(offsets)) == 1 else offsets) or (0,)  # of no sequences


def _check_causal(mask: Mask, q: Tensor, q_offsets: tuple[int, ...]) -> None:
    """Raise ValueError unless `mask` fits the positions up to the last query and hides later keys from every query."""
    check_mask("mask", mask)
    check_batch(mask, q)
    for i, offset in enumerate(q_offsets):
        queries = range(offset, offset + q.shape[2])
        own = mask if len(q_offsets) == 1 else mask.of_sequence(i)
        own.check(queries.stop)
        position = _first_not_causal(own, queries)
        if position is not None:
            raise ValueError(
                f"mask must be causal, but {mask} lets the query at position {position} attend to later keys: "
                "intersect it with Causal()"
            )


@lru_cache(maxsize=128)
def _first_not_causal(mask: Mask, queries: range) -> int | None:
    """The first query that attends to a later key, in any sequence."""
    at = torch.arange(queries.start, queries.stop, device="cpu")
    later = torch.zeros_like(at, dtype=torch.bool)
    for _, intervals in sequence_intervals(mask, queries.stop):
        for part in intervals:
            first, end = part.key_ranges(at)
            later |= (first < end) & (end > at + 1)
    return queries[int(later.nonzero()[0])] if later.any() else None


def _place_in_group(comm: Comm, ring_size: int | None, ring_id: int | None) -> tuple[int, int]:
    """Ring size and id from the group; values that are given as well must agree with it."""
    for name, given, expected in (("ring_size", ring_size, comm.world), ("ring_id", ring_id, comm.rank)):
        if given is not None and not (isinstance(given, int) and given == expected):
            raise ValueError(f"{name} must be that of the group, {expected}, or None, got {shown(given)}")
    return comm.world if ring_size is None else ring_size, comm.rank if ring_id is None else ring_id


def _check_ring(ring_size: int, ring_id: int) -> None:
    check_count("ring_size", ring_size, least=1, most=MAX_RANKS)
    check_index("ring_id", ring_id, ring_size)
