"""An answer in parts is the answer: every combination of parameters, cut by an output budget again and again and gone
on with, says field by field what it says uncut: text, token ids, log-probabilities, finish reason, usage.

Each combination is asked by one face in one form, in turn; all at once, of one pair.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.answer_differences import differences
from tests.combinations import CONTEXT, DEFAULT_MAX_TOKENS, Combination, all_combinations, grpc_request, http_body
from tests.faces import Answer, Faces, extend, faces
from tests.gateway_server import CHAT, COMPLETION
from tests.greedy_reference import model_cluster, shape_over
from tests.mode_answers import AT_ONCE, CALLS, Call
from tests.tiny_models import make_tiny_model
from twostroke.cluster.config import BudgetSection
from twostroke.engine.vocabulary import load_vocabulary
from twostroke.router.tokenizer import ModelTokenizer

pytestmark = pytest.mark.timeout(600)
BUDGETS = (1, 3, 16)
LONG = 14
"""Tokens of an answer that is cut by the largest budget only."""
COMBINATIONS = [
    combination
    for combination in all_combinations()
    if combination.params.get("tools", "none") == "none"
    and combination.params.get("best_of", 0) <= combination.params.get("n", 1)
    and not combination.name.startswith("refused")
]
"""Calls are not gone on with, nor a choice among more."""


def call_of(index: int) -> Call:
    return CALLS[index % len(CALLS)]


def budget_of(combination: Combination, index: int) -> int:
    is_long = combination.params.get("max_tokens", DEFAULT_MAX_TOKENS) > LONG or "context" in combination.name
    return BUDGETS[2] if is_long else BUDGETS[index // len(CALLS) % 2]


class Asker:
    """One combination by one call, at once or in parts."""

    def __init__(self, combination: Combination, call: Call) -> None:
        face, form = call
        self._path = {"chat": CHAT, "completions": COMPLETION}.get(face)
        self._as_chat = form == "streamed"
        self._combination = combination

    async def ask(self, served: Faces, continuation: str | None = None, prompt: int = 0) -> Answer:
        if self._path is None:
            request = grpc_request(self._combination, as_chat=self._as_chat)
            request.continuation = continuation or ""
            return await served.grpc(request)
        body = http_body(self._combination, self._path, self._as_chat)
        if continuation is not None and isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], str):
            body["prompt"] = body["prompt"][prompt]
        return await served.http(self._path, {**body, "continuation": continuation})

    async def in_parts(self, served: Faces) -> tuple[Answer, list[list[int]], int]:
        """All joined as one answer, its token ids, and how many parts there were."""
        first = await self.ask(served)
        tokens, num_parts = first.tokens, 1
        per_prompt = self._combination.params.get("n", 1)
        for number, choice in enumerate(first.body.get("choices", ())):
            while (continuation := choice.pop("continuation", None)) is not None:
                part = await self.ask(served, continuation, number // per_prompt)
                assert part.status in (200, "OK"), part
                num_parts += 1
                [more] = part.body["choices"]
                join(choice, more, number % per_prompt)
                tokens[number] += part.tokens[0]
                if usage := first.body.get("usage"):
                    usage["completion_tokens"] += part.body["usage"]["completion_tokens"]
                    if len(tokens) == per_prompt:
                        assert part.body["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        return first, tokens, num_parts


def join(choice: dict[str, Any], more: Mapping[str, Any], index: int) -> None:
    """Go on with a choice of the first part."""
    assert more.get("index", index) == index
    if "message" in choice:
        choice["message"]["content"] += more["message"]["content"]
    else:
        choice["text"] += more["text"]
    if isinstance(choice["logprobs"], list):  # gRPC's
        choice["logprobs"] += more["logprobs"]
        choice["token_ids"] += more["token_ids"]
        choice["completion_tokens"] += more["completion_tokens"]
    elif choice["logprobs"] is not None:
        choice["logprobs"] = extend(choice["logprobs"], more["logprobs"])
    choice["finish_reason"] = more["finish_reason"]
    if "continuation" in more:
        choice["continuation"] = more["continuation"]


def comparable(answer: Answer) -> dict[str, Any]:
    """Without what depends on what is cached, and on which of the totals a sum can tell."""
    body = dict(answer.body)
    if usage := body.get("usage"):
        body["usage"] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return {"status": answer.status, "body": body}


async def compare_all(directory: Path, share: int) -> tuple[list[str], int]:
    """What is wrong of one combination in `share`, and how many parts there were in all."""
    tokenizer, vocabulary = ModelTokenizer(directory), load_vocabulary(directory)
    shape = shape_over("loopback", page_size=4, num_pages=1 << 15, prefill_chunk=16)
    room, wrong, parts = asyncio.Semaphore(AT_ONCE), list[str](), list[int]()
    config: dict[str, Any] = {"default_max_tokens": DEFAULT_MAX_TOKENS}

    async def one(uncut_by: Faces, cut_by: Faces, combination: Combination, call: Call) -> None:
        asker = Asker(combination, call)
        async with room:
            uncut = await asker.ask(uncut_by)
            joined, tokens, num_parts = await asker.in_parts(cut_by)
        parts.append(num_parts)
        for line in [*differences(comparable(joined), comparable(uncut)), *differences(tokens, uncut.tokens)]:
            wrong.append(f"{combination}, {call}, {num_parts} parts: {line}: {combination.described}")

    def budgeted(tokens: int) -> dict[str, Any]:
        return {**config, "budget": BudgetSection(output_tokens=tokens)}

    async with (
        model_cluster(directory, shape, "auto", decoders=tokenizer.text_decoders, vocabulary=vocabulary) as routed,
        faces(routed, tokenizer, **config) as uncut_by,
        faces(routed, tokenizer, **budgeted(BUDGETS[0])) as by_1,
        faces(routed, tokenizer, **budgeted(BUDGETS[1])) as by_3,
        faces(routed, tokenizer, **budgeted(BUDGETS[2])) as by_16,
        asyncio.TaskGroup() as group,
    ):
        cutting = dict(zip(BUDGETS, (by_1, by_3, by_16), strict=True))
        for index, combination in enumerate(COMBINATIONS[::share]):
            group.create_task(one(uncut_by, cutting[budget_of(combination, index)], combination, call_of(index)))
    return wrong, sum(parts)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("parts"), "qwen3", max_positions=CONTEXT, packable=True)


@pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_an_answer_in_parts_is_the_answer(directory: Path, share: int) -> None:
    wrong, num_parts = asyncio.run(compare_all(directory, share))
    assert num_parts > 2 * len(COMBINATIONS[::share])
    assert not wrong, "\n".join([f"{len(wrong)} mistakes", *wrong[:20]])
