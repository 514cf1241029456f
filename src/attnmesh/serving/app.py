"""The HTTP application: routes, limits, authorization, and the answers of calls, whole or streamed."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse

from attnmesh.generation.generator import Generator
from attnmesh.generation.prompts import eos_tokens
from attnmesh.serving.answers import Answers, ClientGone, disconnected, stream, unless
from attnmesh.serving.fields import ApiError, decode_json, invalid
from attnmesh.serving.loop import Closed, QueueFull, RequestQueue, Submission
from attnmesh.serving.metrics import Metrics, Status
from attnmesh.serving.prompts import PromptTokenizer
from attnmesh.serving.protocol import (
    Call,
    docs_page,
    openapi,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from attnmesh.serving.responses import CompletionFormatter, Deltas, Formatter, Json, event, usage
from attnmesh.serving.responses_api import ResponseFormatter, parse_responses
from attnmesh.serving.tools import (
    TOOL_PARSERS,
    JsonParser,
    NamedParser,
    NoTools,
    Thinking,
    ToolParser,
    detect_parser,
    tool_parser,
)
from attnmesh.utils.validation import shown

_BODY_SECONDS = 60.0  # in which a client must have sent its body
_LARGE_BODY = 2**16  # bytes, from which on a body is parsed on another thread
_EVENT_SECONDS = 0.5  # between two events of `/events`
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser lets the page do: talk to this server only."""
_TAG_TOKENS = 32  # that the tag with which a prompt lets an answer begin has at most, and what follows it
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_log = logging.getLogger("attnmesh.serving")

T = TypeVar("T")


@dataclass(frozen=True)
class AppSettings:
    """How an app answers. Without `api_keys`, it answers only requests that address this host by one of `hosts`."""

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body: int = 16 * 2**20
    hosts: tuple[str, ...] = _LOCAL_HOSTS
    tool_parser: str | None = None  # one of TOOL_PARSERS, if there is one
    reasoning_parser: str | None = None  # "think", "none", or by the chat template


class Service:
    """The handlers of all routes. They run on the HTTP server's thread; `queue` leads to the thread that computes."""

    def __init__(self, generator: Generator, queue: RequestQueue, settings: AppSettings, status: Status) -> None:
        self._queue, self._settings = queue, settings
        config = generator.model.config
        self._vocabulary, self._eos = config.vocab_size, frozenset(eos_tokens(generator.model))
        self._context = min(
            generator.engine.cache_tokens, getattr(config, "max_position_embeddings", None) or 2**62
        )  # tokens of a prompt and its answer
        self._prompts = PromptTokenizer(generator.tokenizer, self._context)
        self._tokenizer = self._prompts.tokenizer
        self._thinks = settings.reasoning_parser == "think" or (
            settings.reasoning_parser is None and Thinking.END in self._prompts.template
        )
        self._keys = [hashlib.sha256(each.encode()).digest() for each in settings.api_keys]
        self._created = int(time.time())
        self._status = status
        self._page = resources.files("attnmesh.serving").joinpath("page.html").read_text()
        self.metrics = Metrics(generator, lambda: len(queue))

    # Routes.

    async def health(self, request: Request) -> Response:
        """Whether requests are taken."""
        is_open = self._queue.is_open
        return JSONResponse({"status": "ok" if is_open else "closed"}, 200 if is_open else 503)

    async def metrics_text(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        self._authorize(request)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """The list of models: there is one."""
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model with this name."""
        self._authorize(request)
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        call, _ = await self._parsed(request, parse_completion)
        return await self._answer(request, call, partial(self._completion_formatter, call))

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        call, _ = await self._parsed(request, parse_chat)
        return await self._answer(request, call, partial(self._completion_formatter, call))

    async def responses(self, request: Request) -> Response:
        """Answer a conversation, in the format of the Responses API."""
        call, body = await self._parsed(request, parse_responses)
        return await self._answer(request, call, partial(self._response_formatter, call, body))

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a conversation."""
        (prompts, wants_strings), _ = await self._parsed(request, parse_tokenize)
        self._check_model(prompts.model)
        self._prompts.check_length(prompts)
        (ids,) = await self._prompts.token_ids(prompts)
        strings = self._tokenizer.convert_ids_to_tokens(ids) if wants_strings else None
        found = {"count": len(ids), "max_model_len": self._context, "tokens": ids, "token_strs": strings}
        return JSONResponse(found)

    async def detokenize(self, request: Request) -> Response:
        """The text of some tokens."""
        (model, ids), _ = await self._parsed(request, parse_detokenize)
        self._check_model(model)
        if ids and max(ids) >= self._vocabulary:
            raise invalid("tokens", f"token ids below {self._vocabulary}", max(ids))
        return JSONResponse({"prompt": await self._prompts.text(ids)})

    async def embeddings(self, request: Request) -> Response:
        """There are none."""
        self._authorize(request)
        name = self._settings.model_name
        raise ApiError(404, f"{request.url.path} is not served: {name} is a language model, and has no embeddings")

    async def version(self, request: Request) -> Response:
        """The version of attnmesh."""
        return JSONResponse({"version": version("attnmesh")})

    async def openapi(self, request: Request) -> Response:
        """The description of the API, for programs."""
        return JSONResponse(openapi())

    async def docs(self, request: Request) -> Response:
        """The description of the API, for people."""
        return HTMLResponse(docs_page())

    async def page(self, request: Request) -> Response:
        """The page for people, which asks for the key itself."""
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _PAGE_POLICY, "Cache-Control": "no-cache"})

    async def events(self, request: Request) -> Response:
        """What the server does, as server-sent events, until it ends."""
        self._authorize(request)
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[str]:
        about = {"model": self._settings.model_name, "chat": bool(self._tokenizer.chat_template)}
        while self._queue.is_open:
            counts = {"in_flight": len(self._queue), **self.metrics.token_counts}
            yield event({**about, **self._status.snapshot(), **counts})
            await asyncio.sleep(_EVENT_SECONDS)

    # Before a call is queued.

    def _authorize(self, request: Request) -> None:
        if not self._settings.api_keys:
            host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
            names = (host, request.headers.get("host", ""))
            if not any(name.lower() in self._settings.hosts for name in names):  # a page of a browser, under any name
                raise ApiError(403, f"the host must be one of {', '.join(self._settings.hosts)}, got {shown(names[1])}")
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Digests have the same length, whatever was sent, and all are compared: it takes the same time.
        given = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        are_equal = [hmac.compare_digest(given, each) for each in self._keys]
        if scheme.lower() != "bearer" or not any(are_equal):
            raise ApiError(401, "Authorization must be 'Bearer' and an API key of the server", code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """The body, of a limited size."""
        self._authorize(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page of a browser can send other types to this host without asking.
            raise ApiError(415, "Content-Type must be application/json")
        most, data = self._settings.max_body, bytearray()
        announced = request.headers.get("content-length", "0")
        too_large = ApiError(413, f"the body must have at most {most} bytes", code="body_too_large")
        if not announced.isdigit() or int(announced) > most:
            raise too_large
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > most:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body must arrive within {_BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise ClientGone from None
        return bytes(data)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._settings.model_name):
            message = f"the model must be {shown(self._settings.model_name)}, got {shown(name)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _model(self) -> Json:
        return {
            "id": self._settings.model_name, "object": "model", "created": self._created, "owned_by": "attnmesh",
            "max_model_len": self._context,
        }  # fmt: skip

    def _check_samples(self, call: Call) -> None:
        """Refuse a call that the queue has no room for, before it is tokenized."""
        samples, most = call.n * (1 if call.is_chat else len(call.prompts)), self._queue.most
        if samples > most:
            raise ApiError(400, f"{samples} samples (prompts times n) are too many: the queue takes {most}", param="n")
        self._queue.check_room(samples)

    def _submissions(self, call: Call, prompts: list[list[int]]) -> list[Submission]:
        if any(token >= self._vocabulary for token in (*call.logit_bias, *(call.stop_token_ids or ()))):
            raise ApiError(400, f"logit_bias and stop_token_ids must have token ids below {self._vocabulary}")
        stop = None
        if call.stop_token_ids is not None or call.ignore_eos:
            stop = sorted({*(() if call.ignore_eos else self._eos), *(call.stop_token_ids or ())})
        if stop is not None and len(stop) >= self._vocabulary and call.min_tokens:
            raise ApiError(400, "min_tokens must be 0 if every token is one of stop_token_ids", param="min_tokens")
        submissions = []
        for ids in prompts:
            left = self._context - len(ids)
            most = left if call.max_tokens is None else call.max_tokens
            if not 1 <= most <= left:
                too_long = (
                    f"a prompt of {len(ids)} tokens and an answer of {max(1, most)} exceed {self._context} tokens"
                )
                param = "messages" if call.is_chat else "prompt"
                raise ApiError(400, too_long, param=param, code="context_length_exceeded")
            if call.min_tokens > most:
                raise ApiError(400, f"min_tokens must be at most {most}, got {call.min_tokens}", param="min_tokens")
            first = Submission(
                0, ids, most, call.sampling, stop, list(call.stop_strings), call.min_tokens, call.logprobs,
                logit_bias=call.logit_bias, grammar=call.grammar, priority=call.priority,
                skip_special_tokens=call.skip_special_tokens and call.tool_choice.mode != "auto",
                prompt_logprobs=call.scored,
            )  # fmt: skip
            submissions.append(first)
            submissions += [replace(first, sample=i, prompt_logprobs=None) for i in range(1, call.n)]
        return submissions

    # Answers.

    async def _parsed(self, request: Request, parse: Callable[[dict[str, Any]], T]) -> tuple[T, dict[str, Any]]:
        """What a body says, and the body."""
        body = await self._body(request)
        if len(body) < _LARGE_BODY:
            return _parse(parse, body)
        found: tuple[T, dict[str, Any]] = await run_in_threadpool(_parse_large, parse, body)
        return found

    def _tool_parser(self, call: Call) -> Callable[[], ToolParser] | None:
        """What finds the tool calls of an answer; None if it has none."""
        choice, name = call.tool_choice, self._settings.tool_parser
        if call.chat is None or not call.chat.tools:
            return None
        template = self._prompts.template
        if "tools" not in template:
            message = f"tools must be left out: the chat template of {self._settings.model_name} has no tools"
            raise ApiError(400, message, param="tools")
        if choice.mode == "none":
            return None
        if choice.name is not None:
            return partial(NamedParser, choice.name)
        if choice.mode == "required":
            return JsonParser
        name = name or detect_parser(template)
        if name is None:
            message = (
                "tool_choice must be none, required or a function, got 'auto': the format of tool calls in the chat "
                f"template is not known, and --tool-call-parser ({', '.join(TOOL_PARSERS)}) was not given"
            )
            raise ApiError(400, message, param="tool_choice")
        return partial(tool_parser, name, call.chat.tools)

    def _deltas(self, call: Call, prompts: list[list[int]]) -> Callable[[], Deltas] | None:
        """What divides an answer into its parts; None for text only. Grammars leave no room for thoughts."""
        make, has_begun, parallel = self._tool_parser(call), False, call.tool_choice.parallel
        thinks = self._thinks and call.chat is not None and call.grammar is None
        if thinks:
            has_begun = self._tokenizer.decode(prompts[0][-_TAG_TOKENS:]).rstrip().endswith(Thinking.BEGIN)
        if make is None and not thinks:
            return None
        return lambda: Deltas(
            NoTools() if make is None else make(), Thinking(has_begun=has_begun) if thinks else None, parallel=parallel
        )

    def _completion_formatter(self, call: Call, prompts: list[list[int]]) -> Formatter:
        return CompletionFormatter(
            self._tokenizer, call, self._settings.model_name, eos=self._eos, deltas=self._deltas(call, prompts),
            prompts=prompts,
        )  # fmt: skip

    def _response_formatter(self, call: Call, body: dict[str, Any], prompts: list[list[int]]) -> Formatter:
        make = self._deltas(call, prompts)
        deltas = Deltas(NoTools(), None, parallel=True) if make is None else make()
        return ResponseFormatter(call, self._settings.model_name, body, deltas)

    async def _answer(
        self, request: Request, call: Call, formatter_of: Callable[[list[list[int]]], Formatter]
    ) -> Response:
        self._check_model(call.model)
        self._check_samples(call)
        self._prompts.check_length(call)
        gone = asyncio.create_task(disconnected(request))
        try:
            prompts = await unless(gone, self._prompts.token_ids(call))
            formatter = formatter_of(prompts)
            answers = Answers(self._queue, self.metrics, self._submissions(call, prompts), gone)
        except BaseException:
            gone.cancel()
            raise
        prompt_tokens = sum(map(len, prompts))

        def used() -> Json:
            first = answers.choices[:: len(answers.choices) // len(prompts)]  # of each prompt: the others reuse its own
            return usage(prompt_tokens, sum(each.cached_tokens for each in first), answers.new_tokens)

        try:
            await answers.accepted()
            self.metrics.prompt_tokens.inc(prompt_tokens)
            if call.stream:
                parts = stream(answers, formatter, used)
                return StreamingResponse(parts, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
            async for _ in answers.tokens():
                pass
        except BaseException:
            answers.close()
            raise
        answers.close()
        return JSONResponse(formatter.whole(answers.choices, used()))


def _parse(parse: Callable[[dict[str, Any]], T], data: bytes) -> tuple[T, dict[str, Any]]:
    body = decode_json(data)
    return parse(body), body


def _parse_large(parse: Callable[[dict[str, Any]], T], data: bytes) -> tuple[T, dict[str, Any]]:
    """Parse a body without collecting garbage: to look for it among millions of lists takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(parse, data)
    finally:
        if was_enabled:
            gc.enable()


def _error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """In ASCII, so that any text can be answered."""
    return Response(json.dumps(error.body), error.status, headers, "application/json")


def create_app(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="attnmesh", docs_url=None, redoc_url=None, openapi_url=None)
    routes = {
        ("GET", "/"): service.page,
        ("GET", "/events"): service.events,
        ("GET", "/health"): service.health,
        ("GET", "/metrics"): service.metrics_text,
        ("GET", "/v1/models"): service.models,
        ("GET", "/v1/models/{name:path}"): service.model,
        ("POST", "/v1/completions"): service.completions,
        ("POST", "/v1/chat/completions"): service.chat,
        ("POST", "/v1/responses"): service.responses,
        ("POST", "/v1/embeddings"): service.embeddings,
        ("POST", "/tokenize"): service.tokenize,
        ("POST", "/detokenize"): service.detokenize,
        ("GET", "/version"): service.version,
        ("GET", "/openapi.json"): service.openapi,
        ("GET", "/docs"): service.docs,
    }
    for (method, path), handler in routes.items():
        app.add_api_route(path, _counted(service.metrics, path, handler), methods=[method], response_model=None)

    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {shown(request.url.path)} is not served: /docs has what is"
        return _error_response(ApiError(error.status_code, message), error.headers)

    app.add_exception_handler(HTTPException, unknown)
    return app


def _counted(metrics: Metrics, path: str, handler: Any) -> Any:
    """A handler whose errors are answered in OpenAI's format, and whose answers are counted."""

    async def counted(request: Request) -> Response:
        try:
            response: Response = await handler(request)
        except ApiError as error:
            response = _error_response(error)
        except QueueFull as error:
            response = _error_response(ApiError(429, str(error), code="queue_full"), {"Retry-After": "1"})
        except Closed as error:
            response = _error_response(ApiError(503, str(error)))
        except ClientGone:
            response = Response(status_code=499)  # nobody reads it
        except Exception:
            _log.exception("%s: an error that was not expected", path)
            response = _error_response(ApiError(500, "an error that was not expected: see the server's log"))
        metrics.calls.labels(path, str(response.status_code)).inc()
        return response

    return counted
