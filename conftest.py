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
