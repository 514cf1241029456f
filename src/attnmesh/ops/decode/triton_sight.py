"""Who sees whom in a tile of keys and rows: causal, by a mask, or by a tree among the new tokens; within a window.

Or by an interval of keys for each token, which says it all.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import triton
import triton.language as tl

from attnmesh.ops.decode.triton_schedule import at_rows

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def interval_of(sight_first, sight_end, row_sequence, row_token, row_last, TOKENS: tl.constexpr):
    """The first and the last key of each row's interval, as far as it lies up to `row_last`, in 32 bits."""
    at = row_sequence * TOKENS + row_token
    end = tl.maximum(tl.load(sight_end + at, mask=row_last >= 0, other=0), 0)
    end = tl.minimum(end, row_last + 1).to(tl.int32)
    first = tl.maximum(tl.load(sight_first + at, mask=row_last >= 0, other=0), 0)
    return tl.minimum(first, end).to(tl.int32), end - 1


@triton.jit
def seen(
    scores, keys, row_last, row_first, own, row_sequence, row_head, row_token, window,
    mask, mask_strides, mask_width, tree, tree_strides, TOKENS: tl.constexpr,
):  # fmt: skip
    """Which of `keys` each row sees, [keys, rows], and the scores (base 2) with what a mask adds to them.

    `row_last` is the position of a row's newest token (-1: none), `own` that of the row itself, or the last key in its
    interval, which `row_first` begins.
    """
    if mask is not None:
        visible = (keys < mask_width)[:, None] & (keys[:, None] <= row_last[None, :])
        mask_rows = at_rows(mask_strides, row_sequence, row_head, row_token)
        mask_at = mask + mask_rows[None, :] + keys.to(tl.int64)[:, None] * mask_strides[3]
        if mask.dtype.element_ty == tl.uint8:
            visible = visible & (tl.load(mask_at, mask=visible, other=0) != 0)
        else:
            bias = tl.load(mask_at, mask=visible, other=float("-inf")).to(tl.float32)
            visible = visible & (bias != float("-inf"))
            scores += bias * _LOG2_E
    elif tree is not None:
        new = keys[:, None] - (row_last - (TOKENS - 1))[None, :]  # which of the new tokens a key is
        among = (new >= 0) & (new < TOKENS) & (row_last >= 0)[None, :]
        tree_rows = row_sequence.to(tl.int64) * tree_strides[0] + row_token * tree_strides[1]
        named = tl.load(tree + tree_rows[None, :] + new * tree_strides[2], mask=among, other=0) != 0
        visible = (row_last >= 0)[None, :] & ((new < 0) | (among & named))
    else:
        visible = keys[:, None] <= own[None, :]
    if window is not None:
        visible = visible & (keys[:, None] > (own - window)[None, :])
    if row_first is not None:
        visible = visible & (keys[:, None] >= row_first[None, :])
    return scores, visible
