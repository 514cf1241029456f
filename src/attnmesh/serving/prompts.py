"""`PromptTokenizer`: the token ids of a call's prompts. A text that is too long is refused before it is tokenized."""

from __future__ import annotations

import asyncio
import copy
import inspect
from typing import Any

from starlette.concurrency import run_in_threadpool

from attnmesh.serving.conversations import Chat
from attnmesh.serving.fields import ApiError
from attnmesh.serving.protocol import Prompts

_LONG = 2**16  # characters, from which on a call is tokenized beside the others
_HEAD = 16  # characters per token of the context, more than prompts have that fit


class PromptTokenizer:
    """Tokenizes prompts on threads, for answers within a context of some tokens.

    A tokenizer serves one thread at a time. There are two: calls with short prompts do not wait for long ones.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._context = context
        # Copies: the original belongs to the thread that computes.
        self._short, self._long = [(copy.deepcopy(tokenizer), asyncio.Lock()) for _ in range(2)]
        self.tokenizer = self._short[0]
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def check_length(self, call: Prompts) -> None:
        """Raise ApiError for a prompt whose characters exceed the context even with the longest tokens.

        Some tokenizers drop characters, such as repeated spaces: these are counted here.
        """
        if call.chat is None:
            characters = max((len(each) for each in call.prompts if isinstance(each, str)), default=0)
        else:
            characters, messages = call.characters, len(call.chat.messages)
            if messages > self._context:
                self._refuse(call, f"{messages} messages are too many: at most {self._context} messages fit")
        if characters > self._context * self._longest_token:
            self._refuse(
                call, f"a prompt of {characters} characters exceeds {self._context} tokens: a token has at most "
                f"{self._longest_token} characters",
            )  # fmt: skip

    async def token_ids(self, call: Prompts) -> list[list[int]]:
        """The token ids of all prompts, none of which fills the context."""
        tokenizer, lock = self._short if call.characters < _LONG else self._long
        async with lock:
            ids: list[list[int]] = await run_in_threadpool(self._tokenize, tokenizer, call)
        return ids

    async def text(self, ids: list[int]) -> str:
        """The text of some tokens, also of special ones."""
        tokenizer, lock = self._short if len(ids) < _LONG else self._long
        async with lock:
            text: str = await run_in_threadpool(tokenizer.decode, ids)
        return text

    @property
    def template(self) -> str:
        """The chat template for conversations with tools; "" if there is none."""
        if not self.tokenizer.chat_template:
            return ""
        text: str = self.tokenizer.get_chat_template(tools=[])
        return text

    def _tokenize(self, tokenizer: Any, call: Prompts) -> list[list[int]]:
        if call.chat is not None:
            self._check_head(tokenizer, call, "".join(each["content"] for each in call.chat.messages))
            return [self._checked(call, _format(tokenizer, call.chat))]
        prompts = []
        for each in call.prompts:
            if isinstance(each, str):
                self._check_head(tokenizer, call, each)
                each = tokenizer(each, add_special_tokens=call.add_special_tokens)["input_ids"]
            prompts.append(self._checked(call, each))
        return prompts

    def _check_head(self, tokenizer: Any, call: Prompts, text: str) -> None:
        """Refuse a long text whose beginning has over twice the tokens of the context: a few at its end may merge."""
        head = text[: _HEAD * self._context]
        if len(head) < len(text) and (tokens := len(tokenizer(head)["input_ids"])) > 2 * self._context:
            self._refuse(
                call, f"a prompt of {len(text)} characters exceeds {self._context} tokens: the first {len(head)} "
                f"characters have {tokens}",
            )  # fmt: skip

    def _checked(self, call: Prompts, ids: list[int]) -> list[int]:
        """The ids, if there is room for an answer: no further prompt is tokenized otherwise."""
        if len(ids) >= self._context:
            answer = call.max_tokens or 1
            self._refuse(call, f"a prompt of {len(ids)} tokens and an answer of {answer} exceed {self._context} tokens")
        return ids

    def _refuse(self, call: Prompts, message: str) -> None:
        raise ApiError(400, message, param="messages" if call.is_chat else "prompt", code="context_length_exceeded")


def _format(tokenizer: Any, chat: Chat) -> list[int]:
    if not tokenizer.chat_template:
        raise ApiError(400, "the model has no chat template: use /v1/completions", param="messages")
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    if taken := [name for name in chat.template_kwargs if name in own]:
        message = f"chat_template_kwargs must be variables of the chat template, got {', '.join(taken)}"
        raise ApiError(400, message, param="chat_template_kwargs")
    try:
        encoded = tokenizer.apply_chat_template(
            chat.messages, chat.tools or None, add_generation_prompt=chat.add_generation_prompt, tokenize=True,
            continue_final_message=chat.continue_final_message, return_dict=True, **chat.template_kwargs,
        )  # fmt: skip
    except Exception as error:  # of the template, which may refuse messages in its own words
        text = f"{type(error).__name__}: {str(error)[:300]}"
        raise ApiError(400, f"the chat template cannot format the messages: {text}", param="messages") from None
    return [int(token) for token in encoded["input_ids"]]
