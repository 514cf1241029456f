"""Tune a model by preferences with TRL's DPOTrainer, in one process and over ranks, and compare what both log.

    python examples/tune_preferences.py
    python examples/tune_preferences.py --ranks 4 --steps 8 --length 300

Answers that count upwards are preferred to answers that count downwards. Over ranks each process computes a part of
every row, of the model and of the reference model; the log-probabilities of all tokens are gathered, and every rank
computes the loss. `enable()` and `ParallelismConfig(cp_size=...)` are all that differs: TRL alone refuses context
parallelism. Losses, rewards and gradient norms are equal up to rounding, which is asserted. The model is a Llama with
random weights; nothing is downloaded. Needs `pip install "attnmesh[train]"`; takes about half a minute on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(60)]
COMPARED = ("loss", "grad_norm", "rewards/margins", "rewards/accuracies", "logps/chosen", "entropy")


def tokenizer() -> Any:
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def preferences(length: int) -> dict[str, list[str]]:
    """Prompts, answers that count upwards, and shorter ones that count downwards."""
    starts = range(0, 60, 5)
    return {
        "prompt": [f"{WORDS[start]} {WORDS[(start + 1) % 60]}" for start in starts],
        "chosen": ["".join(f" {WORDS[(s + 2 + i) % 60]}" for i in range(length)) for s in starts],
        "rejected": ["".join(f" {WORDS[(s - i) % 60]}" for i in range(length - 3 - s // 5)) for s in starts],
    }


def train(arguments: argparse.Namespace, world: int) -> list[dict[str, float]]:
    """What TRL logs in every step."""
    import torch
    from accelerate import ParallelismConfig
    from datasets import Dataset, disable_progress_bars
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    from attnmesh.training.accelerate import enable

    disable_progress_bars()
    if world > 1:
        enable()
    shape = LlamaConfig(
        vocab_size=62, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape)
    reference = LlamaForCausalLM(shape)
    reference.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            folder, max_length=None, per_device_train_batch_size=2, max_steps=arguments.steps, learning_rate=1e-4,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            bf16=False, disable_tqdm=True, gradient_checkpointing=False, ddp_find_unused_parameters=False,
            parallelism_config=ParallelismConfig(cp_size=world) if world > 1 else None,
        )  # fmt: skip
        trainer = DPOTrainer(
            model, reference, config, train_dataset=Dataset.from_dict(preferences(arguments.length)),
            processing_class=tokenizer(),
        )  # fmt: skip
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def run(arguments: argparse.Namespace, ranks: int) -> list[dict[str, float]]:
    """The log of a run over `ranks` processes."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        options = ["--steps", str(arguments.steps), "--length", str(arguments.length), "--result", str(log)]
        threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
        subprocess.run(
            [sys.executable, *launcher, __file__, *options], check=True, env={**os.environ, "OMP_NUM_THREADS": threads},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune a model by preferences, in one process and over ranks.")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument("--steps", type=int, default=6, help="steps of the optimizer (default 6)")
    parser.add_argument("--length", type=int, default=201, help="tokens of the longest answer (default 201)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.result:
        log = train(arguments, int(os.environ["WORLD_SIZE"]))
        if os.environ["RANK"] == "0":
            arguments.result.write_text(json.dumps(log))
        return

    one, over_ranks = run(arguments, 1), run(arguments, arguments.ranks)
    print(f"{'step':>4}  " + "  ".join(f"{name:>18}" for name in COMPARED))
    for step, (alone, sharded) in enumerate(zip(one, over_ranks, strict=True), 1):
        print(f"{step:4}  " + "  ".join(f"{sharded[name]:18.6f}" for name in COMPARED))
        for name in COMPARED:
            # Log-probabilities of rows are sums over hundreds of tokens; the others come from their differences.
            assert abs(alone[name] - sharded[name]) < 1e-4 * max(1, abs(alone[name])), (name, alone, sharded)
    assert over_ranks[-1]["rewards/margins"] > over_ranks[0]["rewards/margins"]
    print(f"equal in one process and over {arguments.ranks} ranks")


if __name__ == "__main__":
    main()
