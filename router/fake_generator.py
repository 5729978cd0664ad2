"""The shipped fake of `router.request.Generator`: answers written beforehand, for tests of the faces. No workers.

    submit -> one item a turn of the loop -> ends, report
                 |
                 '-- held at a token until `release`; failing at a token; refused at once; cancelled

Choice j says `answers[j % len(answers)]`, cut at stop strings, `max_tokens` and the output budget as a real
answer would be; a continuation goes on at its place.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from twostroke.cluster.core.errors import Cancelled, DeadlineExceeded, TwostrokeError
from twostroke.cluster.core.ids import RequestId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.request import (
    ChoiceEnd,
    Continuation,
    Delta,
    GenerateRequest,
    PromptScores,
    RequestReport,
    ServedModel,
    StreamItem,
    TextDecoder,
    WorkerLoad,
)
from twostroke.router.tokenizer import Tokenizer

FAKE_MODEL = ServedModel(name="fake", max_context=512, page_size=16, num_prefill_workers=1, num_decode_workers=1)


def fake_logprob(token: int, top: int) -> TokenLogprob:
    """As if it were the most likely, and ids after it the next: a quarter less each."""
    return TokenLogprob(-0.25, 1, tuple(range(token, token + top)), tuple(-(place + 1) / 4 for place in range(top)))


@dataclass
class FakeGenerator:
    """All fields may be changed between requests; those about tokens count each choice's own."""

    tokenizer: Tokenizer
    answers: Sequence[str] = ("Hello, world!",)
    model: ServedModel | None = FAKE_MODEL
    ready: bool = True
    refusal: TwostrokeError | None = None
    """Raised by `submit`."""
    num_refusals: int | None = None
    """How many requests are refused; None: all of them."""
    failure: Exception | None = None
    """Raised by the stream before token `fail_at`."""
    fail_at: int = 0
    concerns: Callable[[GenerateRequest], bool] = lambda request: True
    """The requests that `refusal` and `failure` are for."""
    hold_at: int | None = None
    """Before this token every stream waits for `release`."""
    workers: list[WorkerLoad] = field(default_factory=list)
    """What `loads` answers."""
    submitted: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    live: dict[RequestId, "FakeStream"] = field(default_factory=dict)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, request: GenerateRequest) -> "FakeStream":
        if self.refusal is not None and self.num_refusals != 0 and self.concerns(request):
            if self.num_refusals is not None:
                self.num_refusals -= 1
            raise self.refusal
        cached = any(request.prompt == earlier.prompt for earlier in self.submitted)
        self.submitted.append(request)
        stream = FakeStream(self, request, is_cached=cached)
        self.live[request.request_id] = stream
        return stream

    def cancel(self, request_id: RequestId) -> bool:
        stream = self.live.pop(request_id, None)
        if stream is None:
            return False
        self.cancelled.append(request_id)
        stream.stopped.set()
        return True

    @property
    def num_live(self) -> int:
        return len(self.live)

    def loads(self) -> list[WorkerLoad]:
        return self.workers

    def release(self) -> None:
        self.released.set()


class FakeStream:
    """Implements `router.request.RequestStream`."""

    def __init__(self, owner: FakeGenerator, request: GenerateRequest, *, is_cached: bool) -> None:
        self._owner = owner
        self._request = request
        self._is_cached = is_cached
        self.stopped = asyncio.Event()

    async def cancel(self) -> None:
        self._owner.cancel(self._request.request_id)

    async def __aiter__(self) -> AsyncGenerator[StreamItem, None]:
        request = self._request
        choices = [_Choice(self._owner, request, request.first_choice + i) for i in range(request.num_choices)]
        if request.sampling.prompt_logprobs is not None:
            top = request.sampling.prompt_logprobs
            yield PromptScores(0, tuple(fake_logprob(token, top) for token in request.prompt[1:]))
        index = len(request.delivered)
        while any(choice.end is None for choice in choices):
            await self._before(index)
            for choice in choices:
                if choice.end is None:
                    for item in choice.step():
                        yield item
            index += 1
        self._owner.live.pop(request.request_id, None)
        yield self._report([choice.end for choice in choices if choice.end is not None])

    async def _before(self, index: int) -> None:
        await asyncio.sleep(0)
        if index == self._owner.hold_at:
            await self._wait_for_release()
        if self.stopped.is_set():
            raise Cancelled("the request was cancelled")
        failure = self._owner.failure
        if failure is not None and index == self._owner.fail_at and self._owner.concerns(self._request):
            self._owner.live.pop(self._request.request_id, None)
            raise failure

    async def _wait_for_release(self) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._owner.released, self.stopped)]
        try:
            async with asyncio.timeout(self._request.time_left_s):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self._owner.live.pop(self._request.request_id, None)
            raise DeadlineExceeded(f"not finished within {self._request.time_left_s:g} s") from None
        finally:
            for wait in waits:
                wait.cancel()

    def _report(self, ends: list[ChoiceEnd]) -> RequestReport:
        num_prompt = len(self._request.prompt)
        page_size = FAKE_MODEL.page_size
        return RequestReport(
            prompt_tokens=num_prompt,
            completion_tokens=sum(end.num_output for end in ends),
            cached_tokens=(num_prompt - 1) // page_size * page_size if self._is_cached else 0,
            duration_ms=21.0,
            ttft_ms=10.0,
            itl_ms=0.5,
            queue_ms=1.0,
            route_ms=2.0,
            reserve_ms=3.0,
            prefill_ms=4.0,
            transfer_ms=5.0,
            decode_ms=6.0,
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            transport="loopback",
            reason="fake",
            finish_reasons=tuple(end.finish_reason for end in ends),
        )


class _Choice:
    def __init__(self, owner: FakeGenerator, request: GenerateRequest, number: int) -> None:
        sampling = request.sampling
        tokens = owner.tokenizer.encode(owner.answers[number % len(owner.answers)])
        self._tokens = tokens if sampling.ignore_eos else [*tokens, *sampling.end_token_ids[:1]]
        self._sampling = sampling
        self._number = number
        self._request = request
        self._decoder: TextDecoder = owner.tokenizer.text_decoders(request.stop)
        self._decoder.skip(request.delivered)
        self._num_output = len(request.delivered)
        self.end: ChoiceEnd | None = None

    def step(self) -> list[StreamItem]:
        """The next token; an answer that ran out of text begins again."""
        token = self._tokens[self._num_output % len(self._tokens)]
        self._num_output += 1
        text, finish = self._decoder.push(token), self._sampling.finish_after(self._num_output, token)
        if text.stopped:
            return [self._delta(text.text, token), self._finish(FinishReason.STOP, text.stop)]
        if finish is FinishReason.LENGTH and self._request.ends_by_budget:
            return [self._delta(text.text, token), self._finish(finish, continuation=self._continuation())]
        if finish is not None:
            return [self._delta(text.text + self._decoder.finish(), token), self._finish(finish)]
        return [self._delta(text.text, token)]

    def _delta(self, text: str, token: int) -> Delta:
        top = self._sampling.logprobs
        return Delta(self._number, text, (token,), () if top is None else (fake_logprob(token, top),))

    def _continuation(self) -> Continuation:
        assert self._request.continuation is not None
        tokens = tuple(self._tokens[index % len(self._tokens)] for index in range(self._num_output))
        return replace(self._request.continuation, choice=self._number, tokens=tokens)

    def _finish(self, reason: FinishReason, stop: str = "", continuation: Continuation | None = None) -> ChoiceEnd:
        num_new = self._num_output - len(self._request.delivered)
        self.end = ChoiceEnd(self._number, reason, num_new, stop, continuation)
        return self.end
