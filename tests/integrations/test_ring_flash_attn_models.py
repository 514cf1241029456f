"""ring_flash_attn's adapter for Transformers: a model over ranks computes what it computes for each document alone."""

import copy
import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh import ring_flash_attn
from attnmesh.ring_flash_attn import huggingface
from helpers.cases import sweep
from helpers.models import random_ids, transformers_model
from helpers.processes import run_processes

BOUNDS = (0, 9, 29, 32, 41)  # documents over ranks whose number does not divide the tokens

TOLERANCE = 1e-5  # Transformers' softmax is in float32


@pytest.fixture(autouse=True)
def restored():
    """Undo the substitution after a test."""
    yield
    ring_flash_attn.use_ring_attn(False)
    huggingface._of_process.__dict__.clear()


def row():
    """Tokens [1, S], positions that restart, and labels of the next token of the same document."""
    ids = torch.tensor([random_ids(BOUNDS[-1], 5)])
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(BOUNDS)])[None]
    labels = ids.roll(-1, 1)
    labels[:, [b - 1 for b in BOUNDS[1:]]] = -100
    return ids, positions, labels


def loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def each_document_alone(kind):
    """The logits of all documents, each in a pass of its own without ranks, and the gradients of all weights."""
    model = transformers_model(kind, torch.float64)
    ids, _, labels = row()
    logits = torch.cat([model(input_ids=ids[:, a:b]).logits for a, b in pairwise(BOUNDS)], 1)
    grads = torch.autograd.grad(loss(logits, labels), list(model.parameters()), allow_unused=True)
    return logits.detach(), grads


def substituted_model(kind, implementation, group):
    """The model made after the substitution, with a flash implementation that needs the package flash_attn."""
    from transformers import AutoModelForCausalLM

    ring_flash_attn.substitute_hf_flash_attn(group, heads_k_stride=1)
    original = transformers_model(kind, torch.float64)
    config = copy.deepcopy(original.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(torch.float64)
    model.load_state_dict(original.state_dict())
    return model


def training_step(comm, kind, implementation, *, checkpointing=False):
    """This rank's logits, and its part of all gradients."""
    model = substituted_model(kind, implementation, comm).train()
    if kind == "gpt_oss":
        model.set_experts_implementation("eager")  # torch's grouped product does not know float64
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ring_flash_attn.update_ring_flash_attn_params(torch.tensor(BOUNDS, dtype=torch.int32), comm)
    ids, positions, labels = (x.tensor_split(comm.world, 1)[comm.rank] for x in row())
    logits = model(input_ids=ids, position_ids=positions).logits
    # The next batch: what is recomputed in the backward still has the documents of its forward.
    ring_flash_attn.update_ring_flash_attn_params(torch.tensor([0, BOUNDS[-1]]), comm)
    with torch.autograd.set_multithreading_enabled(False):  # a virtual rank is one thread
        loss(logits, labels).backward()
    return logits.detach(), [weight.grad for weight in model.parameters()]


def assert_one_process(kind, ranks):
    logits, grads = each_document_alone(kind)
    assert torch.allclose(torch.cat([mine for mine, _ in ranks], 1), logits, atol=TOLERANCE)
    for exact, *parts in zip(grads, *(mine for _, mine in ranks), strict=True):
        if exact is not None:
            assert torch.allclose(sum(parts), exact, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("llama", "flash_attention_2"), sweep("gpt_oss", "flash_attention_3"), sweep("mistral", "attnmesh")],
)
def test_logits_and_gradients_are_those_of_each_document_alone(kind, implementation):
    checkpointing = kind == "llama"
    ranks = am.run_virtual(3, lambda comm: training_step(comm, kind, implementation, checkpointing=checkpointing))
    assert_one_process(kind, ranks)


def messages(world, program):
    def rank(comm):
        try:
            program(comm)
        except ValueError as error:
            return str(error)
        return "nothing was raised"

    return am.run_virtual(world, rank, timeout=30)


def test_what_is_not_served_raises_on_every_rank():
    ids, positions, _ = row()
    whole = torch.tensor(BOUNDS)
    model = substituted_model("llama", "flash_attention_2", None).eval()
    dropout = copy.deepcopy(model).train()
    for layer in dropout.model.layers:
        layer.self_attn.attention_dropout = 0.1

    def call(comm, *, cu_seqlens=whole, stride=1, called=model, other=None, **inputs):
        ring_flash_attn.substitute_hf_flash_attn(comm if other is None else am.comm_from(None), stride)
        if cu_seqlens is not None:
            ring_flash_attn.update_ring_flash_attn_params(cu_seqlens, comm)
        mine = {"input_ids": ids, "position_ids": positions} | inputs
        called(**{n: None if x is None else x.tensor_split(comm.world, 1)[comm.rank] for n, x in mine.items()})

    padding = torch.ones_like(ids).index_fill(1, torch.tensor([BOUNDS[-1] - 1]), 0)
    row_of_two = {"input_ids": ids.expand(2, -1), "position_ids": positions}
    cases = [
        ({"cu_seqlens": None}, r"update_ring_flash_attn_params\(cu_seqlens, group\) must be called before the model"),
        (
            {"position_ids": None},
            r"position_ids must be the 20 positions of this rank of the 41 of cu_seqlens, .*\[0, 1, 2\]",
        ),
        ({"position_ids": positions + 1}, "position_ids must be the 2. positions of this rank"),
        ({"attention_mask": padding}, "attention_mask must not hide tokens: give padding a document of its own"),
        (row_of_two, r"input_ids must be one row of packed documents \[1, tokens\], got 2 rows"),
        (
            {"cu_seqlens": torch.tensor([0, 40])},
            r"the 20 positions of this rank of the 40 of cu_seqlens, .* \[1, 21\]",
        ),
        ({"cu_seqlens": torch.tensor([0, 1])}, "cu_seqlens must end with at least one token per rank, 2, got 1"),
        ({"cu_seqlens": torch.tensor([1, 41])}, "cu_seqlens must begin with 0"),
        ({"stride": 0}, "heads_k_stride must be an integer >= 1, got 0"),
        ({"stride": 3}, "heads_k_stride must divide the 2 kv heads, got 3"),
        ({"called": dropout}, "attention dropout must be 0, got 0.1"),
    ]
    for wrong, words in cases:
        for message in messages(2, lambda comm, wrong=wrong: call(comm, **wrong)):
            assert re.search(words, message), (wrong, message)
    padded = positions.index_fill(1, torch.arange(38, BOUNDS[-1]), 0)  # as padding at the end of a row has them
    for good in ({}, {"position_ids": torch.arange(BOUNDS[-1])[None]}, {"position_ids": padded}):
        assert messages(2, lambda comm, good=good: call(comm, **good)) == ["nothing was raised"] * 2


def test_the_substitution_can_be_undone():
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = substituted_model("llama", "flash_attention_2", None)
    flash, own = (ALL_ATTENTION_FUNCTIONS[name] for name in ("flash_attention_2", "attnmesh"))
    assert flash is own
    ring_flash_attn.use_ring_attn(False)
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"].__module__.startswith("transformers")
    with pytest.raises(ImportError, match="FlashAttention2"):
        AutoModelForCausalLM.from_config(model.config, attn_implementation="flash_attention_2")
    model.set_attn_implementation("attnmesh")
    ids = row()[0]
    expected = transformers_model("llama", torch.float64)(input_ids=ids).logits
    assert torch.allclose(model.eval()(input_ids=ids).logits, expected, atol=TOLERANCE)


def one_of_processes(comm):
    group = dist.new_group([0, 1])
    step = training_step(am.comm_from(group), "llama", "flash_attention_2", checkpointing=True)
    ring_flash_attn.update_ring_flash_attn_params(torch.tensor(BOUNDS), None)  # another group
    try:
        huggingface._of_process.checked_pass()
    except ValueError as error:
        return step, str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.sweep  # two processes that import Transformers
def test_over_processes():
    ranks = run_processes(2, one_of_processes)
    assert_one_process("llama", [step for step, _ in ranks])
    for _, message in ranks:
        assert "process_group of update_ring_flash_attn_params must be the group of substitute_hf_flash_attn" in message
