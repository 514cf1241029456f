"""The parameters of a body, and the errors of those that are not valid: a parameter that is not served is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attnmesh.utils.validation import shown

_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id",
)  # fmt: skip
"""Parameters that do not change an answer."""
_REFUSED = {
    "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (), "verbosity": (),
    "web_search_options": (), "moderation": (), "truncate_prompt_tokens": (), "bad_words": ([],),
    "allowed_token_ids": (), "spaces_between_special_tokens": (True,), "chat_template": (), "documents": ([],),
    "logits_processors": ([],), "cache_salt": (), "prompt_embeds": (), "echo": (False,), "tools": ([],),
    "tool_choice": ("none", "auto"), "mm_processor_kwargs": (), "kv_transfer_params": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "n_probs": (0,), "mirostat": (0,), "samplers": (), "grammar": ("",),
}  # fmt: skip
"""Parameters that are not supported, by some endpoints at least, and the values that mean the same as none."""
_MAX_SHOWN = 100  # characters of a name
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


def invalid(name: str, allowed: str, value: object, param: str | None = None) -> ApiError:
    """The error for a parameter that has another value than it may have."""
    got = "nothing" if value is None else shown(value)
    return ApiError(400, f"{name} must be {allowed}, got {got}", param=param or name)


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


class Fields:
    """The parameters of a body, taken one by one. null is the same as nothing."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        return self.left.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(name, "true or false", value)
        return value

    def count(self, name: str, default: int | None, least: int, most: int = 2**31) -> int | None:
        value = self.take(name, default)
        if value is not None and not (is_integer(value) and least <= value <= most):
            raise invalid(name, f"an integer from {least} to {most}", value)
        return None if value is None else int(value)

    def refuse(self, neutral_values: Mapping[str, Sequence[Any]]) -> None:
        """Refuse parameters, except with the values that mean the same as none."""
        for name, neutral in neutral_values.items():
            value = self.take(name)
            if value is not None and value not in neutral:
                allowed = " or ".join(["left out", *(json.dumps(each) for each in neutral[:1])])
                message = f"{name} is not supported, got {shown(value)}: it must be {allowed}"
                raise ApiError(400, message, param=name)

    def check_empty(self) -> None:
        """Refuse parameters that are left."""
        for name in _IGNORED:
            self.take(name)
        self.refuse(_REFUSED)
        if self.left:
            name = min(self.left)
            message = f"unknown parameter {shown(name)}, got {shown(self.left[name])}: /docs has those that are served"
            raise ApiError(400, message, param=name[:_MAX_SHOWN])


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)
