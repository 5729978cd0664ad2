"""One accepted request over HTTP, of one prompt or of several (`gateway.batch`), from `submit` to the last byte.

    submit       refused: its status and error
    first item   nothing is sent before it, so that an early failure still has a status
    streamed     an event for each item with text, then [DONE]; a failure is an event with the error, and the end
                 comes without a finish reason and without [DONE] (FIELD-REPORTS E30)
    whole        one JSON object at the end, or the error with its status

All the while the connection is watched: a client that goes away cancels its request in every phase (E31). A client
that takes nothing for `SEND_TIMEOUT_S` is left; long before, the dispatcher has cut it and freed its pages.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import InternalError, TwostrokeError
from twostroke.cluster.core.sampling import FinishReason
from twostroke.cluster.telemetry.logs import log_request
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.cluster.wire.status import to_http
from twostroke.router.gateway import batch
from twostroke.router.gateway.errors import error_response, json_response
from twostroke.router.gateway.forms import Envelope, Json
from twostroke.router.gateway.logprobs import Scores
from twostroke.router.gateway.sending import SendLimit
from twostroke.router.request import (
    ChoiceEnd,
    Continuation,
    Delta,
    GenerateRequest,
    Generator,
    PromptScores,
    RequestReport,
    RequestStream,
    StreamItem,
)

log = structlog.get_logger(__name__)

Seal = Callable[[Continuation], str]

SEND_TIMEOUT_S = 30.0
DONE = b"data: [DONE]\n\n"
START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


Reduce = Callable[[RequestStream], RequestStream]


def submit(
    generator: Generator,
    requests: Sequence[GenerateRequest],
    endpoint: str,
    num_shown: int = 1,
    reduce: Reduce | None = None,
) -> RequestStream:
    """`batch.submit`; a refusal is logged, since the dispatcher counts it but logs only what it accepted."""
    try:
        return batch.submit(generator, requests, num_shown, reduce)
    except TwostrokeError as error:
        log_request(
            log,
            request_id=requests[0].request_id,
            outcome=error.code,
            endpoint=endpoint,
            client_request_id=requests[0].client_request_id,
        )
        raise


class Answer(Response):
    """The response of a generating endpoint; it submits when it is called."""

    def __init__(
        self,
        generator: Generator,
        requests: Sequence[GenerateRequest],
        envelope: Envelope,
        metrics: RouterMetrics,
        *,
        streamed: bool,
        endpoint: str,
        seal: Seal,
        scores: Scores | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        """No `super().__init__`: there is no content yet, and what Response prepares is for content."""
        self.background = None
        self._generator = generator
        self._requests = requests
        self._envelope = envelope
        self._metrics = metrics
        self._streamed = streamed
        self._endpoint = endpoint
        self._seal = seal
        self._scores = scores
        self._reduce = reduce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            stream = submit(
                self._generator, self._requests, self._endpoint, self._envelope.choices_per_prompt, self._reduce
            )
        except TwostrokeError as error:
            await error_response(error)(scope, receive, send)
            return
        async with reading(stream, receive) as items:
            if self._streamed:
                await self._events(items, scope, receive, send)
            else:
                response = await self._whole(items)
                await response(scope, receive, send)

    async def _events(self, items: AsyncIterator[StreamItem], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with SendLimit(send, SEND_TIMEOUT_S) as out:
                events = _Events(self._envelope, self._metrics, out, self._seal, self._scores)
                await events.run(items, scope, receive)
        except TimeoutError:
            log.info("client_does_not_read", request_id=self._envelope.request_id)

    async def _whole(self, items: AsyncIterator[StreamItem]) -> Response:
        scores = self._scores
        texts: dict[int, list[str]] = {}
        finishes: dict[int, FinishReason] = {}
        continuations: dict[int, str] = {}
        report: RequestReport | None = None
        try:
            async for item in items:
                match item:
                    case Delta(choice, text, token_ids, logprobs):
                        texts.setdefault(choice, []).append(text)
                        if scores is not None:
                            scores.add(choice, token_ids, logprobs)
                    case PromptScores(choice, logprobs) if scores is not None:
                        scores.take_prompt(choice, logprobs)
                    case ChoiceEnd(choice, finish_reason, continuation=continuation):
                        finishes[choice] = finish_reason
                        if continuation is not None:
                            continuations[choice] = self._seal(continuation)
                    case RequestReport():
                        report = item
        except Exception as error:
            return error_response(as_told(error, self._metrics))
        if report is None:
            return error_response(InternalError("the answer ended without its report"))
        joined = {choice: "".join(parts) for choice, parts in texts.items()}
        if scores is None:
            return json_response(self._envelope.whole(joined, finishes, {}, report, continuations))
        told = {choice: scores.take(choice) for choice in finishes}
        answer = self._envelope.whole(joined, finishes, told, report, continuations)
        scores.add_prompt(answer)
        return json_response(answer)


class _Events:
    """Server-sent events of one answer."""

    def __init__(
        self, envelope: Envelope, metrics: RouterMetrics, out: SendLimit, seal: Seal, scores: Scores | None
    ) -> None:
        self._envelope = envelope
        self._metrics = metrics
        self._send = out.send
        self._seal = seal
        self._scores = scores
        self._is_plain = scores is None and envelope.form.is_plain
        self._begun: set[int] = set()
        """Choices of which something was sent."""

    async def run(self, items: AsyncIterator[StreamItem], scope: Scope, receive: Receive) -> None:
        started = False
        try:
            async for item in items:
                if not started:
                    await self._send(START)
                    started = True
                if type(item) is Delta and self._is_plain and item.text and item.choice in self._begun:
                    await self._send_body(b"data: " + self._envelope.text_chunk(item.choice, item.text) + b"\n\n")
                elif (chunk := self._chunk(item)) is not None:
                    await self._send_body(_event(chunk))
            await self._send_body(DONE, is_last=True)
        except OSError:
            raise  # of sending
        except Exception as error:
            told = as_told(error, self._metrics)
            if started:
                await self._send_body(_event(to_http(told).body), is_last=True)
            else:
                await error_response(told)(scope, receive, self._send)

    def _chunk(self, item: StreamItem) -> Json | None:
        match item:
            case Delta(choice, text, token_ids, logprobs):
                is_first = choice not in self._begun
                if self._scores is not None:
                    self._scores.add(choice, token_ids, logprobs)
                if not text and not is_first:
                    return None
                self._begun.add(choice)
                return self._envelope.chunk(choice, text, None, self._told(choice, is_first, text), is_first=is_first)
            case ChoiceEnd(choice, finish_reason, continuation=continuation):
                is_first = choice not in self._begun
                told = self._told(choice, is_first, "end")
                sealed = "" if continuation is None else self._seal(continuation)
                return self._envelope.chunk(choice, "", finish_reason, told, is_first=is_first, continuation=sealed)
            case PromptScores(choice, logprobs):
                if self._scores is not None:
                    self._scores.take_prompt(choice, logprobs)
                return None
            case RequestReport():
                wanted = self._envelope.include_usage or self._envelope.include_report
                return self._envelope.usage_chunk(item) if wanted else None

    def _told(self, choice: int, is_first: bool, text: str) -> Json | None:
        """Log-probabilities go with text: those of tokens whose text is held back wait for it."""
        if self._scores is None or not (text or (is_first and self._envelope.echoes)):
            return None
        return self._scores.take(choice)

    async def _send_body(self, data: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _event(content: object) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def as_told(error: Exception, metrics: RouterMetrics) -> TwostrokeError:
    """What the client is told of an answer that failed; a bug on the way to it is logged and counted."""
    if isinstance(error, TwostrokeError):
        return error
    log.error("answer_failed", exc_info=error)
    metrics.refusals.of(InternalError.code).inc()
    return InternalError(f"an unexpected {type(error).__name__}")


@asynccontextmanager
async def reading(stream: RequestStream, receive: Receive) -> AsyncIterator[AsyncIterator[StreamItem]]:
    """The stream's items; the request is cancelled when the client goes away, and when the context is left early."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await stream.cancel()

    tasks = TaskOwner("answer")
    items = aiter(stream)
    try:
        await asyncio.sleep(0)  # what was submitted leaves for the workers, who have begun when we are ready for them
        tasks.spawn(watch(), "disconnect")
        yield items
    finally:
        await items.aclose()
        await tasks.close()
        await stream.cancel()
