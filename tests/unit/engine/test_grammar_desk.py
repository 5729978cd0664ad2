"""Jobs with a grammar wait for it; their messages keep their order, and nobody else's wait."""

import asyncio
import threading

import pytest

from tests.engine_builders import ROUTER, job_id, make_submit
from tests.waiting import until
from twostroke.cluster.core.grammar import ANY_OBJECT, Grammar, GrammarKind
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.messages import Cancel, Ended, Outcome, RefusalReason, Refused, Stroke, Submit
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.commands import FromRouter, ToRouter
from twostroke.engine.grammar import GrammarCompiler
from twostroke.engine.grammar_desk import GrammarDesk
from twostroke.engine.plan import ConstraintBroken
from twostroke.engine.vocabulary import Vocabulary, byte_vocabulary


def asking(name: str, grammar: Grammar | None, **changes: float) -> Submit:
    sampling = SamplingParams(max_tokens=4, grammar=grammar)
    return make_submit(Stroke.LOCAL, name=name, sampling=sampling, **changes)  # type: ignore[arg-type]


def unheard(event: ToRouter) -> None:
    raise AssertionError(f"the desk says {event}")


class Slow:
    """A vocabulary that is there when it is let."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self) -> Vocabulary:
        assert self.opened.wait(10)
        return byte_vocabulary()


async def test_messages_of_a_job_keep_their_order_and_others_pass() -> None:
    slow, posted = Slow(), list[FromRouter]()
    desk = GrammarDesk(GrammarCompiler(slow), posted.append, unheard)
    desk.receive(ROUTER, asking("a", ANY_OBJECT))
    desk.receive(ROUTER, Cancel(job_id("a")))
    desk.receive(ROUTER, asking("b", None))
    assert [command.message.job for command in posted] == [job_id("b")]
    slow.opened.set()
    await until(lambda: len(posted) == 3)
    submitted, cancelled = posted[1:]
    assert isinstance(submitted.message, Submit)
    assert submitted.constraint is not None
    assert cancelled.message == Cancel(job_id("a"))
    desk.receive(ROUTER, Cancel(job_id("a")))
    assert len(posted) == 4
    await desk.close()


async def test_what_waits_for_a_router_that_is_gone_is_dropped() -> None:
    slow, posted = Slow(), list[FromRouter]()
    desk = GrammarDesk(GrammarCompiler(slow), posted.append, unheard)
    desk.receive(ROUTER, asking("a", ANY_OBJECT))
    desk.receive(Incarnation("another"), asking("b", ANY_OBJECT))
    await asyncio.sleep(0)
    desk.forget(ROUTER)
    slow.opened.set()
    await until(lambda: len(posted) == 1)
    assert posted[0].router == "another"
    await desk.close()


async def test_what_does_not_compile_breaks_at_its_first_token() -> None:
    posted = list[FromRouter]()
    desk = GrammarDesk(GrammarCompiler(byte_vocabulary), posted.append, unheard)
    desk.receive(ROUTER, asking("a", Grammar(GrammarKind.REGEX, "(")))
    await until(lambda: len(posted) == 1)
    assert posted[0].constraint is not None
    with pytest.raises(ConstraintBroken, match="unclosed"):
        posted[0].constraint.mask((), ())
    await desk.close()


@pytest.mark.parametrize("full", [True, False])
async def test_one_that_waits_too_long_may_come_again_and_one_without_time_has_expired(full: bool) -> None:
    slow, posted, told = Slow(), list[FromRouter](), list[ToRouter]()
    desk = GrammarDesk(GrammarCompiler(slow), posted.append, told.append, timeout_s=0.05 if full else 10.0)
    desk.receive(ROUTER, asking("a", ANY_OBJECT, time_left_s=5.0 if full else 0.05))
    desk.receive(ROUTER, Cancel(job_id("a")))
    await until(lambda: len(posted) == 1)
    [answer] = told[0].messages
    assert answer.job == posted[0].message.job == job_id("a")
    if full:
        assert isinstance(answer, Refused)
        assert answer.reason is RefusalReason.QUEUE_FULL
    else:
        assert isinstance(answer, Ended)
        assert answer.outcome is Outcome.EXPIRED
    slow.opened.set()
    await desk.close()


async def test_a_full_desk_refuses_as_a_full_queue_and_holds_up_nobody_else() -> None:
    slow, posted, told = Slow(), list[FromRouter](), list[ToRouter]()
    desk = GrammarDesk(GrammarCompiler(slow), posted.append, told.append, max_waiting=2)
    for name in ("a", "b", "c"):
        desk.receive(ROUTER, asking(name, ANY_OBJECT))
    desk.receive(ROUTER, asking("d", None))
    assert [command.message.job for command in posted] == [job_id("d")]
    [refused] = told[0].messages
    assert isinstance(refused, Refused)
    assert (refused.job, refused.reason) == (job_id("c"), RefusalReason.QUEUE_FULL)
    assert "2 jobs wait" in refused.message
    slow.opened.set()
    await until(lambda: len(posted) == 3)
    desk.receive(ROUTER, asking("c", ANY_OBJECT))
    await until(lambda: len(posted) == 4)
    assert len(told) == 1
    await desk.close()
