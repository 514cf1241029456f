"""A training step of a tiny Llama over two NCCL ranks: loss and all gradients are those of one process.

The ranks share one GPU. What DDP, FSDP2 and autocast add is tested with one kind of batch.
"""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import attnmesh as am
from attnmesh.testing.errors import ROUNDING, relative_error
from attnmesh.training.batch import shard_inputs
from attnmesh.training.data_parallel import GradientReduction

pytest.importorskip("transformers")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

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


def one_process(kind: str, dtype: torch.dtype, device: str, autocast: bool = False) -> list[torch.Tensor]:
    model = llama(dtype, device, "eager")
    inputs = {name: x.to(device) for name, x in batch(kind).items()}
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(**inputs, use_cache=False).loss
    return gradients(model, loss)


def steps(comm, cases, device: str) -> list[list[torch.Tensor]]:
    """A rank's part of every case."""
    found = []
    for kind, dtype, schedule in cases:
        model = llama(dtype, device, "attnmesh")
        inputs = {name: x.to(device) for name, x in batch(kind).items()}
        ranks = am.ContextParallel(comm, schedule=schedule)
        found.append(gradients(model, model(**shard_inputs(ranks, **inputs)).loss))
    return found


def wrapped_steps(comm, device: str) -> dict[str, list[torch.Tensor]]:
    """The loss and the gradients of all ranks, as DDP and FSDP2 reduce them, in float32 and under autocast."""
    found = {}
    ranks = am.ContextParallel(comm)
    inputs = {name: x.to(device) for name, x in batch("packed").items()}
    for how in ("DDP", "FSDP2"):
        for autocast in (False, True):
            model = llama(torch.float32, device, "attnmesh")
            if how == "DDP":
                model = DistributedDataParallel(model)
            else:
                for layer in model.model.layers:
                    fully_shard(layer, mesh=init_device_mesh(device, (comm.world,)))
                fully_shard(model, mesh=init_device_mesh(device, (comm.world,)))
            reduction = GradientReduction(model, ranks)
            items = reduction.num_items(inputs["labels"])
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = model(**shard_inputs(ranks, **inputs, num_items_in_batch=items)).loss
            loss.backward()
            grads = [getattr(w.grad, "full_tensor", lambda w=w: w.grad)().double().cpu() for w in model.parameters()]
            found[f"{how}, autocast={autocast}"] = [reduction.loss(loss).double().cpu(), *grads]
    return found


def check(name: str, found: list[torch.Tensor], exact: list[torch.Tensor], plain: list[torch.Tensor], dtype) -> None:
    """Assert that the loss and every gradient are at most twice as far off as those of one process."""
    names = ["loss", *(name for name, _ in llama(torch.float32, "cpu", "eager").named_parameters())]
    for weight, value, truth, other in zip(names, found, exact, plain, strict=True):
        error, bound = relative_error(value, truth), 2 * relative_error(other, truth) + ROUNDING[dtype]
        print(f"{name}, {weight}: {error:.2g} of {bound:.2g}")
        assert error <= bound, f"{name}, {weight}"


def test_losses_and_gradients_are_those_of_one_process(nccl_ranks):
    cases = [
        (kind, dtype, schedule)
        for dtype in (torch.float32, torch.bfloat16)
        for kind, schedule in (("causal", "ring"), ("packed", "auto"), ("padded", "allgather"))
    ]
    ranks = nccl_ranks(2, steps, cases, "cuda", timeout=200)
    for at, (kind, dtype, schedule) in enumerate(cases):
        found = [sum(parts) for parts in zip(*(rank[at] for rank in ranks), strict=True)]
        exact, plain = one_process(kind, torch.float64, "cpu"), one_process(kind, dtype, "cuda")
        check(f"{dtype}, {kind}, {schedule}", found, exact, plain, dtype)


def test_wrapped_models_have_the_gradients_of_one_process_on_every_rank(nccl_ranks):
    exact = one_process("packed", torch.float64, "cpu")
    ranks = nccl_ranks(2, wrapped_steps, "cuda", timeout=200)
    for autocast, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        plain = one_process("packed", torch.float32, "cuda", autocast)
        for at, how in itertools.product(range(2), ("DDP", "FSDP2")):
            check(f"rank {at}, {how}", ranks[at][f"{how}, autocast={autocast}"], exact, plain, dtype)
