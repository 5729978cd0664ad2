"""Text swept through the whole cluster: every stop string, every cut, every split of a character.

The executor says the prompt back, so the answer of a prompt of token ids is known, and what must be told of it is
worked out here from the tokens alone. Each case is asked streamed and whole, of a pair and of one worker.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster_harness import Shape
from tests.echo_executor import echoing
from tests.faces import Answer, Faces, faces
from tests.gateway_server import COMPLETION
from tests.routed_cluster import routed_cluster
from tests.text_oracle import certain, first_stop, text_of
from tests.tokenizer_files import write_model
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.router.request import Delta
from twostroke.router.tokenizer import ModelTokenizer

TEXT = "naïve café 😀 日本語 aab aaab."
SIGNS = "é😀日本語🇩🇪👩‍👧"
LONGEST_STOP = 12
AT_ONCE = 64
WAYS = {"pair": 1, "local": 0}
"""Number of prefill workers."""
SHARE = {"pair": 1, "local": 4}
"""Text is the router's, who does not know who computes: one worker alone gets one case in so many."""


@dataclass(frozen=True)
class Case:
    tokens: tuple[int, ...]
    """What the model says, before its end token."""
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_choices: int = 1

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "fake", "prompt": list(self.tokens), "max_tokens": self.max_tokens}
        body |= {"temperature": 0, "n": self.num_choices, "ignore_eos": self.ignore_eos, "logprobs": 0}
        return {**body, "stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}

    @property
    def message(self) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            model="fake",
            token_ids=pb.TokenIds(ids=self.tokens),
            max_tokens=self.max_tokens,
            temperature=0,
            n=self.num_choices,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Expected:
    text: str
    finish: str
    num_tokens: int
    certain: tuple[str, ...]
    """The text that is certain after each number of tokens, from none on."""


class Judge:
    """Works out answers from bytes, in the plainest way."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self.end = tokenizer.end_token_ids[0]

    def expect(self, case: Case) -> Expected:
        ends = {*case.stop_token_ids} if case.ignore_eos else {*case.stop_token_ids, self.end}
        told = [""]
        said: list[int] = []
        for token in [*case.tokens, *([self.end] * case.max_tokens)][: case.max_tokens]:
            if token in ends:
                return self._ended(case, said, "stop", told, len(said) + 1)
            said.append(token)
            text = self.text(said, final=False)
            cut = first_stop(text, case.stop)
            if cut is not None:
                return Expected(text[:cut], "stop", len(said), (*told, text[:cut]))
            told.append(certain(text, case.stop))
        return self._ended(case, said, "length", told[:-1], len(said))

    def _ended(self, case: Case, said: list[int], finish: str, told: list[str], num: int) -> Expected:
        text = self.text(said, final=True)
        cut = first_stop(text, case.stop)
        text = text if cut is None else text[:cut]
        return Expected(text, finish, num, (*told, text))

    def text(self, tokens: Sequence[int], *, final: bool) -> str:
        return text_of([self._tokenizer.text_bytes(token) for token in tokens], final=final)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer(write_model(tmp_path_factory.mktemp("sweeps"), "byte_level"))


@asynccontextmanager
async def echoed(tokenizer: ModelTokenizer, way: str) -> AsyncIterator[Faces]:
    shape = Shape(prefill=WAYS[way], page_size=8, num_pages=2048, prefill_chunk=64, decode_chunk=128)
    make = echoing(shape.page_size, tokenizer.vocab_size, shape.max_positions, tokenizer.end_token_ids[0])
    async with (
        routed_cluster(shape, make_executor=make, decoders=tokenizer.text_decoders) as routed,
        faces(routed, tokenizer) as served,
    ):
        yield served


async def sweep(tokenizer: ModelTokenizer, way: str, cases: Sequence[Case]) -> None:
    """Every case over HTTP, streamed and whole, and every sixth over gRPC."""
    judge = Judge(tokenizer)
    expected = {case: judge.expect(case) for case in cases}
    room = asyncio.Semaphore(AT_ONCE)
    wrong: list[str] = []

    async def one(served: Faces, case: Case, form: str) -> None:
        async with room:
            if form == "grpc":
                answer = await served.grpc(case.message)
            else:
                options = {"stream": True, "stream_options": {"include_usage": True}} if form == "streamed" else {}
                answer = await served.http(COMPLETION, case.body | options)
        wrong.extend(f"{form}: {line}: {case}" for line in mistakes(answer, expected[case], case, form))

    async with echoed(tokenizer, way) as served, asyncio.TaskGroup() as group:
        for number, case in enumerate(cases):
            for form in ("streamed", "whole", *(("grpc",) if number % 6 == 0 else ())):
                group.create_task(one(served, case, form))
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} cases", *wrong[:20]])


def mistakes(answer: Answer, expected: Expected, case: Case, form: str) -> list[str]:
    if answer.status not in (200, "OK"):
        return [f"{answer.status} {answer.body}"]
    found = []
    for choice in answer.body["choices"]:
        finish = choice["finish_reason"]
        if (choice["text"], finish) != (expected.text, expected.finish):
            found.append(f"{choice['text']!r} {finish}, not {expected.text!r} {expected.finish}")
        if form != "grpc" and len(choice["logprobs"]["tokens"]) != expected.num_tokens:
            found.append(f"log-probabilities of {choice['logprobs']['tokens']}, not of {expected.num_tokens} tokens")
    if answer.body["usage"]["completion_tokens"] != expected.num_tokens * case.num_choices:
        found.append(f"usage {answer.body['usage']}, not {expected.num_tokens} tokens")
    return [*found, *delayed(answer, expected, case)]


def delayed(answer: Answer, expected: Expected, case: Case) -> list[str]:
    """Each item of the dispatcher's has the text that is certain by its tokens, no more and no less."""
    [items] = answer.items
    found = []
    for choice in range(case.num_choices):
        deltas = [item for item in items if isinstance(item, Delta) and item.choice == choice]
        text, num_tokens = "", 0
        for index, delta in enumerate(deltas):
            text += delta.text
            num_tokens += len(delta.token_ids)
            is_last = index == len(deltas) - 1
            wanted = expected.certain[num_tokens] if num_tokens < expected.num_tokens or is_last else text
            if text != wanted:
                found.append(f"{text!r} after {num_tokens} tokens, where {wanted!r} is certain")
    return found


def merged(tokenizer: ModelTokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def as_bytes(tokenizer: ModelTokenizer, data: bytes) -> tuple[int, ...]:
    """One token a byte."""
    by_bytes = {tokenizer.text_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    return tuple(by_bytes[bytes([value])] for value in data)


def substrings(text: str, longest: int) -> list[str]:
    lengths = range(1, longest + 1)
    return sorted({text[start : start + length] for start in range(len(text)) for length in lengths})


@pytest.mark.parametrize("way", WAYS)
async def test_every_substring_as_a_stop_string(tokenizer: ModelTokenizer, way: str) -> None:
    tokens, single = merged(tokenizer, TEXT), as_bytes(tokenizer, TEXT.encode())
    assert len(tokens) < len(single) / 2
    cases = [
        Case(single if number % 4 == 3 else tokens, 100, (stop,))
        for number, stop in enumerate(substrings(TEXT, LONGEST_STOP))
    ]
    assert len(cases) > 200
    await sweep(tokenizer, way, cases[:: SHARE[way]])


@pytest.mark.parametrize("way", WAYS)
async def test_answers_cut_at_every_token(tokenizer: ModelTokenizer, way: str) -> None:
    cases = [
        Case(tokens, max_tokens, stop)
        for tokens in (merged(tokenizer, TEXT), as_bytes(tokenizer, TEXT.encode()))
        for max_tokens in range(1, len(tokens) + 3)
        for stop in ((), ("caf", "日本x", "aab."))
    ]
    await sweep(tokenizer, way, cases[:: SHARE[way]])


@pytest.mark.parametrize("way", WAYS)
async def test_signs_split_at_every_byte(tokenizer: ModelTokenizer, way: str) -> None:
    data = SIGNS.encode()
    single = as_bytes(tokenizer, data)
    cases = []
    for cut in range(1, len(data)):
        # 1. the answer's length ends it there, 2. an end token, 3. a stop token, which an earlier byte may be
        cases += [Case(single, cut), Case(single[:cut], 100), Case(single, 100, stop_token_ids=(single[cut],))]
        # 4. two halves of a sign in two tokens, the rest as the tokenizer has it; 5. a piece of a sign is lost
        cases.append(Case(single[:cut] + merged(tokenizer, data[cut:].decode(errors="ignore")), 100))
        cases.append(Case(single[: cut - 1] + single[cut:], 100, ("語", "👧")))
    cases += [Case(single, 100, (stop,)) for stop in substrings(SIGNS, 3)]
    await sweep(tokenizer, way, cases[:: SHARE[way]])


@pytest.mark.parametrize("way", WAYS)
async def test_answers_that_end_with_their_first_or_second_token(tokenizer: ModelTokenizer, way: str) -> None:
    [end] = tokenizer.end_token_ids
    tokens = merged(tokenizer, TEXT)
    first, second = (tokenizer.text_bytes(token).decode() for token in tokens[:2])
    stops = [(), (first[-1],), (first, "x"), (second[-1],), (first[-1] + second[0],), (first + second + "x",)]
    cases = [
        Case(said, max_tokens, stop, stop_token_ids, ignore_eos, 1 + len(stop) % 2)
        for said in (tokens, (end, *tokens), (tokens[0], end, *tokens[1:]))
        for max_tokens in (1, 2)
        for stop in stops
        for stop_token_ids in ((), tokens[:1], tokens[1:2], (end,))
        for ignore_eos in ((False, True) if end in said else (False,))
    ]
    await sweep(tokenizer, way, cases[:: SHARE[way]])
