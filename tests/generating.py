"""Attention layers of real architectures, small and random, and sharded blocks that generate tokens with them."""

from functools import cache

import torch

import attnmesh as am

FAMILIES = ("llama", "qwen3", "mistral", "gpt-oss", "gpt-oss full")


def factorisations(world):
    return [
        (tp, kvdp, world // tp // kvdp)
        for tp in range(1, world + 1)
        if world % tp == 0
        for kvdp in range(1, world // tp + 1)
        if world // tp % kvdp == 0
    ]


@cache
def layer(family, q_heads, kv_heads, dtype=torch.float32):
    """A Transformers attention module with random weights."""
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


def forward(module, x):
    """The module's own answer for whole sequences x [B, L, hidden], every position: [B, L, hidden]."""
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


def block_of(module, sharding, comm, **options):
    """The sharded block with a module's weights."""
    exchange = options.get("exchange") or am.Exchange()
    config, weights = am.attention_from_transformers(module, sharding, comm.rank, replicate_q=exchange.replicate_q)
    return am.AttentionBlock(config, weights, sharding, comm, **options)


def generate(block, x, prompts, steps, *, tokens=1, cache=None, storage=None, check=None):
    """Feed x [B, L, hidden]: prompts of these lengths, then `steps` steps of `tokens` tokens a sequence.

    Returns the outputs [B, L, hidden] of all positions fed, NaN elsewhere.
    """
    batch, _, hidden = x.shape
    longest = max(prompts) + steps * tokens
    if cache is None:
        blocks = batch * -(-longest // 4)
        cache = block.make_cache(batch=batch, num_blocks=blocks, block_size=4, max_length=longest, storage=storage)
    seen = torch.full_like(x, torch.nan)
    sequences = [cache.allocate(n) for n in prompts]

    def feed(some, count):
        begins = [sequence.length for sequence in some]
        step = cache.append(some, count)
        fed = x.new_full((batch, count, hidden), torch.nan)  # rows without new tokens may hold anything
        for sequence, begin in zip(some, begins, strict=True):
            fed[sequence.row] = x[sequences.index(sequence), begin : begin + count]
        out = block(fed, cache, step)
        for sequence, begin in zip(some, begins, strict=True):
            seen[sequences.index(sequence), begin : begin + count] = out[sequence.row]

    for sequence, length in zip(sequences, prompts, strict=True):
        while sequence.length < length:
            feed([sequence], min(8, length - sequence.length))
    for _ in range(steps):
        feed(sequences, tokens)
    return seen
