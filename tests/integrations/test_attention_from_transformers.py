"""Attention modules of Transformers, taken apart: their own output comes back from the parts."""

import dataclasses
from copy import copy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from torch import nn
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3RMSNorm, Gemma3TextConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from attnmesh.decode import AttentionConfig, Norm, Rope
from attnmesh.models import attention_from_transformers
from attnmesh.ops.block.config import split_and_rotate
from attnmesh.ops.block.norm_rope import rms_norm
from attnmesh.plan.decode import DecodeSharding

LENGTH, HIDDEN, Q, KV, D = 24, 42, 6, 2, 16
SIZES = {
    "hidden_size": HIDDEN, "num_attention_heads": Q, "num_key_value_heads": KV, "head_dim": D, "num_hidden_layers": 2,
    "intermediate_size": 32, "vocab_size": 16, "max_position_embeddings": 64, "attn_implementation": "eager",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}

# name -> (modelling file, family, config, layer, window)
CASES = {
    "llama": (modeling_llama, "Llama", LlamaConfig(**SIZES), 0, None),
    "llama, biases, llama3": (
        modeling_llama, "Llama", LlamaConfig(**SIZES, attention_bias=True, rope_parameters=LLAMA3), 0, None
    ),
    "llama, yarn": (modeling_llama, "Llama", LlamaConfig(**SIZES, rope_parameters=YARN), 1, None),
    "llama, linear": (modeling_llama, "Llama", LlamaConfig(**SIZES, rope_parameters=LINEAR), 1, None),
    "llama, a window it ignores": (modeling_llama, "Llama", LlamaConfig(**SIZES, sliding_window=5), 0, None),
    "mistral": (modeling_mistral, "Mistral", MistralConfig(**SIZES, sliding_window=None), 0, None),
    "mistral, window": (modeling_mistral, "Mistral", MistralConfig(**SIZES, sliding_window=5), 0, 5),
    "mixtral, window": (modeling_mixtral, "Mixtral", MixtralConfig(**SIZES, sliding_window=7), 0, 7),
    "qwen2": (modeling_qwen2, "Qwen2", Qwen2Config(**SIZES), 0, None),
    "qwen3": (modeling_qwen3, "Qwen3", Qwen3Config(**SIZES), 0, None),
    "qwen3, window": (
        modeling_qwen3, "Qwen3",
        Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1), 1, 6,
    ),
    "gpt-oss, window": (modeling_gpt_oss, "GptOss", GptOssConfig(**SIZES, sliding_window=4), 0, 4),
    "gpt-oss, full": (modeling_gpt_oss, "GptOss", GptOssConfig(**SIZES, sliding_window=4), 1, None),
    "gemma2, softcap": (
        modeling_gemma2, "Gemma2", Gemma2Config(**SIZES, sliding_window=6, attn_logit_softcapping=0.7), 0, 6
    ),
}  # fmt: skip


def module_of(case):
    """The attention module of a case, its input norm and its rotary embedding, every weight random."""
    file, family, config, layer, window = CASES[case]
    norm = modeling_llama.LlamaRMSNorm if family == "Gemma2" else getattr(file, f"{family}RMSNorm")  # its own adds 1
    parts = (
        getattr(file, f"{family}Attention")(config, layer), norm(HIDDEN, eps=1e-3),
        getattr(file, f"{family}RotaryEmbedding")(config),
    )  # fmt: skip
    with torch.no_grad():
        for part in parts:
            for x in part.parameters():
                x.uniform_(-0.5, 0.5)
            for name, child in part.named_modules():
                if name.endswith("norm"):
                    child.weight.add_(1.0)
    return *parts, window


def who_sees_whom(window):
    at = torch.arange(LENGTH)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < (window or LENGTH))


def from_parts(config: AttentionConfig, weights, x, positions):
    """The whole module from its parts, in plain torch."""
    if config.norm is not None:
        x = rms_norm(x, weights.norm, config.norm)
    q, kv = F.linear(x, weights.qkv, weights.qkv_bias).split([Q * D, 2 * KV * D], -1)
    q, k, v = split_and_rotate(q, kv, positions, config, weights)
    scores = q @ k.repeat_interleave(Q // KV, 1).transpose(-1, -2) * config.scale
    if config.softcap is not None:
        scores = config.softcap * (scores / config.softcap).tanh()
    scores = scores.masked_fill(~who_sees_whom(config.window), -torch.inf)
    if weights.sinks is not None:
        sink = weights.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    seen = scores.softmax(-1)[..., :LENGTH] @ v.repeat_interleave(Q // KV, 1)
    return F.linear(seen.transpose(1, 2).flatten(-2), weights.out, weights.out_bias)


@pytest.mark.parametrize(
    ("case", "normed"),
    [
        ("llama", False),
        ("llama, biases, llama3", True),
        ("llama, yarn", False),
        ("llama, linear", False),
        ("llama, a window it ignores", True),
        ("mistral", True),
        ("mistral, window", False),
        ("mixtral, window", True),
        ("qwen2", False),
        ("qwen3", False),
        ("qwen3, window", True),
        ("gpt-oss, window", True),
        ("gpt-oss, full", False),
        ("gemma2, softcap", True),
    ],
)
def test_the_parts_make_the_module_s_own_output(case, normed):
    module, norm, rotary, window = module_of(case)
    config, weights = attention_from_transformers(module, input_norm=norm if normed else None)
    assert config.window == window
    x = torch.randn(2, LENGTH, HIDDEN)
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) + 9])
    bias = torch.zeros(LENGTH, LENGTH).masked_fill(~who_sees_whom(window), -torch.inf)
    with torch.no_grad():
        right = module(norm(x) if normed else x, rotary(x, positions), bias.expand(2, 1, -1, -1))[0]
        got = from_parts(config, weights, x, positions)
        scale = right.abs().max()
        assert (got - right).abs().max() <= 1e-5 * scale
        # Every stage matters: leave one out, and the output is another.
        for stage in ("norm", "norm_before_rope", "rope", "window", "softcap"):
            if getattr(config, stage) is not None:
                without = from_parts(dataclasses.replace(config, **{stage: None}), weights, x, positions)
                assert (without - right).abs().max() > 1e-3 * scale, stage
        for tensor in ("qkv_bias", "out_bias", "sinks", "q_norm_before_rope", "k_norm_before_rope", "norm"):
            if getattr(weights, tensor) is not None:
                without = from_parts(config, dataclasses.replace(weights, **{tensor: None}), x, positions)
                assert (without - right).abs().max() > 1e-3 * scale, tensor


def test_what_each_family_has():
    has = {}
    for case in ("llama", "llama, biases, llama3", "mistral", "qwen2", "qwen3", "gpt-oss, full"):
        weights = attention_from_transformers(module_of(case)[0])[1]
        has[case] = {name for name, x in vars(weights).items() if x is not None} - {"qkv", "out"}
    assert has == {
        "llama": set(),
        "llama, biases, llama3": {"qkv_bias", "out_bias"},
        "mistral": set(),
        "qwen2": {"qkv_bias"},
        "qwen3": {"q_norm_before_rope", "k_norm_before_rope"},
        "gpt-oss, full": {"qkv_bias", "out_bias", "sinks"},
    }


@pytest.mark.parametrize("case", ["llama", "llama, biases, llama3", "llama, yarn", "llama, linear", "gpt-oss, full"])
def test_turning_is_that_of_transformers_to_the_bit(case):
    module, _, rotary, _ = module_of(case)
    rope = attention_from_transformers(module)[0].rope
    x = torch.randn(2, Q, 5, D)
    positions = torch.tensor([[0, 1, 2, 3, 4], [60, 100, 1000, 100_000, 1_000_000]])
    apply = CASES[case][0].apply_rotary_pos_emb
    right, _ = apply(x, x, *rotary(x, positions))
    assert torch.equal(rope.rotate(x, positions), right)
    assert (rope.factor == 1.0) == (case not in ("llama, yarn", "gpt-oss, full"))


def test_the_constructors_make_what_transformers_does():
    plain, llama3 = (
        attention_from_transformers(module_of(case)[0])[0].rope for case in ("llama", "llama, biases, llama3")
    )
    assert Rope.plain(D) == plain
    assert Rope.llama3(D, 100.0, 8.0, 1.0, 4.0, 64) == llama3
    published = dict(LLAMA3, rope_theta=500000.0, original_max_position_embeddings=8192)
    config = LlamaConfig(**SIZES | {"head_dim": 128}, rope_parameters=published)
    module = modeling_llama.LlamaAttention(config, 0)
    assert Rope.llama3(128, 500000.0, 8.0, 1.0, 4.0, 8192) == attention_from_transformers(module)[0].rope


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("llama, biases, llama3", (2, 1, 1)),
        ("qwen3", (1, 3, 1)),
        ("gpt-oss, window", (2, 1, 3)),
        ("llama, biases, llama3", (1, 2, 2)),
    ],
)
def test_shards_hold_the_rows_of_their_heads(case, sizes):
    sharding = DecodeSharding(*sizes)
    module, norm, *_ = module_of(case)
    whole_config, whole = attention_from_transformers(module, input_norm=norm)
    full_q, full_k, full_v = whole.qkv.split([Q * D, KV * D, KV * D])
    q_rows, out_columns = [], []
    for rank in range(sharding.ranks):
        config, weights = attention_from_transformers(module, sharding, rank, input_norm=norm)
        assert config == whole_config
        kv = sharding.kv_heads(rank, KV)
        q, k, v = weights.qkv.split([len(weights.qkv) - 2 * len(kv) * D, len(kv) * D, len(kv) * D])
        assert torch.equal(k, full_k[kv.start * D : kv.stop * D])
        assert torch.equal(v, full_v[kv.start * D : kv.stop * D])
        q_rows.append(q)
        out_columns.append(weights.out)
        again = attention_from_transformers(module, sharding, rank, replicate_q=True)[1]
        again.check(dataclasses.replace(config, norm=None), sharding, rank, replicate_q=True)
    assert torch.equal(torch.cat(q_rows), full_q)
    assert torch.equal(torch.cat(out_columns, 1), whole.out)


def test_a_rope_and_norms_of_one_s_own():
    module = module_of("qwen3")[0]
    rope = Rope.plain(8, 77.0, "pairs")
    config, _ = attention_from_transformers(module, rope=rope, input_norm=modeling_qwen3.Qwen3RMSNorm(HIDDEN, eps=0.25))
    assert config.rope is rope
    assert config.norm == Norm(0.25)
    assert config.norm_before_rope == Norm(module.q_norm.variance_epsilon)
    assert config.scale == D**-0.5


class Unknown(nn.Module):
    """Built like Llama's, by another name: how it turns cannot be seen."""

    def __init__(self):
        super().__init__()
        llama = module_of("llama")[0]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = llama.q_proj, llama.k_proj, llama.v_proj, llama.o_proj
        self.config, self.head_dim, self.scaling = llama.config, llama.head_dim, 0.5


def test_an_unknown_family_says_how_it_turns():
    with pytest.raises(ValueError, match="rope must be given for Unknown"):
        attention_from_transformers(Unknown())
    config, _ = attention_from_transformers(Unknown(), rope=Rope.plain(D, layout="pairs"))
    assert (config.rope.layout, config.scale) == ("pairs", 0.5)


def test_what_it_does_not_know_is_refused():
    with pytest.raises(
        ValueError, match=r"module must have q_proj, k_proj, v_proj, o_proj.*, got Linear with bias, weight"
    ):
        attention_from_transformers(nn.Linear(2, 2))
    more = Unknown()
    more.gate = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"module must have .*, got Unknown with gate, k_proj"):
        attention_from_transformers(more, rope=Rope.plain(D))
    gemma = Gemma3Attention(Gemma3TextConfig(**SIZES), 0)
    with pytest.raises(ValueError, match=r"variance_epsilon.*, got Gemma3RMSNorm"):
        attention_from_transformers(gemma, rope=Rope.plain(D))
    with pytest.raises(ValueError, match=r"variance_epsilon.*, got Gemma3RMSNorm"):
        attention_from_transformers(module_of("llama")[0], input_norm=Gemma3RMSNorm(HIDDEN))
    clipped = Unknown()
    clipped.config = copy(clipped.config)
    clipped.config.clip_qkv = 50.0
    with pytest.raises(ValueError, match=r"must not use clip_qkv, got Unknown with clip_qkv=50\.0"):
        attention_from_transformers(clipped, rope=Rope.plain(D))
    narrow = Unknown()
    narrow.q_proj = nn.Linear(HIDDEN, Q * D, bias=False).to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"q_proj of Unknown must have floating point weights, got torch\.float8_e4m3fn"
    ):
        attention_from_transformers(narrow, rope=Rope.plain(D))
    wide = Unknown()
    wide.q_proj = nn.Linear(HIDDEN, 2 * Q * D, bias=False)
    with pytest.raises(ValueError, match=r"qkv must be \[160, 42\] on rank 0, got \[256, 42\]"):
        attention_from_transformers(wide, rope=Rope.plain(D))
    some = Unknown()
    some.q_proj = nn.Linear(HIDDEN, Q * D, bias=True)
    with pytest.raises(ValueError, match=r"must have a bias.*, got 1 biases"):
        attention_from_transformers(some, rope=Rope.plain(D))


def test_a_layer_that_says_it_does_not_slide_has_no_window():
    module = Unknown()
    module.sliding_window, module.is_sliding = 5, False
    assert attention_from_transformers(module, rope=Rope.plain(D))[0].window is None
    module.is_sliding = True
    assert attention_from_transformers(module, rope=Rope.plain(D))[0].window == 5


def test_frequencies_that_change_with_the_length_are_refused():
    dynamic = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0})
    with pytest.raises(ValueError, match=r"rope_type must be one of default, linear, .*, got 'dynamic'"):
        attention_from_transformers(modeling_llama.LlamaAttention(dynamic, 0))
