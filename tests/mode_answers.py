"""Every combination asked of one cluster over every face: what the mode-equivalence suite compares.

`answers_by` runs a cluster of its own from beginning to end, so that a test may have two of them on two cores.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tests.cluster_harness import Shape
from tests.combinations import DEFAULT_MAX_TOKENS, Combination, grpc_request, http_body
from tests.faces import Answer, Faces, faces
from tests.gateway_server import CHAT, COMPLETION
from tests.greedy_reference import model_cluster, shape_over
from twostroke.engine.vocabulary import load_vocabulary
from twostroke.router.tokenizer import ModelTokenizer

Call = tuple[str, str]
CALLS: tuple[Call, ...] = tuple(product(("chat", "completions", "grpc"), ("streamed", "whole")))
"""gRPC always streams: there `whole` is a raw prompt, and `streamed` is a chat."""
Answers = dict[tuple[str, Call, int], Answer]
"""By name of the combination, call, and how often it was asked before."""
LOCAL = "local"
AT_ONCE = 64
AGAIN = 6
"""One combination in so many is asked twice, and finds its own prompt cached."""


def num_asked(index: int) -> int:
    return 2 if index % AGAIN == 0 else 1


async def ask(served: Faces, combination: Combination, call: Call) -> Answer:
    face, form = call
    if face == "grpc":
        try:
            request = grpc_request(combination, as_chat=form == "streamed")
        except ValueError:
            return Answer("cannot be said", {})
        return await served.grpc(request)
    path = CHAT if face == "chat" else COMPLETION
    return await served.http(path, http_body(combination, path, form == "streamed"))


async def _ask_all(
    directory: Path, way: str, asked: Sequence[tuple[Combination, int]], pool: Mapping[str, Any]
) -> Answers:
    shape = Shape(prefill=0, **pool) if way == LOCAL else shape_over(way, **pool)
    tokenizer, vocabulary = ModelTokenizer(directory), load_vocabulary(directory)
    room = asyncio.Semaphore(AT_ONCE)
    answers: Answers = {}

    async def one(served: Faces, combination: Combination, call: Call, times: int) -> None:
        async with room:
            for before in range(times):
                answers[combination.name, call, before] = await ask(served, combination, call)

    async with (
        model_cluster(directory, shape, "auto", decoders=tokenizer.text_decoders, vocabulary=vocabulary) as routed,
        faces(routed, tokenizer, default_max_tokens=DEFAULT_MAX_TOKENS) as served,
        asyncio.TaskGroup() as group,
    ):
        for (combination, times), call in product(asked, CALLS):
            group.create_task(one(served, combination, call, times))
    return answers


def answers_by(directory: Path, way: str, asked: Sequence[tuple[Combination, int]], pool: Mapping[str, Any]) -> Answers:
    """Combinations and how often to ask each, all at once. `way` is a transport of a pair, or LOCAL; `pool` changes
    the Shape.
    """
    return asyncio.run(_ask_all(directory, way, asked, pool))
