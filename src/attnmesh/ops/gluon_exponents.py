"""The exponents of a row of an online softmax in Gluon, however large its scores.

A weight is `exp2(score * factor - shift)`, in one multiply-add per score. The shift is the product of the row's largest
score and the factor, rounded: the exponent of that score is not 0 but what the rounding lost. All weights and their sum
have this error in common, and it cancels. Below 2**28 it is at most 8, for which weights of every dtype have room; at
2**32 it would be up to 128.

From 2**28 on, two scores that differ do so by 16 or more in the exponent: but for 2**-16, the largest has all the
weight. There the factor is the power of two below it, whose products are exact. So rows need no branch, and scores no
further instruction. (A score next to the largest has a weight of up to 2**-8 then, instead of 2**-16. Computed in
float32 without this, score by score, it may have that of the largest.)

A row has two maxima: its `peak`, the largest score times the factor, and its `top`, times the power of two.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False, disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmesh.ops.exponents import EXPONENT_BITS, HUGE

_HUGE, _EXPONENT_BITS = gl.constexpr(HUGE), gl.constexpr(EXPONENT_BITS)


@gluon.jit
def power_below(factor):
    """The largest power of two that is not greater than a factor, which is positive."""
    return gl.cast(gl.cast(factor, gl.int32, bitcast=True) & _EXPONENT_BITS, gl.float32, bitcast=True)


@gluon.jit
def row_exponents(top, peak, new_top, new_peak, factor):
    """The factor and the shift of rows, and the exponents of what they have so far; maxima are -inf before any key."""
    # No key so far: subtract 0, since -inf - -inf would be NaN.
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    huge = gl.abs(shift) >= _HUGE
    shift = gl.where(huge, new_top, shift)
    return gl.where(huge, power_below(factor), factor), shift, gl.where(huge, top, peak) - shift
