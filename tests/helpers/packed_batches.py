"""Packed and padded batches: a training step over ranks, and the same documents one at a time in float64."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

import attnmesh as am
from attnmesh.training.batch import shard_inputs
from helpers.models import attnmesh_model, on_virtual_ranks, random_ids, transformers_model

LENGTH = 37
ROWS = (
    ((0, 10), (10, 11), (11, 30), (30, 37)),  # packed
    ((4, 20), (20, 33)),  # packed, with padding on both sides
    ((0, 15), (18, 37)),  # padding between documents
    ((0, 31),),  # padding on the right
)


def batch(rows=ROWS, length=LENGTH):
    """Tokens, labels, position_ids and attention_mask; no label is predicted by a token of padding."""
    ids = torch.tensor([random_ids(length, seed) for seed in range(len(rows))])
    positions, real = torch.zeros_like(ids), torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, documents in enumerate(rows):
        for begin, end in documents:
            positions[row, begin:end] = torch.arange(end - begin)
            real[row, begin:end] = 1
            labels[row, begin:end] = ids[row, begin:end]
    labels[:, 1:][real[:, :-1] == 0] = -100
    labels[0, 3:8] = -100
    return ids, labels, positions, real


def documents_in_one_process(kind, ids, labels, rows):
    """Logits, loss and gradients of a float64 model that computes one document at a time."""
    model = transformers_model(kind, torch.float64)
    logits = torch.zeros(*ids.shape, model.config.vocab_size, dtype=torch.float64)
    for row, documents in enumerate(rows):
        for begin, end in documents:
            logits[row, begin:end] = model(input_ids=ids[row : row + 1, begin:end], use_cache=False).logits[0]
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    return logits.detach(), loss.detach(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def step_over_ranks(kind, world, ids, labels, layout=am.Zigzag(), **packing):  # noqa: B008  (immutable)
    """Loss, logits of all tokens, log-probabilities of all labels and gradients of every rank."""

    def rank(comm):
        model = copy.deepcopy(attnmesh_model(kind)).train()
        inputs = shard_inputs(am.ContextParallel(comm, layout=layout), ids, labels, **packing)
        with torch.autograd.set_multithreading_enabled(False):
            out = model(**inputs)
            out.loss.backward()
        logits = inputs["attention_pass"].unshard(out.logits.detach())
        log_probs = am.gather_log_probs(inputs, out.logits.detach())
        return out.loss.detach(), logits, log_probs, [weight.grad for weight in model.parameters()]

    return on_virtual_ranks(world, rank)


def check(kind, world, rows=ROWS, length=LENGTH, **options):
    """Assert that loss, logits, log-probabilities and all gradients equal those of single documents."""
    ids, labels, positions, real = batch(rows, length)
    wanted, loss, gradients = documents_in_one_process(kind, ids, labels, rows)
    found = step_over_ranks(kind, world, ids, labels, position_ids=positions, attention_mask=real, **options)
    torch.testing.assert_close(sum(rank[0] for rank in found).double(), loss, rtol=1e-5, atol=1e-6)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    of_labels = wanted.log_softmax(-1).gather(-1, shifted.clamp(min=0)[..., None])[..., 0] * (shifted != -100)
    seen = real.bool()
    for _, logits, log_probs, _ in found:
        torch.testing.assert_close(logits[seen].double(), wanted[seen], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(log_probs.double(), of_labels, rtol=1e-4, atol=1e-4)
    names = [name for name, _ in transformers_model(kind).named_parameters()]
    for at, (name, right) in enumerate(zip(names, gradients, strict=True)):
        parts = [rank[3][at] for rank in found if rank[3][at] is not None]
        total = sum(parts) if parts else torch.zeros_like(right)
        assert torch.isfinite(total).all(), name
        assert (total - right).norm() <= 3e-5 * right.norm() + 1e-9, name
