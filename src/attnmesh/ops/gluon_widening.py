"""Widening latents of `fp8_ds_mla`, e4m3 with a scale per 128 values, to 16 bits in shared memory, in Gluon.

`widen` multiplies with the scales in float32, and rounds once. `widen_to_fp16` takes a third of the instructions: one
makes two neighboring values fp16, and one more multiplies both with the scale of their key. Fp16 has less range than
bf16, so all that becomes fp16 is divided by a power of two:

- keys by the `unit` of their tile, by which the largest scale so far is 64 to 128: a product with the largest value is
  less than 2**16. A scale is rounded to 11 bits, and so is its product. A scale less than 2**-20 of the largest so far
  has fewer: it is rounded to 2**-31 of that. A product less than 2**-30 of the largest is rounded to 2**-41 of it.
  Scores and sums are in this unit. It does not decrease within an item; when it increases, the sums so far are
  multiplied by the ratio (as they are after a new maximum), and so is the tail of the queries.
- rows of queries by `row_unit_of` their largest number; numbers less than 2**-28 of it are rounded to 2**-39 of it. The
  tail remains bf16, as that of the keys.

The weights of the largest scores are 1 or more. Those less than 2**-25 become 0, but count in the sum of weights: of n
keys, out may lack n * 2**-25 of the values.
"""

# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmesh.ops.decode.gluon_common import LINES, fence_warps
from attnmesh.ops.exponents import EXPONENT_BITS
from attnmesh.ops.storage import LATENT_GROUP

_KEYS, _GROUP = gl.constexpr(64), gl.constexpr(LATENT_GROUP)  # of a tile
_UNPACK = gl.constexpr("""{
    .reg .b16 low, high, first, second, third, fourth;
    .reg .b32 front, back;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 front, low;
    cvt.rn.f16x2.e4m3x2 back, high;
    mov.b32 {first, second}, front;
    mov.b32 {third, fourth}, back;
    cvt.f32.f16 $0, first;
    cvt.f32.f16 $1, second;
    cvt.f32.f16 $2, third;
    cvt.f32.f16 $3, fourth;
}""")
_SCALED = "cvt.rn.f16x2.e4m3x2 $0, {}; mul.rn.f16x2 $0, $0, $2; }}"
_FIRST = gl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; " + _SCALED.format("low"))
_SECOND = gl.constexpr("{ .reg .b16 low, high; mov.b32 {low, high}, $1; " + _SCALED.format("high"))
# Of the scales of a tile: every warp has all of them.
_SCALES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [32, 0]], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 0], [0, 0]], [],
        [64, 512 // LATENT_GROUP],
    )
)  # fmt: skip
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_EXPONENT_BITS = gl.constexpr(EXPONENT_BITS)
LOWEST_UNIT = gl.constexpr(2.0**-40)  # of tiles
_LOWEST_ROW, _LARGEST = gl.constexpr(2.0**-40), gl.constexpr(2.0**127)  # of the largest numbers of rows


@gluon.jit
def widen(words, scale, memory):
    """Writes words of four bytes times the scales of their keys."""
    first, second, third, fourth = gl.inline_asm_elementwise(
        _UNPACK, "=f,=f,=f,=f,r", [words], dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1
    )
    values = gl.join(gl.join(first * scale, third * scale), gl.join(second * scale, fourth * scale))
    memory.store(values.reshape([_KEYS, _GROUP]).to(memory.dtype))


@gluon.jit
def widen_to_fp16(pairs, scale, unit, memory):
    """Writes pairs of bytes times the scales of their keys, in a unit."""
    scale = (scale * inverse_of(unit)).to(gl.float16)
    first = gl.inline_asm_elementwise(_FIRST, "=r,r,r", [pairs, scale], dtype=gl.float16, is_pure=True, pack=2)
    second = gl.inline_asm_elementwise(_SECOND, "=r,r,r", [pairs, scale], dtype=gl.float16, is_pure=True, pack=2)
    shape: gl.constexpr = [_KEYS, _GROUP // 4, 2]
    values = gl.join(first.reshape(shape), second.reshape(shape)).permute([0, 1, 3, 2])
    memory.store(values.reshape([_KEYS, _GROUP]))


@gluon.jit
def unit_of(scales, unit, first, stop):
    """The unit of a tile of keys, of which [first, stop) count, after a tile of `unit`."""
    values = gl.abs(scales.load(_SCALES))
    at = gl.arange(0, _KEYS, layout=gl.SliceLayout(1, _SCALES))[:, None]
    counts = (at >= first) & (at < stop) & (values < float("inf"))  # not NaN
    return gl.maximum(unit, gl.max(gl.max(_power_in(gl.where(counts, values, 0.0)), 1), 0) * 2.0**-6)


@gluon.jit
def write_unit(unit, memory):
    """Writes the unit of a tile, which is one number, for `read_unit`."""
    memory.store(gl.zeros([1], gl.float32, _ONE) + unit)


@gluon.jit
def read_unit(memory):
    """The unit of a tile."""
    return gl.max(memory.load(_ONE), 0)


@gluon.jit
def row_unit_of(largest):
    """The powers of two that rows of queries are divided by, so that their largest are 2**14 to 2**15, or less."""
    return _power_in(gl.minimum(gl.maximum(largest, _LOWEST_ROW), _LARGEST)) * 2.0**-14


@gluon.jit
def inverse_of(power):
    """1 / a power of two from 2**-126 to 2**126."""
    return gl.cast(0x7F000000 - gl.cast(power, gl.int32, bitcast=True), gl.float32, bitcast=True)


@gluon.jit
def _power_in(x):
    """The largest powers of two that are not greater than numbers, or 0 for 0."""
    return gl.cast(gl.cast(x, gl.int32, bitcast=True) & _EXPONENT_BITS, gl.float32, bitcast=True)


@gluon.jit
def scale_tail(tail, ratio):
    """Multiplies the tail of the queries in shared memory."""
    values = tail.load(LINES)
    tail.store((values.to(gl.float32) * ratio).to(values.dtype))
    fence_warps()


@gluon.jit
def as_rows(memory, DTYPE: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory of 64 rows as rows of another type of 16 bits."""
    return memory._reinterpret(DTYPE, [_KEYS, COLUMNS], gl.NVMMASharedLayout(128, 16, 2))
