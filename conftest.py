"""What every test shares: the kernels' interpreter, few threads, a device."""

import importlib.util
import os

# One thread for each of pytest's processes: more would wait for one another. torch reads this when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

# On a busy machine an example may take long; what hangs is ended by the timeout of the whole test.
hypothesis.settings.register_profile("attnmesh", deadline=None)
hypothesis.settings.load_profile("attnmesh")

# Without a GPU the kernels run in Triton's interpreter. Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpret_faster() -> None:
    """Calls among device functions patch Triton's language anew each time, half of the interpreter's work.

    A launch patches it already, for our modules; Triton's own need it once, since nothing takes it back there.
    """
    from triton.runtime import interpreter

    seen = set()

    def call(function, *args, **kwargs):
        home = function.fn.__globals__["__name__"]
        if home.startswith("triton.") and home not in seen:
            interpreter._patch_lang(function.fn)
            seen.add(home)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _interpret_faster()


@pytest.fixture(autouse=True)
def fresh_seed() -> None:
    """Start every test from the same seed."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# Modules with long products of parameters: kernels in Triton's interpreter, and sweeps over worlds and lengths.
THINNED_MODULES = {
    "test_allgather_plan",
    "test_attention",
    "test_balanced_layout",
    "test_block_layout",
    "test_blocks",
    "test_continuous_batching",
    "test_decode",
    "test_decode_bits",
    "test_decode_cpu",
    "test_decode_device_errors",
    "test_decode_edges",
    "test_decode_into",
    "test_decode_key_range",
    "test_decode_paged",
    "test_indexer_kernels",
    "test_indexer_loss",
    "test_layouts",
    "test_masks",
    "test_peak_memory",
    "test_prepare",
    "test_queries",
    "test_ring",
    "test_ring_plan",
    "test_schedules",
    "test_sparse_backward_kernels",
    "test_sparse_parallel_attention",
    "test_sparse_parallel_indexer",
    "test_sparse_parallel_loss",
    "test_tokens_per_step",
    "test_triton_backward",
    "test_triton_forward",
    "test_triton_merge",
    "test_two_level_plan",
    "test_vectorized",
    "test_write_tokens",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a part of long products of parameters as slow.

    Every value of every parameter of a test function occurs in at least one case that stays. On a GPU all cases stay.
    """
    if torch.cuda.is_available():
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.stem in THINNED_MODULES and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for of_function in cases.values():
        left = set().union(*map(_values, of_function))
        while left:
            best = max(of_function, key=lambda item: len(_values(item) & left))
            left -= _values(best)
            of_function.remove(best)
        for item in of_function:
            item.add_marker(pytest.mark.slow)


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in item.callspec.params.items()}
