"""No public operation depends on the default device or the default dtype."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import attnmesh
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


FACTORIES = {
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
    "zeros",
}  # fmt: skip
FLOATS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}  # in the default dtype unless told otherwise


def test_every_new_tensor_has_a_device_and_a_dtype():
    missing = []
    for file in sorted(Path(attnmesh.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")):
                continue
            name, given = ast.unparse(node.func).removeprefix("torch."), {each.arg for each in node.keywords}
            wanted = {"device"} | ({"dtype"} if name in FLOATS and file.name != "process_group.py" else set())
            if name in FACTORIES and wanted - given:
                missing.append(f"{file.name}:{node.lineno}: torch.{name} without {wanted - given}")
    assert missing == []
