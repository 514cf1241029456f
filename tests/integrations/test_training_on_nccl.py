"""A training step of a tiny Llama over two NCCL ranks: loss and all gradients are those of one process."""

import pytest
import torch

import attnmesh as am
from attnmesh.integrations.sharded_batch import shard_inputs
from attnmesh.testing.errors import ROUNDING, relative_error
from helpers.processes import run_processes

pytest.importorskip("transformers")
pytestmark = pytest.mark.cuda

LENGTH = 301
DOCUMENTS = [120, 7, 93, 81]


def llama(dtype: torch.dtype, device: str, attention: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    am.register_attention()
    config = LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype).train()


def batch(kind: str) -> dict[str, torch.Tensor]:
    """Tokens, labels and what packs or pads them."""
    dice = torch.Generator().manual_seed(1)
    ids = torch.randint(101, (2, LENGTH), generator=dice)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(n) for n in DOCUMENTS]).expand(2, -1).contiguous()
        for begin in (120, 127, 220):
            inputs["labels"][:, begin] = -100  # a document's first token is not predicted from the one before
    if kind == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, 200:] = 0
        inputs["labels"][1, 200:] = -100
    return inputs


def gradients(model, loss: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of all weights."""
    loss.backward()
    return [loss.detach().double().cpu(), *(weight.grad.double().cpu() for weight in model.parameters())]


def one_process(kind: str, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    model = llama(dtype, device, "eager")
    return gradients(model, model(**{name: x.to(device) for name, x in batch(kind).items()}, use_cache=False).loss)


def steps(comm, cases) -> list[list[torch.Tensor]]:
    """A rank's part of every case."""
    found = []
    for kind, dtype, schedule in cases:
        model = llama(dtype, "cuda", "attnmesh")
        inputs = {name: x.cuda() for name, x in batch(kind).items()}
        ranks = am.ContextParallel(comm, schedule=schedule)
        found.append(gradients(model, model(**shard_inputs(ranks, **inputs)).loss))
    return found


def test_losses_and_gradients_are_those_of_one_process():
    cases = [
        (kind, dtype, schedule)
        for dtype in (torch.float32, torch.bfloat16)
        for kind, schedule in (("causal", "ring"), ("packed", "auto"), ("padded", "allgather"))
    ]
    ranks = run_processes(2, steps, cases, timeout=200, backend="nccl")
    names = ["loss", *(name for name, _ in llama(torch.float32, "cpu", "eager").named_parameters())]
    for at, (kind, dtype, schedule) in enumerate(cases):
        exact, plain = one_process(kind, torch.float64, "cpu"), one_process(kind, dtype, "cuda")
        for which, name in enumerate(names):
            found = sum(rank[at][which] for rank in ranks)
            error = relative_error(found, exact[which])
            bound = 2 * relative_error(plain[which], exact[which]) + ROUNDING[dtype]
            print(f"{dtype} {kind} {schedule} {name}: {error:.2g} of {bound:.2g}")
            assert error <= bound, f"{dtype} {kind} {schedule} {name}"
