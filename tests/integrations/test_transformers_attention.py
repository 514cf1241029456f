"""`attn_implementation="attnmesh"`: what Transformers computes, and a clear word about what it would not."""

import copy
from types import SimpleNamespace

import pytest
import torch

import attnmesh as am
from attnmesh.comm import SoloComm
from attnmesh.core.masks import Causal
from attnmesh.core.state import discount_sinks
from attnmesh.integrations.transformers_attention import LayerMask, register_attention, transformers_attention
from attnmesh.integrations.transformers_models import check_model
from helpers.cases import first
from helpers.models import KINDS, attnmesh_model, greedy_tokens, logits_of, random_ids, transformers_model

IDS = random_ids(40, seed=4)


@pytest.mark.parametrize("kind", KINDS)
def test_on_one_device_logits_and_gradients_are_those_of_transformers(kind):
    ids = torch.tensor([IDS, IDS[::-1]])
    exact, found = transformers_model(kind, torch.float64), copy.deepcopy(attnmesh_model(kind))
    logits = exact(input_ids=ids).logits
    wanted = torch.autograd.grad(logits.square().mean(), list(exact.parameters()))
    mine = found(input_ids=ids).logits
    torch.testing.assert_close(mine, logits.float(), rtol=1e-4, atol=1e-4)
    mine.square().mean().backward()
    for (name, weight), right in zip(found.named_parameters(), wanted, strict=True):
        assert (weight.grad - right).norm() <= 2e-5 * right.norm(), name


@pytest.mark.parametrize("kind", first(2, KINDS))
def test_generate_of_transformers_says_the_same_tokens(kind):
    ids = torch.tensor([IDS])
    found = attnmesh_model(kind).generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert found[0, len(IDS) :].tolist() == greedy_tokens(kind, IDS, 12)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_a_dynamic_cache_is_read_in_any_portions(kind):
    from transformers import DynamicCache

    model, expected = attnmesh_model(kind), logits_of(kind, IDS)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for begin, end in ((0, 20), (20, 21), (21, 33), (33, 40)):
            found = model(input_ids=torch.tensor([IDS[begin:end]]), past_key_values=cache, use_cache=True).logits[0]
            torch.testing.assert_close(found, expected[begin:end], rtol=1e-4, atol=1e-4)


def test_sinks_are_one_more_key_without_a_value():
    scores, values, sinks = torch.randn(2, 3, 5, 7).double(), torch.randn(2, 3, 7, 4).double(), torch.randn(3).double()
    out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    with_sinks = torch.cat([scores, sinks.view(1, 3, 1, 1).expand(2, 3, 5, 1)], -1).softmax(-1)[..., :-1] @ values
    torch.testing.assert_close(discount_sinks(out, lse, sinks[:, None]), with_sinks)
    # A row that sees nothing sees nothing but the sink.
    nothing = discount_sinks(torch.zeros(1, 3, 1, 4), torch.full((1, 3, 1), -torch.inf), sinks.float()[:, None])
    assert torch.equal(nothing, torch.zeros(1, 3, 1, 4))


def test_registering_twice_does_no_harm():
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    register_attention()
    register_attention()
    assert AttentionInterface()["attnmesh"] is transformers_attention
    assert "attnmesh" in AttentionMaskInterface()


def packed_logits(kind, rows):
    """The logits of documents that are computed one at a time."""
    return [torch.cat([logits_of(kind, document) for document in documents]) for documents in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_equal_one_document_at_a_time(kind):
    rows = [(IDS[:11], IDS[11:35], IDS[35:]), (IDS[:1], IDS[1:])]
    positions = torch.tensor([[at for document in row for at in range(len(document))] for row in rows])
    found = attnmesh_model(kind)(input_ids=torch.tensor([IDS, IDS]), position_ids=positions, use_cache=False).logits
    for mine, right in zip(found, packed_logits(kind, rows), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_packed_rows_of_flash_attention_are_those_of_the_positions():
    positions = torch.cat([torch.arange(11), torch.arange(29)])[None]
    bounds = torch.tensor([0, 11, 40], dtype=torch.int32)
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 29, "max_length_k": 29}
    inputs = {"input_ids": torch.tensor([IDS]), "position_ids": positions, "use_cache": False}
    model = attnmesh_model("llama")
    assert torch.equal(model(**inputs, **given).logits, model(**inputs).logits)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q must be the documents of position_ids.*got \[0, 12, 40\]"):
        model(**inputs, **given | {"cu_seq_lens_q": torch.tensor([0, 12, 40])})
    with pytest.raises(ValueError, match="unsupported attention arguments cu_seq_lens_q"):
        model(**am.shard_inputs(am.ContextParallel(SoloComm()), torch.tensor([IDS])), cu_seq_lens_q=bounds)


@pytest.mark.parametrize(
    ("kind", "side"),
    [("llama", "left"), ("qwen3", "left"), ("mistral", "left"), ("qwen2", "right"), ("gpt_oss", "right")],
)
def test_padded_rows_equal_rows_without_padding(kind, side):
    ids, mask = torch.tensor([IDS, IDS]), torch.ones(2, len(IDS), dtype=torch.long)
    hidden = slice(0, 9) if side == "left" else slice(31, 40)
    mask[1, hidden] = 0
    rest = IDS[9:] if side == "left" else IDS[:31]
    with torch.no_grad():
        positions = torch.arange(40).expand(2, -1)
        found = attnmesh_model(kind)(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(found[0], logits_of(kind, IDS), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1, mask[1].bool()], logits_of(kind, rest), rtol=1e-4, atol=2e-4)


def test_generate_of_a_batch_with_left_padding():
    ids = torch.tensor([[0] * 8 + IDS[:20], IDS[:28]])
    mask = (torch.arange(28) >= torch.tensor([[8], [0]])).long()
    found = attnmesh_model("mistral").generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    for row, prompt in ((0, IDS[:20]), (1, IDS[:28])):
        wanted = greedy_tokens("mistral", prompt, 12)
        assert found[row, 28 : 28 + len(wanted)].tolist() == wanted


# What is refused.


def causal(length):
    return LayerMask(Causal(), None, None, range(length), range(length))


def another(kind, **sizes):
    from transformers import AutoConfig, AutoModel

    register_attention()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50} | sizes
    sizes |= {} if kind == "bert" else {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16}
    return AutoModel.from_config(AutoConfig.for_model(kind, **sizes), attn_implementation="attnmesh")


def test_what_their_attention_asks_for_is_refused_even_where_nobody_checked():
    ids = torch.tensor([[1, 2, 3]])
    x, mask = torch.zeros(1, 2, 3, 4), causal(3)
    with pytest.raises(ValueError, match="Linear: unsupported attention arguments position_bias"):
        transformers_attention(torch.nn.Linear(1, 1), x, x, x, mask, scaling=1.0, position_bias=x)
    attending = SimpleNamespace(attend=None)  # of a generator
    with pytest.raises(ValueError, match=r"must be causal for a model that generates, got Full\(\)"):
        another("bert").eval()(input_ids=ids, attention_pass=attending)


def test_another_implementation_is_refused():
    with pytest.raises(ValueError, match=r"attn_implementation .*must be 'attnmesh' .*, got 'eager'"):
        check_model(transformers_model("llama"))
    check_model(attnmesh_model("llama"))


def test_padding_inside_a_row_is_refused():
    ids, mask = torch.tensor([IDS]), torch.ones(1, len(IDS), dtype=torch.long)
    mask[0, 7:9] = 0
    with pytest.raises(ValueError, match="row 0 with hidden tokens 7 to 8 inside a document"):
        attnmesh_model("llama")(input_ids=ids, attention_mask=mask)


def test_a_mask_of_one_s_own_is_refused():
    mask = torch.zeros(1, 1, len(IDS), len(IDS))
    with pytest.raises(ValueError, match=r"LlamaAttention: attention_mask must be None or .*got .*\[1, 1, 40, 40\]"):
        attnmesh_model("llama")(input_ids=torch.tensor([IDS]), attention_mask=mask)


def test_mask_functions_of_others_are_refused():
    from transformers.masking_utils import create_causal_mask

    x = torch.zeros(1, 4, 8)
    config = attnmesh_model("llama").config
    for how in ("or_mask_function", "and_mask_function"):
        with pytest.raises(ValueError, match=r"got the mask function test_transformers_attention.*\.mine|or_masks"):
            create_causal_mask(config, x, None, None, **{how: mine})


def mine(batch, head, q, k):
    return k == 0


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_static_cache_is_refused(kind):
    from transformers import StaticCache

    cache = StaticCache(config=attnmesh_model(kind).config, max_cache_len=60)
    with pytest.raises(ValueError, match=r"KV cache must end with the last token.*for 5 queries"):
        attnmesh_model(kind)(input_ids=torch.tensor([IDS[:5]]), past_key_values=cache)


def test_dropout_is_refused_in_training_and_only_there():
    model = copy.deepcopy(attnmesh_model("llama"))
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.25
    ids = torch.tensor([IDS])
    with pytest.raises(ValueError, match=r"LlamaAttention: attention dropout must be 0, got 0\.25"):
        model.train()(input_ids=ids)
    torch.testing.assert_close(model.eval()(input_ids=ids).logits[0], logits_of("llama", IDS), rtol=1e-4, atol=1e-4)


def test_what_nobody_knows_is_refused():
    q = torch.zeros(1, 1, 2, 8)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match="Module: unsupported attention arguments bias, cap"):
        transformers_attention(module, q, q, q, causal(2), 1.0, cap=3.0, bias=q, use_cache=True, other=None)
    with pytest.raises(ValueError, match="Module: is_causal must not be False"):
        transformers_attention(module, q, q, q, causal(2), 1.0, is_causal=False)
    with pytest.raises(ValueError, match="Module: the model must make its masks by Transformers' create_causal_mask"):
        transformers_attention(module, q, q, q, None, 1.0)
    with pytest.raises(ValueError, match=r"Module: the mask must have the layer's sliding window 4, got Causal\(\)"):
        transformers_attention(module, q, q, q, causal(2), 1.0, sliding_window=4)


def test_gemma_2_has_a_softcap_on_one_device_and_over_ranks():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    register_attention()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, sliding_window=7, attn_logit_softcapping=1.5, initializer_range=0.5,
        )  # fmt: skip
        model = Gemma2ForCausalLM(config).eval()
    ids = torch.tensor([IDS])

    def computed(implementation, softcap=1.5):
        same = copy.deepcopy(model)
        for layer in same.model.layers:
            layer.self_attn.attn_logit_softcapping = softcap
        same.set_attn_implementation(implementation)
        return same

    wanted = computed("eager")(input_ids=ids).logits
    torch.testing.assert_close(computed("attnmesh")(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert (computed("attnmesh", softcap=None)(input_ids=ids).logits - wanted).abs().max() > 1e-2

    def rank(comm):
        cp = am.ContextParallel(comm)
        logits = computed("attnmesh")(**am.shard_inputs(cp, ids)).logits
        return cp.unshard(logits, 1, ids.shape[1])

    torch.testing.assert_close(am.run_virtual(2, rank)[0], wanted, rtol=1e-4, atol=1e-4)
