"""The official client, streaming and not, against the gateway; the synchronous one is in test_synchronous_clients."""

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError

from tests.gateway_server import gateway
from twostroke.cluster.core.errors import Overloaded

ANSWER = "Hello, wörld! 🙂"


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10)


async def test_chat_whole() -> None:
    async with gateway(answers=[ANSWER]) as server, client_of(server.url) as client:
        answer = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=100, seed=7
        )
        request = server.generator.submitted[0]
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert answer.usage.completion_tokens == len(ANSWER.encode()) + 1  # the end token
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id == f"chatcmpl-{request.request_id}"
    assert answer._request_id == request.request_id
    assert (request.sampling.seed, request.sampling.max_tokens, request.sampling.temperature) == (7, 100, 1.0)


async def test_chat_streamed_equals_whole_for_every_choice() -> None:
    async with gateway(answers=[ANSWER, "Servus.", ""]) as server, client_of(server.url) as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "Hi"}],
            n=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, roles, finishes, usage = dict.fromkeys(range(3), ""), [], {}, None
        async for chunk in stream:
            assert chunk.choices or chunk.usage
            usage = chunk.usage
            for choice in chunk.choices:
                assert choice.index not in finishes
                texts[choice.index] += choice.delta.content or ""
                roles += [(choice.index, choice.delta.role)] if choice.delta.role else []
                if choice.finish_reason:
                    finishes[choice.index] = choice.finish_reason
        whole = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}], n=3)
    assert texts == {0: ANSWER, 1: "Servus.", 2: ""}
    assert sorted(roles) == [(0, "assistant"), (1, "assistant"), (2, "assistant")]
    assert finishes == dict.fromkeys(range(3), "stop")
    assert {choice.index: choice.message.content for choice in whole.choices} == texts
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


async def test_completions() -> None:
    async with gateway(answers=["abcdef"]) as server, client_of(server.url) as client:
        whole = await client.completions.create(model="fake", prompt="Once", max_tokens=3)
        stream = await client.completions.create(model="fake", prompt=[[79, 110, 99, 101]], max_tokens=3, stream=True)
        chunks = [chunk async for chunk in stream]
        assert server.generator.submitted[0].prompt == server.generator.submitted[1].prompt == tuple(b"Once")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("abc", "length")
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]
    assert all(chunk.usage is None for chunk in chunks)


async def test_the_streaming_helper() -> None:
    async with gateway(answers=[ANSWER]) as server, client_of(server.url) as client:
        async with client.chat.completions.stream(
            model="fake", messages=[{"role": "user", "content": "Hi"}], stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        raw = await client.chat.completions.with_raw_response.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}]
        )
    whole = raw.parse()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.content == whole.choices[0].message.content == ANSWER
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


async def test_errors_reach_the_client_as_its_own_kinds() -> None:
    async with gateway() as server, client_of(server.url) as client:
        with pytest.raises(BadRequestError) as bad:
            await client.completions.create(model="fake", prompt="x", temperature=3)
        assert (bad.value.param, bad.value.code, bad.value.type) == (
            "temperature",
            "invalid_request",
            "invalid_request_error",
        )
        with pytest.raises(NotFoundError) as unknown:
            await client.completions.create(model="other", prompt="x")
        assert unknown.value.code == "model_not_found"
        server.generator.refusal = Overloaded("the queue is full", 2.5)
        with pytest.raises(RateLimitError) as full:
            await client.completions.create(model="fake", prompt="x", stream=True)
        assert full.value.response.headers["retry-after"] == "3"
        server.generator.refusal, server.generator.model = None, None
        with pytest.raises(APIStatusError) as absent:
            await client.completions.create(model="fake", prompt="x")
        assert absent.value.status_code == 503
        assert int(absent.value.response.headers["retry-after"]) >= 1
