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


class Thinking:
    """Divides an answer into what the model thinks, between `<think>` and `</think>`, and the rest.

    `has_begun` is whether its prompt ends with `<think>`. Space around both parts is left out.
    """

    BEGIN, END = "<think>", "</think>"

    def __init__(self, *, has_begun: bool) -> None:
        self._head: str | None = None if has_begun else ""  # of the answer, until it is known whether it thinks
        self._end: StopStrings | None = StopStrings([self.END]) if has_begun else None  # while it thinks
        self._space: str | None = None  # after what it has thought so far; None at the beginning
        self._is_at_start = False  # of the rest, after a thought

    def add(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """More of the thought and of the rest."""
        if self._head is not None:
            self._head += text
            begun = self._head.lstrip()
            if begun.startswith(self.BEGIN):
                self._head, self._end, text = None, StopStrings([self.END]), begun[len(self.BEGIN) :]
            elif is_last or not self.BEGIN.startswith(begun):
                text, self._head = self._head, None
            else:
                return "", ""
        thought = ""
        if self._end is not None:
            rest = (self._end.held + text).partition(self.END)[2]
            thought, has_ended = self._end.add(text)
            if is_last and not has_ended:
                thought += self._end.held
            text = rest if has_ended else ""
            thought = thought.lstrip() if self._space is None else self._space + thought
            kept = thought.rstrip()
            self._space = thought[len(kept) :] if kept or self._space is not None else None
            thought = kept
            if has_ended:
                self._end, self._is_at_start = None, True
        if self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        return thought, text


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
            call = self._call_of(body)
            parts.append(self._BEGIN + body + end if call is None else call)
            self._call, self._has_calls = None, self._has_calls or call is not None

    def end(self) -> list[Part]:
        if self._call is not None:
            call = self._call_of(self._call)  # some models leave out the end of the last one
            return [self._BEGIN + self._call if call is None else call]
        last = self._space + self._before.held
        return [] if not last or (self._has_calls and not last.strip()) else [last]

    def _call_of(self, body: str) -> ToolCall | None:
        """The call between the two tags; None if it is something else."""
        return _call(_json(body))

    def _text(self, text: str, *, before_call: bool) -> list[Part]:
        """Text without the space around calls: space is held until text follows it."""
        text = self._space + text
        kept = text.rstrip()
        self._space = "" if before_call else text[len(kept) :]
        return [kept] if kept else []


class TaggedParser(HermesParser):
    """Calls with a tag for each argument: `functions` and `arguments` find them in a call of the same outer tags.

    What an argument is depends on its schema in `tools`: text stays as it is written, all else is JSON.
    """

    functions: re.Pattern[str]
    arguments: re.Pattern[str]

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = {each["function"]["name"]: arguments_schema(each).get("properties") for each in tools}

    def _call_of(self, body: str) -> ToolCall | None:
        function = self.functions.fullmatch(body)
        if function is None:
            return None
        schemas = self._schemas.get(function["name"]) or {}
        found = {
            each["name"]: _argument(each["value"], schemas.get(each["name"]))
            for each in self.arguments.finditer(function["arguments"])
        }
        if self.arguments.sub("", function["arguments"]).strip():
            return None
        return ToolCall(function["name"], json.dumps(found, ensure_ascii=False))


class Qwen3CoderParser(TaggedParser):
    """`<function=f><parameter=a>1</parameter></function>` between `<tool_call>` and `</tool_call>`."""

    functions = re.compile(r"\s*<function=(?P<name>[^>\s]+)>(?P<arguments>.*?)(</function>\s*)?", re.DOTALL)
    arguments = re.compile(r"<parameter=(?P<name>[^>]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)


class Glm45Parser(TaggedParser):
    """`f<arg_key>a</arg_key><arg_value>1</arg_value>` between `<tool_call>` and `</tool_call>`."""

    functions = re.compile(r"\s*(?P<name>[^<\s]+)\s*(?P<arguments>.*)", re.DOTALL)
    arguments = re.compile(r"<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL)


def _argument(text: str, schema: Any) -> Any:
    """The value of an argument that is written without quotes."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if text.strip() in ("null", "None") and "null" in kinds:
        return None
    if "string" in kinds:
        return text
    written = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)  # as templates of Python
    try:
        return _DECODER.decode(written.strip())
    except (ValueError, RecursionError):
        return text


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
    "hermes": HermesParser, "llama3_json": JsonParser, "mistral": MistralParser, "qwen3_coder": Qwen3CoderParser,
    "glm45": Glm45Parser,
}  # fmt: skip


def tool_parser(name: str, tools: Sequence[Mapping[str, Any]]) -> ToolParser:
    """A parser of this name, for calls of these functions."""
    parser = TOOL_PARSERS[name]
    return parser(tools) if issubclass(parser, TaggedParser) else parser()


def detect_parser(template: str) -> str | None:
    """The name of the parser for the calls that a chat template shows to the model; None if it shows other ones."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "glm45" if "<arg_key>" in template else "hermes"
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
