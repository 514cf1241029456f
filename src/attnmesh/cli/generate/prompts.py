"""A document and its questions as the tokens of prompts, the question last: two of them begin with the document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnmesh.integrations.problem import explained


def prompts_of(tokenizer: Any, document: str, questions: Sequence[str]) -> list[list[int]]:
    """A prompt for each question, or of the document alone where there is none.

    A model that was taught to chat gets it as a user's message; another one, as text that it is to continue.
    """
    texts = [f"{document.rstrip()}\n\n{question}" for question in questions] or [document]
    as_tokens = _as_message if tokenizer.chat_template else _as_text
    with explained("the tokenizer cannot make tokens of the prompt"):
        return [as_tokens(tokenizer, text) for text in texts]


def _as_message(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    made = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)
    return [int(token) for token in made["input_ids"]]


def _as_text(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text)["input_ids"]]
