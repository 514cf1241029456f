"""Models with Liger's kernels over ranks, in Triton's interpreter: losses and gradients are those without Liger."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: there is no GPU

import pytest
import torch

pytest.importorskip("liger_kernel")
pytest.importorskip("transformers")

from liger_kernel.transformers import _apply_liger_kernel_to_instance

import attnmesh as am
from helpers.training import training_model

LENGTHS = [7, 4, 10]
# The interpreter cannot run the kernels of RMSNorm and SwiGLU, which compute every token by itself.
ROWWISE = {"rms_norm": False, "swiglu": False}
KERNELS = {
    "fused loss and rotary embeddings": {"rope": True, "fused_linear_cross_entropy": True, **ROWWISE},
    "loss of logits": {"rope": False, "cross_entropy": True, "fused_linear_cross_entropy": False, **ROWWISE},
}


def losses_and_gradients(world, kernels):
    """The sum of the losses of ranks, and of their gradients."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=generator)
    labels = ids.clone()
    labels[0, 5:9] = -100

    def rank(comm):
        torch.set_default_device("cpu")
        model = training_model("llama")
        model.set_attn_implementation("attnmesh")
        if kernels:
            _apply_liger_kernel_to_instance(model=model, **kernels)
        model.train()
        out = model(**am.shard_inputs(am.ContextParallel(comm), ids, labels, document_lengths=[LENGTHS]))
        out.loss.backward()
        return out.loss.detach(), [weight.grad for weight in model.parameters()], out.logits is None

    results = am.run_virtual(world, rank)
    gradients = [torch.stack(parts).sum(0) for parts in zip(*(grads for _, grads, _ in results), strict=True)]
    return sum(loss for loss, _, _ in results), gradients, all(fused for _, _, fused in results)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=list(KERNELS))
def test_losses_and_gradients_equal_a_model_without_liger(kernels):
    am.register_attention()
    expected_loss, expected, _ = losses_and_gradients(1, None)
    loss, gradients, without_logits = losses_and_gradients(2, kernels)
    assert without_logits == kernels["fused_linear_cross_entropy"]
    assert abs(float(loss / expected_loss) - 1) < 1e-5
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
