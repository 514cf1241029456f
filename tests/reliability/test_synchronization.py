"""No public operation waits for the GPU, except for those whose results or arguments are numbers on the host."""

import pytest
import torch

from helpers.operations import Operation, Tensors, public_operations

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_does_not_wait_for_the_gpu(operation, dtype):
    """The second of two calls: the first compiles kernels and copies what a mask or a layout keeps on the GPU."""
    inputs = operation.inputs(0, "cuda", dtype)
    run(operation, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if operation.name in READS:
            with pytest.raises(Exception, match="called a synchronizing CUDA operation"):
                run(operation, inputs)
        else:
            run(operation, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_table_names_operations():
    assert READS.keys() <= {operation.name for operation in OPERATIONS}
