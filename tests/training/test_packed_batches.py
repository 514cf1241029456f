"""Packed and padded batches over ranks: loss, logits and every gradient equal those of single documents in float64."""

import copy
from dataclasses import replace

import pytest
import torch

import attnmesh as am
from attnmesh.core.masks import Chunked, packing_of, packing_of_numbers
from attnmesh.training.batch import shard_inputs
from helpers.cases import in_turn
from helpers.models import KINDS, attnmesh_model, on_virtual_ranks, random_ids, transformers_model
from helpers.packed_batches import ROWS, batch, check


def test_packed_and_padded_rows_equal_single_documents():
    check("llama", 3)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "world", "balance"), in_turn(KINDS, [1, 4, 5, 2, 3], [True, False]))
def test_packed_and_padded_rows_everywhere(kind, world, balance):
    check(kind, world, balance=balance)
    check(kind, world, rows=(((0, 20), (20, 37)),) * 2, balance=balance)


def test_document_lengths_are_position_ids_that_restart():
    rows = (ROWS[0], ((5, 12), (12, 37)))
    ids, labels, positions, real = batch(rows)
    lengths = [[end - begin for begin, end in row] for row in rows]

    def rank(comm):
        cp = am.ContextParallel(comm)
        given = shard_inputs(cp, ids, labels, attention_mask=real, document_lengths=lengths)
        other = shard_inputs(cp, ids, labels, attention_mask=real, position_ids=positions)
        assert given["attention_pass"].packing == other["attention_pass"].packing
        return all(torch.equal(given[name], other[name]) for name in ("input_ids", "position_ids", "labels"))

    assert all(on_virtual_ranks(2, rank))


def test_a_rank_with_ignored_labels_only_has_the_loss_zero():
    ids = torch.tensor([random_ids(16, 1)])
    labels = ids.clone()
    labels[:, 5:] = -100  # everything that rank 1 of a contiguous layout predicts

    def rank(comm):
        cp = am.ContextParallel(comm, layout=am.Contiguous())
        losses = [attnmesh_model("llama")(**shard_inputs(cp, ids, given)).loss for given in (labels, labels * 0 - 100)]
        return [float(loss.detach()) for loss in losses]

    first, second = on_virtual_ranks(2, rank)
    assert first[0] > 0
    assert [first[1], *second] == [0, 0, 0]


def test_packed_rows_have_a_layout_that_balances_their_work():
    lengths = [300, 20, 80, 600, 24]
    ids = torch.zeros(1, 1024, dtype=torch.long)

    def rank(comm):
        found = shard_inputs(am.ContextParallel(comm), ids, document_lengths=[lengths])["attention_pass"]
        kept = shard_inputs(am.ContextParallel(comm), ids, document_lengths=[lengths], balance=False)["attention_pass"]
        plain = shard_inputs(am.ContextParallel(comm), ids)["attention_pass"]
        assert plain.cp.layout == kept.cp.layout == am.Zigzag()
        starts = torch.repeat_interleave(torch.tensor([0, 300, 320, 400, 1000]), torch.tensor(lengths))
        return [int((at - starts[at] + 1).sum()) for at in (found.cp.positions(1024), kept.cp.positions(1024))]

    work = torch.tensor(on_virtual_ranks(4, rank)).double()
    balanced, zigzag = (work.max(0).values / work.mean(0)).tolist()
    assert balanced < 1.02 < zigzag


def test_the_schedule_of_the_first_packing_is_kept(monkeypatch):
    """Comparing all schedules takes longer than a plan, and packings differ from batch to batch."""
    import attnmesh.planner.auto as auto

    chosen = []
    choose = auto.choose_schedule
    monkeypatch.setattr(auto, "choose_schedule", lambda *call: chosen.append(1) or choose(*call))
    q, k = torch.randn(1, 4, 512, 8), torch.randn(1, 2, 512, 8)

    def rank(comm):
        cp = am.ContextParallel(comm)
        for lengths in ([100, 412], [1, 200, 311], [512]):
            found = shard_inputs(cp, torch.zeros(1, 512, dtype=torch.long), document_lengths=[lengths])[
                "attention_pass"
            ]
            for layer in (am.Causal(), am.SlidingWindow(7)):
                local = [found.shard(x, 2) for x in (q, k, k)]
                out = found.unshard(found.attend(0, *local, mask=layer, scale=0.3, sinks=None), 2)
                wanted = am.attention(q, k, k, mask=layer & am.Documents(lengths), scale=0.3)
                torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        return True

    assert all(on_virtual_ranks(2, rank))
    assert len(chosen) == 2 * 2 + 2 * 2  # two ranks, two kinds of layers: one packing, and a row that is not packed


def test_chunks_begin_after_the_padding():
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10]).bool()
    mask = packing_of(None, real, (2, 10)).apply(Chunked(4))
    at = torch.arange(10)
    left = torch.tensor([3, 0])[:, None]
    chunk = (at - left) // 4
    wanted = (chunk[:, :, None] == chunk[:, None, :]) & (at[:, None] >= at) & real[:, :, None] & real[:, None, :]
    assert torch.equal(mask.visible(at[:, None], at[None, :]), wanted)


def test_more_tensors_per_token_and_a_count_of_items_are_taken():
    ids = torch.arange(8)[None] + 10
    weights = torch.rand(1, 8, 3)

    def rank(comm):
        cp = am.ContextParallel(comm, layout=am.Striped())
        return shard_inputs(cp, ids, ids, num_items_in_batch=40, token_type_ids=ids, weights=weights)

    for at, found in enumerate(on_virtual_ranks(2, rank)):
        assert found["num_items_in_batch"] == 40
        assert torch.equal(found["token_type_ids"], ids[:, at::2])
        assert torch.equal(found["weights"], weights[:, at::2])


def test_log_probabilities_are_differentiable():
    ids = torch.tensor([random_ids(13, 1), random_ids(13, 2)])
    factors = torch.randn(2, 13, dtype=torch.float64)
    model = transformers_model("qwen3", torch.float64)
    chosen = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    wanted = torch.autograd.grad((chosen * factors[:, :-1]).sum(), list(model.parameters()))

    def rank(comm):
        model = copy.deepcopy(attnmesh_model("qwen3"))
        inputs = shard_inputs(am.ContextParallel(comm), ids, ids)
        with torch.autograd.set_multithreading_enabled(False):
            log_probs = am.gather_log_probs(inputs, model(**inputs).logits)
            ((log_probs * factors).sum() / comm.world).backward()  # every rank computes the same loss
        return [weight.grad for weight in model.parameters()]

    found = on_virtual_ranks(3, rank)
    for parts, right in zip(zip(*found, strict=True), wanted, strict=True):
        assert (sum(parts) - right).norm() <= 2e-5 * right.norm()


# What is refused, on every rank.


def refused(message, *, world=2, kind="llama", **changes):
    """Check that every rank raises this message for a batch of which some tensors are changed."""
    ids, labels, positions, real = batch()
    given = {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": real}

    def rank(comm):
        mine = {name: x(comm.rank) if callable(x) else x for name, x in (given | changes).items()}
        with pytest.raises(ValueError, match=message):
            shard_inputs(am.ContextParallel(comm), **mine)
        return True

    assert all(on_virtual_ranks(world, rank))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"attention_mask must be 0 and 1", {"attention_mask": torch.full((4, 37), 3)}),
        (r"attention_mask must have the shape of input_ids", {"attention_mask": torch.ones(4, 1, 37, 37)}),
        (r"attention_mask must hide .* row 3 with hidden tokens 9 to 11 inside", {
            "position_ids": None, "attention_mask": torch.ones(4, 37).index_put(
                (torch.tensor([3, 3, 3]), torch.tensor([9, 10, 11])), torch.zeros(3)),
        }),
        (r"position_ids must have the shape .* \[4, 37\], or \[1, 37\], got \[3, 37\]", {
            "position_ids": torch.zeros(3, 37, dtype=torch.long)}),
        (r"position_ids must be an int32 or int64 tensor \[batch, tokens\], got torch.int64 \[3, 4, 37\]", {
            "position_ids": torch.zeros(3, 4, 37, dtype=torch.long)}),
        (r"document_lengths must be None if position_ids are given", {"document_lengths": [[37]] * 4}),
        (r"document_lengths\[0\] must add up to the 37 tokens .* add up to 36", {
            "document_lengths": [[36]] * 4, "position_ids": None, "attention_mask": None}),
        (r"document_lengths must be a list of 4 lists of positive", {
            "document_lengths": [[37], [37]], "position_ids": None, "attention_mask": None}),
        (r"num_items_in_batch must be an integer", {"num_items_in_batch": "all"}),
        (r"weights must be a tensor \[4, 37\] and more dimensions, got \[37\]", {"weights": torch.ones(37)}),
    ],
)  # fmt: skip
def test_bad_batches_are_refused(message, changes):
    refused(message, **changes)


def test_ranks_with_different_batches_are_refused():
    ids, _, positions, real = batch()
    refused("ranks disagree: packing is", position_ids=lambda rank: positions if rank else None, attention_mask=None)
    refused("ranks disagree: packing is", attention_mask=lambda rank: real if rank else None)
    refused("ranks disagree: checksum of input_ids is", input_ids=lambda rank: ids + rank)
    refused("ranks disagree: checksum of labels is", labels=lambda rank: ids + rank)
    refused("ranks disagree: num_items_in_batch is", num_items_in_batch=lambda rank: 40 + rank)
    refused("must have the shape of input_ids", input_ids=lambda rank: ids[:, : 37 - rank])


def test_tensors_that_replace_those_of_shard_inputs_are_refused_on_every_rank():
    ids, labels, positions, _ = batch()

    def rank(comm):
        model = attnmesh_model("llama")
        inputs = shard_inputs(am.ContextParallel(comm, layout=am.Contiguous()), ids, labels)
        whole = inputs["attention_pass"].shard(positions)  # restarts on one rank or on several
        with pytest.raises(ValueError, match="position_ids must be what shard_inputs returned"):
            model(**inputs | {"position_ids": whole})
        hidden = torch.ones_like(inputs["attention_pass"].attention_mask)
        hidden[:, -1] = comm.rank == 0
        with pytest.raises(ValueError, match="attention_mask must be what shard_inputs returned"):
            model(**inputs | {"attention_mask": hidden})
        copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        return torch.equal(model(**copies).loss, model(**inputs).loss)

    assert all(on_virtual_ranks(2, rank))


def test_autocast_casts_as_the_attention_of_torch_does():
    ids = torch.tensor([random_ids(24, 3)])

    def rank(comm):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inputs = shard_inputs(am.ContextParallel(comm), ids, ids)
            out = attnmesh_model("llama")(**inputs)
        return out.loss.detach(), inputs["attention_pass"].unshard(out.logits.detach())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        right = transformers_model("llama")(input_ids=ids, labels=ids)
        alone = attnmesh_model("llama")(input_ids=ids, labels=ids)
    exact = transformers_model("llama", torch.float64)(input_ids=ids, labels=ids)
    own = (right.logits - exact.logits).norm()
    found = on_virtual_ranks(2, rank)
    for logits in (alone.logits, *(rank[1] for rank in found)):
        assert logits.dtype == right.logits.dtype
        assert (logits - exact.logits).norm() <= 1.5 * own
    torch.testing.assert_close(sum(rank[0] for rank in found), right.loss, rtol=5e-2, atol=0)


def test_numbers_of_documents_are_the_packing():
    starts = torch.zeros(3, 12, dtype=torch.bool)
    starts[:, 0] = starts[0, 5] = starts[1, 3] = starts[1, 7] = True
    real = torch.ones(3, 12, dtype=torch.bool)
    real[0, 5:7] = real[1, 10:] = real[2, :4] = False
    for given in ((starts, None), (starts, real), (None, real)):
        packing = packing_of(*given, (3, 12))
        computed = replace(packing, known_numbers=None)
        for numbers in (packing.numbers(), computed.numbers()):
            assert packing_of_numbers(numbers) == packing
    assert packing_of(None, None, (3, 12)).numbers() is None
