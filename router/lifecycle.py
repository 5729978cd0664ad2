"""The moves of a request's life, each in one place. The dispatcher and the reactions decide when; this does it.

    accept -> enqueue -> begin (an attempt on one or two workers)
                      -> requeue   refused, or no prefill worker for the lease: back to its place, nothing counted
                      -> resume    a loss or preemption: continue from the delivered tokens, at the head, a few times
                      -> finish    one choice is complete; the last one ends the request with its report
    fail               any time: error, cancel, deadline; ends all choices

Every way out passes `_release`, which is where an attempt's jobs are cancelled on both workers and its charges are
taken back, exactly once.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.clock import Clock
from twostroke.cluster.core.errors import Cancelled, Overloaded, PeerLost, SlowReader, TwostrokeError
from twostroke.cluster.core.ids import JobId, RequestId
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import Cancel, Lease, Stroke, Submit, WorkerInfo
from twostroke.cluster.core.request import Phase
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.admission import AdmissionQueue
from twostroke.router.delivery import Delivery
from twostroke.router.fleet import Fleet, PromptKeys
from twostroke.router.policy import Choice, RequestFacts
from twostroke.router.record import Attempt, ChoiceRecord, End, RequestRecord
from twostroke.router.report import account, make_report
from twostroke.router.request import ChoiceEnd, Delta

log = structlog.get_logger(__name__)

FINISH_GRACE_S = 1.0
"""How long an end waits for the prefill side's figures, which come on another stream than the last token."""
MAX_PREEMPTIONS = 8
"""Times that decode workers may give a choice back for lack of pages."""


class Lifecycle:
    """Owns every live request. Used on one event loop; no call waits."""

    def __init__(
        self,
        config: RouterSection,
        fleet: Fleet,
        queue: AdmissionQueue[ChoiceRecord],
        metrics: RouterMetrics,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._queue = queue
        self._metrics = metrics
        self._clock = clock
        self._wake = wake
        self.delivery = Delivery(metrics, clock)
        self.requests: dict[RequestId, RequestRecord] = {}
        self.jobs: dict[JobId, ChoiceRecord] = {}
        """Present attempts only: messages about any other job are dropped."""
        self.num_continuing = 0
        self.idle = asyncio.Event()
        self.idle.set()

    # ---------------------------------------------------------------------------------------------- queueing

    def accept(self, record: RequestRecord) -> None:
        """Take a request on: choice 0 joins the queue, the others after its hand-over. Raises Overloaded. The caller
        sees to it that the queue is looked at.
        """
        first = record.choices[0]
        now = self._clock.now()
        first.entry = self._queue.offer(
            first, first.num_tokens, record.request.time_left_s, now, record.request.priority
        )
        first.queued = True
        self.requests[record.request.request_id] = record
        self.idle.clear()
        self._metrics.accepted.inc()

    def start_siblings(self, record: RequestRecord) -> None:
        """Queue the other choices, once. They were admitted with the request, so they are not refused."""
        if record.siblings_started:
            return
        record.siblings_started = True
        entry = record.choices[0].entry
        assert entry is not None
        for choice in record.choices[1:]:
            choice.entry = type(entry)(choice, choice.num_tokens, entry.arrival, rank=0, due=entry.due)
            choice.state.since = self._clock.now()
            self._put_back(choice)

    def requeue(self, choice: ChoiceRecord) -> None:
        """Back to its place in the queue; the attempt is released, and its workers compute nothing for it."""
        attempt = choice.attempt
        for link in () if attempt is None else (attempt.prefill, attempt.decode):
            if link is not None:
                self._fleet.index.forget_expected(link.info.incarnation, self.keys(choice).of(link.info))
        self._release(choice)
        choice.state.move(Phase.QUEUED, self._clock.now())
        self._put_back(choice)

    def settle(self, choice: ChoiceRecord) -> None:
        """It has its pages: no longer one that waits."""
        if choice.entry is not None:
            self._queue.settle(choice.entry, self._clock.now())

    def _put_back(self, choice: ChoiceRecord) -> None:
        assert choice.entry is not None
        choice.entry.num_tokens = choice.num_tokens
        choice.queued = True
        self._queue.put_back(choice.entry)
        self._wake()

    # ---------------------------------------------------------------------------------------------- attempts

    def facts(self, choice: ChoiceRecord) -> RequestFacts:
        request = choice.request.request
        sibling = choice.request.choices[0].attempt if choice.state.number else None
        return RequestFacts(
            num_tokens=choice.num_tokens,
            total_tokens=len(request.prompt) + choice.state.sampling.max_tokens,
            one_to_go=choice.state.one_to_go,
            prefer_decode=None if sibling is None or sibling.decode is None else sibling.decode.info.incarnation,
            avoid=frozenset(choice.avoid),
            refused=frozenset(choice.refused),
        )

    def keys(self, choice: ChoiceRecord) -> PromptKeys:
        if choice.keys is None:
            request = choice.request.request
            # A prompt that is to be scored is computed whole: nobody's cache is of use.
            tokens = () if choice.awaits_prompt else request.prompt + tuple(choice.state.tokens)
            choice.keys = PromptKeys(tokens, request.salt, request.adapter)
        return choice.keys

    def begin(self, choice: ChoiceRecord, decision: Choice) -> None:
        """Place a queued choice (the caller takes it out of the queue): the first Submit goes out."""
        now = self._clock.now()
        self.delivery.tell(choice)  # what waits: a new attempt forgets log-probabilities that nobody took
        choice.queued = False
        choice.workerless_since = None
        choice.reason = decision.reason
        attempt = Attempt(
            job=choice.state.begin_attempt(),
            kind=decision.kind,
            prefill=self._link(decision.prefill),
            decode=self._link(decision.decode),
            after_loss=choice.after_loss,
        )
        self.num_continuing += attempt.after_loss
        choice.attempt = attempt
        choice.withheld.clear()
        self.jobs[attempt.job] = choice
        self._metrics.placements.of(attempt.kind).inc()
        if attempt.decode is not None:
            choice.decode_worker = attempt.decode.info.worker_id
            self._charge(choice, attempt.decode, choice.num_tokens)
        choice.prefill_worker = ""
        if attempt.prefill is not None:
            self.plan_prefill(choice, attempt.prefill)
        if attempt.kind == "pair":
            choice.state.move(Phase.RESERVING, now)
            self._submit(choice, attempt.decode, Stroke.RESERVE)
        elif attempt.kind == "local":
            choice.state.move(Phase.PREFILLING, now)
            self._submit(choice, attempt.decode, Stroke.LOCAL)
        else:
            self.ask_prefill(choice, None)

    def plan_prefill(self, choice: ChoiceRecord, link: WorkerLink) -> None:
        """Name the attempt's prefill worker and charge it at once; it is asked when the lease is there."""
        assert choice.attempt is not None
        choice.attempt.prefill = link
        choice.attempt.prefill_asked = choice.attempt.prefill_over = False
        choice.prefill_worker = link.info.worker_id
        held = self._fleet.index.match(link.info.incarnation, self.keys(choice).of(link.info), self._clock.now())
        self._charge(choice, link, choice.num_tokens - held * link.info.layout.page_size)

    def ask_prefill(self, choice: ChoiceRecord, lease: Lease | None) -> None:
        """Submit to the planned prefill worker."""
        assert choice.attempt is not None
        if choice.state.phase is not Phase.PREFILLING:
            choice.state.move(Phase.PREFILLING, self._clock.now())
        choice.attempt.prefill_asked = True
        self._submit(choice, choice.attempt.prefill, Stroke.PREFILL, lease)

    def first_token(self, choice: ChoiceRecord) -> None:
        """The attempt has delivered: its prefill work is done, and it continues nothing any more."""
        attempt = choice.attempt
        assert attempt is not None
        if attempt.prefill is not None:
            self._fleet.uncharge(attempt.prefill, attempt.job)
        self._end_continuing(attempt)
        choice.after_loss = False
        self._wake()

    def _link(self, info: WorkerInfo | None) -> WorkerLink | None:
        worker = None if info is None else self._fleet.find(info.incarnation)
        return None if worker is None else worker.link

    def _charge(self, choice: ChoiceRecord, link: WorkerLink, tokens: int) -> None:
        assert choice.attempt is not None
        self._fleet.charge(link, choice.attempt.job, tokens)
        self._fleet.index.expect(link.info.incarnation, self.keys(choice).of(link.info), self._clock.now())

    def _submit(
        self, choice: ChoiceRecord, link: WorkerLink | None, stroke: Stroke, lease: Lease | None = None
    ) -> None:
        assert choice.attempt is not None
        assert link is not None
        request = choice.request.request
        sampling = choice.state.sampling
        if sampling.prompt_logprobs is not None and (stroke is Stroke.RESERVE or not choice.awaits_prompt):
            sampling = replace(sampling, prompt_logprobs=None)
        submit = Submit(
            job=choice.attempt.job,
            stroke=stroke,
            prompt=request.prompt,
            delivered=tuple(choice.state.tokens),
            sampling=sampling,
            time_left_s=max(0.001, choice.request.deadline_at - self._clock.now()),
            salt=request.salt,
            adapter=request.adapter,
            lease=lease,
        )
        link.send([submit])

    def cancel_jobs(self, choice: ChoiceRecord) -> None:
        """Tell each worker that still has a part in the attempt. Idempotent there."""
        attempt = choice.attempt
        if attempt is None:
            return
        if attempt.decode is not None and not attempt.decode_over:
            attempt.decode.send([Cancel(attempt.job)])
        if attempt.prefill is not None and attempt.prefill_asked and not attempt.prefill_over:
            attempt.prefill.send([Cancel(attempt.job)])

    def _release(self, choice: ChoiceRecord) -> None:
        attempt = choice.attempt
        if attempt is None:
            return
        self.cancel_jobs(choice)
        for link in (attempt.prefill, attempt.decode):
            if link is not None:
                self._fleet.uncharge(link, attempt.job)
        self._end_continuing(attempt)
        if choice.state.phase is Phase.RESERVING and choice.entry is not None:
            self._queue.remove(choice.entry)
        del self.jobs[attempt.job]
        choice.attempt = None
        self._wake()

    def _end_continuing(self, attempt: Attempt) -> None:
        if attempt.after_loss:
            attempt.after_loss = False
            self.num_continuing -= 1

    # --------------------------------------------------------------------------------------- losses and ends

    def resume(self, choice: ChoiceRecord, cause: str, error: TwostrokeError, *, preempted: bool = False) -> None:
        """Continue from the delivered tokens after a loss; `error` is the request's own when no try is left."""
        if preempted:
            choice.state.preemptions += 1
            if choice.state.preemptions > MAX_PREEMPTIONS:
                self.fail(choice.request, Overloaded(f"preempted {MAX_PREEMPTIONS} times for lack of KV pages"))
                return
        elif not self.count_loss(choice, cause, error):
            return
        natural = choice.state.natural_end()
        if natural is not None:
            choice.end = End(natural, len(choice.state.tokens))
            self.finish(choice)
            return
        log.info("continuation", job=str(choice.state.job), cause=cause, delivered=len(choice.state.tokens))
        choice.after_loss = not preempted
        choice.end = None
        choice.keys = None
        assert choice.entry is not None
        choice.entry.rank = 0
        self.requeue(choice)

    def count_loss(self, choice: ChoiceRecord, cause: str, error: TwostrokeError) -> bool:
        """False when that was the last attempt: the request has failed."""
        self._metrics.continuations.of(cause).inc()
        choice.state.losses += 1
        if choice.state.losses >= self._config.max_attempts and choice.state.natural_end() is None:
            self.fail(choice.request, error)
            return False
        return True

    def deliver(self, choice: ChoiceRecord) -> None:
        """New tokens are in order, for the reader; a stop string ends the choice here."""
        waiting = self.delivery.on_tokens(choice)
        if choice.end is not None and choice.end.by_text:
            self.cancel_jobs(choice)
        if waiting > self._config.token_buffer:
            self.fail(
                choice.request, SlowReader(f"{waiting} tokens wait to be read; the limit is what a client may lag")
            )

    def try_finish(self, choice: ChoiceRecord) -> None:
        """Finish a complete choice, unless the prefill side's figures are still to come."""
        attempt = choice.attempt
        if not choice.complete or attempt is None:
            return
        if attempt.prefill is not None and attempt.prefill_asked and not attempt.prefill_over:
            if not choice.finish_by:
                choice.finish_by = self._clock.now() + FINISH_GRACE_S
            if self._clock.now() < choice.finish_by:
                return
        self.finish(choice)

    def finish(self, choice: ChoiceRecord) -> None:
        """End a complete choice."""
        self.delivery.tell(choice)
        record, end = choice.request, choice.end
        assert end is not None
        self.start_siblings(record)
        self._release(choice)
        choice.state.move(Phase.FINISHED, self._clock.now())
        continuation = choice.continuation
        if not end.by_text and continuation is None:
            rest = choice.decoder.finish()
            if rest:
                record.stream.put(Delta(choice.number, rest, ()))
        num_new = end.num_output - len(record.request.delivered)
        record.stream.put(ChoiceEnd(choice.number, end.reason, num_new, end.stop, continuation))
        if all(not other.state.live for other in record.choices):
            self._close(record, None)

    def fail(self, record: RequestRecord, error: TwostrokeError) -> None:
        """End the whole request with an error. Idempotent: a request ends once."""
        if record.request.request_id not in self.requests:
            return
        to = Phase.CANCELLED if isinstance(error, Cancelled) else Phase.FAILED
        now = self._clock.now()
        for choice in record.choices:
            if not choice.state.live:
                continue
            if choice.queued and choice.entry is not None:
                choice.queued = False
                self._queue.remove(choice.entry)
            self._release(choice)
            if choice.state.number:
                choice.state.move(to, now)
        first = record.choices[0]
        self._close(record, error)
        if first.state.live:
            first.state.move(to, now)

    def _close(self, record: RequestRecord, error: TwostrokeError | None) -> None:
        del self.requests[record.request.request_id]
        if record.deadline is not None:
            record.deadline.cancel()
        report = make_report(record, self._clock.now())
        account(record, report, self._metrics, error)
        self.delivery.flush()
        if error is None:
            record.stream.put(report)
            record.stream.close()
        else:
            record.stream.fail(error)
        for choice in record.choices:
            choice.entry = None
        record.choices.clear()  # no record refers to itself any longer, so all go at once and no collection is needed
        if not self.requests:
            self.idle.set()


def peer_lost(choice: ChoiceRecord, what: str) -> PeerLost:
    return PeerLost(f"{what}, and no attempt is left after {choice.state.losses + 1}")
