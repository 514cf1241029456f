"""Functions of Hopper's copy engine (TMA) that Gluon does not offer yet: it adds a block to global memory."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Adds a block in shared memory to the tensor, element by element; `tma.store_wait` waits until it is read."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def wait_for_adds():
    """Waits until all that this warp has added is in global memory. (`tma.store_wait` waits until it has been read.)"""
    # And no lane goes on before the lane that started the copies.
    wait: gl.constexpr = "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(wait, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
