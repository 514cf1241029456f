"""The bodies of requests: OpenAI's parameters, checked. A parameter that is not supported is refused, not ignored."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attnmesh.generation.grammar import grammar_of
from attnmesh.generation.requests import MAX_PRIORITY
from attnmesh.generation.sampling import MAX_SEED, Sampling
from attnmesh.serving.tools import arguments_schema, calls_schema
from attnmesh.utils.validation import is_number, shown

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
_MAX_TOOLS, _MAX_NAME = 128, 64  # as in OpenAI's API
_MAX_GRAMMAR = 2**16  # characters of a schema, a regular expression or a grammar
_GRAMMARS = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT = {"type": "object"}
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
class Chat:
    """A conversation, and how the chat template formats it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def characters(self) -> int:
        """The number of characters that its prompt has at least."""
        more = [each["tool_calls"] for each in self.messages if "tool_calls" in each]
        written = len(json.dumps([more, self.tools], ensure_ascii=False)) if more or self.tools else 0
        return written + sum(len(each["content"]) for each in self.messages)


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may have tool calls ("none", "auto"), must have some ("required"), or one of `name`."""

    mode: str = "none"
    name: str | None = None
    parallel: bool = True


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
    tool_choice: ToolChoice = ToolChoice()
    echo: bool = False
    prompt_logprobs: int | None = None

    @property
    def scored(self) -> int | None:
        """The most likely tokens that are wanted with the log-probabilities of the prompt; None without these."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((each for each in wanted if each is not None), default=None)


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
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt"))
    logprobs = fields.count("logprobs", None, 0, _MAX_LOGPROBS)
    echo, special = fields.flag("echo"), fields.flag("add_special_tokens", True)
    max_tokens, of_prompt = fields.count("max_tokens", _DEFAULT_TOKENS, 1), _prompt_logprobs(fields)
    return call_of(
        fields, prompts, None, max_tokens, logprobs, grammar=_grammar(fields), echo=echo, add_special_tokens=special,
        prompt_logprobs=of_prompt,
    )  # fmt: skip


def parse_chat(body: dict[str, Any]) -> Call:
    """The call of `/v1/chat/completions`."""
    fields = Fields(body)
    chat = _chat(fields)
    most, older = (fields.count(name, None, 1) for name in ("max_completion_tokens", "max_tokens"))
    wants, top = fields.flag("logprobs"), fields.count("top_logprobs", None, 0, _MAX_LOGPROBS)
    if top is not None and not wants:
        raise ApiError(400, f"top_logprobs requires logprobs: true, got top_logprobs {top}", param="top_logprobs")
    choice, grammar = tool_choice(fields, chat.tools), _grammar(fields)
    if choice.mode != "none":
        if grammar is not None:
            message = (
                f"response_format must be text with tools and tool_choice {choice.mode!r}: a grammar forbids calls"
            )
            raise ApiError(400, message, param="response_format")
        grammar = _calls_grammar(chat.tools, choice)
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
        prompts = Prompts(model=model, chat=_chat(fields))
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
        if value is not None and not (_is_integer(value) and least <= value <= most):
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
    if not _is_integer(priority) or abs(priority) > MAX_PRIORITY:
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


def _chat(fields: Fields) -> Chat:
    messages, tools = _messages(fields.take("messages")), _tools(fields.take("tools", []))
    continues = fields.flag("continue_final_message")
    generation_prompt = fields.flag("add_generation_prompt", not continues)
    if continues and (generation_prompt or messages[-1]["role"] != "assistant"):
        allowed = "false unless the last message is the assistant's and add_generation_prompt is false"
        raise invalid("continue_final_message", allowed, True)
    kwargs = fields.take("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise invalid("chat_template_kwargs", 'an object such as {"enable_thinking": false}', kwargs)
    return Chat(messages, tools, generation_prompt, continues, kwargs)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise invalid("messages", "a list of messages", value)
    return [_message(f"messages[{i}]", each) for i, each in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise invalid(name, 'an object such as {"role": "user", "content": "text"}', value)
    given = {key: each for key, each in value.items() if each not in (None, [])}
    role = given.pop("role")
    message: dict[str, Any] = {"role": role, "content": _content(name, given.pop("content", None), value)}
    if role == "assistant" and "tool_calls" in given:
        message["tool_calls"] = _tool_calls(f"{name}.tool_calls", given.pop("tool_calls"))
    texts = (
        "name",
        *(("tool_call_id",) if role == "tool" else ()),
        *(("reasoning_content",) if role == "assistant" else ()),
    )
    for key in texts:
        if key in given:
            message[key] = given.pop(key)
            if not isinstance(message[key], str):
                raise invalid(f"{name}.{key}", "a text", message[key], name)
    if given:
        key = min(given)
        allowed = ", ".join(("role", "content", *texts))
        message_ = f"{name}.{key[:_MAX_SHOWN]} is not supported, got {shown(given[key])}: {role!r} may have {allowed}"
        raise ApiError(400, message_[:1000], param=name)
    return message


def _content(name: str, content: Any, message: dict[str, Any]) -> str:
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    if isinstance(content, list):  # parts
        texts = [each.get("text") for each in content if isinstance(each, dict) and each.get("type") == "text"]
        are_texts = len(texts) == len(content) and all(isinstance(each, str) for each in texts)
        content = "".join(map(str, texts)) if are_texts else None
    if not isinstance(content, str):
        raise invalid(f"{name}.content", "text, or a list of parts of type text", message.get("content"), name)
    return content


def _tool_calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Earlier calls as chat templates take them: with their arguments as objects."""
    example = '{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
    if not isinstance(value, list):
        raise invalid(name, f"a list of calls such as {example}", value)
    calls = []
    for i, each in enumerate(value):
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{name}[{i}]", f"a call such as {example}", each, name)
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise invalid(f"{name}[{i}].function.arguments", "an object as JSON", function["arguments"], name)
        call_id = {"id": each["id"]} if isinstance(each.get("id"), str) else {}
        calls.append({**call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _tools(value: Any) -> list[dict[str, Any]]:
    example = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
    if not isinstance(value, list) or len(value) > _MAX_TOOLS:
        raise invalid("tools", f"a list of at most {_MAX_TOOLS} tools such as {example}", value)
    for i, each in enumerate(value):
        is_function = isinstance(each, dict) and each.get("type") == "function"
        function = each.get("function") if is_function else None
        if not isinstance(function, dict) or not isinstance(function.get("parameters") or {}, dict):
            raise invalid(f"tools[{i}]", f"a function such as {example}", each, "tools")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise invalid(f"tools[{i}].function.name", f"a text of 1 to {_MAX_NAME} characters", name, "tools")
    names = [each["function"]["name"] for each in value]
    if len(set(names)) < len(names):
        raise invalid("tools", "functions with different names", names)
    return value


def tool_choice(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Which of some tools the answer calls."""
    value, parallel = fields.take("tool_choice"), fields.flag("parallel_tool_calls", True)
    names = [each["function"]["name"] for each in tools]
    if value is None:
        value = "auto" if tools else "none"
    if value == "auto" and not tools:
        value = "none"
    if value == "none" or (value in ("auto", "required") and tools):
        return ToolChoice(value, None, parallel)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        example = '{"type": "function", "function": {"name": ..}}'
        raise invalid("tool_choice", f"none, or with tools auto, required or {example} of a tool", value)
    return ToolChoice("named", name, parallel)


def _calls_grammar(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> str | None:
    """The grammar of an answer that must be tool calls."""
    if choice.mode == "named":
        schema = next(arguments_schema(each) for each in tools if each["function"]["name"] == choice.name)
    elif choice.mode == "required":
        schema = calls_schema(tools, parallel=choice.parallel)
    else:
        return None
    return checked_grammar("tools", "json", schema)


def _grammar(fields: Fields) -> str | None:
    """The grammar of `response_format`, `structured_outputs` or the older names of these."""
    given: list[tuple[str, str, Any]] = []
    schema = response_schema(fields.take("response_format"))
    if schema is not None:
        given.append(("response_format", "json", schema))
    wanted = fields.take("structured_outputs", {})
    if not isinstance(wanted, dict) or not set(wanted) <= set(_GRAMMARS):
        raise invalid("structured_outputs", f"an object with one of {', '.join(_GRAMMARS)}", wanted)
    given += [(f"structured_outputs.{kind}", kind, value) for kind, value in wanted.items() if value is not None]
    for kind in _GRAMMARS:
        value = fields.take(f"guided_{kind}")
        given += [] if value is None else [(f"guided_{kind}", kind, value)]
    if len(given) > 1:
        names = ", ".join(name for name, _, _ in given)
        raise ApiError(400, f"at most one of response_format and structured_outputs may be given, got {names}")
    if not given:
        return None
    name, kind, value = given[0]
    if kind == "json_object":
        kind, value = "json", _ANY_OBJECT if value is True else None
    return checked_grammar(name, kind, value)


def response_schema(value: Any) -> dict[str, Any] | None:
    """The JSON schema of a `response_format`; None for text."""
    if value is None or value == {"type": "text"}:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        schema = value.get("schema") or _ANY_OBJECT
    else:
        inner = value.get("json_schema") if kind == "json_schema" else None
        schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        example = '{"type": "json_schema", "json_schema": {"name": "n", "schema": {..}}}'
        raise invalid("response_format", f'{{"type": "text"}}, {{"type": "json_object"}} or {example}', value)
    return schema


def checked_grammar(name: str, kind: str, value: Any) -> str:
    """A grammar in the format of `Generator.submit`."""
    param = name.partition(".")[0]
    if kind == "json" and isinstance(value, str):
        value = decode_json(value.encode())
    if kind == "json":
        is_valid, allowed = isinstance(value, dict), "a JSON schema"
    elif kind == "choice":
        is_valid = isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)
        allowed = "a list of texts"
    else:
        is_valid, allowed = isinstance(value, str) and bool(value), "a text"
    if not is_valid:
        raise invalid(name, allowed, value, param)
    if len(json.dumps(value, ensure_ascii=False)) > _MAX_GRAMMAR:
        raise invalid(name, f"{allowed} of at most {_MAX_GRAMMAR} characters", value, param)
    try:
        return grammar_of(kind, value)
    except ValueError as error:
        raise ApiError(400, f"{name}: {error}", param=param) from None


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


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def invalid(name: str, allowed: str, value: object, param: str | None = None) -> ApiError:
    """The error for a parameter that has another value than it may have."""
    got = "nothing" if value is None else shown(value)
    return ApiError(400, f"{name} must be {allowed}, got {got}", param=param or name)
