"""What goes over the wire: framing, usage, failures, and clients that go away."""

import asyncio
import socket
from typing import Any

import pytest

from tests.gateway_server import CHAT, COMPLETION, TIMEOUT_S, events, gateway
from tests.waiting import until
from twostroke.cluster.core.errors import Overloaded, PeerLost, TwostrokeError, Unavailable
from twostroke.router.request import RequestReport

ASK: dict[str, Any] = {"model": "fake", "prompt": "Once", "max_tokens": 4}
ASK_CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


async def test_a_stream_byte_for_byte() -> None:
    async with gateway(answers=["ab"]) as server:
        response = await server.post(CHAT, {**ASK_CHAT, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    request_id = response.headers["x-request-id"]
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{request_id}"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)


async def test_over_a_raw_socket_events_come_one_by_one() -> None:
    """Each event is readable before the next token exists: nothing is held back by buffers."""
    async with (
        gateway(answers=["abc"], hold_at=1) as server,
        server.open(COMPLETION, {**ASK, "stream": True}) as (reader, _),
        asyncio.timeout(TIMEOUT_S),
    ):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"transfer-encoding: chunked" in head.lower()
        first = await reader.readuntil(b"\n\n")
        assert b'"text":"a"' in first
        server.generator.release()
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert b"data: [DONE]" in rest


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_unless_it_is_asked_for(options: object) -> None:
    async with gateway() as server:
        answer = await server.post(CHAT, {**ASK_CHAT, "stream": True, "stream_options": options})
    chunks = events(answer.text)[:-1]
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_usage_comes_last_without_choices_and_equals_the_whole_answers() -> None:
    async with gateway() as server:
        body = {**ASK_CHAT, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = events((await server.post(CHAT, body)).text)
        whole = (await server.post(CHAT, ASK_CHAT)).json()
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # the same prompt again
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_report_comes_with_its_header_only(streamed: bool) -> None:
    async with gateway() as server:
        plain = await server.post(COMPLETION, {**ASK, "stream": streamed})
        answer = await server.post(COMPLETION, {**ASK, "stream": streamed}, x_twostroke_report="1")
    assert "twostroke" not in plain.text
    last = events(answer.text)[-2] if streamed else answer.json()
    assert set(last["twostroke"]) == set(RequestReport.__dataclass_fields__)
    assert last["twostroke"]["finish_reasons"] == ["length"]
    assert last["usage"]["completion_tokens"] == 4
    if streamed:
        assert last["choices"] == []
        assert not any("usage" in chunk for chunk in events(answer.text)[:-2])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status"), [(PeerLost("gone"), 502), (Unavailable("none", 4), 503), (ZeroDivisionError("a bug"), 500)]
)
async def test_an_early_failure_has_a_status(streamed: bool, error: Exception, status: int) -> None:
    async with gateway(failure=error, fail_at=0) as server:
        answer = await server.post(CHAT, {**ASK_CHAT, "stream": streamed})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == (error.code if isinstance(error, TwostrokeError) else "internal")
    assert "a bug" not in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)


async def test_a_failure_in_a_stream_is_an_event_and_the_end() -> None:
    async with gateway(failure=PeerLost("both workers died"), fail_at=2) as server:
        answer = await server.post(CHAT, {**ASK_CHAT, "stream": True, "stream_options": {"include_usage": True}})
        assert answer.status_code == 200
        *chunks, last = events(answer.text)
        assert last == {
            "error": {"message": "both workers died", "type": "server_error", "param": None, "code": "peer_lost"}
        }
        assert len(chunks) == 2
        assert all(chunk["choices"][0]["finish_reason"] is None and chunk["usage"] is None for chunk in chunks)
        # The raw connection ends too, properly.
        raw = await server.raw(CHAT, {**ASK_CHAT, "stream": True})
        assert raw.endswith(b"\n\n\r\n0\r\n\r\n")


async def test_the_deadline_of_the_request() -> None:
    async with gateway(hold_at=0) as server:
        answer = await server.post(COMPLETION, {**ASK, "timeout": 0.05})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_client_that_goes_away_cancels_in_every_phase(streamed: bool, hold_at: int) -> None:
    async with gateway(hold_at=hold_at) as server:
        async with server.open(CHAT, {**ASK_CHAT, "stream": streamed}) as (reader, _):
            await until(lambda: bool(server.generator.live))
            if streamed and hold_at:
                async with asyncio.timeout(TIMEOUT_S):
                    await reader.readuntil(b"\n\n")
        await until(lambda: bool(server.generator.cancelled))
        assert server.generator.cancelled == [server.generator.submitted[0].request_id]
        assert not server.generator.live


async def test_cancelled_by_id_elsewhere() -> None:
    async with (
        gateway(hold_at=1) as server,
        server.open(CHAT, {**ASK_CHAT, "stream": True}) as (reader, _),
        asyncio.timeout(TIMEOUT_S),
    ):
        await reader.readuntil(b"\n\n")
        assert server.generator.cancel(server.generator.submitted[0].request_id)
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert b'"code":"cancelled"' in rest
        assert b"finish_reason" not in rest
        assert b"[DONE]" not in rest


async def test_small_writes_are_not_delayed() -> None:
    async with gateway(hold_at=0) as server:
        async with server.open(CHAT, {**ASK_CHAT, "stream": True}):
            await until(lambda: bool(server.generator.live))
            [connection] = server.server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await until(lambda: not server.generator.live)


async def test_stop_strings_are_cut_alike_streamed_and_not() -> None:
    text = "The naïve café 🙂 serves tea."
    async with gateway(answers=[text]) as server:
        for stop in ("é", "café", "🙂", "s t", ".", "nothing of it"):
            body = {"model": "fake", "prompt": "x", "stop": [stop]}
            whole = (await server.post(COMPLETION, body)).json()["choices"][0]
            chunks = events((await server.post(COMPLETION, {**body, "stream": True})).text)[:-1]
            assert whole["text"] == text.split(stop)[0]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
            assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_refusal_on_submit_is_answered() -> None:
    async with gateway(refusal=Overloaded("full", 7)) as server:
        answer = await server.post(CHAT, {**ASK_CHAT, "stream": True})
    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 7
