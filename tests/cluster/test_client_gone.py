"""A client that goes away, over each face and in each phase: both workers stop computing for it within two steps."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from tests.cluster_harness import Node, Shape
from tests.gateway_server import COMPLETION, serving
from tests.routed_cluster import RoutedCluster, routed_cluster
from tests.waiting import until
from twostroke.cluster.config import RouterSection
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.cluster.wire.channel import bind, new_server, open_channel
from twostroke.engine.fake_executor import FakeExecutor, FakeHandle
from twostroke.engine.plan import Plan
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.proto.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from twostroke.router.gateway.app import create_app
from twostroke.router.grpc_api import InferenceServicer
from twostroke.router.tokenizer import ByteTokenizer

STEP_S = 0.15
SHAPE = Shape(page_size=4, num_pages=256, prefill_chunk=16, vocab_size=256, step_delay_s=STEP_S)
PROMPT = list(range(200))
NUM_TOKENS = 500
"""13 steps of prefill and 499 of decode, of which a few may run."""

Leave = Callable[[], Awaitable[None]]


class CountingExecutor(FakeExecutor):
    """Counts the steps that began, without the warm-up's."""

    num_steps = 0

    def launch(self, plan: Plan) -> FakeHandle:
        self.num_steps += any(job.request_id != "warm-up" for job in plan.jobs)
        return super().launch(plan)


def make_executor(num_pages: int) -> CountingExecutor:
    return CountingExecutor(num_pages, SHAPE.page_size, SHAPE.vocab_size, SHAPE.max_positions, SHAPE.step_delay_s)


def steps(node: Node) -> int:
    assert isinstance(node.executor, CountingExecutor)
    return node.executor.num_steps


@asynccontextmanager
async def client(face: str, routed: RoutedCluster) -> AsyncIterator[Leave]:
    """A client that has asked, and how it goes."""
    config, tokenizer, registry = RouterSection(), ByteTokenizer(), CollectorRegistry()
    metrics = RouterMetrics(registry, "fake")
    if face == "grpc":
        server = new_server()
        servicer = InferenceServicer(routed.dispatcher, tokenizer, config, metrics)
        add_InferenceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        port = bind(server, "127.0.0.1", 0)
        await server.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            request = pb.GenerateRequest(
                model="fake", token_ids=pb.TokenIds(ids=PROMPT), max_tokens=NUM_TOKENS, ignore_eos=True
            )
            call = InferenceStub(channel).Generate(request)  # type: ignore[no-untyped-call]
            await call.read()  # accepted

            async def cancel() -> None:
                call.cancel()

            yield cancel
        await server.stop(None)
        return
    app = create_app(routed.dispatcher, tokenizer, config, metrics, registry)
    async with serving(app) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"model": "fake", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        data = json.dumps({**body, "stream": face == "http stream"}).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)
        await writer.drain()

        async def close() -> None:
            writer.close()

        yield close


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("face", ["http", "http stream", "grpc"])
async def test_work_stops_within_two_steps(face: str, phase: str) -> None:
    async with routed_cluster(SHAPE, make_executor=make_executor) as routed, client(face, routed) as leave:
        prefill, decode = routed.cluster.prefill[0], routed.cluster.decode[0]
        watched = prefill if phase == "prefill" else decode
        await until(lambda: steps(watched) >= 3)
        assert routed.dispatcher.num_live == 1
        assert decode.host.load().leases == (phase == "prefill")
        before = steps(prefill), steps(decode)
        await leave()
        await until(lambda: routed.dispatcher.num_live == 0, 2 * STEP_S)
        await routed.cluster.rest()
        assert steps(prefill) - before[0] <= 2
        assert steps(decode) - before[1] <= 2
        assert steps(decode) == 0 or phase == "decode"
