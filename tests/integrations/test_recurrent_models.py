"""Models with recurrent layers over ranks: the loss and every gradient are those of one process."""

import pytest
import torch

import attnmesh as am
from helpers.cases import else_sweep, first, in_turn, sweep
from helpers.models import on_virtual_ranks
from helpers.recurrent_models import MODELS, recurrent_model

FEW = ("qwen3_next", "bamba", "minimax", "lfm2")  # a kind of recurrence each; Mamba-1 below
LENGTH = 37  # no multiple of a chunk or of a number of ranks


def gradients(model):
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def of_ranks(model, ids, world, layout, **how):
    """The loss and the gradients of ranks that share the weights, so that gradients are summed."""

    def rank(comm):
        loss = model(**am.shard_inputs(am.ContextParallel(comm, layout=layout), ids, ids, **how)).loss
        loss.backward()
        return loss.detach()

    return sum(on_virtual_ranks(world, rank)), gradients(model)


def assert_equal(found, expected):
    assert abs(found[0] - expected[0]) < 2e-5
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-6, name


@pytest.mark.parametrize("kind", else_sweep([(kind,) for kind in MODELS], lambda kind: kind in FEW))
def test_loss_and_gradients_are_those_of_one_process(kind):
    model, ids = recurrent_model(kind), torch.randint(1, 64, (2, LENGTH))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = loss.detach(), gradients(model)
    for world, layout in ((2, am.Zigzag()), (3, am.Contiguous())):
        assert_equal(of_ranks(model, ids, world, layout), expected)


@pytest.mark.parametrize("kind", else_sweep([(kind,) for kind in MODELS], lambda kind: kind in ("qwen3_next", "bamba")))
def test_packed_rows_are_documents_alone(kind):
    model, ids = recurrent_model(kind), torch.randint(1, 64, (1, LENGTH))
    lengths = [5, 20, 2, 10]
    total, counted = 0.0, LENGTH - len(lengths)
    for document in ids.split(lengths, 1):
        loss = model(input_ids=document, labels=document, use_cache=False).loss * (document.shape[1] - 1) / counted
        loss.backward()
        total += loss.detach()
    expected = total, gradients(model)
    labels = ids.clone()
    labels[0, torch.tensor([0, *lengths]).cumsum(0)[:-1]] = -100  # the first token of a document has no label

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), ids, labels, document_lengths=[lengths])
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    assert_equal((sum(on_virtual_ranks(3, rank)), gradients(model)), expected)


@pytest.mark.parametrize(("kind", "before"), first(1, [("bamba", True), *in_turn(MODELS, [True, False])]))
def test_padding_is_that_of_one_process(kind, before):
    model, ids = recurrent_model(kind), torch.randint(1, 64, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, slice(9) if before else slice(LENGTH - 9, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if before:
        labels[1, 9] = -100
    positions = (mask.cumsum(1) - 1).clamp(min=0) if before else torch.arange(LENGTH).expand(2, -1)
    has_positions = "mamba" not in kind or kind in ("bamba",)
    own = {"position_ids": positions} if has_positions else {}
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **own).loss
    loss.backward()
    expected = loss.detach(), gradients(model)

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), ids, labels, attention_mask=mask, position_ids=positions)
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    assert_equal((sum(on_virtual_ranks(2, rank)), gradients(model)), expected)


@pytest.mark.parametrize("kind", ["falcon_mamba", sweep("qwen3_next"), sweep("minimax"), sweep("lfm2")])
def test_activation_checkpointing(kind):
    """Layers run again in the backward pass, outside of the model's call."""
    model, ids = recurrent_model(kind), torch.randint(1, 64, (1, LENGTH))
    expected = of_ranks(model, ids, 2, am.Zigzag())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(of_ranks(model, ids, 2, am.Zigzag()), expected)


def test_reentrant_checkpointing():
    """Mamba-2's layers have the batch in their mask only."""
    model, ids = recurrent_model("mamba2"), torch.randint(1, 64, (1, LENGTH))
    expected = of_ranks(model, ids, 2, am.Zigzag())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert_equal(of_ranks(model, ids, 2, am.Zigzag()), expected)


def test_a_layer_that_runs_again_without_the_batch_is_refused():
    """It would compute with one rank's tokens, and gradients would be wrong."""
    model, ids = recurrent_model("mamba2"), torch.randint(1, 64, (1, LENGTH))
    of_ranks(model, ids, 2, am.Zigzag())
    with pytest.raises(ValueError, match="Mamba2Mixer is computed again outside of its model's call"):
        model.backbone.layers[0].mixer(torch.randn(1, 5, 32))


def test_one_device_is_as_before():
    """Functions that serve ranks are in place of Transformers' own, and call them elsewhere."""
    model, ids = recurrent_model("qwen3_next"), torch.randint(1, 64, (1, LENGTH))
    before = model(input_ids=ids, use_cache=False).logits
    of_ranks(model, ids, 2, am.Zigzag())
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_a_layout_without_ranges_is_refused():
    model, ids = recurrent_model("lfm2"), torch.randint(1, 64, (1, LENGTH))

    def rank(comm):
        with pytest.raises(ValueError, match="layout"):
            model(**am.shard_inputs(am.ContextParallel(comm, layout=am.Striped()), ids, ids))

    on_virtual_ranks(2, rank)
