"""The HTTP gateway, compatible with OpenAI's API and Anthropic's.

    POST /v1/chat/completions, /v1/completions     GET /v1/models, /v1/models/{id}
    POST /v1/responses, /v1/responses/input_tokens
    POST /v1/messages, /v1/messages/count_tokens (Anthropic's)
    POST /tokenize, /detokenize                    GET /health/live, /health/ready, /metrics, /openapi.json

A request: id -> body (bounded) -> fields (strict) -> model -> tokens -> `prepare` -> `Answer`, which submits. For ids
see `gateway.edge`. With `x-twostroke-report: 1` the end of the answer says where the time went (`twostroke`).
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import structlog
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from twostroke.cluster.config import LimitsSection, RouterSection
from twostroke.cluster.core.clock import Clock, SystemClock
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.core.records import dataclass
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.apart import call_id
from twostroke.router.ask import Ask, Chat
from twostroke.router.calling import constrain, is_continuable, message_parser, taken_apart
from twostroke.router.continuation import ContinuationTokens
from twostroke.router.encode import Encoder, Inputs
from twostroke.router.gateway.answer import Answer
from twostroke.router.gateway.anthropic import MessagesTelling
from twostroke.router.gateway.anthropic_schema import parse_count, parse_messages
from twostroke.router.gateway.body import parse_body, read_body
from twostroke.router.gateway.edge import Edge
from twostroke.router.gateway.errors import json_response
from twostroke.router.gateway.fingerprint import system_fingerprint
from twostroke.router.gateway.forms import ChatForm, CompletionForm, Envelope, Form
from twostroke.router.gateway.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsForm, Scores
from twostroke.router.gateway.openapi import Description
from twostroke.router.gateway.parsed_form import ParsedChatForm
from twostroke.router.gateway.queries import Queries
from twostroke.router.gateway.responses import ResponsesTelling
from twostroke.router.gateway.responses_schema import parse_input_tokens, parse_responses
from twostroke.router.gateway.schema import Parser, parse_chat, parse_completion
from twostroke.router.gateway.tokens import Tokens
from twostroke.router.gateway.typed_answer import Telling, TypedAnswer
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.prepare import GenerateParams, prepare, read_tenant, serving
from twostroke.router.reduced import reduction
from twostroke.router.renaming import rewritten
from twostroke.router.request import Continuation, GenerateRequest, Generator, ServedModel
from twostroke.router.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

REPORT_HEADER = (b"x-twostroke-report", b"1")
AnyAsk = TypeVar("AnyAsk", bound=Ask)


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    config: RouterSection,
    metrics: RouterMetrics,
    registry: CollectorRegistry,
    clock: Clock | None = None,
    unix_time: Callable[[], float] = time.time,
    gate: GrammarGate | None = None,
    continuations: ContinuationTokens | None = None,
) -> Edge:
    """The ASGI app. It has no life-span of its own: run it under any server, with as many connections as wanted.

    Without a `gate`, which is the caller's to close, it takes no grammar. `continuations` has the key of other faces
    and routers; without it, tokens are good here alone.
    """
    continuations = continuations or ContinuationTokens.of(config.budget)
    generating = _Generating(
        generator, tokenizer, config, metrics, clock or SystemClock(), unix_time, gate, continuations
    )
    queries = Queries(generator, registry)
    tokens = Tokens(generator, tokenizer, config)
    routes = [
        _post("/v1/chat/completions", generating.chat),
        _post("/v1/completions", generating.completion),
        _post("/v1/responses", generating.responses),
        _post("/v1/responses/input_tokens", generating.input_tokens),
        _post("/v1/messages", generating.messages),
        _post("/v1/messages/count_tokens", generating.count_tokens),
        _post("/tokenize", tokens.tokenize),
        _post("/detokenize", tokens.detokenize),
        Route("/v1/models", queries.models),
        Route("/v1/models/{model:path}", queries.model),
        Route("/health/live", queries.live),
        Route("/health/ready", queries.ready),
        Route("/metrics", queries.metrics),
    ]
    description = Description(routes)
    routes.append(Route("/openapi.json", description.answer))
    return Edge(_Routes(routes, redirect_slashes=False), metrics, description.document)


class _Routes(Router):
    """Paths without parameters are looked up, before the patterns of all are tried one after the other."""

    def __init__(self, routes: Sequence[Route], *, redirect_slashes: bool) -> None:
        super().__init__(routes, redirect_slashes)
        self._exact = {route.path: route for route in routes if not route.param_convertors}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._exact.get(scope.get("path", "")) if scope["type"] == "http" else None
        if route is None or scope.get("root_path"):
            await super().__call__(scope, receive, send)
            return
        scope.update(route=route, endpoint=route.endpoint, path_params={})
        await route.handle(scope, receive, send)


def _post(path: str, handle: Callable[[Request], Awaitable[Response]]) -> Route:
    """As Starlette makes one of a function, less its look for handlers of exceptions: `Edge` is ours."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handle(Request(scope, receive))
        await response(scope, receive, send)

    route = Route(path, handle, methods=["POST"])
    route.app = endpoint
    return route


@dataclass(frozen=True, slots=True)
class _Read(Generic[AnyAsk]):
    """A body understood and tokenized."""

    ask: AnyAsk
    model: ServedModel
    inputs: Inputs
    params: GenerateParams
    """Those of `ask`, with the grammar that its tools need."""
    opened: Continuation | None
    """Where an earlier answer to the same stopped."""


class _Generating:
    """The endpoints that take a prompt. What is wrong with a request is raised, see `_refuse`."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        config: RouterSection,
        metrics: RouterMetrics,
        clock: Clock,
        unix_time: Callable[[], float],
        gate: GrammarGate | None,
        continuations: ContinuationTokens,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, generator)
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._unix_time = unix_time
        self._gate = gate
        self._continuations = continuations
        self._chat_form = ChatForm()
        self._completion_form = CompletionForm()

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat, self._chat_form)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, parse_completion, self._completion_form)

    async def responses(self, request: Request) -> Response:
        read = await self._read(request, parse_responses)
        [prepared] = self._prepare(request, read)
        telling = ResponsesTelling(
            read.ask,
            _told_id(request),
            int(self._unix_time()),
            self._call_id(read, prepared),
            include_report=_wants_report(request),
        )
        return self._typed(request, read, prepared, telling)

    async def input_tokens(self, request: Request) -> Response:
        read = await self._read(request, parse_input_tokens)
        return json_response({"object": "response.input_tokens", "input_tokens": len(read.inputs.prompts[0].tokens)})

    async def messages(self, request: Request) -> Response:
        read = await self._read(request, parse_messages)
        [prepared] = self._prepare(request, read)
        telling = MessagesTelling(
            _told_id(request),
            read.model.name,
            len(prepared.prompt),
            self._call_id(read, prepared),
            include_report=_wants_report(request),
        )
        return self._typed(request, read, prepared, telling)

    async def count_tokens(self, request: Request) -> Response:
        read = await self._read(request, parse_count)
        return json_response({"input_tokens": len(read.inputs.prompts[0].tokens)})

    def _typed(self, request: Request, read: _Read[AnyAsk], prepared: GenerateRequest, telling: Telling) -> Response:
        return TypedAnswer(
            self._generator,
            prepared,
            telling,
            message_parser(read.ask, read.inputs),
            self._metrics,
            streamed=read.ask.streamed,
            endpoint=str(request.scope["route"].path),
            scores=self._scores(read.ask, [prepared]),
        )

    @staticmethod
    def _call_id(read: _Read[AnyAsk], prepared: GenerateRequest) -> Callable[[int], str]:
        tool_format = read.inputs.style.tool_format
        return lambda number: call_id(prepared.request_id, 0, number, tool_format)

    async def _read(
        self, request: Request, parse: Callable[[dict[str, object], LimitsSection], AnyAsk]
    ) -> _Read[AnyAsk]:
        """Everything before `_prepare`: what cannot be understood, or not here, is refused."""
        data = await read_body(request.scope, request.receive, self._config)
        started_at = self._clock.now()
        ask = await parse_body(data, lambda body: parse(body, self._config.limits), self._config)
        model = serving(ask.model, self._generator)
        opened = None if ask.continuation is None else self._continuations.open(ask.continuation, model.max_context)
        parsed_at = self._clock.now()
        inputs = await self._encoder.inputs(ask.prompt, model, ask.prompt_field)
        tokenized_at = self._clock.now()
        self._metrics.router_overhead_seconds.of("parse").observe(parsed_at - started_at)
        self._metrics.router_overhead_seconds.of("tokenize").observe(tokenized_at - parsed_at)
        with rewritten(ask.field_names):
            params = await constrain(ask, inputs.style, self._gate, self._config.limits)
        return _Read(ask, model, inputs, params, opened)

    async def _answer(self, request: Request, parse: Parser, form: Form) -> Response:
        read = await self._read(request, parse)
        ask = read.ask
        apart = taken_apart(ask, read.inputs, str(request.scope["state"]["request_id"]))
        requests = self._prepare(request, read, continuable=is_continuable(ask, apart))
        envelope = Envelope(
            form=form if apart is None else ParsedChatForm(apart),
            request_id=_told_id(request),
            model=read.model.name,
            created=int(self._unix_time()),
            fingerprint=system_fingerprint(read.model, self._config.default_max_tokens, read.inputs.template),
            echoes=read.inputs.echoes if read.opened is None else (),
            choices_per_prompt=ask.num_shown,
            include_usage=ask.include_usage,
            include_report=_wants_report(request),
        )
        return Answer(
            self._generator,
            requests,
            envelope,
            self._metrics,
            streamed=ask.streamed,
            endpoint=str(request.scope["route"].path),
            seal=self._continuations.seal,
            scores=self._scores(ask, requests),
            reduce=reduction(ask),
        )

    def _scores(self, ask: Ask, requests: Sequence[GenerateRequest]) -> Scores | None:
        """None for an answer that is text alone, as most are. A continuation tells nothing of the prompt again."""
        top, is_chat = ask.top, isinstance(ask.prompt, Chat)
        delivered = requests[0].delivered
        prompt_top = None if delivered else ask.prompt_top
        if top is None and prompt_top is None:
            return None
        spell, text_bytes = self._tokenizer.spell, self._tokenizer.text_bytes
        echo = not isinstance(ask.prompt, Chat) and ask.prompt.echo
        make_form: Callable[[], LogprobsForm] | None = None
        if top is not None:
            before = (*requests[0].prompt, *delivered) if echo and delivered else delivered
            columns = partial(CompletionLogprobs, spell, top, text_bytes, before)
            make_form = partial(ChatLogprobs, spell, top) if is_chat else columns
        return Scores(
            spell,
            [request.prompt for request in requests],
            ask.num_shown,
            make_form=make_form,
            echo=echo and not delivered,
            prompt_top=prompt_top,
            prompt_in_choices=not is_chat,
        )

    def _prepare(self, request: Request, read: _Read[AnyAsk], *, continuable: bool = False) -> list[GenerateRequest]:
        own, ask, prompts = str(request.scope["state"]["request_id"]), read.ask, read.inputs.prompts
        header = self._config.budget.tenant_header
        tenant = read_tenant(request.headers.getlist(header) if header else (), self._config.budget)
        try:
            return [
                prepare(
                    prompt.tokens,
                    read.params,
                    model_name=ask.model,
                    generator=self._generator,
                    tokenizer=self._tokenizer,
                    config=self._config,
                    prompt_field=prompt.field,
                    request_id=RequestId(own if len(prompts) == 1 else f"{own}-{number}"),
                    client_request_id=request.scope["state"]["client_request_id"],
                    salt=ask.salt,
                    tenant=tenant,
                    template=read.inputs.template,
                    whole=not ask.streamed,
                    continuable=continuable,
                    continuation=read.opened,
                )
                for number, prompt in enumerate(prompts)
            ]
        except InvalidRequest as error:
            if error.field == "max_tokens":
                error.field = ask.max_tokens_field
            raise


def _told_id(request: Request) -> str:
    """The id that the client is told: its own, if it sent one."""
    state = request.scope["state"]
    return str(state["client_request_id"] or state["request_id"])


def _wants_report(request: Request) -> bool:
    return REPORT_HEADER in request.scope["headers"]
