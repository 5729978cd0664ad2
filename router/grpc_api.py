"""The public gRPC API: `proto/v1/inference.proto` over the same `Generator` that serves HTTP.

    Generate   validate and tokenize -> `Accepted` -> deltas -> choice ends -> `Finished`; or a status with details
    the other calls answer at once; each of them, too, ends with a status with details when it fails
    a client that cancels or goes away closes the stream, which cancels the request in every phase

A call's deadline and `timeout_s` both bound the request; the nearer one counts.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast

import grpc
import structlog

from twostroke.cluster.config import DEFAULT_TENANT, RouterSection
from twostroke.cluster.core.errors import InternalError, InvalidRequest, TwostrokeError
from twostroke.cluster.core.ids import RequestId, new_request_id
from twostroke.cluster.telemetry.logs import log_request
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.cluster.wire.status import abort_with
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.proto.v1 import inference_pb2_grpc
from twostroke.router.calling import constrain, is_continuable, taken_apart
from twostroke.router.continuation import ContinuationTokens
from twostroke.router.encode import Encoder
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.grpc_answer import Telling
from twostroke.router.grpc_ask import MESSAGES_FIELD, own_name, own_names, read_generate, read_input
from twostroke.router.prepare import prepare, read_tenant, serving
from twostroke.router.reduced import reduction
from twostroke.router.request import GenerateRequest, Generator, RequestStream, ServedModel, WorkerLoad
from twostroke.router.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

ENDPOINT = "grpc:Generate"
"""What a refused request's log line names."""


class _Prepared(NamedTuple):
    request: GenerateRequest
    telling: Telling
    reduce: Callable[[RequestStream], RequestStream] | None


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Mount with `inference_pb2_grpc.add_InferenceServicer_to_server`."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        config: RouterSection,
        metrics: RouterMetrics,
        gate: GrammarGate | None = None,
        continuations: ContinuationTokens | None = None,
    ) -> None:
        """`continuations` as for `gateway.app.create_app`."""
        self._generator = generator
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, generator)
        self._config = config
        self._metrics = metrics
        self._gate = gate
        self._continuations = continuations or ContinuationTokens.of(config.budget)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        try:
            prepared, stream = await self._submit(request, context)
            try:
                yield pb.GenerateResponse(accepted=pb.Accepted(request_id=prepared.request.request_id))
                async with aclosing(aiter(stream)) as items:
                    async for item in items:
                        for message in prepared.telling.messages(item):
                            yield message
            finally:
                # Also for a client that left before the first item: closing an iterator that never ran does nothing.
                await stream.cancel()
        except TwostrokeError as error:
            await abort_with(context, error)
        except Exception as error:
            log.exception("generate_failed")
            self._metrics.refusals.of(InternalError.code).inc()
            await abort_with(context, InternalError(f"an unexpected {type(error).__name__}"))

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        async with self._answering(context):
            if not request.request_id:
                raise InvalidRequest("request_id is empty", "request_id")
            return pb.CancelResponse(cancelled=self._generator.cancel(RequestId(request.request_id)))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.ModelInfo:
        async with self._answering(context):
            return self._model_info(serving(None, self._generator))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._answering(context):
            model = serving(request.model or None, self._generator)
            prompt = read_input(request, self._config.limits)
            [encoded] = (await self._encoder.inputs(prompt, model, MESSAGES_FIELD)).prompts
            return pb.TokenizeResponse(token_ids=encoded.tokens, max_context=model.max_context)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with self._answering(context):
            serving(request.model or None, self._generator)
            most = self._config.limits.max_prompt_tokens
            return pb.DetokenizeResponse(text=await self._encoder.decode(request.token_ids, most, "token_ids"))

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.Loads:
        async with self._answering(context):
            return pb.Loads(workers=[_load(worker) for worker in self._generator.loads()])

    @asynccontextmanager
    async def _answering(self, context: Context) -> AsyncIterator[None]:
        """What is raised inside ends the call with its status and details; it is counted here."""
        try:
            yield
        except TwostrokeError as error:
            self._metrics.refusals.of(error.code).inc()
            await abort_with(context, error)
        except Exception as error:
            log.exception("call_failed")
            self._metrics.refusals.of(InternalError.code).inc()
            await abort_with(context, InternalError(f"an unexpected {type(error).__name__}"))

    def _model_info(self, model: ServedModel) -> pb.ModelInfo:
        return pb.ModelInfo(
            model=model.name,
            max_context=model.max_context,
            vocab_size=self._tokenizer.vocab_size,
            page_size=model.page_size,
            num_prefill_workers=model.num_prefill_workers,
            num_decode_workers=model.num_decode_workers,
            ready=self._generator.ready,
        )

    async def _submit(self, request: pb.GenerateRequest, context: Context) -> tuple[_Prepared, RequestStream]:
        """What is refused is counted and logged as over HTTP, and raised."""
        try:
            prepared = await self._prepare(request, context.time_remaining(), self._tenant(context))
        except TwostrokeError as error:
            self._metrics.refusals.of(error.code).inc()
            log_request(log, request_id=new_request_id(), outcome=error.code, endpoint=ENDPOINT)
            raise
        try:
            stream = self._generator.submit(prepared.request)
        except TwostrokeError as error:  # the dispatcher counts it; what it did not accept, it does not log
            own, client = prepared.request.request_id, prepared.request.client_request_id
            log_request(log, request_id=own, outcome=error.code, endpoint=ENDPOINT, client_request_id=client)
            raise
        return prepared, stream if prepared.reduce is None else prepared.reduce(stream)

    def _tenant(self, context: Context) -> str:
        key = self._config.budget.tenant_header
        if not key:
            return DEFAULT_TENANT
        # The stubs take Metadata for a sequence; it iterates over (key, value).
        metadata = cast(Iterable[tuple[str, str | bytes]], context.invocation_metadata() or ())
        values = [value for name, value in metadata if name == key]
        texts = [value.decode("latin-1") if isinstance(value, bytes) else value for value in values]
        return read_tenant(texts, self._config.budget)

    async def _prepare(self, request: pb.GenerateRequest, remaining_s: float | None, tenant: str) -> _Prepared:
        ask = read_generate(request, remaining_s, self._config.limits)
        model = serving(ask.model, self._generator)
        opened = None if ask.continuation is None else self._continuations.open(ask.continuation, model.max_context)
        inputs = await self._encoder.inputs(ask.prompt, model, ask.prompt_field)
        with own_names():
            params = await constrain(ask, inputs.style, self._gate, self._config.limits)
        request_id, [prompt] = new_request_id(), inputs.prompts
        apart = taken_apart(ask, inputs, request_id)
        prepared = prepare(
            prompt.tokens,
            replace(params, grammar_field=own_name(params.grammar_field)),
            model_name=ask.model,
            generator=self._generator,
            tokenizer=self._tokenizer,
            config=self._config,
            prompt_field=prompt.field,
            request_id=request_id,
            client_request_id=request.request_id,
            salt=ask.salt,
            tenant=tenant,
            template=inputs.template,
            continuable=is_continuable(ask, apart),
            continuation=opened,
        )
        spell, seal = self._tokenizer.spell, self._continuations.seal
        telling = Telling(prepared.prompt, spell, seal, apart, with_logprobs=ask.top is not None)
        return _Prepared(prepared, telling, reduction(ask))


def _load(worker: WorkerLoad) -> pb.WorkerLoad:
    load = pb.WorkerLoad(
        worker_id=worker.worker_id, role=worker.role.value, pages_total=worker.num_pages, draining=worker.draining
    )
    report = worker.report
    if report is not None:
        load.known = True
        load.running = report.running
        load.waiting = report.waiting
        load.pages_free = report.ledger.free + report.ledger.cached
        load.queued_tokens = report.queued_tokens
    return load
