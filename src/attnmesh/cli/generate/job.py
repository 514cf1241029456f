"""What the ranks are to do, checked before any of them starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnmesh.cli.generate.bad_input import BadInput
from attnmesh.core.layouts import Layout
from attnmesh.generation.engine import min_prefill_chunk, token_bytes
from attnmesh.generation.sampling import Sampling
from attnmesh.integrations.checkpoint import weight_bytes
from attnmesh.integrations.memory import free_memory, in_gib
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS


@dataclass(frozen=True)
class Job:
    """A model's folder, prompts for it one after the other, and how to answer them. Picklable: ranks are processes."""

    folder: Path
    device: str
    dtype: torch.dtype
    prompts: tuple[tuple[int, ...], ...]
    questions: tuple[str, ...]  # as they were asked, to be shown; none where a prompt is continued
    max_new_tokens: int
    sampling: Sampling
    speculative: bool
    layout: Layout
    prefill_chunk: int
    keep_logits: bool  # for somebody to compare

    @property
    def device_memory(self) -> int:
        """Tokens that the longest prompt and its answer take, with drafts that are not right."""
        return max(map(len, self.prompts)) + self.max_new_tokens + MAX_DECODE_TOKENS


def check_job(job: Job, config: Any, ranks: int) -> None:
    """Refuse prompts that a model with this configuration cannot read on so many ranks."""
    shortest, longest = min(map(len, job.prompts)), max(map(len, job.prompts))
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest + job.max_new_tokens > limit:
        raise BadInput(
            f"the prompt has {longest:,} tokens, and {job.max_new_tokens:,} may follow: the model has only "
            f"{limit:,} positions"
        )
    if shortest < ranks:
        raise BadInput(f"the prompt has {shortest} tokens, fewer than the {ranks} ranks it is to be spread over")
    if job.prefill_chunk < min_prefill_chunk(ranks):
        raise BadInput(
            f"--prefill-chunk must be at least {min_prefill_chunk(ranks)} tokens on {ranks} ranks, got {job.prefill_chunk}"
        )
    largest = max(max(prompt) for prompt in job.prompts)
    if largest >= config.vocab_size:
        raise BadInput(
            f"the tokenizer in {job.folder} is not this model's: it makes token {largest}, and the model knows "
            f"{config.vocab_size}"
        )


def check_memory(job: Job, config: Any, ranks: int, copies: int) -> None:
    """Refuse a model that does not fit on a device that `copies` of the ranks share, each with its own weights."""
    device = torch.device(job.device)
    weights = weight_bytes(job.folder, job.dtype)
    kept = -(-job.device_memory // ranks) * token_bytes(config, job.dtype)
    free = free_memory(device)
    if free is not None and copies * (weights + kept) > free:
        each = f"{in_gib(weights)} of weights and {in_gib(kept)} of keys and values"
        who = "it takes" if copies == 1 else f"each of {copies} ranks here takes"
        raise BadInput(f"{job.folder} does not fit: {who} {each}, and {device} has {in_gib(free)} free")
