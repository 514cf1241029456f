"""Gluon kernels on the CPU: their own source, run by torch, each group of warps as a thread of its own.

Triton's interpreter does not know Gluon. What such a kernel can get wrong that no compiler sees is its protocol: who
waits for whom, in which phase, how often, and what lies in shared memory meanwhile. So one group runs at a time, and a
seed decides which one goes on, wherever another could see what it does next: any may be held up while others run
ahead. Copies land late, and what was there is gone at once; blocks that the copy engine (TMA) loads land in any order.
An error is: to wait for ever; to arrive more often than a barrier counts; to change what a matrix product or a store of
the copy engine reads before it is waited for; to use its result earlier; to let the matrix units or the copy engine
read what no fence has shown them; to access memory outside of a tensor; to leave copies, stores or products behind, or
a barrier with bytes that never come. What reads too early computes NaN. Layouts mean nothing here.

Programs run one after another, or several `together`: for kernels whose programs wait for others, which started before.

The source of a kernel runs, not what the compiler makes of it: `carried_values` looks for what Triton drops.
"""

import ast
import importlib
import math
import random
import re
import threading
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor


def emulated(
    module: ModuleType, seed: int = 0, planted: tuple[str, str] | None = None, together: int = 1
) -> ModuleType:
    """The module once more, with kernels that run here, on a schedule of their own; `planted` replaces some source."""
    done: dict[str, tuple[ModuleType, int]] = {}
    again = _rewritten(module, Machine(seed, together).names(), planted, done)
    found = sum(count for _, count in done.values())
    if found != (planted is not None):  # not an assertion, which tests of planted faults expect
        raise ValueError(f"the source to be replaced is there {found} times: {planted}")
    return again


def _rewritten(module: ModuleType, names: dict, planted: tuple[str, str] | None, done: dict) -> ModuleType:
    """The module; `done` has it and those that it imports from, and how often the source to be replaced was found."""
    if module.__name__ in done:
        return done[module.__name__][0]
    source = Path(module.__file__).read_text()
    tree = MultiplyAdds().visit(ast.parse(source.replace(*planted) if planted else source))
    again = ModuleType("emulated")
    vars(again).update(names)
    for x in [x for x in tree.body if isinstance(x, ast.ImportFrom)]:
        part = x.module.split(".")[-1]
        if x.module.startswith("triton") or all(name.name in names for name in x.names):
            tree.body.remove(x)
        elif part.startswith("gluon_"):
            tree.body.remove(x)
            imported = _rewritten(importlib.import_module(x.module), names, planted, done)
            vars(again).update({name.name: vars(imported)[name.name] for name in x.names})
        elif x.names[0].name.startswith("gluon_"):  # a module
            tree.body.remove(x)
            imported = _rewritten(importlib.import_module(f"{x.module}.{x.names[0].name}"), names, planted, done)
            vars(again)[x.names[0].asname or x.names[0].name] = imported
    exec(compile(tree, module.__file__, "exec"), vars(again))
    done[module.__name__] = again, source.count(planted[0]) if planted else 0
    return again


class MultiplyAdds(ast.NodeTransformer):
    """Makes `x * y + z` and `x * y - z` calls of `multiply_add`: the compiler fuses them."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        product = node.left
        if not isinstance(node.op, ast.Add | ast.Sub) or not (
            isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult)
        ):
            return node
        arguments = [product.left, product.right, node.right, ast.Constant(isinstance(node.op, ast.Sub))]
        return ast.fix_missing_locations(
            ast.copy_location(ast.Call(ast.Name("multiply_add", ast.Load()), arguments, []), node)
        )


def multiply_add(x, y, z, subtracts: bool):
    """x * y + z or x * y - z; of float32 rounded once, as a fused instruction does."""
    if not isinstance(z, Tensor) or z.dtype != torch.float32 or not all(isinstance(n, Tensor | float) for n in (x, y)):
        return x * y - z if subtracts else x * y + z
    x, y, z = (value(n).double() for n in (x, y, z))
    return (x * y - z if subtracts else x * y + z).float()


class Pointer:
    """Addresses of elements, as distances from the first of a tensor."""

    def __init__(self, memory: Tensor, offset):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor):
        span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return cls(x.as_strided((span if x.numel() else 0,), (1,)), torch.tensor(0))

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def __getitem__(self, index):
        return Pointer(self.memory, self.offset[index])

    def offsets(self, mask) -> tuple[Tensor, Tensor]:
        offset, mask = torch.broadcast_tensors(self.offset, value(True if mask is None else mask))
        assert ((offset >= 0) & (offset < len(self.memory)) | ~mask).all(), "an access outside of the tensor"
        return torch.where(mask, offset, 0).long(), mask

    def read(self, mask=None, other=0) -> Tensor:
        offset, mask = self.offsets(mask)
        return torch.where(mask, self.memory[offset], torch.as_tensor(other, dtype=self.memory.dtype))

    def write(self, x: Tensor, mask=None) -> None:
        offset, mask = self.offsets(mask)
        self.memory[offset[mask]] = value(x).to(self.memory.dtype).broadcast_to(offset.shape)[mask]

    def add(self, x: Tensor, mask=None) -> Tensor:
        """Adds as atomics do, element by element where several have one address; returns what was there before."""
        before = self.read(mask)
        offset, mask = self.offsets(mask)
        added = value(x).to(self.memory.dtype).broadcast_to(offset.shape)[mask]
        self.memory.index_put_((offset[mask],), added, accumulate=True)
        return before


class Descriptor:
    """A tensor for the copy engine, which reads zeros beyond its ends and writes nothing there."""

    def __init__(self, base: Tensor, shape, strides, block_shape, layout, padding="zero"):
        size = base.element_size()
        assert len(shape) == len(strides) == len(block_shape) <= 5
        assert padding == "zero"
        assert base.data_ptr() % 16 == 0, "the tensor is not aligned to 16 bytes"
        assert all(stride * size % 16 == 0 for stride in strides[:-1]), "a stride is not a multiple of 16 bytes"
        assert strides[-1] == 1
        assert all(n > 0 for n in shape)
        assert all(n & (n - 1) == 0 for n in block_shape), "the sides of a block are powers of two"
        assert all(n <= 256 for n in block_shape[:-1]), "a side of a block is longer than 256"
        self.base, self.shape, self.strides = base, tuple(shape), tuple(strides)
        self.dtype, self.block_shape = base.dtype, list(block_shape)
        nbytes = math.prod(block_shape) * size
        self.block_type = SimpleNamespace(shape=self.block_shape, element_ty=base.dtype, nbytes=nbytes)
        self.layout = layout

    @property
    def x(self) -> Tensor:
        return self.base.as_strided(self.shape, self.strides)

    def inside(self, coord) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a block that is inside of the tensor: where it lies in the tensor, and where in the block."""
        begin = [int(at) for at in coord]
        assert len(begin) == self.x.ndim
        real = [range(max(at, 0), max(min(at + n, end), max(at, 0)))
                for at, n, end in zip(begin, self.block_shape, self.x.shape, strict=True)]  # fmt: skip
        there = tuple(slice(at.start, at.stop) for at in real)
        return there, tuple(slice(x.start - at, x.stop - at) for x, at in zip(real, begin, strict=True))

    def read(self, coord) -> Tensor:
        block = torch.zeros(self.block_shape, dtype=self.dtype)
        there, here = self.inside(coord)
        block[here] = self.x[there]
        return block

    def write(self, coord, block: Tensor) -> None:
        there, here = self.inside(coord)
        self.x[there] = block[here]

    def add(self, coord, block: Tensor) -> None:
        there, here = self.inside(coord)
        self.x[there] += block[here]


def value(x) -> Tensor:
    """What the language makes of a Python number: 32 bits."""
    return torch.as_tensor(x, dtype={int: torch.int32, float: torch.float32}.get(type(x)))


class Shared:
    """A view of shared memory, NaN until written. `hidden`: written, but not yet for the matrix units to see."""

    def __init__(self, machine, x: Tensor, hidden: Tensor):
        self.machine, self.x, self.hidden = machine, x, hidden
        self.dtype, self.shape = x.dtype, x.shape

    def view(self, change):
        same = self.hidden.shape == self.x.shape  # else it is that of a tile of larger elements
        return Shared(self.machine, change(self.x), change(self.hidden) if same else self.hidden)

    def index(self, i):
        assert 0 <= i < len(self.x)
        return self.view(lambda x: x[int(i)])

    def slice(self, start, length, dim=0):
        return self.view(lambda x: x.narrow(dim, start, length))

    def permute(self, order):
        return self.view(lambda x: x.permute(*order))

    def reshape(self, shape):
        return self.view(lambda x: x.view(shape))

    def _reinterpret(self, dtype, shape, layout):
        """The first bytes as another tile; if its elements are larger, nothing may be written to it."""
        count = math.prod(shape)
        hidden = self.hidden.view(-1)[: count * dtype.itemsize // self.dtype.itemsize]
        if dtype.itemsize == self.dtype.itemsize:
            hidden = hidden.view(shape)
        return Shared(self.machine, self.x.view(-1).view(dtype)[:count].view(shape), hidden)

    def load(self, layout) -> Tensor:
        self.machine.pause()
        return self.x.clone()

    def store(self, x: Tensor) -> None:
        self.machine.pause()
        assert (x.shape, x.dtype) == (self.x.shape, self.x.dtype)
        self.fill(x)

    def fill(self, x: Tensor) -> None:
        self.x.copy_(x)
        self.hidden.fill_(True)
        self.machine.unfenced.append(self.hidden)


def run_asm(text: str, constraints: str, args: list, *, dtype, is_pure: bool, pack: int):
    """What instructions make of one argument, in words of 32 bits; the result may be where the argument is."""
    if text == "mul.rn.f32 $0, $1, $2;":
        return args[0] * args[1]
    if text == "mov.b32 $0, {$1, $2};":
        return torch.stack(args, -1).view(dtype).squeeze(-1)
    if text.endswith("mul.rn.f16x2 $0, $0, $2; }"):  # what comes before, times the second argument
        before = text.replace(" mul.rn.f16x2 $0, $0, $2;", "")
        return run_asm(before, "=r,r", args[:1], dtype=dtype, is_pure=is_pure, pack=pack) * args[1]
    (x,) = args
    if text == "mov.b32 {$0, $1}, $2;":
        return x.contiguous()[..., None].view(dtype[0]).unbind(-1)
    if isinstance(dtype, tuple):  # one use: the four e4m3 values of each word, in float32
        assert "e4m3x2" in text
        return x.contiguous()[..., None].view(torch.float8_e4m3fn).float().unbind(-1)
    assert (constraints, pack * x.element_size(), pack * dtype.itemsize) == ("=r,r", 4, 4)
    registers = {"$1": x.contiguous().view(torch.int32).long() & 0xFFFFFFFF}
    lines = (line.strip() for line in text.strip("{} ").split(";"))
    for line in lines:
        if not line or line.startswith(".reg"):
            continue
        name, target, source, numbers = re.fullmatch(r"(\S+) (\{.+\}|\S+), (\S+?)((?:, \w+)*)", line).groups()
        if target.startswith("{"):
            low, high = target.strip("{}").split(", ")
            registers |= {low: registers[source] & 0xFFFF, high: registers[source] >> 16}
        else:
            result = INSTRUCTIONS[name](registers[source], *(int(x, 0) for x in numbers.split(", ")[1:])) & 0xFFFFFFFF
            registers = {target: result}
    return registers["$0"].to(torch.int32).view(dtype)


def permute_bytes(a: Tensor, b: int, selector: int) -> Tensor:
    """Of each byte of the result, a digit of the selector is the number of a byte, plus 8 for its sign alone."""
    assert b == 0
    result = torch.zeros_like(a)
    for i in range(4):
        digit = selector >> 4 * i & 0xF
        byte = a >> 8 * (digit & 3) & 0xFF
        result |= (torch.where(byte >= 128, 0xFF, 0) if digit & 8 else byte) << 8 * i
    return result


def widen_pair(a: Tensor) -> Tensor:
    """Two numbers of e4m3 in fp16."""
    return a.to(torch.int16).view(torch.float8_e4m3fn).half().view(torch.int32).long()


INSTRUCTIONS = {
    "mov.b32": torch.clone,
    "prmt.b32": permute_bytes,
    "shl.b32": torch.bitwise_left_shift,
    "and.b32": torch.bitwise_and,
    "xor.b32": torch.bitwise_xor,
    "cvt.rn.f16x2.e4m3x2": widen_pair,
}


class Barrier:
    """Completes a phase after `count` arrivals and all bytes expected, and tells odd phases from even ones only."""

    def __init__(self):
        self.count = self.pending = self.phase = self.bytes = 0
        self.valid = False

    def init(self, count):
        assert not self.valid, "a barrier is initialized twice"
        self.count = self.pending = count
        self.valid = True

    def invalidate(self):
        assert self.valid, "a barrier is invalidated that is not valid"
        self.valid = False

    def arrive(self, count, expected=0):
        assert self.valid, "an arrival at a barrier that is not valid"
        self.pending -= count
        self.bytes += expected
        assert self.pending >= 0, "more arrivals than the barrier counts"
        self.complete()

    def receive(self, size):
        self.bytes -= size  # may come before they are expected: the phase has an arrival to wait for
        self.complete()

    def complete(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1


class Product:
    """A matrix product on its way: what it reads of shared memory must stay as it is."""

    def __init__(self, a, b, acc):
        self.read = [(x.x, x.x.clone()) for x in (a, b) if isinstance(x, Shared)]
        self.done, self.continued = False, acc
        a, b = (x.x if isinstance(x, Shared) else x for x in (a, b))
        self.result = a.float() @ b.float()
        if acc is not None:
            self.result += acc.result if isinstance(acc, Product) else acc

    def finish(self):
        for now, before in self.read:
            assert torch.equal(now.nan_to_num(7.0), before.nan_to_num(7.0)), "an operand changed under a product"
        self.done, self.continued = True, None

    def follows_finished(self) -> bool:
        """Whether it is on its way, and all products before it of the same sum are done."""
        return not isinstance(self.continued, Product) or self.continued.done

    def used_early(self, *_, **__):
        raise AssertionError("a product is used before it is done")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getattr__ = used_early
    __torch_function__ = classmethod(used_early)


class Kernel:
    """Called by another, or launched on a grid: see `Machine.launch`."""

    def __init__(self, machine, function):
        self.machine, self.function = machine, function

    def __call__(self, *args, **constants):
        return self.function(*args, **constants)

    def __getitem__(self, grid):
        def launch(*args, num_warps, maxnreg=None, num_stages=None, launch_pdl=False, **constants):
            args = [Pointer.to(x) if isinstance(x, Tensor) else x for x in args]
            self.machine.launch(grid[0], partial(self.function, *args, **constants))

        return launch


class Group:
    """Some warps of a program, in a thread that runs only from `step` to its next pause."""

    def __init__(self, kernel: Kernel, args: tuple):
        self.name = kernel.function.__name__
        self.copies, self.products, self.stores = [], [], []  # that it started, and that nobody waits for yet
        self.done = self.abandoned = False
        self.failure, self.until = None, lambda: True
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.run, args=(kernel, args), daemon=True)
        self.thread.start()

    def run(self, kernel, args):
        self.go.acquire()
        try:
            if not self.abandoned:
                kernel(*args)
                left = self.copies or self.products or self.stores
                assert not left, "copies, products or stores are left behind"
        except BaseException as failure:
            self.failure = failure
        self.done = True
        self.stopped.release()

    def step(self):
        self.go.release()
        self.stopped.acquire()

    def abandon(self):
        if not self.done:
            self.abandoned = True
            self.step()

    def pause(self, until):
        self.until = until
        self.stopped.release()
        self.go.acquire()
        if self.abandoned:
            raise SystemExit


class Machine:
    """What the kernels are given for Gluon."""

    def __init__(self, seed: int, together: int):
        self.random, self.together = random.Random(seed), together
        self.programs = 0
        self.begin(0)

    def begin(self, program: int):
        self.program = program
        self.running: Group | None = None  # this program, if others run meanwhile
        self.current: Group | None = None
        self.unfenced: list[Tensor] = []
        self.barriers: list[Barrier] = []
        self.landing: list[tuple] = []  # copies on their way, and whom to tell
        self.polls = 0
        self.alone = SimpleNamespace(products=[])  # where a kernel has one group of warps

    def launch(self, programs: int, function):
        self.programs = programs
        if self.together == 1:
            for program in range(programs):
                self.begin(program)
                self.run(function)
            return
        shared, left, states = vars(self).copy(), iter(range(programs)), []
        try:
            while True:
                for program in islice(left, self.together - len(states)):
                    self.begin(program)
                    self.running = Group(Kernel(self, self.run), (function,))
                    states.append((self.random.choice((0.1, 1.0, 5.0)), vars(self).copy()))
                if not states:
                    return
                chosen = self.random.choices(states, [pace for pace, _ in states])[0]
                vars(self).update(chosen[1])
                group = self.running
                group.step()
                if group.failure:
                    raise group.failure
                chosen[1].update(vars(self))
                states = [state for state in states if state is not chosen or not group.done]
        finally:
            for _, state in states:
                state["running"].abandon()
            vars(self).update(shared)

    def run(self, function):
        """One program."""
        function()
        while self.landing:
            self.land()
        # Triton may have given the memory of a barrier to something else after its last use: the kernel must use it to
        # its end, or a GPU that is shared with other processes writes to that memory.
        assert not any(x.valid for x in self.barriers), "a barrier is valid at the end of a program"

    def warp_specialize(self, functions, warps, registers):
        assert len(warps) == len(registers) == len(functions) - 1
        groups = [Group(*function) for function in functions]
        for group, count in zip(groups, (4, *warps), strict=True):  # kernels are launched with four
            group.threads = 32 * count
        # Each group, and the memory, has its own pace: now one runs ahead, now another.
        pace = {x: self.random.choice((0.02, 1.0, 1.0, 5.0)) for x in (*groups, self.land)}
        try:
            while not any(group.failure for group in groups):
                able = [group for group in groups if not group.done and group.until()] + [self.land] * bool(
                    self.landing
                )
                if not able:
                    break
                chosen = self.random.choices(able, [pace[x] for x in able])[0]
                if chosen == self.land:
                    self.land()
                else:
                    self.current = chosen
                    chosen.step()
                    self.current = None
                if self.running:
                    self.running.pause(lambda: True)
        finally:
            stuck = [group for group in groups if not group.done]
            for group in stuck:
                group.abandon()
        failures = [group.failure for group in groups if group.failure and not group.abandoned]
        self.landing = self.landing if not failures else []
        if failures:
            raise failures[0]
        assert not stuck, f"these wait for ever: {[group.name for group in stuck]}"
        assert not any(barrier.bytes for barrier in self.barriers), "a barrier expects bytes that never come"

    def pause(self, until=lambda: True):
        """Where another group may go on: before all that others can see."""
        if self.current:
            self.current.pause(until)

    def wait(self, barrier: Barrier, parity, pred=True):
        while not self.current and pred and barrier.phase % 2 == parity:  # the only group of warps
            assert self.landing, "it waits for ever"
            self.land()
        self.pause(lambda: not pred or barrier.phase % 2 != parity)

    def arrive(self, barrier: Barrier, *, count=1, pred=True):
        self.pause()
        if pred:
            barrier.arrive(count)

    def expect(self, barrier: Barrier, size, pred=True):
        """One arrival, and bytes that the copy engine will bring."""
        self.pause()
        if pred:
            barrier.arrive(1, int(size))

    def copy(self, shared: Shared, pointer: Pointer, mask=None):
        assert pointer.offset.shape == shared.x.shape
        self.pause()
        shared.x.fill_(torch.nan)
        self.current.copies.append((shared, pointer, mask))

    def arrive_when_copied(self, barrier: Barrier, increment_count=True):
        assert not increment_count, "only arrivals that the barrier counts already are emulated"
        self.pause()
        self.landing.append((self.current.copies, barrier, self.current.threads))
        self.current.copies = []

    def load_block(self, descriptor: Descriptor, coord, barrier: Barrier, shared: Shared, pred=True):
        assert list(shared.x.shape) == descriptor.block_shape
        assert shared.dtype == descriptor.dtype
        self.pause()
        if pred:
            shared.x.fill_(torch.nan)
            self.landing.append((descriptor, coord, shared, barrier))

    def store_block(self, descriptor: Descriptor, coord, shared: Shared, *, adds: bool = False):
        assert list(shared.x.shape) == descriptor.block_shape
        assert shared.dtype == descriptor.dtype
        self.pause()
        assert not shared.hidden.any(), "no fence showed this to a store"
        self.current.stores.append((descriptor.add if adds else descriptor.write, coord, shared.x, shared.x.clone()))

    def wait_for_stores(self, outstanding):
        """Until blocks are read; they are written later."""
        self.pause()
        while len(self.current.stores) > outstanding:
            write, coord, now, before = self.current.stores.pop(0)
            assert torch.equal(now.nan_to_num(7.0), before.nan_to_num(7.0)), "a block changed under a store"
            self.landing.append((self.current, partial(write, coord, before)))

    def wait_for_adds(self):
        self.wait_for_stores(0)
        mine = self.current
        self.pause(lambda: all(each[0] is not mine or len(each) > 2 for each in self.landing))

    def land(self):
        at = self.random.randrange(len(self.landing))
        if len(self.landing[at]) == 2:
            _, write = self.landing.pop(at)
            write()
            return
        if len(self.landing[at]) == 4:
            descriptor, coord, shared, barrier = self.landing.pop(at)
            shared.x.copy_(descriptor.read(coord))  # the matrix units see it without a fence
            barrier.receive(shared.x.numel() * shared.x.element_size())
            return
        # The copies of threads arrive in order.
        copies, barrier, threads = self.landing.pop(next(i for i, each in enumerate(self.landing) if len(each) == 3))
        for shared, pointer, mask in copies:
            shared.fill(pointer.read(mask))
        barrier.arrive(threads)  # each reports its own copies

    def add(self, pointer: Pointer, x, mask=None, sem=None, scope=None):
        self.pause()
        # Who waits for a counter in memory adds 0 to it again and again.
        self.polls = self.polls + 1 if isinstance(x, int) and x == 0 else 0
        assert self.polls < 100_000, "a counter is waited for for ever"
        return pointer.add(x, mask)

    def exchange(self, pointer: Pointer, x, mask=None, sem=None, scope=None):
        self.pause()
        before = pointer.read(mask)
        pointer.write(x, mask)
        return before

    def fence(self):
        """By whomever: a fence too few, or too early, shows where no other comes in between."""
        self.pause()
        for hidden in self.unfenced:
            hidden.fill_(False)
        self.unfenced = []

    def multiply(self, a, b, acc, *, use_acc=True, is_async=False):
        assert is_async
        self.pause()
        assert not any(x.hidden.any() for x in (a, b) if isinstance(x, Shared)), "no fence showed this to a product"
        product = Product(a, b, acc if use_acc else None)
        (self.current or self.alone).products.append(product)
        return product

    def wait_for_products(self, outstanding, deps):
        self.pause()
        products = (self.current or self.alone).products
        while len(products) > outstanding:
            products.pop(0).finish()
        # A sum may go on, if what is waited for is the product before; what a product reads may be among them.
        started = [x for x in deps if isinstance(x, Product) and not x.done]
        assert all(x.follows_finished() for x in started), "a product is used before it is done"
        results = [x.result if isinstance(x, Product) and x.done else x for x in deps]
        return results[0] if len(deps) == 1 else tuple(results)

    def allocate(self, dtype, shape, layout):
        if layout == "barriers":
            barriers = [Barrier() for _ in range(shape[0])]
            self.barriers += barriers
            return SimpleNamespace(shape=shape, index=lambda i: barriers[int(i)])
        unset = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        return Shared(self, torch.full(shape, unset, dtype=dtype), torch.zeros(shape, dtype=torch.bool))

    def names(self) -> dict:
        layouts = (
            "Blocked", "DistributedLinear", "DotOperand", "NVMMADistributed", "NVMMAShared", "Slice", "SwizzledShared",
        )  # fmt: skip
        language = {
            **{f"{name}Layout": lambda *_, **__: None for name in layouts},
            **{
                name: getattr(torch, name)
                for name in ("float32", "float16", "bfloat16", "int32", "int64", "abs", "exp", "exp2", "log2", "sum")
            },
            "int16": torch.int16,
            "constexpr": lambda x: x,
            "static_range": range,
            "program_id": lambda axis: value(self.program),
            "num_programs": lambda axis: value(self.programs),
            "arange": lambda begin, end, layout: torch.arange(begin, end, dtype=torch.int32),
            "full": lambda shape, x, dtype, layout: torch.full(shape, x, dtype=dtype),
            "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            "where": lambda mask, a, b: torch.where(value(mask), value(a), value(b)),
            "maximum": lambda a, b, propagate_nan=None: torch.maximum(value(a), value(b)),
            "multiple_of": lambda x, n: x,
            "minimum": lambda a, b: torch.minimum(value(a), value(b)),
            "max": torch.amax,
            "fma": partial(multiply_add, subtracts=False),
            "min": torch.amin,
            "cast": lambda x, dtype, bitcast: value(x).view(dtype),
            "cdiv": lambda a, b: (a + b - 1) // b,
            "associative_scan": lambda x, axis, _combine: torch.cumsum(x, axis),  # only sums so far
            "convert_layout": lambda x, layout: x,
            "expand_dims": torch.unsqueeze,
            "split": lambda x: x.unbind(-1),
            "join": lambda a, b: torch.stack((a, b), -1),
            "inline_asm_elementwise": run_asm,
            "load": lambda at, mask=None, other=0, cache_modifier="": at.read(mask, other),
            "store": Pointer.write,
            "atomic_add": self.add,
            "atomic_xchg": self.exchange,
            "thread_barrier": self.pause,
            "allocate_shared_memory": self.allocate,
            "warp_specialize": self.warp_specialize,
        }

        def jit(function=None, **_):
            return Kernel(self, function) if function else jit

        return {
            "gluon": SimpleNamespace(jit=jit),
            "multiply_add": multiply_add,
            "gl": SimpleNamespace(**language),
            "range": lambda *bounds: map(value, range(*map(int, bounds))),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: "barriers",
                init=Barrier.init,
                invalidate=Barrier.invalidate,
                wait=self.wait,
                arrive=self.arrive,
                expect=self.expect,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self.load_block,
                async_copy_shared_to_global=self.store_block,
                store_wait=self.wait_for_stores,
            ),
            "async_add_shared_to_global": partial(self.store_block, adds=True),
            "wait_for_adds": self.wait_for_adds,
            "TensorDescriptor": Descriptor,
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self.copy, mbarrier_arrive=self.arrive_when_copied
            ),
            "fence_async_shared": self.fence,
            "gdc_launch_dependents": lambda: None,  # launches run one after another here
            "gdc_wait": lambda: None,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_for_products,
        }
