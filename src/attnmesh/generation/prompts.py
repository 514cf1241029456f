"""Prompts as token ids, and checks that a model can continue them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attnmesh.integrations.transformers_models import changing_rotary, text_config
from attnmesh.kv_cache.sequence import token_ids
from attnmesh.utils.validation import check_list, shown


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError unless it is a tokenizer or None."""
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise ValueError(f"tokenizer must be a tokenizer of Transformers or None, got {shown(tokenizer)}")


def prompt_ids(tokenizer: Any, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """The token ids of every prompt."""
    is_matrix = isinstance(prompts, Tensor) and prompts.ndim == 2
    rows: list[Any] = list(prompts) if is_matrix else check_list("prompts", prompts, "prompts")
    return [one_prompt(tokenizer, f"prompts[{i}]", prompt) for i, prompt in enumerate(rows)]


def one_prompt(tokenizer: Any, name: str, prompt: str | Sequence[int]) -> list[int]:
    """The token ids of a prompt."""
    if not isinstance(prompt, str):
        return list(token_ids(name, prompt))
    if tokenizer is None:
        raise ValueError(f"{name} must be token ids without a tokenizer, got text, {shown(prompt)}")
    ids: list[int] = tokenizer(prompt)["input_ids"]
    return ids


def check_prompt(model: Any, name: str, ids: Sequence[int], max_new_tokens: int) -> None:
    """Raise ValueError unless a model can continue a prompt."""
    config = text_config(model)
    limit, why = getattr(config, "max_position_embeddings", None), ""
    rotary = changing_rotary(config)
    if rotary is not None:
        limit, why = rotary[1], f" before rope_type {rotary[0]!r} changes its frequencies"
    vocabulary = config.vocab_size
    if not ids:
        raise ValueError(f"{name} is empty")
    if limit is not None and len(ids) + max_new_tokens > limit:
        raise ValueError(
            f"{name} has {len(ids)} tokens, and max_new_tokens={max_new_tokens} may follow: the model has {limit} "
            f"positions{why}"
        )
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(f"{name} must have token ids 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}")


def eos_tokens(model: Any) -> set[int]:
    """The eos tokens of a model's generation config."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


def check_stop_strings(tokenizer: Any, strings: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; raises ValueError unless they can be found in a text."""
    given = check_list("stop_strings", strings, "strings")
    for i, string in enumerate(given):
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop_strings[{i}] must be a string that is not empty, got {shown(string)}")
    if given and tokenizer is None:
        raise ValueError(f"stop_strings must be empty without a tokenizer, got {shown(strings)}")
    return tuple(given)
