"""The OpenAI-compatible HTTP gateway.

    POST /v1/chat/completions, /v1/completions     GET /v1/models, /v1/models/{id}
    POST /tokenize, /detokenize                    GET /health/live, /health/ready, /metrics, /openapi.json

A request: id -> body (bounded) -> fields (strict) -> model -> tokens -> `prepare` -> `Answer`, which submits. For ids
see `gateway.edge`. With `x-twostroke-report: 1` the end of the answer says where the time went (`twostroke`).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.clock import Clock, SystemClock
from twostroke.cluster.core.errors import BodyTooLarge, InvalidRequest, TwostrokeError
from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.telemetry.logs import log_request
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.gateway.answer import Answer
from twostroke.router.gateway.body import drain, read_object
from twostroke.router.gateway.edge import Edge
from twostroke.router.gateway.encode import Encoded, Encoder
from twostroke.router.gateway.errors import HTTP_CODES, error_response, protocol_error_response
from twostroke.router.gateway.fingerprint import system_fingerprint
from twostroke.router.gateway.forms import ChatForm, CompletionForm, Envelope, Form
from twostroke.router.gateway.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsForm, Scores
from twostroke.router.gateway.openapi import OPERATIONS, describe
from twostroke.router.gateway.queries import Queries
from twostroke.router.gateway.schema import Ask, Chat, Parser, parse_chat, parse_completion
from twostroke.router.gateway.tokens import Tokens
from twostroke.router.prepare import prepare, serving
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
    queries = Queries(generator, registry)
    tokens = Tokens(generator, tokenizer, config)
    for method, path, endpoint in (
        ("POST", "/v1/chat/completions", generating.chat),
        ("POST", "/v1/completions", generating.completion),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/v1/models", queries.models),
        ("GET", "/v1/models/{model:path}", queries.model),
        ("GET", "/health/live", queries.live),
        ("GET", "/health/ready", queries.ready),
        ("GET", "/metrics", queries.metrics),
    ):
        # `Response`: else FastAPI claims a JSON body of any shape for each of them.
        operation = OPERATIONS[path]
        app.add_api_route(path, endpoint, methods=[method], response_class=Response, openapi_extra=operation)
    describe(app)

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
        self._encoder = Encoder(tokenizer)
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._unix_time = unix_time
        self._chat_form = ChatForm()
        self._completion_form = CompletionForm()

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat, self._chat_form)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, parse_completion, self._completion_form)

    async def _answer(self, request: Request, parse: Parser, form: Form) -> Response:
        body = await read_object(request.scope, request.receive, self._config)
        started_at = self._clock.now()
        ask = parse(body, self._config.limits)
        model = serving(ask.model, self._generator)
        parsed_at = self._clock.now()
        prompts, template, echoes = await self._encode(ask, model)
        tokenized_at = self._clock.now()
        self._metrics.router_overhead_seconds.of("parse").observe(parsed_at - started_at)
        self._metrics.router_overhead_seconds.of("tokenize").observe(tokenized_at - parsed_at)
        requests = self._prepare(request, ask, prompts, template)
        envelope = Envelope(
            form=form,
            request_id=request.state.client_request_id or request.state.request_id,
            model=model.name,
            created=int(self._unix_time()),
            fingerprint=system_fingerprint(model, self._config.default_max_tokens, template),
            echoes=echoes,
            choices_per_prompt=ask.params.n,
            include_usage=ask.include_usage,
            include_report=request.headers.get(REPORT_HEADER) == "1",
        )
        return Answer(
            self._generator,
            requests,
            envelope,
            self._metrics,
            streamed=ask.streamed,
            endpoint=str(request.scope["route"].path),
            scores=self._scores(ask, requests),
        )

    def _scores(self, ask: Ask, requests: Sequence[GenerateRequest]) -> Scores | None:
        """None for an answer that is text alone, as most are."""
        top, is_chat = ask.params.logprobs, isinstance(ask.prompt, Chat)
        if top is None and ask.prompt_top is None:
            return None
        spell, text_bytes = self._tokenizer.spell, self._tokenizer.text_bytes
        make_form: Callable[[], LogprobsForm] | None = None
        if top is not None:
            made = partial(ChatLogprobs, spell, top) if is_chat else partial(CompletionLogprobs, spell, top, text_bytes)
            make_form = made
        return Scores(
            spell,
            [request.prompt for request in requests],
            ask.params.n,
            make_form=make_form,
            echo=not isinstance(ask.prompt, Chat) and ask.prompt.echo,
            prompt_top=ask.prompt_top,
            prompt_in_choices=not is_chat,
        )

    async def _encode(self, ask: Ask, model: ServedModel) -> tuple[list[Encoded], str, tuple[str, ...]]:
        """The prompts, the version of the templates that made them, and what `echo` repeats."""
        if isinstance(ask.prompt, Chat):
            tokens, template = await self._encoder.chat(ask.prompt, model)
            return [Encoded("messages", tokens)], template, ()
        encoded = await self._encoder.prompts(ask.prompt.prompts, model)
        echoes = await self._encoder.echoes(ask.prompt.prompts) if ask.prompt.echo else ()
        return encoded, "", echoes

    def _prepare(self, request: Request, ask: Ask, prompts: list[Encoded], template: str) -> list[GenerateRequest]:
        own = str(request.state.request_id)
        try:
            return [
                prepare(
                    prompt.tokens,
                    ask.params,
                    model_name=ask.model,
                    generator=self._generator,
                    tokenizer=self._tokenizer,
                    config=self._config,
                    prompt_field=prompt.field,
                    request_id=RequestId(own if len(prompts) == 1 else f"{own}-{number}"),
                    client_request_id=request.state.client_request_id,
                    salt=ask.salt,
                    template=template,
                )
                for number, prompt in enumerate(prompts)
            ]
        except InvalidRequest as error:
            if error.field == "max_tokens":
                error.field = ask.max_tokens_field
            raise


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
