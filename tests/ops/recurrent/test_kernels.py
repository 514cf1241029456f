"""Triton kernels of recurrences with one decay per head, against the definition in float64.

Without a GPU in Triton's interpreter, in float32 and float16; with one, long sequences in bfloat16 and float32.
"""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import attnmesh as am
from attnmesh.core.masks import Documents, PerSequence
from attnmesh.ops.recurrent import kernels
from attnmesh.ops.recurrent.api import scan
from attnmesh.parallel import context
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


@pytest.mark.parametrize(
    ("kind", "layout", "final"), [("gated delta rule", am.Zigzag(), False), sweep("mamba2", am.Contiguous(), True)]
)
def test_over_ranks(kind, layout, final, monkeypatch):
    """The backward exchanges states between two passes of kernels; documents end within ranges."""
    monkeypatch.setattr(context, "use_kernels", lambda layer: True)
    length, layer = 37, random_layer(kind, 37)
    state, documents = random_state(layer), Documents([20, 0, 17])

    def whole(layer, state):
        return scan(layer, documents=documents, initial_state=state, return_final_state=True, backend="reference")

    def over_ranks(layer, state):
        def rank(comm):
            cp = am.ContextParallel(comm, layout=layout)
            mine = replace(
                layer, **{n: cp.shard(x, dim=2) for n, x in layer._tensors().items() if "seq" in layer._DIMS[n].split()}
            )
            found = cp.recurrent(
                mine, length=length, documents=documents, initial_state=state, return_final_state=final
            )
            out, last = found if final else (found, None)
            return cp.unshard(out, dim=2, length=length), last

        (out, last), *_ = am.run_virtual(2, rank)
        return out, last if final else 0.0 * out.sum()

    def run(layer, state):
        out, last = whole(layer, state)
        return out, last if final else 0.0 * out.sum()

    exact = with_grads(layer, state, run)
    found = with_grads(to_dtype(layer, torch.float32), state.float(), over_ranks)
    for name in exact:
        assert relative_error(found[name], exact[name]) < BOUNDS[torch.float32], name


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
    inputs = kernels.Inputs(q, k, v, g, beta, torch.zeros(1, 256, dtype=torch.int64), 0.1, delta)
    chunks, state = kernels.KernelChunks(inputs), torch.empty(1, 4, key_dim, value_dim)
    chunks.forward(state)
    chunks.total()
    chunks.backward(state, v, state)
    chunks.state_gradient(v)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_compile(dtype, delta):
    assert_fit(compiled_for_hopper(__file__, [(dtype, *widths, delta) for widths in ((128, 128), (128, 64), (64, 96))]))


def gpu_layer(kind, length, dtype, **sizes):
    layer = rounded(random_layer(kind, length, **sizes), dtype)
    return replace(layer, **{name: x.cuda() for name, x in layer._tensors().items()})


REAL = {"groups": 2, "heads": 4, "key_dim": 128, "value_dim": 128}


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=on_gpu) for dtype in (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(
    ("kind", "length", "batch", "sizes"),
    [
        ("gated delta rule", 8191, 2, REAL), ("gated delta rule", 300, 1, {"key_dim": 96, "value_dim": 192}),
        ("lightning", 8192, 1, REAL), ("mamba2", 8200, 2, {"groups": 1, "heads": 8, "key_dim": 128, "value_dim": 64}),
    ],
)  # fmt: skip
def test_long_sequences(kind, length, batch, sizes, dtype):
    """Documents of very unequal lengths, one of them empty, and of their own for every row of the batch."""
    layer = gpu_layer(kind, length, dtype, batch=batch, **sizes)
    lengths = [1, 70, 0, 64, length - 138, 3]
    documents = PerSequence([Documents(lengths[i:] + lengths[:i]) for i in range(batch)])
    check(layer, random_state(layer).cuda(), documents, dtype, truth="torch")
    check(layer, random_state(layer).cuda(), None, dtype, truth="torch")
