"""Training with a reproducible ContextParallel: the same bits of losses and parameters at any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from attnmesh import (
    Aligned,
    ContextParallel,
    Contiguous,
    Striped,
    Zigzag,
    gather_log_probs,
    register_attention,
    run_virtual,
    shard_inputs,
)  # fmt: skip
from attnmesh.comm import Comm
from attnmesh.core.tree import TreeSum
from attnmesh.integrations import reproducible
from attnmesh.training.data_parallel import GradientReduction
from helpers.training import run_ranks, training_model


def model(kind: str = "llama", **changes: Any) -> Any:
    register_attention()
    found = training_model(kind, **changes)
    found.set_attn_implementation("attnmesh")
    return found


def batch(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


IMPORTS = ("transformers.models.llama.modeling_llama",)
ROWS, LENGTH = 2, 75  # leaves of 16 positions: four whole ones and one of eleven positions in every row


LAYOUT = Aligned(Zigzag(), 16)


def train(comm: Comm, template: Any, layout: Any = LAYOUT, steps: int = 2, **options: Any) -> list[Tensor]:
    """The losses, the gradients of the last step, and the parameters after all steps."""
    trained = copy.deepcopy(template)
    cp = ContextParallel(comm, reproducible=True, layout=layout)
    reduction = GradientReduction(trained, cp)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        ids = batch(ROWS, LENGTH, step).to(trained.device)
        out = trained(**shard_inputs(cp, ids, ids, **options))
        losses.append(reduction.loss(out.loss))
        out.loss.backward()
        reduction.reduce()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
    return [torch.stack(losses), *gradients(trained), *(weight.detach() for weight in trained.parameters())]


def gradients(trained: Any) -> list[Tensor]:
    return [weight.grad for weight in trained.parameters() if weight.grad is not None]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.fixture(scope="module")
def llama() -> Any:
    return model(num_hidden_layers=1, tie_word_embeddings=True)  # two gradients for one parameter


@pytest.fixture(scope="module")
def alone(llama: Any) -> list[Tensor]:
    return run_virtual(1, lambda comm: train(comm, llama))[0]


@pytest.mark.parametrize(("world", "layout"), [(2, Zigzag()), (3, Contiguous()), (4, Striped())])
def test_losses_gradients_and_parameters_have_the_bits_of_one_rank(llama, alone, world, layout):
    for found in run_virtual(world, lambda comm: train(comm, llama, Aligned(layout, 16))):
        assert same_bits(found, alone)


def test_packed_rows_have_the_bits_of_one_rank(llama):
    packed = {"document_lengths": [[30, 45], [LENGTH]], "steps": 1}
    [one], two = (run_virtual(world, lambda comm: train(comm, llama, **packed)) for world in (1, 2))
    assert same_bits(two[1], one)


def test_gradients_are_those_of_the_model_alone(llama):
    """And a plain model has other bits, or the tests of bits would prove nothing."""
    exact, plain = copy.deepcopy(llama).double(), copy.deepcopy(llama)
    ids = batch(ROWS, LENGTH, 0)

    def rank(comm: Comm) -> list[Tensor]:
        trained, cp = copy.deepcopy(llama), ContextParallel(comm, reproducible=True, layout=LAYOUT)
        reduction = GradientReduction(trained, cp)
        trained(**shard_inputs(cp, ids, ids)).loss.backward()
        assert not gradients(trained)  # before they are reduced
        reduction.reduce()
        return gradients(trained)

    for each in (exact, plain):
        each(ids, labels=ids).loss.backward()
    found = run_virtual(2, rank)[0]
    for x, y, z in zip(found, gradients(exact), gradients(plain), strict=True):
        assert (x - y).norm() <= 2 * (z - y).norm() + 1e-7 * y.norm()
    assert not same_bits(found, gradients(plain))


def swapped_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank exchanges its second and third leaf."""
    numbers = reproducible.Leaves.numbers

    def swapped(self: Any, row: int) -> list[int]:
        found = numbers(self, row)
        return [*found[:1], *reversed(found[1:3]), *found[3:]]

    monkeypatch.setattr(reproducible.Leaves, "numbers", swapped)


def sums_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are added one after another."""
    monkeypatch.setattr(reproducible, "total", lambda nodes, root=None: sum(nodes.values()))


def leaves_in_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank adds its leaves one after another."""

    def add(self: TreeSum, leaf: int, value: Tensor) -> None:
        node = next(iter(self.nodes), reproducible.Node(0, leaf))
        self.nodes[node] = self.nodes[node] + value if node in self.nodes else value

    monkeypatch.setattr(TreeSum, "add", add)


def whole_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules compute all tokens of a rank at once, and the leaf is the shard."""
    tokens, numbers = reproducible.Leaves.tokens.func, reproducible.Leaves.numbers  # type: ignore[attr-defined]
    monkeypatch.setattr(reproducible.Leaves, "tokens", property(lambda self: [sum(tokens(self))]))
    monkeypatch.setattr(reproducible.Leaves, "numbers", lambda self, row: numbers(self, row)[:1])
    checked = reproducible._UnitForward._checked_output
    monkeypatch.setattr(reproducible, "_padded", lambda x, size, dim: x)
    monkeypatch.setattr(
        reproducible._UnitForward, "_checked_output",
        lambda self, out, dim, size, tokens: checked(self, out, dim, tokens, tokens),
    )  # fmt: skip


@pytest.mark.parametrize("fault", [swapped_leaves, sums_in_rank_order, leaves_in_a_chain, whole_shards])
def test_planted_faults_change_bits(llama, fault, monkeypatch):
    fault(monkeypatch)
    [one], two = (run_virtual(world, lambda comm: train(comm, llama, steps=1)) for world in (1, 2))
    assert not same_bits(two[0], one)


def test_activations_depend_on_the_number_of_tokens_without_leaves():
    """Why modules compute leaf by leaf: the last elements of a tensor are computed by other code than vectors are."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("no vectors")
    x = torch.randn(9, 37, generator=torch.Generator().manual_seed(0)) * 3
    silu = torch.nn.functional.silu
    assert any(not torch.equal(silu(x)[:n], silu(x[:n].clone())) for n in range(1, 9))


def test_log_probabilities_and_a_loss_made_from_them_have_the_bits_of_one_rank(llama):
    ids = batch(ROWS, LENGTH, 0)

    def rank(comm: Comm) -> list[Tensor]:
        trained, cp = copy.deepcopy(llama), ContextParallel(comm, reproducible=True, layout=LAYOUT)
        reduction = GradientReduction(trained, cp)
        inputs = shard_inputs(cp, ids, ids)
        log_probs = gather_log_probs(inputs, trained(**inputs).logits)
        loss = -(log_probs * torch.linspace(0, 1, LENGTH)).exp().mean()
        loss.backward()
        reduction.reduce()
        return [log_probs.detach(), loss.detach(), *gradients(trained)]

    [one], three = (run_virtual(world, rank) for world in (1, 3))
    assert all(same_bits(each, one) for each in three)
    plain = copy.deepcopy(llama)
    log_probs = plain(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    (-(log_probs * torch.linspace(0, 1, LENGTH)[:-1]).exp().sum() / ids.numel() - 1 / LENGTH).backward()
    for x, y in zip(one[2:], gradients(plain), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)


def with_adapters(template: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(template, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))


def test_adapters_and_checkpoints_keep_the_bits():
    adapted = with_adapters(model(num_hidden_layers=1))
    [one], two = (run_virtual(world, lambda comm: train(comm, adapted)) for world in (1, 2))
    assert same_bits(two[0], one)
    adapted.gradient_checkpointing_enable()
    adapted.enable_input_require_grads()
    assert adapted.train().base_model.model.model.layers[0].gradient_checkpointing
    assert same_bits(run_virtual(2, lambda comm: train(comm, adapted))[0], one)


def test_log_probabilities_do_not_depend_on_what_follows_in_the_row(llama):
    """Shorter rows, and padding behind them: the last leaf has whole products, too."""
    trained, ids = copy.deepcopy(llama), batch(1, LENGTH, 0)
    real = (torch.arange(LENGTH) < 37)[None].long()

    def rank(comm: Comm) -> list[Tensor]:
        cp = ContextParallel(comm, reproducible=True, layout=LAYOUT)
        GradientReduction(trained, cp)
        found = []
        for part, options in ((ids, {}), (ids[:, :37], {}), (ids, {"attention_mask": real})):
            inputs = shard_inputs(cp, part, part, **options)
            found.append(gather_log_probs(inputs, trained(**inputs).logits)[0, :36].detach())
        return found

    for whole, *others in run_virtual(2, rank):
        assert all(torch.equal(each, whole) for each in others)


def refused(template: Any, world: int = 1, layout: Any = LAYOUT, **options: Any) -> str:
    with pytest.raises(ValueError, match="reproducible") as error:
        run_virtual(world, lambda comm: train(comm, template, layout, **options))
    return str(error.value)


def test_what_is_not_served_is_refused(llama):
    assert "aten.tanh.default in Gemma2ForCausalLM" in refused(model("gemma2", num_hidden_layers=1))
    assert "self_attn.sinks" in refused(model("gpt_oss"))
    assert "layers that mix tokens must be attention" in refused(model("lfm2"))
    assert "must have at least 64 tokens, a leaf, for each of 3 ranks" in refused(llama, 3, Aligned(Zigzag(), 64))
    assert "causal must be True" in refused(llama, causal=False)
    dropping = model("llama", num_hidden_layers=1)
    dropping.model.norm = torch.nn.Sequential(dropping.model.norm, torch.nn.Dropout(0.1))
    assert "dropout must be 0" in refused(dropping.train())


def test_wrapped_models_are_refused(llama):
    def rank(comm: Comm) -> None:
        wrapped = copy.deepcopy(llama)
        wrapped.__class__ = type("FSDPLlama", (FSDPModule, type(wrapped)), {})  # as fully_shard does
        with pytest.raises(ValueError, match="model must not be wrapped with a reproducible ContextParallel"):
            GradientReduction(wrapped, ContextParallel(comm, reproducible=True, layout=LAYOUT))

    run_virtual(1, rank)


def test_a_model_without_a_reduction_or_with_one_that_was_not_called_is_refused(llama):
    ids = batch(1, LENGTH, 0)

    def rank(comm: Comm) -> None:
        trained, cp = copy.deepcopy(llama), ContextParallel(comm, reproducible=True, layout=LAYOUT)
        with pytest.raises(ValueError, match=r"construct attnmesh\.training\.data_parallel.GradientReduction"):
            trained(**shard_inputs(cp, ids, ids))
        reduction = GradientReduction(trained, cp)
        loss = trained(**shard_inputs(cp, ids, ids)).loss
        with pytest.raises(ValueError, match="loss must be what the model returned"):
            reduction.loss(loss * 2)
        loss.backward()
        with pytest.raises(ValueError, match=r"reduce\(\) must be called after every backward"):
            trained(**shard_inputs(cp, ids, ids))
        plain = ContextParallel(comm)
        with pytest.raises(ValueError, match="data must be None unless cp is reproducible"):
            GradientReduction(trained, plain, data=comm)

    run_virtual(1, rank)


def steps_of_processes(comm: Comm, layout: Any, dtype: torch.dtype, adapted: bool) -> list[Tensor]:
    torch.manual_seed(0)
    template = model().to(dtype)
    return train(comm, with_adapters(template) if adapted else template, layout, steps=20)


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "adapted"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_twenty_steps_of_processes_have_the_bits_of_one(dtype, adapted):
    imports = (*IMPORTS, "peft") if adapted else IMPORTS
    [one] = run_ranks(1, steps_of_processes, LAYOUT, dtype, adapted, imports=imports)
    for world, layout in ((2, LAYOUT), (4, Aligned(Contiguous(), 16)), (4, Aligned(Striped(), 16))):
        for each in run_ranks(world, steps_of_processes, layout, dtype, adapted, imports=imports):
            assert same_bits(each, one)


def steps_of_data_ranks(comm: Comm, data: int) -> list[Tensor]:
    """Two micro-batches of four rows, which are divided among data ranks."""
    mesh = init_device_mesh("cpu", (data, comm.world // data), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], reproducible=True, layout=LAYOUT)
    trained = model()
    reduction = GradientReduction(trained, cp, data=mesh["dp"])
    batches = [batch(4, length, length).chunk(data)[mesh["dp"].get_local_rank()] for length in (75, 40)]
    items, losses = reduction.num_items(batches), []
    for ids in batches:
        out = trained(**shard_inputs(cp, ids, ids, num_items_in_batch=items))
        losses.append(reduction.loss(out.loss))
        out.loss.backward()
        reduction.reduce()
    return [torch.stack(losses), items, *gradients(trained)]


@pytest.mark.sweep
def test_a_batch_over_data_ranks_has_the_bits_of_one():
    [one] = run_ranks(1, steps_of_data_ranks, 1, imports=IMPORTS)
    for world, data in ((2, 2), (4, 2), (4, 4)):
        for each in run_ranks(world, steps_of_data_ranks, data, imports=IMPORTS):
            assert same_bits(each, one)


KINDS = ("mistral", "qwen3_moe", "qwen3", "gemma3_text", "olmo2", "phi", "gemma", "starcoder2", "cohere", "gpt_neox")


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_models_have_the_bits_of_one_rank(kind):
    template = model(kind).eval()
    [one] = run_virtual(1, lambda comm: train(comm, template, Aligned(Striped(), 16)))
    for each in run_virtual(3, lambda comm: train(comm, template)):
        assert same_bits(each, one)


def test_experts_on_a_gpu_are_refused():
    block = torch.nn.ModuleDict(
        {"gate": torch.nn.Linear(2, 2), "experts": torch.nn.ModuleList([torch.nn.Linear(2, 2)])}
    )
    reproducible.check_experts("layers.0.mlp", block, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"must be on a CPU .*, got layers\.0\.mlp\.experts on cuda:1"):
        reproducible.check_experts("layers.0.mlp", block, torch.device("cuda:1"))
    reproducible.check_experts("layers.0.mlp", block["gate"], torch.device("cuda:1"))
