"""Tool calls: the formats in which models write them, found in the text of an answer while it grows.

`TOOL_PARSERS` has the parsers by the names that vLLM gives them. `detect_parser` finds the one of a chat template.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnmesh.generation.requests import StopStrings

_ID = string.ascii_letters + string.digits
_ID_LENGTH = 9  # what Mistral's chat templates require


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: "".join(secrets.choice(_ID) for _ in range(_ID_LENGTH)))


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of the latest call."""

    text: str


Part = str | ToolCall | Arguments
"""Some of an answer: text, a call, or more of its arguments."""


class ToolParser(ABC):
    """Divides an answer into text and calls. A call is returned when it is complete."""

    @abstractmethod
    def add(self, text: str) -> list[Part]:
        """The parts that more text completes."""

    @abstractmethod
    def end(self) -> list[Part]:
        """The parts that are left at the end of the answer. An incomplete call is text."""


class NoTools(ToolParser):
    """An answer that is text."""

    def add(self, text: str) -> list[Part]:
        return [text]

    def end(self) -> list[Part]:
        return []


class HermesParser(ToolParser):
    """`<tool_call>{"name": .., "arguments": ..}</tool_call>`, as Hermes and Qwen write calls, with text before it."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._before, self._space = StopStrings([self._BEGIN]), ""
        self._call: str | None = None  # the text after the beginning of a call
        self._has_calls = False

    def add(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self._call is None:
                found = (self._before.held + text).partition(self._BEGIN)
                shown, is_call = self._before.add(text)
                parts += self._text(shown, before_call=is_call)
                if not is_call:
                    return parts
                self._call, text = "", found[2]
            self._call += text
            body, end, text = self._call.partition(self._END)
            if not end:
                return parts
            call = _call(_json(body))
            parts.append(self._BEGIN + body + end if call is None else call)
            self._call, self._has_calls = None, self._has_calls or call is not None

    def end(self) -> list[Part]:
        if self._call is not None:
            call = _call(_json(self._call))  # some models leave out the end of the last one
            return [self._BEGIN + self._call if call is None else call]
        last = self._space + self._before.held
        return [] if not last or (self._has_calls and not last.strip()) else [last]

    def _text(self, text: str, *, before_call: bool) -> list[Part]:
        """Text without the space around calls: space is held until text follows it."""
        text = self._space + text
        kept = text.rstrip()
        self._space = "" if before_call else text[len(kept) :]
        return [kept] if kept else []


class _Calls:
    """Calls one after another, as JSON objects, or as names before objects."""

    _NAME = re.compile(r"\s*([\w.:/-]+)\s*(?:\[ARGS\]\s*)?(?=\{)")
    _BETWEEN = re.compile(r"(?:\[TOOL_CALLS\]|<\|python_tag\|>|[\s,;\[\]])*")

    def __init__(self) -> None:
        self.left = ""

    def add(self, text: str) -> list[ToolCall]:
        self.left += text
        calls: list[ToolCall] = []
        if "}" not in text:  # no call is complete now that was not before
            return calls
        while (begin := self._BETWEEN.match(self.left)) is not None:
            rest = self.left[begin.end() :]
            name = self._NAME.match(rest)
            try:
                value, end = _DECODER.raw_decode(rest, 0 if name is None else name.end())
            except (ValueError, RecursionError):
                break
            call = _call(value if name is None else {"name": name[1], "arguments": value})
            if call is None:
                break
            calls.append(call)
            self.left = rest[end:]
        return calls

    @property
    def is_empty(self) -> bool:
        between = self._BETWEEN.match(self.left)
        return between is not None and between.end() == len(self.left)


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": .., "arguments": ..}, ..]`, or `[TOOL_CALLS]name{..}`, with text before it."""

    _BEGIN = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self._before, self._calls = StopStrings([self._BEGIN]), _Calls()
        self._in_calls = False

    def add(self, text: str) -> list[Part]:
        if self._in_calls:
            return [*self._calls.add(text)]
        found = (self._before.held + text).partition(self._BEGIN)
        shown, self._in_calls = self._before.add(text)
        parts: list[Part] = [shown] if shown else []
        return [*parts, *(self._calls.add(found[2]) if self._in_calls else [])]

    def end(self) -> list[Part]:
        if not self._in_calls:
            return [self._before.held] if self._before.held else []
        return [] if self._calls.is_empty else [self._calls.left]


class JsonParser(ToolParser):
    """An answer that is JSON calls and nothing else, as Llama 3 writes them: `{"name": .., "parameters": ..}`.

    Several are separated by semicolons or in a list, and may begin with `<|python_tag|>`. Any other answer is text.
    """

    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._begin: str | None = ""  # until it is known which of both it is
        self._calls: _Calls | None = None

    def add(self, text: str) -> list[Part]:
        if self._begin is not None:
            self._begin += text
            head = self._begin.lstrip()
            if not head or (self._TAG.startswith(head) and head != self._TAG):
                return []
            text, self._begin = self._begin, None
            if head[0] in "{[" or head.startswith(self._TAG):
                self._calls = _Calls()
        return [text] if self._calls is None else [*self._calls.add(text)]

    def end(self) -> list[Part]:
        if self._begin is not None:
            return [self._begin] if self._begin else []
        return [] if self._calls is None or self._calls.is_empty else [self._calls.left]


class NamedParser(ToolParser):
    """An answer that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def add(self, text: str) -> list[Part]:
        if self._name is not None and text:
            call, self._name = ToolCall(self._name, text), None
            return [call]
        return [Arguments(text)] if text else []

    def end(self) -> list[Part]:
        return []


TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "hermes": HermesParser, "llama3_json": JsonParser, "mistral": MistralParser,
}  # fmt: skip


def detect_parser(template: str) -> str | None:
    """The name of the parser for the calls that a chat template shows to the model; None if it shows other ones."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>")):
        return "hermes"
    if '"parameters":' in template and ("<|python_tag|>" in template or "ipython" in template):
        return "llama3_json"
    return None


def calls_schema(tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls of these functions, or of one call."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "arguments": arguments_schema(tool)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({} if parallel else {"maxItems": 1})}


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of the arguments of a function."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    return schema


def _json(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> ToolCall | None:
    """A call that a model wrote as JSON; None if it is something else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
