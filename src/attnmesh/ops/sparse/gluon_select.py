"""The exact top-k of a row of scores in memory, in Gluon: the selection of `triton_select` by two warps, or by more.

Two run beside warps that need most of the registers, and have time. So they keep nothing in registers but a part of
what they read. They read the row twice: for the maxima of groups of scores, whose k-th bounds the k-th score, and for
the candidates above that bound, which they write down and bisect. Scores are read as integers of the same order. Of
equal scores the first are selected, keys are written in ascending order, and a score of -inf is never selected.
"""

# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmesh.ops.decode.gluon_common import add, group_barrier

WARPS = 2
PART = 1024  # values at a time
_PART = gl.constexpr(PART)
FLAT = gl.constexpr(gl.BlockedLayout([4], [32], [WARPS], [0]))  # how the two warps share what they read
_NOTHING = gl.constexpr(-0x7F800001)  # the order of -inf
_NOTHING_BITS = gl.constexpr(-0x800000)
_MOST = gl.constexpr(0x7F800000)  # the order of inf


@gluon.jit
def _ordered(bits):
    """The bits of a float32 (neither NaN nor -0.0) as an int32 of the same order, and the reverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _load(values, at, end, FLAT: gl.constexpr):
    """The orders of values [at, at + PART), that of -inf from `end` on. Bypasses L1: other programs wrote scores."""
    j = at + gl.arange(0, _PART, layout=FLAT)
    return _ordered(gl.load(values + j, mask=j < end, other=_NOTHING_BITS, cache_modifier=".cg"))


@gluon.jit
def _load_some(values, j, end):
    """The orders of values j, that of -inf from `end` on, which may be any number: up to three more are read."""
    bits = gl.load(values + j, mask=j < (end + 3) // 4 * 4, other=_NOTHING_BITS, cache_modifier=".cg")
    return gl.where(j < end, _ordered(bits), _NOTHING)


@gluon.jit
def _bisected(low, high, count, middle, k, slack):
    """The interval after counting `count` values of at least `middle`; closed if count is in [k, k + slack]."""
    enough = count >= k
    high = gl.where(enough, gl.where(count <= k + slack, middle, high), middle - 1)
    return gl.where(enough, middle, low), high


@gluon.jit
def _middle(low, high):
    """Rounded up. In 64 bits, because the difference may overflow 32."""
    return (low + (high.to(gl.int64) - low + 1) // 2).to(gl.int32)


@gluon.jit
def _kth(value, k, slack):
    """The largest t such that at least k of the values are >= t; the least above -inf, if fewer than k are.

    With `slack`, any t that k to k + slack values reach.
    """
    low = gl.min(gl.where(value > _NOTHING, value, _MOST), 0)
    high = gl.maximum(low, gl.max(value, 0))
    while low < high:
        middle = _middle(low, high)
        low, high = _bisected(low, high, gl.sum((value >= middle).to(gl.int32), 0), middle, k, slack)
    return low


@gluon.jit
def _count(values, end, threshold, FLAT: gl.constexpr):
    """The number of values [0, end) above `threshold`."""
    count = gl.zeros([_PART], gl.int32, FLAT)
    for at in range(0, end, _PART):
        j = at + gl.arange(0, _PART, layout=FLAT)
        count += (_load_some(values, j, end) > threshold).to(gl.int32)
    return gl.sum(count, 0)


@gluon.jit
def _kth_of_many(values, end, k, low, FLAT: gl.constexpr):
    """`_kth` of values [0, end) of which k are >= `low`. Reads them repeatedly: used if they are more than BLOCK."""
    high = low * 0 + _MOST
    while low < high:
        middle = _middle(low, high)
        low, high = _bisected(low, high, _count(values, end, middle - 1, FLAT), middle, k, 0)
    return low


@gluon.jit
def _write_maxima(row, begin, end, out, BLOCK: gl.constexpr, FLAT: gl.constexpr):
    """Writes the maxima of BLOCK groups of elements that are BLOCK apart: similar neighbors are in different groups."""
    j = gl.arange(0, _PART, layout=FLAT)
    for part in range(0, BLOCK, _PART):
        best = gl.full([_PART], _NOTHING, gl.int32, FLAT)
        for at in range(begin + part, end, 2 * BLOCK):  # two loads at a time
            best = gl.maximum(best, gl.maximum(_load(row, at, end, FLAT), _load(row, at + BLOCK, end, FLAT)))
        gl.store(out + part + j, _ordered(best))
    group_barrier()  # threads read what other threads have written


@gluon.jit
def _gather(row, begin, end, threshold, candidates, candidate_keys, BLOCK: gl.constexpr, FLAT: gl.constexpr):
    """Writes the first BLOCK scores above `threshold` and their keys; returns the number of all of them."""
    count = begin * 0
    value = _load(row, begin, end, FLAT)
    for at in range(begin, end, _PART):
        after = _load(row, at + _PART, end, FLAT)  # prefetch
        taken = (value > threshold).to(gl.int32)
        through = gl.associative_scan(taken, 0, add)
        target = count + through - taken
        write = (taken > 0) & (target < BLOCK)
        gl.store(candidates + target, _ordered(value), mask=write)
        gl.store(candidate_keys + target, at + gl.arange(0, _PART, layout=FLAT), mask=write)
        count += gl.sum(taken, 0)
        value = after
    group_barrier()
    return count


@gluon.jit
def select_row(
    row, row_len, begin, end, n, topk, out_indices, out_scores, out_count, BLOCK: gl.constexpr, FLAT: gl.constexpr
):
    """Writes the top-k of row[begin:end], whose n elements may be selected; those before and after them are -inf.

    The row and `out_scores` are the bits of float32. `begin` and `end` are multiples of 16. BLOCK scores and BLOCK keys
    of candidates follow the `row_len` scores of the row. With BLOCK below twice topk the result is correct, but slow.
    """
    k = gl.minimum(topk, n)
    threshold = begin * 0 + _NOTHING
    candidates = row + row_len
    length = end - begin
    few = begin < 0  # whether all that may be selected are among the candidates
    search = k < n
    if length > BLOCK:
        if k < BLOCK:  # at least k groups contain some of the n elements
            _write_maxima(row, begin, end, candidates, BLOCK, FLAT)
            # Not exactly the k-th maximum: a few more candidates cost less than the last bisection steps.
            threshold = _kth(_load_some(candidates, gl.arange(0, BLOCK, layout=FLAT), BLOCK), k, k // 16)
            group_barrier()  # maxima are overwritten
        count = _gather(row, begin, end, threshold, candidates, candidates + BLOCK, BLOCK, FLAT)
        few = (count <= BLOCK) & ((count >= k) | (threshold == _NOTHING))
        # Otherwise, if fewer than k are above the threshold, and at least k reach it, it is the k-th score.
        search = gl.where(few, k < count, (count > BLOCK) & search)
        length = gl.where(few, count, length)
    values = row + gl.where(few, row_len, begin)
    if search:
        if length <= BLOCK:
            threshold = _kth(_load_some(values, gl.arange(0, BLOCK, layout=FLAT), length), k, 0)
        else:
            threshold = _kth_of_many(values, length, k, threshold, FLAT)
    above, tied = begin * 0, begin * 0
    ties = gl.where(threshold == _NOTHING, 0, k - _count(values, length, threshold, FLAT))
    for at in range(0, length, _PART):
        j = at + gl.arange(0, _PART, layout=FLAT)
        value = _load_some(values, j, length)
        keys = begin + j
        if few:
            keys = gl.load(candidates + BLOCK + j, mask=j < (length + 3) // 4 * 4, other=0, cache_modifier=".cg")
        is_above, is_tie = value > threshold, value == threshold
        both = is_above.to(gl.int32) + (is_tie.to(gl.int32) << 16)  # two counts in one
        before = gl.associative_scan(both, 0, add) - both
        tied_here = tied + (before >> 16)
        target = above + (before & 0xFFFF) + gl.minimum(tied_here, ties)
        taken = is_above | (is_tie & (tied_here < ties))
        gl.store(out_indices + target, keys, mask=taken)
        gl.store(out_scores + target, _ordered(value), mask=taken)
        total = gl.sum(both, 0)
        above += total & 0xFFFF
        tied += total >> 16
    found = above + gl.minimum(tied, ties)
    gl.store(out_count, found)
    fill_rest(found, topk, out_indices, out_scores, FLAT)


@gluon.jit
def fill_rest(found, topk, out_indices, out_scores, FLAT: gl.constexpr):
    """Writes what follows the selected: -1, and scores of -inf."""
    for at in range(found, topk, _PART):
        j = at + gl.arange(0, _PART, layout=FLAT)
        gl.store(out_indices + j, gl.full([_PART], -1, gl.int32, FLAT), mask=j < topk)
        gl.store(out_scores + j, gl.full([_PART], _NOTHING_BITS, gl.int32, FLAT), mask=j < topk)
