"""Documented calls of the `openai` and `anthropic` packages by their synchronous clients, streaming helpers included.

The asynchronous clients are in test_openai_client, test_responses and test_messages.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.gateway_server import gateway
from twostroke.cluster.core.errors import Overloaded

ANSWER = "Hello, wörld! 🙂"
NUM_TOKENS = len(ANSWER.encode()) + 1
"""With the end token."""
HI: Any = [{"role": "user", "content": "Hi"}]


def the_models(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert client.models.retrieve(model.id) == model


def a_chat(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="fake", messages=HI)
    answer = raw.parse()
    assert answer.choices[0].message.content == ANSWER
    assert answer.id == f"chatcmpl-{raw.headers['x-request-id']}"
    named = client.chat.completions.create(model="fake", messages=HI, extra_headers={"x-request-id": "mine"})
    assert (named.id, named._request_id) == ("chatcmpl-mine", "mine")


def a_chat_streamed(client: OpenAI) -> None:
    with client.chat.completions.create(model="fake", messages=HI, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def a_chat_by_the_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=HI, logprobs=True, top_logprobs=1, stream_options={"include_usage": True}
    ) as stream:
        told = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    [choice] = final.choices
    assert told == choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or ()) == NUM_TOKENS
    assert final.usage is not None
    assert final.usage.completion_tokens == NUM_TOKENS


def a_completion(client: OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=3)
    assert [choice.text for choice in whole.choices] == ["aHel", "bHel"]
    stream = client.completions.create(model="fake", prompt="a", stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert last.usage is not None
    assert last.usage.completion_tokens == NUM_TOKENS


def a_response(client: OpenAI) -> None:
    first = client.responses.create(model="fake", instructions="Be brief.", input="Hi", store=False)
    assert (first.output_text, first.status) == (ANSWER, "completed")
    turns: Any = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "More"}]
    second = client.responses.create(model="fake", instructions="Be brief.", input=turns)
    counted = client.responses.input_tokens.count(model="fake", instructions="Be brief.", input=turns)
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    with client.responses.with_streaming_response.create(model="fake", input="Hi") as raw:
        assert raw.parse().output_text == ANSWER


def a_response_streamed(client: OpenAI) -> None:
    *_, last = client.responses.create(model="fake", input="Hi", stream=True)
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER


def a_response_by_the_helper(client: OpenAI) -> None:
    with client.responses.stream(model="fake", input="Hi") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == ANSWER


def a_message(client: Anthropic) -> None:
    raw = client.messages.with_raw_response.create(model="fake", max_tokens=100, messages=HI)
    message = raw.parse()
    assert message.id == f"msg_{raw.headers['request-id']}"
    turns: Any = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": "More"}]
    second = client.messages.create(model="fake", max_tokens=100, messages=turns, system="Be brief.")
    counted = client.messages.count_tokens(model="fake", messages=turns, system="Be brief.")
    assert counted.input_tokens == second.usage.input_tokens
    with client.messages.with_streaming_response.create(model="fake", max_tokens=100, messages=HI) as response:
        assert response.parse().content == message.content


def a_message_streamed(client: Anthropic) -> None:
    with client.messages.create(model="fake", max_tokens=100, messages=HI, stream=True) as stream:
        seen = list(stream)
    text = "".join(
        event.delta.text for event in seen if event.type == "content_block_delta" and event.delta.type == "text_delta"
    )
    assert text == ANSWER
    assert (seen[0].type, seen[-1].type) == ("message_start", "message_stop")


def a_message_by_the_helper(client: Anthropic) -> None:
    with client.messages.stream(model="fake", max_tokens=100, messages=HI) as stream:
        events = list(stream)
        assert stream.get_final_text() == ANSWER
        final = stream.get_final_message()
    assert [event.snapshot for event in events if event.type == "text"][-1] == ANSWER
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", NUM_TOKENS)
    with client.messages.stream(model="fake", max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream) == ANSWER
    with client.messages.stream(model="fake", max_tokens=100, messages=HI) as stream:
        stream.until_done()
        assert stream.current_message_snapshot.content == final.content


OPENAI: list[Callable[[OpenAI], None]] = [
    *(the_models, a_chat, a_chat_streamed, a_chat_by_the_helper, a_completion),
    *(a_response, a_response_streamed, a_response_by_the_helper),
]
ANTHROPIC: list[Callable[[Anthropic], None]] = [a_message, a_message_streamed, a_message_by_the_helper]


@pytest.mark.parametrize("call", OPENAI)
async def test_openai(call: Callable[[OpenAI], None]) -> None:
    def run(url: str) -> None:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as client:
            call(client)

    async with gateway(answers=[ANSWER]) as server:
        await asyncio.to_thread(run, server.url)


@pytest.mark.parametrize("call", ANTHROPIC)
async def test_anthropic(call: Callable[[Anthropic], None]) -> None:
    def run(url: str) -> None:
        with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
            call(client)

    async with gateway(answers=[ANSWER]) as server:
        await asyncio.to_thread(run, server.url)


async def test_the_clients_own_retries() -> None:
    def run(url: str) -> list[str]:
        with (
            OpenAI(base_url=f"{url}/v1", api_key="none", timeout=10) as openai,
            Anthropic(base_url=url, api_key="none", timeout=10) as anthropic,
        ):
            response = openai.responses.create(model="fake", input="Hi")
            server.generator.num_refusals = 1
            message = anthropic.messages.create(model="fake", max_tokens=100, messages=HI)
        return [response.output_text, *(block.text for block in message.content if block.type == "text")]

    async with gateway(answers=[ANSWER], refusal=Overloaded("full", 0.1), num_refusals=1) as server:
        assert await asyncio.to_thread(run, server.url) == [ANSWER, ANSWER]
        assert server.generator.num_refusals == 0
