"""No public operation depends on the default device or the default dtype."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import attnmesh
from helpers.operations import each_operation


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@each_operation()
def test_results_under_other_defaults(operation):
    inputs = operation.inputs(0)
    expected = operation.results(inputs)
    with torch.device("meta"), default_dtype(torch.float64):
        found = operation.results(inputs)
    assert found.keys() == expected.keys()
    for key, result in found.items():
        assert (result.dtype, result.device) == (expected[key].dtype, expected[key].device), key
        assert torch.equal(result, expected[key]), key


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_operation("cuda")
def test_results_on_a_gpu_under_another_default_device(operation):
    for device in ("cpu", "cuda"):
        inputs = operation.inputs(0, device)
        expected = operation.results(inputs)
        with torch.device("meta"):  # whatever is made without a device has no values
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
            if not isinstance(node, ast.Call):  # most are not, and a match takes long
                continue
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name), keywords=keywords):
                    given = {each.arg for each in keywords}
                case _:
                    continue
            wanted = {"device"} | ({"dtype"} if name in FLOATS and file.name != "process_group.py" else set())
            if name in FACTORIES and wanted - given:
                missing.append(f"{file.name}:{node.lineno}: torch.{name} without {wanted - given}")
    assert missing == []


@pytest.mark.sweep
def test_generation_under_other_defaults():
    from helpers.argument_calls import model

    def tokens() -> list[list[tuple[int, int]]]:
        default = torch.get_default_device()

        def generate(comm: attnmesh.comm.Comm) -> list[tuple[int, int]]:
            with default:
                generator = attnmesh.Generator(model(), None, comm, cache_tokens=64, max_sequences=2, prefill_chunk=8)
                sampling = attnmesh.Sampling(temperature=0.8, seed=3)
                prompts = [[9, 10, 11, 12, 5, 4, 3, 2, 1, 7], [13, 14, 15]]
                made = generator.generate(prompts, max_new_tokens=5, sampling=sampling)
                return [(token.row, token.id) for token in made]

        return attnmesh.run_virtual(2, generate)

    expected = tokens()
    with torch.device("meta"), default_dtype(torch.float64):
        assert tokens() == expected
