"""The child that compiles what nobody has vouched for: verdicts, and what it dies of."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.waiting import on_this_machine
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.grammar import ANY_OBJECT, Grammar, GrammarKind
from twostroke.router.grammar_gate import GrammarGate

FIELD = "response_format"
CATASTROPHIC = Grammar(GrammarKind.REGEX, "(a{1000}){1000}")


@pytest.fixture
async def gate() -> AsyncIterator[GrammarGate]:
    gate = GrammarGate()
    yield gate
    await gate.close()


async def test_good_and_bad_grammars(gate: GrammarGate) -> None:
    await gate.check(ANY_OBJECT, FIELD)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="Invalid type") as caught:
            await gate.check(Grammar(GrammarKind.JSON_SCHEMA, '{"type":"x"}'), FIELD)
        assert caught.value.field == FIELD


async def test_what_takes_too_long_is_refused_and_the_next_is_not_harmed(gate: GrammarGate) -> None:
    await gate.check(ANY_OBJECT, FIELD)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="too complex"):
        await gate.check(CATASTROPHIC, FIELD)
    assert time.monotonic() - began < on_this_machine(1.0)
    await gate.check(Grammar(GrammarKind.REGEX, "a+"), FIELD)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="too complex"):
        await gate.check(CATASTROPHIC, FIELD)
    assert time.monotonic() - began < on_this_machine(0.1), "the verdict was not kept"


async def test_a_client_that_leaves_takes_no_verdict_of_another(gate: GrammarGate) -> None:
    leaving = asyncio.create_task(gate.check(CATASTROPHIC, FIELD))
    done, _ = await asyncio.wait([leaving], timeout=0.05)
    assert not done
    leaving.cancel()
    await gate.check(ANY_OBJECT, FIELD)
    with pytest.raises(InvalidRequest, match="unclosed"):
        await gate.check(Grammar(GrammarKind.REGEX, "(a"), FIELD)


async def test_grammars_at_once(gate: GrammarGate) -> None:
    grammars = [Grammar(GrammarKind.REGEX, "a" * size) for size in range(1, 21)]
    await asyncio.gather(*(gate.check(grammar, FIELD) for grammar in grammars))


async def test_closing_twice() -> None:
    gate = GrammarGate()
    await gate.close()
    await gate.check(ANY_OBJECT, FIELD)
    await gate.close()
    await gate.close()
