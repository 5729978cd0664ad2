"""`/v1/messages` as Anthropic's own client sees it, whole and streamed, its errors, and counting tokens."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import (
    APIStatusError,
    AsyncAnthropic,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)
from pydantic import BaseModel

from tests.gateway_server import events_of, gateway
from twostroke.cluster.core.errors import Overloaded, PeerLost

ANSWER = "Hello, wörld! 🙂"
PATH = "/v1/messages"
HI: Any = [{"role": "user", "content": "Hi"}]


def client_of(url: str) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=10)


async def read_into(pieces: list[str], texts: AsyncIterator[str]) -> None:
    async for text in texts:
        pieces.append(text)


async def test_create_whole() -> None:
    async with gateway(answers=[ANSWER]) as server, client_of(server.url) as client:
        message = await client.messages.create(
            model="fake",
            max_tokens=100,
            system="Be brief.",
            messages=HI,
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
        )
        request = server.generator.submitted[0]
    assert (message.role, message.type, message.model) == ("assistant", "message", "fake")
    assert (message.id, message._request_id) == (f"msg_{request.request_id}", request.request_id)
    [block] = message.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(request.prompt), len(ANSWER.encode()) + 1)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (100, 0.5, 0.9, 7)


@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        pytest.param({"max_tokens": 3}, "abc", "max_tokens", None, id="length"),
        pytest.param({"stop_sequences": ["x", "de", "cde"]}, "ab", "stop_sequence", "cde", id="the longest stop"),
        pytest.param({"stop_sequences": ["x"]}, "abcdef", "end_turn", None, id="no stop met"),
        pytest.param({"stop_sequences": ["f"]}, "abcde", "stop_sequence", "f", id="a stop at the end"),
    ],
)
async def test_why_it_stopped(fields: dict[str, Any], text: str, reason: str, sequence: str | None) -> None:
    async with gateway(answers=["abcdef"]) as server, client_of(server.url) as client:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 50, "messages": HI, **fields}
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            told = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
    assert [block.text for block in message.content if block.type == "text"] == [text]
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert told == text
    assert (final.stop_reason, final.stop_sequence) == (reason, sequence)
    assert final.usage.output_tokens == message.usage.output_tokens


async def test_the_prompt_is_the_one_of_chat_completions() -> None:
    async with gateway() as server, client_of(server.url) as client:
        await client.messages.create(
            model="fake",
            max_tokens=5,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c"},
                {"role": "user", "content": "d"},
            ],
        )
        chat = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ]
        await server.post("/v1/chat/completions", {"model": "fake", "messages": chat})
        as_messages, as_chat = server.generator.submitted
    assert as_messages.prompt == as_chat.prompt


async def test_a_begun_answer_is_gone_on_with() -> None:
    async with gateway() as server, client_of(server.url) as client:
        begun: Any = [*HI, {"role": "assistant", "content": "The answer is"}]
        await client.messages.create(model="fake", max_tokens=5, messages=begun)
        chat = {"model": "fake", "messages": begun, "continue_final_message": True}
        await server.post("/v1/chat/completions", chat)
        as_messages, as_chat = server.generator.submitted
    assert bytes(as_messages.prompt[-13:]) == b"The answer is"
    assert as_messages.prompt == as_chat.prompt


async def test_events_come_in_order() -> None:
    async with gateway(answers=["abcdef"]) as server:
        response = await server.post(PATH, {"model": "fake", "max_tokens": 50, "messages": HI, "stream": True})
        request = server.generator.submitted[0]
    seen = events_of(response.text)
    assert all(data["type"] == name for name, data in seen)
    kinds = [name for name, _ in seen]
    num_deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = seen[0][1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"] == {
        "input_tokens": len(request.prompt),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }


async def test_cached_tokens_are_told_apart() -> None:
    async with gateway() as server, client_of(server.url) as client:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 50, "system": "x" * 40, "messages": HI}
        await client.messages.create(**asked)
        message = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        num_prompt = len(server.generator.submitted[0].prompt)
    cached = (num_prompt - 1) // 16 * 16
    for usage in (message.usage, final.usage):
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (num_prompt - cached, cached)


async def test_the_events_without_the_helper() -> None:
    async with gateway(answers=[ANSWER]) as server, client_of(server.url) as client:
        stream = await client.messages.create(model="fake", max_tokens=100, messages=HI, stream=True)
        seen = [event async for event in stream]
        async with client.messages.stream(model="fake", max_tokens=100, messages=HI) as helper:
            assert await helper.get_final_text() == ANSWER
            snapshot = helper.current_message_snapshot
    deltas = [event.delta for event in seen if event.type == "content_block_delta"]
    assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == ANSWER
    [last] = [event for event in seen if event.type == "message_delta"]
    assert (last.delta.stop_reason, last.usage.output_tokens) == ("end_turn", snapshot.usage.output_tokens)


class Boat(BaseModel):
    name: str
    size: int


async def test_a_schema_is_enforced_and_the_helpers_read_the_answer() -> None:
    answer = '{"name": "Ada", "size": 3}'
    async with gateway(answers=[answer]) as server, client_of(server.url) as client:
        parsed = await client.messages.parse(model="fake", max_tokens=50, messages=HI, output_format=Boat)
        async with client.messages.stream(model="fake", max_tokens=50, messages=HI, output_format=Boat) as stream:
            final = await stream.get_final_message()
        first, second = (request.sampling.grammar for request in server.generator.submitted)
    assert parsed.parsed_output == final.parsed_output == Boat(name="Ada", size=3)
    assert first == second
    assert first is not None
    assert "size" in first.text


async def test_count_tokens_counts_what_create_reads() -> None:
    async with gateway() as server, client_of(server.url) as client:
        counted = await client.messages.count_tokens(model="fake", system="Be brief.", messages=HI)
        assert not server.generator.submitted
        message = await client.messages.create(model="fake", max_tokens=5, system="Be brief.", messages=HI)
    assert counted.input_tokens == message.usage.input_tokens


async def test_a_failure_on_the_way_reaches_the_client() -> None:
    async with gateway(answers=["abcdef"], failure=PeerLost("gone"), fail_at=3) as server:
        async with (
            client_of(server.url) as client,
            client.messages.stream(model="fake", max_tokens=50, messages=HI) as stream,
        ):
            pieces: list[str] = []
            with pytest.raises(APIStatusError, match="gone"):
                await read_into(pieces, stream.text_stream)
        raw = await server.post(PATH, {"model": "fake", "max_tokens": 50, "messages": HI, "stream": True})
        whole = await server.post(PATH, {"model": "fake", "max_tokens": 50, "messages": HI})
    assert "".join(pieces) == "abc"
    name, data = events_of(raw.text)[-1]
    assert (name, data["type"], data["error"]["type"], data["error"]["code"]) == (
        "error",
        "error",
        "api_error",
        "peer_lost",
    )
    assert whole.status_code == 502
    assert whole.json()["error"]["type"] == "api_error"


async def test_a_client_that_leaves_cancels() -> None:
    async with gateway(answers=["abcdef"], hold_at=2) as server, client_of(server.url) as client:
        async with client.messages.stream(model="fake", max_tokens=50, messages=HI) as stream:
            async for _ in stream.text_stream:
                break
        await server.until_cancelled(1)


async def test_errors_are_the_clients_own_kinds() -> None:
    async with gateway() as server, client_of(server.url) as client:
        with pytest.raises(BadRequestError, match="temperature"):
            await client.messages.create(model="fake", max_tokens=5, messages=HI, extra_body={"temperature": 3})
        with pytest.raises(NotFoundError) as unknown:
            await client.messages.create(model="other", max_tokens=5, messages=HI)
        assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        server.generator.refusal = Overloaded("the queue is full", 2.5)
        with pytest.raises(RateLimitError) as full:
            await client.messages.create(model="fake", max_tokens=5, messages=HI)
        assert full.value.response.headers["retry-after"] == "3"
        server.generator.refusal, server.generator.model = None, None
        with pytest.raises(InternalServerError) as absent:
            await client.messages.create(model="fake", max_tokens=5, messages=HI)
        assert absent.value.status_code == 503


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"max_tokens": None}, "max_tokens", id="max_tokens is required"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="too few tokens"),
        pytest.param({"max_tokens": 1000}, "max_tokens", id="over the context"),
        pytest.param({"stop_sequences": "x"}, "stop_sequences", id="stop's type"),
        pytest.param({"stop_sequences": ["x", ""]}, "stop_sequences[1]", id="empty stop"),
        pytest.param({"stop_sequences": ["x", 5]}, "stop_sequences[1]", id="a stop's type"),
        pytest.param({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", id="thinking"),
        pytest.param({"messages": []}, "messages", id="no message"),
        pytest.param({"messages": "Hi"}, "messages", id="messages' type"),
        pytest.param({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role", id="role"),
        pytest.param({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", id="image"),
        pytest.param({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", id="content"),
        pytest.param({"system": 5}, "system", id="system"),
        pytest.param({"output_config": {"effort": "low"}}, "output_config.effort", id="effort"),
        pytest.param(
            {"output_config": {"format": {"type": "text"}}}, "output_config.format.type", id="a format's type"
        ),
        pytest.param(
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema",
            id="a schema that cannot be enforced",
        ),
        pytest.param({"system": [IMAGE]}, "system[0].type", id="an image in system"),
        pytest.param({"nonsense": 1}, "nonsense", id="unknown"),
    ],
)
async def test_what_is_refused_names_its_field(fields: dict[str, Any], param: str) -> None:
    async with gateway() as server:
        response = await server.post(PATH, {"model": "fake", "max_tokens": 5, "messages": HI, **fields})
    assert response.status_code == 400
    body = response.json()
    assert (body["type"], body["error"]["type"], body["error"]["param"]) == ("error", "invalid_request_error", param)
    assert param in body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"]


async def test_what_http_refuses_has_the_form_too() -> None:
    async with gateway() as server:
        unknown = await server.client.post(f"{PATH}/nowhere")
        method = await server.client.get(PATH)
        bad_id = await server.post(PATH, {}, x_request_id="x" * 200)
        no_json = await server.client.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert [answer.status_code for answer in (unknown, method, bad_id, no_json)] == [404, 405, 400, 400]
    assert {answer.json()["type"] for answer in (unknown, method, bad_id, no_json)} == {"error"}
    assert unknown.json()["error"]["type"] == "not_found_error"
