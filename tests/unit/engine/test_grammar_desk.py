"""Jobs with a grammar wait for it; their messages keep their order, and nobody else's wait."""

import asyncio
import threading

import pytest

from tests.engine_builders import ROUTER, job_id, make_submit
from tests.waiting import until
from twostroke.cluster.core.grammar import ANY_OBJECT, Grammar, GrammarKind
from twostroke.cluster.core.ids import Incarnation
from twostroke.cluster.core.messages import Cancel, Stroke, Submit
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.commands import FromRouter
from twostroke.engine.grammar import GrammarCompiler
from twostroke.engine.grammar_desk import GrammarDesk
from twostroke.engine.plan import ConstraintBroken
from twostroke.engine.vocabulary import Vocabulary, byte_vocabulary


def asking(name: str, grammar: Grammar | None, **changes: float) -> Submit:
    sampling = SamplingParams(max_tokens=4, grammar=grammar)
    return make_submit(Stroke.LOCAL, name=name, sampling=sampling, **changes)  # type: ignore[arg-type]


class Slow:
    """A vocabulary that is there when it is let."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self) -> Vocabulary:
        assert self.opened.wait(10)
        return byte_vocabulary()


async def test_messages_of_a_job_keep_their_order_and_others_pass() -> None:
    slow, posted = Slow(), list[FromRouter]()
    desk = GrammarDesk(GrammarCompiler(slow), posted.append)
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
    desk = GrammarDesk(GrammarCompiler(slow), posted.append)
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
    desk = GrammarDesk(GrammarCompiler(byte_vocabulary), posted.append)
    desk.receive(ROUTER, asking("a", Grammar(GrammarKind.REGEX, "(")))
    await until(lambda: len(posted) == 1)
    assert posted[0].constraint is not None
    with pytest.raises(ConstraintBroken, match="unclosed"):
        posted[0].constraint.mask((), ())
    await desk.close()


async def test_a_job_waits_no_longer_than_its_time() -> None:
    slow, posted = Slow(), list[FromRouter]()
    desk = GrammarDesk(GrammarCompiler(slow), posted.append)
    desk.receive(ROUTER, asking("a", ANY_OBJECT, time_left_s=0.05))
    await until(lambda: len(posted) == 1)
    message = posted[0].message
    assert isinstance(message, Submit)
    assert (posted[0].constraint, message.time_left_s) == (None, 0.001)
    slow.opened.set()
    await desk.close()
