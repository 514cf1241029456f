"""Write a tiny random model and packed documents for `packed.yml`, into build/axolotl of the current folder."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path("build/axolotl")
VOCABULARY = 64
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def write_model(folder: Path) -> None:
    words = [*SPECIAL.values(), *(f"w{i}" for i in range(len(SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.1)
    model.save_pretrained(folder)


def write_documents(path: Path, lengths: list[int], generator: torch.Generator) -> None:
    """Documents of these lengths, whose first quarter is a prompt without labels."""
    rows = []
    for length in lengths:
        ids = torch.randint(len(SPECIAL), VOCABULARY, (length,), generator=generator).tolist()
        prompt = max(1, length // 4)
        labels = [-100] * prompt + ids[prompt:]
        rows.append(json.dumps({"input_ids": ids, "attention_mask": [1] * length, "labels": labels}) + "\n")
    path.write_text("".join(rows))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    write_model(FOLDER / "model")
    write_documents(FOLDER / "train.jsonl", torch.randint(5, 24, (60,), generator=generator).tolist(), generator)
    write_documents(FOLDER / "test.jsonl", [10] * 20, generator)
