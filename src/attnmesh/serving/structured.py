"""The grammars of answers: of `response_format`, vLLM's `structured_outputs`, and tool calls that are required."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from attnmesh.generation.grammar import grammar_of
from attnmesh.serving.conversations import ToolChoice
from attnmesh.serving.fields import ApiError, Fields, decode_json, invalid
from attnmesh.serving.tools import arguments_schema, calls_schema

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
