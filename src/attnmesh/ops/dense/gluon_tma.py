"""A function of Hopper's copy engine (TMA) that Gluon does not offer yet: it adds a block to global memory."""

# A function of Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Adds a block in shared memory to the tensor, element by element; `tma.store_wait` waits for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)
