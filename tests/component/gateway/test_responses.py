"""`/v1/responses` as the official client sees it, whole and streamed, and what it refuses."""

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, RateLimitError
from pydantic import BaseModel

from tests.gateway_server import events_of, gateway
from twostroke.cluster.core.errors import Overloaded, PeerLost

ANSWER = "Hello, wörld! 🙂"
PATH = "/v1/responses"


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10)


async def test_create_whole() -> None:
    async with gateway(answers=[ANSWER]) as server, client_of(server.url) as client:
        response = await client.responses.create(
            model="fake",
            instructions="Be brief.",
            input="Hi",
            max_output_tokens=100,
            temperature=0.5,
            top_p=0.9,
            metadata={"run": "7"},
            store=False,
        )
        request = server.generator.submitted[0]
    assert (response.output_text, response.status, response.error) == (ANSWER, "completed", None)
    assert (response.id, response.model) == (f"resp_{request.request_id}", "fake")
    assert (response.instructions, response.metadata, response.store) == ("Be brief.", {"run": "7"}, False)
    assert (response.max_output_tokens, response.temperature, response.top_p) == (100, 0.5, 0.9)
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_p) == (100, 0.5, 0.9)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(request.prompt), len(ANSWER.encode()) + 1)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 0


async def test_the_prompt_is_the_one_of_chat_completions() -> None:
    async with gateway() as server, client_of(server.url) as client:
        first = await client.responses.create(model="fake", input="Hi", instructions="Be brief.")
        turns: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            *[item.model_dump() for item in first.output],
            {"role": "user", "content": "More"},
        ]
        await client.responses.create(model="fake", input=turns)
        await client.chat.completions.create(
            model="fake",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "More"},
            ],
        )
        _, as_items, as_chat = server.generator.submitted
    assert as_items.prompt == as_chat.prompt


async def test_an_answer_that_was_cut_is_incomplete() -> None:
    async with gateway(answers=["abcdef"]) as server, client_of(server.url) as client:
        response = await client.responses.create(model="fake", input="Hi", max_output_tokens=3)
    assert (response.output_text, response.status) == ("abc", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(("max_tokens", "last"), [(100, "response.completed"), (3, "response.incomplete")])
async def test_events_come_in_order_and_are_numbered(max_tokens: int, last: str) -> None:
    async with gateway(answers=["abcdef"]) as server, client_of(server.url) as client:
        stream = await client.responses.create(model="fake", input="Hi", max_output_tokens=max_tokens, stream=True)
        seen = [event async for event in stream]
    kinds = [event.type for event in seen]
    num_deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        last,
    ]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == "abcdef"[:max_tokens]
    assert [event.text for event in seen if event.type == "response.output_text.done"] == [text]


async def test_the_streaming_helper_ends_with_the_whole_response() -> None:
    async with gateway(answers=[ANSWER]) as server, client_of(server.url) as client:
        async with client.responses.stream(model="fake", input="Hi") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        whole = await client.responses.create(model="fake", input="Hi")
    assert final.output_text == whole.output_text == ANSWER
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_logprobs_are_those_of_a_chat() -> None:
    async with gateway(answers=[ANSWER]) as server, client_of(server.url) as client:
        asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        response = await client.responses.create(model="fake", input="Hi", **asked)
        stream = await client.responses.create(model="fake", input="Hi", stream=True, **asked)
        seen = [event async for event in stream]
        chat = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
        )
    assert chat.choices[0].logprobs is not None
    expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content or ()]
    whole = response.output[0].model_dump()["content"][0]["logprobs"]
    deltas = [event.logprobs for event in seen if event.type == "response.output_text.delta"]
    [done] = [event for event in seen if event.type == "response.output_text.done"]
    assert response.top_logprobs == 2
    assert whole == expected
    assert [entry.token for entry in done.logprobs] == [entry["token"] for entry in expected]
    # The end token's has no text to go with.
    assert [entry.token for entries in deltas for entry in entries] == [entry["token"] for entry in expected[:-1]]


class Boat(BaseModel):
    name: str
    size: int


async def test_a_form_is_that_of_a_chat_and_the_helpers_read_it() -> None:
    answer = '{"name": "Ada", "size": 3}'
    async with gateway(answers=[answer]) as server, client_of(server.url) as client:
        parsed = await client.responses.parse(model="fake", input="Hi", text_format=Boat)
        async with client.responses.stream(model="fake", input="Hi", text_format=Boat) as stream:
            final = await stream.get_final_response()
        await client.chat.completions.parse(
            model="fake", messages=[{"role": "user", "content": "Hi"}], response_format=Boat
        )
        plain = await client.responses.create(model="fake", input="Hi", text={"format": {"type": "text"}})
        *of_responses, of_chat, of_text = (request.sampling.grammar for request in server.generator.submitted)
    assert parsed.output_parsed == final.output_parsed == Boat(name="Ada", size=3)
    assert of_chat is not None
    assert of_responses == [of_chat, of_chat]
    assert of_text is None
    assert parsed.text is not None
    assert plain.text is not None
    assert (parsed.text.format.type, plain.text.format.type) == ("json_schema", "text")  # type: ignore[union-attr]


async def test_input_tokens_counts_what_create_reads() -> None:
    async with gateway() as server, client_of(server.url) as client:
        counted = await client.responses.input_tokens.count(model="fake", input="Hi", instructions="Be brief.")
        assert not server.generator.submitted
        response = await client.responses.create(model="fake", input="Hi", instructions="Be brief.")
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


async def test_a_failure_on_the_way_is_the_last_event() -> None:
    async with gateway(answers=["abcdef"], failure=PeerLost("gone"), fail_at=3) as server:
        async with client_of(server.url) as client:
            stream = await client.responses.create(model="fake", input="Hi", stream=True)
            seen = [event async for event in stream]
        raw = await server.post(PATH, {"model": "fake", "input": "Hi"})
    last = seen[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "gone")
    assert last.response.output_text == "abc"
    assert (raw.status_code, raw.json()["error"]["code"]) == (502, "peer_lost")


async def test_a_client_that_leaves_cancels() -> None:
    async with gateway(answers=["abcdef"], hold_at=2) as server, client_of(server.url) as client:
        stream = await client.responses.create(model="fake", input="Hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await server.until_cancelled(1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"store": True}, "store", id="store"),
        pytest.param({"previous_response_id": "resp_1"}, "previous_response_id", id="previous"),
        pytest.param({"conversation": "conv_1"}, "conversation", id="conversation"),
        pytest.param({"tools": [{"type": "web_search"}]}, "tools[0].type", id="tools"),
        pytest.param({"background": True}, "background", id="background"),
        pytest.param({"max_output_tokens": 0}, "max_output_tokens", id="too few tokens"),
        pytest.param({"max_output_tokens": 1000}, "max_output_tokens", id="over the context"),
        pytest.param({"temperature": 3}, "temperature", id="range"),
        pytest.param({"temperature": "1"}, "temperature", id="type"),
        pytest.param({"input": 5}, "input", id="input's type"),
        pytest.param({"input": []}, "input", id="no input"),
        pytest.param({"input": "x" * 600}, "input", id="too long"),
        pytest.param({"input": [3]}, "input[0]", id="an item"),
        pytest.param({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", id="a reference"),
        pytest.param({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", id="role"),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            id="image",
        ),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "nonsense": 1}]}]},
            "input[0].content[0].nonsense",
            id="a part's field",
        ),
        pytest.param({"text": 5}, "text", id="text"),
        pytest.param({"text": {"verbosity": "low"}}, "text.verbosity", id="verbosity"),
        pytest.param({"text": {"format": {"type": "xml"}}}, "text.format.type", id="a format's type"),
        pytest.param({"text": {"format": {"type": "json_schema"}}}, "text.format.name", id="a format's name"),
        pytest.param(
            {"text": {"format": {"type": "json_schema", "name": "it", "schema": {"not": {}}}}},
            "text.format.schema",
            id="a schema that cannot be enforced",
        ),
        pytest.param({"metadata": {"a": 1}}, "metadata.a", id="metadata"),
        pytest.param({"include": ["file_search_call.results"]}, "include[0]", id="include"),
        pytest.param({"include": [{}]}, "include[0]", id="include's type"),
        pytest.param({"include": "x"}, "include", id="include no list"),
        pytest.param({"top_logprobs": 2}, "top_logprobs", id="top_logprobs alone"),
        pytest.param({"stream_options": {"include_obfuscation": False}}, "stream_options", id="stream options"),
        pytest.param({"nonsense": 1}, "nonsense", id="unknown"),
    ],
)
async def test_what_is_refused_names_its_field(fields: dict[str, Any], param: str) -> None:
    async with gateway() as server:
        response = await server.post(PATH, {"model": "fake", "input": "Hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_errors_are_the_clients_own_kinds() -> None:
    async with gateway() as server, client_of(server.url) as client:
        with pytest.raises(BadRequestError) as bad:
            await client.responses.create(model="fake", input="Hi", previous_response_id="resp_1")
        assert bad.value.param == "previous_response_id"
        server.generator.refusal = Overloaded("the queue is full", 2.5)
        with pytest.raises(RateLimitError) as full:
            await client.responses.create(model="fake", input="Hi", stream=True)
        assert full.value.response.headers["retry-after"] == "3"


async def test_the_report_comes_when_asked_for() -> None:
    async with gateway() as server:
        whole = await server.post(PATH, {"model": "fake", "input": "Hi"}, x_twostroke_report="1")
        streamed = await server.post(PATH, {"model": "fake", "input": "Hi", "stream": True}, x_twostroke_report="1")
    assert whole.json()["twostroke"]["decode_ms"] == 6.0
    assert events_of(streamed.text)[-1][1]["response"]["twostroke"]["decode_ms"] == 6.0
