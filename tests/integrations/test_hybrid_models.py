"""Hybrid models over ranks: loss and gradients are those of one process, documents are kept apart, padding is none."""

import copy
from functools import cache

import pytest
import torch

import attnmesh as am
from attnmesh.integrations import recurrent_layers
from helpers.cases import sweep
from helpers.models import on_virtual_ranks

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0,
}  # fmt: skip
_CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
MODELS = {
    "qwen3_next": _GATED_DELTA,
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "lfm2": _CONVOLUTION,
    "qwen3_5_text": _GATED_DELTA,
    "olmo_hybrid": _GATED_DELTA,
    "lfm2_moe": {"num_dense_layers": 2, **_CONVOLUTION},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0, **_MAMBA},
    "falcon_h1": {"mamba_d_ssm": 64, **_MAMBA},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 1, "chunk_size": 8,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"], "mamba_ngroups": 1, "mamba_d_state": 8, "n_mamba_heads": 4,
        "chunk_size": 8, "num_mem_blocks": 1, "hybrid_layer_ids": [1],
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "linear_num_heads": 4, "linear_head_dim": 8, "num_local_experts": 2,
        "num_key_value_heads": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "mlp_layer_types": ["dense", "dense"],
    },
}  # fmt: skip
FEW = ("qwen3_next", "bamba", "lfm2")
EACH = pytest.mark.parametrize("kind", [kind if kind in FEW else sweep(kind) for kind in MODELS])
IDS = torch.randint(5, 40, (2, 19), generator=torch.Generator().manual_seed(1))


@cache
def model_of(kind: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    am.register_attention()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **SIZES | MODELS[kind])
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().train()


def loss_and_gradients(model, inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {
        name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()
    }


def assert_over_ranks(kind: str, world: int, loss, grads, checkpointing: bool = False, **batch) -> None:
    """The loss within 2e-5 and gradients within 1e-4 of the given ones."""

    def rank(comm):
        model = copy.deepcopy(model_of(kind))
        model.set_attn_implementation("attnmesh")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return loss_and_gradients(model, am.shard_inputs(am.ContextParallel(comm), **batch))

    results = on_virtual_ranks(world, rank)
    assert abs(sum(part for part, _ in results) - loss) < 2e-5
    for name, expected in grads.items():
        assert (sum(found[name] for _, found in results) - expected).abs().max() < 1e-4, name


@EACH
@pytest.mark.parametrize("world", [3, sweep(1), sweep(2), sweep(4)])
def test_loss_and_gradients_are_those_of_one_process(kind, world):
    expected = loss_and_gradients(model_of(kind), {"input_ids": IDS, "labels": IDS, "use_cache": False})
    assert any(grad.abs().max() > 1e-3 for grad in expected[1].values())
    assert_over_ranks(kind, world, *expected, input_ids=IDS, labels=IDS)


@EACH
def test_packed_rows_equal_documents_alone(kind):
    ids, lengths = IDS[:1], [7, 12]
    labels = ids.clone()
    labels[0, [0, 7]] = -100  # the first token of a document is no label
    losses, sums = [], {}
    for first, n in ((0, 7), (7, 12)):
        one = {"input_ids": ids[:, first : first + n], "labels": labels[:, first : first + n], "use_cache": False}
        loss, grads = loss_and_gradients(model_of(kind), one)
        weight = (n - 1) / 17
        losses.append(weight * loss)
        for name, grad in grads.items():
            sums[name] = sums.get(name, 0) + weight * grad
    assert_over_ranks(kind, 2, sum(losses), sums, input_ids=ids, labels=labels, document_lengths=[lengths])


@EACH
def test_padding_is_as_in_one_process(kind):
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0  # before the tokens, as generation pads
    mask[1, 16:] = 0
    labels = IDS.masked_fill(mask == 0, -100)
    labels[0, 5] = -100  # one process would predict it from padding
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = {
        "input_ids": IDS, "labels": labels, "attention_mask": mask, "position_ids": positions
    }  # fmt: skip
    expected = loss_and_gradients(model_of(kind), batch | {"use_cache": False})
    assert_over_ranks(kind, 2, *expected, **batch)


@pytest.mark.parametrize("kind", ["qwen3_next", sweep("bamba")])
def test_layers_that_are_recomputed_in_the_backward(kind):
    expected = loss_and_gradients(model_of(kind), {"input_ids": IDS, "labels": IDS, "use_cache": False})
    assert_over_ranks(kind, 2, *expected, checkpointing=True, input_ids=IDS, labels=IDS)


def test_other_calls_of_the_model_are_as_before():
    model = copy.deepcopy(model_of("qwen3_next")).eval()
    before = model(input_ids=IDS).logits
    on_virtual_ranks(2, lambda comm: served_once(model, comm))
    assert torch.equal(model(input_ids=IDS).logits, before)


def served_once(model, comm) -> None:
    mine = copy.deepcopy(model)
    mine.set_attn_implementation("attnmesh")
    mine(**am.shard_inputs(am.ContextParallel(comm), IDS))


@pytest.mark.parametrize(
    ("kind", "own", "message"),
    [
        ("jamba", {}, "recurrent layers must be known: .* has a function mamba_inner_fn, which is not known"),
        (
            "mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
            "models with recurrent layers and no attention are not served over ranks",
        ),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_on_every_rank(kind, own, message):
    from transformers import AutoConfig, AutoModelForCausalLM

    am.register_attention()
    config = AutoConfig.for_model(kind, **SIZES | own)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()

    def rank(comm):
        with pytest.raises(ValueError, match=message):
            model(**am.shard_inputs(am.ContextParallel(comm), IDS, IDS))

    on_virtual_ranks(2, rank)


def test_striped_positions_are_refused_on_every_rank():
    def rank(comm):
        model = copy.deepcopy(model_of("lfm2"))
        model.set_attn_implementation("attnmesh")
        cp = am.ContextParallel(comm, layout=am.Striped())
        with pytest.raises(ValueError, match="layout must give ranks ranges of consecutive positions"):
            model(**am.shard_inputs(cp, IDS, IDS, balance=False))

    on_virtual_ranks(2, rank)


def test_a_function_that_is_not_given_the_pass_is_refused(monkeypatch):
    """It would see this rank's tokens only."""
    from transformers.models.lfm2 import modeling_lfm2

    model_of("lfm2")
    recurrent_layers.serve(modeling_lfm2)
    served = modeling_lfm2.causal_conv1d_fn

    def without_pass(x, weight, bias, **_):
        return served(x, weight, bias)

    without_pass.over_ranks = None  # it is not wrapped again
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", without_pass)

    def rank(comm):
        model = copy.deepcopy(model_of("lfm2"))
        model.set_attn_implementation("attnmesh")
        with pytest.raises(ValueError, match="causal_conv1d_fn must be given the keyword argument attention_pass"):
            model(**am.shard_inputs(am.ContextParallel(comm), IDS, IDS))

    on_virtual_ranks(2, rank)
