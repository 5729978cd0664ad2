"""What the gateway makes of a body: good ones, and a table of bad ones."""

import asyncio
import json
import re
import time
from typing import Any

from tests.gateway_server import CHAT, COMPLETION, TIMEOUT_S, gateway
from tests.waiting import on_this_machine
from twostroke.cluster.config import RouterSection
from twostroke.router.fake_generator import FAKE_MODEL
from twostroke.router.tokenizer import ByteTokenizer

ASK: dict[str, Any] = {"model": "fake", "prompt": "Once", "max_tokens": 4}
USER = {"role": "user", "content": "Hi"}
ASK_CHAT: dict[str, Any] = {"model": "fake", "messages": [USER], "max_tokens": 4}
LIMIT = FAKE_MODEL.max_context

BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    # (endpoint, fields, the field that the error names)
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": ["Hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [USER, {"role": "function", "content": "Hi"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"role": ["user"], "content": "Hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": [{**USER, "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    (CHAT, {"messages": [{**USER, "name": 5}]}, "messages[0].name"),
    (CHAT, {"messages": [{**USER, "name": ""}]}, "messages[0].name"),
    (CHAT, {"messages": [{**USER, "name": "<|im_start|>"}]}, "messages[0].name"),
    (CHAT, {"messages": [{**USER, "name": "x" * 65}]}, "messages[0].name"),
    (CHAT, {"messages": [USER] * 10_000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{**USER, "nmae": "x"}]}, "messages[0].nmae"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * LIMIT}]}, "messages"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 5}, "max_completion_tokens"),  # max_tokens says 4
    (CHAT, {"max_tokens": None, "max_completion_tokens": LIMIT}, "max_completion_tokens"),
    (CHAT, {"max_tokens": LIMIT}, "max_tokens"),
    (CHAT, {"prompt": "x"}, "prompt"),
    (CHAT, {"logprobs": 0}, "logprobs"),
    (CHAT, {"top_logprobs": 5}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (CHAT, {"echo": True}, "echo"),
    (COMPLETION, {"logprobs": 21}, "logprobs"),
    (COMPLETION, {"logprobs": -1}, "logprobs"),
    (COMPLETION, {"logprobs": True}, "logprobs"),
    (COMPLETION, {"logprobs": 1.5}, "logprobs"),
    (COMPLETION, {"top_logprobs": 2}, "top_logprobs"),
    (COMPLETION, {"echo": 1}, "echo"),
    (COMPLETION, {"logit_bias": {"258": 1}}, "logit_bias"),
    (COMPLETION, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETION, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETION, {"logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETION, {"logit_bias": {"5": -1e308}}, "logit_bias"),
    (COMPLETION, {"logit_bias": {"5": "1"}}, "logit_bias"),
    (COMPLETION, {"logit_bias": {"5": True}}, "logit_bias"),
    (COMPLETION, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    (COMPLETION, {"logit_bias": [[5, 1]]}, "logit_bias"),
    (COMPLETION, {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (COMPLETION, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"functions": [{}]}, "functions"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (COMPLETION, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETION, {"best_of": 129}, "best_of"),
    (CHAT, {"best_of": 2}, "best_of"),
    (COMPLETION, {"best_of": 1, "n": 2}, "best_of"),
    (COMPLETION, {"best_of": 0}, "best_of"),
    (COMPLETION, {"best_of": True}, "best_of"),
    (COMPLETION, {"echo": 1}, "echo"),
    (CHAT, {"echo": True}, "echo"),
    (COMPLETION, {"suffix": "x"}, "suffix"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"user": 5}, "user"),
    (CHAT, {"metadata": "x"}, "metadata"),
    (CHAT, {"service_tier": ["auto"]}, "service_tier"),
    (CHAT, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
    (CHAT, {"documents": [{"text": "x"}]}, "documents"),
    (CHAT, {"add_generation_prompt": 1}, "add_generation_prompt"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    (CHAT, {"continue_final_message": "yes"}, "continue_final_message"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {f"a{n}": n for n in range(100)}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    (CHAT, {"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    (CHAT, {"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs.__class__"),
    (CHAT, {"chat_template_kwargs": {"a": "x" * LIMIT}}, "messages"),
    (CHAT, {"priority": 1.0}, "priority"),
    (CHAT, {"priority": 10**6}, "priority"),
    (CHAT, {"priority": -(10**25)}, "priority"),
    (COMPLETION, {"prompt": None}, "prompt"),
    (COMPLETION, {"prompt": ""}, "prompt"),
    (COMPLETION, {"prompt": []}, "prompt"),
    (COMPLETION, {"prompt": [""]}, "prompt[0]"),
    (COMPLETION, {"prompt": [[]]}, "prompt[0]"),
    (COMPLETION, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETION, {"prompt": ["a", ""]}, "prompt[1]"),
    (COMPLETION, {"prompt": ["a", [1]]}, "prompt[1]"),
    (COMPLETION, {"prompt": [[1], 1]}, "prompt[1]"),
    (COMPLETION, {"prompt": [[1], [1, -1]]}, "prompt[1][1]"),
    (COMPLETION, {"prompt": ["a", "x" * (LIMIT + 1)]}, "prompt[1]"),
    (COMPLETION, {"prompt": ["a"] * 129}, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 65, "n": 2}, "prompt"),
    (COMPLETION, {"prompt": [[[1]]]}, "prompt[0][0]"),
    (COMPLETION, {"prompt": [1, True]}, "prompt[1]"),
    (COMPLETION, {"prompt": [1, 2.0]}, "prompt[1]"),
    (COMPLETION, {"prompt": [1, "a"]}, "prompt[1]"),
    (COMPLETION, {"prompt": [1, -1]}, "prompt[1]"),
    (COMPLETION, {"prompt": [ByteTokenizer().vocab_size]}, "prompt[0]"),
    (COMPLETION, {"prompt": [10**15]}, "prompt[0]"),
    (COMPLETION, {"prompt": "x" * LIMIT}, "prompt"),
    (COMPLETION, {"prompt": "x" * (LIMIT + 1)}, "prompt"),
    (COMPLETION, {"prompt": [1] * (LIMIT + 1)}, "prompt"),
    (COMPLETION, {"max_tokens": LIMIT - 3}, "max_tokens"),
    (COMPLETION, {"model": None}, "model"),
    (COMPLETION, {"model": 5}, "model"),
    (COMPLETION, {"max_tokens": 0}, "max_tokens"),
    (COMPLETION, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    (COMPLETION, {"max_tokens": -1, "echo": True}, "max_tokens"),
    (COMPLETION, {"max_tokens": -1}, "max_tokens"),
    (COMPLETION, {"max_tokens": "5"}, "max_tokens"),
    (COMPLETION, {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETION, {"max_tokens": True}, "max_tokens"),
    (COMPLETION, {"max_tokens": 10**12}, "max_tokens"),
    (COMPLETION, {"max_tokens": 10**25}, "max_tokens"),
    (COMPLETION, {"min_tokens": 5}, "min_tokens"),
    (COMPLETION, {"min_tokens": -1}, "min_tokens"),
    (COMPLETION, {"temperature": -0.1}, "temperature"),
    (COMPLETION, {"temperature": 1e6}, "temperature"),
    (COMPLETION, {"temperature": "1"}, "temperature"),
    (COMPLETION, {"temperature": True}, "temperature"),
    (COMPLETION, {"top_p": 0}, "top_p"),
    (COMPLETION, {"top_p": 1.1}, "top_p"),
    (COMPLETION, {"top_k": -2}, "top_k"),
    (COMPLETION, {"min_p": 2}, "min_p"),
    (COMPLETION, {"seed": 1 << 64}, "seed"),
    (COMPLETION, {"seed": "7"}, "seed"),
    (COMPLETION, {"presence_penalty": 3}, "presence_penalty"),
    (COMPLETION, {"frequency_penalty": -3}, "frequency_penalty"),
    (COMPLETION, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETION, {"n": 0}, "n"),
    (COMPLETION, {"n": 10**6}, "n"),
    (COMPLETION, {"stop": ""}, "stop[0]"),
    (COMPLETION, {"stop": ["a", 5]}, "stop[1]"),
    (COMPLETION, {"stop": 5}, "stop"),
    (COMPLETION, {"stop": ["a"] * 10_000}, "stop"),
    (COMPLETION, {"stop": ["a" * 10_000]}, "stop[0]"),
    (COMPLETION, {"stop_token_ids": [True]}, "stop_token_ids[0]"),
    (COMPLETION, {"stop_token_ids": [10**6]}, "stop_token_ids[0]"),
    (COMPLETION, {"stop_token_ids": [1] * 10_000}, "stop_token_ids"),
    (COMPLETION, {"ignore_eos": 1}, "ignore_eos"),
    (COMPLETION, {"stream": "true"}, "stream"),
    (COMPLETION, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETION, {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (COMPLETION, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (COMPLETION, {"timeout": 0}, "timeout"),
    (COMPLETION, {"timeout": "5"}, "timeout"),
    (COMPLETION, {"cache_salt": 5}, "cache_salt"),
    (COMPLETION, {"cache_salt": "x" * 1000}, "cache_salt"),
    (COMPLETION, {"temprature": 0.5}, "temprature"),
    (COMPLETION, {"temprature": None}, "temprature"),
    (COMPLETION, {"x" * 10_000: 1}, "x" * 128),
]


async def test_bad_fields_are_named_in_the_openai_form() -> None:
    """One server for the table: none of them may harm the next."""
    async with gateway() as server:
        for path, fields, named in BAD_FIELDS:
            body = {**(ASK_CHAT if path == CHAT else ASK), **fields}
            for variant in [body] if "stream" in str(fields) else [body, {**body, "stream": True}]:
                started = time.monotonic()
                answer = await server.post(path, variant)
                case = (path, str(fields)[:80], answer.text)
                assert time.monotonic() - started < on_this_machine(1.0), case
                assert answer.status_code == 400, case
                error = answer.json()["error"]
                assert error["param"] == named, case
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == "invalid_request_error"
                assert len(error["message"]) < 500
                assert answer.headers["x-request-id"]
        assert server.generator.submitted == []
        assert (await server.post(CHAT, ASK_CHAT)).status_code == 200


BAD_BODIES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'"model"',
    b'{"model": "fake", "prompt": "a"} x',
    b'{"model": "fake", "prompt": "\xff\xfe"}',
    b'{"model": "fake", "prompt": "\\ud800"}',
    b'{"model": "fake", "prompt": "x", "stop": "a\\udfff"}',
    b'{"model": "fake", "prompt": "x", "temperature": NaN}',
    b'{"model": "fake", "prompt": "x", "temperature": -Infinity}',
    b'{"model": "fake", "prompt": "x", "temperature": 1e999}',
    b'{"model": "fake", "prompt": "x", "seed": ' + b"9" * 1000 + b"}",
    b'{"model": "fake", "prompt": ' + b"[" * 100_000,
    b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "fake", "prompt": [' + b"true," * 1_000_000 + b"true]}",
    b'{"model": "fake", "prompt": [' + b"{}," * 1_000_000 + b"{}]}",
    b'{"model": "fake", "messages": [' + b"0," * 1_000_000 + b"0]}",
    b'{"model": "fake", "prompt": "' + b"x" * 7_000_000 + b'"}',
    b'{"model": "fake", "prompt": "x", ' + b",".join(b'"%d": 1' % n for n in range(100_000)) + b"}",
]


async def test_bad_bodies() -> None:
    async with gateway() as server:
        for data in BAD_BODIES:
            started = time.monotonic()
            path = CHAT if b"messages" in data[:40] else COMPLETION
            answer = await server.client.post(path, content=data, headers={"content-type": "application/json"})
            assert time.monotonic() - started < on_this_machine(1.0), data[:60]
            assert answer.status_code == 400, data[:60]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await server.post(COMPLETION, ASK)).status_code == 200


async def test_context_overflow_has_the_right_numbers() -> None:
    async with gateway() as server:
        full = await server.post(COMPLETION, {**ASK, "prompt": [1] * LIMIT, "max_tokens": None})
        over = await server.post(COMPLETION, {**ASK, "prompt": [1] * (LIMIT - 10), "max_tokens": 11})
        just = await server.post(COMPLETION, {**ASK, "prompt": [1] * (LIMIT - 10), "max_tokens": 10})
        rest = await server.post(COMPLETION, {**ASK, "prompt": [1] * (LIMIT - 1), "max_tokens": None})
        assert server.generator.submitted[-1].sampling.max_tokens == 1
    assert (full.status_code, over.status_code, just.status_code, rest.status_code) == (400, 400, 200, 200)
    for answer, numbers in ((full, [LIMIT, LIMIT]), (over, [LIMIT, LIMIT - 10, 11, 10])):
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert [int(word) for word in re.findall(r"\d+", error["message"])] == numbers


async def test_a_body_over_the_limit_is_refused_while_it_comes() -> None:
    """Declared too large: nothing of it is needed. Chunked: once the limit is passed, though it never ends."""
    async with gateway(RouterSection(max_body_bytes=1000)) as server:
        for headers, data in (
            (b"content-length: 100000000", b"{"),
            (b"transfer-encoding: chunked", b"3e9\r\n" + b" " * 1001 + b"\r\n"),
        ):
            async with server.connect() as (reader, writer), asyncio.timeout(TIMEOUT_S):
                writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n\r\n" + data)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 413")
                assert b"body_too_large" in await reader.readuntil(b"}}")
                assert await reader.read() == b""
        small = await server.post(COMPLETION, ASK)
        assert small.status_code == 200
        assert server.metric("twostroke_refusals_total", reason="body_too_large") == 2


async def test_a_large_body_is_answered_to_a_client_that_sends_all_of_it_first() -> None:
    async with gateway(RouterSection(max_body_bytes=1000)) as server:
        answer = await server.post(COMPLETION, {**ASK, "prompt": "x" * 5_000_000})
    assert answer.status_code == 413


async def test_content_types() -> None:
    async with gateway() as server:
        for kind, status in (
            ("application/json; charset=utf-8", 200),
            ("Application/JSON", 200),
            ("application/vnd.api+json", 200),
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("multipart/form-data; boundary=x", 415),
        ):
            data = json.dumps(ASK).encode()
            answer = await server.client.post(COMPLETION, content=data, headers={"content-type": kind})
            assert answer.status_code == status, kind
            if status == 415:
                assert answer.json()["error"]["code"] == "unsupported_media_type"


async def test_request_ids() -> None:
    async with gateway() as server:
        plain = await server.post(COMPLETION, ASK)
        named = await server.post(COMPLETION, ASK, x_request_id="job-7 of 9")
        assert server.generator.submitted[1].client_request_id == "job-7 of 9"
        assert named.headers["x-request-id"] == "job-7 of 9"
        assert named.json()["id"] == "cmpl-job-7 of 9"
        assert named.headers["x-twostroke-request-id"] == server.generator.submitted[1].request_id
        assert plain.json()["id"] == "cmpl-" + plain.headers["x-request-id"]
        assert plain.headers["x-request-id"] == plain.headers["x-twostroke-request-id"]
        for bad in ("x" * 129, "caf\u00e9", "tab\there"):
            raw = await server.raw(COMPLETION, ASK, f"x-request-id: {bad}")
            assert raw.startswith(b"HTTP/1.1 400"), bad
            assert b'"param":"x-request-id"' in raw
        split = await server.raw(COMPLETION, ASK, "x-request-id: a\rx-evil: 1")
        assert split.startswith(b"HTTP/1.1 400")
        assert b"x-evil" not in split
        assert len(server.generator.submitted) == 2


async def test_routes_and_methods_that_are_not_there() -> None:
    async with gateway() as server:
        for method, path, status in (
            ("GET", "/", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", "/v1/models/other", 404),
            ("GET", CHAT, 405),
            ("PUT", COMPLETION, 405),
            ("POST", "/v1/models", 405),
        ):
            answer = await server.client.request(method, path)
            assert answer.status_code == status, path
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"]
            assert answer.headers["x-request-id"]


async def test_health_models_and_metrics() -> None:
    async with gateway() as server:
        assert (await server.client.get("/health/live")).status_code == 200
        ready = (await server.client.get("/health/ready")).json()
        assert ready == {"status": "ready", "prefill_workers": 1, "decode_workers": 1}
        [card] = (await server.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", LIMIT)
        assert (await server.client.get("/v1/models/fake")).json() == card
        server.generator.ready, server.generator.model = False, None
        ready = await server.client.get("/health/ready")
        assert ready.status_code == 503
        assert "no worker" in ready.json()["error"]["message"]
        assert (await server.client.get("/health/live")).status_code == 200
        assert (await server.client.get("/v1/models")).json() == {"object": "list", "data": []}
        await server.post(COMPLETION, {**ASK, "n": 0})
        await server.client.get("/surprise/7f3a")
        exposed = (await server.client.get("/metrics")).text
        assert 'twostroke_refusals_total{engine="router",model_name="fake",reason="invalid_request"} 1.0' in exposed
        assert server.metric("twostroke_http_responses_total", endpoint=COMPLETION, status="400") == 1
        assert server.metric("twostroke_http_responses_total", endpoint="", status="404") == 1
        assert "7f3a" not in exposed
        assert COMPLETION in (await server.client.get("/openapi.json")).json()["paths"]


async def test_every_parameter_arrives() -> None:
    async with gateway() as server:
        answer = await server.post(
            COMPLETION,
            {
                "model": "fake",
                "prompt": ["Once"],
                "max_tokens": 40,
                "min_tokens": 2,
                "temperature": 0,
                "top_p": 0.9,
                "top_k": -1,
                "min_p": 0.1,
                "seed": -1,
                "presence_penalty": 0.5,
                "frequency_penalty": -0.5,
                "repetition_penalty": 1.2,
                "n": 2,
                "stop": "zz",
                "stop_token_ids": [1, 2],
                "ignore_eos": True,
                "timeout": 1e9,
                "cache_salt": "mine",
                "priority": -3,
                "user": "u",
                "store": False,
                "service_tier": "auto",
                # What other clients send along, asking for nothing:
                "logprobs": None,
                "echo": False,
                "best_of": 2,
                "suffix": None,
                "logit_bias": {},
                "stream_options": None,
                "metadata": {"a": "b"},
            },
        )
        assert answer.status_code == 200, answer.text
        [request] = server.generator.submitted
    sampling = request.sampling
    assert request.prompt == tuple(b"Once")
    assert (request.num_choices, request.stop, request.salt) == (2, ("zz",), "mine")
    assert request.priority == -3
    assert request.time_left_s == RouterSection().max_timeout_s
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (40, 2, 0.0, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (0, 0.1, (1 << 64) - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((1, 2), True)
    assert sampling.end_token_ids == ByteTokenizer().end_token_ids


async def test_an_answers_message_may_be_sent_back_and_parts_are_joined() -> None:
    async with gateway() as server:
        first = (await server.post(CHAT, ASK_CHAT)).json()["choices"][0]["message"]
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [USER, {**first, "tool_calls": None, "annotations": []}, {"role": "user", "content": parts}]
        answer = await server.post(CHAT, {**ASK_CHAT, "messages": messages})
        assert answer.status_code == 200, answer.text
        expected = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "a\nb"}]
        assert server.generator.submitted[1].prompt == tuple(ByteTokenizer().encode_chat(expected).tokens)


async def test_defaults() -> None:
    async with gateway(RouterSection(default_max_tokens=7, default_timeout_s=9)) as server:
        for _ in range(2):
            await server.post(COMPLETION, {"model": "fake", "prompt": "Once"})
        one, two = server.generator.submitted
    assert (one.sampling.max_tokens, one.sampling.temperature, one.time_left_s) == (7, 1.0, 9)
    assert one.sampling.seed != two.sampling.seed
    assert (one.tenant, one.salt, one.client_request_id) == ("default", "", "")
