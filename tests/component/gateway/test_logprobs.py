"""Log-probabilities, echo and bias over HTTP and gRPC: their forms, whole and streamed, and in the official client."""

from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.component.gateway.test_grpc_api import Api, Context, ask
from tests.gateway_server import CHAT, COMPLETION, Gateway, events, gateway
from twostroke.proto.v1 import inference_pb2 as pb

ASK: dict[str, Any] = {"model": "fake", "prompt": "Once"}
ASK_CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = "hé!"
TOKENS = ["h", "bytes:\\xc3", "bytes:\\xa9", "!", "<end>"]


async def whole(server: Gateway, path: str, **body: Any) -> dict[str, Any]:
    answer = await server.post(path, {**(ASK if path == COMPLETION else ASK_CHAT), **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def streamed(server: Gateway, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await server.post(path, {**(ASK if path == COMPLETION else ASK_CHAT), **body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [chunk["choices"][0] for chunk in events(answer.text)[:-1]]


async def test_chat_tells_every_token_that_usage_counts() -> None:
    async with gateway(answers=[TEXT]) as server:
        answer = await whole(server, CHAT, logprobs=True, top_logprobs=2)
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert [entry["token"] for entry in content] == TOKENS
    assert content[1]["bytes"] == [0xC3]
    assert content[0] == {
        "token": "h",
        "logprob": -0.25,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.25, "bytes": [104]},
            {"token": "i", "logprob": -0.5, "bytes": [105]},
        ],
    }


async def test_chat_without_alternatives_and_without_any() -> None:
    async with gateway(answers=[TEXT]) as server:
        told = (await whole(server, CHAT, logprobs=True))["choices"][0]["logprobs"]["content"]
        assert (await whole(server, CHAT, logprobs=False, top_logprobs=0))["choices"][0]["logprobs"] is None
    assert [entry["top_logprobs"] for entry in told] == [[]] * len(TOKENS)


async def test_streamed_ones_come_with_the_text_of_their_token() -> None:
    async with gateway(answers=["héabcd"]) as server:
        chunks = await streamed(server, CHAT, logprobs=True, stop="bX")
    told = [
        (
            chunk["delta"].get("content"),
            chunk["finish_reason"],
            chunk["logprobs"] and [entry["token"] for entry in chunk["logprobs"]["content"]],
        )
        for chunk in chunks
    ]
    assert told == [
        ("h", None, ["h"]),
        ("é", None, ["bytes:\\xc3", "bytes:\\xa9"]),
        ("a", None, ["a"]),
        ("bc", None, ["b", "c"]),  # b could have begun the stop string
        ("d", None, ["d"]),
        (None, "stop", ["<end>"]),
    ]


@pytest.mark.parametrize("stop", [None, "bc", "d", "é"])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_streamed_equals_whole(path: str, stop: str | None) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    async with gateway(answers=["aé bcd"]) as server:
        want = (await whole(server, path, **asked, stop=stop, max_tokens=6))["choices"][0]["logprobs"]
        chunks = await streamed(server, path, **asked, stop=stop, max_tokens=6)
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    for name in ("content",) if path == CHAT else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts for entry in part[name]] == want[name]


async def test_completions_have_columns() -> None:
    async with gateway(answers=[TEXT]) as server:
        told = (await whole(server, COMPLETION, logprobs=1))["choices"][0]["logprobs"]
        none = (await whole(server, COMPLETION, logprobs=0))["choices"][0]["logprobs"]
    assert told["tokens"] == TOKENS
    assert told["token_logprobs"] == [-0.25] * 5
    assert told["top_logprobs"][0] == {"h": -0.25}
    assert told["text_offset"] == [0, 1, 1, 2, 3]
    assert none["top_logprobs"] == [{token: -0.25} for token in TOKENS]


@pytest.mark.parametrize("prompt", ["Once", list(b"Once")])
async def test_an_echo_begins_text_and_columns(prompt: object) -> None:
    async with gateway(answers=["ab", "c"]) as server:
        answer = await whole(server, COMPLETION, prompt=prompt, echo=True, logprobs=1, n=2)
        plain = await whole(server, COMPLETION, prompt=prompt, echo=True)
        chunks = await streamed(server, COMPLETION, prompt=prompt, echo=True, logprobs=1)
    first, second = answer["choices"]
    assert (first["text"], second["text"], plain["choices"][0]["text"]) == ("Onceab", "Oncec", "Onceab")
    assert plain["choices"][0]["logprobs"] is None
    assert first["logprobs"]["tokens"] == ["O", "n", "c", "e", "a", "b", "<end>"]
    assert second["logprobs"]["tokens"] == ["O", "n", "c", "e", "c", "<end>"]
    assert first["logprobs"]["token_logprobs"] == [None] + [-0.25] * 6
    assert first["logprobs"]["top_logprobs"][0] is None
    assert first["logprobs"]["text_offset"] == list(range(7))
    assert "prompt_logprobs" not in first
    assert "".join(chunk["text"] for chunk in chunks) == "Onceab"
    assert chunks[0]["text"] == "Oncea"
    parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    assert [token for part in parts for token in part["tokens"]] == first["logprobs"]["tokens"]
    assert [offset for part in parts for offset in part["text_offset"]] == list(range(7))


async def test_prompt_logprobs_as_vllm_has_them() -> None:
    async with gateway(answers=["x"]) as server:
        completion = await whole(server, COMPLETION, prompt_logprobs=2, n=2)
        chat = await whole(server, CHAT, prompt_logprobs=0)
        echoed = await whole(server, COMPLETION, prompt_logprobs=1, echo=True, logprobs=3)
        request = server.generator.submitted[1]
    for choice in completion["choices"]:
        told = choice["prompt_logprobs"]
        assert told[0] is None
        assert told[1] == {
            str(ord("n")): {"logprob": -0.25, "rank": 1, "decoded_token": "n"},
            str(ord("o")): {"logprob": -0.5, "rank": 2, "decoded_token": "o"},
        }
        assert len(told) == 4
        assert choice["logprobs"] is None
    assert len(chat["prompt_logprobs"]) == len(request.prompt)
    assert "prompt_logprobs" not in chat["choices"][0]
    [choice] = echoed["choices"]
    assert len(choice["prompt_logprobs"][1]) == 1
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3


async def test_a_bias_reaches_the_sampler() -> None:
    async with gateway() as server:
        await whole(server, CHAT, logit_bias={"5": 1.5, "257": -100})
        [request] = server.generator.submitted
    assert request.sampling.logit_bias == ((5, 1.5), (257, -100.0))


async def test_the_official_client_reads_them() -> None:
    async with (
        gateway(answers=[TEXT]) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client,
    ):
        create = client.chat.completions.create
        chat = await create(**ASK_CHAT, logprobs=True, top_logprobs=1, logit_bias={"5": 1})
        told = chat.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert [entry.token for entry in told.content] == TOKENS
        assert bytes(value for entry in told.content[:4] for value in entry.bytes or ()).decode() == TEXT
        seen: list[str] = []
        async for chunk in await create(**ASK_CHAT, logprobs=True, top_logprobs=1, stream=True):
            part = chunk.choices[0].logprobs
            seen += [entry.token for entry in part.content or ()] if part is not None else []
        assert seen == TOKENS
        completion = await client.completions.create(**ASK, logprobs=2, echo=True)
        columns = completion.choices[0].logprobs
        assert columns is not None
        assert columns.tokens is not None
        assert columns.top_logprobs is not None
        assert columns.tokens[4:] == TOKENS
        assert columns.top_logprobs[4] == {"h": -0.25, "i": -0.5}
        seen = []
        async for text in await client.completions.create(**ASK, logprobs=2, stream=True):
            columns = text.choices[0].logprobs
            seen += columns.tokens or [] if columns is not None else []
        assert seen == TOKENS


# ------------------------------------------------------------------------------------------------- gRPC


async def test_grpc_tells_them_beside_token_ids() -> None:
    api = Api()
    api.generator.answers = [TEXT]
    asked = ask(logprobs=1, prompt_logprobs=0, logit_bias={5: 2.5})
    items = [item async for item in api.servicer.Generate(asked, Context())]  # type: ignore[arg-type]
    assert [item.WhichOneof("item") for item in items[:3]] == ["accepted", "prompt_logprobs", "delta"]
    prompt = items[1].prompt_logprobs.logprobs
    assert [value.token.token for value in prompt] == [b"e", b"l", b"l", b"o"]
    assert not prompt[0].top
    deltas = [item.delta for item in items if item.WhichOneof("item") == "delta"]
    told = [value for delta in deltas for value in delta.logprobs]
    assert [value.token.token_id for value in told] == [token for delta in deltas for token in delta.token_ids]
    assert [value.token.token for value in told] == [b"h", b"\xc3", b"\xa9", b"!", b"<end>"]
    assert told[0].top[0] == pb.Logprob(token_id=104, logprob=-0.25, token=b"h")
    assert told[0].rank == 1
    [request] = api.generator.submitted
    assert request.sampling.logit_bias == ((5, 2.5),)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": {100000: 1.0}}, "logit_bias"),
    ],
)
async def test_grpc_refuses_what_http_does(changes: dict[str, Any], field: str) -> None:
    error = await Api().failure(ask(**changes))
    assert error.code().name == "INVALID_ARGUMENT"
    assert field in (error.details() or "")
