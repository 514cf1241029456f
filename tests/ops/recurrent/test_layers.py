"""Recurrent layers on one device: chunks against the definition, documents, states, precision, and refusals."""

import math
import re
from dataclasses import replace

import pytest
import torch

import attnmesh as am
from attnmesh.core.masks import Causal, Documents, PerSequence
from attnmesh.ops.recurrent.api import scan
from attnmesh.ops.recurrent.chunked import CHUNK
from attnmesh.ops.recurrent.layers import GatedDeltaRule
from attnmesh.testing.errors import relative_error
from attnmesh.testing.recurrent import (
    KINDS,
    assert_errors,
    has_positions,
    packed,
    random_layer,
    random_state,
    to_dtype,
    with_grads,
)
from helpers.cases import sweep

EXACT = 1e-12


def results(layer, state, documents=None, backend="torch"):
    def run(layer, state):
        return scan(layer, documents=documents, initial_state=state, return_final_state=True, backend=backend)

    return with_grads(layer, state, run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "batch", "how"),
    [(CHUNK + 21, 2, "rows"), sweep(3 * CHUNK, 1, "whole"), sweep(1, 3, "whole"), sweep(2 * CHUNK + 1, 3, "same")],
)
def test_chunks_equal_the_definition(kind, length, batch, how):
    """In float64, out, final state and all gradients; in float32, at most twice the error of the definition."""
    layer, documents = random_layer(kind, length, batch=batch), packed(length, batch, how)
    state = random_state(layer)
    exact = results(layer, state, documents, "reference")
    found = results(layer, state, documents)
    for name in exact:
        assert relative_error(found[name], exact[name]) < EXACT, name
    single, state = to_dtype(layer, torch.float32), state.float()
    plain = results(single, state, documents, "reference")
    assert_errors(results(single, state, documents), plain, exact, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_documents_alone(kind):
    layer, lengths = random_layer(kind, 40, batch=2), [13, 1, 26]
    out, state = scan(layer, documents=Documents(lengths), return_final_state=True)
    alone = [
        scan(layer.rows(range(first, first + n)), return_final_state=True) for first, n in ((0, 13), (13, 1), (14, 26))
    ]
    assert relative_error(out, torch.cat([one for one, _ in alone], 2)) < EXACT
    assert relative_error(state, alone[-1][1]) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_continues_the_sequence(kind):
    """Cut anywhere, also after fewer positions than a convolution looks back."""
    layer = random_layer(kind, 20)
    state = random_state(layer)
    out, final = scan(layer, initial_state=state, return_final_state=True)
    outs = []
    for first, end in ((0, 1), (1, 3), (3, 20)):
        part, state = scan(layer.rows(range(first, end)), initial_state=state, return_final_state=True)
        outs.append(part)
    assert relative_error(torch.cat(outs, 2), out) < EXACT
    assert relative_error(state, final) < EXACT


@pytest.mark.parametrize("kind", ["gated delta rule", "kda", "rwkv7"])
def test_strong_decays_do_not_round_weak_ones_away(kind):
    """A position that forgets (almost) everything leaves those after it as exact as they are alone."""
    layer = random_layer(kind, 48)
    name = "w" if kind == "rwkv7" else "g"
    for value in (-5000.0, -math.inf):
        decays = getattr(layer, name).clone()
        decays[:, :, [5, 20]] = value
        strong = replace(layer, **{name: decays})
        exact = results(strong, None, backend="reference")
        assert all(x.isfinite().all() for x in exact.values())
        single = to_dtype(strong, torch.float32)
        assert_errors(results(single, None), results(single, None, backend="reference"), exact, value)


def test_half_precision_inputs_are_computed_in_float32():
    layer = to_dtype(random_layer("gated delta rule", 30), torch.bfloat16)
    out, state = scan(layer, return_final_state=True)
    exact, exact_state = scan(to_dtype(layer, torch.float64), return_final_state=True)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative_error(state, exact_state) < 1e-6
    assert relative_error(out, exact) < torch.finfo(torch.bfloat16).eps
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scan(layer), out)


@pytest.mark.sweep
def test_the_gated_delta_rule_is_that_of_transformers():
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    layer = random_layer("gated delta rule", 33, batch=2, groups=4)
    assert isinstance(layer, GatedDeltaRule)
    state = random_state(layer)
    q, k, v, g, beta = (x.float().transpose(1, 2) for x in (layer.q, layer.k, layer.v, layer.g, layer.beta))
    theirs, final = torch_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=state.float(), output_final_state=True
    )
    out, ours = scan(to_dtype(layer, torch.float32), initial_state=state.float(), return_final_state=True)
    torch.testing.assert_close(out, theirs.transpose(1, 2))
    torch.testing.assert_close(ours, final)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_gives_nothing_out(kind):
    layer = random_layer(kind, 0, batch=2)
    state = random_state(layer)
    out, final = scan(layer, initial_state=state, return_final_state=True)
    assert out.shape[2] == 0
    assert torch.equal(final, state)


def test_memory_grows_with_the_length_only():
    """What is saved for the backward of a position is a few rows of its heads, at any length."""
    saved = []
    for length in (256, 1024):
        layer = random_layer("kda", length, groups=2, heads=2, key_dim=16, value_dim=16)
        layer = replace(layer, **{name: x.requires_grad_() for name, x in layer._tensors().items()})
        total: dict[int, int] = {}

        def keep(x, total=total):
            total[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            scan(layer)
        saved.append(sum(total.values()) / length)
    assert saved[1] <= 1.1 * saved[0]


q = torch.ones(1, 2, 5, 4)
VALID = {"q": q, "k": q, "v": torch.ones(1, 4, 5, 3), "g": -torch.ones(1, 4, 5), "beta": torch.ones(1, 4, 5)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.ones(1, 3, 5, 4)}, "k must be [batch, groups, seq, key_dim] = [1, 2, 5, 4], got float32 tensor"),
        ({"g": torch.ones(1, 4)}, "g must be floating point [batch, heads, seq] on cpu, got float32 tensor [1, 4]"),
        ({"beta": torch.ones(1, 4, 5).int()}, "beta must be floating point [batch, heads, seq] on cpu, got int32"),
        ({"v": None}, "v must be a tensor [batch, heads, seq, value_dim], got NoneType None"),
        ({"scale": math.nan}, "scale must be a finite number, got nan"),
        (
            {"q": torch.ones(1, 3, 5, 4), "k": torch.ones(1, 3, 5, 4)},
            "the heads of v must be a multiple of the heads of the keys, got 4 and 3",
        ),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(changed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        scan(GatedDeltaRule(**(VALID | changed)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": Causal()}, "documents must be Documents(lengths), or PerSequence of one for every row"),
        ({"documents": Documents([2, 2])}, "documents must add up to the length of the sequence, 5, got"),
        ({"documents": Documents([5], prefixes=[2])}, "documents must be Documents(lengths), or PerSequence"),
        ({"documents": PerSequence([Documents([5])] * 2)}, "documents must have a mask for each of 1 rows"),
        ({"initial_state": torch.ones(1, 4, 3, 4)}, "initial_state must be floating point [1, 4, 4, 3] on cpu, got"),
        ({"initial_state": 0}, "initial_state must be a tensor [1, 4, 4, 3], got int 0"),
        ({"return_final_state": 1}, "return_final_state must be True or False, got 1"),
        ({"backend": "cuda"}, "backend must be one of "),
    ],
)
def test_options_that_are_not_served_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        scan(GatedDeltaRule(**VALID), **options)


def test_what_is_no_layer_is_refused():
    with pytest.raises(ValueError, match="layer must be a recurrent layer"):
        scan(q)
    with pytest.raises(ValueError, match="rows must be a range of step 1 in "):
        GatedDeltaRule(**VALID).rows(range(0, 5, 2))
    with pytest.raises(ValueError, match="activation must be one of silu, got 'gelu'"):
        scan(am.recurrent.ShortConvolution(torch.ones(1, 2, 3), torch.ones(2, 4), activation="gelu"))


def test_every_input_has_positions_in_its_third_dimension():
    for kind in KINDS:
        layer = random_layer(kind, 7)
        positioned = {name: x.shape[2] for name, x in layer._tensors().items() if has_positions(layer, name)}
        assert set(positioned.values()) == {7}
