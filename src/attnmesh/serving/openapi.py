"""`/openapi.json` and `/docs`: the endpoints and their parameters, for programs and for people."""

from __future__ import annotations

from html import escape
from importlib.metadata import version
from typing import Any

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
        "Return log-probabilities of the prompt, with as many most likely tokens; no stream.",
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
        "top_logprobs": ("integer", "Also those of this many most likely tokens, at most 20."), **_ALL,
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
