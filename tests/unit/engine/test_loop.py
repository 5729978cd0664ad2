"""The engine thread: it answers, survives failed steps, shows its own failure, and stops."""

import threading
from collections.abc import Callable

import pytest

from tests.engine_builders import ROUTER, VOCAB, expected_output, job_id, make_info, make_nonces, make_submit
from twostroke.cluster.core.clock import ManualClock
from twostroke.cluster.core.messages import Ended, Outcome, Role, Stroke, Submit, Tokens
from twostroke.decode_worker.scheduler import DecodeLimits, DecodeScheduler
from twostroke.engine.commands import (
    Check,
    Checked,
    Event,
    FromRouter,
    Snapshot,
    SnapshotTaken,
    ToRouter,
    WarmedUp,
)
from twostroke.engine.fake_executor import FakeExecutor, FakeHandle
from twostroke.engine.loop import MAX_FAILED_STEPS, EngineLoop
from twostroke.engine.plan import Plan, StepResult

DEADLINE_S = 10.0


class Ears:
    """Collects events and lets a test wait for one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.events: list[Event] = []

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_there, DEADLINE_S), f"not within {DEADLINE_S} s; heard {self.events}"

    def messages(self) -> list[object]:
        return [message for event in self.events if isinstance(event, ToRouter) for message in event.messages]

    def ends(self) -> list[Ended]:
        return [message for message in self.messages() if isinstance(message, Ended)]


class FaultyExecutor(FakeExecutor):
    """Fails the first `num_faults` steps; waits for `gate` in every step, when there is one."""

    num_faults = 0
    gate: threading.Event | None = None

    def launch(self, plan: Plan) -> FakeHandle:
        if self.gate is not None:
            assert self.gate.wait(DEADLINE_S)
        if self.num_faults > 0:
            self.num_faults -= 1
            raise RuntimeError("the device is broken")
        return super().launch(plan)


def make_loop(
    ears: Ears, *, clock: ManualClock | None = None, scheduler: type[DecodeScheduler] = DecodeScheduler
) -> tuple[EngineLoop, FaultyExecutor]:
    info = make_info(Role.DECODE, num_pages=64)
    executor = FaultyExecutor(info.num_pages, info.layout.page_size, VOCAB, info.max_context)
    return EngineLoop(scheduler(info, VOCAB, DecodeLimits(), make_nonces()), executor, ears, clock), executor


def start_warm(loop: EngineLoop, ears: Ears) -> None:
    loop.start()
    ears.wait_for(lambda: ears.events == [WarmedUp()])


def local(name: str) -> Submit:
    return make_submit(Stroke.LOCAL, name=name)


def test_commands_become_tokens_and_ends() -> None:
    ears = Ears()
    loop, _ = make_loop(ears)
    loop.start()
    for name in "abc":
        loop.post(FromRouter(ROUTER, local(name)))
    ears.wait_for(lambda: len(ears.ends()) == 3)
    loop.stop()
    told: dict[object, list[int]] = {}
    for message in ears.messages():
        if isinstance(message, Tokens):
            for run in message.runs:
                told.setdefault(run.job, []).extend(run.tokens)
    assert told == {job_id(name): expected_output(local(name)) for name in "abc"}
    assert loop.load().ledger.at_rest
    assert loop.stats.num_steps == loop.load().num_steps > 0
    assert (loop.alive, loop.failed) == (False, None)


def test_a_failed_step_ends_its_jobs_and_the_next_ones_are_served() -> None:
    ears = Ears()
    loop, executor = make_loop(ears)
    start_warm(loop, ears)
    executor.num_faults = 1
    loop.post(FromRouter(ROUTER, local("a")))
    ears.wait_for(lambda: len(ears.ends()) == 1)
    loop.post(FromRouter(ROUTER, local("b")))
    ears.wait_for(lambda: len(ears.ends()) == 2)
    loop.stop()
    assert [ended.outcome for ended in ears.ends()] == [Outcome.FAILED, Outcome.FINISHED]
    assert "the device is broken" in ears.ends()[0].message
    assert loop.stats.num_failed_steps == 1


def test_an_engine_that_cannot_compute_fails_before_it_says_that_it_is_warm() -> None:
    ears = Ears()
    loop, executor = make_loop(ears)
    executor.num_faults = 1
    loop.start()
    loop.stop()
    assert loop.failed == "RuntimeError: the device is broken"
    assert ears.events == []


def test_a_device_that_keeps_failing_ends_the_loop_visibly() -> None:
    ears = Ears()
    loop, executor = make_loop(ears)
    start_warm(loop, ears)
    executor.num_faults = MAX_FAILED_STEPS
    for index in range(MAX_FAILED_STEPS):
        loop.post(FromRouter(ROUTER, local(f"job-{index}")))
        ears.wait_for(lambda count=index + 1: len(ears.ends()) == count)  # type: ignore[misc]
    loop.stop()
    assert loop.failed is not None
    assert "the device is broken" in loop.failed
    assert not loop.alive


def test_a_listener_that_raises_fails_the_loop_visibly() -> None:
    heard = threading.Event()

    def broken(events: list[Event]) -> None:
        heard.set()
        raise ValueError("deaf")

    info = make_info(Role.DECODE)
    executor = FakeExecutor(info.num_pages, info.layout.page_size, VOCAB, info.max_context)
    loop = EngineLoop(DecodeScheduler(info, VOCAB, DecodeLimits()), executor, broken)
    loop.start()
    loop.post(FromRouter(ROUTER, local("a")))
    assert heard.wait(DEADLINE_S)
    loop.stop()
    assert loop.failed == "ValueError: deaf"


def test_a_step_that_hangs_shows_in_its_age_and_in_stop() -> None:
    ears, clock = Ears(), ManualClock()
    loop, executor = make_loop(ears, clock=clock)
    start_warm(loop, ears)
    executor.gate = threading.Event()
    loop.post(FromRouter(ROUTER, local("a")))
    ears.wait_for(lambda: bool(ears.messages()))  # Started: it is in the step that hangs
    clock.advance(11.0)
    assert loop.load().step_age_s == 11.0
    with pytest.raises(TimeoutError):
        loop.stop(timeout_s=0.05)
    executor.gate.set()
    loop.stop()


def test_a_job_that_came_during_the_warm_up_does_not_make_a_worker_look_frozen() -> None:
    """The age of the last step counts from the loop's first turn, however long the machine was up before."""
    ages: list[float] = []
    info = make_info(Role.DECODE)
    executor = FakeExecutor(info.num_pages, info.layout.page_size, VOCAB, info.max_context)
    clock = ManualClock()
    clock.advance(40_000.0)
    heard = threading.Event()

    def listen(events: list[Event]) -> None:
        ages.append(loop.load().step_age_s)
        if any(isinstance(event, ToRouter) for event in events):
            heard.set()

    loop = EngineLoop(DecodeScheduler(info, VOCAB, DecodeLimits()), executor, listen, clock)
    loop.post(FromRouter(ROUTER, local("a")))
    loop.start()
    assert heard.wait(DEADLINE_S)
    loop.stop()
    assert loop.failed is None
    assert set(ages) == {0.0}


def test_a_snapshot_is_answered_without_traffic() -> None:
    ears = Ears()
    loop, _ = make_loop(ears)
    loop.start()
    loop.post(Snapshot(3))
    ears.wait_for(lambda: any(isinstance(event, SnapshotTaken) for event in ears.events))
    loop.stop()
    loop.post(Snapshot(4))  # after the end: ignored


@pytest.mark.parametrize("broken", [False, True])
def test_a_check_says_what_does_not_add_up_and_ends_nothing(broken: bool) -> None:
    ears = Ears()
    loop, _ = make_loop(ears, scheduler=BrokenScheduler if broken else DecodeScheduler)
    loop.start()
    loop.post(Check(5))
    ears.wait_for(lambda: any(isinstance(event, Checked) for event in ears.events))
    assert loop.alive
    loop.stop()
    checked = next(event for event in ears.events if isinstance(event, Checked))
    assert (checked.number, checked.fault) == (5, "a page is missing" if broken else "")
    assert checked.load.ledger.at_rest


class BrokenScheduler(DecodeScheduler):
    def check_integrity(self) -> None:
        raise AssertionError("a page is missing")


def test_stop_before_start_and_twice_is_harmless() -> None:
    loop, _ = make_loop(Ears())
    loop.stop()
    loop.stop()
    assert not loop.alive


def test_results_of_the_fake_come_after_its_delay() -> None:
    assert FakeHandle(StepResult([1]), 0.001).result().tokens == [1]
