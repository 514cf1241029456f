"""Tool calls, JSON schemas and the endpoints beside chats and completions, with a model whose tokens are bytes."""

import concurrent.futures
import json
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnmesh.generation.generator import Generator
from attnmesh.generation.requests import Request
from attnmesh.generation.sampling import LogitBias
from attnmesh.models.loading import load_model
from attnmesh.plan.decode import DecodeSharding
from helpers.cases import sweep
from helpers.models import on_virtual_ranks

for name in ("transformers", "openai", "fastapi", "uvicorn", "prometheus_client", "llguidance"):
    pytest.importorskip(name)

import openai  # noqa: E402
import pydantic  # noqa: E402

from attnmesh.generation.sampling import grammar_of  # noqa: E402
from attnmesh.serving.fields import _IGNORED, _REFUSED, ApiError, Fields  # noqa: E402
from attnmesh.serving.loop import Submission  # noqa: E402
from attnmesh.serving.protocol import (  # noqa: E402
    ENDPOINTS,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from attnmesh.serving.responses_api import parse_responses  # noqa: E402
from attnmesh.serving.server import serve  # noqa: E402
from attnmesh.serving.tools import (  # noqa: E402
    TOOL_PARSERS,
    NamedParser,
    Thinking,
    ToolCall,
    detect_parser,
    tool_parser,
)
from helpers.processes import run_processes  # noqa: E402
from helpers.serving import (  # noqa: E402
    NAME,
    TOOL_TEMPLATE,
    Server,
    byte_tokenizer,
    settings,
    virtual_server,
    write_byte_model,
)

# Parsers.


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": schema}}


H = tool(
    "h", s={"type": "string"}, i={"type": "integer"}, o={"type": "object"}, b={"type": "boolean"},
    n={"type": ["string", "null"]},
)  # fmt: skip
F, G = ("f", {"a": ["}", "é"]}), ("g", {})
ANSWERS = {
    "text": ("hermes", "a < b, <tool\n", "a < b, <tool\n", []),
    "hermes": (
        "hermes",
        'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": ["}", "é"]}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>\n',
        "Wait.",
        [F, G],
    ),
    "hermes, without its end": ("hermes", '<tool_call>{"name": "g", "arguments": {}}', "", [G]),
    "hermes, no JSON": ("hermes", "<tool_call>{g</tool_call> b", "<tool_call>{g</tool_call> b", []),
    "llama": ("llama3_json", '{"name": "f", "parameters": {"a": ["}", "é"]}}', "", [F]),
    "llama, two": ("llama3_json", '<|python_tag|>{"name": "g"}; {"name": "g", "parameters": "{}"}', "", [G, G]),
    "llama, other JSON": ("llama3_json", '{"a": {"b": NaN}} c', '{"a": {"b": NaN}} c', []),
    "llama, text": ("llama3_json", " <a {", " <a {", []),
    "mistral": (
        "mistral",
        'Wait.[TOOL_CALLS] [{"name": "f", "arguments": {"a": ["}", "é"]}}, {"name": "g", "arguments": {}}]',
        "Wait.",
        [F, G],
    ),
    "mistral, names": ("mistral", '[TOOL_CALLS]f{"a": ["}", "é"]}[TOOL_CALLS]g[ARGS]{}', "", [F, G]),
    "mistral, incomplete": ("mistral", 'a[TOOL_CALLS]f{"a": [', 'af{"a": [', []),
    "mistral, text": ("mistral", "a [TOOL_", "a [TOOL_", []),
    "qwen": (
        "qwen3_coder",
        "Wait.\n<tool_call>\n<function=h>\n<parameter=s>\n1 <b\n é\n</parameter>\n<parameter=i>\n2\n</parameter>\n"
        "<parameter=o>\n{\"a\": [true]}\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=g></function></tool_call>",
        "Wait.",
        [("h", {"s": "1 <b\n é", "i": 2, "o": {"a": [True]}, "b": True}), G],
    ),
    "qwen, without its end": (
        "qwen3_coder", "<tool_call><function=h><parameter=s>a</parameter>", "", [("h", {"s": "a"})],
    ),
    "qwen, incomplete": (
        "qwen3_coder", "<tool_call><function=h><parameter=s>a", "<tool_call><function=h><parameter=s>a", [],
    ),
    "qwen, JSON": ("qwen3_coder", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    "glm": (
        "glm45",
        "\n<tool_call>h\n<arg_key>s</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key><arg_value>null</arg_value>\n"
        "<arg_key>other</arg_key>\n<arg_value>a b</arg_value>\n</tool_call><tool_call>g</tool_call>",
        "",
        [("h", {"s": "12", "n": None, "other": "a b"}), G],
    ),
    "glm, text": ("glm45", "<tool_call>h a</tool_call>", "<tool_call>h a</tool_call>", []),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("case", ANSWERS)
def test_calls_are_found_in_text_that_grows(case, size):
    name, answer, content, calls = ANSWERS[case]
    parser = tool_parser(name, [H, tool("g")])
    parts = [part for at in range(0, len(answer), size) for part in parser.add(answer[at : at + size])]
    parts += parser.end()
    assert "".join(part for part in parts if isinstance(part, str)) == content
    assert [(each.name, json.loads(each.arguments)) for each in parts if isinstance(each, ToolCall)] == calls
    assert not any("\\u" in each.arguments for each in parts if isinstance(each, ToolCall))  # letters stay letters


def test_the_parser_is_that_of_the_template():
    assert detect_parser(TOOL_TEMPLATE) == "hermes"
    assert detect_parser("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert detect_parser('ipython {"name": function name, "parameters": dictionary}') == "llama3_json"
    assert detect_parser("<tool_call><function=f>") == "qwen3_coder"
    assert detect_parser("<tool_call>{name}<arg_key>") == "glm45"
    assert set(TOOL_PARSERS) == {"mistral", "llama3_json", "qwen3_coder", "glm45", "hermes"}  # each is found
    assert detect_parser("{{ messages }}") is None
    assert [each.name for each in NamedParser("f").add("{}")] == ["f"]


@pytest.mark.parametrize("size", [1, 6, 1000])
@pytest.mark.parametrize(
    ("answer", "has_begun", "parts"),
    [
        ("<think>\na b\n\n c\n</think>\n\nd </think>\n", False, ("a b\n\n c", "d </think>\n")),
        ("a </thin</think>b", True, ("a </thin", "b")),  # the prompt ends with <think>
        ("\n<think>a </thi", False, ("a </thi", "")),  # the answer ends while it thinks
        (" a <think>b</think>", False, ("", " a <think>b</think>")),  # no thought at the beginning
        ("<thi", False, ("", "<thi")),
        ("<think></think>a", False, ("", "a")),
    ],
)
def test_thoughts_are_separated_from_the_rest(answer, has_begun, parts, size):
    thinking, found = Thinking(has_begun=has_begun), ["", ""]
    for at in range(0, len(answer), size):
        for i, part in enumerate(thinking.add(answer[at : at + size], is_last=at + size >= len(answer))):
            found[i] += part
    assert tuple(found) == parts


# A server.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    how = {"cache_tokens": 1024, "max_body": 2**20, "max_queue": 64}
    with virtual_server(model, tmp_path_factory.mktemp("run"), ranks=1, **how) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client()


CITY = {"enum": ["Bern", "Rom"]}
TOOLS = [tool("weather", city=CITY, day={"type": "integer", "minimum": 0, "maximum": 9}), tool("stop")]
USER = [{"role": "user", "content": "How is the weather?"}]


COMPACT = {"logit_bias": {str(token): -100 for token in byte_tokenizer()(" \n")["input_ids"]}}  # JSON without space


def chat(client, messages=USER, **how):
    how = {"model": NAME, "messages": messages, "temperature": 0, **COMPACT, **how}
    return client.chat.completions.create(**how)


def check_call(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in CITY["enum"]
        assert arguments["day"] in range(10)
    else:
        assert (call.function.name, arguments) == ("stop", {})
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)


def streamed(chunks):
    """The content, the calls and the finish reason of a stream."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for each in choice.delta.tool_calls or []:
            call = calls.setdefault(each.index, ["", ""])
            call[0] += each.function.name or ""
            call[1] += each.function.arguments or ""
        reason = choice.finish_reason or reason
    return content, [tuple(call) for _, call in sorted(calls.items())], reason


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("seed", [0, sweep(1), sweep(2), sweep(3)])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_are_required_have_the_format_of_the_tools(client, choice, seed):
    how = {"tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": seed, "parallel_tool_calls": False}
    found = chat(client, **how).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content is None
    (call,) = found.message.tool_calls
    check_call(call)
    assert call.function.name == "weather" or choice == "required"
    named = (call.function.name, call.function.arguments)
    content, calls, reason = streamed(chat(client, stream=True, **how))
    assert (content, [(name, json.loads(x)) for name, x in calls]) == ("", [(named[0], json.loads(named[1]))])
    assert reason == "tool_calls"


def scripted(monkeypatch, answer):
    """Let all requests answer with this text, by their tokens; its end is an eos token."""
    ids = [*byte_tokenizer()(answer)["input_ids"], 1]
    monkeypatch.setattr(Request, "takes_most_likely", False)
    monkeypatch.setattr(Request, "choose", lambda self, *_: [ids[len(self.tokens)]])


def test_a_conversation_with_calls(client, server, monkeypatch):
    answer = 'I go. <tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    with monkeypatch.context() as patched:
        scripted(patched, answer)
        found = chat(client, tools=TOOLS).choices[0]
        assert streamed(chat(client, tools=TOOLS, stream=True)) == ("I go.", [("stop", "{}")], "tool_calls")
        ignored = chat(client, tools=TOOLS, tool_choice="none", max_tokens=12).choices[0]
        assert (ignored.message.content, ignored.finish_reason) == (answer[:12], "length")
    (call,) = found.message.tool_calls
    check_call(call)
    assert (found.message.content, found.finish_reason) == ("I go.", "tool_calls")
    history = [*USER, found.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    sent = [each if isinstance(each, dict) else each.model_dump() for each in history]
    ids = tokens(client, messages=sent, tools=TOOLS)
    assert chat(client, history, tools=TOOLS, max_tokens=1).usage.prompt_tokens == len(ids)
    calls = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    text = f"weather;stop;user:How is the weather?|assistant:I go.{calls}|tool:done|assistant:"
    assert post(client, "/detokenize", tokens=ids)["prompt"] == text


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "stop", "arguments": {}}]'),
        sweep("llama3_json", '<|python_tag|>{"name": "stop", "parameters": {}}'),
    ],
)
def test_calls_with_special_tokens(server, client, monkeypatch, name, answer):
    scripted(monkeypatch, answer)
    monkeypatch.setattr("attnmesh.serving.app.detect_parser", lambda template: name)
    found = chat(client, tools=TOOLS).choices[0]
    assert [call.function.name for call in found.message.tool_calls] == ["stop"]
    assert streamed(chat(client, tools=TOOLS, stream=True)) == ("", [("stop", "{}")], "tool_calls")


# JSON.


class Trip(pydantic.BaseModel):
    """What the answers should be."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: str = pydantic.Field(pattern="^[A-Z][a-z]{2,5}$")
    days: list[bool] = pydantic.Field(min_length=1, max_length=3)


def test_answers_match_a_schema_on_any_number_of_ranks(client, model):
    how = {"temperature": 0, "max_tokens": 99, **COMPACT}
    found = client.chat.completions.parse(model=NAME, messages=USER, response_format=Trip, **how)
    assert isinstance(found.choices[0].message.parsed, Trip)
    assert found.choices[0].finish_reason == "stop"
    schema = Trip.model_json_schema()
    text = found.choices[0].message.content
    again = chat(client, max_tokens=99, extra_body={"structured_outputs": {"json": schema}})
    assert again.choices[0].message.content == text
    loaded, tokenizer = load_model(model)

    def rank(comm):
        generator = Generator(loaded, tokenizer, comm, cache_tokens=1024)
        prompt, grammar = "user:How is the weather?|assistant:", grammar_of("json", schema)
        bias = LogitBias.of(COMPACT["logit_bias"])
        request = generator.submit(prompt, max_new_tokens=99, grammar=grammar, logits_processors=[bias])
        list(generator.stream(request))
        return request.text

    assert on_virtual_ranks(2, rank) == [text, text]


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[ab]{3}c?"}, "[ab]{3}c?"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'start: "a" ("b" | "c")'}, "a[bc]"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_answers_match_other_grammars(client, outputs, pattern):
    found = client.completions.create(model=NAME, prompt="a", extra_body={"structured_outputs": outputs}, seed=3)
    assert re.fullmatch(pattern, found.choices[0].text)
    assert found.choices[0].finish_reason == "stop"


def test_json_mode_is_an_object(client):
    found = chat(client, response_format={"type": "json_object"}, max_tokens=30)
    assert found.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be a function such as"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools must be functions with different names, got"),
        ({"tool_choice": "required"}, "tool_choice must be none, or with tools auto, required"),
        ({"tools": TOOLS[1:], "tool_choice": NAMED}, "tool_choice must be none, or with tools auto, required or"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format must be text with tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format must be {\"type\": \"text\"}, "),
        ({"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 3}}, "min_tokens must be left out"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}}, "ignore_eos must be left"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}},
            "grammar cannot be compiled: Invalid type: strin",
        ),
        ({"extra_body": {"guided_regex": "("}}, "grammar cannot be compiled: .*unclosed group"),
        ({"extra_body": {"guided_json": 3}}, "guided_json must be a JSON schema, got 3"),
        ({"extra_body": {"guided_json": {"enum": ["a" * 2**15]}}}, "JSON schema of at most 32768"),
        ({"extra_body": {"guided_grammar": "start: /a/\n" * 300}}, "must be a text of at most 256 lines"),
        ({"extra_body": {"guided_regex": "a", "structured_outputs": {"choice": ["b"]}}}, "at most one of"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs must be variables"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message must be false unless the last"),
        ({"extra_body": {"priority": 0.5}}, "priority must be an integer from"),
        ({"extra_body": {"cache_salt": "s"}}, "cache_salt is not supported, got 's': it must be left out"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused(client, how, message):
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client, max_tokens=8, **how)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, r"messages\[0\].tool_calls\[0\] must be a call such as"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"tool_calls\[0\].function.arguments must be an object as JSON, got '{'",
        ),
        (
            {"role": "user", "content": "a", "tool_call_id": "1"},
            r"messages\[0\].tool_call_id is not supported, got '1'",
        ),
        ({"role": "tool", "content": "a", "tool_call_id": 1}, r"messages\[0\].tool_call_id must be a text, got 1"),
        ({"role": "tool"}, r"messages\[0\].content must be text, or a list of parts of type text, got nothing"),
    ],
)
def test_messages_are_checked(message, error):
    with pytest.raises(ApiError, match=error):
        parse_chat({"messages": [message]})


# Other parameters and endpoints.


def post(client, path, **body):
    return client.post(f"{client.base_url}".removesuffix("/v1/") + path, body=body, cast_to=object)


def tokens(client, **body):
    return post(client, "/tokenize", **body)["tokens"]


def test_tokens_of_texts_and_conversations(client, server):
    found = post(client, "/tokenize", prompt="ab", return_token_strs=True)
    assert found == {"count": 2, "max_model_len": 1024, "tokens": [67, 68], "token_strs": ["a", "b"]} | {
        "tokens": byte_tokenizer()("ab")["input_ids"]
    }
    text = post(client, "/detokenize", tokens=tokens(client, messages=USER, chat_template_kwargs={"note": "!"}))
    assert text == {"prompt": "user:How is the weather?|!assistant:"}
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    assert tokens(client, messages=begun, continue_final_message=True) == tokens(
        client, prompt="user:How is the weather?|assistant:It is"
    )
    with pytest.raises(openai.BadRequestError, match="tokens must be token ids below 264, got 264"):
        post(client, "/detokenize", tokens=[264])


def test_endpoints_beside_these(client, server):
    get = lambda path: client.get(server.url + path, cast_to=object)  # noqa: E731
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", get("/version")["version"])
    paths = get("/openapi.json")["paths"]
    assert "tool_choice" in json.dumps(paths["/v1/chat/completions"])
    page = client.get(server.url + "/docs", cast_to=str)
    assert all(path in page for path in paths)
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not served: tiny is a language model"):
        client.embeddings.create(model=NAME, input="a")
    assert next(iter(client.models.list())).created > 1.7e9
    unnamed = post(client, "/v1/completions", prompt="a", max_tokens=1)  # there is one model
    assert unnamed["model"] == NAME


def test_every_parameter_is_described(monkeypatch):
    parsers = {
        "/v1/completions": (parse_completion, {"prompt": "a"}),
        "/v1/chat/completions": (parse_chat, {"messages": USER}),
        "/tokenize": (parse_tokenize, {"prompt": "a"}),
        "/detokenize": (parse_detokenize, {"tokens": []}),
        "/v1/responses": (parse_responses, {"input": "a"}),
    }
    taken, take = set(), Fields.take
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    monkeypatch.setattr(Fields, "take", lambda self, name, default=None: taken.add(name) or take(self, name, default))
    for path, (parse, body) in parsers.items():
        taken.clear()
        parse(body)
        parse({"messages": USER} if path == "/tokenize" else body)
        described = set(ENDPOINTS[path][2])
        assert described <= taken
        assert [name for name in described if f"`{name}`" not in page] == []
        if path != "/v1/responses":  # which takes those of a chat under other names
            assert taken - {*_IGNORED, *_REFUSED} <= described


def test_echo_repeats_the_prompt(client):
    how = {"model": NAME, "prompt": ["ab", "c"], "temperature": 0, "max_tokens": 3, "n": 2}
    plain, found = (client.completions.create(echo=echo, **how) for echo in (False, True))
    prompts = ["ab", "ab", "c", "c"]
    wanted = [prompt + choice.text for prompt, choice in zip(prompts, plain.choices, strict=True)]
    assert [choice.text for choice in found.choices] == wanted
    texts = ["", "", "", ""]
    for chunk in client.completions.create(echo=True, stream=True, **how):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted


def test_log_probabilities_of_prompts(client):
    how = {"model": NAME, "prompt": "abc", "temperature": 0, "max_tokens": 2, "n": 2}
    found = client.completions.create(echo=True, logprobs=2, **how).choices
    plain = client.completions.create(logprobs=2, **how).choices[0]
    of_prompt = client.completions.create(extra_body={"prompt_logprobs": 1}, **how).choices[1].prompt_logprobs
    assert found[0].logprobs.tokens[:3] == ["a", "b", "c"]
    assert found[0].logprobs.token_logprobs[0] is None
    assert found[0].logprobs.text_offset == list(range(3 + len(plain.logprobs.tokens)))
    assert found[1].logprobs.tokens == found[0].logprobs.tokens
    assert found[1].logprobs.token_logprobs[:3] == found[0].logprobs.token_logprobs[:3]  # computed once
    assert found[0].logprobs.token_logprobs[3:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-5)
    ids = byte_tokenizer()("abc")["input_ids"]
    for at, token in ((1, "b"), (2, "c")):
        own = of_prompt[at][str(ids[at])]
        assert (own["decoded_token"], own["logprob"]) == (token, pytest.approx(found[0].logprobs.token_logprobs[at]))
        assert own["rank"] == 1 or len(of_prompt[at]) == 2
    in_chat = chat(client, max_tokens=1, extra_body={"prompt_logprobs": 0}).model_dump()["prompt_logprobs"]
    assert len(in_chat) == len(tokens(client, messages=USER))
    with pytest.raises(openai.BadRequestError, match="stream must be false with prompt_logprobs"):
        client.completions.create(echo=True, logprobs=2, stream=True, **how)


def test_an_answer_that_ignores_its_end(client, monkeypatch):
    bias = {"logit_bias": {"1": 100}, "max_tokens": 5}  # the eos token
    assert chat(client, **bias).usage.completion_tokens == 1
    ignored = chat(client, **bias, extra_body={"ignore_eos": True})
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (5, "length")
    shown = chat(client, **bias, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert shown.choices[0].message.content == "</s>" * 5


def test_responses_are_those_of_chats(client):
    wanted = chat(client, [{"role": "system", "content": "Be."}, *USER], max_tokens=12)
    how = {"model": NAME, "instructions": "Be.", "input": USER[0]["content"], "temperature": 0, "max_output_tokens": 12}
    how["extra_body"] = COMPACT
    found = client.responses.create(**how)
    assert found.output_text == wanted.choices[0].message.content
    assert (found.usage.input_tokens, found.usage.output_tokens) == (wanted.usage.prompt_tokens, 12)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(stream=True, **how))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == found.output_text
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.output_text == found.output_text


def test_responses_with_schemas_and_calls(client):
    how = {
        "model": NAME,
        "input": "How is the weather?",
        "temperature": 0,
        "max_output_tokens": 99,
        "extra_body": COMPACT,
    }
    assert isinstance(client.responses.parse(text_format=Trip, **how).output_parsed, Trip)
    tools = [{"type": "function", **each["function"]} for each in TOOLS]
    how |= {"tools": tools, "tool_choice": {"type": "function", "name": "weather"}}
    (call,) = client.responses.create(**how).output
    assert (call.type, call.name, set(json.loads(call.arguments))) == ("function_call", "weather", {"city", "day"})
    with client.responses.stream(**how) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[0].arguments == call.arguments
    assert "response.function_call_arguments.done" in kinds
    how["input"] = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
    ]
    assert client.responses.create(**how).output[0].name == "weather"
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported, got 'a'"):
        client.responses.create(previous_response_id="a", **how)


@pytest.mark.sweep
def test_fifty_clients_get_the_answers_of_single_calls(model, tmp_path):
    how = {"sharding": DecodeSharding(cp=2), "cache_tokens": 1024, "max_body": 2**20, "max_queue": 64}
    with virtual_server(model, tmp_path, **how) as server:
        check_fifty_clients(server.client())


def check_fifty_clients(client):
    def answer(i):
        how = {"max_tokens": 12, "seed": i, "temperature": 1}
        if i % 3 == 1:
            how["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "t", "schema": Trip.model_json_schema()},
            }
        if i % 3 == 2:
            how |= {"tools": TOOLS, "tool_choice": "required"}
        message = chat(client, [{"role": "user", "content": f"Hello {i}"}], **how).choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        return message.content, calls

    single = [answer(i) for i in range(50)]
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        assert list(pool.map(answer, range(50))) == single
    assert len({str(each) for each in single}) > 25


def serve_on_process(comm, how):
    serve(comm, settings=how)


@pytest.mark.sweep
def test_ranks_that_prefill_and_ranks_that_decode(model, tmp_path, client):
    """Grammars move with their requests; the log-probabilities of a prompt are known where it is computed."""
    changes = {"prefill_ranks": 1, "sharding": DecodeSharding(), "cache_tokens": 1024, "max_body": 2**20}
    how = settings(model, tmp_path, **changes)
    other = Server(tmp_path, how, lambda: run_processes(2, serve_on_process, how, timeout=200))
    try:
        asked = {"max_tokens": 99, "extra_body": {"guided_regex": "([a-c]{3} ){4}x", "prompt_logprobs": 1}}
        found, wanted = (chat(each, **asked) for each in (other.client(), client))
        assert found.choices[0].message.content == wanted.choices[0].message.content
        scores = [[None if x is None else sorted(x) for x in each.prompt_logprobs] for each in (found, wanted)]
        assert scores[0] == scores[1]
    finally:
        other.stop()
    assert other.error is None


THINKS = "{% if 0 %}<think></think>{% endif %}" + TOOL_TEMPLATE.replace("assistant:{%", "assistant:{{ begin }}{%")


def test_answers_have_their_thoughts_apart(tmp_path):
    """The bytes of an answer are forced: it thinks, then answers; or its prompt has begun the thought."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKS
    write_byte_model(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with virtual_server(tmp_path / "model", tmp_path, ranks=1, cache_tokens=1024) as server:
        client = server.client()
        for written, begin, wanted in (
            ("<think>\nab\n</think>\n\nc d", "", ("ab", "c d")),
            ("ab</think>c", "<think>\n", ("ab", "c")),
            ("abc", "<think>\n</think>", (None, "abc")),
        ):
            how = {"extra_body": {"chat_template_kwargs": {"begin": begin}}, "max_tokens": len(written)}
            with forced(written):
                message = chat(client, logit_bias={}, **how).choices[0].message
                assert (getattr(message, "reasoning_content", None), message.content) == wanted
                chunks = [each.choices[0].delta for each in chat(client, logit_bias={}, stream=True, **how)]
                assert "".join(each.content or "" for each in chunks) == wanted[1]
                thought = "".join(getattr(each, "reasoning_content", None) or "" for each in chunks)
                assert thought == (wanted[0] or "")
                asked = {"model": NAME, "input": "a", "temperature": 0, "max_output_tokens": len(written), **how}
                del asked["max_tokens"]
                found = client.responses.create(**asked)
                assert found.output_text == wanted[1]
                assert [each.type for each in found.output] == ["reasoning"] * bool(wanted[0]) + ["message"]
                events = list(client.responses.create(stream=True, **asked))
                own = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
                assert "".join(own) == (wanted[0] or "")
        with forced('{"a":1}'):  # a grammar leaves no room for thoughts
            found = chat(
                client,
                logit_bias={},
                extra_body={"guided_json_object": True, "chat_template_kwargs": {"begin": "<think>"}},
            )
            assert found.choices[0].message.content == '{"a":1}'


@contextmanager
def forced(text):
    """Let greedy answers be this text."""
    ids = byte_tokenizer()(text)["input_ids"]

    def processed(request, logits):
        at = len(request.tokens)
        return (
            logits if at >= len(ids) else logits + 1e4 * torch.nn.functional.one_hot(torch.tensor(ids[at]), len(logits))
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Request, "_processed", processed)
        patched.setattr(Submission, "submit", _with_a_processor)
        yield


_submit = Submission.submit


def _with_a_processor(submission, generator):
    return _submit(replace(submission, logit_bias={0: 0.0}), generator)


def test_langchain(client, server):
    chat_models = pytest.importorskip("langchain_openai")
    model = chat_models.ChatOpenAI(
        model=NAME, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=200
    )
    wanted = chat(client, max_tokens=200).choices[0].message.content
    assert model.invoke("How is the weather?").content == wanted
    assert "".join(chunk.content for chunk in model.stream("How is the weather?")) == wanted
    bound = model.bind_tools(TOOLS, tool_choice="weather")
    (call,) = bound.invoke("How is the weather?").tool_calls
    assert (call["name"], set(call["args"])) == ("weather", {"city", "day"})
    assert isinstance(model.with_structured_output(Trip, method="json_schema").invoke("Where?"), Trip)


@pytest.mark.sweep
def test_llamaindex(client, server):
    llms = pytest.importorskip("llama_index.llms.openai_like")  # which requires openai 2
    core = pytest.importorskip("llama_index.core.llms")
    model = llms.OpenAILike(
        model=NAME, api_base=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=200, context_window=1024,
        is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip
    wanted = chat(client, max_tokens=200, logit_bias={}).choices[0].message.content
    message = core.ChatMessage(role="user", content="How is the weather?")
    assert model.chat([message]).message.content == wanted
    assert "".join(chunk.delta for chunk in model.stream_chat([message])) == wanted
    called = model.chat([message], tools=TOOLS, tool_choice="required")
    (call, *_) = model.get_tool_calls_from_response(called)
    assert call.tool_name in ("weather", "stop")
