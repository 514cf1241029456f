"""Models whose layers attnmesh does not see are refused on every rank, by every call with a sharded batch."""

import copy
from types import SimpleNamespace

import pytest
import torch

import attnmesh as am
from attnmesh.integrations import sharded_pass
from attnmesh.integrations.transformers_attention import register_attention
from helpers.models import attnmesh_model, on_virtual_ranks

IDS = torch.arange(16)[None] + 5
HEADS = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
RECURRENT = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
MODELS = {
    "xlstm": (RECURRENT | {"num_heads": 4}, "layers with a recurrent state are not served"),
    "rwkv": (RECURRENT, "layers with a recurrent state are not served"),
    "cpmant": (HEADS | {"dim_head": 8, "dim_ff": 32}, "the model has attention code of its own"),
    "nemotron": (HEADS | {"intermediate_size": 32, "num_key_value_heads": 2}, "NemotronAttention must give the att"),
}


def made(kind, own, implementation="attnmesh"):
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    config = AutoConfig.for_model(kind, **own)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def refused(model, message):
    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), IDS, IDS)
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            model(**inputs)

    on_virtual_ranks(2, rank)


@pytest.mark.parametrize("kind", MODELS)
def test_the_error_names_what_is_the_matter_with_the_model(kind):
    own, message = MODELS[kind]
    refused(made(kind, own), f"^(?!.*attn_implementation).*{message}")


def test_a_recurrent_model_that_was_not_made_for_attnmesh_is_refused():
    refused(made("rwkv", RECURRENT, implementation=None), "layers with a recurrent state are not served")


def test_layers_that_are_not_served_are_refused_while_a_model_is_traced(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model = SimpleNamespace(config=SimpleNamespace(layer_types=["mamba"]))
    with pytest.raises(ValueError, match=r"layer_types must be .* got mamba"):
        sharded_pass._call(model, attention_pass=object.__new__(sharded_pass.ShardedPass))


class Averaging(torch.nn.Module):
    """A layer that mixes tokens and asks nobody."""

    layer_idx = 1

    def forward(self, x, **_):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def test_layers_that_did_not_attend_over_ranks_are_refused_at_the_end_of_the_call():
    model = copy.deepcopy(attnmesh_model("llama"))
    model.model.layers[1] = Averaging()
    refused(model, r"LlamaForCausalLM: .*must call attnmesh's attention.*got model.layers.1 \(Averaging\), .*'llama'")
    model.model.layers = model.model.layers[:1]  # fewer layers than the configuration has are no error

    def rank(comm):
        return model(**am.shard_inputs(am.ContextParallel(comm), IDS, IDS)).loss.detach()

    wanted = model(input_ids=IDS, labels=IDS).loss.detach()
    torch.testing.assert_close(sum(on_virtual_ranks(2, rank)), wanted)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("falcon", HEADS),
        ("gptj", {"vocab_size": 40, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}),
        ("gpt_neo", {"vocab_size": 40, "hidden_size": 32, "num_layers": 1, "attention_types": [[["global"], 1]]}),
    ],
)
def test_attention_tables_of_models_refuse_attnmesh_in_our_words(kind, own):
    with pytest.raises(ValueError, match=r"Config: the model has attention code of its own.*got 'attnmesh'"):
        made(kind, own)
    made(kind, own, implementation="eager")
