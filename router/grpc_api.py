"""The public gRPC API: `proto/v1/inference.proto` over the same `Generator` that serves HTTP.

    Generate   validate and tokenize -> `Accepted` -> deltas -> choice ends -> `Finished`; or a status with details
    the other calls answer at once; each of them, too, ends with a status with details when it fails
    a client that cancels or goes away closes the stream, which cancels the request in every phase

A call's deadline and `timeout_s` both bound the request; the nearer one counts.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias, cast

import grpc
import structlog
from google.protobuf.json_format import MessageToDict

from twostroke.cluster.config import DEFAULT_TENANT, RouterSection
from twostroke.cluster.core.errors import InternalError, InvalidRequest, TwostrokeError
from twostroke.cluster.core.grammar import Grammar
from twostroke.cluster.core.ids import RequestId, new_request_id
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.sampling import FinishReason
from twostroke.cluster.telemetry.logs import log_request
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.cluster.wire.convert import WireError, grammar_from_wire
from twostroke.cluster.wire.status import abort_with
from twostroke.proto.v1 import common_pb2, inference_pb2_grpc
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.router.ask import Chat
from twostroke.router.chat_template import ChatOptions
from twostroke.router.content import read_chat_options, read_messages
from twostroke.router.continuation import ContinuationTokens
from twostroke.router.encode import Encoder
from twostroke.router.grammar_gate import GrammarGate, check_grammar
from twostroke.router.prepare import GenerateParams, check_params, prepare, read_tenant, serving
from twostroke.router.request import (
    ChoiceEnd,
    Delta,
    GenerateRequest,
    Generator,
    PromptScores,
    RequestReport,
    RequestStream,
    ServedModel,
    StreamItem,
    WorkerLoad,
)
from twostroke.router.tokenizer import Tokenizer

log = structlog.get_logger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

ENDPOINT = "grpc:Generate"
"""What a refused request's log line names."""
_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_REPORT_FIELDS = frozenset(field.name for field in pb.Report.DESCRIPTOR.fields)
_OPTIONAL = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "logprobs",
    "prompt_logprobs",
    "timeout_s",
)
"""Optional fields of the wire that are parameters under the same name."""


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
        self._encoder = Encoder(tokenizer)
        self._config = config
        self._metrics = metrics
        self._gate = gate
        self._continuations = continuations or ContinuationTokens.of(config.budget)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        try:
            prepared, stream = await self._submit(request, context)
            try:
                yield pb.GenerateResponse(accepted=pb.Accepted(request_id=prepared.request_id))
                async with aclosing(aiter(stream)) as items:
                    async for item in items:
                        yield self._response(item, prepared.prompt)
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
            _, token_ids, _ = await self._tokens(request, model)
            return pb.TokenizeResponse(token_ids=token_ids, max_context=model.max_context)

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

    async def _submit(self, request: pb.GenerateRequest, context: Context) -> tuple[GenerateRequest, RequestStream]:
        """What is refused is counted and logged as over HTTP, and raised."""
        try:
            prepared = await self._prepare(request, context.time_remaining(), self._tenant(context))
        except TwostrokeError as error:
            self._metrics.refusals.of(error.code).inc()
            log_request(log, request_id=new_request_id(), outcome=error.code, endpoint=ENDPOINT)
            raise
        try:
            return prepared, self._generator.submit(prepared)
        except TwostrokeError as error:  # the dispatcher counts it; what it did not accept, it does not log
            client = prepared.client_request_id
            log_request(
                log, request_id=prepared.request_id, outcome=error.code, endpoint=ENDPOINT, client_request_id=client
            )
            raise

    def _tenant(self, context: Context) -> str:
        key = self._config.budget.tenant_header
        if not key:
            return DEFAULT_TENANT
        # The stubs take Metadata for a sequence; it iterates over (key, value).
        metadata = cast(Iterable[tuple[str, str | bytes]], context.invocation_metadata() or ())
        values = [value for name, value in metadata if name == key]
        texts = [value.decode("latin-1") if isinstance(value, bytes) else value for value in values]
        return read_tenant(texts, self._config.budget)

    async def _prepare(self, request: pb.GenerateRequest, remaining_s: float | None, tenant: str) -> GenerateRequest:
        params = _params(request, remaining_s)
        check_params(params, self._config.limits)
        model = serving(request.model, self._generator)
        await check_grammar(params, self._gate)
        sealed = request.continuation
        opened = self._continuations.open(sealed, model.max_context) if sealed else None
        field, prompt, template = await self._tokens(request, model)
        return prepare(
            prompt,
            params,
            model_name=request.model,
            generator=self._generator,
            tokenizer=self._tokenizer,
            config=self._config,
            prompt_field=field,
            client_request_id=request.request_id,
            salt=request.cache_salt,
            tenant=tenant,
            template=template,
            continuable=True,
            continuation=opened,
        )

    def _response(self, item: StreamItem, prompt: Sequence[int]) -> pb.GenerateResponse:
        if isinstance(item, ChoiceEnd) and item.continuation is not None:
            response = _response(item, prompt, self._tokenizer.spell)
            response.choice_end.continuation = self._continuations.seal(item.continuation)
            return response
        return _response(item, prompt, self._tokenizer.spell)

    async def _tokens(
        self, request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel
    ) -> tuple[str, Sequence[int], str]:
        """The field of the input, its tokens, and the version of the templates of a chat."""
        match request.WhichOneof("input"):
            case "text":
                [encoded] = await self._encoder.prompts([("text", request.text)], model)
                return "text", encoded.tokens, ""
            case "chat":
                field, limits = "chat.messages", self._config.limits
                plain = [_plain(message) for message in request.chat.messages]
                chat = Chat(read_messages(plain, limits.max_messages, field), _chat_options(request.chat))
                made = await self._encoder.chat(chat, model, field)
                return field, made.tokens, made.template
            case "token_ids" if isinstance(request, pb.GenerateRequest):
                return "token_ids", list(request.token_ids.ids), ""
        raise InvalidRequest("one of text, token_ids and chat is needed", "input")


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


def _chat_options(chat: pb.ChatMessages) -> ChatOptions:
    asked = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    try:
        variables = MessageToDict(chat.chat_template_kwargs)
    except ValueError as error:  # a number that JSON has no name for
        raise InvalidRequest(f"chat_template_kwargs: {error}", "chat.chat_template_kwargs") from None
    try:
        return read_chat_options(asked, chat.continue_final_message, variables)
    except InvalidRequest as error:
        error.field = f"chat.{error.field}"
        raise


def _plain(message: pb.ChatMessage) -> dict[str, object]:
    """As JSON would have it."""
    return {"role": message.role, "content": message.content}


def _params(request: pb.GenerateRequest, remaining_s: float | None) -> GenerateParams:
    values: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    if remaining_s is not None and remaining_s < values.get("timeout_s", remaining_s + 1):
        values["timeout_s"] = max(remaining_s, 0.001)
    return GenerateParams(
        **values,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logit_bias=tuple(request.logit_bias.items()),
        priority=request.priority,
        grammar=_grammar(request),
        grammar_field="grammar",
    )


def _grammar(request: pb.GenerateRequest) -> Grammar | None:
    if not request.HasField("grammar"):
        return None
    try:
        return grammar_from_wire(request.grammar)
    except WireError as error:
        raise InvalidRequest(error.message, "grammar.kind") from None


def _response(item: StreamItem, prompt: Sequence[int], spell: Callable[[int], bytes]) -> pb.GenerateResponse:
    match item:
        case Delta(choice, text, token_ids, logprobs):
            told = [
                _logprob(token, value, spell)
                for token, value in zip(token_ids if logprobs else (), logprobs, strict=True)
            ]
            return pb.GenerateResponse(delta=pb.Delta(choice=choice, text=text, token_ids=token_ids, logprobs=told))
        case PromptScores(_, logprobs):
            told = [_logprob(token, value, spell) for token, value in zip(prompt[1:], logprobs, strict=True)]
            return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(logprobs=told))
        case ChoiceEnd(choice, finish_reason, num_output):
            return pb.GenerateResponse(
                choice_end=pb.ChoiceEnd(
                    choice=choice, finish_reason=_FINISH[finish_reason], completion_tokens=num_output
                )
            )
        case RequestReport():
            return pb.GenerateResponse(
                finished=pb.Finished(
                    prompt_tokens=item.prompt_tokens,
                    completion_tokens=item.completion_tokens,
                    cached_tokens=item.cached_tokens,
                    report=pb.Report(**{name: getattr(item, name) for name in _REPORT_FIELDS}),
                )
            )


def _logprob(token: int, told: TokenLogprob, spell: Callable[[int], bytes]) -> pb.TokenLogprob:
    def one(token_id: int, logprob: float) -> pb.Logprob:
        return pb.Logprob(token_id=token_id, logprob=logprob, token=spell(token_id))

    top = [one(other, logprob) for other, logprob in zip(told.top_ids, told.top, strict=True)]
    return pb.TokenLogprob(token=one(token, told.logprob), rank=told.rank, top=top)
