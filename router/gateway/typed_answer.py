"""One accepted request over HTTP, told in events that have names: `/v1/responses` and `/v1/messages`.

    submit       refused: the endpoint's own error form
    first item   nothing is sent before it, so that an early failure still has a status
    streamed     the telling's events for each item; a failure is its last event (FIELD-REPORTS E30)
    whole        one JSON object at the end, or the error with its status

A `Telling` is one answer's own and keeps what was said; it knows of no connection. Requests of these endpoints have
one choice. Disconnects and slow clients are handled as in `router.gateway.answer`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twostroke.cluster.core.errors import InternalError, TwostrokeError
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.gateway.answer import SEND_TIMEOUT_S, START, failing_cleanly, reading, submit
from twostroke.router.gateway.errors import json_response, refusal
from twostroke.router.gateway.forms import Json
from twostroke.router.gateway.logprobs import Scores
from twostroke.router.request import ChoiceEnd, Delta, GenerateRequest, Generator, RequestReport, StreamItem

log = structlog.get_logger(__name__)

Event = tuple[str, Json]
"""Name and data."""


@dataclass(slots=True)
class Said:
    """Of an answer, or of a part of it."""

    text: str = ""
    logprobs: list[object] = field(default_factory=list)
    """As a chat's `content` has them, when they were asked for."""


class Telling(Protocol):
    def begin(self) -> Iterable[Event]:
        """Before the first text. Call once."""
        ...

    def more(self, said: Said) -> Event: ...

    def end(self, said: Said, end: ChoiceEnd, report: RequestReport) -> Iterable[Event]:
        """After the last text; `said` is all of it."""
        ...

    def failed(self, said: Said, error: TwostrokeError) -> Iterable[Event]:
        """Instead of `end`."""
        ...

    def whole(self, said: Said, end: ChoiceEnd, report: RequestReport) -> Json: ...


class TypedAnswer(Response):
    """The response of an endpoint with a telling; it submits when it is called."""

    def __init__(
        self,
        generator: Generator,
        request: GenerateRequest,
        telling: Telling,
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
        self._metrics = metrics
        self._streamed = streamed
        self._endpoint = endpoint
        self._scores = scores
        self._texts: list[str] = []
        self._logprobs: list[object] = []
        self._end: ChoiceEnd | None = None
        self._report: RequestReport | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            stream = submit(self._generator, [self._request], self._endpoint)
        except TwostrokeError as error:
            await refusal(error, scope)(scope, receive, send)
            return
        async with reading(stream, receive) as items:
            if self._streamed:
                try:
                    await self._tell(failing_cleanly(items, self._metrics), scope, receive, send)
                except TimeoutError:
                    log.info("client_does_not_read", request_id=self._request.request_id)
            else:
                response = await self._whole(failing_cleanly(items, self._metrics), scope)
                await response(scope, receive, send)

    async def _whole(self, items: AsyncIterator[StreamItem], scope: Scope) -> Response:
        try:
            async for item in items:
                self._take(item)
            end, report = self._ends()
        except TwostrokeError as error:
            return refusal(error, scope)
        return json_response(self._telling.whole(self._said(), end, report))

    async def _tell(self, items: AsyncIterator[StreamItem], scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for item in items:
                if not started:
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await send(START)
                    started = True
                    await _send_events(send, self._telling.begin())
                more = self._take(item)
                if more.text:
                    await _send_events(send, [self._telling.more(more)])
            end, report = self._ends()
            await _send_events(send, self._telling.end(self._said(), end, report), is_last=True)
        except TwostrokeError as error:
            if started:
                await _send_events(send, self._telling.failed(self._said(), error), is_last=True)
            else:
                await refusal(error, scope)(scope, receive, send)

    def _said(self) -> Said:
        return Said("".join(self._texts), self._logprobs)

    def _take(self, item: StreamItem) -> Said:
        """Note what the item says; its text, and the log-probabilities that go with it: those of tokens whose text is
        held back wait for it, or for the end.
        """
        match item:
            case Delta(choice, text, token_ids, logprobs):
                self._texts.append(text)
                if self._scores is not None:
                    self._scores.add(choice, token_ids, logprobs)
                return Said(text, self._told(choice) if text else [])
            case ChoiceEnd():
                self._end = item
                self._told(item.choice)
            case RequestReport():
                self._report = item
        return Said()

    def _told(self, choice: int) -> list[object]:
        told = None if self._scores is None else self._scores.take(choice)
        content = [] if told is None else told["content"]
        assert isinstance(content, list)
        self._logprobs += content
        return content

    def _ends(self) -> tuple[ChoiceEnd, RequestReport]:
        if self._end is None or self._report is None:
            raise InternalError("the answer ended without its end or its report")
        return self._end, self._report


async def _send_events(send: Send, events: Iterable[Event], *, is_last: bool = False) -> None:
    data = b"".join(b"event: " + name.encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n" for name, body in events)
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
