"""The prompts and how to answer them, checked before any rank starts; and the comparison with a single process."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnmesh.cli.language_model import DeviceMemory
from attnmesh.core.layouts import Layout
from attnmesh.generation.engine import min_prefill_chunk
from attnmesh.generation.rank_memory import ShardedMemory, kv_cache_bytes
from attnmesh.generation.sampling import Sampling
from attnmesh.generation.stats import GenerationStats
from attnmesh.integrations.checkpoint import translated_errors
from attnmesh.integrations.checkpoint_folder import weight_bytes
from attnmesh.integrations.loading import load_config_and_tokenizer, load_model
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.files import read_text
from attnmesh.utils.optional import require
from attnmesh.utils.text import counted

_EAGER_ONLY = ("gpt_oss",)  # Transformers implements sinks on every device only in its eager attention


@dataclass(frozen=True)
class Job:
    """The prompts for a model and how to answer them. Picklable, since ranks are processes."""

    folder: Path
    device: str
    dtype: torch.dtype
    storage: str  # of the KV cache
    prompts: tuple[tuple[int, ...], ...]
    questions: tuple[str, ...]  # to be shown; empty if the prompt is continued
    max_new_tokens: int
    sampling: Sampling
    speculative: bool
    layout: Layout
    prefill_chunk: int
    keep_logits: bool  # for the comparison with a single process
    sharding: DecodeSharding | None = None  # of weights and KV cache; None: every rank has all weights

    @property
    def capacity(self) -> int:
        """Tokens of the longest prompt and its answer, with drafts that are rejected."""
        return max(map(len, self.prompts)) + self.max_new_tokens + MAX_DECODE_TOKENS

    def rank_memory(self, config: Any) -> ShardedMemory:
        """What ranks hold where the weights are divided."""
        return ShardedMemory(
            config, self.dtype, storage=self.storage, cache_tokens=self.capacity, prefill_chunk=self.prefill_chunk
        )

    def position_ranks(self, ranks: int) -> int:
        """How many of `ranks` ranks share the positions of a sequence."""
        return ranks if self.sharding is None else self.sharding.cp


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer and, if they were kept, the logits [tokens, vocabulary] that each was selected from."""

    ids: list[int]
    logits: Tensor | None = None


@dataclass(frozen=True)
class Result:
    """All answers, and the statistics of each rank."""

    answers: Sequence[Answer]
    stats: Sequence[GenerationStats]


def read_document(prompt: str | None, file: Path | None) -> str:
    """The text of the prompt, given directly or in a file."""
    if (prompt is None) == (file is None):
        raise ValueError(
            f"exactly one of --prompt and --prompt-file is required, got {'none' if file is None else 'both'}"
        )
    if file is None:
        assert prompt is not None
        text = prompt
    else:
        text = read_text(file, f"--prompt-file {file}")
        if "\0" in text:  # valid UTF-8, but not a text
            raise ValueError(f"--prompt-file {file} is not a text file: it contains a zero byte")
    if not text.strip():
        raise ValueError("--prompt is empty" if file is None else f"--prompt-file {file} is empty")
    return text


def tokenize_prompts(tokenizer: Any, document: str, questions: Sequence[str]) -> list[list[int]]:
    """The tokens of one prompt per question, or of the document alone.

    The question comes last, so that prompts share a prefix. A model with a chat template gets the prompt as a user's
    message, another model as text to continue.
    """
    texts = [f"{document.rstrip()}\n\n{question}" for question in questions] or [document]
    with translated_errors("the tokenizer cannot encode the prompt"):
        if not tokenizer.chat_template:
            return [[int(token) for token in tokenizer(text)["input_ids"]] for text in texts]
        return [_chat_tokens(tokenizer, text) for text in texts]


def _chat_tokens(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)
    return [int(token) for token in encoded["input_ids"]]


def check_job(job: Job, config: Any, ranks: int) -> None:
    """Raise ValueError for prompts that a model with this configuration cannot read on so many ranks."""
    if not all(job.prompts):
        raise ValueError("the prompt must have at least one token, got none")
    longest = max(map(len, job.prompts))
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest + job.max_new_tokens > limit:
        raise ValueError(
            f"the prompt of {longest:,} tokens and --max-new-tokens {job.max_new_tokens:,} exceed the model's "
            f"{limit:,} positions"
        )
    ranks = job.position_ranks(ranks)
    if job.prefill_chunk < min_prefill_chunk(ranks):
        least = min_prefill_chunk(ranks)
        raise ValueError(
            f"--prefill-chunk must be at least {least} tokens on {counted(ranks, 'rank')}, got {job.prefill_chunk}"
        )
    largest = max(max(prompt) for prompt in job.prompts)
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer in {job.folder} does not belong to the model: it produces token {largest}, and the model's "
            f"vocabulary has {config.vocab_size}"
        )


def check_memory(job: Job, config: Any, ranks: int, memory: DeviceMemory) -> None:
    """Raise ValueError if ranks with a model each, or a part of it, do not fit on the device that they share."""
    if job.sharding is None:
        kv_cache = kv_cache_bytes(config, job.storage, -(-job.capacity // ranks), sequences=1)
        memory.check_fits(job.folder, weight_bytes(job.folder, job.dtype), kv_cache)
    else:
        held = job.rank_memory(config).of(job.sharding)
        memory.check_fits(job.folder, held.weights, held.kv_cache)


@dataclass(frozen=True)
class Comparison:
    """The tokens of an answer, and the tokens of a single process."""

    ours: list[int]
    expected: list[int]
    logit_error: float
    """Largest difference of logits relative to the largest logit, over the tokens with the same text before them."""

    @property
    def equal(self) -> bool:
        """Whether all tokens are the same."""
        return self.ours == self.expected

    @property
    def equal_tokens(self) -> int:
        """Number of tokens before the first difference."""
        return _equal_tokens(self.ours, self.expected)


def compare(job: Job, result: Result) -> Iterator[Comparison]:
    """Each answer, compared with Transformers' own attention, cache and `generate` in this process.

    Where the KV cache of the answers is quantized, so are the keys and values of that cache.
    """
    transformers = require("transformers", extra="hf")
    config, _ = load_config_and_tokenizer(job.folder)
    gc.collect()  # a model that virtual ranks shared may still be in memory, held by reference cycles
    implementation = "eager" if config.model_type in _EAGER_ONLY else "sdpa"
    model: Any = load_model(job.folder, device=job.device, dtype=job.dtype, attn_implementation=implementation)[0]
    eos = model.generation_config.eos_token_id
    # Greedy decoding without other defaults of the model, such as a repetition penalty.
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=0)
    for prompt, answer in zip(job.prompts, result.answers, strict=True):
        cache = None if job.storage in PLAIN else quantized_cache(job.storage)
        yield _compare(model, torch.tensor([prompt], device=model.device), answer, job.max_new_tokens, cache)


def quantized_cache(storage: str) -> Any:
    """A cache of Transformers whose keys and values have the precision of a storage type."""
    base: Any = require("transformers", extra="hf").DynamicCache

    class QuantizedCache(base):  # type: ignore[misc]
        def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            scale = torch.ones((), dtype=torch.float32, device=key.device) if storage == "fp8" else None
            # Latents and their rope parts are stored as one vector.
            stored = (torch.cat([key, value], -1),) if storage == "fp8_ds_mla" else (key, value)
            rounded = [dequantize(quantize(x, storage, scale=scale), x.dtype) for x in stored]
            if len(rounded) == 1:
                rounded = list(rounded[0].split([key.shape[-1], value.shape[-1]], -1))
            return super().update(*rounded, *args, **kwargs)

    return QuantizedCache()


def _compare(model: Any, ids: Tensor, answer: Answer, max_new_tokens: int, cache: Any) -> Comparison:
    assert answer.logits is not None
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        past_key_values=cache,
    )
    expected: list[int] = generated.sequences[0, ids.shape[1] :].tolist()
    logits = torch.cat(generated.logits).float().cpu()
    # The first token that differs was still selected after the same text.
    same = min(_equal_tokens(answer.ids, expected) + 1, len(logits), len(answer.logits))
    error = (answer.logits[:same] - logits[:same]).abs().max() / logits[:same].abs().max()
    return Comparison(answer.ids, expected, float(error))


def _equal_tokens(ours: list[int], expected: list[int]) -> int:
    pairs = zip(ours, expected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(expected)))
