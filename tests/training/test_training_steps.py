"""Gradient accumulation, gradient checkpointing and evaluation over ranks: the numbers of one process."""

import copy

import pytest
import torch

import attnmesh as am
from attnmesh.training.batch import shard_inputs
from helpers.cases import in_turn, sweep
from helpers.models import TYPES, attnmesh_model, on_virtual_ranks, random_ids, transformers_model
from helpers.packed_batches import ROWS, batch, documents_in_one_process

CHECKPOINTING = {"none": None, "reentrant": {"use_reentrant": True}, "not reentrant": {"use_reentrant": False}}


def check_accumulation(kind, world, checkpointing):
    """Two batches of two rows each are one batch of four; the loss is divided by the labels of both."""
    ids, labels, positions, real = batch()
    _, loss, gradients = documents_in_one_process(kind, ids, labels, ROWS)
    items = int((labels[:, 1:] != -100).sum())

    def rank(comm):
        model = copy.deepcopy(attnmesh_model(kind)).train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable(checkpointing)
        cp, losses = am.ContextParallel(comm), []
        with torch.autograd.set_multithreading_enabled(False):
            for rows in (slice(0, 2), slice(2, 4)):
                inputs = shard_inputs(
                    cp, ids[rows], labels[rows], position_ids=positions[rows], attention_mask=real[rows],
                    num_items_in_batch=items,
                )  # fmt: skip
                out = model(**inputs)
                out.loss.backward()
                losses.append(out.loss.detach())
        return sum(losses), [weight.grad for weight in model.parameters()]

    found = on_virtual_ranks(world, rank)
    torch.testing.assert_close(sum(rank[0] for rank in found).double(), loss, rtol=1e-5, atol=1e-6)
    for at, (name, right) in enumerate(zip(dict(attnmesh_model(kind).named_parameters()), gradients, strict=True)):
        parts = [rank[1][at] for rank in found if rank[1][at] is not None]
        assert (sum(parts) - right).norm() <= 3e-5 * right.norm() + 1e-9 if parts else not right.any(), name


@pytest.mark.parametrize(("kind", "how"), [("mistral", "reentrant"), sweep("gpt_oss", "not reentrant")])
def test_accumulated_gradients_of_checkpointed_layers(kind, how):
    check_accumulation(kind, 2, CHECKPOINTING[how])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "how"), in_turn([kind for kind in TYPES if kind != "llama4_text"], CHECKPOINTING)
)  # Llama 4 counts chunks in the row
def test_accumulated_gradients_of_every_architecture(kind, how):
    check_accumulation(kind, 3, CHECKPOINTING[how])


@pytest.mark.parametrize("kind", ["qwen2", sweep("gemma2")])
def test_evaluation(kind):
    ids, labels, positions, real = batch()
    wanted, loss, _ = documents_in_one_process(kind, ids, labels, ROWS)

    def rank(comm):
        inputs = shard_inputs(am.ContextParallel(comm), ids, labels, position_ids=positions, attention_mask=real)
        with torch.inference_mode():
            out = attnmesh_model(kind)(**inputs)
            return out.loss, inputs["attention_pass"].unshard(out.logits)

    found = on_virtual_ranks(3, rank)
    torch.testing.assert_close(sum(rank[0] for rank in found).double(), loss, rtol=1e-5, atol=1e-6)
    for _, logits in found:
        seen = real.bool()
        torch.testing.assert_close(logits[seen].double(), wanted[seen], rtol=1e-4, atol=1e-4)


def test_a_rank_without_labels_has_the_loss_0():
    ids = torch.tensor([random_ids(12, 1)])
    labels = torch.full_like(ids, -100)
    labels[0, 1:4] = ids[0, 1:4]
    model = transformers_model("llama")
    loss = model(input_ids=ids, labels=labels).loss
    wanted = torch.autograd.grad(loss, list(model.parameters()))

    def rank(comm):
        mine = copy.deepcopy(attnmesh_model("llama"))
        with torch.autograd.set_multithreading_enabled(False):
            out = mine(**shard_inputs(am.ContextParallel(comm, layout=am.Contiguous()), ids, labels))
            out.loss.backward()
        none = mine(**shard_inputs(am.ContextParallel(comm), ids, torch.full_like(ids, -100))).loss
        return out.loss.detach(), none.detach(), [weight.grad for weight in mine.parameters()]

    found = on_virtual_ranks(3, rank)
    assert [float(rank[0]) for rank in found] == [pytest.approx(loss.item(), rel=1e-5), 0, 0]
    assert [float(rank[1]) for rank in found] == [0, 0, 0]  # a batch without labels
    for parts, right in zip(zip(*(rank[2] for rank in found), strict=True), wanted, strict=True):
        assert (sum(parts) - right).norm() <= 1e-5 * right.norm()
