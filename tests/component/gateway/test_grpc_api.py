"""The gRPC API over the fake generator: what it counts, and that a client that leaves leaves nothing running."""

from typing import Any

import grpc
import pytest
from google.rpc import status_pb2
from prometheus_client import CollectorRegistry

from tests.client_servers import grpc_api
from tests.waiting import until
from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.errors import InvalidRequest, Overloaded
from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.cluster.telemetry.metrics import RouterMetrics
from twostroke.cluster.wire.channel import bind, new_server, open_channel
from twostroke.cluster.wire.status import from_rpc
from twostroke.proto.v1 import common_pb2
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.proto.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from twostroke.router.fake_generator import FakeGenerator
from twostroke.router.grammar_gate import GrammarGate
from twostroke.router.grpc_api import InferenceServicer
from twostroke.router.tokenizer import ByteTokenizer


class Api:
    """A servicer, its generator, and how often each reason was counted."""

    def __init__(self) -> None:
        tokenizer = ByteTokenizer()
        self._registry = CollectorRegistry()
        self.generator = FakeGenerator(tokenizer)
        self.gate = GrammarGate()
        self.servicer = InferenceServicer(
            self.generator, tokenizer, RouterSection(), RouterMetrics(self._registry, "fake"), self.gate
        )

    def refusals(self, reason: str) -> float:
        labels = {"engine": "router", "model_name": "fake", "reason": reason}
        return self._registry.get_sample_value("twostroke_refusals_total", labels) or 0.0

    async def failure(self, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
        """The status that a call over a socket ends with."""
        server = new_server()
        add_InferenceServicer_to_server(self.servicer, server)  # type: ignore[no-untyped-call]
        port = bind(server, "127.0.0.1", 0)
        await server.start()
        try:
            async with open_channel(f"127.0.0.1:{port}") as channel:
                stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async for _ in stub.Generate(request, timeout=10):
                        pass
        finally:
            await server.stop(None)
            await self.gate.close()
        return raised.value


class Context:
    """As much of a servicer's context as `Generate` asks before it ends."""

    def time_remaining(self) -> None:
        return None


def ask(**changes: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": "fake", "text": "Hello", **changes})


def regex(text: str) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_REGEX, text=text)


def chat(*roles: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content="Hi") for role in roles])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        pytest.param(ask(n=0), "n", id="a number out of range"),
        pytest.param(pb.GenerateRequest(model="fake", chat=chat()), "chat.messages", id="no message"),
        pytest.param(pb.GenerateRequest(model="fake", chat=chat("user", "robot")), "chat.messages[1].role", id="role"),
        pytest.param(pb.GenerateRequest(model="fake"), "input", id="no input"),
        pytest.param(ask(grammar=common_pb2.Grammar(text="a")), "grammar.kind", id="no kind of grammar"),
        pytest.param(ask(grammar=regex("(a")), "grammar", id="no grammar"),
        pytest.param(ask(grammar=regex("a"), ignore_eos=True), "ignore_eos", id="no end with a grammar"),
    ],
)
async def test_a_bad_request_names_its_field_and_is_counted(request_: pb.GenerateRequest, field: str) -> None:
    api = Api()
    error = await api.failure(request_)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field.encode() in dict(error.trailing_metadata() or ())["grpc-status-details-bin"]  # type: ignore[call-overload]
    assert api.refusals("invalid_request") == 1


async def test_a_bug_of_ours_is_an_internal_error_and_is_counted() -> None:
    api = Api()
    api.generator.failure = ValueError("a bug")
    error = await api.failure(ask())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert api.refusals("internal") == 1


async def test_what_the_dispatcher_refuses_is_left_to_it_to_count() -> None:
    api = Api()
    api.generator.refusal = Overloaded("full")
    assert (await api.failure(ask())).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert api.refusals("overloaded") == 0


async def test_a_client_that_leaves_before_the_first_token_leaves_nothing_running() -> None:
    api = Api()
    items = api.servicer.Generate(ask(), Context())  # type: ignore[arg-type]
    accepted = (await anext(items)).accepted
    await items.aclose()  # type: ignore[attr-defined]
    assert api.generator.cancelled == [accepted.request_id]
    assert not api.generator.live


async def test_a_grammar_reaches_the_generator() -> None:
    api = Api()
    items = api.servicer.Generate(ask(grammar=regex("a+")), Context())  # type: ignore[arg-type]
    await anext(items)
    assert api.generator.submitted[0].sampling.grammar == Grammar(GrammarKind.REGEX, "a+")
    await items.aclose()  # type: ignore[attr-defined]
    await api.gate.close()


UNARY = {
    "Cancel": (pb.CancelRequest(), "request_id"),
    "Tokenize": (pb.TokenizeRequest(model="fake"), "input"),
    "Detokenize": (pb.DetokenizeRequest(model="fake", token_ids=[999]), "token_ids[0]"),
}


@pytest.mark.parametrize("method", UNARY)
async def test_every_call_that_is_refused_says_which_field_and_with_what_code(method: str) -> None:
    request, field = UNARY[method]
    async with grpc_api() as (_, address), open_channel(address) as channel:
        stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await getattr(stub, method)(request, timeout=10)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc(raised.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == field


@pytest.mark.parametrize("method", ["GetModelInfo", "Tokenize", "Detokenize"])
async def test_without_a_model_a_call_is_told_when_to_come_back(method: str) -> None:
    requests = {"GetModelInfo": pb.GetModelInfoRequest(), **{name: UNARY[name][0] for name in UNARY}}
    async with grpc_api(model=None) as (_, address), open_channel(address) as channel:
        stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await getattr(stub, method)(requests[method], timeout=10)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    details = dict(raised.value.trailing_metadata() or ())["grpc-status-details-bin"]  # type: ignore[call-overload]
    status = status_pb2.Status.FromString(details)
    kinds = [detail.type_url.rpartition(".")[2] for detail in status.details]
    assert kinds == ["ErrorInfo", "RetryInfo"]


async def test_a_calls_deadline_bounds_the_request() -> None:
    async with grpc_api(hold_at=1) as (generator, address), open_channel(address) as channel:
        stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.Generate(ask(timeout_s=60), timeout=0.3):
                pass
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < generator.submitted[0].time_left_s <= 0.3
        await until(lambda: not generator.live)


async def test_priority_and_chat_options_reach_the_request() -> None:
    api = Api()
    messages = [pb.ChatMessage(role="user", content="Hi"), pb.ChatMessage(role="assistant", content="Hel")]
    asked = pb.GenerateRequest(
        model="fake", chat=pb.ChatMessages(messages=messages, continue_final_message=True), priority=-5
    )
    async for _ in api.servicer.Generate(asked, Context()):
        pass
    [request] = api.generator.submitted
    assert request.priority == -5
    assert bytes(token for token in request.prompt if token < 256).endswith(b"Hel")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "chat.continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat.chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"a": float("nan")}}, "chat.chat_template_kwargs"),
    ],
)
async def test_wrong_chat_options_name_their_field(changes: dict[str, Any], field: str) -> None:
    asked = pb.GenerateRequest(model="fake", chat=pb.ChatMessages(messages=chat("user").messages, **changes))
    error = await Api().failure(asked)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field.encode() in dict(error.trailing_metadata() or ())["grpc-status-details-bin"]  # type: ignore[call-overload]
