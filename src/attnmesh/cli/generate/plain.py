"""The same prompts through the plain model in one process: Transformers' own attention, cache and `generate`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmesh.cli.generate.job import Job
from attnmesh.cli.generate.outcome import Answer, Outcome
from attnmesh.core.optional import require
from attnmesh.integrations.load import config_and_tokenizer, load_model

_NEEDS_EAGER = ("gpt_oss",)  # Transformers has no other attention with sinks on every device


@dataclass(frozen=True)
class Comparison:
    """An answer beside that of one process."""

    ours: list[int]
    theirs: list[int]
    apart: float
    """The largest difference of logits, over the largest of them, at every token with the same text before it."""

    @property
    def equal(self) -> bool:
        """Whether all tokens are the same."""
        return self.ours == self.theirs

    @property
    def alike(self) -> int:
        """How many tokens are the same, up to the first that is not."""
        pairs = zip(self.ours, self.theirs, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.ours), len(self.theirs)))


def compare(job: Job, outcome: Outcome) -> Iterator[Comparison]:
    """Each answer beside that of one process, as they come."""
    transformers = require("transformers", extra="hf")
    config, _ = config_and_tokenizer(job.folder)
    gc.collect()  # a model that ranks shared with this process is a circle of objects, and may be in the way
    how = "eager" if config.model_type in _NEEDS_EAGER else "sdpa"
    model: Any = load_model(job.folder, device=job.device, dtype=job.dtype, attn_implementation=how)[0]
    eos = model.generation_config.eos_token_id
    # Nothing else of what the model's authors recommend, such as a penalty for repetitions: the likeliest token.
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=0)
    for prompt, answer in zip(job.prompts, outcome.answers, strict=True):
        yield _compare(model, torch.tensor([prompt], device=model.device), answer, job.max_new_tokens)


def _compare(model: Any, ids: Tensor, answer: Answer, max_new_tokens: int) -> Comparison:
    assert answer.logits is not None
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    theirs: list[int] = made.sequences[0, ids.shape[1] :].tolist()
    plain = torch.cat(made.logits).float().cpu()
    same = Comparison(answer.ids, theirs, 0.0).alike
    upto = min(same + 1, len(plain), len(answer.logits))  # the first other token was still drawn after the same text
    gap = (answer.logits[:upto] - plain[:upto]).abs().max() / plain[:upto].abs().max()
    return Comparison(answer.ids, theirs, float(gap))
