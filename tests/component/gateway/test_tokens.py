"""`/tokenize` and `/detokenize`: vLLM's shapes, strict fields."""

from typing import Any

import pytest

from tests.gateway_server import gateway
from twostroke.cluster.config import LimitsSection, RouterSection
from twostroke.router.fake_generator import FAKE_MODEL
from twostroke.router.tokenizer import ByteTokenizer

USER = {"role": "user", "content": "Hi"}


async def test_text() -> None:
    async with gateway() as server:
        answer = (await server.post("/tokenize", {"model": "fake", "prompt": "h é"})).json()
        assert answer == {
            "count": 4,
            "max_model_len": FAKE_MODEL.max_context,
            "tokens": [104, 32, 0xC3, 0xA9],
            "token_strs": None,
        }
        named = {"prompt": "h é", "return_token_strs": True, "add_special_tokens": False}
        assert (await server.post("/tokenize", named)).json()["token_strs"] == ["h", "<0x20>", "<0xC3>", "<0xA9>"]
        assert (await server.post("/tokenize", {"prompt": ""})).json()["count"] == 0
        back = await server.post("/detokenize", {"model": "fake", "tokens": answer["tokens"]})
        assert back.json() == {"prompt": "h é"}
        assert (await server.post("/detokenize", {"tokens": [256, 65, 257]})).json() == {"prompt": "A"}
        assert server.generator.submitted == []


async def test_a_chat_has_the_tokens_that_it_is_answered_with() -> None:
    async with gateway() as server:
        for options in (
            {},
            {"add_generation_prompt": False},
            {"continue_final_message": True},
            {"chat_template_kwargs": {"a": 1}},
        ):
            chat = {"model": "fake", "messages": [USER], **options}
            answer = (await server.post("/tokenize", chat)).json()
            await server.post("/v1/chat/completions", {**chat, "max_tokens": 1})
            assert tuple(answer["tokens"]) == server.generator.submitted[-1].prompt
            assert answer["count"] == len(answer["tokens"])


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "messages"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{**USER, "role": "wizard"}]}, "messages[0].role"),
    ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
    ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
    ("/tokenize", {"prompt": "x" * (FAKE_MODEL.max_context + 1)}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 2, 3.0]}, "tokens[2]"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ("/detokenize", {"tokens": [ByteTokenizer().vocab_size]}, "tokens[0]"),
    ("/detokenize", {"tokens": [10**19]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1] * 2000}, "tokens"),
]


@pytest.mark.parametrize(("path", "fields", "named"), BAD)
async def test_what_is_wrong_is_named(path: str, fields: dict[str, Any], named: str) -> None:
    async with gateway(RouterSection(limits=LimitsSection(max_prompt_tokens=1000))) as server:
        answer = await server.post(path, fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == named


async def test_another_model_and_none() -> None:
    async with gateway() as server:
        assert (await server.post("/tokenize", {"model": "other", "prompt": "a"})).status_code == 404
        server.generator.model = None
        for model in ({}, {"model": "fake"}):
            assert (await server.post("/detokenize", {**model, "tokens": [1]})).status_code == 503
