"""What every test shares: the kernels' interpreter, few threads, a device."""

import argparse
import faulthandler
import functools
import gc
import importlib.util
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

# One thread for each of pytest's processes: more would wait for one another. torch reads this when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

# On a busy machine an example may take long; what hangs is ended by the timeout of the whole test.
hypothesis.settings.register_profile("attnmesh", deadline=None)
hypothesis.settings.load_profile("attnmesh")

# Without a GPU the kernels run in Triton's interpreter. Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpret_faster() -> None:
    """Leave out what Triton's interpreter does again and again, or for nothing: two thirds of its work.

    - Calls among device functions patch Triton's language anew each time. A launch patches it already, for our modules;
      Triton's own need it once, since nothing takes it back there.
    - Every integer operation is computed twice more, in 64 bits, to compare it with the bounds of its type. Without
      debug=True, which no launch sets, the comparison is then not looked at.
    - The types of NumPy are looked up in a table that is made anew, and the shape of every tensor is one of a few.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    seen = set()

    def call(function, *args, **kwargs):
        home = function.fn.__globals__["__name__"]
        if home.startswith("triton.") and home not in seen:
            interpreter._patch_lang(function.fn)
            seen.add(home)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    check_overflow = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def check_overflow_if_asked(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            check_overflow(self, lhs, rhs, binary_op)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow_if_asked

    find_numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def numpy_type(dtype):
        name = dtype.scalar.name  # of pointers to integers, "pointer<int32>"
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(dtype)
        return numpy_types[name]

    interpreter._get_np_dtype = numpy_type

    @functools.cache
    def shape_of(sizes):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = make_tensor


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _interpret_faster()


@pytest.fixture(autouse=True)
def fresh_seed() -> None:
    """Start every test from the same seed."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: for small tensors a second one only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def nccl_ranks() -> Callable[..., list[Any]]:
    """Start NCCL ranks that share one GPU: `nccl_ranks(world, fn, *args, timeout=200)` as `run_processes`."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from helpers.processes import run_processes

    return functools.partial(run_processes, backend="nccl")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part 3/8`, which `make sweep PART=3/8` sets."""
    parser.addoption("--part", type=_part, help="run one part of the tests: 3/8 is the third of eight")


def _part(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"must be like 3/8, the third of eight parts, got {text!r}")
    return int(part), int(parts)


@pytest.hookimpl(trylast=True)  # of those that -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not of the part of `--part`.

    Cases of one function take about as long: they go to the parts in turn, from a part that the function's name says.
    """
    if (asked := config.getoption("part")) is None:
        return
    part, parts = asked
    turns: Counter[str] = Counter()
    left: dict[bool, list[pytest.Item]] = {False: [], True: []}
    for item in items:
        function = item.nodeid.partition("[")[0]
        left[(zlib.crc32(function.encode()) + turns[function]) % parts == part - 1].append(item)
        turns[function] += 1
    config.hook.pytest_deselected(items=left[False])
    items[:] = left[True]


@pytest.hookimpl(wrapper=True, trylast=True)  # after pytest's own, which ends every test after faulthandler_timeout
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a timeout of the test's own cannot interrupt is ended half a minute after it."""
    mark, stderr = item.get_closest_marker("timeout"), item.config.stash.get(fault_handler_stderr_fd_key, None)
    if mark is not None and stderr is not None:
        faulthandler.dump_traceback_later(mark.args[0] + 30, file=stderr, exit=True)
    return (yield)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: searching it for garbage takes 0.4 s each time."""
    gc.freeze()


@pytest.fixture
def poisoned_pools(monkeypatch):
    """New KV caches hold NaN: what is not copied is noticed."""
    from attnmesh.kv_cache import cache as cache_module

    make_pools = cache_module.make_pools

    def poisoned(*args):
        pools = make_pools(*args)
        for x in pools.tensors:
            x.fill_(torch.nan if x.is_floating_point() else 85)
        return pools

    monkeypatch.setattr(cache_module, "make_pools", poisoned)
