"""Attention blocks: exact weights, the memory of a cache, and blocks made from Transformers' attention layers."""

from dataclasses import replace
from functools import cache

import torch

import attnmesh as am
from attnmesh.ops.storage import values_of
from attnmesh.testing.block import BlockRunner

FAMILIES = ("llama", "qwen3", "mistral", "gpt-oss", "gpt-oss full")


def random_sequences(sequences, length, config, dtype=torch.float32):
    """Return x [sequences, length, hidden], the same on every call."""
    return torch.randn(sequences, length, config.hidden, generator=torch.Generator().manual_seed(3)).to(dtype)


def exact_weights(weights, sequences, length):
    """Return weights and inputs of a few bits each: projections are exact in any order of summation."""
    generator = torch.Generator().manual_seed(5)

    def few_bits(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float() / 4

    bias = None if weights.qkv_bias is None else few_bits(*weights.qkv_bias.shape)
    weights = replace(weights, qkv=few_bits(*weights.qkv.shape), qkv_bias=bias)
    return weights, few_bits(sequences, length, weights.qkv.shape[1])


def pools_of(cache, layers=1):
    """Return the memory of a cache: keys, values and, where there is one per token, their scales; fp8 as bytes."""
    pools = []
    for stored in (pool for layer in range(layers) for pool in (cache.keys(layer), cache.values(layer))):
        values = values_of(stored)
        pools.append(values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values)
        if not isinstance(stored, torch.Tensor) and stored.scales.ndim > 1:
            pools.append(stored.scales)
    return pools


def cache_state(cache, layers=1):
    """Return all of a cache's memory and tables, bit by bit, and its statistics as text."""
    memory = [pool.contiguous().view(torch.uint8).clone() for pool in (*pools_of(cache, layers), cache.block_table)]
    return memory, [str(stats) for stats in cache.stats()]


def same_state(one, other):
    """Return whether two states of a cache are equal to the last bit."""
    return one[1] == other[1] and all(map(torch.equal, one[0], other[0]))


def assert_outputs_close(outputs, exact, bound=1e-5):
    """Assert that every position that was fed is right, relative to the largest exact output."""
    fed = ~outputs.flatten(2).isnan().all(-1)
    assert fed.any()
    error = (outputs.double() - exact)[fed].abs().max() / exact.abs().max()
    assert error <= bound, error  # NaN fails


def fed_lengths(outputs):
    """Return how many positions of every sequence were fed, without gaps."""
    fed = ~outputs.flatten(2).isnan().all(-1)
    lengths = fed.sum(1)
    assert torch.equal(fed, torch.arange(fed.shape[1]) < lengths[:, None])
    return lengths.tolist()


def factorizations(world):
    """Return every (tp, kvdp, cp) of `world` ranks."""
    return [
        (tp, kvdp, world // tp // kvdp)
        for tp in range(1, world + 1)
        if world % tp == 0
        for kvdp in range(1, world // tp + 1)
        if world // tp % kvdp == 0
    ]


@cache
def transformers_layer(family, q_heads, kv_heads, dtype=torch.float32):
    """Return a Transformers attention module with random weights."""
    from transformers import AutoConfig

    sizes = {"hidden_size": 3 * q_heads, "num_attention_heads": q_heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    torch.manual_seed(1000 * FAMILIES.index(family) + 10 * q_heads + kv_heads)  # in every process the same
    match family:
        case "llama":
            from transformers.models.llama.modeling_llama import LlamaAttention as Attention

            scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            scaling |= {"original_max_position_embeddings": 32, "rope_theta": 500.0}
            config = AutoConfig.for_model("llama", **sizes, rope_parameters=scaling)
            at = 0
        case "qwen3":
            from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention as Attention

            config, at = AutoConfig.for_model("qwen3", **sizes), 0
        case "mistral":
            from transformers.models.mistral.modeling_mistral import MistralAttention as Attention

            config, at = AutoConfig.for_model("mistral", **sizes, sliding_window=13), 0
        case "gpt-oss" | "gpt-oss full":
            from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention as Attention

            config = AutoConfig.for_model("gpt_oss", **sizes, num_hidden_layers=2, sliding_window=9)
            at = 0 if family == "gpt-oss" else 1  # windows alternate
    config._attn_implementation = "eager"
    module = Attention(config, at)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(1 + 0.3 * torch.randn_like(weight) if "norm" in name else 0.2 * torch.randn_like(weight))
    return module.to(dtype).eval()


def layer_outputs(module, x):
    """Return the module's own output [B, L, hidden] for whole sequences x [B, L, hidden]."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config, length = module.config, x.shape[1]
    rotary = _rotary(config)
    positions = torch.arange(length)[None]
    window = config.sliding_window if config.model_type == "mistral" else getattr(module, "sliding_window", None)
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    mask = make(config, x, attention_mask=None, past_key_values=None, position_ids=positions)
    with torch.no_grad():
        cos, sin = rotary(x, positions)
        return module(x, position_embeddings=(cos.to(x.dtype), sin.to(x.dtype)), attention_mask=mask)[0]


def _rotary(config):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return (GptOssRotaryEmbedding if config.model_type == "gpt_oss" else LlamaRotaryEmbedding)(config)


def block_from_layer(module, sharding, comm, **options):
    """Return the sharded block with a module's weights."""
    exchange = options.get("exchange") or am.decode.Exchange()
    config, weights = am.models.attention_from_transformers(
        module, sharding, comm.rank, replicate_q=exchange.replicate_q
    )
    return am.AttentionBlock(config, weights, sharding, comm, **options)


def generate(block, x, prompts, steps, *, tokens=1, cache=None, storage=None, most=8):
    """Feed x [B, L, hidden]: prompts of these lengths, at most `most` tokens per step, then `steps` steps of `tokens`.

    Returns the outputs [B, L, hidden] of all positions fed, NaN elsewhere.
    """
    batch, longest = len(x), max(prompts) + steps * tokens
    if cache is None:
        blocks = batch * -(-longest // 4)
        cache = block.make_cache(batch=batch, num_blocks=blocks, block_size=4, max_length=longest, storage=storage)
    return BlockRunner(block, cache, x).generate(prompts, steps, tokens, most)
