"""The bodies of requests: OpenAI's parameters, checked. What is not supported is refused, not ignored."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnmesh.generation.sampling import MAX_SEED, Sampling
from attnmesh.utils.validation import is_number, shown

_IGNORED = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
"""Parameters that do not change an answer."""
_REFUSED = {
    "echo": (False,), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": (), "verbosity": (), "web_search_options": (), "moderation": (),
}  # fmt: skip
"""Parameters that are not supported, and the values that mean the same as none."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip
_MAX_STOP, _MAX_LOGPROBS, _MAX_BIAS = 16, 20, 1024
_MAX_STOP_IDS = 256  # ranks remember the arguments of some thousand requests
_MAX_PROMPTS = 100_000  # what the longest queue takes
_PENALTIES = {
    "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100),
}  # fmt: skip
"""Their limits: the first two are OpenAI's. Penalties without a limit would make logits infinite."""
_MAX_SHOWN = 100  # characters of a name
_DEFAULT_TOKENS = 16  # of a completion; a chat may take all that is left

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An error that is answered with an HTTP status, in OpenAI's format."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Call:
    """A checked body. `prompts` are texts or token ids; those of a chat are made of its `messages`."""

    model: str
    prompts: tuple[str | list[int], ...]
    messages: list[dict[str, str]] | None
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int | None  # None: all that is left
    min_tokens: int
    sampling: Sampling
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...] | None
    logprobs: int | None
    logit_bias: dict[int, float]

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message."""
        return self.messages is not None


def decode_json(data: bytes) -> dict[str, Any]:
    """The object that a body has; raises ApiError."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        body = json.loads(data.decode(), parse_constant=refuse_constant)
        if rb"\u" in data:  # the only way to write a part of a character, which no tokenizer and no answer can have
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, r"the body must be text, and it has a lone surrogate (\ud800 to \udfff)") from None
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8, and of very long integers
        raise ApiError(400, f"the body must be JSON: {type(error).__name__}: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shown(body)}")
    return body


def parse_completion(body: dict[str, Any]) -> Call:
    """The call of `/v1/completions`."""
    fields = _Fields(body)
    prompts = _prompts(fields.take("prompt"))
    logprobs = fields.count("logprobs", None, 0, _MAX_LOGPROBS)
    return _call(fields, prompts, None, fields.count("max_tokens", _DEFAULT_TOKENS, 1), logprobs)


def parse_chat(body: dict[str, Any]) -> Call:
    """The call of `/v1/chat/completions`."""
    fields = _Fields(body)
    messages = _messages(fields.take("messages"))
    most, older = (fields.count(name, None, 1) for name in ("max_completion_tokens", "max_tokens"))
    wants, top = fields.flag("logprobs"), fields.count("top_logprobs", None, 0, _MAX_LOGPROBS)
    if top is not None and not wants:
        raise ApiError(400, f"top_logprobs requires logprobs: true, got top_logprobs {top}", param="top_logprobs")
    return _call(fields, (), messages, older if most is None else most, (top or 0) if wants else None)


class _Fields:
    """The parameters of a body, taken one by one. null is the same as nothing."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise _invalid(name, "true or false", value)
        return value

    def count(self, name: str, default: int | None, least: int, most: int = 2**31) -> int | None:
        value = self.take(name, default)
        if value is not None and not (_is_integer(value) and least <= value <= most):
            raise _invalid(name, f"an integer from {least} to {most}", value)
        return None if value is None else int(value)

    def check_empty(self) -> None:
        for name in _IGNORED:
            self.take(name)
        for name, neutral in _REFUSED.items():
            value = self.take(name)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name} is not supported, got {shown(value)}", param=name)
        if self._left:
            name = min(self._left)
            raise ApiError(400, f"unknown parameter {shown(name)}", param=name[:_MAX_SHOWN])


def _call(
    fields: _Fields,
    prompts: Sequence[str | list[int]],
    messages: list[dict[str, str]] | None,
    max_tokens: int | None,
    logprobs: int | None,
) -> Call:
    model = fields.take("model")
    if not isinstance(model, str):
        raise _invalid("model", "the name of a model", model)
    options = fields.take("stream_options", {})
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise _invalid("stream_options", 'an object such as {"include_usage": true}', options)
    call = Call(
        model=model, prompts=tuple(prompts), messages=messages, n=fields.count("n", 1, 1, 1024) or 1,
        stream=fields.flag("stream"), include_usage=options.get("include_usage", False), max_tokens=max_tokens,
        min_tokens=fields.count("min_tokens", 0, 0) or 0, sampling=_sampling(fields),
        stop_strings=_stop(fields.take("stop", [])), stop_token_ids=_stop_token_ids(fields.take("stop_token_ids")),
        logprobs=logprobs, logit_bias=_logit_bias(fields.take("logit_bias", {})),
    )  # fmt: skip
    fields.check_empty()
    return call


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > _MAX_PROMPTS:
        raise ApiError(400, f"prompt must have at most {_MAX_PROMPTS} prompts, got {len(value)}", param="prompt")
    if isinstance(value, list) and value and all(isinstance(each, str) or _are_ids(each) for each in value):
        return value
    raise _invalid("prompt", "a text, a list of token ids, or a list of these", value)


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "a list of messages", value)
    return [_message(f"messages[{i}]", each) for i, each in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise _invalid(name, 'an object such as {"role": "user", "content": "text"}', value)
    unknown = {key for key in value if key not in ("role", "content", "name") and value[key] not in (None, [])}
    if unknown:
        raise ApiError(400, f"{name}.{min(unknown)[:_MAX_SHOWN]} is not supported", param=name)
    content = value.get("content")
    if isinstance(content, list):  # parts
        texts = [each.get("text") for each in content if isinstance(each, dict) and each.get("type") == "text"]
        are_texts = len(texts) == len(content) and all(isinstance(each, str) for each in texts)
        content = "".join(map(str, texts)) if are_texts else None
    if not isinstance(content, str):
        raise _invalid(f"{name}.content", "text, or a list of parts of type text", value.get("content"), name)
    return {"role": value["role"], "content": content}


def _sampling(fields: _Fields) -> Sampling:
    given = {name: value for name in _SAMPLING if (value := fields.take(name)) is not None}
    for name, (least, most) in _PENALTIES.items():
        value = given.get(name, 1)
        if not is_number(value) or not least <= value <= most:
            raise _invalid(name, f"a number from {least} to {most}", value)
    try:  # the API's temperature is 1, and without a seed every answer is another one
        return Sampling(**{"temperature": 1.0, "seed": secrets.randbelow(MAX_SEED + 1), **given})
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).split()[0]) from None


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if (
        not isinstance(strings, list)
        or len(strings) > _MAX_STOP
        or not all(isinstance(each, str) and 0 < len(each) <= 1000 for each in strings)
    ):
        raise _invalid("stop", f"a text or at most {_MAX_STOP} texts of 1 to 1000 characters", value)
    return tuple(strings)


def _stop_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is not None and not ((_are_ids(value) or value == []) and len(value) <= _MAX_STOP_IDS):
        raise _invalid("stop_token_ids", f"a list of at most {_MAX_STOP_IDS} token ids", value)
    return None if value is None else tuple(value)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > _MAX_BIAS:
        raise _invalid("logit_bias", f"an object of at most {_MAX_BIAS} token ids and numbers", value)
    bias = {}
    for token, number in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise _invalid("logit_bias", "an object whose names are token ids", token)
        if not is_number(number) or not math.isfinite(number) or abs(number) > 100:
            raise _invalid("logit_bias", "an object whose values are numbers from -100 to 100", number)
        bias[int(token)] = float(number)
    return bias


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int} and min(value) >= 0


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _invalid(name: str, allowed: str, value: object, param: str | None = None) -> ApiError:
    got = "nothing" if value is None else shown(value)
    return ApiError(400, f"{name} must be {allowed}, got {got}", param=param or name)
