"""Encoders over ranks: loss and gradients of one process, or refused in words."""

import warnings

import pytest
import torch

import attnmesh as am
from attnmesh.integrations.transformers_attention import register_attention
from helpers.decoder_types import (
    ENCODERS_BEGIN,
    ENCODERS_END,
    encoder_lines,
    encoder_table,
    quiet,
    train_encoder,
    written,
)
from helpers.models import on_virtual_ranks
from helpers.small_models import small_config, small_model

IDS = torch.randint(8, 53, (2, 19), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _quiet():
    register_attention()
    with torch.random.fork_rng(), warnings.catch_warnings():
        quiet()
        yield


@pytest.mark.parametrize(
    ("kind", "head", "world"),
    [
        ("bert", "TokenClassification", 2),  # learned positions, token types
        ("roberta", "MaskedLM", 3),  # positions that are counted from the padding token
        ("modernbert", "MaskedLM", 3),  # windows to both sides, rotary embeddings
        ("modernbert", "TokenClassification", 2),
        ("distilbert", "MaskedLM", 2),  # layers without a number
        ("albert", "MaskedLM", 2),  # one layer that runs several times
        ("nomic_bert", "MaskedLM", 2),  # gated MLPs
    ],
)
def test_loss_and_gradients_are_those_of_one_process(kind, head, world):
    train_encoder(kind, head, world)


@pytest.mark.sweep
def test_the_table_in_the_documentation_is_current():
    assert written(ENCODERS_BEGIN, ENCODERS_END) == encoder_lines(encoder_table())


def test_the_body_of_an_encoder():
    """All tokens are right on every rank; what the model makes of the first token cannot be read."""
    from transformers import AutoModel

    config = small_config("bert", decoder=False)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="attnmesh").eval()
    segments = (torch.arange(19) > 7).long().expand(2, -1)
    whole = model(input_ids=IDS, token_type_ids=segments).last_hidden_state  # on one device
    model.set_attn_implementation("eager")
    assert torch.allclose(model(input_ids=IDS, token_type_ids=segments).last_hidden_state, whole, atol=1e-5)
    model.set_attn_implementation("attnmesh")

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), IDS, token_type_ids=segments, causal=False)
        out = model(**inputs)
        with pytest.raises(ValueError, match="pooler_output must not be used in a batch that is sharded over ranks"):
            torch.tanh(out.pooler_output)
        return inputs["attention_pass"].unshard(out.last_hidden_state)

    for found in on_virtual_ranks(2, rank):
        assert torch.allclose(found, whole, atol=1e-5)


def test_documents_of_an_encoder_attend_to_themselves():
    model = small_model("modernbert", "attnmesh", "MaskedLM")
    lengths = [[7, 12], [19]]

    def rank(comm):
        inputs = am.shard_inputs(am.ContextParallel(comm), IDS, document_lengths=lengths, causal=False)
        return inputs["attention_pass"].unshard(model(**inputs).logits)

    found = on_virtual_ranks(2, rank)[0]
    for row, begin, end in ((0, 0, 7), (0, 7, 19), (1, 0, 19)):
        assert torch.allclose(found[row, begin:end], model(IDS[row : row + 1, begin:end]).logits[0], atol=1e-4)


MASK = r"shard_inputs must be given causal=False for a model with the mask Full\(\), got True"
SEQUENCE = "head ForMaskedLM or ForTokenClassification, got BertForSequenceClassification"


@pytest.mark.parametrize(
    ("kind", "head", "how", "message"),
    [
        ("bert", "SequenceClassification", {"causal": False}, SEQUENCE),
        (
            "bert",
            "MaskedLM",
            {},
            r"shard_inputs must be given causal=False for a model with the mask Full\(\), got True",
        ),
        ("llama", "CausalLM", {"causal": False}, "a head ForMaskedLM or ForTokenClassification, got LlamaForCausalLM"),
        ("roberta", "CausalLM", {}, "got a model that counts them from its padding token"),
        ("roberta", "MaskedLM", {"causal": False, "pad": True}, "must be 0, the padding token, exactly"),
        ("mobilebert", "MaskedLM", {"causal": False}, "joins embeddings of neighboring tokens"),
        ("bert", "MaskedLM", {"causal": None}, "causal must be True or False, got None"),
        ("t5", "Seq2SeqLM", {"causal": False}, "T5ForConditionalGeneration: the model has attention code of its own"),
        ("whisper", "SpeechSeq2Seq", {"causal": False}, "WhisperForConditionalGeneration: "),
    ],
)
def test_what_is_not_served_is_refused_on_every_rank(kind, head, how, message):
    model = small_model(kind, "attnmesh", head)
    how = dict(how)
    mask = torch.ones_like(IDS)
    if how.pop("pad", False):
        mask[0, 15:] = 0  # where the tokens are not padding

    def rank(comm):
        with pytest.raises(ValueError, match=message):
            model(**am.shard_inputs(am.ContextParallel(comm), IDS, attention_mask=mask, **how))

    on_virtual_ranks(2, rank)
