"""Bodies of requests: anything is either understood or refused with a status, and nothing is ignored."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.generation.sampling import Sampling
from attnmesh.serving.fields import ApiError, decode_json
from attnmesh.serving.loop import Commands, Submission
from attnmesh.serving.protocol import Call, parse_chat, parse_completion

NAMES = [
    "model", "prompt", "messages", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs",
    "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "tools", "user", "echo", "other",
    "tool_choice", "response_format", "structured_outputs", "guided_json", "guided_regex", "ignore_eos", "priority",
    "chat_template_kwargs", "continue_final_message", "prompt_logprobs", "parallel_tool_calls", "skip_special_tokens",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MESSAGES = [{"role": "user", "content": "a"}]


def understood(parse, data):
    try:
        return parse(decode_json(data))
    except ApiError as error:
        return error


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), st.sampled_from([parse_completion, parse_chat]))
def test_any_body_is_understood_or_refused(body, parse):
    body = {"model": "m", "prompt": "a", "messages": MESSAGES, **body}
    body.pop("messages" if parse is parse_completion else "prompt")
    result = understood(parse, json.dumps(body).encode())
    if isinstance(result, ApiError):
        assert result.status == 400
        assert len(str(result)) < 600
        json.dumps(result.body)
    else:
        assert isinstance(result, Call)
        assert body.get("other") is None


def test_stop_tokens_are_limited():
    assert len(parse_completion({"model": "m", "prompt": "a", "stop_token_ids": [1] * 256}).stop_token_ids) == 256
    with pytest.raises(ApiError, match="stop_token_ids must be a list of at most 256 token ids"):
        parse_completion({"model": "m", "prompt": "a", "stop_token_ids": [1] * 257})


def test_null_is_the_same_as_nothing():
    body = {"model": "m", "prompt": "a", "seed": 1}
    nothing = dict.fromkeys(["stop", "n", "logprobs", "stream_options", "logit_bias", "tools", "max_tokens"])
    assert parse_completion({**body, **nothing}) == parse_completion(body)


def test_defaults_are_those_of_the_api():
    call = parse_completion({"model": "m", "prompt": "a", "seed": 1})
    assert (call.max_tokens, call.n, call.sampling) == (16, 1, Sampling(1.0, seed=1))
    chat = parse_chat({"model": "m", "messages": MESSAGES, "logprobs": True, "user": "me", "tool_choice": "none"})
    assert (chat.max_tokens, chat.logprobs) == (None, 0)
    seeds = {parse_chat({"model": "m", "messages": MESSAGES}).sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    newer = parse_chat({"model": "m", "messages": MESSAGES, "max_completion_tokens": 3, "max_tokens": 9})
    assert newer.max_tokens == 3


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[", b"{'a': 1}", b"[" * 10_000, b"1" * 5000, b"Infinity"])
def test_what_is_not_json_is_refused(data):
    with pytest.raises(ApiError, match="the body must be JSON"):
        decode_json(data)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": 3}, r"messages\[1\].content must be text, or a list of parts of type text, got 3"),
        ({"role": "user", "content": "a", "tool_calls": [1]}, r"messages\[1\].tool_calls is not supported"),
        ("a", r"messages\[1\] must be an object such as"),
    ],
)
def test_a_message_that_is_refused_is_the_parameter(message, said):
    with pytest.raises(ApiError, match=said) as caught:
        parse_chat({"model": "m", "messages": [*MESSAGES, message]})
    assert caught.value.param == "messages[1]"


def test_too_many_prompts_are_refused_before_they_are_looked_at():
    with pytest.raises(ApiError, match="prompt must have at most 100000 prompts, got 100001"):
        parse_completion({"model": "m", "prompt": [{}] * 100_001})
    for ids in ([1, True], [1, 2.0], [1, -1], [1, "a"], [[1]]):
        assert isinstance(
            understood(parse_completion, json.dumps({"model": "m", "prompt": [ids, ids]}).encode()), ApiError
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", "3.4e38"),
        ("repetition_penalty", "-3.4e38"),
        ("frequency_penalty", "1e-45"),
        ("temperature", "1e999"),
        ("repetition_penalty", "1" + "0" * 400),
    ],
)
def test_numbers_at_the_limits_of_floats(name, value):
    result = understood(parse_completion, f'{{"model": "m", "prompt": "a", "{name}": {value}}}'.encode())
    if isinstance(result, ApiError):
        assert (result.status, result.param) == (400, name)
        return
    sampling, logits = result.sampling, torch.tensor([100.0, -100.0, 3e4])
    assert sampling.sample(logits, sampling.generator(0), [0, 1], [0, 2, 2]) in range(3)
    assert replace(sampling, temperature=0.0).sample(logits, sampling.generator(0), [0, 1], [0, 2, 2]) in range(3)


@pytest.mark.parametrize(
    "data", [rb'{"a": "\ud800"}', rb'{"\uDC00": 1}', rb'{"a": [{"b": "\ud83d\ud83d"}]}', rb'{"a": "\\\udfff"}']
)
def test_parts_of_characters_are_refused(data):
    with pytest.raises(ApiError, match="lone surrogate") as caught:
        decode_json(data)
    json.dumps(caught.value.body, ensure_ascii=False).encode()


def test_whole_characters_are_text():
    assert decode_json(rb'{"a": "\ud83d\ude00", "b": "\\ud800"}') == {"a": "\U0001f600", "b": "\\ud800"}


def test_commands_reach_other_ranks_as_they_are():
    submissions = [
        Submission(3, [1, 2], 5, Sampling(0.5, seed=9, frequency_penalty=0.1), [1], ["é\n"], 2, 4, 1, {7: -1.5}),
        Submission(4, [1], 1, Sampling(), grammar='start: "é"', priority=-2, prompt_logprobs=1),
    ]
    decoded = Commands.decode(Commands(submissions, [1, 2], stop=True).encode())
    decoded.submissions[0].logit_bias[7] = decoded.submissions[0].logit_bias.pop("7")  # a name in JSON
    assert decoded == Commands(submissions, [1, 2], stop=True)
    assert Commands.decode(Commands().encode()) == Commands()


def test_samples_of_a_prompt_are_passed_on_once():
    first = Submission(0, list(range(1000)), 5, Sampling(), list(range(500)))
    other = replace(first, prompt=[1, 2])
    submissions = [replace(each, ticket=i, sample=i) for i, each in enumerate([first] * 256 + [other] + [first] * 2)]
    data = Commands(submissions).encode()
    assert len(data) < 30_000  # 2 MB with each sample by itself
    assert Commands.decode(data) == Commands(submissions)
