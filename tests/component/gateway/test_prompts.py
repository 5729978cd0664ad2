"""`/v1/completions` with several prompts, `n`, `echo` and `best_of`; by hand and by the official client."""

from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.gateway_server import COMPLETION, events, gateway
from tests.waiting import until
from twostroke.cluster.config import LimitsSection, RouterSection
from twostroke.cluster.core.errors import Overloaded, PeerLost

PROMPTS = ["One", "Two", "Three"]


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": PROMPTS, "n": 2, "max_tokens": 3, "echo": True, **changes}


EXPECTED = [text + answer for text in PROMPTS for answer in ("abc", "xyz")]
"""Choice j of prompt i is choice 2 i + j."""


@pytest.mark.parametrize("prompts", [PROMPTS, [list(text.encode()) for text in PROMPTS]], ids=["texts", "ids"])
async def test_choices_are_numbered_by_prompt_and_begin_with_it(prompts: object) -> None:
    async with gateway(answers=["abc", "xyz"]) as server:
        answer = (await server.post(COMPLETION, body(prompt=prompts))).json()
        sent = server.generator.submitted
        assert [bytes(request.prompt).decode() for request in sent] == PROMPTS
        assert len({request.request_id for request in sent}) == 3
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == EXPECTED
    assert answer["usage"]["prompt_tokens"] == len("".join(PROMPTS))
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["total_tokens"] == len("".join(PROMPTS)) + 18


async def test_streamed_the_choices_interleave_and_make_the_same_answer() -> None:
    async with gateway(answers=["abc", "xyz"]) as server:
        streamed = body(stream=True, stream_options={"include_usage": True})
        *chunks, last, done = events((await server.post(COMPLETION, streamed)).text)
        whole = (await server.post(COMPLETION, body())).json()
    assert done == "[DONE]"
    texts, ends = dict.fromkeys(range(6), ""), []
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert choice["index"] not in ends
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert [texts[index] for index in range(6)] == EXPECTED == [choice["text"] for choice in whole["choices"]]
    assert sorted(ends) == list(range(6))
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]


async def test_the_official_client() -> None:
    async with (
        gateway(answers=["abc", "xyz"]) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client,
    ):
        whole = await client.completions.create(model="fake", prompt=PROMPTS, n=2, max_tokens=3, echo=True, best_of=2)
        texts = dict.fromkeys(range(6), "")
        async for chunk in await client.completions.create(
            model="fake", prompt=PROMPTS, n=2, max_tokens=3, echo=True, stream=True
        ):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == EXPECTED == list(texts.values())
    assert whole.system_fingerprint
    assert whole.system_fingerprint.startswith("fp_")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("error", "status"), [(PeerLost("gone"), 502), (ZeroDivisionError("a bug"), 500)])
async def test_a_prompt_that_fails_fails_the_request_and_cancels_the_others(
    streamed: bool, error: Exception, status: int
) -> None:
    async with gateway(failure=error, concerns=lambda request: request.prompt == tuple(b"Two")) as server:
        server.generator.fail_at = 1
        answer = await server.post(COMPLETION, body(stream=streamed, max_tokens=100, ignore_eos=True))
        if streamed:
            assert answer.status_code == 200
            *chunks, last = events(answer.text)
            assert last["error"]["code"]
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        else:
            assert answer.status_code == status
        assert "a bug" not in answer.text
        await until(lambda: not server.generator.live)
        failed = server.generator.submitted[1].request_id
        others = {request.request_id for request in server.generator.submitted} - {failed}
        assert set(server.generator.cancelled) == others


async def test_a_prompt_that_is_refused_refuses_the_request() -> None:
    async with gateway(refusal=Overloaded("full"), concerns=lambda request: len(request.prompt) == 5) as server:
        answer = await server.post(COMPLETION, body(stream=True))
        assert answer.status_code == 429
        assert server.generator.cancelled == [request.request_id for request in server.generator.submitted]
        assert len(server.generator.cancelled) == 2


async def test_a_client_that_leaves_cancels_every_prompt() -> None:
    async with gateway(hold_at=1) as server:
        async with server.open(COMPLETION, body(stream=True)) as (reader, _):
            await reader.readuntil(b"\n\n")
            assert len(server.generator.live) == 3
        await until(lambda: len(server.generator.cancelled) == 3)


async def test_echo_comes_once_also_when_nothing_follows_and_is_not_cut_by_stop_strings() -> None:
    async with gateway(answers=[""]) as server:
        for streamed in (False, True):
            answer = await server.post(COMPLETION, body(prompt="One", n=1, stop="n", stream=streamed))
            if streamed:
                text = "".join(chunk["choices"][0]["text"] for chunk in events(answer.text)[:-1])
            else:
                text = answer.json()["choices"][0]["text"]
            assert text == "One"


async def test_the_number_of_choices_is_limited_over_all_prompts() -> None:
    async with gateway(RouterSection(limits=LimitsSection(max_choices=4))) as server:
        assert (await server.post(COMPLETION, body(prompt=["a", "b"]))).status_code == 200
        answer = await server.post(COMPLETION, body())
        assert answer.status_code == 400
        assert "at most 4" in answer.json()["error"]["message"]


async def test_best_of_shows_the_likeliest_and_counts_all() -> None:
    async with gateway(answers=["abc", "xyz"]) as server:
        answer = (await server.post(COMPLETION, body(n=1, best_of=4))).json()
        sent = server.generator.submitted
    assert [choice["text"] for choice in answer["choices"]] == ["Oneabc", "Twoabc", "Threeabc"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["logprobs"] is None and choice["finish_reason"] == "length" for choice in answer["choices"])
    assert [(request.num_choices, request.sampling.logprobs) for request in sent] == [(4, 0)] * 3
    assert answer["usage"]["completion_tokens"] == 3 * 4 * 3


async def test_best_of_with_log_probabilities_tells_those_of_the_shown() -> None:
    async with gateway(answers=["abc", "xyz"]) as server:
        answer = (await server.post(COMPLETION, body(prompt="One", n=2, best_of=3, logprobs=1, echo=False))).json()
    assert [choice["logprobs"]["tokens"] for choice in answer["choices"]] == [["a", "b", "c"], ["x", "y", "z"]]


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_output_at_all_scores_the_prompts(streamed: bool) -> None:
    asked = body(n=1, max_tokens=0, logprobs=1, stream=streamed)
    if streamed:
        asked["stream_options"] = {"include_usage": True}
    async with gateway(answers=["abc"]) as server:
        answer = await server.post(COMPLETION, asked)
    if streamed:
        *chunks, last, _ = events(answer.text)
        choices, usage = [chunk["choices"][0] for chunk in chunks], last["usage"]
    else:
        choices, usage = answer.json()["choices"], answer.json()["usage"]
    assert sorted((choice["index"], choice["text"], choice["finish_reason"]) for choice in choices) == [
        (index, text, "length") for index, text in enumerate(PROMPTS)
    ]
    for choice in choices:
        assert choice["logprobs"]["tokens"] == list(choice["text"])
        assert choice["logprobs"]["token_logprobs"][0] is None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 0)
