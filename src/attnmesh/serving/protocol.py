"""The bodies of requests: OpenAI's parameters, checked. A parameter that is not supported is refused, not ignored."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import version
from typing import Any

from attnmesh.generation.requests import MAX_PRIORITY
from attnmesh.generation.sampling import MAX_SEED, Sampling
from attnmesh.serving.conversations import (
    Chat,
    ToolChoice,
    calls_grammar,
    parse_conversation,
    parse_grammar,
    tool_choice,
)
from attnmesh.serving.fields import ApiError, Fields, invalid, is_integer
from attnmesh.utils.validation import is_number

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
_DEFAULT_TOKENS = 16  # of a completion; a chat may take all that is left


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prompts of a body: texts or token ids, or what the chat template makes of a `chat`."""

    model: str | None
    prompts: tuple[str | list[int], ...] = ()
    chat: Chat | None = None
    add_special_tokens: bool = True
    max_tokens: int | None = None  # of an answer; None: all that is left

    @property
    def is_chat(self) -> bool:
        """Whether the answer is a message."""
        return self.chat is not None

    @property
    def characters(self) -> int:
        """The number of characters that they have at least."""
        texts = sum(len(each) for each in self.prompts if isinstance(each, str))
        return texts if self.chat is None else self.chat.characters


@dataclass(frozen=True, kw_only=True)
class Call(Prompts):
    """A checked body."""

    n: int
    stream: bool
    include_usage: bool
    min_tokens: int
    sampling: Sampling
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...] | None
    logprobs: int | None
    logit_bias: dict[int, float]
    ignore_eos: bool
    priority: int
    skip_special_tokens: bool
    grammar: str | None = None
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    echo: bool = False
    prompt_logprobs: int | None = None

    @property
    def scored(self) -> int | None:
        """The most likely tokens that are wanted with the log-probabilities of the prompt; None without these."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in wanted if each is not None), default=None)


def parse_completion(body: dict[str, Any]) -> Call:
    """The call of `/v1/completions`."""
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt"))
    logprobs = fields.count("logprobs", None, 0, _MAX_LOGPROBS)
    echo, special = fields.flag("echo"), fields.flag("add_special_tokens", True)
    max_tokens, of_prompt = fields.count("max_tokens", _DEFAULT_TOKENS, 1), _prompt_logprobs(fields)
    return call_of(
        fields, prompts, None, max_tokens, logprobs, grammar=parse_grammar(fields), echo=echo,
        add_special_tokens=special, prompt_logprobs=of_prompt,
    )  # fmt: skip


def parse_chat(body: dict[str, Any]) -> Call:
    """The call of `/v1/chat/completions`."""
    fields = Fields(body)
    chat = parse_conversation(fields)
    most, older = (fields.count(name, None, 1) for name in ("max_completion_tokens", "max_tokens"))
    wants, top = fields.flag("logprobs"), fields.count("top_logprobs", None, 0, _MAX_LOGPROBS)
    if top is not None and not wants:
        raise ApiError(400, f"top_logprobs requires logprobs: true, got top_logprobs {top}", param="top_logprobs")
    choice, grammar = tool_choice(fields, chat.tools), parse_grammar(fields)
    if choice.mode != "none":
        if grammar is not None:
            message = (
                f"response_format must be text with tools and tool_choice {choice.mode!r}: a grammar forbids calls"
            )
            raise ApiError(400, message, param="response_format")
        grammar = calls_grammar(chat.tools, choice)
    max_tokens, logprobs = older if most is None else most, (top or 0) if wants else None
    of_prompt = _prompt_logprobs(fields)
    return call_of(
        fields, (), chat, max_tokens, logprobs, grammar=grammar, tool_choice=choice, prompt_logprobs=of_prompt
    )


def parse_tokenize(body: dict[str, Any]) -> tuple[Prompts, bool]:
    """The prompt of `/tokenize`, as vLLM has it, and whether the tokens are wanted as texts, too."""
    fields = Fields(body)
    model, strings = model_name(fields), fields.flag("return_token_strs")
    if "messages" in body:
        prompts = Prompts(model=model, chat=parse_conversation(fields))
    else:
        text = fields.take("prompt")
        if not isinstance(text, str):
            raise invalid("prompt", "a text", text)
        prompts = Prompts(model=model, prompts=(text,), add_special_tokens=fields.flag("add_special_tokens", True))
    fields.check_empty()
    return prompts, strings


def parse_detokenize(body: dict[str, Any]) -> tuple[str | None, list[int]]:
    """The model and the token ids of `/detokenize`, as vLLM has it."""
    fields = Fields(body)
    model, ids = model_name(fields), fields.take("tokens")
    if not _are_ids(ids) and ids != []:
        raise invalid("tokens", "a list of token ids", ids)
    fields.check_empty()
    return model, ids


def call_of(
    fields: Fields,
    prompts: Sequence[str | list[int]],
    chat: Chat | None,
    max_tokens: int | None,
    logprobs: int | None,
    **others: Any,
) -> Call:
    """The call of the parameters that all endpoints have, and of others; refuses what is left."""
    options = fields.take("stream_options", {})
    are_flags = isinstance(options, dict) and all(isinstance(each, bool) for each in options.values())
    if not are_flags or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise invalid("stream_options", 'an object such as {"include_usage": true}', options)
    priority = fields.take("priority", 0)
    if not is_integer(priority) or abs(priority) > MAX_PRIORITY:
        raise invalid("priority", f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, the lowest first", priority)
    call = Call(
        model=model_name(fields), prompts=tuple(prompts), chat=chat, n=fields.count("n", 1, 1, 1024) or 1,
        stream=fields.flag("stream"), include_usage=options.get("include_usage", False), max_tokens=max_tokens,
        min_tokens=fields.count("min_tokens", 0, 0) or 0, sampling=_sampling(fields),
        stop_strings=_stop(fields.take("stop", [])), stop_token_ids=_stop_token_ids(fields.take("stop_token_ids")),
        logprobs=logprobs, logit_bias=_logit_bias(fields.take("logit_bias", {})),
        ignore_eos=fields.flag("ignore_eos"), priority=priority,
        skip_special_tokens=fields.flag("skip_special_tokens", True), **others,
    )  # fmt: skip
    for name, value in (("min_tokens", call.min_tokens), ("ignore_eos", call.ignore_eos)):
        if call.grammar is not None and value:
            message = f"{name} must be left out where a schema, a grammar or tool_choice decides the end, got {value}"
            raise ApiError(400, message, param=name)
    if call.stream and call.scored is not None:
        raise ApiError(400, "stream must be false with prompt_logprobs, or echo and logprobs, got true", param="stream")
    fields.check_empty()
    return call


def model_name(fields: Fields) -> str | None:
    """The name of a model, which is optional: there is one."""
    model = fields.take("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model", "the name of a model", model)
    return model


def _prompt_logprobs(fields: Fields) -> int | None:
    return fields.count("prompt_logprobs", None, 0, _MAX_LOGPROBS)


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or _are_ids(value):
        return [value]
    if isinstance(value, list) and len(value) > _MAX_PROMPTS:
        raise ApiError(400, f"prompt must have at most {_MAX_PROMPTS} prompts, got {len(value)}", param="prompt")
    if isinstance(value, list) and value and all(isinstance(each, str) or _are_ids(each) for each in value):
        return value
    raise invalid("prompt", "a text, a list of token ids, or a list of these", value)


def _sampling(fields: Fields) -> Sampling:
    given = {name: value for name in _SAMPLING if (value := fields.take(name)) is not None}
    for name, (least, most) in _PENALTIES.items():
        value = given.get(name, 1)
        if not is_number(value) or not least <= value <= most:
            raise invalid(name, f"a number from {least} to {most}", value)
    try:  # the API's temperature is 1, and without a seed answers differ
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
        raise invalid("stop", f"a text or at most {_MAX_STOP} texts of 1 to 1000 characters", value)
    return tuple(strings)


def _stop_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is not None and not ((_are_ids(value) or value == []) and len(value) <= _MAX_STOP_IDS):
        raise invalid("stop_token_ids", f"a list of at most {_MAX_STOP_IDS} token ids", value)
    return None if value is None else tuple(value)


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > _MAX_BIAS:
        raise invalid("logit_bias", f"an object of at most {_MAX_BIAS} token ids and numbers", value)
    bias = {}
    for token, number in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise invalid("logit_bias", "an object whose names are token ids", token)
        if not is_number(number) or not math.isfinite(number) or abs(number) > 100:
            raise invalid("logit_bias", "an object whose values are numbers from -100 to 100", number)
        bias[int(token)] = float(number)
    return bias


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int} and min(value) >= 0


# `/openapi.json` and `/docs`: the endpoints and their parameters, for programs and for people.


Parameters = dict[str, tuple[str, str]]
"""Names with their JSON types, several separated by "|", and what they mean."""

_ALL: Parameters = {
    "model": ("string", "The name of the model; it may be left out."),
    "stream": ("boolean", "Answer with server-sent events."),
    "stream_options": ("object", "include_usage: a last event has the number of tokens."),
    "n": ("integer", "Samples of each prompt."),
    "temperature": ("number", "0 takes the most likely token. Default 1."),
    "top_p": ("number", "Sample from the most likely tokens that make up this probability."),
    "top_k": ("integer", "Sample from this many most likely tokens; 0 from all."),
    "min_p": ("number", "Sample from tokens at least this many times as likely as the most likely one."),
    "seed": ("integer", "Makes the answer reproducible."),
    "presence_penalty": ("number", "From -2 to 2."),
    "frequency_penalty": ("number", "From -2 to 2."),
    "repetition_penalty": ("number", "From 0.01 to 100; 1 is none."),
    "logit_bias": ("object", "Numbers from -100 to 100 by token id, added to logits."),
    "stop": ("string|array", "Texts that end the answer, at most 16."),
    "stop_token_ids": ("array", "Tokens that end the answer besides the eos tokens, at most 256."),
    "ignore_eos": ("boolean", "The answer does not end with an eos token."),
    "min_tokens": ("integer", "The answer has at least this many tokens."),
    "skip_special_tokens": ("boolean", "Whether special tokens have no text. Default true."),
    "prompt_logprobs": (
        "integer",
        "Return log-probabilities of the prompt, with this number of most likely tokens; no stream.",
    ),
    "priority": ("integer", "Requests with a lower one come first. Default 0."),
    "response_format": ("object", "type text, json_object, or json_schema with a json_schema that has a schema."),
    "structured_outputs": ("object", "One of json, regex, choice, grammar and json_object, as in vLLM."),
    "guided_json": ("object|string", "As structured_outputs.json."),
    "guided_regex": ("string", "As structured_outputs.regex."),
    "guided_choice": ("array", "As structured_outputs.choice."),
    "guided_grammar": ("string", "As structured_outputs.grammar: Lark or GBNF."),
    "guided_json_object": ("boolean", "As structured_outputs.json_object."),
}
_CHAT: Parameters = {
    "messages": (
        "array",
        "Messages with a role and text; an assistant's may have tool_calls, a tool's a tool_call_id.",
    ),
    "tools": ("array", "Functions that the model may call."),
    "add_generation_prompt": ("boolean", "Whether the prompt ends with the beginning of an answer. Default true."),
    "continue_final_message": ("boolean", "Continue the last message, which is the assistant's."),
    "chat_template_kwargs": ("object", "Variables of the chat template, such as enable_thinking."),
}
_TOOL_CHOICE: Parameters = {
    "tool_choice": ("string|object", "none, auto, required, or a function."),
    "parallel_tool_calls": ("boolean", "Whether an answer may have several calls. Default true."),
}
_MAX_TOKENS = "The most tokens of an answer."
_SPECIAL: Parameters = {"add_special_tokens": ("boolean", "Whether a text begins with the bos token. Default true.")}
_NOT_OF_RESPONSES = ("n", "response_format", "prompt_logprobs", *(name for name in _CHAT if name != "tools"))

ENDPOINTS: dict[str, tuple[str, str, Parameters | None]] = {
    "/v1/chat/completions": ("post", "Answer a conversation.", {
        **_CHAT, **_TOOL_CHOICE, "max_completion_tokens": ("integer", _MAX_TOKENS),
        "max_tokens": ("integer", _MAX_TOKENS), "logprobs": ("boolean", "Return log-probabilities."),
        "top_logprobs": ("integer", "Also log-probabilities of this number of most likely tokens, at most 20."), **_ALL,
    }),
    "/v1/completions": ("post", "Continue prompts.", {
        "prompt": ("string|array", "A text, token ids, or a list of these."), "max_tokens": ("integer", _MAX_TOKENS),
        "logprobs": ("integer", "Return log-probabilities, also of this many most likely tokens, at most 20."),
        "echo": ("boolean", "Repeat the prompt before the answer."), **_SPECIAL, **_ALL,
    }),
    "/v1/responses": ("post", "Answer a conversation, in the format of the Responses API. Nothing is stored.", {
        "input": ("string|array", "A text, or messages, function_call and function_call_output items."),
        "instructions": ("string", "A system message."), "max_output_tokens": ("integer", _MAX_TOKENS),
        "text": ("object", "format: type text, json_object, or json_schema with a schema."),
        **{name: each for name, each in {**_CHAT, **_TOOL_CHOICE, **_ALL}.items() if name not in _NOT_OF_RESPONSES},
    }),
    "/tokenize": ("post", "The tokens of a text, or of a conversation as the chat template formats it.", {
        "model": _ALL["model"], "prompt": ("string", "A text."), **_SPECIAL, **_CHAT,
        "return_token_strs": ("boolean", "Return the tokens as texts, too."),
    }),
    "/detokenize": ("post", "The text of tokens.", {
        "model": _ALL["model"], "tokens": ("array", "Token ids."),
    }),
    "/": ("get", "A page to chat with the model, and to see which rank holds what.", None),
    "/events": ("get", "What that page shows, as server-sent events.", None),
    "/v1/models": ("get", "The model, with max_model_len.", None),
    "/v1/models/{name}": ("get", "The model of this name.", None),
    "/health": ("get", "200 while requests are taken, else 503.", None),
    "/metrics": ("get", "Metrics for Prometheus.", None),
    "/version": ("get", "The version of attnmesh.", None),
}  # fmt: skip
"""The methods of all endpoints, what they do, and the parameters of bodies."""


def openapi() -> dict[str, Any]:
    """The description of the API in the OpenAPI format."""
    paths = {}
    for path, (method, about, parameters) in ENDPOINTS.items():
        operation: dict[str, Any] = {"summary": about, "responses": {"200": {"description": "The answer."}}}
        if "{name}" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if parameters is not None:
            properties = {
                name: {"type": kind.split("|") if "|" in kind else kind, "description": text}
                for name, (kind, text) in parameters.items()
            }
            schema = {"type": "object", "properties": properties, "additionalProperties": False}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {method: operation}
    info = {"title": "attnmesh", "version": version("attnmesh"), "summary": "A language model, with OpenAI's API."}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def docs_page() -> str:
    """The same as a page that needs no other files."""
    parts = []
    for path, (method, about, parameters) in ENDPOINTS.items():
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code><td>{escape(kind.replace('|', ', '))}<td>{escape(text)}"
            for name, (kind, text) in (parameters or {}).items()
        )
        table = f"<table><tr><th>parameter<th>type<th>{rows}</table>" if rows else ""
        parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(about)}</p>{table}")
    style = (
        ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem}table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;"
        "padding:.25rem .75rem .25rem 0;border-bottom:1px solid #8884}h2{margin-top:2.5rem;font-size:1.1rem}"
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>attnmesh {version('attnmesh')}</title><style>{style}</style><h1>attnmesh</h1>"
        '<p>A language model with OpenAI\'s API. For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(parts)}</html>"
    )
