"""Bodies drawn from the OpenAPI document, good and bad: no 5xx, and every answer as described."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans
from prometheus_client import CollectorRegistry
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway_server import gateway
from twostroke.cluster.config import RouterSection
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.router.fake_generator import FakeGenerator
from twostroke.router.gateway.app import create_app
from twostroke.router.tokenizer import ByteTokenizer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def _document() -> dict[str, Any]:
    tokenizer, registry = ByteTokenizer(), CollectorRegistry()
    metrics = RouterMetrics(registry, "fake")
    app = create_app(FakeGenerator(tokenizer), tokenizer, RouterSection(), metrics, registry)
    return dict(app.openapi)


DOCUMENT = _document()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
POSTS = [path for path, operations in DOCUMENT["paths"].items() if "post" in operations]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway in a thread of its own: schemathesis calls from this one."""
    ready: Future[str] = Future()
    stop = threading.Event()

    async def serve() -> None:
        async with gateway() as server:
            ready.set_result(server.url)
            await asyncio.to_thread(stop.wait, 600)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield ready.result(timeout=10)
    finally:
        stop.set()
        thread.join(timeout=10)


def _attack(url: str, path: str, mode: GenerationMode, max_examples: int) -> None:
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

    @settings(max_examples=max_examples, deadline=None, suppress_health_check=slow)
    @given(SCHEMA[path]["POST"].as_strategy(mode), booleans())
    def attack(case: schemathesis.Case, streamed: bool) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "fake"
            if streamed and "text/event-stream" in str(DOCUMENT["paths"][path]):
                case.body["stream"] = True
        case.call_and_validate(base_url=url, checks=CHECKS)

    attack()


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", POSTS)
def test_no_body_breaks_an_endpoint(url: str, path: str, mode: GenerationMode) -> None:
    _attack(url, path, mode, 25)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", POSTS)
def test_two_thousand_bodies_break_no_endpoint(url: str, path: str, mode: GenerationMode) -> None:
    _attack(url, path, mode, 150)
