"""GRPO with verl's FSDP engine, whose ranks share every sequence with attnmesh: a small Llama learns to count.

    torchrun --nproc-per-node 2 examples/train_grpo_verl.py
    torchrun --nproc-per-node 4 examples/train_grpo_verl.py --share 2

Advantages, losses, batches and the update are verl's; in a training script of verl, its trainer makes these calls. The
model has windows of 8 tokens and 3 heads, which verl's Ulysses cannot divide between 2 ranks. `--share` is the number
of ranks that share a sequence; other ranks have other sequences. The reward is the share of tokens that follow the
previous token; rewards do not depend on the number of ranks. Runs on CPU ranks (gloo), in about a minute. Needs
`pip install "attnmesh[verl]"`.
"""

import argparse
import os
import tempfile
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM

from attnmesh.training.verl import enable

warnings.simplefilter("ignore", UserWarning)  # of verl: engines whose packages are not installed
enable(device="cpu")  # on GPUs: enable()

from tensordict import TensorDict  # noqa: E402  (verl reads its platform as it is imported)
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # noqa: E402
from verl.utils.tensordict_utils import assign_non_tensor  # noqa: E402
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # noqa: E402

VOCABULARY, PROMPT, RESPONSE, PROMPTS, GROUP = 8, 3, 12, 4, 8


def small_model() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, head_dim=16, sliding_window=8, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    return MistralForCausalLM(config)


def new_engine(folder: str, share: int) -> Any:
    """The engine that a worker of verl gets from its registry; `share` ranks share a sequence."""
    float32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        HFModelConfig(path=folder, load_tokenizer=False),
        FSDPEngineConfig(
            strategy="fsdp2", ulysses_sequence_parallel_size=share, mixed_precision=float32, use_torch_compile=False
        ),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=100),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


@torch.no_grad()
def sample(model: nn.Module, generator: torch.Generator) -> TensorDict:
    """Responses to prompts, several for each prompt, with the advantages of GRPO. All ranks sample the same."""
    ids = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, 0)
    for _ in range(RESPONSE):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], 1)
    rewards = (ids[:, PROMPT:] == (ids[:, PROMPT - 1 : -1] + 1) % VOCABULARY).float() / RESPONSE
    mask = torch.ones_like(ids)
    response_mask = mask[:, PROMPT:]
    advantages, _ = compute_grpo_outcome_advantage(rewards, response_mask, np.arange(len(ids)) // GROUP)
    return TensorDict(
        {
            "input_ids": ids, "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": mask,
            "response_mask": response_mask, "position_ids": mask.cumsum(1) - 1, "advantages": advantages,
            "rewards": rewards.sum(1),
        },
        batch_size=len(ids),
    )  # fmt: skip


def update(engine: Any, batch: TensorDict) -> None:
    """Log-probabilities under the policy that sampled, then an update from every half of the batch."""
    ranks = engine.get_data_parallel_size()
    batch = batch.chunk(ranks)[engine.get_data_parallel_rank()]  # as a worker of verl receives it
    halves = [left_right_2_no_padding(half.clone()) for half in batch.chunk(2)]
    for data in halves:
        assign_non_tensor(data, temperature=1.0, max_token_len_per_gpu=128, global_batch_size=len(data) * ranks)
        with engine.eval_mode():
            log_probs = engine.infer_batch(data)["model_output"]["log_probs"]
        data["old_log_probs"] = no_padding_2_padding(log_probs, data)
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=GROUP, use_dynamic_bsz=True, use_torch_compile=False)
    for data in halves:
        with engine.train_mode():
            engine.train_batch(data, partial(ppo_loss, config))


def load(model: nn.Module, engine: Any) -> None:
    """The weights of the engine into the model that samples, as verl sends them to vLLM or SGLang."""
    weights, _ = engine.get_per_tensor_param()
    whole: dict[str, Tensor] = dict(weights)
    model.load_state_dict(whole, strict=False)  # tied weights come once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=int(os.environ["WORLD_SIZE"]), help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    sampler, generator, rewards = small_model(), torch.Generator().manual_seed(1), []
    with tempfile.TemporaryDirectory() as folder:
        sampler.save_pretrained(folder)  # every rank has a folder of its own, as there is no process group yet
        dist.init_process_group("gloo")
        engine = new_engine(folder, options.share)
    for step in range(options.steps):
        batch = sample(sampler, generator)
        update(engine, batch)
        load(sampler, engine)
        rewards.append(batch["rewards"].mean().item())
        if dist.get_rank() == 0:
            print(f"step {step}: mean reward {rewards[-1]:.3f}", flush=True)
    assert rewards[-1] > 2 * rewards[0], "the model did not learn"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
