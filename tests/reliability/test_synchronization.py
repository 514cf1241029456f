"""No public operation waits for the GPU, except for those whose results or arguments are numbers on the host."""

from itertools import product

import pytest
import torch

from attnmesh.parallel import checksums
from attnmesh.parallel.sparse import groups
from helpers.cases import else_sweep
from helpers.operations import SPARSE, Operation, Tensors, public_operations

OPERATIONS = [operation for operation in public_operations("cuda") if operation.backend != "reference"]
READS = {
    "paged prefill": "cur_pos on the device is read, to compute with the keys that exist; a list is not",
    "sample": "returns a token",
    "model inputs": "finds documents and padding in the batch",
    "write fp8": "a new cache checks the values of its scales",
}
"""Operations that read the device, and why."""

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def run(operation: Operation, inputs: Tensors) -> None:
    """Compute the results and gradients; unlike `Operation.results`, with nothing that is copied from the host."""
    inputs = {name: x.detach().requires_grad_(name in operation.grads) for name, x in inputs.items()}
    results = operation.run(inputs, operation.backend)
    sources = [x for x in results.values() if x.requires_grad]
    if sources:
        leaves = [inputs[name] for name in operation.grads]
        torch.autograd.grad(sources, leaves, [torch.ones_like(x) for x in sources], allow_unused=True)


OTHER_IN_FLOAT32 = {
    *(f"attention auto {name}" for name in ("full", "causal", "window", "irregular", "terms")), "decode auto plain",
    "paged decode auto", "context parallel ring", "ring distributed", *(f"{name} auto" for name in SPARSE),
}  # fmt: skip
"""Operations whose kernels in float32 are not those of bf16. What is around kernels does not depend on the dtype."""


@pytest.mark.parametrize(
    ("operation", "dtype"),
    else_sweep(
        product(OPERATIONS, [torch.float32, torch.bfloat16]),
        lambda operation, dtype: dtype == torch.bfloat16 or operation.name in OTHER_IN_FLOAT32,
    ),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_an_operation_does_not_wait_for_the_gpu(operation, dtype, monkeypatch):
    """A call that does not compare values between ranks, which few calls do."""
    for module in (checksums, groups):
        monkeypatch.setattr(module, "is_readable", lambda x: x.device.type == "cpu")
    check(operation, dtype, reads=operation.name in READS)


def test_a_first_call_compares_values_between_ranks():
    check(next(each for each in OPERATIONS if each.name == "context parallel ring"), torch.bfloat16, reads=True)


def check(operation: Operation, dtype: torch.dtype, *, reads: bool) -> None:
    """The second of two calls: the first compiles kernels and copies what a mask or a layout keeps on the GPU."""
    inputs = operation.inputs(0, "cuda", dtype)
    run(operation, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if reads:
            with pytest.raises(Exception, match="called a synchronizing CUDA operation"):
                run(operation, inputs)
        else:
            run(operation, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_table_names_operations():
    assert READS.keys() | OTHER_IN_FLOAT32 <= {operation.name for operation in OPERATIONS}
