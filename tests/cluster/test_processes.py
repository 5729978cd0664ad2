"""Real processes: bad input beside a stream, clients that leave, deadlines, a full queue, a lost Redis."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.children import child_environment
from tests.process_cluster import ProcessCluster, expected, process_cluster, request
from tests.tiny_models import make_tiny_model
from tests.waiting import on_this_machine
from twostroke.proto.v1 import common_pb2
from twostroke.proto.v1 import inference_pb2 as pb

LONG = [position % 250 for position in range(1500)]


def details(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata() or ())["grpc-status-details-bin"])
    for detail in status.details:
        found = kind()
        if detail.Unpack(found):
            return found
    raise AssertionError(f"no {kind.__name__} in {status}")


def regex(text: str) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text=text)


def offering(**tool: Any) -> pb.GenerateRequest:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")], tools=[pb.Tool(**tool)])
    return pb.GenerateRequest(model="fake", chat=chat)


PATTERN = json.dumps({"properties": {"a": {"type": "string", "pattern": "(a{1000}){1000}"}}})
BAD = [
    ("model", request([1], 4, model="other")),
    ("token_ids", request([], 4)),
    ("token_ids[1]", request([1, 258], 4)),
    ("token_ids", request([1] * 9000, 4)),
    ("max_tokens", request([1], (1 << 32) - 1)),
    ("temperature", request([1], 4, temperature=float("nan"))),
    ("top_p", request([1], 4, top_p=-1.0)),
    ("n", request([1], 4, n=1 << 31)),
    ("timeout_s", request([1], 4, timeout_s=-1.0)),
    ("grammar", request([1], 4, ignore_eos=False, grammar=regex("(a{1000}){1000}"))),
    ("grammar", request([1], 4, ignore_eos=False, grammar=regex("(" * 60_000))),
    ("chat.tools[0].parameters", offering(name="f", parameters='{"a":' * 5000)),
    ("chat.tools[0].parameters", offering(name="f", parameters='{"$ref": "#"}', strict=True)),
    ("chat.tools[0].parameters", offering(name="f", parameters=PATTERN, strict=True)),
    ("chat.tools[0].name", offering(name="<|end|>")),
]


async def test_bad_input_is_told_at_once_and_disturbs_nobody(tmp_path: Path) -> None:
    async with process_cluster(tmp_path, model={"fake_step_ms": 5}) as cluster:
        bystander = asyncio.create_task(cluster.ask(LONG, 300))
        for field, bad in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in cluster.stub.Generate(bad, timeout=1.0):
                    pass
            error = raised.value
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
            violations = details(error, error_details_pb2.BadRequest).field_violations
            assert [violation.field for violation in violations] == [field]
        assert (await bystander).tokens == expected(LONG, 300)
        await reflected_client(cluster)
        await cluster.at_rest()


async def reflected_client(cluster: ProcessCluster) -> None:
    """Everything that a client without our stubs can do, on a thread: reflection's client is a blocking one."""

    def use() -> None:
        with grpc.insecure_channel(cluster.address("router"), [("grpc.enable_http_proxy", 0)]) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = set(database.get_services())
            assert {"twostroke.v1.Inference", "grpc.health.v1.Health"} <= services
            pool = DescriptorPool(database)

            def call(service: str, method: str, stream: bool = False, **fields: Any) -> Any:
                found = pool.FindServiceByName(service).FindMethodByName(method)
                send = message_factory.GetMessageClass(found.input_type)
                receive = message_factory.GetMessageClass(found.output_type)
                make = channel.unary_stream if stream else channel.unary_unary
                invoke = make(
                    f"/{service}/{method}",
                    request_serializer=send.SerializeToString,
                    response_deserializer=receive.FromString,
                )
                return invoke(send(**fields), timeout=10)

            name = "twostroke.v1.Inference"
            asked = {
                "model": "fake",
                "token_ids": {"ids": [1, 2, 3]},
                "max_tokens": 5,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            items = list(call(name, "Generate", stream=True, **asked))
            tokens = [token for item in items for token in item.delta.token_ids]
            assert tokens == expected([1, 2, 3], 5)
            chat = {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"name": "now"}],
                "tool_choice": {"mode": 3},
            }
            items_of_call = list(call(name, "Generate", stream=True, model="fake", chat=chat, max_tokens=200))
            pieces = [piece for item in items_of_call for piece in item.delta.tool_calls]
            assert pieces[0].name == "now"
            assert call(name, "GetModelInfo").model == "fake"
            assert call("grpc.health.v1.Health", "Check").status == 1
            assert not call(name, "Cancel", request_id=items[0].accepted.request_id).cancelled
            running = call(name, "Generate", stream=True, **{**asked, "max_tokens": 4000})
            assert call(name, "Cancel", request_id=next(running).accepted.request_id).cancelled
            with pytest.raises(grpc.RpcError) as raised:
                list(running)
            assert raised.value.code() is grpc.StatusCode.CANCELLED

    await asyncio.to_thread(use)


async def test_work_stops_with_its_client_and_with_its_deadline(tmp_path: Path) -> None:
    """A step takes 50 ms, so what is not stopped would run for many seconds."""
    sections = {"model": {"fake_step_ms": 50}, "prefill": {"chunk_tokens": 16}}
    async with process_cluster(tmp_path, **sections) as cluster:
        gone = await cluster.ask(LONG, 100, leave_after=0)  # in prefill: 94 steps
        assert not gone.tokens
        await cluster.at_rest(timeout_s=2.0)
        gone = await cluster.ask(LONG[:100], 2000, leave_after=3)  # in decode: 2000 steps
        assert gone.tokens[:3] == expected(LONG[:100], 3)
        await cluster.at_rest(timeout_s=2.0)
        for how in ({"timeout_s": 1.0}, {}):
            call = cluster.stub.Generate(request(LONG[:90], 2000, **how), timeout=20.0 if how else 1.0)
            begin = asyncio.get_running_loop().time()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in call:
                    pass
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert asyncio.get_running_loop().time() - begin < on_this_machine(3.0)
            await cluster.at_rest(timeout_s=2.0)


async def test_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    """There is room for one request at a time, and a place in the queue is free while its owner asks for pages."""
    sections = {"pages": {"num_pages": 64}, "router": {"max_queued": 2}, "model": {"fake_step_ms": 60}}
    async with process_cluster(tmp_path, **sections) as cluster:
        held: list[Any] = []
        try:
            await refused_over_grpc(cluster, held)
            await refused_over_http(cluster, held)
        finally:
            for call in held:
                call.cancel()
        await cluster.at_rest()


async def refused_over_grpc(cluster: ProcessCluster, held: list[Any]) -> None:
    refusal: grpc.aio.AioRpcError | None = None
    for n in range(10):
        call = cluster.stub.Generate(request([n, *LONG[:150]], 80), timeout=30.0)
        begin = asyncio.get_running_loop().time()
        try:
            await call.read()  # accepted
        except grpc.aio.AioRpcError as error:
            refusal = error
            break
        held.append(call)
    assert refusal is not None
    assert asyncio.get_running_loop().time() - begin < on_this_machine(1.0)
    assert refusal.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 1 <= details(refusal, error_details_pb2.RetryInfo).retry_delay.seconds <= 60


async def refused_over_http(cluster: ProcessCluster, held: list[Any]) -> None:
    for n in range(10, 20):
        body = {"model": "fake", "prompt": [n, *LONG[:150]], "max_tokens": 80, "ignore_eos": True}
        task = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        done, _ = await asyncio.wait({task}, timeout=1.0)
        if done:
            answer = task.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
            assert 1 <= int(answer.headers["retry-after"]) <= 61
            return
        held.append(task)
    raise AssertionError("nothing was refused")


async def test_a_lost_redis_stops_no_request(tmp_path: Path) -> None:
    async with process_cluster(tmp_path, model={"fake_step_ms": 5}) as cluster:
        running = asyncio.create_task(cluster.ask(LONG, 200))
        cluster.redis.stop()
        assert (await cluster.ask(LONG[:70], 20)).tokens == expected(LONG[:70], 20)
        assert (await running).tokens == expected(LONG, 200)
        cluster.redis.start()
        await cluster.start("decode-1")
        await cluster.until_workers(1, 2)
        assert (await cluster.ask(LONG[:90], 20)).tokens == expected(LONG[:90], 20)
        await cluster.at_rest()


async def test_what_a_drain_has_no_time_for_goes_on_elsewhere(tmp_path: Path) -> None:
    """Six seconds of steps on a worker that may drain for one: its answers are continued on the other, golden."""
    async with process_cluster(tmp_path, 1, 2, model={"fake_step_ms": 10}, ray={"drain_s": 1}) as cluster:
        streams = [asyncio.create_task(cluster.ask([n, *LONG[:90]], 600)) for n in range(6)]
        await asyncio.gather(*(cluster.at_work(name) for name in ("decode-0", "decode-1")))
        assert await cluster.leave("decode-1") == 0
        assert not any(stream.done() for stream in streams)
        for n, answer in enumerate(await asyncio.gather(*streams)):
            assert answer.tokens == expected([n, *LONG[:90]], 600), answer
        await cluster.at_rest("decode-0", "prefill-0")


async def test_a_router_needs_no_torch(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    script = (
        "import asyncio, sys\n"
        "from twostroke.cluster.config import parse_config\n"
        "from twostroke.router import service\n"
        "stop = asyncio.Event()\n"
        "config = parse_config({'model': {'source': sys.argv[1]}, 'router': {'http_port': 0, 'grpc_port': 0}})\n"
        "asyncio.run(service.run(config, stop, lambda record: stop.set()))\n"
        "sys.exit(int('torch' in sys.modules or not stop.is_set()))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(model), env=child_environment())
    assert await asyncio.wait_for(process.wait(), 60) == 0
