"""Answers that must follow a grammar, through prefill, hand-over and decode: they validate, and they are the same
tokens by whichever way they came: a pair, one worker, preempted, continued after a loss."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from tests.cluster_harness import Shape
from tests.greedy_reference import model_cluster, num_preemptions, shape_over
from tests.routed_cluster import Answer, RoutedCluster, read, routed_cluster
from tests.tiny_models import END_TOKEN, make_tiny_model
from twostroke.cluster.core.errors import DeadlineExceeded, InvalidRequest
from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.cluster.core.request import Phase
from twostroke.cluster.core.sampling import FinishReason
from twostroke.engine.fake_executor import FakeExecutor, FakeHandle
from twostroke.engine.plan import Plan, StepResult
from twostroke.engine.vocabulary import Vocabulary, byte_vocabulary, load_vocabulary

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "h\u00e9risson"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "more": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "at": {"type": ["null", "string"], "maxLength": 3}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "tags", "more"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), compact=True)
LONGEST = 200
"""Above the longest answer in tokens; each is at least a byte."""
END = 257
SEEDS = range(40)
FEW = range(8)
"""For models that compute."""
PROMPT = tuple(range(50, 87))
FAKE = Shape(vocab_size=258, num_pages=1024)
TIGHT = Shape(vocab_size=258, num_pages=1024, decode_pages=64)
ASKING: dict[str, Any] = {"temperature": 1.0, "end_token_ids": (END,), "grammar": GRAMMAR}


def text_of(answer: Answer, vocabulary: Vocabulary, choice: int = 0) -> str:
    assert answer.ends[choice].finish_reason is FinishReason.STOP
    return b"".join(vocabulary.token_bytes[token] for token in answer.tokens[choice]).decode()


def check(answer: Answer, vocabulary: Vocabulary) -> None:
    jsonschema.validate(json.loads(text_of(answer, vocabulary)), SCHEMA)


async def ask_all(routed: RoutedCluster, seeds: range = SEEDS, **params: Any) -> list[Answer]:
    asked = (routed.ask(PROMPT, LONGEST, **{**ASKING, "seed": seed, **params}) for seed in seeds)
    return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("shape", [FAKE, shape_over("grpc", vocab_size=258, num_pages=1024)], ids=["direct", "grpc"])
async def test_every_answer_validates(shape: Shape) -> None:
    async with routed_cluster(shape, vocabulary=byte_vocabulary()) as routed:
        answers = await ask_all(routed)
    for answer in answers:
        check(answer, byte_vocabulary())
    assert len({tuple(answer.tokens[0]) for answer in answers}) > len(SEEDS) / 2


async def test_every_way_gives_the_same() -> None:
    async with routed_cluster(FAKE, vocabulary=byte_vocabulary()) as routed:
        pair = [answer.tokens[0] for answer in await ask_all(routed)]
    local = Shape(prefill=0, vocab_size=258, num_pages=1024)
    async with routed_cluster(local, vocabulary=byte_vocabulary()) as routed:
        assert [answer.tokens[0] for answer in await ask_all(routed)] == pair
    async with routed_cluster(TIGHT, vocabulary=byte_vocabulary()) as routed:
        assert [answer.tokens[0] for answer in await ask_all(routed)] == pair
        assert num_preemptions(routed) > 0
    async with routed_cluster(Shape(prefill=2, decode=2, vocab_size=258), vocabulary=byte_vocabulary()) as routed:
        choices = await routed.ask(PROMPT, LONGEST, **ASKING, seed=0, num_choices=3)
        assert choices.tokens[0] == pair[0]
        for choice in range(3):
            jsonschema.validate(json.loads(text_of(choices, byte_vocabulary(), choice)), SCHEMA)


async def test_answers_go_on_in_their_grammar_after_a_lost_decode_worker() -> None:
    shape = Shape(prefill=2, decode=2, vocab_size=258, num_pages=1024, step_delay_s=0.002)
    async with routed_cluster(shape, vocabulary=byte_vocabulary(), max_continuations=64) as routed:
        requests = [routed.request(PROMPT, LONGEST, **ASKING, seed=seed) for seed in SEEDS]
        streams = [routed.dispatcher.submit(request) for request in requests]
        answers = [asyncio.create_task(read(stream)) for stream in streams]
        await routed.reach(requests[-1].request_id, Phase.DECODING)
        lost = routed.cluster.decode[0]
        await routed.cluster.lose(lost, "killed")
        after = await asyncio.gather(*answers)
        assert sum(answer.usage.attempts > 1 for answer in after) > 0
        for answer in after:
            check(answer, byte_vocabulary())
        again = await ask_all(routed)
        assert [answer.tokens[0] for answer in after] == [answer.tokens[0] for answer in again]


async def test_a_grammar_that_breaks_refuses_its_request_alone() -> None:
    # This vocabulary has no "b", which the grammar wants after two tokens.
    poor = Vocabulary([b"" if data == b"b" else data for data in byte_vocabulary().token_bytes])
    broken = Grammar(GrammarKind.REGEX, "aab")
    for shape in (FAKE, Shape(prefill=0, vocab_size=258)):
        async with routed_cluster(shape, vocabulary=poor) as routed:
            beside = asyncio.create_task(routed.ask(PROMPT, 30))
            with pytest.raises(InvalidRequest, match="grammar") as caught:
                await routed.ask(PROMPT, 30, **{**ASKING, "grammar": broken}, grammar_field="structured_outputs.regex")
            assert caught.value.field == "structured_outputs.regex"
            assert (await beside).tokens[0] == routed.golden(PROMPT, 30)


async def test_workers_whose_grammars_stand_in_line_are_asked_again() -> None:
    """Whoever waits in vain is told that its time was up, and nothing of an internal error."""
    async with routed_cluster(FAKE, vocabulary=byte_vocabulary()) as routed:
        desks = [node.worker.host.desk for node in routed.cluster.nodes]
        for desk in desks:
            desk.max_waiting = 0
        with pytest.raises(DeadlineExceeded):
            await routed.ask(PROMPT, LONGEST, **ASKING, time_left_s=0.3)
        waiting = asyncio.create_task(routed.ask(PROMPT, LONGEST, **ASKING))
        beside = await routed.ask(PROMPT, 30)
        assert beside.tokens[0] == routed.golden(PROMPT, 30)
        assert not waiting.done()
        for desk in desks:
            desk.max_waiting = 1
        check(await waiting, byte_vocabulary())


class Tardy(FakeExecutor):
    """One mask in three is late."""

    def launch(self, plan: Plan) -> FakeHandle:
        result = super().launch(plan).result()
        sampled = [row for row, item in enumerate(plan.sample) if item is not None]
        late = frozenset(row for row in sampled if self.random.random() < 0.3)
        tokens = [None if row in late else token for row, token in enumerate(result.tokens)]
        return FakeHandle(StepResult(tokens, late=late), 0.0)

    random = Random(3)


async def test_late_masks_change_no_answer() -> None:
    async with routed_cluster(FAKE, vocabulary=byte_vocabulary()) as routed:
        wanted = [answer.tokens[0] for answer in await ask_all(routed)]

    def make(num_pages: int) -> Tardy:
        return Tardy(num_pages, FAKE.page_size, FAKE.vocab_size, FAKE.max_positions)

    for shape in (FAKE, TIGHT):
        async with routed_cluster(shape, make_executor=make, vocabulary=byte_vocabulary()) as routed:
            assert [answer.tokens[0] for answer in await ask_all(routed)] == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3"])
async def test_a_tiny_model_follows_it_by_every_way(tmp_path: Path, family: str) -> None:
    directory = make_tiny_model(tmp_path / family, family)
    vocabulary = load_vocabulary(directory)
    asking = {"end_token_ids": (END_TOKEN,)}
    shapes = [Shape(num_pages=1024), Shape(num_pages=1024, decode_pages=64), Shape(prefill=0, num_pages=1024)]
    told: list[list[list[int]]] = []
    for shape in shapes:
        async with model_cluster(directory, shape, vocabulary=vocabulary) as routed:
            # Kernels are compiled in the first steps, which takes a busy machine its time.
            await read(routed.dispatcher.submit(routed.request(PROMPT, 2, time_left_s=60.0)), 60.0)
            answers = await ask_all(routed, FEW, **asking)
            greedy = await routed.ask(PROMPT, LONGEST, **{**ASKING, **asking, "temperature": 0.0})
        for answer in answers:
            check(answer, vocabulary)
        told.append([answer.tokens[0] for answer in (*answers, greedy)])
    assert told[0] == told[1] == told[2]
