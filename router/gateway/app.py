"""The OpenAI-compatible HTTP gateway.

    POST /v1/chat/completions, /v1/completions     GET /v1/models, /v1/models/{id}
    GET  /health/live, /health/ready               GET /metrics, /openapi.json

A request: id -> body (bounded) -> fields (strict) -> model -> tokens -> `prepare` -> `Answer`, which submits. Each
answer has the router's id in `x-request-id`; a client's own `x-request-id` is checked, logged and sent back as
`x-client-request-id`. With `x-twostroke-report: 1` the end of the answer says where the time went (`twostroke`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

import structlog
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.clock import Clock, SystemClock
from twostroke.cluster.core.errors import BodyTooLarge, InvalidRequest, TwostrokeError, Unavailable, UnknownModel
from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.telemetry.logs import log_request
from twostroke.cluster.telemetry.metrics import RouterMetrics, exposition
from twostroke.router.chat_template import Message
from twostroke.router.gateway.answer import Answer
from twostroke.router.gateway.body import drain, read_object
from twostroke.router.gateway.edge import Edge
from twostroke.router.gateway.errors import HTTP_CODES, error_response, json_response, protocol_error_response
from twostroke.router.gateway.forms import ChatForm, CompletionForm, Envelope, Form
from twostroke.router.gateway.schema import Ask, ChatBody, CompletionBody, Parser, parse_chat, parse_completion
from twostroke.router.prepare import check_length, prepare, serving
from twostroke.router.request import GenerateRequest, Generator, ServedModel
from twostroke.router.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

REPORT_HEADER = "x-twostroke-report"


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    config: RouterSection,
    metrics: RouterMetrics,
    registry: CollectorRegistry,
    clock: Clock | None = None,
    unix_time: Callable[[], float] = time.time,
) -> FastAPI:
    """The ASGI app. It has no life-span of its own: run it under any server, with as many connections as wanted."""
    app = FastAPI(title="twostroke", docs_url=None, redoc_url=None, redirect_slashes=False)
    generating = _Generating(generator, tokenizer, config, metrics, clock or SystemClock(), unix_time)
    queries = _Queries(generator, registry)
    for path, endpoint, body in (
        ("/v1/chat/completions", generating.chat, ChatBody),
        ("/v1/completions", generating.completion, CompletionBody),
    ):
        content = {"application/json": {"schema": body.model_json_schema()}}
        app.add_api_route(
            path, endpoint, methods=["POST"], openapi_extra={"requestBody": {"required": True, "content": content}}
        )
    app.add_api_route("/v1/models", queries.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", queries.model, methods=["GET"])
    app.add_api_route("/health/live", queries.live, methods=["GET"])
    app.add_api_route("/health/ready", queries.ready, methods=["GET"])
    app.add_api_route("/metrics", queries.metrics, methods=["GET"])

    async def refuse(request: Request, error: Exception) -> Response:
        return await _refuse(request, error, metrics)

    app.add_exception_handler(TwostrokeError, refuse)
    app.add_exception_handler(HTTPException, refuse)
    app.add_middleware(Edge, metrics=metrics)
    return app


class _Generating:
    """The two endpoints that generate. What is wrong with a request is raised, see `_refuse`."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        config: RouterSection,
        metrics: RouterMetrics,
        clock: Clock,
        unix_time: Callable[[], float],
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._unix_time = unix_time
        self._chat_form = ChatForm()
        self._completion_form = CompletionForm()

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat, self._chat_form, "messages")

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, parse_completion, self._completion_form, "prompt")

    async def _answer(self, request: Request, parse: Parser, form: Form, prompt_field: str) -> Response:
        body = await read_object(request.scope, request.receive, self._config.max_body_bytes)
        started_at = self._clock.now()
        ask = parse(body)
        model = serving(ask.model, self._generator)
        parsed_at = self._clock.now()
        prompt = await self._tokens(ask.prompt, model, prompt_field)
        tokenized_at = self._clock.now()
        self._metrics.router_overhead_seconds.of("parse").observe(parsed_at - started_at)
        self._metrics.router_overhead_seconds.of("tokenize").observe(tokenized_at - parsed_at)
        prepared = self._prepare(request, ask, prompt, prompt_field)
        envelope = Envelope(
            form=form,
            request_id=prepared.request_id,
            model=prepared.model,
            created=int(self._unix_time()),
            include_usage=ask.include_usage,
            include_report=request.headers.get(REPORT_HEADER) == "1",
        )
        return Answer(
            self._generator,
            prepared,
            envelope,
            self._metrics,
            streamed=ask.streamed,
            endpoint=str(request.scope["route"].path),
        )

    async def _tokens(
        self, prompt: str | list[int] | list[Message], model: ServedModel, prompt_field: str
    ) -> Sequence[int]:
        """Tokenizing takes milliseconds for long texts, so it has a thread; the libraries let the loop run on."""
        if isinstance(prompt, str):
            check_length(len(prompt), model, self._tokenizer, prompt_field)
            return await asyncio.to_thread(self._tokenizer.encode, prompt)
        if prompt and isinstance(prompt[0], int):
            return prompt
        messages = cast(list[Message], prompt)
        length = sum(len(message["content"]) for message in messages if isinstance(message["content"], str))
        check_length(length, model, self._tokenizer, prompt_field)
        return await asyncio.to_thread(self._tokenizer.encode_chat, messages)

    def _prepare(self, request: Request, ask: Ask, prompt: Sequence[int], prompt_field: str) -> GenerateRequest:
        try:
            return prepare(
                prompt,
                ask.params,
                model_name=ask.model,
                generator=self._generator,
                tokenizer=self._tokenizer,
                config=self._config,
                prompt_field=prompt_field,
                request_id=RequestId(request.state.request_id),
                client_request_id=request.state.client_request_id,
                salt=ask.salt,
            )
        except InvalidRequest as error:
            if error.field == "max_tokens":
                error.field = ask.max_tokens_field
            raise


class _Queries:
    """Models, health, metrics."""

    def __init__(self, generator: Generator, registry: CollectorRegistry) -> None:
        self._generator = generator
        self._registry = registry

    async def models(self) -> Response:
        model = self._generator.model
        return json_response({"object": "list", "data": [] if model is None else [_model_card(model)]})

    async def model(self, request: Request) -> Response:
        wanted = str(request.path_params["model"])
        served = self._generator.model
        if served is None or served.name != wanted:
            raise UnknownModel(f"model {wanted[:128]!r} is not served here", "model")
        return json_response(_model_card(served))

    async def live(self) -> Response:
        return json_response({"status": "live"})

    async def ready(self) -> Response:
        if self._generator.ready:
            return json_response({"status": "ready", **self._counts()})
        return error_response(Unavailable(self._reason()))

    def _counts(self) -> dict[str, int]:
        model = self._generator.model
        prefill, decode = (model.num_prefill_workers, model.num_decode_workers) if model is not None else (0, 0)
        return {"prefill_workers": prefill, "decode_workers": decode}

    def _reason(self) -> str:
        model = self._generator.model
        if model is None:
            return "no worker is attached"
        if not model.num_decode_workers:
            return "no decode worker is attached"
        if not model.num_prefill_workers:
            return "no prefill worker is attached: none is there, or none has shipped a page yet"
        return "no pair of workers takes work, or the router drains"

    async def metrics(self) -> Response:
        return Response(exposition(self._registry), media_type=CONTENT_TYPE_LATEST)


def _model_card(model: ServedModel) -> dict[str, object]:
    # The API wants a time of creation, which nobody knows of a model on a disk.
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "twostroke",
        "max_model_len": model.max_context,
    }


async def _refuse(request: Request, error: Exception, metrics: RouterMetrics) -> Response:
    """The answer to what was not submitted; logged and counted for the endpoints that generate."""
    if isinstance(error, TwostrokeError):
        code, response = error.code, error_response(error)
    else:
        assert isinstance(error, HTTPException)
        code, response = HTTP_CODES.get(error.status_code, "http_error"), protocol_error_response(error)
    if request.method == "POST":
        metrics.refusals.of(code).inc()
        route = request.scope.get("route")
        log_request(
            log,
            request_id=request.state.request_id,
            outcome=code,
            endpoint=str(route.path) if route is not None else "",
            client_request_id=request.state.client_request_id,
        )
    if isinstance(error, BodyTooLarge) or code in ("request_timeout", "unsupported_media_type"):
        return _ClosingResponse(response)
    return response


class _ClosingResponse(Response):
    """An answer to a body that was not read to its end: the connection ends with it."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.body, response.status_code, {**response.headers, "connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
