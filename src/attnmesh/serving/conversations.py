"""Conversations: messages and tools of chats, checked, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attnmesh.generation.sampling import grammar_of
from attnmesh.serving.fields import ApiError, Fields, decode_json, invalid
from attnmesh.serving.tools import arguments_schema, calls_schema
from attnmesh.utils.validation import shown

# The grammars of answers: of `response_format`, vLLM's `structured_outputs`, and tool calls that are required.


_MAX_SCHEMA, _MAX_GRAMMAR = 2**15, 2**13  # characters: to compile more would delay other answers
_MAX_LINES = 256  # of a grammar: llguidance overflows its stack where thousands of rules refer to one another
_GRAMMARS = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT = {"type": "object"}


def calls_grammar(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> str | None:
    """The grammar of an answer that must be tool calls."""
    if choice.mode == "named":
        schema = next(arguments_schema(each) for each in tools if each["function"]["name"] == choice.name)
    elif choice.mode == "required":
        schema = calls_schema(tools, parallel=choice.parallel)
    else:
        return None
    return _checked("tools", "json", schema)


def parse_grammar(fields: Fields) -> str | None:
    """The grammar of `response_format`, `structured_outputs` or the older names of these."""
    given: list[tuple[str, str, Any]] = []
    schema = _response_schema(fields.take("response_format"))
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
    return _checked(name, kind, value)


def _response_schema(value: Any) -> dict[str, Any] | None:
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


def _checked(name: str, kind: str, value: Any) -> str:
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
    most = _MAX_SCHEMA if kind == "json" else _MAX_GRAMMAR
    if len(json.dumps(value, ensure_ascii=False)) > most:
        raise invalid(name, f"{allowed} of at most {most} characters", value, param)
    if kind == "grammar" and len(value.splitlines()) > _MAX_LINES:
        raise invalid(name, f"{allowed} of at most {_MAX_LINES} lines", value, param)
    try:
        return grammar_of(kind, value)
    except ValueError as error:
        raise ApiError(400, f"{name}: {error}", param=param) from None


_MAX_SHOWN = 100  # characters of a name
_MAX_TOOLS, _MAX_NAME = 128, 64  # as in OpenAI's API


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


def parse_conversation(fields: Fields) -> Chat:
    """The conversation of a body."""
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
