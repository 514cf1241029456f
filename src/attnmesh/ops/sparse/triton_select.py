"""The exact top-k of a row of scores in memory, in Triton: without sorting, keys in ascending order.

Maxima of groups of elements bound the k-th score: if k of them are at least t, so are at least k scores. Only scores
above t are candidates, hardly more than k of them, and fit in registers, where bisection of the interval of values
finds the k-th. All scores above it are selected, and the first of those that equal it. The k-th score is a property of
the row, so the result does not depend on how it was found.

Without a summary, the scores of a row are read twice: for the maxima, and to compare them with t. A summary has maxima
that were computed along with the scores: of groups, for t, and of blocks of neighbors. Then only the blocks whose
maximum is above t are read; there are no more of them than candidates.

Values are compared as floats and bisected as integers of the same order. A score of -inf is never selected: it may be
that of a key that the row must not see.
"""

import triton
import triton.language as tl

from attnmesh.ops.sparse.indexer_tiles import NEIGHBORS

_NEIGHBORS = tl.constexpr(NEIGHBORS)


@triton.jit
def order_of(value):
    """A float32 (neither NaN nor -0.0) as an int32 of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The float32 of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bisected(low, high, count, middle, k, slack):
    """The interval after counting `count` values of at least `middle`; closed if count is in [k, k + slack]."""
    enough = count >= k
    low = tl.where(enough, middle, low)
    high = tl.where(enough, tl.where(count <= k + slack, middle, high), middle - 1)
    return low, high


@triton.jit
def _middle(low, high):
    """Rounded up. In 64 bits, because the difference may overflow 32."""
    return (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)


@triton.jit
def kth(values, k, low, slack):
    """The largest t such that at least k of `values` are >= t, given that k are >= `low`.

    With `slack`, any t that k to k + slack values reach. If fewer than k values reach `low`, the result is `low`.
    """
    low = order_of(low)
    high = tl.maximum(order_of(tl.max(values)), low)
    while low < high:
        middle = _middle(low, high)
        count = tl.sum((values >= value_of(middle)).to(tl.int32))
        low, high = _bisected(low, high, count, middle, k, slack)
    return value_of(low)


@triton.jit
def _load_block(row, at, end, BLOCK: tl.constexpr):
    """Scores [at, at + BLOCK) of a row, -inf from `end` on. Bypasses L1: other multiprocessors wrote them."""
    j = at + tl.arange(0, BLOCK)
    return tl.load(row + j, mask=j < end, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _kth_of_row(row, begin, end, k, low, BLOCK: tl.constexpr):
    """`kth` of a row in memory, which it reads repeatedly; used if there are too many candidates."""
    low = order_of(low)
    high = order_of(float("inf") + tl.zeros((), tl.float32))
    while low < high:
        middle = _middle(low, high)
        count = tl.zeros((BLOCK,), tl.int32)
        for at in range(begin, end, BLOCK):
            count += (_load_block(row, at, end, BLOCK) >= value_of(middle)).to(tl.int32)
        low, high = _bisected(low, high, tl.sum(count, 0), middle, k, 0)
    return value_of(low)


@triton.jit
def _group_maxima(row, begin, end, BLOCK: tl.constexpr):
    """The maxima of BLOCK groups of elements that are BLOCK apart: similar neighbors are in different groups."""
    # No change in value: tells the compiler that they are multiples of 16, for loads of 16 bytes per thread. Two blocks
    # at a time, to have a shape of its own: otherwise this layout would be used by the next loop, which writes singly.
    begin, end = begin // 16 * 16, end // 16 * 16
    offsets = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    best = tl.full((2, BLOCK), float("-inf"), tl.float32)
    for at in range(begin, end, 2 * BLOCK):
        j = at + offsets
        best = tl.maximum(best, tl.load(row + j, mask=j < end, other=float("-inf"), cache_modifier=".cg"))
    return tl.max(best, 0)


@triton.jit
def _load_fours(at, mask):
    """Four elements from each address on, multiples of 16 bytes: [ROWS, 4], each row in one thread. 0 without `mask`.

    Writing some of them, in order, then moves no data between threads, and numbering them little.
    """
    return tl.load(at[:, None] + tl.arange(0, 4)[None, :], mask=mask[:, None], other=0, cache_modifier=".cg")


@triton.jit
def _load_scores(row, at, begin, end, ROWS: tl.constexpr):
    """Scores [at, at + 4 * ROWS) of a row as `_load_fours`, -inf outside [begin, end); `at` is a multiple of 4."""
    j = at // 4 * 4 + tl.arange(0, ROWS) * 4
    keys = j[:, None] + tl.arange(0, 4)[None, :]
    return tl.where((keys >= begin) & (keys < end), _load_fours(row + j, j < end), float("-inf"))


@triton.jit
def _columns(tile, ROWS: tl.constexpr):
    """The columns of a tile [ROWS, 4]."""
    even, odd = tl.split(tl.reshape(tile, (ROWS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _write_above(tile, numbers, threshold, out_values, out_numbers, count, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Writes the elements of a tile [ROWS, 4] above `threshold` and their numbers, in order, behind the first `count`.

    The elements of row i have the numbers from numbers[i] on. Beyond BLOCK nothing is written. Returns the new count.
    """
    columns = _columns(tile, ROWS)
    of_row = tl.zeros((ROWS,), tl.int32)
    for i in tl.static_range(4):
        of_row += (columns[i] > threshold).to(tl.int32)
    target = count + tl.cumsum(of_row, 0) - of_row
    for i in tl.static_range(4):
        taken = columns[i] > threshold
        if out_values is not None:
            tl.store(out_values + target, columns[i], mask=taken & (target < BLOCK))
        tl.store(out_numbers + target, numbers + i, mask=taken & (target < BLOCK))
        target += taken.to(tl.int32)
    return count + tl.sum(of_row, 0)


@triton.jit
def _gather_candidates(row, begin, end, threshold, candidate_scores, candidate_keys, BLOCK: tl.constexpr):
    """Writes the first BLOCK scores above `threshold` and their keys, in order; returns the number of all of them."""
    ROWS: tl.constexpr = BLOCK // 4
    count = tl.zeros((), tl.int32)
    value = _load_scores(row, begin, begin, end, ROWS)
    for at in range(begin, end, BLOCK):
        after = _load_scores(row, at + BLOCK, begin, end, ROWS)  # prefetch
        keys = at + tl.arange(0, ROWS) * 4
        count = _write_above(value, keys, threshold, candidate_scores, candidate_keys, count, BLOCK, ROWS)
        value = after
    tl.debug_barrier()  # threads read what other threads have written
    return count


@triton.jit
def _lower_bound(values, end, k, WIDE: tl.constexpr):
    """A number that k to k + k / 16 of the maxima of WIDE groups of values[:end] reach; -inf if fewer than k exceed it.

    Not exactly the k-th maximum: a few more candidates cost less than the last bisection steps.
    """
    end = end // 16 * 16  # no change in value: see `_group_maxima`
    best = _load_block(values, 0, end, WIDE)
    for at in range(WIDE, end, WIDE):
        best = tl.maximum(best, _load_block(values, at, end, WIDE))
    there = best > float("-inf")
    lowest = tl.min(tl.where(there, best, float("inf")), 0)
    return kth(best, k, tl.where(tl.sum(there.to(tl.int32), 0) >= k, lowest, float("-inf")), k // 16)


@triton.jit
def _load_chosen(row, chosen, at, blocks, ROWS: tl.constexpr):
    """The scores of chosen blocks from the `at`-th on as `_load_fours`, and the first key of each row."""
    j = at * (_NEIGHBORS // 4) + tl.arange(0, ROWS)
    there = j < blocks * (_NEIGHBORS // 4)
    block = tl.load(chosen + j // (_NEIGHBORS // 4), mask=there, other=0, cache_modifier=".cg")
    keys = block * _NEIGHBORS + j % (_NEIGHBORS // 4) * 4
    return tl.where(there[:, None], _load_fours(row + keys, there), float("-inf")), keys


@triton.jit
def _gather_from_blocks(
    row, block_maxima, begin, end, threshold, chosen, candidate_scores, candidate_keys,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_gather_candidates`, from the blocks whose maximum is above `threshold`."""
    ROWS: tl.constexpr = WIDE // 4
    PART: tl.constexpr = WIDE // _NEIGHBORS  # blocks at a time
    first, last = begin // _NEIGHBORS, end // _NEIGHBORS
    blocks = tl.zeros((), tl.int32)
    for at in range(first // 4 * 4, last, WIDE):
        best = _load_scores(block_maxima, at, first, last, ROWS)
        blocks = _write_above(best, at + tl.arange(0, ROWS) * 4, threshold, None, chosen, blocks, BLOCK, ROWS)
    tl.debug_barrier()  # threads read what other threads have written
    count = tl.where(blocks > BLOCK, blocks, 0)  # too many: the candidates are at least as many
    blocks = tl.where(blocks > BLOCK, 0, blocks)
    value, keys = _load_chosen(row, chosen, 0, blocks, ROWS)
    for at in range(0, blocks, PART):
        next_value, next_keys = _load_chosen(row, chosen, at + PART, blocks, ROWS)  # prefetch
        count = _write_above(value, keys, threshold, candidate_scores, candidate_keys, count, BLOCK, ROWS)
        value, keys = next_value, next_keys
    tl.debug_barrier()
    return count


@triton.jit
def _write_selected(value, keys, threshold, ties, above, tied, out_indices, out_scores, ROWS: tl.constexpr):
    """Writes the selected of the tile `value` [ROWS, 4], in order: those above `threshold`, and `ties` that equal it.

    `above` and `tied` are the numbers of both kinds so far; returns the new ones.
    """
    values, numbers = _columns(value, ROWS), _columns(keys, ROWS)
    of_row = tl.zeros((ROWS,), tl.int32)  # two counts in one
    for i in tl.static_range(4):
        of_row += (values[i] > threshold).to(tl.int32) + ((values[i] == threshold).to(tl.int32) << 16)
    before = tl.cumsum(of_row, 0) - of_row
    above_here, tied_here = above + (before & 0xFFFF), tied + (before >> 16)
    for i in tl.static_range(4):
        is_above, is_tie = values[i] > threshold, values[i] == threshold
        taken = is_above | (is_tie & (tied_here < ties))
        target = above_here + tl.minimum(tied_here, ties)
        tl.store(out_indices + target, numbers[i], mask=taken)
        tl.store(out_scores + target, values[i], mask=taken)
        above_here += is_above.to(tl.int32)
        tied_here += is_tie.to(tl.int32)
    total = tl.sum(of_row, 0)
    return above + (total & 0xFFFF), tied + (total >> 16)


@triton.jit
def select_row(
    row, row_keys, row_len, begin, end, n, topk, groups, out_indices, out_scores, out_count,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes the top-k of row[begin:end]: keys ascending, then -1; their scores, then -inf; their number.

    `begin` and `end` are multiples of 16, and the row is aligned to 16 bytes. n elements may be selected; those before
    and after them are -inf. The rest of the row, see `row_elements`, follows its `row_len` scores; `row_keys` is the
    same memory as integers. With BLOCK below twice topk the result is correct, but slow.

    With WIDE > 0 there is a summary. Its `groups` groups, a multiple of 16, together hold the row, and are combined to
    at most WIDE.
    """
    ROWS: tl.constexpr = BLOCK // 4
    candidate_scores, candidate_keys = row + row_len, row_keys + row_len + BLOCK
    k = tl.minimum(topk, n)
    above, tied = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    candidates = n
    threshold = float("-inf") + tl.zeros((), tl.float32)
    short = end - begin <= BLOCK
    search = not short
    if WIDE > 0:  # noqa: SIM102 (a condition of the compiler, then one of the row)
        if not short:
            maxima = tl.multiple_of(row_len + 3 * BLOCK, 16)
            own = end - begin <= WIDE  # every score is a group
            source = tl.multiple_of(tl.where(own, begin, maxima), 16)
            threshold = _lower_bound(row + source, tl.where(own, end - begin, groups), k, WIDE)
            candidates = _gather_from_blocks(
                row, row + maxima + groups, begin, end, threshold, row_keys + row_len + 2 * BLOCK,
                candidate_scores, candidate_keys, WIDE, BLOCK,
            )  # fmt: skip
            search = candidates > BLOCK
    if search:
        if k < BLOCK:  # at least k groups contain some of the n elements
            # Not exactly the k-th maximum: a few more candidates cost less than the last bisection steps.
            best = _group_maxima(row, begin, end, BLOCK)
            threshold = kth(best, k, tl.min(best, 0), k // 16)
        candidates = _gather_candidates(row, begin, end, threshold, candidate_scores, candidate_keys, BLOCK)
    if short | ((candidates <= BLOCK) & ((candidates >= k) | (threshold == float("-inf")))):
        j = tl.arange(0, ROWS) * 4
        if short:
            value = _load_scores(row, begin, begin, end, ROWS)
            keys = begin + j[:, None] + tl.arange(0, 4)[None, :]
        else:
            value = _load_scores(candidate_scores, 0, 0, candidates, ROWS)
            keys = _load_fours(candidate_keys + j, j < candidates)
        if k < candidates:
            threshold = kth(value, k, tl.min(tl.where(value > float("-inf"), value, float("inf"))), 0)
        ties = tl.where(threshold == float("-inf"), 0, k - tl.sum((value > threshold).to(tl.int32)))
        above, tied = _write_selected(value, keys, threshold, ties, above, tied, out_indices, out_scores, ROWS)
    else:
        if candidates > BLOCK:
            if k < n:
                threshold = _kth_of_row(row, begin, end, k, threshold, BLOCK)
            candidates = tl.zeros((), tl.int32)
            for at in range(begin, end, BLOCK):
                candidates += tl.sum((_load_block(row, at, end, BLOCK) > threshold).to(tl.int32), 0)
        # Otherwise fewer than k are above the threshold and at least k reach it: it is the k-th score.
        ties = tl.where(threshold == float("-inf"), 0, k - candidates)
        for at in range(begin, end, BLOCK):
            value = _load_scores(row, at, begin, end, ROWS)
            keys = at + tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]
            above, tied = _write_selected(value, keys, threshold, ties, above, tied, out_indices, out_scores, ROWS)
    count = above + tl.minimum(tied, ties)
    tl.store(out_count, count)
    for at in range(count, topk, ROWS):
        j = at + tl.arange(0, ROWS)
        tl.store(out_indices + j, tl.full((ROWS,), -1, tl.int32), mask=j < topk)
        tl.store(out_scores + j, tl.full((ROWS,), float("-inf"), tl.float32), mask=j < topk)
