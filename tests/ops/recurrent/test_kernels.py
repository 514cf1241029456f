"""Triton kernels of recurrences with one decay per head, against the definition in float64.

Without a GPU in Triton's interpreter, in float32 and float16; with one, long sequences in bfloat16 and float32.
"""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from attnmesh.core.masks import Documents
from attnmesh.ops.recurrent import kernels
from attnmesh.ops.recurrent.api import scan
from attnmesh.testing.errors import relative_error
from attnmesh.testing.recurrent import packed, random_layer, random_state, to_dtype, with_grads
from helpers.cases import sweep
from helpers.guards import guard_zones
from helpers.triton_compile import assert_fit, compiled_for_hopper

CUDA = torch.cuda.is_available()
on_gpu = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="needs a GPU")]
KERNEL_KINDS = ("gated delta rule", "lightning", "mamba2")
# Products of 16-bit inputs round what they multiply; float32 products are as exact as those of the definition.
BOUNDS = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def results(layer, state, documents, backend):
    def run(layer, state):
        return scan(layer, documents=documents, initial_state=state, return_final_state=True, backend=backend)

    return with_grads(layer, state, run)


def check(layer, state, documents, dtype, truth="reference"):
    """`layer` is in float64, with values that are exact in `dtype`."""
    exact = results(layer, state.double(), documents, truth)
    found = results(to_dtype(layer, dtype), state.float(), documents, "triton")
    assert found.keys() == exact.keys()
    for name in exact:
        assert found[name].shape == exact[name].shape
        assert relative_error(found[name], exact[name]) < BOUNDS[dtype], name


def rounded(layer, dtype):
    return to_dtype(to_dtype(layer, dtype), torch.float64)


@pytest.mark.parametrize(
    ("kind", "length", "batch", "how", "dtype", "sizes"),
    [
        ("gated delta rule", 1, 1, "whole", torch.float32, {}),
        (
            "gated delta rule",
            67,
            1,
            "rows",
            torch.float32,
            {},
        ),  # documents end within chunks
        ("lightning", 63, 1, "whole", torch.float16, {"groups": 4}),  # a head for every group
        ("mamba2", 70, 1, "same", torch.float16, {"groups": 1}),
        sweep("gated delta rule", 130, 2, "rows", torch.float16, {"key_dim": 32, "value_dim": 80}),
        sweep("mamba2", 130, 2, "rows", torch.float32, {"key_dim": 20, "value_dim": 70}),
        sweep("lightning", 130, 2, "rows", torch.float32, {}),
    ],
)
def test_kernels_equal_the_definition(kind, length, batch, how, dtype, sizes, device):
    layer = rounded(random_layer(kind, length, batch=batch, **sizes), dtype)
    layer = replace(layer, **{name: x.to(device) for name, x in layer._tensors().items()})
    with guard_zones():
        check(layer, random_state(layer).to(device), packed(length, batch, how), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_positions_that_forget_everything(dtype, device):
    """What follows is as exact as it is alone, and no gradient is NaN."""
    layer = rounded(random_layer("gated delta rule", 40), dtype)
    decays = layer.g.clone()
    decays[:, :, 5], decays[:, :, 33] = -math.inf, -5000.0
    layer = replace(layer, g=decays)
    layer = replace(layer, **{name: x.to(device) for name, x in layer._tensors().items()})
    check(layer, random_state(layer).to(device), None, dtype)


def test_what_kernels_do_not_serve_is_refused():
    for change, message in (
        ({"q": torch.ones(1, 2, 5, 8).double()}, "queries, keys and values must be all float16, bfloat16 or float32"),
        ({"q": torch.ones(1, 2, 5, 200), "k": torch.ones(1, 2, 5, 200)}, "and key_dim is 200"),
        ({"g": torch.ones(1, 4, 5).double()}, "a decay or a step is float64"),
    ):
        layer = replace(to_dtype(random_layer("gated delta rule", 5, key_dim=8), torch.float32), **change)
        with pytest.raises(ValueError, match=f"got 'triton': .*{message}"):
            scan(layer, backend="triton")
    with pytest.raises(ValueError, match="a KimiDeltaAttention has no kernels"):
        scan(random_layer("kda", 5), backend="triton")


def launch(dtype, key_dim, value_dim, delta):
    """All kernels of a layer, in the process that compiles."""
    dtype = getattr(torch, dtype)
    q, k = torch.empty(2, 1, 2, 256, key_dim, dtype=dtype)
    v, (g, beta) = torch.empty(1, 4, 256, value_dim, dtype=dtype), torch.empty(2, 1, 4, 256)
    inputs = kernels.Inputs(q, k, v, g, beta, None if delta else g[0, :, 0], torch.zeros(1, 256).long(), 0.1, delta)
    chunks, state = kernels.KernelChunks(inputs), torch.empty(1, 4, key_dim, value_dim)
    chunks.forward(state)
    chunks.total()
    chunks.backward(state, v, state)
    chunks.state_gradient(v)


def tolerated_spills(kernel):
    """As measured. Gradients hold the most tiles at a time, and float32 products are three products of tf32."""
    if kernel["case"][0] == "float32":
        return 4000
    return 800 if "gradients_kernel" in kernel["kernel"] and "state" not in kernel["kernel"] else 64


@pytest.mark.sweep
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_compile(dtype, delta):
    cases = [(dtype, *widths, delta) for widths in ((128, 128), (128, 64), (64, 96))]
    assert_fit(compiled_for_hopper(__file__, cases), tolerated_spills)


def gpu_layer(kind, length, dtype, **sizes):
    """A layer on the GPU with [B, S, H, D] in memory, as models compute it."""
    layer = rounded(random_layer(kind, length, **sizes), dtype)
    tensors = {name: x.cuda() for name, x in layer._tensors().items()}
    return replace(
        layer,
        **{name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim > 1 else x for name, x in tensors.items()},
    )


@pytest.mark.gpu_memory(gib=24)
@pytest.mark.parametrize(
    ("kind", "length", "dtype", "packed", "sizes"),
    [
        pytest.param(*case, marks=on_gpu)
        for case in (
            ("gated delta rule", 8191, torch.bfloat16, True, {"groups": 16, "heads": 32, "value_dim": 128}),
            ("gated delta rule", 8192, torch.bfloat16, False, {"groups": 16, "heads": 32, "value_dim": 128}),
            ("mamba2", 8200, torch.bfloat16, True, {"groups": 1, "heads": 64, "value_dim": 64}),
            ("gated delta rule", 2050, torch.float32, True, {"groups": 2, "heads": 4, "value_dim": 128}),
        )
    ],
)
def test_long_sequences(kind, length, dtype, packed, sizes):
    """With documents of very unequal lengths, one of them empty, and without."""
    layer = gpu_layer(kind, length, dtype, key_dim=128, **sizes)
    documents = Documents([1, 70, 0, 64, length - 138, 3]) if packed else None
    check(layer, random_state(layer).cuda(), documents, dtype, truth="torch")


@pytest.mark.parametrize(
    ("dtype", "key_dim", "value_dim"),
    [(torch.float16, 128, 128), (torch.bfloat16, 64, 128), (torch.bfloat16, 128, 32), (torch.bfloat16, 128, 64)],
)
def test_what_has_not_run_on_a_gpu_is_refused_there(monkeypatch, dtype, key_dim, value_dim):
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    q, v = (torch.empty(1, 2, 8, width, dtype=dtype, device="meta") for width in (key_dim, value_dim))
    why = kernels.why_no_kernels(q, q, v)
    assert (why is None) == (dtype == torch.bfloat16 and (key_dim, value_dim) == (128, 64))
    assert why is None or f"not {dtype} with {key_dim} and {value_dim}" in why
