"""Every decoder of the installed Transformers: right over ranks, or refused with a ValueError. Never wrong."""

import warnings

import pytest
import torch

import attnmesh as am
from attnmesh.integrations.transformers_attention import register_attention
from helpers.models import on_virtual_ranks

# Set where a configuration has them.
SIZES = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 5, "attention_dropout": 0.0, "is_decoder": True, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 64, "dff": 24, "ffn_dim": 24, "word_embed_proj_dim": 32, "embedding_size": 32,
    "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2,
    "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "qk_head_dim": 12, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 53, "num_kv_shared_layers": 0,
}  # fmt: skip
MOST_WEIGHTS = 10**7
IDS = torch.randint(8, 53, (2, 19), generator=torch.Generator().manual_seed(0))


def small_config(kind):
    from transformers import AutoConfig

    full = AutoConfig.for_model(kind)
    own = {name: size for name, size in SIZES.items() if hasattr(full, name)}
    layers = getattr(full, "layer_types", None)
    if layers:
        own["layer_types"] = [*dict.fromkeys(layers), layers[-1]][:2]
    if getattr(full, "mlp_layer_types", None):
        own["mlp_layer_types"] = ["dense", "sparse"]
    if "kv_lora_rank" in own:  # of multi-head latent attention
        own.pop("head_dim", None)
        own["num_key_value_heads"] = 4
    return AutoConfig.for_model(kind, **own)


def small_model(kind, implementation):
    from transformers import AutoModelForCausalLM

    config = small_config(kind)
    with torch.device("meta"):
        weights = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights} weights: other options decide its size")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).float()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.2)
    return model.eval()


@torch.no_grad()
def verdict(kind):
    """ "right", "wrong", "refused", or "not made" where one process fails with so small a configuration."""
    try:
        wanted = small_model(kind, "eager")(input_ids=IDS, labels=IDS)
    except Exception as error:
        return f"not made: {type(error).__name__}"
    try:
        model = small_model(kind, "attnmesh")
    except ValueError:  # in a table of the model's own, see test_unseen_layers.py
        return "refused"

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), IDS, IDS)
        with torch.no_grad():
            out = model(**inputs)
        return out.loss, inputs["attention_pass"].unshard(out.logits)

    try:
        (loss, logits), (other, _) = on_virtual_ranks(2, rank)
    except (ValueError, TypeError) as error:  # a model that takes no keyword arguments raises TypeError
        return "refused" if isinstance(error, ValueError) or "unexpected keyword" in str(error) else f"wrong: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__} {error}"
    near = torch.allclose(logits, wanted.logits, 1e-4, 1e-4) and torch.allclose(loss + other, wanted.loss, 1e-4)
    return "right" if near else f"wrong: {(logits - wanted.logits).abs().max():.1e}"


@pytest.mark.sweep
def test_every_decoder_is_right_or_refused():
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    register_attention()
    transformers.logging.set_verbosity_error()
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {kind: verdict(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    kinds = {word: [kind for kind, said in found.items() if said.startswith(word)] for word in ("right", "refused")}
    assert not {kind: said for kind, said in found.items() if said.startswith("wrong")}
    assert {"cpmant", "rwkv"} <= set(kinds["refused"])  # which read neither masks nor keyword arguments
    assert len(kinds["right"]) >= 75
    assert len(kinds["refused"]) >= 35
