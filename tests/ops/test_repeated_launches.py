"""A launch that repeats passes to the driver what Triton would pass, with other addresses."""

from dataclasses import dataclass

import pytest
import torch

from helpers.triton_driver import record_launches, said_by_its_own_process

pytest.importorskip("triton")

from attnmesh.ops.launch import Recent, prepare, repeat, signature


def test_a_repeat_passes_what_triton_passes():
    """In a process of its own: Triton reads whether to interpret when it is imported."""
    assert said_by_its_own_process(__file__) == "4 launches compared"


def test_repeats_differ_in_addresses_only():
    """A kernel that is launched with the same numbers is prepared once; others get launches of their own."""
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((grid, args, options))

    kernel, known = Kernel(), Recent()
    given = [(torch.full((8,), float(i)), torch.zeros(4, 2)) for i in range(3)]
    for x, y in given:
        repeat(known, kernel, (2,), (x, 3, (1, 2), y[1:], None), WIDTH=4)
    assert len(known) == 1
    for (x, y), (grid, args, options) in zip(given, seen, strict=True):
        assert torch.equal(args[0], x)
        assert (args[1:3], args[3].data_ptr(), args[4]) == ((3, (1, 2)), y[1:].data_ptr(), None)
        assert (grid, options) == ((2,), {"WIDTH": 4})
    x, y = given[0]
    for grid, args, width in [
        ((3,), (x, 3, (1, 2), y[1:], None), 4),
        ((2,), (x, 3.0, (1, 2), y[1:], None), 4),
        ((2,), (x, 3, (1, 3), y[1:], None), 4),
        ((2,), (x, 3, (1, 2), None, y[1:]), 4),
        ((2,), (x, 3, (1, 2), y[:3], None), 4),
        ((2,), (x, 3, (1, 2), y[1:], None), 8),
    ]:
        before = len(known)
        repeat(known, kernel, grid, args, WIDTH=width)
        assert len(known) == before + 1


def test_repeats_of_descriptors_differ_in_addresses_only():
    """A descriptor is known by its shape, strides, block and layout; the second launch has one of the other tensor."""
    seen, known = [], Recent()

    @dataclass
    class Descriptor:
        base: torch.Tensor
        shape: list[int]
        strides: list[int]
        block_shape: list[int]
        layout: str = "rows"

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append(args)

    kernel, tensors = Kernel(), [torch.zeros(8, 4), torch.ones(8, 4)]
    for x in tensors:
        repeat(known, kernel, (2,), (Descriptor(x, [8, 4], [4, 1], [2, 4]),))
    assert len(known) == 1
    assert [args[0].base.data_ptr() for args in seen] == [x.data_ptr() for x in tensors]
    repeat(known, kernel, (2,), (Descriptor(tensors[0], [8, 4], [4, 1], [4, 4]),))
    assert len(known) == 2


def test_a_tensor_that_is_not_replaced_is_refused():
    x, other = torch.zeros(8), torch.zeros(8)
    with pytest.raises(ValueError, match="argument 1 of a launch must be one of its tensors or a part of one"):
        prepare(None, (1,), (x, other), (x,))
    with pytest.raises(ValueError, match="argument 0 of a launch must not be a tuple with tensors"):
        prepare(None, (1,), ((x, other),), (x, other))


def test_a_kernel_that_is_not_compiled_is_launched_through_triton():
    """As in the interpreter. The second launch has the views of other tensors, and numbers as before."""
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: seen.append((grid, args, options))

    def fused(begin: float) -> torch.Tensor:
        return torch.arange(begin, begin + 24.0).view(4, 6)

    qkv, other, new, more = fused(0), torch.ones(3), fused(100), torch.zeros(3)
    launch = prepare(Kernel(), (2,), (qkv[:, 2:4], 7, other, None), (qkv, other), num_warps=4)
    launch(new, more)
    (_, first, _), (grid, args, options) = seen
    assert first[0].data_ptr() == qkv[:, 2:].data_ptr()
    assert torch.equal(args[0], new[:, 2:4])
    assert args[0].data_ptr() == new[:, 2:].data_ptr()
    assert args[2].data_ptr() == more.data_ptr()
    assert (args[1], args[3]) == (7, None)
    assert (grid, options) == ((2,), {"num_warps": 4})


def test_a_view_in_another_dtype_is_made_again():
    """As of a mask, whose bytes a kernel reads, or of pairs of values of 8 bits."""
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args: seen.append(args)

    x, new = (torch.arange(begin, begin + 16, dtype=torch.int8).view(2, 8) for begin in (0, 50))
    launch = prepare(Kernel(), (1,), (x.view(torch.int16), x[1:].view(torch.int32)), (x,))
    launch(new)
    assert torch.equal(seen[1][0], new.view(torch.int16))
    assert torch.equal(seen[1][1], new[1:].view(torch.int32))


def test_what_a_launch_depends_on_is_in_the_signature():
    x = torch.zeros(64)
    same = signature(x[4:12], None)
    assert signature(torch.ones(64)[8:16], None) == same
    assert signature(x[1:9]) != signature(x[2:10])  # of which other parts are aligned
    for other in (x[5:13], x[4:13], x[4:20:2], x[4:12].view(2, 4), x[4:12].to(torch.float64), x[4:12].to("meta")):
        assert signature(other, None) != same
    assert signature(x[4:12], x) != same
    assert signature(None, x[4:12]) != same


def test_tensors_that_begin_at_one_address_are_told_apart_from_others():
    """As keys that are passed as values, too: a launch that is repeated for other values would read the keys."""
    x, y = torch.zeros(8), torch.zeros(8)
    both = signature(x, x, None)
    assert signature(y, y, None) == signature(x, x[:8], None) == both
    assert signature(x, y, None) != both
    assert signature(x, x, y) != signature(x, y, y) != signature(x, y, x)


def test_the_oldest_are_dropped():
    recent: Recent[int] = Recent(3)
    for key in range(5):
        assert recent.add(key, key * key) == key * key
    assert recent == {2: 4, 3: 9, 4: 16}


# In a process of its own, with a driver that writes down what it is passed.


def compare() -> None:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

    from attnmesh.ops.gluon import descriptor

    passed, stream = record_launches()

    @triton.jit
    def scaled(x, strides, y, n, scale, sinks, WIDTH: tl.constexpr):
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        tl.store(y + at * strides[1], tl.load(x + at * strides[0], mask=at < n, other=0.0) * scale, mask=at < n)

    @gluon.jit
    def copied(x, none, y, out, n, WIDTH: gl.constexpr):
        memory = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        mbarrier.expect(ready, x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [0, n], ready, memory)
        mbarrier.wait(ready, 0)
        tma.async_copy_shared_to_global(y, [0, n], memory)
        tma.store_wait(0)
        mbarrier.invalidate(ready)
        gl.store(out, n)

    def arguments(kernel, x, y, out):
        if kernel is scaled:
            return (x[:, 16:], (x.stride(0), 1), y, 96, 0.5, None)
        return (descriptor(x[:, 16:], [8, 64]), None, descriptor(y, [8, 64]), out, 5)

    def tensors(seed: int):
        torch.manual_seed(seed)
        return torch.randn(8, 96).bfloat16(), torch.randn(8, 96).bfloat16(), torch.zeros(1, dtype=torch.int32)

    def flat(x):
        if isinstance(x, torch.Tensor):
            return x.data_ptr()
        return tuple(map(flat, x)) if isinstance(x, (tuple, list)) else x

    compared = 0
    for kernel in (scaled, copied):
        options = {"WIDTH": 64, "num_warps": 4}
        first = tensors(0)
        used = first if kernel is copied else first[:2]
        again = prepare(kernel, (3,), arguments(kernel, *first), used, **options)
        for seed in (1, 2):
            given = tensors(seed)
            used = given if kernel is copied else given[:2]
            stream[0] += 1
            before = len(passed)
            kernel[(3,)](*arguments(kernel, *given), **options)
            again(*used)
            assert again._passed is not None, "it is launched through Triton"
            assert len(passed) == before + 2, passed[before:]
            # Nobody listens: hooks and what they would be told are left out.
            theirs, ours = (
                [x for x in flat(one) if x is not None and "Hook" not in str(x) and "LazyDict" not in str(x)]
                for one in passed[before:]
            )
            assert [x for x in theirs if not isinstance(x, tuple)] == [x for x in ours if not isinstance(x, tuple)], (
                theirs,
                ours,
            )
            assert [tuple(y for y in x if y is not None) for x in theirs if isinstance(x, tuple)] == [
                tuple(y for y in x if y is not None) for x in ours if isinstance(x, tuple)
            ]
            compared += 1
        heard = []
        knobs.runtime.launch_enter_hook.add(heard.append)
        again(*used)
        knobs.runtime.launch_enter_hook.remove(heard.append)
    # A Triton that passes its first arguments otherwise launches each time.
    launch = CudaLauncher.__call__
    CudaLauncher.__call__ = lambda self, grid_x, *rest: launch(self, grid_x + 1, *rest)
    first = tensors(0)
    assert prepare(scaled, (3,), arguments(scaled, *first), first[:2], WIDTH=64, num_warps=4)._passed is None
    print(f"{compared} launches compared")


if __name__ == "__main__":
    compare()
