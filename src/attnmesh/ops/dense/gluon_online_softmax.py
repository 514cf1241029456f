"""The online softmax in Gluon, one tile of scores at a time.

A group of four warps has 64 rows: the rows of one head, or fewer rows of several heads one after another. Their carry
is (acc, total, raw_max). `acc / total` is the output so far, and `row_max + log2(total)` its log-sum-exp in base 2,
where `row_max` is `row_max_of(raw_max)` (see `gluon_exponents`). Tiles of values and of output are tuples of one or two
blocks of columns.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Gluon has no starred elements
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmesh.ops.dense.gluon_alibi import ROWS, product_layout
from attnmesh.ops.dense.triton_tiles import LOG2_E
from attnmesh.ops.gluon_exponents import lowest_of, row_exponents

_ROWS, _LOG2_E = gl.constexpr(ROWS), gl.constexpr(LOG2_E)


@gluon.jit
def softmax(scores, total, raw_max, key_begin, near, of_rows, SHAPE: gl.constexpr):
    """One step of the online softmax: the weights of a tile, the factor `acc_scale` of `acc`, total and raw_max.

    `of_rows` has the keys that rows see, and what makes scores of products. With `terms`, scores and raw_max have the
    slope times the distance of the row from the first row of its work tile in them: the term of a key that is not after
    its row is a slope times `near`, its distance from that row. The products began from it, or it is added after a
    softcap.
    """
    inner, edge, row_first, row_end, scale, softcap, terms = of_rows
    factor = factor_of(scale, softcap)
    if softcap is not None:
        scores = tanh(scores * (scale / softcap))
    is_edge = (key_begin < inner) | (key_begin >= edge)
    if len(terms) > 0:
        slopes, row_distances, later_keys = terms
        if softcap is not None:
            scores += slopes[:, None] * near
        if SHAPE.later:
            is_edge |= later_keys
    if is_edge:
        key = gl.arange(0, SHAPE.keys, layout=gl.SliceLayout(0, product_layout(SHAPE.keys)))[None, :]
        if SHAPE.later:
            later = gl.minimum(row_distances[:, None] - near, 0.0)
            scores += slopes[:, None] * (2.0 * later)
        visible = key < (row_end - key_begin)[:, None]
        if SHAPE.parts > 0:
            visible &= key >= (row_first - key_begin)[:, None]
        scores = gl.where(visible, scores, float("-inf"))
    new_raw_max = gl.maximum(raw_max, gl.max(scores, 1))
    factors, shift, exponent = row_exponents(raw_max, new_raw_max, factor)
    # The scale is part of the multiply-add in the exponent instead of a separate pass.
    weights = gl.exp2(scores * factors[:, None] - shift[:, None])
    acc_scale = gl.exp2(exponent)
    return weights, acc_scale, total * acc_scale + gl.sum(weights, 1), new_raw_max


@gluon.jit
def factor_of(scale, softcap):
    """The factor from products of queries and keys, or from their tanh, to scores in base 2."""
    return (scale if softcap is None else softcap) * _LOG2_E


@gluon.jit
def tanh(x):
    """tanh, with an error of about 1e-7."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 * _LOG2_E)))


@gluon.jit
def operand(weights, memory, SHAPE: gl.constexpr):
    """The weights as the left operand of the products with values."""
    return gl.convert_layout(weights.to(memory.v[0].dtype), gl.DotOperandLayout(0, product_layout(SHAPE.v_main), 2))


@gluon.jit
def rescale(acc, factor, SELECT: gl.constexpr = False):
    """The rows of all blocks times a factor. If SELECT, a factor of 0 makes 0 of anything, even of NaN."""
    result = ()
    for i in gl.static_range(len(acc)):
        column = gl.convert_layout(factor, gl.SliceLayout(1, product_layout(acc[i].shape[1])))[:, None]
        product = acc[i] * column
        if SELECT:
            product = gl.where(column != 0.0, product, 0.0)
        result = result + (product,)
    return result


@gluon.jit
def initial(factor, SHAPE: gl.constexpr, down: gl.constexpr):
    """The carry before any key: (acc, total, raw_max)."""
    total = gl.zeros([_ROWS], gl.float32, down)
    raw_max = total + lowest_of(factor)
    acc = (_zeros(SHAPE.v_main),)
    if SHAPE.v_rest > 0:
        acc = acc + (_zeros(SHAPE.v_rest),)
    return acc, total, raw_max


@gluon.jit
def _zeros(WIDTH: gl.constexpr):
    return gl.zeros([_ROWS, WIDTH], gl.float32, product_layout(WIDTH))
