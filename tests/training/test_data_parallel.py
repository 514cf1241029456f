"""Own training loops with DDP and FSDP2 beside context parallelism: losses and gradients of one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from attnmesh import Causal, ContextParallel, register_attention, shard_inputs
from attnmesh.comm import Comm, SoloComm
from attnmesh.integrations.sharded_pass import ShardedPass
from attnmesh.training.batch import gather_log_probs
from attnmesh.training.data_parallel import GradientReduction
from helpers.training import run_ranks

VOCABULARY, WIDTH, HEADS, LENGTH = 23, 16, 2, 20


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor, attention_pass: ShardedPass | Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if isinstance(attention_pass, ShardedPass):
            out = attention_pass.attend(0, q, k, v, mask=Causal(), scale=0.3, sinks=None)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_pass, scale=0.3).nan_to_num()
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """A language model that takes what `shard_inputs` returns, or a mask of pairs as `attention_pass`."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute  # reentrant or not
        self.embed, self.at = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_pass: Any, **loss: Any
    ) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids) + self.at(position_ids)
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x, attention_pass)
            else:
                x = checkpoint(layer, x, attention_pass, use_reentrant=self.recompute)
        logits = self.head(x)
        shifted = loss["shift_labels"]
        scores = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(scores, shifted.flatten(), ignore_index=-100, reduction="sum")
        return total / loss["num_items_in_batch"], logits


def model(recompute: bool | None = None, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model(recompute).to(dtype)


def batch(seed: int) -> dict[str, Tensor]:
    """Two rows, one packed and one padded; the number of labels depends on the seed."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=made)
    cut, end = 5 + seed % 7, LENGTH - 1 - seed % 5
    positions = torch.stack([torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]), torch.arange(LENGTH)])
    real = torch.ones(2, LENGTH, dtype=torch.int64)
    real[1, end:] = 0
    labels = ids.masked_fill(real == 0, -100)
    labels[0, cut] = -100  # the first token of a document follows from nothing
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": real}


def alone(one: nn.Module, batches: list[dict[str, Tensor]], autocast: bool = False) -> dict[str, Tensor]:
    """The loss over all tokens of all batches and its gradients, from one process and masks of pairs."""
    one.zero_grad()
    items = sum((each["labels"][:, 1:] != -100).sum() for each in batches)
    loss = torch.zeros(())
    for each in batches:
        documents = (each["position_ids"] == 0).cumsum(1)
        pairs = (documents[:, :, None] == documents[:, None, :]) & (each["attention_mask"][:, None, :] == 1)
        visible = (pairs & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[:, None]
        shifted = F.pad(each["labels"], (0, 1), value=-100)[:, 1:]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            share, _ = one(
                each["input_ids"], each["position_ids"], visible, shift_labels=shifted, num_items_in_batch=items
            )
        share.backward()
        loss = loss + share.detach()
    return {"loss": loss, **gradients(one)}


def gradients(one: nn.Module) -> dict[str, Tensor]:
    found = {name.removeprefix("module."): p.grad for name, p in one.named_parameters()}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str, tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        error = (found[name].double() - x.double()).abs().max() / x.double().abs().max().clamp(min=1e-3)
        assert error <= tolerance, f"{what}, {name}: {error}"


def step(
    wrapped: nn.Module, cp: ContextParallel, reduction: GradientReduction, batches: list[dict[str, Tensor]],
    autocast: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """The loss and the gradients of a step over this data rank's batches, which accumulate."""
    wrapped.zero_grad()
    items = reduction.num_items([each["labels"] for each in batches])
    loss = torch.zeros(())
    for each in batches:
        last = each is batches[-1]
        with synchronized(wrapped, last):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                share, _ = wrapped(**shard_inputs(cp, num_items_in_batch=items, **each))
            share.backward()
        loss = loss + share.detach()
    return {"loss": reduction.loss(loss), **gradients(wrapped)}


@contextmanager
def synchronized(wrapped: nn.Module, last: bool) -> Iterator[None]:
    if isinstance(wrapped, DistributedDataParallel):
        with nullcontext() if last else wrapped.no_sync():
            yield
    else:
        wrapped.set_requires_gradient_sync(last)
        yield


def sharded(one: Model, mesh: Any) -> Model:
    """FSDP2."""
    for layer in one.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(one, mesh=mesh)


# Two data ranks of two context-parallel ranks each.


def two_by_two(comm: Comm, full: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, data_rank = ContextParallel(mesh["cp"]), mesh.get_local_rank("dp")
    flat = mesh._flatten("dp_shard_cp")
    every = [[batch(0), batch(1)], [batch(2), batch(3)]]  # of each data rank, in two accumulation steps
    together = [*every[0], *every[1]]
    expected = alone(model(), together)
    wrappers: dict[str, Callable[[Model], nn.Module]] = {
        "ddp": DistributedDataParallel,
        "fsdp2": lambda one: sharded(one, flat),
        "fsdp2 of two dimensions": lambda one: sharded(one, mesh),
    }
    for name, wrap in wrappers.items():
        wrapped = wrap(model())
        reduction = GradientReduction(wrapped, cp)
        assert reduction.data_ranks == 2
        for _ in range(2):  # the second step finds nothing of the first
            assert_same(step(wrapped, cp, reduction, every[data_rank]), expected, name)
        if full:
            for recompute in (False, True):
                again = wrap(model(recompute))
                found = step(again, cp, GradientReduction(again, cp), every[data_rank])
                assert_same(found, expected, f"{name}, checkpoints, reentrant={recompute}")
            low = wrap(model(dtype=torch.float32))
            found = step(low, cp, GradientReduction(low, cp), every[data_rank], autocast=True)
            assert_same(found, alone(model(dtype=torch.float32), together, autocast=True), f"{name}, bf16", 3e-2)
    mean_of_data_ranks(cp, data_rank, [each[0] for each in every])
    refusals(mesh, cp, every[data_rank][0])
    if full:
        resume(mesh, cp, every)


def mean_of_data_ranks(cp: ContextParallel, data_rank: int, batches: list[dict[str, Tensor]]) -> None:
    """Losses that are means of data ranks, whose mean is the loss: shares of it, or whole on every rank."""
    each = [alone(model(), [one]) for one in batches]
    expected = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}
    wrapped = DistributedDataParallel(model())
    reduction = GradientReduction(wrapped, cp, losses="mean")
    loss, _ = wrapped(**shard_inputs(cp, **batches[data_rank]))
    loss.backward()
    assert_same({"loss": reduction.loss(loss), **gradients(wrapped)}, expected, "mean")

    wrapped = DistributedDataParallel(model())
    reduction = GradientReduction(wrapped, cp, losses="whole")
    inputs = shard_inputs(cp, **batches[data_rank])
    _, logits = wrapped(**inputs)
    labels = batches[data_rank]["labels"][:, 1:]
    loss = -gather_log_probs(inputs, logits)[:, :-1][labels != -100].mean()
    loss.backward()
    assert_same({"loss": reduction.loss(loss), **gradients(wrapped)}, expected, "whole", 1e-5)


def refusals(mesh: Any, cp: ContextParallel, one: dict[str, Tensor]) -> None:
    forgotten = "construct attnmesh.training.data_parallel.GradientReduction"
    for wrapped in (DistributedDataParallel(model(True)), sharded(model(), mesh._flatten("dp_shard_cp"))):
        with pytest.raises(ValueError, match=forgotten):
            wrapped(**shard_inputs(cp, **one))
        with torch.no_grad():
            wrapped.eval()(**shard_inputs(cp, **one))  # no gradients are reduced
        wrapped.train()
        reduction = GradientReduction(wrapped, cp)
        with pytest.raises(ValueError, match=r"num_items_in_batch=reduction.num_items\(labels\)"):
            wrapped(**shard_inputs(cp, **one))
        with pytest.raises(ValueError, match=r"labels\[0\] must be \[batch, tokens\], got \[3\]"):
            reduction.num_items(torch.ones(3, dtype=torch.int64))
    over_data = DistributedDataParallel(model(), process_group=mesh.get_group("dp"))
    with pytest.raises(ValueError, match="model must be wrapped over all ranks of data and context parallelism"):
        GradientReduction(over_data, cp)
    with pytest.raises(ValueError, match=r"model must be a DistributedDataParallel or .* got Model"):
        GradientReduction(model(), cp)
    with pytest.raises(ValueError, match="losses must be one of tokens, mean, whole, got 'sum'"):
        GradientReduction(over_data, cp, losses="sum")
    other = DistributedDataParallel(model())
    GradientReduction(other, cp)
    with pytest.raises(ValueError, match="model must have no other communication hook"):
        GradientReduction(other, cp, losses="mean")


def resume(mesh: Any, cp: ContextParallel, every: list[list[dict[str, Tensor]]]) -> None:
    """Train, save, and go on with other numbers of context-parallel ranks: the losses of one process."""
    batches = [*every[0], *every[1]]
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        losses.append(alone(whole, batches)["loss"])
        optimizer.step()

    wrapped = sharded(model(), mesh._flatten("dp_shard_cp"))
    reduction, optimizer = GradientReduction(wrapped, cp), torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    found = []
    for _ in range(2):
        found.append(step(wrapped, cp, reduction, every[mesh.get_local_rank("dp")])["loss"])
        optimizer.step()
    folder = [None]
    if dist.get_rank() == 0:
        import tempfile

        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    weights, state = get_state_dict(wrapped, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=Path(folder[0]) / "saved")

    for size in (4, 1):
        again = sharded(model(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard_cp",)))
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
        weights, state = get_state_dict(again, optimizer)
        saved = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=Path(folder[0]) / "saved")
        set_state_dict(again, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        other = ContextParallel(None if size == 4 else SoloComm())
        reduction = GradientReduction(again, other)
        for at in (2, 3):
            mine = batches if size == 4 else [batches[dist.get_rank()]]
            loss = step(again, other, reduction, mine)["loss"]
            assert_same({"loss": loss}, {"loss": losses[at]}, f"resumed with cp={size}, step {at}", 1e-8)
            optimizer.step()
    assert_same({"loss": torch.stack(found)}, {"loss": torch.stack(losses[:2])}, "before saving", 1e-8)


def test_gradients_of_data_and_context_parallelism_are_those_of_one_process():
    run_ranks(4, two_by_two, False, imports=["torch._dynamo"])  # DDP imports it


@pytest.mark.sweep
def test_checkpoints_autocast_and_resuming():
    run_ranks(4, two_by_two, True, imports=["torch._dynamo"])


def transformers_model(comm: Comm) -> None:
    """Wrappers pass the arguments of `shard_inputs` on to a model of Transformers as they are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register_attention()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": HEADS, "num_key_value_heads": 1}

    def llama(attention: str) -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, attn_implementation=attention, **sizes)
        return LlamaForCausalLM(config).double()

    one, cp = batch(4), ContextParallel(comm)
    one["labels"][0, 5 + 4 % 7] = -100
    whole = llama("eager")
    rows = [(0, 0, 9), (0, 9, LENGTH), (1, 0, int(one["attention_mask"][1].sum()))]  # the documents, one by one
    items = (one["labels"][:, 1:] != -100).sum()
    loss = torch.zeros(())
    for row, start, stop in rows:
        part = slice(row, row + 1), slice(start, stop)
        share = whole(one["input_ids"][part], labels=one["labels"][part], num_items_in_batch=items).loss
        share.backward()
        loss = loss + share.detach()
    expected = {"loss": loss, **gradients(whole)}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard_cp",))
    for wrap in (DistributedDataParallel, lambda model: fully_shard(model, mesh=mesh)):
        for compiled, reentrant in ((False, None), (False, True), (False, False), (True, None)):
            inner = llama("attnmesh")
            if reentrant is not None:
                inner.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if compiled:
                inner.compile(backend="aot_eager", fullgraph=wrap is DistributedDataParallel)
            wrapped = wrap(inner)
            reduction = GradientReduction(wrapped, cp)
            loss = wrapped(**shard_inputs(cp, **one)).loss
            loss.backward()
            found = {"loss": reduction.loss(loss), **gradients(wrapped)}
            assert_same(found, expected, f"{wrap}, compiled={compiled}, reentrant={reentrant}", 1e-5)


@pytest.mark.sweep
def test_models_of_transformers():
    pytest.importorskip("transformers")
    run_ranks(2, transformers_model, imports=["torch._dynamo", "transformers"])
