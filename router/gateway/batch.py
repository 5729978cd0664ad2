"""Several prompts of one HTTP request, answered as one.

submit      all or none: one that is refused cancels those before it, and the refusal is the request's
pump        a task for each prompt's stream; a bounded queue takes their items as they come
items       choice j of prompt i is choice i * n + j; one report at the end, with usage summed
a failure   of any prompt is the request's, and the others are cancelled
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.core.errors import InternalError, TwostrokeError
from twostroke.router.request import Delta, GenerateRequest, Generator, RequestReport, RequestStream, StreamItem

log = structlog.get_logger(__name__)

QUEUED_ITEMS = 64
"""Items that wait for the client; then the pumps wait, and the dispatcher counts what it buffers as for any stream."""


def submit(
    generator: Generator,
    requests: Sequence[GenerateRequest],
    num_shown: int,
    reduce: Callable[[RequestStream], RequestStream] | None = None,
) -> RequestStream:
    """The stream of one request, or of several as one, with `num_shown` choices a request: fewer than it asks for when
    `reduce` (`router.reduced`) leaves some out. Raises what `generator.submit` raises.
    """
    streams = _submit_all(generator, requests)
    if reduce is not None:
        streams = [reduce(stream) for stream in streams]
    return streams[0] if len(streams) == 1 else Batch(streams, num_shown)


def _submit_all(generator: Generator, requests: Sequence[GenerateRequest]) -> list[RequestStream]:
    streams: list[RequestStream] = []
    for request in requests:
        try:
            streams.append(generator.submit(request))
        except TwostrokeError:
            for earlier in requests[: len(streams)]:
                generator.cancel(earlier.request_id)
            raise
    return streams


class Batch:
    """Implements `router.request.RequestStream` over the streams of requests with `num_choices` each."""

    def __init__(self, streams: Sequence[RequestStream], num_choices: int) -> None:
        self._streams = streams
        self._num_choices = num_choices
        self._items: asyncio.Queue[tuple[int, StreamItem | TwostrokeError]] = asyncio.Queue(QUEUED_ITEMS)

    async def cancel(self) -> None:
        for stream in self._streams:
            await stream.cancel()

    async def __aiter__(self) -> AsyncGenerator[StreamItem, None]:
        tasks = TaskOwner("batch")
        for number, stream in enumerate(self._streams):
            tasks.spawn(self._pump(number, stream), f"prompt-{number}")
        reports: dict[int, RequestReport] = {}
        try:
            while len(reports) < len(self._streams):
                number, item = await self._items.get()
                if isinstance(item, TwostrokeError):
                    raise item
                if isinstance(item, RequestReport):
                    reports[number] = item
                else:
                    choice = number * self._num_choices + item.choice
                    yield item._replace(choice=choice) if isinstance(item, Delta) else replace(item, choice=choice)
            yield _sum([reports[number] for number in range(len(self._streams))])
        finally:
            await tasks.close()
            await self.cancel()

    async def _pump(self, number: int, stream: RequestStream) -> None:
        """Everything of one stream, to its report or its failure."""
        failure: TwostrokeError = InternalError("the answer ended without its report")
        try:
            async with aclosing(aiter(stream)) as items:
                async for item in items:
                    await self._items.put((number, item))
                    if isinstance(item, RequestReport):
                        return
        except TwostrokeError as error:
            failure = error
        except Exception as error:
            log.exception("batch_failed")
            failure = InternalError(f"an unexpected {type(error).__name__}")
        await self._items.put((number, failure))


def _sum(reports: Sequence[RequestReport]) -> RequestReport:
    """Usage, pages and bytes of all; where the time went is told of the first prompt."""
    return replace(
        reports[0],
        prompt_tokens=sum(report.prompt_tokens for report in reports),
        completion_tokens=sum(report.completion_tokens for report in reports),
        cached_tokens=sum(report.cached_tokens for report in reports),
        pages_shipped=sum(report.pages_shipped for report in reports),
        bytes_shipped=sum(report.bytes_shipped for report in reports),
        finish_reasons=tuple(reason for report in reports for reason in report.finish_reasons),
    )
