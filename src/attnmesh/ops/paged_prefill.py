"""`paged_prefill_attention`: any number of new tokens per sequence over a paged KV cache, on one device.

A decode step reads the cache with kernels for a few rows. From a few dozen new tokens on, operations dominate, and the
dense kernels of `attention` over parts of the cache (`paged_attention`) are faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from attnmesh.core.masks import Causal, Mask, Prefix, SlidingWindow
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import ScoreOptions, check_score_terms, contiguous_last_dim, resolve_scores
from attnmesh.ops.paged import PagedKV, check_calls, check_paged, paged_attention
from attnmesh.ops.storage import Stored, values_of
from attnmesh.utils.validation import check_bool, check_count, check_options, check_positive, check_tensor, shown


@overload
def paged_prefill_attention(
    q: Tensor, k_pool: Stored, v_pool: Stored, block_table: Tensor, *, cur_pos: Sequence[int] | Tensor,
    query_lengths: Sequence[int] | Tensor | None = ..., causal: bool = ..., scale: float | None = ...,
    window: int | None = ..., return_lse: Literal[False] = ..., **options: Unpack[ScoreOptions],
) -> Tensor: ...  # fmt: skip
@overload
def paged_prefill_attention(
    q: Tensor, k_pool: Stored, v_pool: Stored, block_table: Tensor, *, cur_pos: Sequence[int] | Tensor,
    query_lengths: Sequence[int] | Tensor | None = ..., causal: bool = ..., scale: float | None = ...,
    window: int | None = ..., return_lse: Literal[True], **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def paged_prefill_attention(
    q: Tensor,
    k_pool: Stored,
    v_pool: Stored,
    block_table: Tensor,
    *,
    cur_pos: Sequence[int] | Tensor,
    query_lengths: Sequence[int] | Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    **options: Unpack[ScoreOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_decode_attention` for any number T of new tokens, at prefill speed: q [B,Hq,T,D] to out [B,Hq,T,Dv].

    The pools, k_pool [num_blocks, block_size, Hkv, D] and v_pool [..., Dv], already contain the new tokens. K and V are
    gathered through the table, int32 [B, slots], and dequantized, at most 64 MiB at a time. There is no backward. A
    block outside the pool is never read: it raises ValueError on the CPU, and makes out and lse of the sequence NaN on
    a GPU.

    Args:
        cur_pos: position of the last of the T tokens of each sequence. Token t is at `cur_pos - T + 1 + t` and attends
            to the keys up to its own position. A sequence with fewer than T tokens has them in its last rows: rows
            before position 0 have out 0 and lse -inf (or their sink). -1 skips a sequence: out 0, lse -inf. The host
            needs the numbers: it waits for a tensor on a GPU.
        query_lengths: number of new tokens of each sequence, 0 to T, in its last rows; T by default. The rows before
            are as those before position 0, and 0 skips a sequence. The host needs these numbers, too.
        causal: False lets every new token attend to all keys up to `cur_pos`, also to the new tokens after it.
        scale: multiplies the scores; 1 / sqrt(D) by default.
        window: number of last keys up to a token's own position, itself included, that it attends to. Needs `causal`.
        sinks: [Hq] scores of keys without a value.
        softcap, alibi_slopes: as for `attention`.
        return_lse: also return the float32 lse [B,Hq,T], natural log.
        backend: as for `attention`, except "reference".

    Examples:
        >>> k_pool, v_pool = torch.randn(2, 8, 16, 2, 64)  # 8 blocks of 16 tokens
        >>> table = torch.tensor([[5, 0, 2]], dtype=torch.int32)
        >>> q = torch.randn(1, 8, 30, 64)  # the last 30 of 40 tokens
        >>> out = am.decode.paged_prefill_attention(q, k_pool, v_pool, table, cur_pos=[39])
        >>> k, v = (pool[[5, 0, 2]].flatten(0, 1)[:40].transpose(0, 1)[None] for pool in (k_pool, v_pool))
        >>> whole = am.attention(q, k, v, mask=am.Causal(), q_positions=torch.arange(10, 40))
        >>> torch.allclose(out, whole, atol=1e-5)
        True
    """
    check_options("paged_prefill_attention", options, ScoreOptions)
    softcap, sinks, alibi_slopes = options.get("softcap"), options.get("sinks"), options.get("alibi_slopes")
    backend = options.get("backend", "auto")
    kv = PagedKV(k_pool, v_pool, check_tensor("block_table", block_table, "int32 [batch, slots]"))
    check_paged(q, kv, scale, sinks, ("k_pool", "v_pool"))
    check_bool(return_lse=return_lse, causal=causal)
    check_score_terms(q, softcap, sinks, alibi_slopes)
    scores = resolve_scores(q, scale, softcap, alibi_slopes)
    if not causal and window is not None:
        raise ValueError(f"window must be None with causal=False, got {shown(window)}")
    masked = prefill_mask(window)
    tokens = q.shape[2]
    counts = [tokens] * q.shape[0]
    if query_lengths is not None:
        counts = _checked_numbers("query_lengths", query_lengths, q, least=0, most=tokens, what="number")
    lasts = _checked_numbers("cur_pos", cur_pos, q, least=-1, most=kv.capacity - 1, what="position")
    runs = [range(max(0, last + 1 - count), last + 1) for last, count in zip(lasts, counts, strict=True)]
    # Without causality: all keys before the end of the positions, where the mask of the new tokens is a prefix.
    groups = [(run, some, masked if causal else Prefix(run.stop)) for run, some in equal_runs(runs) if run]
    for positions, some, mask in groups:
        check_calls(_rows(q, some, positions), (positions,), kv.sequences(some), mask, scores, backend)
    out = q.new_zeros(*q.shape[:3], values_of(v_pool).shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for positions, some, mask in groups:
            state = paged_attention(
                contiguous_last_dim(_rows(q, some, positions)), (positions,), kv.sequences(some), mask=mask,
                scores=scores, sinks=sinks, backend=backend,
            )  # fmt: skip
            if sinks is not None:
                lse[some.start : some.stop] = sinks[:, None]
            _rows(out, some, positions).copy_(state.out)
            _rows(lse, some, positions).copy_(state.lse)
    return (out, lse) if return_lse else out


def prefill_state(
    q: Tensor, begins: Sequence[int], kv: PagedKV, *, scale: float | None, softcap: float | None, window: int | None,
    sinks: Tensor | None, alibi_slopes: Tensor | None, rounded: bool,
) -> State:  # fmt: skip
    """The state of the tokens of checked arguments q [B,Hq,T,D], at `begins[b]` and the positions after it.

    `kv` may be the cache of one rank; out is then to be merged with that of others, and not `rounded`.
    """
    tokens, mask, scores = q.shape[2], prefill_mask(window), resolve_scores(q, scale, softcap, alibi_slopes)
    states = [
        paged_attention(
            contiguous_last_dim(_rows(q, some, positions)), (positions,), kv.sequences(some), mask=mask, scores=scores,
            sinks=sinks, rounded=rounded,
        )
        for positions, some in equal_runs([range(begin, begin + tokens) for begin in begins])
    ]  # fmt: skip
    return states[0] if len(states) == 1 else State(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def prefill_mask(window: int | None) -> Mask:
    """The mask of a causal model whose layer may have a window."""
    if window is None:
        return Causal()
    check_positive(window=window)
    return SlidingWindow(window - 1)


def equal_runs(runs: Sequence[range]) -> Iterator[tuple[range, range]]:
    """Positions, and the consecutive sequences that have them: they share the calls of kernels."""
    groups = [(positions, len(list(same))) for positions, same in groupby(runs)]
    edges = accumulate((count for _, count in groups), initial=0)
    for (positions, _), (start, stop) in zip(groups, pairwise(edges), strict=True):
        yield positions, range(start, stop)


def _rows(x: Tensor, sequences: range, positions: range) -> Tensor:
    """The last rows of some sequences of x [B, H, T, ...]: the rows of the given positions."""
    return x[sequences.start : sequences.stop, :, x.shape[2] - len(positions) :]


def _checked_numbers(name: str, numbers: object, q: Tensor, *, least: int, most: int, what: str) -> list[int]:
    """A number for every sequence, from a list or a tensor."""
    given = numbers
    if isinstance(given, Tensor):
        check_tensor(name, given)
        if given.ndim != 1 or given.dtype not in (torch.int32, torch.int64) or given.is_meta:
            raise ValueError(f"{name} must be a list, or an int32 or int64 tensor [{q.shape[0]}], got {shown(given)}")
        given = given.tolist()
    if not isinstance(given, list | tuple) or len(given) != q.shape[0]:
        raise ValueError(f"{name} must have one {what} for each of {q.shape[0]} sequences, got {shown(numbers)}")
    for i, number in enumerate(given):
        check_count(f"{name}[{i}]", number, least=least, most=most)
    return list(given)
