"""Models with recurrent layers over ranks: the loss and every gradient are those of one process."""

import pytest
import torch

import attnmesh as am
from attnmesh.integrations.transformers_attention import register_attention
from helpers.cases import else_sweep
from helpers.models import on_virtual_ranks

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "full_attention_interval": 2, "head_dim": 8,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
PURE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}
MODELS = {
    "qwen3_next": SIZES | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": SIZES | DELTA,
    "olmo_hybrid": SIZES | DELTA | {"linear_num_key_heads": 4},
    "kimi_linear": SIZES | EXPERTS | {
        "linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_token": 2,
    },
    "bamba": SIZES | MAMBA2 | {"attn_layer_indices": [1, 3]},
    "falcon_h1": SIZES | MAMBA2 | {"head_dim": 8, "mamba_d_ssm": 64},
    "granitemoehybrid": SIZES | MAMBA2 | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "position_embedding_type": "rope",
    },
    "nemotron_h": SIZES | {
        "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "expand": 2,
        "chunk_size": 16, "hybrid_override_pattern": "M*M-",
    },
    "zamba2": SIZES | {
        "mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_expand": 2,
        "chunk_size": 16, "num_mem_blocks": 1, "layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "use_mem_rope": True, "attention_head_dim": 16,
    },
    "jamba": SIZES | {
        "mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "minimax": SIZES | {
        "head_dim": 8, "block_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": SIZES | EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba": PURE | {"time_step_rank": 4},
    "falcon_mamba": PURE | {"time_step_rank": 4},
    "mamba2": PURE | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 16},
}  # fmt: skip
FEW = ("qwen3_next", "bamba", "jamba", "minimax", "lfm2")  # a kind of recurrence each
LENGTH = 37  # no multiple of a chunk or of a number of ranks


def tiny(kind, dtype=torch.float32):
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]), attn_implementation="attnmesh")
    model = model.to(dtype).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.copy_(torch.randn(weight.shape) * 0.1)  # large enough that states matter
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape) * 0.3)
    return model


def gradients(model):
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def of_ranks(model, ids, world, layout, **how):
    """The loss and the gradients of ranks that share the weights, so that gradients are summed."""

    def rank(comm):
        loss = model(**am.shard_inputs(am.ContextParallel(comm, layout=layout), ids, ids, **how)).loss
        loss.backward()
        return loss.detach()

    return sum(on_virtual_ranks(world, rank)), gradients(model)


def assert_equal(found, expected):
    assert abs(found[0] - expected[0]) < 2e-5
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-6, name


@pytest.mark.parametrize("kind", else_sweep([(kind,) for kind in MODELS], lambda kind: kind in FEW))
def test_loss_and_gradients_are_those_of_one_process(kind):
    model, ids = tiny(kind), torch.randint(1, 64, (2, LENGTH))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = loss.detach(), gradients(model)
    for world, layout in ((2, am.Zigzag()), (3, am.Contiguous())):
        assert_equal(of_ranks(model, ids, world, layout), expected)


@pytest.mark.parametrize("kind", else_sweep([(kind,) for kind in MODELS], lambda kind: kind in ("qwen3_next", "bamba")))
def test_packed_rows_are_documents_alone(kind):
    model, ids = tiny(kind), torch.randint(1, 64, (1, LENGTH))
    lengths = [5, 20, 2, 10]
    total, counted = 0.0, LENGTH - len(lengths)
    for document in ids.split(lengths, 1):
        loss = model(input_ids=document, labels=document, use_cache=False).loss * (document.shape[1] - 1) / counted
        loss.backward()
        total += loss.detach()
    expected = total, gradients(model)
    labels = ids.clone()
    labels[0, torch.tensor([0, *lengths]).cumsum(0)[:-1]] = -100  # the first token of a document has no label

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), ids, labels, document_lengths=[lengths])
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    assert_equal((sum(on_virtual_ranks(3, rank)), gradients(model)), expected)


@pytest.mark.parametrize(
    ("kind", "before"),
    else_sweep([(kind, before) for kind in MODELS for before in (True, False)], lambda *case: case == ("bamba", True)),
)
def test_padding_is_that_of_one_process(kind, before):
    model, ids = tiny(kind), torch.randint(1, 64, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, slice(9) if before else slice(LENGTH - 9, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if before:
        labels[1, 9] = -100
    positions = (mask.cumsum(1) - 1).clamp(min=0) if before else torch.arange(LENGTH).expand(2, -1)
    has_positions = "mamba" not in kind or kind in ("bamba",)
    own = {"position_ids": positions} if has_positions else {}
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **own).loss
    loss.backward()
    expected = loss.detach(), gradients(model)

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), ids, labels, attention_mask=mask, position_ids=positions)
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    assert_equal((sum(on_virtual_ranks(2, rank)), gradients(model)), expected)


@pytest.mark.parametrize("kind", else_sweep([(kind,) for kind in MODELS], lambda kind: kind == "falcon_mamba"))
def test_activation_checkpointing(kind):
    """Layers run again in the backward pass, outside of the model's call."""
    model, ids = tiny(kind), torch.randint(1, 64, (1, LENGTH))
    expected = of_ranks(model, ids, 2, am.Zigzag())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(of_ranks(model, ids, 2, am.Zigzag()), expected)


def test_one_device_is_as_before():
    """Functions that serve ranks are in place of Transformers' own, and call them elsewhere."""
    model, ids = tiny("qwen3_next"), torch.randint(1, 64, (1, LENGTH))
    before = model(input_ids=ids, use_cache=False).logits
    of_ranks(model, ids, 2, am.Zigzag())
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_a_layout_without_ranges_is_refused():
    model, ids = tiny("lfm2"), torch.randint(1, 64, (1, LENGTH))

    def rank(comm):
        with pytest.raises(ValueError, match="layout"):
            model(**am.shard_inputs(am.ContextParallel(comm, layout=am.Striped()), ids, ids))

    on_virtual_ranks(2, rank)
