"""Prompts that are too long are refused before they are tokenized as a whole."""

import asyncio

import pytest

pytest.importorskip("starlette")

from attnmesh.serving.fields import ApiError
from attnmesh.serving.prompts import PromptTokenizer
from attnmesh.serving.protocol import parse_chat, parse_completion


class Words:
    """A token for each x, and one for 100 characters that are none."""

    chat_template = None

    def __init__(self):
        self.read = []

    def __deepcopy__(self, memo):
        return self

    def get_vocab(self):
        return {"x": 0, "-" * 100: 1}

    def __call__(self, text, add_special_tokens=True):
        self.read.append(len(text))
        return {"input_ids": [0] * text.count("x") + [1] * (text.count("-") // 100)}


def token_ids(tokenizer, prompt):
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        call = parse_chat({"model": "m", "messages": prompt})
    else:
        call = parse_completion({"model": "m", "prompt": prompt})
    prompts = PromptTokenizer(tokenizer, context=10)
    prompts.check_length(call)
    return asyncio.run(prompts.token_ids(call))


@pytest.mark.parametrize("prompt", ["x" * 9, "-" * 900, ["x", [1, 2]], "x" * 4 + "-" * 500])
def test_what_fits_is_tokenized(prompt):
    tokenizer = Words()
    expected = [Words()(each)["input_ids"] if isinstance(each, str) else each for each in [prompt]]
    found = token_ids(tokenizer, prompt)
    assert found == ([[0], [1, 2]] if isinstance(prompt, list) else expected)


@pytest.mark.parametrize(
    ("prompt", "message", "read"),
    [
        ("-" * 1001, "1001 characters exceeds 10 tokens: a token has at most 100 characters", []),
        ("x" * 900, "900 characters exceeds 10 tokens: the first 160 characters have 160", [160]),
        (["x", "x" * 900, "x"], "900 characters exceeds 10 tokens", [1, 160]),
        ("x" * 10, "a prompt of 10 tokens and an answer of 16 exceed 10 tokens", [10]),
        ([{"role": "user", "content": "x" * 500}, {"role": "user", "content": "x" * 501}], "1001 characters", []),
        ([{"role": "user", "content": "x" * 300}] * 3, "900 characters exceeds 10 tokens: the first 160", [160]),
        ([{"role": "user", "content": ""}] * 11, "11 messages are too many", []),
    ],
)
def test_what_does_not_fit_is_refused_early(prompt, message, read):
    tokenizer = Words()
    with pytest.raises(ApiError, match=message) as caught:
        token_ids(tokenizer, prompt)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert tokenizer.read == read
