"""The demo model through prefill, hand-over and decode against `transformers`: 20 prompts of 64 tokens, all at once."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.greedy_reference import check_greedy, model_cluster, shape_over
from tests.routed_cluster import read
from twostroke.cluster.stream import Timing
from twostroke.engine.model.source import default_cache_dir, resolve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 64
SUBJECTS = (
    "the moon",
    "bread",
    "a sonnet about rain",
    "prime numbers",
    "why the sky is blue, in three short steps, for a child of six who likes to ask further questions",
    "Paris",
    "photosynthesis",
    "the French revolution and its causes",
    "how to boil an egg",
    "gravity",
    "a list of five fruits",
    "the number 7",
    "Python's list comprehensions, with an example",
    "tea",
    "the water cycle. Name every stage and say what happens in it. " * 4,
    "volcanoes",
    "chess openings",
    "what a transformer is",
    "sleep",
    "the Pacific ocean and the countries around it",
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve("demo", default_cache_dir(), print)


def prompts(directory: Path) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [f"<|im_start|>user\nTell me about {of}<|im_end|>\n<|im_start|>assistant\n" for of in SUBJECTS]
    return [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


@pytest.mark.parametrize(
    ("transport", "linear"), [("grpc", "float32"), ("collective", "float32"), ("grpc", "packed_fp16")]
)
async def test_greedy_tokens_equal_transformers(directory: Path, transport: str, linear: str) -> None:
    shape = shape_over(
        transport, page_size=16, num_pages=256, prefill_chunk=128, message_bytes=1 << 20, timing=Timing()
    )
    asked = prompts(directory)
    async with model_cluster(directory, shape, linear) as routed:
        requests = [routed.request(prompt, NUM_TOKENS, time_left_s=200.0) for prompt in asked]
        answers = await asyncio.gather(*(read(routed.dispatcher.submit(request), 200.0) for request in requests))
    assert {answer.usage.transport for answer in answers} == {transport}
    outputs = [answer.tokens[0] for answer in answers]
    gaps = check_greedy(directory, list(zip(asked, outputs, strict=True)), NUM_TOKENS)
    print(f"{transport}, {linear}: {len(asked) - len(gaps)} of {len(asked)} equal, near-ties {gaps}")
