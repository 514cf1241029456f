"""A GRPO step with verl's own losses and engine API. Importing this module enables attnmesh's engine on the CPU."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnmesh.training.verl import enable

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of engines whose packages are not installed
    enable(device="cpu")

from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils
from verl.utils.model import get_hf_auto_model_class
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

PROMPT, RESPONSE = 7, 9

monkey_patch.is_trl_available = lambda: False  # verl's own engine imports a name from TRL that TRL 1.16 does not have
get_hf_auto_model_class(LlamaConfig(architectures=["LlamaForCausalLM"]))  # imports for seconds, here once for all ranks


def new_engine(folder: Path, ranks: int, *, own: bool = False, **changes: Any) -> Any:
    """An engine from verl's registry; with `own`, verl's own engine, which pads and computes eager attention."""
    for_model = {name: changes.pop(name) for name in list(changes) if name in HFModelConfig.__dataclass_fields__}
    model = HFModelConfig(
        path=str(folder), load_tokenizer=False, override_config={"attn_implementation": "eager"},
        **{"use_remove_padding": not own, "enable_gradient_checkpointing": False, **for_model},
    )  # fmt: skip
    config = FSDPEngineConfig(
        ulysses_sequence_parallel_size=ranks, use_torch_compile=False,
        **{"strategy": "fsdp2", "mixed_precision": dict.fromkeys(("param_dtype", "reduce_dtype"), "fp32"), **changes},
    )  # fmt: skip
    optimizer = FSDPOptimizerConfig(optimizer="SGD", lr=0.1, total_training_steps=10, clip_grad=1e9)
    parts = model, config, optimizer, CheckpointConfig()
    engine = FSDPEngineWithLMHead(*parts) if own else EngineRegistry.new("language_model", config.strategy, *parts)
    engine.initialize()
    return engine


def batch(rows: int, vocabulary: int) -> TensorDict:
    """Sequences of several lengths, padded left and right as verl pads them, with advantages of GRPO."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (rows, PROMPT + RESPONSE), generator=made)
    before = torch.randint(1, PROMPT + 1, (rows, 1), generator=made)
    after = torch.randint(2, RESPONSE + 1, (rows, 1), generator=made)
    at = torch.arange(PROMPT + RESPONSE)
    mask = ((at >= PROMPT - before) & (at < PROMPT + after)).long()
    response_mask = mask[:, PROMPT:]
    rewards = response_mask * torch.rand(rows, RESPONSE, generator=made)
    advantages, _ = compute_grpo_outcome_advantage(rewards, response_mask, np.arange(rows) // 2)
    return TensorDict(
        {
            "input_ids": ids * mask, "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "attention_mask": mask,
            "response_mask": response_mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "advantages": advantages,
        },
        batch_size=rows,
    )  # fmt: skip


def grpo_step(engine: Any, data: TensorDict, **how: Any) -> dict[str, Any]:
    """Log-probabilities and entropies, then one update: verl's losses and metrics, all gradients and parameters."""
    rows = data.shape[0]
    data = data.chunk(engine.get_data_parallel_size())[engine.get_data_parallel_rank()]
    data = left_right_2_no_padding(data.clone())
    tensordict_utils.assign_non_tensor(
        data, temperature=0.7, use_remove_padding=engine.use_remove_padding, calculate_entropy=True,
        calculate_sum_pi_squared=True, **how,
    )  # fmt: skip
    with engine.eval_mode():
        found = engine.infer_batch(data)["model_output"]
    padded = {name: no_padding_2_padding(x, data) * data["response_mask"] for name, x in found.items()}
    # As if an earlier policy had sampled: other log-probabilities, so that some ratios are clipped.
    row = engine.get_data_parallel_rank() * data.shape[0]
    noise = torch.linspace(-0.6, 0.6, rows * RESPONSE).view(rows, RESPONSE)[row : row + data.shape[0]]
    data["old_log_probs"] = padded["log_probs"] + noise
    data["ref_log_prob"] = padded["log_probs"] - noise.flip(1) / 4
    tensordict_utils.assign_non_tensor(data, global_batch_size=rows)
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=2, use_dynamic_bsz=True, entropy_coeff=0.01, use_kl_loss=True,
        kl_loss_coef=0.1, use_torch_compile=False,
    )  # fmt: skip
    with engine.train_mode():
        step = engine.train_batch(data, partial(ppo_loss, config))
        gradients = {name: whole(x.grad) for name, x in engine.module.named_parameters() if x.grad is not None}
    parameters = {name: whole(x.detach()) for name, x in engine.module.named_parameters()}
    return {
        "row": row, "loss": sum(step["loss"]), "grad_norm": step["metrics"].get("grad_norm"),
        "outputs": {name: x.float().numpy() for name, x in padded.items()},
        "gradients": gradients, "parameters": parameters,
    }  # fmt: skip


def whole(x: torch.Tensor) -> np.ndarray:
    return (x.full_tensor() if isinstance(x, DTensor) else x).numpy().copy()
