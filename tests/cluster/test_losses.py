"""Workers lost, transfers failed, requests cancelled or late, in each phase: a golden answer or a clear error."""

import asyncio
from typing import Literal

import pytest

from tests.cluster_harness import Node, Shape
from tests.routed_cluster import Gate, RoutedCluster, read, routed_cluster
from twostroke.cluster.core.errors import Cancelled, DeadlineExceeded, PeerLost, TransferFailed, Unavailable
from twostroke.cluster.core.request import Phase
from twostroke.cluster.core.sampling import FinishReason

PROMPT = tuple(range(50, 110))
SLOW = Shape(prefill=2, decode=2, step_delay_s=0.004)
PHASES = [Phase.QUEUED, Phase.RESERVING, Phase.PREFILLING, Phase.TRANSFERRING, Phase.DECODING]
PLACED = PHASES[1:]
Role = Literal["prefill", "decode"]


def node_of(routed: RoutedCluster, role: Role) -> Node:
    """The worker of this role that has the only request."""
    nodes = routed.cluster.prefill if role == "prefill" else routed.cluster.decode
    return next(
        node
        for node in nodes
        if (worker := routed.dispatcher.fleet.find(node.info.incarnation)) is not None and worker.charges
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("phase", PLACED)
async def test_losing_a_worker_in_any_phase_keeps_the_answer_golden(phase: Phase, role: Role) -> None:
    gate = Gate()
    async with routed_cluster(SLOW, gate=gate) as routed:
        request = routed.request(PROMPT, 24)
        answer = asyncio.create_task(read(routed.dispatcher.submit(request)))
        if phase is Phase.DECODING:
            gate.open()
        await routed.reach(request.request_id, phase)
        # After the first token the router charges the prefill worker no more; it is known by the pages it holds.
        after = role == "prefill" and phase in (Phase.TRANSFERRING, Phase.DECODING)
        await routed.cluster.lose(_used_prefill(routed) if after else node_of(routed, role), "killed")
        gate.open()
        result = await answer
        assert result.tokens[0] == routed.golden(PROMPT, 24)
        assert result.reasons() == [FinishReason.LENGTH]
        assert result.usage.cached_tokens <= result.usage.prompt_tokens
        assert result.usage.attempts <= 2


def _used_prefill(routed: RoutedCluster) -> Node:
    """The prefill worker that still holds pages, or the first."""
    busy = [node for node in routed.cluster.prefill if not node.host.load().ledger.at_rest]
    return busy[0] if busy else routed.cluster.prefill[0]


@pytest.mark.parametrize("phase", PHASES)
async def test_cancelling_in_any_phase_frees_everything(phase: Phase) -> None:
    gate = Gate()
    async with routed_cluster(SLOW, gate=gate) as routed:
        request = routed.request(PROMPT, 100)
        stream = routed.dispatcher.submit(request)
        if phase is Phase.DECODING:
            gate.open()
        await routed.reach(request.request_id, phase)
        assert routed.dispatcher.cancel(request.request_id)
        with pytest.raises(Cancelled):
            await read(stream)
        assert routed.dispatcher.num_live == 0


@pytest.mark.parametrize("phase", [Phase.PREFILLING, Phase.TRANSFERRING, Phase.DECODING])
async def test_a_deadline_ends_the_request_in_any_phase(phase: Phase) -> None:
    gate = Gate()
    async with routed_cluster(Shape(step_delay_s=0.02, num_pages=256), gate=gate) as routed:
        prompt = PROMPT * 10 if phase is Phase.PREFILLING else PROMPT[:16]
        request = routed.request(prompt, 200, time_left_s=0.3)
        stream = routed.dispatcher.submit(request)
        if phase is Phase.DECODING:
            gate.open()
        await routed.reach(request.request_id, phase)
        with pytest.raises(DeadlineExceeded):
            await read(stream)


async def test_a_deadline_passes_in_the_queue() -> None:
    async with routed_cluster(Shape(decode_pages=16, step_delay_s=0.005)) as routed:
        first = routed.dispatcher.submit(routed.request(PROMPT[:40], 24))
        with pytest.raises(DeadlineExceeded):
            await routed.ask(PROMPT[:40], 24, time_left_s=0.05)
        assert (await read(first)).tokens[0] == routed.golden(PROMPT[:40], 24)


async def test_a_failed_transfer_continues_after_the_token_that_is_out() -> None:
    gate = Gate()
    async with routed_cluster(SLOW, gate=gate) as routed:
        request = routed.request(PROMPT, 24)
        answer = asyncio.create_task(read(routed.dispatcher.submit(request)))
        await routed.reach(request.request_id, Phase.TRANSFERRING)
        gate.open(TransferFailed("the network ate it"))
        result = await answer
        assert result.tokens[0] == routed.golden(PROMPT, 24)
        assert result.usage.attempts == 2
        assert routed.metric("continuations_total", cause="transfer_failed") == 1


async def test_sampled_answers_are_the_same_after_a_loss() -> None:
    async with routed_cluster(SLOW) as routed:
        request = routed.request(PROMPT, 40, temperature=1.0, seed=11)
        stream = routed.dispatcher.submit(request)
        answer = asyncio.create_task(read(stream))
        await routed.reach(request.request_id, Phase.DECODING)
        await routed.cluster.lose(node_of(routed, "decode"), "killed")
        again = await routed.ask(PROMPT, 40, temperature=1.0, seed=11)
        assert (await answer).tokens[0] == again.tokens[0]


async def test_losing_every_prefill_worker_falls_back_to_local_prefill() -> None:
    async with routed_cluster(Shape(prefill=1, decode=1, step_delay_s=0.004)) as routed:
        request = routed.request(PROMPT, 12)
        answer = asyncio.create_task(read(routed.dispatcher.submit(request)))
        await routed.reach(request.request_id, Phase.PREFILLING)
        await routed.cluster.lose(routed.cluster.prefill[0], "killed")
        result = await answer
        assert result.tokens[0] == routed.golden(PROMPT, 12)
        assert "local" in result.usage.reason


async def test_losses_are_limited_to_the_attempts_allowed() -> None:
    shape = Shape(prefill=1, decode=4, step_delay_s=0.004)
    async with routed_cluster(shape) as routed:
        request = routed.request(PROMPT, 60)
        answer = asyncio.create_task(read(routed.dispatcher.submit(request)))
        for _ in range(3):
            await routed.reach(request.request_id, Phase.DECODING)
            await routed.cluster.lose(node_of(routed, "decode"), "killed")
        with pytest.raises(PeerLost):
            await answer


async def test_many_requests_survive_the_loss_of_one_worker_of_each_role() -> None:
    shape = Shape(prefill=2, decode=2, num_pages=256, step_delay_s=0.001)
    async with routed_cluster(shape) as routed:
        asked = [tuple(range(start, start + 20 + start % 17)) for start in range(0, 400, 10)]
        answers = [asyncio.create_task(routed.ask(prompt, 20)) for prompt in asked]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        await routed.cluster.lose(routed.cluster.decode[0], "killed")
        await routed.cluster.lose(routed.cluster.prefill[1], "killed")
        for prompt, answer in zip(asked, await asyncio.gather(*answers), strict=True):
            assert answer.tokens[0] == routed.golden(prompt, 20)


async def test_with_no_decode_worker_left_the_request_waits_for_one() -> None:
    async with routed_cluster(Shape(prefill=1, decode=1, step_delay_s=0.004)) as routed:
        request = routed.request(PROMPT, 30)
        answer = asyncio.create_task(read(routed.dispatcher.submit(request)))
        await routed.reach(request.request_id, Phase.DECODING)
        await routed.cluster.lose(routed.cluster.decode[0], "killed")
        assert routed.phase(request.request_id) is Phase.QUEUED
        assert not routed.dispatcher.ready
        with pytest.raises(Unavailable):
            routed.dispatcher.submit(routed.request(PROMPT))
        node = await routed.cluster.add(routed.cluster.decode[0].info.role)
        await routed.attach(node)
        assert (await answer).tokens[0] == routed.golden(PROMPT, 30)
