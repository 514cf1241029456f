"""No public operation depends on the default device or the default dtype."""

from contextlib import contextmanager

import pytest
import torch

from helpers.operations import public_operations


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
}


@pytest.mark.parametrize("operation", public_operations(), ids=lambda operation: operation.name)
def test_results_under_other_defaults(operation):
    inputs = operation.inputs(0)
    expected = operation.results(inputs)
    for name, default in DEFAULTS.items():
        with default():
            found = operation.results(inputs)
        assert found.keys() == expected.keys()
        for key, result in found.items():
            assert (result.dtype, result.device) == (expected[key].dtype, expected[key].device), (name, key)
            assert torch.equal(result, expected[key]), (name, key)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("operation", public_operations("cuda"), ids=lambda operation: operation.name)
@pytest.mark.parametrize("default", ["cuda", "cpu", "meta"])
def test_results_on_a_gpu_under_other_default_devices(operation, default):
    for device in ("cpu", "cuda"):
        inputs = operation.inputs(0, device)
        expected = operation.results(inputs)
        with torch.device(default):
            found = operation.results(inputs)
        for key, result in found.items():
            assert result.device == expected[key].device, key
            torch.testing.assert_close(result, expected[key], equal_nan=True)
