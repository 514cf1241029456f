"""Models of a few thousand numbers and a tokenizer of a few words, as folders and GGUF files. Nothing is fetched."""

from pathlib import Path

import torch

WORDS = ["<s>", "</s>", "<unk>", *"abcdefghijkl", "ab"]


def tiny_config(**changes):
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2,
        "intermediate_size": 48, "vocab_size": len(WORDS), "max_position_embeddings": 64, "bos_token_id": 0,
        "eos_token_id": 1, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return LlamaConfig(**(sizes | changes))


def tiny_llama(**changes):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ranks_per_node = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    ranks_per_node.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=ranks_per_node, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def write_folder(folder: Path, model=None, **how) -> Path:
    """A model's folder as save_pretrained writes it."""
    (tiny_llama() if model is None else model).save_pretrained(folder, **how)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_gguf(path: Path, model=None) -> Path:
    """A Llama as llama.cpp's converter writes it, in float32; without a model, a file of one tensor."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    if model is None:
        writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    else:
        _add_llama(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_llama(writer, model) -> None:
    config = model.config
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers": "blk",
    }  # fmt: skip
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        for part, count in heads.items():  # llama.cpp's rotary embedding pairs neighbours, not halves
            if part in name:
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, values)
