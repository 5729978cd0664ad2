"""What each message of a worker does to the choice it is about.

A message is looked up by its job among the present attempts and by the link that it came on; anything else (an
older attempt, a request that ended, a link that was replaced) is dropped and counted. `router.loss` decides what a loss
or an early end means, `router.lifecycle` does it.
"""

from random import Random

from twostroke.cluster.config import PolicySection
from twostroke.cluster.core.clock import Clock
from twostroke.cluster.core.errors import InternalError, InvalidRequest, TransferFailed
from twostroke.cluster.core.ids import JobId
from twostroke.cluster.core.link import WorkerLink
from twostroke.cluster.core.messages import (
    Ended,
    Leased,
    LoadReport,
    Outcome,
    PromptLogprobs,
    RefusalReason,
    Refused,
    RenewLease,
    Role,
    Started,
    TokenRun,
    Tokens,
    WorkerMessage,
)
from twostroke.cluster.core.request import Phase
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router import loss
from twostroke.router.choice_state import TokensConflict
from twostroke.router.fleet import Fleet, Worker
from twostroke.router.lifecycle import Lifecycle, peer_lost
from twostroke.router.loss import Reaction, Side
from twostroke.router.policy import Choice, choose_prefill
from twostroke.router.record import Attempt, ChoiceRecord, End


class Reactions:
    def __init__(
        self,
        lifecycle: Lifecycle,
        fleet: Fleet,
        policy: PolicySection,
        metrics: RouterMetrics,
        clock: Clock,
        random: Random,
    ) -> None:
        self._lifecycle = lifecycle
        self._fleet = fleet
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._random = random

    def on_message(self, worker: Worker, message: WorkerMessage) -> None:
        if isinstance(message, LoadReport):
            self._fleet.on_load(worker, message, self._clock.now())
            return
        if isinstance(message, Tokens):
            for run in message.runs:
                if (found := self._find(worker, run.job)) is not None:
                    self._on_tokens(found[0], run)
            return
        found = self._find(worker, message.job)
        if found is None:
            return
        choice, side = found
        match message:
            case Leased():
                self._on_leased(choice, side, message)
            case Refused():
                self._on_refused(choice, side, worker, message)
            case PromptLogprobs():
                self._on_prompt(choice, message)
            case Started():
                self._on_started(choice, side, message)
            case Ended():
                self._on_ended(choice, side, worker, message)

    def _find(self, worker: Worker, job: JobId) -> tuple[ChoiceRecord, Side] | None:
        choice = self._lifecycle.jobs.get(job)
        if choice is None or choice.attempt is None:
            self._metrics.dropped_messages.of("unknown_job").inc()
            return None
        side = choice.attempt.side_of(worker.link)
        if side is None:
            self._metrics.dropped_messages.of("replaced_worker").inc()
            return None
        return choice, side

    # ------------------------------------------------------------------------------------------ the good way

    def _on_leased(self, choice: ChoiceRecord, side: Side, message: Leased) -> None:
        attempt = _attempt(choice)
        expected = choice.state.phase is Phase.RESERVING or attempt.renewing
        if side is not Side.DECODE or not expected or attempt.decode is None:
            self._metrics.dropped_messages.of("unexpected").inc()
            return
        self._lifecycle.settle(choice)
        attempt.lease, attempt.renewed_at = message.lease, self._clock.now()
        attempt.renewing = False
        if attempt.prefill is None:
            self._replace_prefill(choice, message.lease.num_held * attempt.decode.info.layout.page_size)
        if attempt.prefill is not None:
            self._lifecycle.ask_prefill(choice, message.lease)

    def _replace_prefill(self, choice: ChoiceRecord, held_tokens: int) -> None:
        """Another prefill worker for a lease in hand; without one the choice goes back to its place."""
        attempt = _attempt(choice)
        assert attempt.decode is not None
        views = self._fleet.views(Role.PREFILL, self._lifecycle.keys(choice), self._clock.now())
        facts = self._lifecycle.facts(choice)
        decision = choose_prefill(facts, attempt.decode.info, held_tokens, views, self._policy, self._random)
        if isinstance(decision, Choice) and decision.prefill is not None:
            worker = self._fleet.find(decision.prefill.incarnation)
            assert worker is not None
            choice.reason = f"{decision.reason}, in place of a lost one"
            self._lifecycle.plan_prefill(choice, worker.link)
        else:
            self._lifecycle.requeue(choice)

    def _on_tokens(self, choice: ChoiceRecord, run: TokenRun) -> None:
        known = choice.state.duplicates
        self._take(choice, run)
        if choice.state.duplicates > known:
            self._metrics.dropped_messages.of("duplicate_token").inc(choice.state.duplicates - known)

    def _take(self, choice: ChoiceRecord, run: TokenRun) -> None:
        """Deliver what is now in order. The attempt, or the request, may be over after it."""
        if choice.complete:
            return
        if choice.state.sampling.prompt_logprobs is not None:
            if choice.awaits_prompt:
                choice.withheld.append(run)
                return
            self._lifecycle.delivery.tell_prompt(choice)
        first = not choice.state.progressed
        try:
            tokens = choice.state.accept(run)
        except TokensConflict as error:
            self._lifecycle.resume(choice, "conflict", error)
            return
        if not tokens:
            return
        if first:
            self._on_first_token(choice)
        self._lifecycle.deliver(choice)
        self._lifecycle.try_finish(choice)

    def _on_first_token(self, choice: ChoiceRecord) -> None:
        attempt = _attempt(choice)
        self._lifecycle.first_token(choice)
        if choice.state.phase is not Phase.PREFILLING:
            return
        if attempt.kind == "pair":
            choice.state.move(Phase.TRANSFERRING, self._clock.now())
        elif attempt.kind == "local":
            choice.state.move(Phase.DECODING, self._clock.now())
            self._lifecycle.start_siblings(choice.request)

    def _on_started(self, choice: ChoiceRecord, side: Side, message: Started) -> None:
        attempt = _attempt(choice)
        if (side is Side.PREFILL or attempt.kind == "local") and choice.cached_tokens is None:
            # The first attempt's: a later one finds what the first computed, which the client did not save.
            choice.cached_tokens = message.cached_tokens
        if side is Side.PREFILL:
            return
        attempt.started = True
        if attempt.kind == "local":
            return
        # Also the answer to a renewal that a commit has overtaken: then nobody else is asked to prefill.
        attempt.renewing = False
        if message.first_token is not None:
            # The prefill side tells it too, usually before; it may have been lost with it.
            logprobs = () if message.first_logprob is None else (message.first_logprob,)
            self._take(choice, TokenRun(attempt.job, choice.state.attempt_base, (message.first_token,), logprobs))
            if choice.attempt is not attempt:
                return
        if choice.state.phase in (Phase.PREFILLING, Phase.TRANSFERRING):
            choice.state.move(Phase.DECODING, self._clock.now())
        self._lifecycle.start_siblings(choice.request)
        if choice.awaits_prompt and attempt.prefill is None:
            self._lose_prompt(choice, "the prefill worker was lost")

    def _on_prompt(self, choice: ChoiceRecord, message: PromptLogprobs) -> None:
        awaited = choice.awaits_prompt
        if not awaited:
            self._metrics.dropped_messages.of("duplicate_token").inc()
            return
        try:
            choice.state.accept_prompt(message)
        except TokensConflict as error:
            self._lifecycle.resume(choice, "conflict", error)
            return
        if choice.awaits_prompt:
            return
        attempt = choice.attempt
        withheld, choice.withheld = choice.withheld, []
        for run in withheld:
            self._on_tokens(choice, run)
            if choice.attempt is not attempt:
                return

    def _lose_prompt(self, choice: ChoiceRecord, told: str) -> None:
        """Nobody will tell the prompt's log-probabilities any more, though the attempt goes on: begin anew."""
        self._lifecycle.resume(choice, "prompt_lost", peer_lost(choice, told))

    # ------------------------------------------------------------------------------------------- the other ways

    def _on_ended(self, choice: ChoiceRecord, side: Side, worker: Worker, message: Ended) -> None:
        attempt = _attempt(choice)
        reaction = loss.on_ended(side, message.outcome, choice.standing(side))
        attempt.end_side(side)
        if side is Side.PREFILL:
            choice.prefill_timings = message.timings
        else:
            choice.decode_timings = message.timings
        if reaction is Reaction.FINISH:
            self._on_finished(choice, message)
        elif reaction is Reaction.CONTINUE:
            self._continue(choice, worker, message)
        elif reaction is Reaction.REFUSE:
            request = choice.request
            self._lifecycle.fail(request, InvalidRequest(message.message, request.request.grammar_field))
        else:
            self._try_finish(choice)

    def _on_finished(self, choice: ChoiceRecord, message: Ended) -> None:
        if message.finish_reason is None or message.num_output < len(choice.state.tokens):
            delivered = len(choice.state.tokens)
            error = InternalError(f"{message.job} ended with {message.num_output} tokens, {delivered} were delivered")
            self._lifecycle.resume(choice, "conflict", error)
            return
        choice.end = End(message.finish_reason, message.num_output)
        self._try_finish(choice)

    def _try_finish(self, choice: ChoiceRecord) -> None:
        if choice.end is not None and not choice.complete and _attempt(choice).silent:
            error = InternalError(f"{choice.state.job} ended, and token {len(choice.state.tokens)} never came")
            self._lifecycle.resume(choice, "conflict", error)
        else:
            self._lifecycle.try_finish(choice)

    def _continue(self, choice: ChoiceRecord, worker: Worker, message: Ended) -> None:
        role, outcome = worker.info.role.value, message.outcome
        if outcome is Outcome.PREEMPTED:
            error = peer_lost(choice, "preempted")
            self._lifecycle.resume(choice, "preempted", error, preempted=True)
            return
        choice.avoid.add(worker.info.incarnation)
        told = f"the {role} worker ended the job: {outcome.value} {message.message}".rstrip()
        if outcome is Outcome.TRANSFER_FAILED:
            self._lifecycle.resume(choice, outcome.value, TransferFailed(told))
        else:
            self._lifecycle.resume(choice, outcome.value, peer_lost(choice, told))

    def _on_refused(self, choice: ChoiceRecord, side: Side, worker: Worker, message: Refused) -> None:
        _attempt(choice).end_side(side)
        match message.reason:
            case RefusalReason.NO_PAGES:
                self._fleet.mark_full(worker, choice.num_tokens)
            case RefusalReason.QUEUE_FULL:
                self._fleet.mark_full(worker, 0)
            case RefusalReason.DRAINING:
                worker.draining = True
            case RefusalReason.TOO_LARGE | RefusalReason.LAYOUT:
                choice.refused.add(worker.info.incarnation)
            case RefusalReason.WRONG_ROLE | RefusalReason.BAD_SUBMIT:
                self._lifecycle.fail(
                    choice.request, InternalError(f"{worker.info.worker_id} refused: {message.message}")
                )
                return
        self._lifecycle.requeue(choice)

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        """The worker behind `link` is gone; it is no longer in the fleet."""
        for choice in list(self._lifecycle.jobs.values()):
            attempt = choice.attempt
            side = None if attempt is None else attempt.side_of(link)
            if side is not None:
                self._on_side_lost(choice, side, f"the {side.value} worker was lost ({reason})")

    def _on_side_lost(self, choice: ChoiceRecord, side: Side, told: str) -> None:
        attempt = _attempt(choice)
        reaction = loss.on_lost(side, choice.standing(side))
        attempt.end_side(side)
        cause = f"{side.value}_lost"
        if reaction is Reaction.CARRY_ON and side is Side.PREFILL and choice.awaits_prompt:
            self._lose_prompt(choice, told)
        elif reaction is Reaction.CARRY_ON:
            self._lifecycle.try_finish(choice)
        elif reaction is Reaction.REPLACE:
            attempt.prefill = None
        elif reaction is Reaction.RENEW:
            if self._lifecycle.count_loss(choice, cause, peer_lost(choice, told)):
                assert attempt.decode is not None
                attempt.prefill, attempt.renewing = None, True
                attempt.decode.send([RenewLease(attempt.job, bump_epoch=True)])
        else:
            self._lifecycle.resume(choice, cause, peer_lost(choice, told))


def _attempt(choice: ChoiceRecord) -> Attempt:
    assert choice.attempt is not None
    return choice.attempt
