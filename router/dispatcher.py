"""The dispatcher: owner of every request from `submit` to its last item. One event loop, no locks, never waits.

    submit ----> queue --(pump)--> an attempt on workers --(messages)--> tokens to the stream --> end, report
                   ^                       |
                   '--- refused, lost -----'        deadline, cancel, slow reader: end at once, both workers told

    pump    runs soon after anything that may let a queued choice go: a submit, an end, a load report, a new worker
    tick    every half second: renews leases, finds frozen workers, ends what waits for a worker in vain
    links   `attach` takes a live link in; `on_lost`, a frozen worker or `detach` takes it out, and every choice that
            had a part there continues elsewhere (`router.loss`)

The pieces: `policy`, `index`, `admission`, `choice_state`, `loss` decide and are pure; `fleet` knows the workers;
`lifecycle` makes the moves; `reactions` maps messages to moves.
"""

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import structlog

from twostroke.cluster.aio import TaskOwner
from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.clock import Clock, SystemClock
from twostroke.cluster.core.errors import (
    Cancelled,
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    TwostrokeError,
    Unavailable,
    UnknownModel,
)
from twostroke.cluster.core.ids import Incarnation, RequestId
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import LoadReport, RenewLease, Role, WorkerMessage
from twostroke.cluster.core.random import choice_seed
from twostroke.cluster.core.request import Phase
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.admission import AdmissionQueue, Placed
from twostroke.router.choice_state import ChoiceState
from twostroke.router.fleet import Fleet
from twostroke.router.index import PrefixIndex
from twostroke.router.lifecycle import Lifecycle
from twostroke.router.policy import Choice, Never, Wait, choose, mismatch
from twostroke.router.reactions import Reactions
from twostroke.router.record import ChoiceRecord, RequestRecord
from twostroke.router.request import GenerateRequest, ServedModel, TextDecoderFactory, WorkerLoad
from twostroke.router.stream import BufferedStream

log = structlog.get_logger(__name__)

TICK_S = 0.5
NO_WORKER_GRACE_S = 10.0
"""How long a request waits for a worker of a role that has none: about a restart of one."""


class Dispatcher:
    """Implements `router.request.Generator` and `core.link.LinkListener`."""

    def __init__(
        self,
        config: RouterSection,
        decoders: TextDecoderFactory,
        metrics: RouterMetrics,
        *,
        model_name: str = "",
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        """Must be made on the running loop. `model_name` empty: what the workers call it."""
        self._config = config
        self._decoders = decoders
        self._metrics = metrics
        self._model_name = model_name
        self._clock = clock or SystemClock()
        self._random = random or Random()
        self._loop = asyncio.get_running_loop()
        self._queue: AdmissionQueue[ChoiceRecord] = AdmissionQueue(config.max_queued, config.reserve_skip)
        self.index = PrefixIndex()
        self.fleet = Fleet(self.index)
        self._lifecycle = Lifecycle(config, self.fleet, self._queue, metrics, self._clock, self._wake)
        self._reactions = Reactions(self._lifecycle, self.fleet, config.policy, metrics, self._clock, self._random)
        metrics.num_requests_waiting.set_function(lambda: self._queue.num_waiting)
        metrics.num_requests_running.set_function(lambda: len(self._lifecycle.jobs))
        self._broken: weakref.WeakSet[WorkerLink] = weakref.WeakSet()
        """Links that broke before they were attached."""
        self._model: ServedModel | None = None
        self._refusing = ""
        self._pump_planned = False
        self._tasks = TaskOwner("dispatcher")
        self._tasks.spawn(self._tick_forever(), "tick")

    # --------------------------------------------------------------------------------- what faces ask (Generator)

    def submit(self, request: GenerateRequest) -> BufferedStream:
        try:
            self._check(request)
            record = self._record(request)
            self._lifecycle.accept(record)
        except TwostrokeError as error:
            self._metrics.refusals.of(error.code).inc()
            raise
        record.deadline = self._loop.call_later(
            request.time_left_s,
            self._lifecycle.fail,
            record,
            DeadlineExceeded(f"not finished within {request.time_left_s:g} s"),
        )
        if len(self._queue) == 1:
            self._pump()  # nobody stands before it: it need not wait for the end of this turn
        else:
            self._wake()
        return record.stream

    def cancel(self, request_id: RequestId) -> bool:
        record = self._lifecycle.requests.get(request_id)
        if record is None:
            return False
        self._lifecycle.fail(record, Cancelled("the request was cancelled"))
        return True

    @property
    def model(self) -> ServedModel | None:
        return self._model

    def _served_model(self) -> ServedModel | None:
        decode = [worker.info for worker in self.fleet.workers(Role.DECODE)]
        infos = decode or [worker.info for worker in self.fleet.workers()]
        if not infos:
            return None
        return ServedModel(
            name=self._model_name or infos[0].model,
            max_context=max(info.max_context for info in infos),
            page_size=infos[0].layout.page_size,
            num_prefill_workers=len(self.fleet.workers(Role.PREFILL)),
            num_decode_workers=len(decode),
            fingerprint=infos[0].layout.model_fingerprint,
        )

    @property
    def ready(self) -> bool:
        """A decode worker takes work, and a prefill worker that shares its pages, or it may prefill itself. Workers
        are attached once they have run a step, prefill workers once they have shipped a page (`router.discovery`).
        """
        if self._refusing:
            return False
        usable = [worker for worker in self.fleet.workers() if not worker.draining and not worker.stalled]
        decode = [worker.info for worker in usable if worker.info.role is Role.DECODE]
        prefill = [worker.info for worker in usable if worker.info.role is Role.PREFILL]
        if self._config.policy.local_when_no_prefill:
            return bool(decode)
        return any(mismatch(one, other) is None for one in prefill for other in decode)

    def loads(self) -> list[WorkerLoad]:
        return [
            WorkerLoad(worker.info.worker_id, worker.info.role, worker.load, worker.info.num_pages, worker.draining)
            for worker in self.fleet.workers()
        ]

    @property
    def num_live(self) -> int:
        return len(self._lifecycle.requests)

    def phases(self) -> dict[RequestId, tuple[Phase, ...]]:
        """Where each choice of each live request is."""
        return {
            request_id: tuple(choice.state.phase for choice in record.choices)
            for request_id, record in self._lifecycle.requests.items()
        }

    def _check(self, request: GenerateRequest) -> None:
        if self._refusing:
            raise Unavailable(self._refusing)
        model = self.model
        if model is None or not model.num_decode_workers:
            raise Unavailable("no decode worker is attached")
        if request.model != model.name:
            raise UnknownModel(f"model {request.model!r} is not served here, {model.name!r} is", "model")
        if not request.prompt:
            raise InvalidRequest("the prompt has no token", "prompt")
        if request.sampling.max_tokens < 1 or request.num_choices < 1:
            raise InvalidRequest("max_tokens and n must be at least 1", "max_tokens")
        total = len(request.prompt) + request.sampling.max_tokens
        if total > model.max_context:
            raise ContextOverflow(
                f"{len(request.prompt)} prompt tokens and up to {request.sampling.max_tokens} output tokens are "
                f"{total}; the limit is {model.max_context}",
                "max_tokens",
            )
        if request.delivered and request.num_choices != 1:
            raise InvalidRequest("one choice is continued at a time", "n")
        if request.request_id in self._lifecycle.requests:
            raise InvalidRequest(f"a request with id {request.request_id} is live", "request_id")

    def _record(self, request: GenerateRequest) -> RequestRecord:
        now = self._clock.now()
        record = RequestRecord(
            request=request,
            stream=BufferedStream(
                lambda: self.cancel(request.request_id), self._config.token_buffer // 2 if request.whole else 0
            ),
            accepted_at=now,
            deadline_at=now + request.time_left_s,
        )
        for number in range(request.num_choices):
            seed = choice_seed(request.sampling.seed, request.first_choice + number)
            sampling = replace(request.sampling, seed=seed)
            if number:
                sampling = replace(sampling, prompt_logprobs=None)  # the prompt is the same: choice 0 tells of it
            state = ChoiceState(request.request_id, number, sampling, since=now, tokens=list(request.delivered))
            decoder = self._decoders(request.stop)
            decoder.skip(request.delivered)
            record.choices.append(ChoiceRecord(record, state, decoder, num_told=len(request.delivered)))
        return record

    # -------------------------------------------------------------------------------- what links say (LinkListener)

    def attach(self, link: WorkerLink) -> bool:
        """Use the worker from now on. False when the link broke already, or its incarnation is attached."""
        if link in self._broken or self.fleet.find(link.info.incarnation) is not None:
            return False
        self.fleet.add(link)
        self._note_workers()
        self._wake()
        return True

    def detach(self, incarnation: Incarnation, reason: str) -> None:
        """Close the link; what ran there continues elsewhere. Idempotent."""
        worker = self.fleet.find(incarnation)
        if worker is not None:
            worker.link.close(reason)
            self._forget(worker.link, reason)

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        worker = self.fleet.of_link(link)
        if worker is None:
            self._metrics.dropped_messages.of("unknown_link").inc(len(messages))
            return
        for message in messages:
            self._reactions.on_message(worker, message)
            if isinstance(message, LoadReport):
                # Tokens place nobody; what else may, wakes the pump itself.
                self._wake()

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        self._broken.add(link)
        if self.fleet.of_link(link) is not None:
            self._forget(link, reason)

    def _forget(self, link: WorkerLink, reason: str) -> None:
        log.info("worker_lost", worker=link.info.worker_id, incarnation=link.info.incarnation, reason=reason)
        self.fleet.remove(link.info.incarnation)
        self._note_workers()
        self._reactions.on_lost(link, reason)
        self._wake()

    def _note_workers(self) -> None:
        """After every change of who is attached: each request asks for the model several times."""
        self._model = self._served_model()
        for role in Role:
            self._metrics.workers.of(role.value).set(len(self.fleet.workers(role)))

    # ----------------------------------------------------------------------------------------------- placing

    def _wake(self) -> None:
        """Plan one pump for the end of this turn of the loop, however many reasons there are."""
        if not self._pump_planned:
            self._pump_planned = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_planned = False
        failures: list[tuple[ChoiceRecord, TwostrokeError]] = []
        self._queue.take(lambda choice: self._place(choice, failures), self._clock.now())
        for choice, error in failures:
            self._lifecycle.fail(choice.request, error)

    def _place(self, choice: ChoiceRecord, failures: list[tuple[ChoiceRecord, TwostrokeError]]) -> Placed:
        if choice.after_loss and self._lifecycle.num_continuing >= self._config.max_continuations:
            return Placed.HELD
        now = self._clock.now()
        keys = self._lifecycle.keys(choice)
        decision = choose(
            self._lifecycle.facts(choice),
            self.fleet.views(Role.PREFILL, keys, now),
            self.fleet.views(Role.DECODE, keys, now),
            self._config.policy,
            self._random,
        )
        spent_s = self._clock.now() - now
        self._metrics.router_overhead_seconds.of("choose").observe(spent_s)
        if choice.state.number == 0:
            choice.request.route_s += spent_s
        match decision:
            case Choice():
                self._lifecycle.begin(choice, decision)
                return Placed.ASKED if choice.state.phase is Phase.RESERVING else Placed.PLACED
            case Never(reason):
                failures.append((choice, ContextOverflow(reason, "prompt")))
                return Placed.HELD
            case Wait(_, for_worker):
                if not for_worker:
                    choice.workerless_since = None
                elif choice.workerless_since is None:
                    choice.workerless_since = now
                return Placed.BLOCKED

    # ---------------------------------------------------------------------------------------------- the clock

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tick()

    def _tick(self) -> None:
        now = self._clock.now()
        self._lifecycle.delivery.flush()
        for worker in self.fleet.workers():
            if worker.stalled:
                self.detach(worker.info.incarnation, "frozen: jobs run and no step ends")
        for choice in list(self._lifecycle.jobs.values()):
            self._renew_lease(choice, now)
            self._lifecycle.try_finish(choice)
        for record in list(self._lifecycle.requests.values()):
            for choice in record.choices:
                since = choice.workerless_since
                if choice.queued and since is not None and now - since > NO_WORKER_GRACE_S:
                    self._lifecycle.fail(record, Unavailable("no worker is there to serve this"))
                    break
        self._wake()

    @staticmethod
    def _renew_lease(choice: ChoiceRecord, now: float) -> None:
        attempt = choice.attempt
        if attempt is None or attempt.lease is None or attempt.decode is None or attempt.started or attempt.renewing:
            return
        if now - attempt.renewed_at > attempt.lease.ttl_s / 3:
            attempt.renewed_at = now
            attempt.decode.send([RenewLease(attempt.job)])

    # ------------------------------------------------------------------------------------------------- ending

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the live ones; True when none was left before the timeout."""
        self._refusing = "the router is draining"
        try:
            async with asyncio.timeout(timeout_s):
                await self._lifecycle.idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End every request and close every link. Idempotent."""
        self._refusing = "the router has stopped"
        for record in list(self._lifecycle.requests.values()):
            self._lifecycle.fail(record, Unavailable("the router stops"))
        for worker in self.fleet.workers():
            self.detach(worker.info.incarnation, "the router stops")
        await self._tasks.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless jobs, queue and charges agree with the live requests."""
        live = [choice for record in self._lifecycle.requests.values() for choice in record.choices]
        attempts = {choice.attempt.job for choice in live if choice.attempt is not None}
        assert attempts == set(self._lifecycle.jobs), "jobs and attempts differ"
        assert sum(choice.queued for choice in live) == len(self._queue), "queue and queued choices differ"
        asking = self._queue.num_waiting - len(self._queue)
        assert asking <= sum(choice.state.phase is Phase.RESERVING for choice in live), "entries ask for nobody"
        charged = {job for worker in self.fleet.workers() for job in worker.charges}
        assert charged <= attempts, f"charges without an attempt: {charged - attempts}"
        for worker in self.fleet.workers():
            assert worker.charged_tokens == sum(worker.charges.values()), "charges do not add up"
        continuing = sum(choice.attempt.after_loss for choice in live if choice.attempt is not None)
        assert continuing == self._lifecycle.num_continuing, "continuations are miscounted"
