"""Launches that repeat: a kernel is found, and its arguments are bound, once for each signature of its tensors.

Triton binds and specializes every argument of every launch in Python, and encodes each descriptor of the copy engine
(TMA) from a Python object: some hundred microseconds for the kernels here. A `Launch` keeps what Triton passed to the
driver, and repeats it with other addresses. The caller keeps it under a key that fixes everything else (`signature`).

A `Launch` calls the kernel through Triton where Triton does not pass its arguments on as expected, in the interpreter,
and while a hook, such as a profiler's, listens to launches.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from attnmesh.utils.optional import installed

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_MOST_MAPS = 64  # addresses whose encoded descriptors an argument keeps
_STREAM = 3  # where the stream is among what Triton passes to the driver: after the grid
_PLAIN = {int, float, bool, str, tuple, type(None)}  # types of arguments that are equal if they are the same
_recording = threading.Lock()


class Recent(dict[Hashable, T], Generic[T]):
    """What has been prepared, by signature. Drops the oldest, so that calls of ever new shapes do not fill memory."""

    def __init__(self, most: int = 256) -> None:
        super().__init__()
        self._most = most

    def add(self, key: Hashable, value: T) -> T:
        """Keep a value, and return it."""
        if len(self) >= self._most:
            with suppress(KeyError, RuntimeError, StopIteration):  # another thread has dropped it
                del self[next(iter(self))]
        self[key] = value
        return value


def cdiv(n: int, size: int) -> int:
    """The number of parts of `size` that cover n. (Triton's takes microseconds on the host.)"""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def signature(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What a launch depends on besides addresses: dtype, shape, strides, device, and where in 16 bytes it begins.

    (Not only whether it is aligned: parts of a tensor that is not may be.) And which tensors begin at one address:
    arguments of a launch are told apart by where they begin.
    """
    found: list[Any] = []
    addresses: list[int] = []
    for x in tensors:
        if x is None:
            found.append(None)
        else:
            address = x.data_ptr()
            addresses.append(address)
            found += (x.dtype, x.shape, x.stride(), x.device, address & 15)
    if len(set(addresses)) != len(addresses):
        found.append(tuple(map(addresses.index, addresses)))
    return tuple(found)


def prepare(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], tensors: Sequence[Tensor | None], **options: Any
) -> Launch:
    """Launch `kernel[grid](*args, **options)` on the device of the tensors, and return what repeats it with others.

    `tensors` are all those in `args`, as they are, as views, or in descriptors. Raises ValueError for one that is not
    among them: its address would be that of the first call for ever.
    """
    tensor_args = _tensor_args(args, tensors)
    with torch.cuda.device_of(next(x for x in tensors if x is not None)):
        return Launch(kernel, grid, tuple(args), tensor_args, options, kernel[grid](*args, **options))


def repeat(known: Recent[Launch], kernel: Any, grid: tuple[int, ...], args: Sequence[Any], **options: Any) -> None:
    """Launch `kernel[grid](*args, **options)`: by a known launch, if only the addresses of its tensors differ.

    `known` has the launches of a module, which must keep its kernels. Where a caller knows what its launches depend on,
    it asks for less: see `prepare`.
    """
    if torch.compiler.is_compiling():
        kernel[grid](*args, **options)
        return
    tensors: list[Tensor] = []
    rest: list[Any] = []
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
            rest.append(Tensor)
        elif type(x) in _PLAIN:
            rest += (type(x), x)
        elif isinstance(base := getattr(x, "base", None), Tensor):  # a descriptor; its layout is one of a few
            tensors.append(base)
            rest += (tuple(x.shape), tuple(x.strides), tuple(x.block_shape), x.layout)
        else:
            rest.append(x)
    key = (id(kernel), grid, *rest, *options.items(), *signature(*tensors))
    launch = known.get(key)
    if launch is not None:
        launch(*tensors)
        return
    known.add(key, prepare(kernel, grid, args, tensors, **options))


class _TensorArg(NamedTuple):
    """An argument that is a view of one of the tensors, or a descriptor of such a view."""

    at: int  # the argument
    tensor: int  # the number of the tensor
    offset: int  # bytes from its address
    view: Tensor  # on the device "meta": its shape and strides


class _Map(NamedTuple):
    """An argument of the driver that is an encoded descriptor."""

    at: int
    tensor: int
    offset: int
    encode: Callable[..., Any]
    rest: tuple[Any, ...]  # what `encode` takes after the address
    known: Recent[Any]  # by address


class Launch:
    """A kernel with all arguments but the addresses of its tensors."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], tensor_args: list[_TensorArg],
        options: dict[str, Any], compiled: Any,
    ) -> None:  # fmt: skip
        self._kernel, self._grid, self._args, self._options = kernel, grid, args, options
        self._tensor_args = tensor_args
        self._passed: list[Any] | None = None
        self._inner: list[Any] | None = None  # the kernel's arguments, if Triton passes them as one
        self._pointers: list[tuple[int, int, int]] = []
        self._maps: list[_Map] = []
        self._knobs: Any = None
        if getattr(compiled, "function", None) is not None:
            try:
                self._record(compiled)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                _LOG.info("%s is launched through Triton each time: %s: %s", kernel, type(error).__name__, error)
                self._passed = None
        self._args = tuple(None if isinstance(x, Tensor) else x for x in args)  # addresses come with each call
        for arg in tensor_args:
            if not isinstance(args[arg.at], Tensor):
                self._args = (*self._args[: arg.at], _without_base(args[arg.at]), *self._args[arg.at + 1 :])

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream, with tensors of the same signature in the same order."""
        if self._passed is None or self._is_watched():
            self._launch_through_triton(tensors)
            return
        if self._current_device() != self._device:
            with torch.cuda.device(self._device):
                self(*tensors)
            return
        passed = self._passed.copy()
        passed[_STREAM] = self._current_stream(self._device)
        args = passed if self._inner is None else self._inner.copy()
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        for at, number, offset in self._pointers:
            args[at] = addresses[number] + offset
        for each in self._maps:
            address = addresses[each.tensor] + each.offset
            args[each.at] = each.known.get(address) or self._encoded(each, address)
        if self._inner is not None:
            passed[-1] = args
        self._driver(*passed)

    def _is_watched(self) -> bool:
        """Whether somebody listens to launches, as profilers do."""
        hooks = self._knobs.launch_enter_hook, self._knobs.launch_exit_hook
        return bool(getattr(hooks[0], "calls", hooks[0]) or getattr(hooks[1], "calls", hooks[1]))

    def _encoded(self, descriptor: _Map, address: int) -> Any:
        from attnmesh.ops.gluon_descriptor import ensure_context

        ensure_context(self._device)
        return descriptor.known.add(address, descriptor.encode(address, *descriptor.rest))

    def _launch_through_triton(self, tensors: Sequence[Tensor | None]) -> None:
        args = list(self._args)
        for at, number, offset, view in self._tensor_args:
            x = tensors[number]
            assert x is not None
            x = x if x.dtype == view.dtype else x.view(view.dtype)
            begin = x.storage_offset() + offset // x.element_size()
            part = x.as_strided(view.shape, view.stride(), begin)
            args[at] = part if args[at] is None else _with_base(args[at], part)
        first: Any = next(x for x in tensors if x is not None)
        with torch.cuda.device_of(first):
            self._kernel[self._grid](*args, **self._options)

    def _record(self, compiled: Any) -> None:
        """Let Triton pass the arguments to the driver once more, but to a list."""
        from triton import knobs
        from triton.runtime import driver

        active = driver.active
        run, found = copy.copy(compiled.run), []
        names = [name for name in dir(active.utils) if name.startswith("fill_tma_descriptor")]
        encoded: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []
        run.launch, self._driver = _spied(run.launch, lambda *passed: found.append(list(passed)))
        if run.global_scratch_size or run.profile_scratch_size:
            raise ValueError("it needs memory for every launch")
        bound = inspect.signature(self._kernel.fn).bind(
            *self._args, **{name: x for name, x in self._options.items() if name in self._kernel.arg_names}
        )
        bound.apply_defaults()
        grid = (*self._grid, 1, 1)[:3]
        with _recording:  # others encode through the same functions meanwhile, and do not mind
            originals = {name: getattr(active.utils, name) for name in names}
            own = threading.get_ident()

            def spy(encode: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any) -> Any:
                    result = encode(*args)
                    if threading.get_ident() == own:
                        encoded.append((encode, args, result))
                    return result

                return call

            try:
                for name, encode in originals.items():
                    setattr(active.utils, name, spy(encode))
                run(*grid, 0, compiled.function, compiled.packed_metadata, None, None, None, *bound.arguments.values())
            finally:
                for name, encode in originals.items():
                    setattr(active.utils, name, encode)
        passed = found[0]
        if passed[: _STREAM + 2] != [*grid, 0, compiled.function]:
            raise ValueError("the first arguments are not the grid, the stream and the function")
        # Triton 3.6 passes the arguments of the kernel one by one, Triton 3.7 as one sequence at the end.
        ours = {id(result) for _, _, result in encoded}
        is_flat = any(isinstance(x, Tensor) or id(x) in ours for x in passed)
        args = passed if is_flat else list(passed[-1])
        tensors = [at for at, x in enumerate(args) if isinstance(x, Tensor)]
        plain = [arg for arg in self._tensor_args if isinstance(self._args[arg.at], Tensor)]
        if len(tensors) != len(plain) or any(args[at] is not self._args[p.at] for at, p in zip(tensors, plain)):  # noqa: B905
            raise ValueError("its tensors are not passed one by one")
        self._pointers = [(at, arg.tensor, arg.offset) for at, arg in zip(tensors, plain, strict=True)]
        described = [arg for arg in self._tensor_args if not isinstance(self._args[arg.at], Tensor)]
        if len(encoded) != len(described):
            raise ValueError("its descriptors are not encoded one by one")
        for arg, (encode, (address, *rest), result) in zip(described, encoded, strict=True):
            if address != self._args[arg.at].base.data_ptr():
                raise ValueError("a descriptor begins elsewhere")
            at = next(i for i, x in enumerate(args) if x is result)
            self._maps.append(_Map(at, arg.tensor, arg.offset, encode, tuple(rest), Recent(_MOST_MAPS)))
        for at in (*tensors, *(each.at for each in self._maps)):
            args[at] = None
        self._passed, self._inner = passed, None if is_flat else args
        self._knobs = knobs.runtime
        self._device = active.get_current_device()
        self._current_device, self._current_stream = active.get_current_device, active.get_current_stream


def _tensor_args(args: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[_TensorArg]:
    tensor_args = []
    for at, arg in enumerate(args):
        x = arg if isinstance(arg, Tensor) else getattr(arg, "base", None)
        if isinstance(arg, tuple) and any(isinstance(each, Tensor) for each in arg):
            raise ValueError(f"argument {at} of a launch must not be a tuple with tensors, which are not replaced")
        if not isinstance(x, Tensor):
            continue
        number = _number_of(x, tensors)
        if number is None:
            raise ValueError(f"argument {at} of a launch must be one of its tensors or a part of one")
        offset = x.data_ptr() - tensors[number].data_ptr()  # type: ignore[union-attr]
        view = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        tensor_args.append(_TensorArg(at, number, offset, view))
    return tensor_args


def _number_of(x: Tensor, tensors: Sequence[Tensor | None]) -> int | None:
    """The number of the tensor that is x, that begins where x begins, or whose memory x is in, if that is clear."""
    x = getattr(x, "columns_of", x)
    given = [(number, each) for number, each in enumerate(tensors) if each is not None]
    storage = x.untyped_storage().data_ptr()
    same = [number for number, each in given if each.untyped_storage().data_ptr() == storage]
    for candidates in (
        [number for number, each in given if each is x],
        [number for number, each in given if number in same and each.data_ptr() == x.data_ptr()][:1],
        same if len({tensors[number].data_ptr() for number in same}) == 1 else [],  # type: ignore[union-attr]
    ):
        if candidates:
            return candidates[0]
    return None


def _spied(launch: Any, record: Callable[..., None]) -> tuple[Any, Callable[..., Any]]:
    """Triton's function that passes arguments to the driver, with another driver; and the driver."""
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "launcher" not in names:
        return record, launch
    cells = dict(zip(names, launch.__closure__, strict=True))
    real = cells["launcher"].cell_contents
    cells["launcher"] = CellType(record)
    closure = tuple(cells[name] for name in names)
    return FunctionType(launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, closure), real


def _without_base(descriptor: Any) -> Any:
    bare = copy.copy(descriptor)
    object.__setattr__(bare, "base", None)
    return bare


def _with_base(descriptor: Any, base: Tensor) -> Any:
    full = copy.copy(descriptor)
    object.__setattr__(full, "base", base)
    return full


# The GPU that a kernel is launched on, as far as its tiles depend on it.


class GPU(NamedTuple):
    """A compute capability, 90 for 9.0, and the bytes of shared memory that one program may use."""

    capability: int
    shared_memory: int

    @property
    def tensor_memory(self) -> bool:
        """Whether products accumulate in tensor memory: on Blackwell, except for the GPUs of 12.0."""
        return 100 <= self.capability < 120


HOPPER = GPU(90, 227 * 1024)
WITHOUT_GPU = HOPPER  # assumed for tensors in host memory, where kernels are interpreted


def gpu_of(device: torch.device) -> GPU:
    """The GPU of a device."""
    return _gpu_of(device) if device.type == "cuda" else WITHOUT_GPU


@functools.cache
def multiprocessors(device: torch.device, elsewhere: int) -> int:
    """The multiprocessors of a GPU; `elsewhere` for tensors in host memory, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else elsewhere


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of compute capability 9.0 of NVIDIA: AMD's have such numbers, too."""
    return device.type == "cuda" and torch.version.hip is None and gpu_of(device).capability // 10 == 9


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU, as the environment variable TRITON_INTERPRET=1 says."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start while the previous kernel runs: programmatic dependent launch, from Hopper on."""
    return torch.version.hip is None and gpu_of(device).capability >= 90 and not interpreted()


@functools.cache
def _gpu_of(device: torch.device) -> GPU:
    log_compile_times()
    properties: Any = torch.cuda.get_device_properties(device)  # its type lacks shared_memory_per_block_optin
    return GPU(
        10 * properties.major + properties.minor, int(getattr(properties, "shared_memory_per_block_optin", 48 * 1024))
    )


def log_compile_times() -> None:
    """Log, at INFO, how long Triton compiles each kernel of this package, unless a program listens to Triton itself."""
    if installed("triton"):
        from triton import knobs

        if knobs.compilation.listener is None:
            knobs.compilation.listener = _compiled


def _compiled(*, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    if getattr(getattr(src, "fn", None), "__module__", "").startswith("attnmesh."):
        name, seconds = metadata.get("name", "a kernel"), times.total / 1e6
        _LOG.info("%s %s in %.2f s", "read" if cache_hit else "compiled", name, seconds)
