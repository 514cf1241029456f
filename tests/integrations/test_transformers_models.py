"""Which models are refused, and with which words: by `model(**shard_inputs(...))` itself, on every rank."""

import copy

import pytest
import torch

import attnmesh as am
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.integrations.transformers_models import check_config, check_model
from helpers.models import attnmesh_model, on_virtual_ranks, write_folder
from helpers.small_models import small_model

IDS = torch.arange(16)[None] + 5
SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}


def tiny(kind, **own):
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    config = AutoConfig.for_model(kind, **SIZES | own)
    return AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_attention_code_of_their_own_is_refused_on_one_device(kind):
    """They add ALiBi, which no attention function is given."""
    with pytest.raises(ValueError, match=rf"(?i){kind}Config: the model has attention code of its own"):
        tiny(kind)(input_ids=IDS)


def test_falcon_keeps_its_attention_and_is_refused(tmp_path):
    from transformers import FalconConfig, FalconForCausalLM

    register_attention()
    model = FalconForCausalLM(FalconConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    model.set_attn_implementation("attnmesh")  # has no effect but a warning
    with pytest.raises(ValueError, match="FalconForCausalLM: the model has attention code of its own"):
        check_model(model)
    with pytest.raises(ValueError, match="FalconConfig: the model has attention code of its own"):
        check_config(model.config)
    with pytest.raises(ValueError, match="must not be 'attnmesh': FalconConfig: the model has attention code of its"):
        am.load_model(write_folder(tmp_path / "falcon", model))


def test_layers_are_inspected_where_the_configuration_does_not_name_them():
    from transformers import Phi4MultimodalConfig, RwkvConfig

    with pytest.raises(ValueError, match="RwkvConfig: layers with a recurrent state are not served"):
        check_config(RwkvConfig())
    with pytest.raises(ValueError, match=r"Phi4MultimodalConfig: layers must mix .* any may be a Conv1d"):
        check_config(Phi4MultimodalConfig())
    model = tiny("llama")
    check_model(model)
    model.model.layers[1].mlp.mixer = torch.nn.Conv1d(32, 32, 3)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: layers must mix .*model\.layers\.1\.mlp\.mixer, a Conv1d"):
        check_model(model)


def test_positions_that_are_counted_from_tokens_are_refused():
    model = small_model("xlm-roberta", "attnmesh")
    with pytest.raises(ValueError, match=r"XLMRobertaForCausalLM: positions must be position_ids that begin with 0"):
        check_model(model)


def test_a_mask_that_the_model_changes_is_refused():
    with pytest.raises(ValueError, match="as they are, got a model that reads dtype of its mask"):
        tiny("doge")(input_ids=IDS)


def test_a_mask_that_no_layer_uses_does_not_matter():
    """Qwen2-MoE without a window has a mask for layers with a window of 0 tokens."""
    own = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    model = tiny("qwen2_moe", **own)
    found = model(input_ids=IDS).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, model(input_ids=IDS).logits)


def test_a_hybrid_without_other_layers_is_served():
    model = tiny("granitemoehybrid", layer_types=["attention", "attention"], num_local_experts=0, **_MAMBA)
    check_model(model)
    wanted = model(input_ids=IDS, labels=IDS).loss

    def rank(comm):
        with torch.no_grad():
            return model(**am.shard_inputs(am.ContextParallel(comm), IDS, IDS)).loss

    torch.testing.assert_close(sum(on_virtual_ranks(2, rank)), wanted.detach())


def test_a_model_whose_code_is_not_found_is_refused():
    from types import SimpleNamespace

    with pytest.raises(ValueError, match=r"SimpleNamespace: the model's code must be in .* got types"):
        check_config(SimpleNamespace(layer_types=["full_attention"]))


@pytest.mark.parametrize("kind", ["sdpa", "eager", "packed"])
def test_a_sharded_batch_is_refused_by_models_that_do_not_use_attnmesh(kind):
    """They would compute with this rank's tokens only, and give no sign of it."""
    model = copy.deepcopy(attnmesh_model("llama"))
    model.set_attn_implementation("sdpa" if kind == "packed" else kind)
    more = {"document_lengths": [[7, 9]]} if kind == "packed" else {}

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), IDS, IDS, **more)
        with pytest.raises(ValueError, match=r"^attn_implementation .* must be 'attnmesh' .*, got '(sdpa|eager)'"):
            model(**inputs)
        assert not hasattr(inputs["attention_mask"], "numpy")

    on_virtual_ranks(2, rank)


def test_a_model_that_does_not_pass_the_mesh_on_is_refused():
    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), IDS, IDS)
        del inputs["attention_pass"]
        with pytest.raises(ValueError, match=r"LlamaAttention must give .* the keyword argument attention_pass"):
            attnmesh_model("llama")(**inputs)

    on_virtual_ranks(2, rank)


def test_a_load_balancing_loss_is_refused_over_ranks():
    """Its means are over all tokens of the batch; over one rank's they are others."""
    model = attnmesh_model("mixtral")
    assert model(input_ids=IDS, labels=IDS, output_router_logits=True).aux_loss > 0

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), IDS, IDS)
        with pytest.raises(ValueError, match="MixtralAttention: output_router_logits must be False over ranks, got Tr"):
            model(**inputs, output_router_logits=True)

    on_virtual_ranks(2, rank)


def _with_rotary(kind, **parameters):
    """A model whose rotary embeddings change beyond 16 positions."""
    own = {"original_max_position_embeddings": 16, "max_position_embeddings": 64 if kind == "phi3" else 16}
    return tiny(kind, rope_parameters={"rope_theta": 10000.0} | parameters, **own)


def test_frequencies_that_depend_on_the_largest_position_are_those_of_one_process_or_refused():
    """Transformers takes the largest position that it sees, which is that of a rank's tokens."""
    long = _with_rotary("phi3", rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0, 3.0, 4.0, 5.0])
    dynamic = _with_rotary("llama", rope_type="dynamic", factor=4.0)
    ids = torch.arange(20)[None] + 5
    wanted = [long(input_ids=x, labels=x).loss.detach() for x in (ids, ids[:, :16])]

    def rank(comm):
        def loss(model, x, layout):
            with torch.no_grad():
                return model(**am.shard_inputs(am.ContextParallel(comm, layout=layout), x, x)).loss

        with pytest.raises(ValueError, match=r"a position beyond 16, .*'longrope'.* False on rank 0 but"):
            loss(long, ids, am.Contiguous())
        with pytest.raises(ValueError, match=r"largest position, or 16, .*'dynamic'.* 19 on rank 0 but 20 on"):
            loss(dynamic, ids, am.Striped())
        return loss(long, ids, am.Striped()), loss(long, ids[:, :16], am.Contiguous())

    found = on_virtual_ranks(2, rank)
    for parts, right in zip(zip(*found, strict=True), wanted, strict=True):
        torch.testing.assert_close(sum(parts), right)
    with pytest.raises(ValueError, match="the model has 16 positions before rope_type 'longrope' changes its frequenc"):
        am.Generator(long, cache_tokens=40).generate([list(range(5, 20))], max_new_tokens=2)


@pytest.mark.parametrize(("kind", "option"), [("gpt2", "attn_pdrop"), ("llama", "attention_dropout")])
def test_attention_dropout_is_refused_in_training(kind, option):
    model = tiny(kind, **{option: 0.1})
    model(input_ids=IDS)

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), IDS, IDS)
        with pytest.raises(ValueError, match=rf"dropout must be 0, got 0\.1: load the model with {option}=0\.0"):
            model(**inputs)

    model.train()
    on_virtual_ranks(2, rank)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_heads_that_are_not_those_of_language_models_are_refused(head):
    import transformers

    am.register_attention()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, attn_implementation="attnmesh",
    )  # fmt: skip
    model = getattr(transformers, f"LlamaFor{head}")(config)
    ids = torch.arange(1, 13)[None]

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), ids)
        with pytest.raises(ValueError, match=f"causal language model or its body, got LlamaFor{head}"):
            model(**inputs)
        return model.base_model(**inputs).last_hidden_state.shape

    assert am.run_virtual(2, rank) == [(1, 6, 16)] * 2


def test_left_padding_needs_positions_where_the_model_would_count_them_from_the_mask():
    from transformers import OPTConfig, OPTForCausalLM

    am.register_attention()
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
    config = OPTConfig(**sizes, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0, max_position_embeddings=32)
    model = OPTForCausalLM._from_config(config, attn_implementation="attnmesh").eval()
    ids, mask = torch.arange(1, 13)[None], (torch.arange(12) >= 3).long()[None]
    wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 3:]

    def rank(comm):
        cp = am.ContextParallel(comm)
        with pytest.raises(ValueError, match="position_ids must be given to shard_inputs for rows with padding"):
            model(**am.shard_inputs(cp, ids, attention_mask=mask))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = am.shard_inputs(cp, ids, attention_mask=mask, position_ids=positions)
        return inputs["attention_pass"].unshard(model(**inputs).logits.detach())[:, 3:]

    for found in am.run_virtual(2, rank):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
