"""The best k of a row of scores, in Triton: exact, without sorting, written in ascending order of the keys.

A row of n scores is read twice. The maxima of SOME groups of its elements come first: k of them being at least t,
at least k scores are. So only scores above t are candidates, hardly more than k of them, and fit in registers, where
halving the interval of values finds the k-th one. Everything above it is taken, and of what equals it the first ones.
The k-th score is a number that the row has or has not: how it was found leaves no trace in the result.

Values are compared as floats and halved as integers of the same order. A score of -inf is never taken: it may stand
for a key that the row must not see.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import triton
import triton.language as tl


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
def _halved(low, high, count, middle, k, slack):
    """The interval after `count` values were seen to be at least `middle`; closed if count is k, or a little more."""
    enough = count >= k
    low = tl.where(enough, middle, low)
    high = tl.where(enough, tl.where(count <= k + slack, middle, high), middle - 1)
    return low, high


@triton.jit
def _middle(low, high):
    """Rounded up. In 64 bits: the two may be farther apart than 32 bits tell."""
    return (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)


@triton.jit
def kth(values, k, low, slack):
    """The largest t that at least k of `values` reach (up to `slack` more: any such t), given that k reach `low`.

    If fewer than k do, it is `low`.
    """
    low = order_of(low)
    high = tl.maximum(order_of(tl.max(values, 0)), low)
    while low < high:
        middle = _middle(low, high)
        count = tl.sum((values >= value_of(middle)).to(tl.int32), 0)
        low, high = _halved(low, high, count, middle, k, slack)
    return value_of(low)


@triton.jit
def _load_block(row, at, end, BLOCK: tl.constexpr):
    """Scores [at, at + BLOCK) of a row, -inf from `end` on. Past the first-level cache: other processors wrote them."""
    j = at + tl.arange(0, BLOCK)
    return tl.load(row + j, mask=j < end, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _kth_of_row(row, begin, end, k, low, BLOCK: tl.constexpr):
    """The same over a row in memory, by reading it again and again: when there are too many candidates."""
    low = order_of(low)
    high = order_of(float("inf") + tl.zeros((), tl.float32))
    while low < high:
        middle = _middle(low, high)
        count = tl.zeros((BLOCK,), tl.int32)
        for at in range(begin, end, BLOCK):
            count += (_load_block(row, at, end, BLOCK) >= value_of(middle)).to(tl.int32)
        low, high = _halved(low, high, tl.sum(count, 0), middle, k, 0)
    return value_of(low)


@triton.jit
def _group_maxima(row, begin, end, BLOCK: tl.constexpr):
    """The maxima of BLOCK groups, of elements that lie BLOCK apart. Neighbours, often alike, are in different ones."""
    # As they are: written so that the compiler knows it, and reads 16 bytes a thread. Two blocks at a time, which is a
    # shape of its own: otherwise these reads would decide how the next loop reads, which must write one by one.
    begin, end = begin // 16 * 16, end // 16 * 16
    offsets = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    best = tl.full((2, BLOCK), float("-inf"), tl.float32)
    for at in range(begin, end, 2 * BLOCK):
        j = at + offsets
        best = tl.maximum(best, tl.load(row + j, mask=j < end, other=float("-inf"), cache_modifier=".cg"))
    return tl.max(best, 0)


@triton.jit
def _gather_candidates(row, begin, end, threshold, found_scores, found_keys, BLOCK: tl.constexpr):
    """Writes the first BLOCK scores above `threshold`, and their keys, in order; returns how many there are in all."""
    count = tl.zeros((), tl.int32)
    value = _load_block(row, begin, end, BLOCK)
    for at in range(begin, end, BLOCK):
        after = _load_block(row, at + BLOCK, end, BLOCK)  # read ahead
        taken = (value > threshold).to(tl.int32)
        place = count + tl.cumsum(taken, 0) - 1
        written = (taken > 0) & (place < BLOCK)
        tl.store(found_scores + place, value, mask=written)
        tl.store(found_keys + place, at + tl.arange(0, BLOCK), mask=written)
        count += tl.sum(taken, 0)
        value = after
    return count


@triton.jit
def _write(value, keys, threshold, ties, tied, place, indices, scores):
    """Writes what is taken of some values, in order; returns how many ties and places are used now."""
    tie = value == threshold
    tie_rank = tied + tl.cumsum(tie.to(tl.int32), 0)
    taken = (value > threshold) | (tie & (tie_rank <= ties))
    at = place + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(indices + at, keys, mask=taken)
    tl.store(scores + at, value, mask=taken)
    return tied + tl.sum(tie.to(tl.int32), 0), place + tl.sum(taken.to(tl.int32), 0)


@triton.jit
def select_row(
    row, begin, end, n, topk, found_scores, found_keys, out_indices, out_scores, out_count, BLOCK: tl.constexpr
):
    """Writes the best `topk` of row[begin:end]: keys ascending, -1 last; their scores, -inf last; how many.

    `begin` and `end` are multiples of 16, and the row begins at one of 16 bytes. A run of n elements is meant; before
    and after it all are -inf. `found_scores` and `found_keys` are
    room for BLOCK elements each. With BLOCK below twice topk this is right, but slow.
    """
    PART: tl.constexpr = BLOCK // 4  # where speed does not matter, less code
    k = tl.minimum(topk, n)
    place = tl.zeros((), tl.int32)
    candidates = n
    threshold = float("-inf") + tl.zeros((), tl.float32)
    short = end - begin <= BLOCK
    if not short:
        if k < BLOCK:  # k groups or more have some of the run
            # Not quite the k-th maximum: a few more candidates cost less than the last halvings.
            maxima = _group_maxima(row, begin, end, BLOCK)
            threshold = kth(maxima, k, tl.min(maxima, 0), k // 16)
        candidates = _gather_candidates(row, begin, end, threshold, found_scores, found_keys, BLOCK)
        tl.debug_barrier()  # the threads read what others have written
    if short | ((candidates >= k) & (candidates <= BLOCK)):
        if short:
            value = _load_block(row, begin, end, BLOCK)
            keys = begin + tl.arange(0, BLOCK)
        else:
            value = _load_block(found_scores, 0, candidates, BLOCK)
            keys = tl.load(
                found_keys + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < candidates, other=0, cache_modifier=".cg"
            )
        if k < candidates:
            threshold = kth(value, k, tl.min(tl.where(value > float("-inf"), value, float("inf")), 0), 0)
        above = tl.sum((value > threshold).to(tl.int32), 0)
        ties = tl.where(threshold == float("-inf"), 0, k - above)
        _, place = _write(value, keys, threshold, ties, 0, place, out_indices, out_scores)
    else:
        if candidates > BLOCK:
            if k < n:
                threshold = _kth_of_row(row, begin, end, k, threshold, BLOCK)
            candidates = tl.zeros((), tl.int32)
            for at in range(begin, end, BLOCK):
                candidates += tl.sum((_load_block(row, at, end, BLOCK) > threshold).to(tl.int32), 0)
        # Otherwise fewer than k are above the threshold, and at least k reach it: it is the k-th score itself.
        ties = tl.where(threshold == float("-inf"), 0, k - candidates)
        tied = tl.zeros((), tl.int32)
        for at in range(begin, end, PART):
            value = _load_block(row, at, end, PART)
            keys = at + tl.arange(0, PART)
            tied, place = _write(value, keys, threshold, ties, tied, place, out_indices, out_scores)
    tl.store(out_count, place)
    for at in range(place, topk, PART):
        j = at + tl.arange(0, PART)
        tl.store(out_indices + j, tl.full((PART,), -1, tl.int32), mask=j < topk)
        tl.store(out_scores + j, tl.full((PART,), float("-inf"), tl.float32), mask=j < topk)
