"""One answer by every way: a prefill/decode pair and one local worker say the same, field by field, for every
combination of parameters, over both HTTP endpoints and gRPC, streamed and whole.

The combinations are `tests.combinations`'. All that were selected are asked at once, of one cluster of each kind;
then each is judged by itself.
"""

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.answer_differences import differences
from tests.combinations import CONTEXT, FACES_DIFFER, VALUES, Combination, all_combinations
from tests.faces import Answer
from tests.greedy_reference import TRANSPORTS
from tests.mode_answers import CALLS, LOCAL, Answers, answers_by, num_asked
from tests.tiny_models import make_tiny_model
from twostroke.engine.model.source import default_cache_dir, resolve

pytestmark = pytest.mark.timeout(600)
"""The first test of a way waits for all its answers: under a minute on two cores, minutes on a busy machine."""
COMBINATIONS = all_combinations()
TIMES = {combination.name: num_asked(index) for index, combination in enumerate(COMBINATIONS)}
DRAWN = [combination for combination in COMBINATIONS if combination.name.startswith("drawn")]
DEMO_DRAWN = [one for one in DRAWN[::8] if one.params.get("tools") not in ("auto", "strict")]
"""The demo model's chat template tells of no tools: it can only be made to call one."""
SAMPLE = 8
"""Transports other than loopback get one combination in so many."""
TINY = {"page_size": 4, "num_pages": 1 << 15, "prefill_chunk": 16}
"""Room for all that is asked: what is asked again must find its prompt cached."""
DEMO = {"page_size": 16, "num_pages": 1024, "prefill_chunk": 128, "message_bytes": 1 << 20}
REFUSALS = (400, 404, "INVALID_ARGUMENT", "NOT_FOUND", "cannot be said")
EXCLUSIVE = {
    ("max_tokens", "min_tokens"),
    ("response_format", "structured_outputs"),
    ("structured_outputs", "tools"),
    *product(("min_tokens", "ignore_eos"), ("response_format", "structured_outputs", "tools")),
}
"""Pairs of parameters that are refused with some of their values."""


@dataclass
class Modes:
    """Answers of one model by every way, each way asked when it is first needed; the local worker beside the others."""

    directory: Path
    pool: Mapping[str, Any]
    selected: Mapping[str, list[Combination]]
    """What the session's tests need of each transport."""
    beside: ProcessPoolExecutor
    _answers: dict[str, Answers] = field(default_factory=dict)
    _local: "Future[Answers] | None" = None

    def pair(self, transport: str) -> Answers:
        if self._local is None:
            needed = {one.name: one for some in self.selected.values() for one in some}
            self._local = self.beside.submit(answers_by, self.directory, LOCAL, timed(needed.values()), self.pool)
        if transport not in self._answers:
            self._answers[transport] = answers_by(self.directory, transport, timed(self.selected[transport]), self.pool)
        return self._answers[transport]

    def local(self) -> Answers:
        assert self._local is not None
        return self._local.result()


def timed(needed: Iterable[Combination]) -> list[tuple[Combination, int]]:
    return [(combination, TIMES[combination.name]) for combination in needed]


def modes_of(directory: Path, pool: Mapping[str, Any], request: pytest.FixtureRequest) -> Iterator[Modes]:
    selected: dict[str, list[Combination]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and request.fixturename in item.fixturenames and hasattr(item, "callspec"):
            params = item.callspec.params
            selected.setdefault(params["transport"], []).append(params["combination"])
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as beside:
        yield Modes(directory, pool, selected, beside)


@pytest.fixture(scope="module")
def tiny_modes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Modes]:
    directory = make_tiny_model(tmp_path_factory.mktemp("modes"), "qwen3", max_positions=CONTEXT, packable=True)
    yield from modes_of(directory, TINY, request)


@pytest.fixture(scope="module")
def demo_modes(request: pytest.FixtureRequest) -> Iterator[Modes]:
    yield from modes_of(resolve("demo", default_cache_dir(), print), DEMO, request)


def cells() -> list[Any]:
    found = []
    for transport, (index, combination) in product(TRANSPORTS, enumerate(COMBINATIONS)):
        in_sample = transport == "loopback" or index % SAMPLE == 0
        marks = () if in_sample else pytest.mark.slow
        found.append(pytest.param(transport, combination, marks=marks, id=f"{transport}-{combination}"))
    return found


def test_every_pair_of_values_is_there() -> None:
    assert len([one for one in COMBINATIONS if not is_refused(one)]) >= 120
    assert len({combination.name for combination in COMBINATIONS}) == len(COMBINATIONS)
    for one, other in combinations(VALUES, 2):
        if (one, other) in EXCLUSIVE:
            continue
        for value, by in product(VALUES[one], VALUES[other]):
            assert any(
                combination.params.get(one) == value and combination.params.get(other) == by for combination in DRAWN
            ), (one, value, other, by)


@pytest.mark.parametrize(("transport", "combination"), cells())
def test_a_pair_answers_as_one_worker(tiny_modes: Modes, transport: str, combination: Combination) -> None:
    check(tiny_modes, transport, combination)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["grpc"])
@pytest.mark.parametrize("combination", DEMO_DRAWN, ids=str)
def test_so_does_a_pair_with_the_demo_model(demo_modes: Modes, transport: str, combination: Combination) -> None:
    check(demo_modes, transport, combination)


# ----------------------------------------------------------------------------------------------------- the judge


def check(modes: Modes, transport: str, combination: Combination) -> None:
    pair, local = modes.pair(transport), modes.local()
    mistakes: list[str] = []
    for (face, form), before in product(CALLS, range(TIMES[combination.name])):
        one, other = (answers[combination.name, (face, form), before] for answers in (pair, local))
        told = f"{face} {form}{', again' if before else ''}"
        found = [
            *differences(comparable(one, combination), comparable(other, combination)),
            *wrong_status(combination, one),
            *wrong_usage(combination, one),
        ]
        if before:
            first = comparable(pair[combination.name, (face, form), 0], combination, cached=False)
            found += [f"at first: {line}" for line in differences(first, comparable(one, combination, cached=False))]
        mistakes += [f"{told}: {line}" for line in found]
    mistakes += [*unlike_streams(combination, pair), *unlike_grpc(combination, pair)]
    assert not mistakes, "\n".join([f"{combination}: {combination.described}", *mistakes])


def comparable(answer: Answer, combination: Combination, *, cached: bool = True) -> dict[str, Any]:
    """All of it, but for what depends on what others had left in the cache."""
    body = dict(answer.body)
    usage = body.get("usage")
    if usage and (not cached or combination.params.get("cache") == "shared"):
        body["usage"] = {
            name: usage[name] for name in usage if "_tokens_details" not in name and name != "cached_tokens"
        }
    return {"status": answer.status, "body": body, "tokens": answer.tokens}


def is_refused(combination: Combination) -> bool:
    return combination.name.startswith(("refused", "over"))


def wrong_status(combination: Combination, answer: Answer) -> Iterator[str]:
    wanted = REFUSALS if is_refused(combination) else (200, "OK")
    if answer.status not in wanted and combination.name not in FACES_DIFFER:
        yield f"{answer.status} {answer.body}"


def wrong_usage(combination: Combination, answer: Answer) -> Iterator[str]:
    """Usage counts the tokens that the dispatcher delivered."""
    usage = answer.body.get("usage")
    if usage and combination.name not in FACES_DIFFER and usage["completion_tokens"] != sum(map(len, answer.tokens)):
        yield f"{usage} is told of {answer.tokens}"


def unlike_streams(combination: Combination, answers: Answers) -> Iterator[str]:
    """A stream put together is the whole answer."""
    for face in ("chat", "completions"):
        stream, whole = (
            comparable(answers[combination.name, (face, form), 0], combination) for form in ("streamed", "whole")
        )
        body, expected = stream["body"], dict(whole["body"])
        expected.pop("prompt_logprobs", None)
        if "choices" in expected:
            choices = expected["choices"]
            expected["choices"] = [
                {name: choice[name] for name in choice if name != "prompt_logprobs"} for choice in choices
            ]
        if body.get("usage") is None:
            body.pop("usage", None)
            expected.pop("usage", None)
        if stream["status"] == whole["status"] == 200:
            yield from (f"{face}, streamed and whole: {line}" for line in differences(body, expected))
            yield from (
                f"{face}, streamed and whole: {line}" for line in differences(stream["tokens"], whole["tokens"])
            )


def unlike_grpc(combination: Combination, answers: Answers) -> Iterator[str]:
    """gRPC says what HTTP says, where both were asked the same."""
    for form, face in (("streamed", "chat"), ("whole", "completions")):
        answer, other = answers[combination.name, ("grpc", form), 0], answers[combination.name, (face, "whole"), 0]
        # gRPC takes one prompt; HTTP's chats have no best_of.
        alike = "best_of" not in combination.params if face == "chat" else combination.params.get("prompt") != "two"
        if not alike or answer.status != "OK" or other.status != 200:
            continue
        # An echo is HTTP's alone.
        told = ("reasoning", "calls", "finish_reason", *(() if "echo" in combination.params else ("text",)))
        said = [{name: choice[name] for name in told} for choice in answer.body["choices"]]
        wanted = [{name: http_said(choice)[name] for name in told} for choice in other.body["choices"]]
        found = [*differences(answer.tokens, other.tokens), *differences(said, wanted)]
        yield from (f"gRPC and {face}: {line}" for line in found)


def http_said(choice: Mapping[str, Any]) -> dict[str, Any]:
    """As `grpc_chats.GrpcChoice` has it."""
    message = choice.get("message", {})
    return {
        "text": choice["text"] if "text" in choice else message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [call["function"] for call in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
    }
