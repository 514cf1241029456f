"""The exponents of a row of an online softmax in Gluon, however large its scores.

A weight is `exp2(score * factor - shift)`, in one multiply-add per score. The shift is the product of the row's largest
score and the factor, rounded: the exponent of that score is not 0 but what the rounding lost. All weights and their sum
have this error in common, and it cancels. Below 2**28 it is at most 8, for which weights of every dtype have room; at
2**32 it would be up to 128.

From 2**28 on, two scores that differ do so by 16 or more in the exponent: but for 2**-16, the largest has all the
weight. There the factor is the power of two below it, whose products are exact. So rows need no branch, and scores no
further instruction. (A score next to the largest has a weight of up to 2**-8 then, instead of 2**-16. Computed in
float32 without this, score by score, it may have that of the largest.)

The carry of a row is `raw_max`, its largest score before the factor; `row_max` is the same in base 2. Before its first
key `raw_max` is `lowest_of` the factor, which is finite: no exponent is the difference of two infinities.
"""

# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmesh.ops.exponents import EXPONENT_BITS, HUGE, LOWEST

_HUGE, _LOWEST, _EXPONENT_BITS = gl.constexpr(HUGE), gl.constexpr(LOWEST), gl.constexpr(EXPONENT_BITS)
# Never fused with the subtraction that follows: the largest score minus itself must be 0, however large it is.
_TIMES = gl.constexpr("mul.rn.f32 $0, $1, $2;")


@gluon.jit
def lowest_of(factor):
    """Less than any score: the `raw_max` of a row without a key. Its product with the factor is finite."""
    return _LOWEST / gl.maximum(factor, 1.0)


@gluon.jit
def row_max_of(raw_max, factor):
    """The largest scores of rows in base 2; -inf without a key."""
    return gl.where(raw_max > lowest_of(factor), raw_max * factor, float("-inf"))


@gluon.jit
def row_exponents(raw_max, new_raw_max, factor):
    """The factor and the shift of rows, and the exponents by which their sums so far are rescaled."""
    # The largest power of two that is not greater than the factor, which is positive.
    power = gl.cast(gl.cast(factor, gl.int32, bitcast=True) & _EXPONENT_BITS, gl.float32, bitcast=True)
    factors = gl.where(gl.abs(new_raw_max) >= _HUGE / factor, power, factor)
    shift = times(new_raw_max, factors)
    return factors, shift, times(raw_max, factors) - shift


@gluon.jit
def times(a, b):
    """a * b, rounded before anything is added or subtracted."""
    return gl.inline_asm_elementwise(_TIMES, "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)
