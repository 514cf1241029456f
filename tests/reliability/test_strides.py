"""Every public operation gives the same results whatever the strides of its inputs are, and those of float64."""

import inspect
import math
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from helpers.arguments import targets
from helpers.cases import else_sweep, in_turn
from helpers.operations import (
    Operation,
    decode_operations,
    dense_operations,
    each_operation,
    public_operations,
    sparse_operations,
)
from helpers.strides import ROWS, VARIANTS, strided

OPERATIONS = public_operations()
KERNELS = {
    operation.name: operation
    for operation in (*dense_operations("triton"), *decode_operations("triton"), *sparse_operations("triton"))
}
LIMITS = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}  # of the error when contiguous

# Public callables that take tensors and are not computed here, and why.
NOT_COMPUTED = {
    "GradientReduction.num_items": "counts labels, by torch",
    "GradientReduction.loss": "adds one number, by torch",
    "AttentionBlock.make_cache": "scales as in CacheSpec",
    "Request.choose": "called by a Generator with logits that it computed",
    "Rope.cos_sin": "cosines and sines of integer positions, by torch",
    "PrefillKV": "bits are moved by reshard: test_moved_caches, with strides",
    "explain_attention": "computes nothing",
    "unpack_index_keys": "makes views; test_latent_storage, with strides",
    "unpack_latent": "makes views; test_latent_storage, with strides",
}


def assert_same_results(
    operation: Operation,
    seed: int,
    *,
    change: int | None = None,
    first: str | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Change the memory of all inputs, or of input number `change`, and of the gradients of the results.

    `first` is the variant of the first input, in most operations the queries; others are random.
    """
    random = Random(seed)
    variants = {}
    given = {}
    for i, (name, x) in enumerate(operation.inputs(seed, device, dtype).items()):
        given[name] = x
        if change is None or i == change % len(operation.inputs(seed)):
            variants[name] = random.choice(ROWS if name in operation.rows else VARIANTS)
            if first is not None and not i:
                variants[name] = first
            given[name] = strided(x, variants[name], random)
    said = f"{operation.name}, seed {seed}, {dtype}: {variants}"
    plain = operation.results({name: x.contiguous() for name, x in given.items()})
    found = operation.results(given, vary=lambda name, x: strided(x, random.choice(VARIANTS[:-1]), random))
    exact = None if operation.exact is None else operation.results(given, exact=True)
    assert found.keys() == plain.keys(), said
    for name, result in found.items():
        assert_close(result, plain[name], None if exact is None else exact[name], LIMITS[dtype], f"{said}: {name}")


def assert_close(found: Tensor, plain: Tensor, exact: Tensor | None, limit: float, said: str) -> None:
    assert found.dtype == plain.dtype, said
    assert found.shape == plain.shape, said
    if exact is None or not found.is_floating_point():
        assert torch.equal(found, plain), said
        return
    error, allowed = (error_of(x.cpu(), exact) for x in (found, plain))
    assert allowed <= limit, f"{said} has an error of {allowed} when contiguous"
    assert error <= 2 * allowed + 2e-6, f"{said} has an error of {error}, {allowed} when contiguous"


def error_of(x: Tensor, exact: Tensor) -> float:
    """The relative error; of a result that is almost 0, as if its elements were 0.01."""
    finite = exact.isfinite()
    if not torch.equal(finite, x.isfinite()) or not torch.equal(x[~finite].double(), exact[~finite].double()):
        return math.nan
    size = exact[finite].double().norm() + 0.01 * exact.numel() ** 0.5
    return float((x[finite].double() - exact[finite].double()).norm() / size) if exact.numel() else 0.0


def test_every_public_operation_on_tensors_is_computed():
    def takes_tensors(function) -> bool:
        kinds = [str(each.annotation) for each in inspect.signature(function).parameters.values()]
        return any(kind in text for text in kinds for kind in ("Tensor", "Stored", "State"))

    public = {name for name, target in targets().items() if takes_tensors(target.function)}
    computed = {name for operation in OPERATIONS for name in operation.covers}
    assert public - computed - NOT_COMPUTED.keys() == set()
    assert NOT_COMPUTED.keys() - public == set()


@each_operation()
def test_strides(operation):
    assert_same_results(operation, 0, first="last")


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 4))
def test_random_strides(seed):
    print(f"seed {seed}")
    for operation in OPERATIONS:
        assert_same_results(operation, seed)
        assert_same_results(operation, seed, change=seed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU below")
def test_strides_of_a_kernel():
    assert_same_results(KERNELS["decode triton cur_pos"], 0)


@pytest.mark.sweep
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU below")
@pytest.mark.parametrize(("name", "dtype"), in_turn(KERNELS, [torch.float32, torch.float16]))
def test_random_strides_of_kernels(name, dtype):
    assert_same_results(KERNELS[name], 2, change=2, dtype=dtype)


def is_of_its_own(operation: Operation, dtype: torch.dtype) -> bool:
    """Whether no other case gives the same strides to the same kernel.

    In bf16 the library chooses among all kernels. Those of Triton, which may lose, are called in float32; of decode
    only one, for there it has no other. Strides do not meet the difference of fp16 and bf16.
    """
    if operation.backend == "triton":
        is_decode = operation.name in {each.name for each in decode_operations("triton")}
        few = {torch.float32: not is_decode or "plain" in operation.name, torch.float16: "causal" in operation.name}
        return few.get(dtype, False)
    return dtype == torch.bfloat16 and operation.backend != "reference"  # that is of torch, as on the CPU


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("operation", "dtype"),
    else_sweep(product([*KERNELS.values(), *public_operations("cuda")], LIMITS), is_of_its_own),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_strides_on_a_gpu(operation, dtype):
    for seed in range(4):
        assert_same_results(operation, seed, change=seed if seed % 2 else None, device="cuda", dtype=dtype)
