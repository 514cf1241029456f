"""Widening latents of `fp8_ds_mla`, e4m3 with a scale per 128 values, to 16 bits in shared memory, in Gluon."""

# mypy: disable-error-code="assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmesh.ops.storage import LATENT_GROUP

_KEYS, _GROUP = gl.constexpr(64), gl.constexpr(LATENT_GROUP)  # of a tile
# Of the words of 64 keys, 128 columns each. A lane has 16 columns of a row. The eight lanes that access shared memory
# together read different banks, and write to different banks.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [16, 0], [32, 0]], [[0, 4], [0, 8], [5, 0], [0, 16], [2, 0]], [[4, 0], [8, 0]], [],
        [64, LATENT_GROUP // 4],
    )
)  # fmt: skip
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


@gluon.jit
def words_of(memory):
    """Bytes of 64 keys in shared memory as words."""
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    return memory._reinterpret(gl.int32, [_KEYS, _GROUP // 4], wide)


@gluon.jit
def widen(words, scale, memory):
    """Writes words times the scales of their keys."""
    first, second, third, fourth = gl.inline_asm_elementwise(
        _UNPACK, "=f,=f,=f,=f,r", [words], dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1
    )
    values = gl.join(gl.join(first * scale, third * scale), gl.join(second * scale, fourth * scale))
    memory.store(values.reshape([_KEYS, _GROUP]).to(memory.dtype))
