"""Loading the keys and values of a tile: from blocks or a contiguous cache, in any storage type.

Address arithmetic per key costs as much as the attention itself, so it is hoisted out of the loop where possible:
offsets within a block repeat from tile to tile when tiles and blocks divide one another, and are 32 bits wide unless
the pool needs more.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import triton
import triton.language as tl

# Two 16-bit words in, their lower and upper values out: four bytes become four fp16 values.
_FP8_HALVES = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# An int8 with its sign flipped is the last byte of 1024 + 128 + itself in fp16.
_INT8_HALVES = tl.constexpr("""{
    .reg .b32 flipped, low, high, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 flipped, $2, 0x80808080;
    prmt.b32 low, flipped, 0x64646464, 0x4240;
    prmt.b32 high, flipped, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, low, offset;
    sub.rn.f16x2 $1, high, offset;
}""")
# The same times powers of two, $3 and then $4: one of them alone may be beyond fp16 where the product is not.
_BFP_FP16_HALVES = tl.constexpr("""{
    .reg .b32 flipped, low, high, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 flipped, $2, 0x80808080;
    prmt.b32 low, flipped, 0x64646464, 0x4240;
    prmt.b32 high, flipped, 0x64646464, 0x4341;
    sub.rn.f16x2 low, low, offset;
    sub.rn.f16x2 high, high, offset;
    mul.rn.f16x2 low, low, $3;
    mul.rn.f16x2 high, high, $3;
    mul.rn.f16x2 $0, low, $4;
    mul.rn.f16x2 $1, high, $4;
}""")
# The lower seven bits of an int8 are the last ones of 128 + themselves in bf16, its sign is that of 128 + 128.
# (fma alone: bf16 has no other arithmetic before sm_90.)
_BFP_BF16_HALVES = tl.constexpr("""{
    .reg .b32 low, high, bits, sign, minus_one, minus_zero;
    mov.b32 minus_one, 0xbf80bf80;
    mov.b32 minus_zero, 0x80008000;
    prmt.b32 low, $2, 0x43434343, 0x4240;
    prmt.b32 high, $2, 0x43434343, 0x4341;
    and.b32 bits, low, 0xff7fff7f;
    and.b32 sign, low, 0xff80ff80;
    fma.rn.bf16x2 low, sign, minus_one, bits;
    fma.rn.bf16x2 $0, low, $3, minus_zero;
    and.b32 bits, high, 0xff7fff7f;
    and.b32 sign, high, 0xff80ff80;
    fma.rn.bf16x2 high, sign, minus_one, bits;
    fma.rn.bf16x2 $1, high, $3, minus_zero;
}""")


@triton.jit
def load_blocks(table_row, key, stop, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr, KEYS: tl.constexpr):
    """The blocks of the keys [key, key + KEYS): one if a block contains the tile, else one per key.

    Keys from `stop` on are not looked up. A contiguous cache is one block.
    """
    if BLOCK_SIZE == 0:
        blocks = 0
    elif ALIGNED and BLOCK_SIZE >= KEYS:
        blocks = tl.load(table_row + key // BLOCK_SIZE, mask=key < stop, other=0)
    elif ALIGNED:
        near = tl.arange(0, KEYS)
        blocks = tl.load(table_row + key // BLOCK_SIZE + near // BLOCK_SIZE, mask=key + near < stop, other=0)
    else:
        keys = key + tl.arange(0, KEYS)
        blocks = tl.load(table_row + keys // BLOCK_SIZE, mask=keys < stop, other=0)
    return blocks


@triton.jit
def offsets_in_block(key, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr, KEYS: tl.constexpr):
    """The offsets of the keys [key, key + KEYS) in their blocks."""
    near = tl.arange(0, KEYS)
    if BLOCK_SIZE == 0:
        block_offsets = key + near
    elif ALIGNED and BLOCK_SIZE >= KEYS:
        block_offsets = key % BLOCK_SIZE + near
    elif ALIGNED:
        block_offsets = near % BLOCK_SIZE  # the same in every tile
    else:
        block_offsets = (key + near) % BLOCK_SIZE
    return block_offsets


@triton.jit
def head_pointer(base, strides, head, sequence, PER_SEQUENCE: tl.constexpr):
    """The beginning of a head in a pool or shared cache, or in the cache of this sequence if PER_SEQUENCE."""
    start = base + head.to(tl.int64) * strides[2]
    if PER_SEQUENCE:
        start += sequence.to(tl.int64) * strides[0]
    return start


@triton.jit
def in_bounds(blocks, keys, first, stop, num_blocks, BOUNDED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Which keys belong to the sequence and lie in the pool: no other memory is read."""
    valid = keys < stop
    if BOUNDED:
        valid = valid & (keys >= first)
    if BLOCK_SIZE > 0:
        valid = valid & (tl.cast(blocks, tl.uint32, bitcast=True) < tl.cast(num_blocks, tl.uint32, bitcast=True))
    return valid


@triton.jit
def key_offsets(blocks, block_offsets, strides, WIDE: tl.constexpr):
    """The offset of each key from the beginning of its head."""
    if WIDE:
        blocks = tl.cast(blocks, tl.int64)
        block_offsets = block_offsets.to(tl.int64)
    return blocks * strides[0] + block_offsets * strides[1]


@triton.jit
def load_rows(head, offsets, valid, COLUMN: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [COLUMN, COLUMN + WIDTH) of a tile of keys, [keys, WIDTH]."""
    columns = COLUMN + tl.arange(0, WIDTH)
    pointers = head + (offsets[:, None] + columns[None, :])
    if COLUMN + WIDTH > D:
        tile = tl.load(pointers, mask=valid[:, None] & (columns < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointers, mask=valid[:, None], other=0.0)
    return tile


@triton.jit
def load_transposed(head, offsets, valid, D: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of keys transposed, [WIDTH, keys]. (Loading and then transposing would not be pipelined.)"""
    columns = tl.arange(0, WIDTH)
    pointers = head + (offsets[None, :] + columns[:, None])
    if WIDTH > D:
        tile = tl.load(pointers, mask=valid[None, :] & (columns < D)[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=valid[None, :], other=0.0)
    return tile


@triton.jit
def load_bfp_scales(
    scales, strides, offsets, valid, COLUMN: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr
):
    """The powers of two of a bfp8 tile, broadcast to its values, [keys, WIDTH]."""
    groups = COLUMN // 16 + tl.arange(0, WIDTH // 16)
    inside = valid[:, None] & (groups < D // 16)[None, :]
    powers = tl.load(scales + (offsets[:, None] + groups[None, :] * strides[3]), mask=inside, other=0).to(tl.int32)
    steps = ((powers + 127) << 23).to(tl.float32, bitcast=True)  # 2 ** power, exactly
    return tl.broadcast_to(steps[:, :, None], (KEYS, WIDTH // 16, 16)).reshape(KEYS, WIDTH)


@triton.jit
def load_exponents(scales, offsets, valid, shifts, D: tl.constexpr, WIDTH: tl.constexpr):
    """The exponents of a bfp8 tile, [keys, WIDTH // 64, 4].

    Four are read at a time: fewer bytes could not be read ahead of their use. `shifts` tell them apart. (They come from
    memory because the compiler would not convert a tile of numbers that it computes to the layout of a product.)
    """
    words = tl.arange(0, WIDTH // 64)
    inside = valid[:, None] & (words < D // 64)[None, :]
    exponents = tl.load(scales + (offsets[:, None] + words[None, :]), mask=inside, other=0)
    return (exponents[:, :, None] << shifts[None, None, :]) >> 24


@triton.jit
def load_exponents_transposed(scales, offsets, valid, shifts, D: tl.constexpr, WIDTH: tl.constexpr):
    """The same, [WIDTH // 64, 4, keys]."""
    words = tl.arange(0, WIDTH // 64)
    inside = valid[None, :] & (words < D // 64)[:, None]
    exponents = tl.load(scales + (offsets[None, :] + words[:, None]), mask=inside, other=0)
    return (exponents[:, None, :] << shifts[None, :, None]) >> 24


@triton.jit
def power_of_two(exponent, dtype: tl.constexpr):
    """2 ** exponent in bf16, exactly, or in fp16, limited to its normal numbers."""
    if dtype == tl.bfloat16:
        bits = (exponent + 127) << 7
    else:
        bits = (tl.minimum(tl.maximum(exponent, -14), 15) + 15) << 10
    return bits.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def unpack_bfp_pairs(words, exponents, COMPILED: tl.constexpr, dtype: tl.constexpr):
    """The lower and the upper value in each 16-bit word of a bfp8 tile, rounded to `dtype`."""
    first = power_of_two(exponents, dtype)
    rest = power_of_two(exponents - tl.minimum(tl.maximum(exponents, -14), 15), dtype)
    if not COMPILED:
        low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        low, high = low.to(tl.int8, bitcast=True).to(dtype), high.to(tl.int8, bitcast=True).to(dtype)
        low, high = low * first, high * first
        if dtype == tl.float16:
            low, high = low * rest, high * rest
    elif dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            _BFP_FP16_HALVES, "=r,=r,r,r,r", [words, first, rest], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _BFP_BF16_HALVES, "=r,=r,r,r", [words, first], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def load_latent_scales(scales, strides, offsets, valid, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """The scales of an fp8_ds_mla tile, one per 128 values, broadcast to its values, [keys, WIDTH]."""
    groups = tl.arange(0, WIDTH // 128)
    loaded = tl.load(scales + (offsets[:, None] + groups[None, :] * strides[3]), mask=valid[:, None], other=0.0)
    return tl.broadcast_to(loaded[:, :, None], (KEYS, WIDTH // 128, 128)).reshape(KEYS, WIDTH)


@triton.jit
def unpack_pairs(words, STORAGE: tl.constexpr, COMPILED: tl.constexpr):
    """The lower and the upper value in each 16-bit word of an fp8 or int8 tile, exactly, in fp16.

    Words move from shared memory to the registers of the tensor cores as fp16 values do; bytes would move one by one.
    """
    if not COMPILED:  # the interpreter does not run inline assembly
        low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        if STORAGE == "fp8":
            low, high = low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)
        else:
            low, high = low.to(tl.int8, bitcast=True), high.to(tl.int8, bitcast=True)
        low, high = low.to(tl.float16), high.to(tl.float16)
    else:
        code: tl.constexpr = _FP8_HALVES if STORAGE == "fp8" else _INT8_HALVES
        low, high = tl.inline_asm_elementwise(
            code, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@triton.jit
def normalize_to_fp16(q):
    """Queries [D, rows] in fp16, scaled by powers of two so that the maximum of a row is in 1..2, and the powers."""
    wide = q.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)  # of rows that are zero, tiny or not finite
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (wide * down[None, :]).to(tl.float16), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def split_pairs(tile, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """[2 * PAIRS, ROWS] as its even and its odd rows."""
    return tl.split(tl.permute(tl.reshape(tile, (PAIRS, 2, ROWS)), (0, 2, 1)))


@triton.jit
def join_pairs(even, odd, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """The inverse of `split_pairs`."""
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (2 * PAIRS, ROWS))
