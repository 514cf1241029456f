"""OpenAI's Responses API, `/v1/responses`: its bodies as bodies of chats, its answers, and the events of its streams.

Nothing is stored: a client sends the whole conversation with each call.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from attnmesh.generation.requests import Token
from attnmesh.serving.fields import Fields, invalid
from attnmesh.serving.protocol import Call, parse_chat
from attnmesh.serving.responses import Choice, Deltas, Formatter, Json, event

_TEXTS = ("input_text", "output_text", "text")
_REFUSED = {
    "previous_response_id": (), "conversation": (), "background": (False,), "include": ([],), "prompt": (),
    "reasoning": ({},), "truncation": ("disabled",), "max_tool_calls": (), "top_logprobs": (0,), "messages": (),
    "n": (1,), "prompt_logprobs": (), "context_management": (),
}  # fmt: skip
"""Parameters that are not supported, and the values that mean the same as none."""


def parse_responses(body: dict[str, Any]) -> Call:
    """The call of `/v1/responses`."""
    fields = Fields(body)
    messages = _messages(fields.take("input"))
    instructions = fields.take("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise invalid("instructions", "a text", instructions)
        messages = [{"role": "system", "content": instructions}, *messages]
    text = fields.take("text", {})
    if not isinstance(text, dict) or not set(text) <= {"format", "verbosity"}:
        raise invalid("text", 'an object such as {"format": {"type": "text"}}', text)
    chat = {
        "messages": messages, "max_completion_tokens": fields.count("max_output_tokens", None, 1),
        "response_format": _format(text.get("format")), "tools": _tools(fields.take("tools", [])),
        "tool_choice": _tool_choice(fields.take("tool_choice")), "verbosity": text.get("verbosity"),
    }  # fmt: skip
    fields.refuse(_REFUSED)
    return parse_chat({**fields.left, **chat})


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat: adjacent calls of functions are one message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid("input", "a text or a list of items", value)
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _content(f"input[{i}].content", item.get("content"))})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "function": {name: item.get(name) for name in ("name", "arguments")}}
            if not messages or "tool_calls" not in messages[-1]:
                follows = bool(messages) and messages[-1]["role"] == "assistant"
                last = messages.pop() if follows else {"role": "assistant", "content": None}
                messages.append({**last, "tool_calls": []})
            messages[-1]["tool_calls"].append(call)
        elif kind == "function_call_output":
            content = _content(f"input[{i}].output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise invalid(f"input[{i}]", "a message, a function_call or a function_call_output", item, "input")
    return messages


def _content(name: str, value: Any) -> Any:
    """Parts of text as parts of a chat."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(each, dict) and each.get("type") in _TEXTS for each in value):
        raise invalid(name, f"text, or a list of parts of type {', '.join(_TEXTS)}", value, "input")
    return [{"type": "text", "text": each.get("text")} for each in value]


def _format(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": value}
    return value


def _tools(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [
        {"type": "function", "function": {name: x for name, x in each.items() if name != "type"}}
        if isinstance(each, dict) and each.get("type") == "function" else each
        for each in value
    ]  # fmt: skip


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


class ResponseFormatter(Formatter):
    """The answer of `/v1/responses`."""

    def __init__(self, call: Call, model: str, body: Mapping[str, Any], deltas: Deltas) -> None:
        self._deltas = deltas
        self._items: list[Json] = []
        self._open: Json | None = None  # the last item, while it grows
        self._events = 0
        sampling = call.sampling
        self._response: Json = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "status": "in_progress", "error": None, "incomplete_details": None, "output": self._items, "usage": None,
            "instructions": body.get("instructions"), "metadata": body.get("metadata") or {},
            "max_output_tokens": call.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "parallel_tool_calls": call.tool_choice.parallel, "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [], "text": body.get("text") or {"format": {"type": "text"}},
            "previous_response_id": None, "store": False, "background": False, "truncation": "disabled",
        }  # fmt: skip

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        (choice,) = choices
        self._add(choice.text, is_last=True)
        return self._ended(choice, usage)

    def begin(self, choices: Sequence[Choice]) -> list[str]:
        return [self._event(f"response.{name}", response=self._response) for name in ("created", "in_progress")]

    def token(self, choice: Choice, token: Token | None) -> list[str]:
        return self._add("" if token is None else token.text, is_last=choice.finish_reason is not None)

    def end(self, choices: Sequence[Choice], usage: Json) -> list[str]:
        response = self._ended(choices[0], usage)
        return [self._event(f"response.{response['status']}", response=response)]

    def error(self, body: Json) -> str:
        return self._event("error", **{name: body["error"][name] for name in ("message", "code", "param")})

    def _ended(self, choice: Choice, usage: Json) -> Json:
        is_cut = choice.finish_reason == "length"
        used = {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        return {
            **self._response, "status": "incomplete" if is_cut else "completed", "usage": used,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        }  # fmt: skip

    def _add(self, text: str, *, is_last: bool) -> list[str]:
        """Add text to the items; the events of it."""
        delta, events = self._deltas.add(text, is_last=is_last), []
        if "reasoning_content" in delta:
            part: Json = {"type": "reasoning_text", "text": ""}
            events += self._add_text(delta["reasoning_content"], {"type": "reasoning", "summary": []}, part)
        if "content" in delta:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._add_text(delta["content"], {"type": "message", "role": "assistant"}, part)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                named = {"type": "function_call", "call_id": call["id"], "name": call["function"]["name"]}
                events += self._begin({**named, "arguments": ""}, "fc")
            self._items[-1]["arguments"] += call["function"]["arguments"]
            events.append(
                self._item_event("response.function_call_arguments.delta", delta=call["function"]["arguments"])
            )
        return [*events, *(self._finish() if is_last else ())]

    def _add_text(self, text: str, item: Json, part: Json) -> list[str]:
        """Add text to the last item, or to this item, which begins with this part."""
        events = []
        if self._open is None or self._open["type"] != item["type"]:
            events += self._begin({**item, "content": []}, "msg" if item["type"] == "message" else "rs")
            events.append(self._item_event("response.content_part.added", part=part))
            self._items[-1]["content"].append(part)
        self._items[-1]["content"][0]["text"] += text
        return [*events, self._item_event(f"response.{part['type']}.delta", delta=text, **_logprobs(part))]

    def _begin(self, item: Json, prefix: str) -> list[str]:
        """Begin another item, after the end of the previous item."""
        events = self._finish()
        self._open = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item}
        self._items.append(self._open)
        return [*events, self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._open)]

    def _finish(self) -> list[str]:
        """End the item that grows, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = "completed"
        if "content" in item:
            (part,) = item["content"]
            done = [
                self._item_event(f"response.{part['type']}.done", text=part["text"], **_logprobs(part)),
                self._item_event("response.content_part.done", part=part),
            ]
        else:
            arguments, name = item["arguments"], item["name"]
            done = [self._item_event("response.function_call_arguments.done", arguments=arguments, name=name)]
        return [*done, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _item_event(self, kind: str, **fields: Any) -> str:
        """An event of the last item."""
        at = {"content_index": 0} if "content" in self._items[-1] else {}
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **at, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._events += 1
        return event({"type": kind, "sequence_number": self._events - 1, **fields}, kind)


def _logprobs(part: Json) -> Json:
    """What events of text have beside it, and events of thoughts have not."""
    return {"logprobs": []} if "logprobs" in part else {}
