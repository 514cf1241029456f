"""A training step over a spread sequence: loss, logits and the gradients of all parameters are those of one process."""

import copy

import pytest
import torch

import attnmesh as am
from attnmesh.training.batch import shard_inputs
from attnmesh.verify.mode import covering_rows
from helpers.cases import first, sweep
from helpers.models import KINDS, LAYOUTS, attnmesh_model, on_virtual_ranks, random_ids, transformers_model

LENGTH = 37  # which few worlds divide


def batch(length=LENGTH):
    """Two texts; of the first a beginning is not to be learned, of the second most."""
    ids = torch.tensor([random_ids(length, 5), random_ids(length, 6)])
    labels = ids.clone()
    labels[0, :5] = -100
    labels[1, 3 : length - 4] = -100
    return ids, labels


def one_process(kind, dtype, ids, labels):
    model = transformers_model(kind, dtype)
    out = model(input_ids=ids, labels=labels)
    gradients = torch.autograd.grad(out.loss, list(model.parameters()))
    return out.loss.detach(), out.logits.detach(), gradients


def step(kind, layout, ids, labels, dtype=torch.float32, schedule="auto"):
    """One rank's training step: its loss, all logits, and its part of all gradients."""

    def rank(comm):
        model = copy.deepcopy(attnmesh_model(kind, dtype)).train()
        ranks = am.ContextParallel(comm, layout=layout, schedule=schedule)
        with torch.autograd.set_multithreading_enabled(False):  # a virtual rank is one thread
            out = model(**shard_inputs(ranks, ids, labels))
            out.loss.backward()
        logits = ranks.unshard(out.logits.detach(), 1, ids.shape[1])
        none = [torch.zeros_like(weight) for weight in model.parameters()]
        return out.loss.detach(), logits, [
            zero if weight.grad is None else weight.grad for zero, weight in zip(none, model.parameters(), strict=True)
        ]  # fmt: skip

    return rank


def check_step(kind, world, layout, length=LENGTH, schedule="auto"):
    ids, labels = batch(length)
    found = on_virtual_ranks(world, step(kind, LAYOUTS[layout], ids, labels, schedule=schedule))
    loss, logits, gradients = one_process(kind, torch.float32, ids, labels)
    exact = one_process(kind, torch.float64, ids, labels)[2]
    torch.testing.assert_close(sum(rank[0] for rank in found), loss, rtol=1e-5, atol=1e-6)
    for _, all_logits, _ in found:
        torch.testing.assert_close(all_logits, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    names = [name for name, _ in transformers_model(kind).named_parameters()]
    for at, (name, right, truth) in enumerate(zip(names, gradients, exact, strict=True)):
        total = sum(rank[2][at] for rank in found)
        assert torch.isfinite(total).all(), name
        # Where one process is itself further from the truth than that, as with tiny gradients: no further than twice.
        own = float((right - truth).norm() / truth.norm().clamp_min(1e-30))
        assert (total - truth).norm() <= max(1e-5, 2 * own) * truth.norm(), name
        if kind == "llama":
            assert (total - right).norm() <= 1e-5 * right.norm(), name


@pytest.mark.parametrize("layout", first(2, LAYOUTS))
def test_gradients_of_a_llama_over_four_ranks(layout):
    check_step("llama", 4, layout)


@pytest.mark.parametrize(
    ("kind", "world", "layout", "length"),
    [
        ("qwen2", 3, "striped", 37),
        sweep("qwen3", 2, "zigzag", 23),
        sweep("mistral", 4, "zigzag", 37),
        sweep("gpt_oss", 4, "striped", 37),
    ],
)
def test_gradients_of_the_others(kind, world, layout, length):
    check_step(kind, world, layout, length)


@pytest.mark.parametrize("schedule", ["ring", sweep("allgather")])
def test_gradients_under_a_schedule(schedule):
    check_step("llama", 3, "zigzag", schedule=schedule)


def test_as_many_tokens_as_ranks():
    check_step("llama", 4, "zigzag", length=9)
    check_step("llama", 5, "zigzag", length=9)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    covering_rows({"kind": KINDS, "world": [1, 3, 4], "layout": list(LAYOUTS), "length": [9, 37, 64]}),
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_gradients_everywhere(case):
    check_step(**case)


def test_without_labels_there_are_logits_and_no_loss():
    ids, _ = batch()

    def rank(comm):
        ranks = am.ContextParallel(comm)
        part = shard_inputs(ranks, ids)
        assert set(part) == {"input_ids", "position_ids", "attention_mask", "use_cache", "attention_pass"}
        with torch.no_grad():
            out = attnmesh_model("gpt_oss")(**part)
        assert out.loss is None
        return ranks.unshard(out.logits, 1, LENGTH)

    with torch.no_grad():
        expected = transformers_model("gpt_oss")(input_ids=ids).logits
    for found in on_virtual_ranks(3, rank):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_labels_are_those_of_the_next_token():
    ids = torch.arange(8)[None] + 10
    labels = ids.clone()
    labels[0, 4] = -100

    def rank(comm):
        return shard_inputs(am.ContextParallel(comm, layout=am.Striped()), ids.int(), labels)

    first, second = on_virtual_ranks(2, rank)
    assert first["input_ids"].tolist() == [[10, 12, 14, 16]]
    assert first["position_ids"].tolist() == [[0, 2, 4, 6]]
    assert first["shift_labels"].tolist() == [[11, 13, 15, 17]]
    assert second["shift_labels"].tolist() == [[12, -100, 16, -100]]
    assert first["num_items_in_batch"] == second["num_items_in_batch"] == 6


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        (
            torch.zeros(1, 3, dtype=torch.long),
            None,
            r"input_ids must have at least one token per rank \(4\), got \[1, 3\]",
        ),
        (
            torch.zeros(8, dtype=torch.long),
            None,
            r"input_ids must be .* \[batch, tokens\], got torch.int64 \[8\]",
        ),
        (torch.zeros(1, 8), None, r"input_ids must be .* \[batch, tokens\], got torch.float32 \[1, 8\]"),
        ([[1, 2, 3, 4]], None, r"input_ids must be .* \[batch, tokens\], got list"),
        (
            torch.zeros(1, 8).long(),
            torch.zeros(1, 7).long(),
            r"labels must have the shape of input_ids, \[1, 8\], .*, got \[1, 7\]",
        ),
        (torch.zeros(1, 8).long(), torch.zeros(1, 8), r"labels must be .* \[batch, tokens\], got torch.float32"),
    ],
)
def test_what_cannot_be_spread_is_refused(ids, labels, message):
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            shard_inputs(am.ContextParallel(comm), ids, labels)

    on_virtual_ranks(4, rank)


# Every rank passes the same batch: what differs is refused on every rank.

PER_TOKEN = {
    "input_ids": torch.arange(16).view(2, 8),
    "labels": torch.arange(16).view(2, 8),
    "position_ids": torch.arange(8)[None],
    "attention_mask": torch.ones(2, 8, dtype=torch.long),
    "weights": torch.ones(2, 8),
    "pixel_embeds": torch.ones(2, 8, 3, dtype=torch.bfloat16),
    "num_items_in_batch": torch.tensor(14),
}


def first_error(comm, *others):
    """The first error of calls with the tensors of `others`, one after the other, on the last rank."""
    cp = am.ContextParallel(comm)
    for other in others:
        last = comm.rank == comm.world - 1
        try:
            shard_inputs(cp, **(PER_TOKEN | (other if last else {})))
        except ValueError as error:
            return str(error)
    return None


def changed(name):
    if name == "attention_mask":  # of which only 0 and 1 are allowed
        return {name: torch.tensor([[1] * 8, [1] * 7 + [0]])}
    return {name: PER_TOKEN[name] + (PER_TOKEN[name] * 0 + 1)}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_batch_that_differs_between_ranks_is_refused_on_every_rank(name):
    for texts in on_virtual_ranks(2, lambda comm: first_error(comm, {}, {}, changed(name))):
        assert f"checksum of {name} is " in texts


@pytest.mark.parametrize("other", [torch.ones(2, 8, 1), torch.ones(2, 8).double()], ids=["shape", "dtype"])
def test_other_tensors_per_token_are_refused_on_every_rank(other):
    for text in on_virtual_ranks(2, lambda comm: first_error(comm, {}, {"weights": other})):
        assert "ranks disagree: tensors per token is " in text


def test_a_batch_on_a_device_is_compared_in_the_first_call_and_in_every_hundredth(monkeypatch):
    # On the host, a size of 0 stands for a device: nothing is read in every call.
    monkeypatch.setattr("attnmesh.parallel.checksums._READ_ALWAYS", 0)
    other = changed("weights")
    assert all(on_virtual_ranks(2, lambda comm: first_error(comm, other)))
    assert not any(on_virtual_ranks(2, lambda comm: first_error(comm, *[{}] * 99, other)))
    assert all(on_virtual_ranks(2, lambda comm: first_error(comm, *[{}] * 100, other)))
