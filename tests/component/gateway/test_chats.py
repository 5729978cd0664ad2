"""Chat options, system prompts, ids and fingerprints of answers."""

from typing import Any

import pytest
from openai import AsyncOpenAI
from structlog.testing import capture_logs

from tests.gateway_server import CHAT, COMPLETION, gateway
from twostroke.cluster.core.errors import Overloaded
from twostroke.router.tokenizer import ByteTokenizer

BEGIN, END = ByteTokenizer.BEGIN, ByteTokenizer.END
USER = {"role": "user", "content": "Hi"}
START = {"role": "assistant", "content": "Hello th"}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": messages or [USER], "max_tokens": 2, **fields}


async def prompts(*bodies: dict[str, Any]) -> list[tuple[int, ...]]:
    async with gateway() as server:
        for wanted in bodies:
            answer = await server.post(CHAT, wanted)
            assert answer.status_code == 200, answer.text
        return [request.prompt for request in server.generator.submitted]


async def test_where_the_prompt_ends() -> None:
    plain, without, going_on, said = await prompts(
        body(USER, START),
        body(USER, START, add_generation_prompt=False),
        body(USER, START, continue_final_message=True),
        body(USER, START, continue_final_message=True, add_generation_prompt=False),
    )
    turns = (BEGIN, *b"user\nHi", END, BEGIN, *b"assistant\nHello th")
    assert plain == (*turns, END, BEGIN, *b"assistant\n")
    assert without == (*turns, END)
    assert going_on == said == turns


async def test_a_developer_speaks_as_the_system_and_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    one, other = await prompts(
        body({"role": "developer", "content": parts}, USER), body({"role": "system", "content": "be\nbrief"}, USER)
    )
    assert one == other


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "refusal"])
async def test_parts_that_are_no_text_are_refused_by_their_place(kind: str) -> None:
    async with gateway() as server:
        content = [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "data:,x"}}]
        error = (await server.post(CHAT, body({"role": "user", "content": content}))).json()["error"]
    assert error["param"] == "messages[0].content[1].type"
    assert kind in error["message"]


async def test_what_clients_send_along_is_taken() -> None:
    await prompts(
        body(
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="default",
            parallel_tool_calls=True,
            prompt_cache_key="k",
            safety_identifier="s",
            chat_template_kwargs={"enable_thinking": False, "deep": {"a": [1, "x"]}},
            priority=5,
            cache_salt="mine",
            echo=False,
        )
    )


async def test_the_fingerprint_is_the_same_everywhere_and_the_id_is_the_clients() -> None:
    async with (
        gateway() as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client,
    ):
        whole = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}])
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            extra_headers={"x-request-id": "job-7"},
        )
        chunks = [chunk async for chunk in stream]
        completion = await client.completions.create(model="fake", prompt="Hi")
    marks = {whole.system_fingerprint, completion.system_fingerprint, *(chunk.system_fingerprint for chunk in chunks)}
    assert len(marks) == 1
    assert {chunk.id for chunk in chunks} == {"chatcmpl-job-7"}
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


async def test_two_live_requests_may_have_one_id() -> None:
    async with gateway(answers=["Hello"], hold_at=1) as server:
        ask = {"model": "fake", "prompt": "x", "stream": True}
        async with (
            server.open(COMPLETION, ask, "x-request-id: same") as (one, _),
            server.open(COMPLETION, ask, "x-request-id: same") as (other, _),
        ):
            for reader in (one, other):
                assert b"x-request-id: same" in await reader.readuntil(b"\r\n\r\n")
            assert len(server.generator.live) == 2
            server.generator.release()
            for reader in (one, other):
                assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")


async def test_the_line_of_a_refused_request_has_the_clients_id() -> None:
    async with gateway(refusal=Overloaded("full")) as server:
        with capture_logs() as logs:
            await server.post(CHAT, body(), x_request_id="job-7")
    [line] = [entry for entry in logs if entry["event"] == "request"]
    assert (line["client_request_id"], line["outcome"], line["endpoint"]) == ("job-7", "overloaded", CHAT)
