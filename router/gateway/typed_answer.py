"""One accepted request over HTTP, told in events that have names: `/v1/responses` and `/v1/messages`.

    submit       refused: the endpoint's own error form
    first item   nothing is sent before it, so that an early failure still has a status
    each item    its text is taken apart into reasoning, text and calls, as far as that is certain
    streamed     the telling's events for each part; a failure is its last event (FIELD-REPORTS E30)
    whole        the telling takes the same parts; one JSON object at the end, or the error with its status

A `Telling` is one answer's own and keeps what was said; it knows of no connection. Requests of these endpoints have
one choice. Disconnects and slow clients are handled as in `router.gateway.answer`.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.cluster.core.errors import InternalError, TwostrokeError
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.answer_parts import Content, MessageParser, Part
from twostroke.router.gateway.answer import SEND_TIMEOUT_S, START, as_told, reading, submit
from twostroke.router.gateway.errors import json_response, refusal
from twostroke.router.gateway.forms import Json
from twostroke.router.gateway.logprobs import Scores
from twostroke.router.gateway.sending import SendLimit
from twostroke.router.request import ChoiceEnd, Delta, GenerateRequest, Generator, RequestReport, StreamItem

log = structlog.get_logger(__name__)

Event = tuple[str, Json]
"""Name and data."""


class Telling(Protocol):
    """Called in this order; every list of events is of what is to be sent now."""

    def begin(self) -> Sequence[Event]: ...

    def more(self, part: Part, logprobs: Sequence[object]) -> Sequence[Event]:
        """`logprobs` of the tokens of text, as a chat's `content` has them, when they were asked for."""
        ...

    def end(self, logprobs: Sequence[object], end: ChoiceEnd, report: RequestReport) -> Sequence[Event]:
        """After the last part; `logprobs` are those of tokens without text of their own."""
        ...

    def failed(self, error: TwostrokeError) -> Sequence[Event]:
        """Instead of `end`."""
        ...

    def whole(self) -> Json:
        """The answer, after `end`."""
        ...


class TypedAnswer(Response):
    """The response of an endpoint with a telling; it submits when it is called."""

    def __init__(
        self,
        generator: Generator,
        request: GenerateRequest,
        telling: Telling,
        parser: MessageParser,
        metrics: RouterMetrics,
        *,
        streamed: bool,
        endpoint: str,
        scores: Scores | None = None,
    ) -> None:
        """No `super().__init__`: there is no content yet, and what Response prepares is for content."""
        self.background = None
        self._generator = generator
        self._request = request
        self._telling = telling
        self._parser = parser
        self._metrics = metrics
        self._streamed = streamed
        self._endpoint = endpoint
        self._scores = scores
        self._logprobs: list[object] = []
        """That wait for text."""
        self._end: ChoiceEnd | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            stream = submit(self._generator, [self._request], self._endpoint)
        except TwostrokeError as error:
            await refusal(error, scope)(scope, receive, send)
            return
        async with reading(stream, receive) as items:
            if self._streamed:
                try:
                    async with SendLimit(send, SEND_TIMEOUT_S) as out:
                        await self._tell(items, scope, receive, out.send)
                except TimeoutError:
                    log.info("client_does_not_read", request_id=self._request.request_id)
            else:
                response = await self._whole(items, scope)
                await response(scope, receive, send)

    async def _whole(self, items: AsyncIterator[StreamItem], scope: Scope) -> Response:
        ended = False
        try:
            async for item in items:
                self._events(item)
                ended = ended or isinstance(item, RequestReport)
            if not ended:
                raise InternalError("the answer ended without its report")
        except Exception as error:
            return refusal(as_told(error, self._metrics), scope)
        return json_response(self._telling.whole())

    async def _tell(self, items: AsyncIterator[StreamItem], scope: Scope, receive: Receive, send: Send) -> None:
        started, ended = False, False
        try:
            async for item in items:
                if not started:
                    await send(START)
                    started = True
                    await _send_events(send, self._telling.begin())
                events = self._events(item)
                ended = isinstance(item, RequestReport)
                if events:
                    await _send_events(send, events, is_last=ended)
            if not ended:
                raise InternalError("the answer ended without its report")
        except OSError:
            raise  # of sending
        except Exception as error:
            told = as_told(error, self._metrics)
            if started:
                await _send_events(send, self._telling.failed(told), is_last=True)
            else:
                await refusal(told, scope)(scope, receive, send)

    def _events(self, item: StreamItem) -> Sequence[Event]:
        match item:
            case Delta(choice, text, token_ids, logprobs):
                if self._scores is not None:
                    self._scores.add(choice, token_ids, logprobs)
                return self._parts(choice, self._parser.push(text)) if text else ()
            case ChoiceEnd():
                self._end = item
                return self._parts(item.choice, self._parser.finish())
            case RequestReport():
                if self._end is None:
                    raise InternalError("the answer ended without its end")
                self._take_logprobs(self._end.choice)
                return self._telling.end(self._logprobs, self._end, item)
        return ()

    def _parts(self, choice: int, parts: Iterable[Part]) -> list[Event]:
        """Log-probabilities go with text: those of tokens whose text is held back wait for it. Those of reasoning and
        of calls are not told.
        """
        self._take_logprobs(choice)
        events: list[Event] = []
        for part in parts:
            told, self._logprobs = self._logprobs, []
            events += self._telling.more(part, told if isinstance(part, Content) else ())
        return events

    def _take_logprobs(self, choice: int) -> None:
        told = None if self._scores is None else self._scores.take(choice)
        if told is not None:
            content = told["content"]
            assert isinstance(content, list)
            self._logprobs += content


async def _send_events(send: Send, events: Iterable[Event], *, is_last: bool = False) -> None:
    data = b"".join(b"event: " + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n" for name, body in events)
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})
