"""Adding tiles of float32 to global memory on Hopper, from registers."""

# Functions of Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _adding(count: int) -> tuple[str, str]:
    """PTX that adds the `count` values of a thread to the rows of a tile of a matrix instruction, and its constraints.

    Values come in pairs of columns, of two rows in turn, 32 bytes apart; a row without an address is left out. Written
    out because the compiler would keep an address for every pair.
    """
    first, rows = count // 4, count // 4 + count  # operands: results that are not used, values, addresses
    lines = [
        ".reg .pred real<2>; .reg .b32 lane; .reg .b64 column, row<2>;",
        "mov.u32 lane, %laneid; and.b32 lane, lane, 3; mul.wide.u32 column, lane, 8;",
        *(f"setp.ne.u64 real{i}, ${rows + 2 * i}, 0; add.u64 row{i}, ${rows + 2 * i}, column;" for i in range(2)),
        *(f"@real{i % 2} red.relaxed.gpu.global.add.v2.f32 [row{i % 2} + {i // 2 * 32}], "
          f"{{${first + 2 * i}, ${first + 2 * i + 1}}};" for i in range(count // 2)),
    ]  # fmt: skip
    return "{" + " ".join(lines) + "}", ",".join(["=r"] * first + ["f"] * count + ["l"] * count)


_ADDING = {columns: _adding(columns // 2) for columns in (32, 64, 128)}
_ADD_32, _ADD_64, _ADD_128 = (gl.constexpr(_ADDING[columns][0]) for columns in (32, 64, 128))
_OPERANDS_32, _OPERANDS_64, _OPERANDS_128 = (gl.constexpr(_ADDING[columns][1]) for columns in (32, 64, 128))


@gluon.jit
def add_pairs(rows, real, x, COLUMNS: gl.constexpr):
    """Adds a tile of a matrix instruction to memory, two columns at a time; `rows` are where its rows begin."""
    addresses = gl.where(real, rows.to(gl.int64), 0)[:, None]
    if COLUMNS == 32:
        gl.inline_asm_elementwise(_ADD_32, _OPERANDS_32, [x, addresses], gl.int8, is_pure=False, pack=16)
    elif COLUMNS == 64:
        gl.inline_asm_elementwise(_ADD_64, _OPERANDS_64, [x, addresses], gl.int8, is_pure=False, pack=32)
    else:
        gl.inline_asm_elementwise(_ADD_128, _OPERANDS_128, [x, addresses], gl.int8, is_pure=False, pack=64)
