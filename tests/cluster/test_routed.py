"""Whole requests through the dispatcher and fake workers: the cluster's answer is the golden one."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from tests.cluster_harness import Shape
from tests.routed_cluster import RoutedCluster, read, routed_cluster
from twostroke.cluster.core.errors import (
    Cancelled,
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    SlowReader,
    Unavailable,
    UnknownModel,
)
from twostroke.cluster.core.random import choice_seed
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.request import Delta

PROMPT = tuple(range(50, 90))


def prompts(count: int, seed: int = 3) -> list[tuple[int, ...]]:
    random = Random(seed)
    return [tuple(random.randrange(1000) for _ in range(random.randint(1, 60))) for _ in range(count)]


@pytest.mark.parametrize("links", ["direct", "grpc"])
async def test_one_request_is_prefilled_shipped_and_decoded(links: str) -> None:
    async with routed_cluster(Shape(links=links)) as routed:  # type: ignore[arg-type]
        answer = await routed.ask(PROMPT, 20)
        assert answer.tokens[0] == routed.golden(PROMPT, 20)
        assert answer.text[0] == "".join(f"{token}," for token in answer.tokens[0])
        assert answer.reasons() == [FinishReason.LENGTH]
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (40, 20, 0)
        assert (usage.prefill_worker, usage.decode_worker, usage.attempts) == ("prefill-0", "decode-0", 1)
        assert usage.pages_shipped == 10
        assert usage.transport == ("grpc" if links == "grpc" else "loopback")
        assert 0 < usage.ttft_ms <= usage.duration_ms


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 16, 17, 48])
async def test_prompts_around_page_and_chunk_borders(num_tokens: int) -> None:
    async with routed_cluster() as routed:
        prompt = PROMPT * 2
        for max_tokens in (1, 2, 9):
            answer = await routed.ask(prompt[:num_tokens], max_tokens)
            assert answer.tokens[0] == routed.golden(prompt[:num_tokens], max_tokens)


async def test_many_mixed_requests_on_two_pairs_equal_golden() -> None:
    policy = {"local_threshold_tokens": 12}
    async with routed_cluster(Shape(prefill=2, decode=2, num_pages=256), policy=policy) as routed:
        sizes = Random(5)
        asked = [(prompt, sizes.randint(1, 30)) for prompt in prompts(60)]
        answers = await asyncio.gather(*(routed.ask(prompt, size) for prompt, size in asked))
        for (prompt, size), answer in zip(asked, answers, strict=True):
            assert answer.tokens[0] == routed.golden(prompt, size)
            usage = answer.usage
            assert 0 <= usage.cached_tokens <= usage.prompt_tokens == len(prompt)
        kinds = {kind: routed.metric("placements_total", reason=kind) for kind in ("pair", "local", "one_token")}
        assert all(kinds.values()), kinds
        assert {answer.usage.decode_worker for answer in answers} >= {"decode-0", "decode-1"}


async def test_pools_too_small_for_all_at_once_still_answer_all() -> None:
    async with routed_cluster(Shape(num_pages=64, decode_pages=24)) as routed:
        asked = prompts(16, seed=11)
        answers = await asyncio.gather(*(routed.ask(prompt, 25) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.tokens[0] == routed.golden(prompt, 25)


async def test_the_second_time_the_prefix_is_cached_and_counted_once() -> None:
    async with routed_cluster() as routed:
        first, second = await routed.ask(PROMPT), await routed.ask(PROMPT)
        assert first.tokens == second.tokens
        assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 36)


async def test_a_short_uncached_part_is_prefilled_where_it_decodes() -> None:
    async with routed_cluster(policy={"local_threshold_tokens": 16}) as routed:
        answer = await routed.ask(PROMPT[:10])
        assert answer.tokens[0] == routed.golden(PROMPT[:10])
        assert answer.usage.prefill_worker == ""
        assert answer.usage.cached_tokens == 0
        assert "local" in answer.usage.reason


async def test_without_prefill_workers_all_is_local() -> None:
    async with routed_cluster(Shape(prefill=0)) as routed:
        assert routed.dispatcher.ready
        assert (await routed.ask(PROMPT)).tokens[0] == routed.golden(PROMPT)
        assert (await routed.ask(PROMPT, 1)).tokens[0] == routed.golden(PROMPT, 1)


async def test_the_phases_of_a_request_sum_to_its_duration() -> None:
    async with routed_cluster(Shape(step_delay_s=0.002)) as routed:
        usage = (await routed.ask(PROMPT, num_choices=2)).usage
        phases = (
            usage.queue_ms,
            usage.route_ms,
            usage.reserve_ms,
            usage.prefill_ms,
            usage.transfer_ms,
            usage.decode_ms,
        )
        assert sum(phases) == pytest.approx(usage.duration_ms, abs=0.01)
        assert min(phases) >= 0
        assert usage.prefill_ms > 0 < usage.decode_ms


async def test_an_end_token_ends_the_answer_and_is_no_text() -> None:
    async with routed_cluster() as routed:
        golden = routed.golden(PROMPT, 20)
        for place in (0, 1, 7):
            end = golden[place]
            length = golden.index(end) + 1
            answer = await routed.ask(PROMPT, 20, end_token_ids=(end,))
            assert answer.tokens[0] == golden[:length]
            assert answer.reasons() == [FinishReason.STOP]
            assert answer.text.get(0, "") == "".join(f"{token}," for token in golden[: length - 1])
            assert answer.usage.completion_tokens == length


async def test_a_stop_string_cuts_text_and_usage_at_the_token_that_completes_it() -> None:
    async with routed_cluster() as routed:
        golden = routed.golden(PROMPT, 20)
        text = "".join(f"{token}," for token in golden)
        for first in (0, 3, 8):
            stop = f"{golden[first]},{golden[first + 1]}"
            answer = await routed.ask(PROMPT, 20, stop=(stop, "never"))
            assert answer.text.get(0, "") == text[: text.find(stop)]
            assert answer.reasons() == [FinishReason.STOP]
            assert answer.usage.completion_tokens == first + 2
            assert answer.tokens[0] == golden[: first + 2]


async def test_choices_have_their_own_seeds_and_share_the_prompt() -> None:
    async with routed_cluster(Shape(decode=2)) as routed:
        answer = await routed.ask(PROMPT, 12, num_choices=3, seed=7, temperature=1.0)
        for number in range(3):
            expected = routed.golden(PROMPT, 12, temperature=1.0, seed=choice_seed(7, number))
            assert answer.tokens[number] == expected
        assert len({tuple(tokens) for tokens in answer.tokens.values()}) == 3
        assert answer.usage.prompt_tokens == 40
        assert answer.usage.completion_tokens == 36
        assert answer.usage.finish_reasons == (FinishReason.LENGTH,) * 3
        again = await routed.ask(PROMPT, 12, num_choices=3, seed=7, temperature=1.0)
        assert again.tokens == answer.tokens


async def test_the_other_choices_also_start_when_the_first_is_a_single_token() -> None:
    async with routed_cluster() as routed:
        answer = await routed.ask(PROMPT, 1, num_choices=3)
        assert all(answer.tokens[number] == routed.golden(PROMPT, 1) for number in range(3))


async def test_a_reader_that_does_not_read_is_cut_and_the_others_are_not() -> None:
    async with routed_cluster(Shape(num_pages=512, step_delay_s=0.001), token_buffer=32) as routed:
        slow = routed.dispatcher.submit(routed.request(PROMPT, 500))
        other = await routed.ask(PROMPT[:7], 200)
        assert other.tokens[0] == routed.golden(PROMPT[:7], 200)
        with pytest.raises(SlowReader):
            await read(slow)


async def test_a_reader_that_leaves_early_cancels_the_request() -> None:
    async with routed_cluster(Shape(step_delay_s=0.002)) as routed:
        stream = routed.dispatcher.submit(routed.request(PROMPT, 100))
        items = aiter(stream)
        assert isinstance(await anext(items), Delta)
        await items.aclose()  # type: ignore[attr-defined]
        assert routed.dispatcher.num_live == 0
        assert routed.metric("requests_total", outcome="cancelled") == 1


async def test_overload_is_refused_with_a_wait() -> None:
    async with routed_cluster(Shape(step_delay_s=0.005), max_queued=4) as routed:
        requests = [routed.request(prompt, 4) for prompt in prompts(5, seed=2)]
        streams = [routed.dispatcher.submit(request) for request in requests[:4]]
        with pytest.raises(Overloaded) as refusal:
            routed.dispatcher.submit(requests[4])
        assert refusal.value.retry_after_s >= 1
        answers = await asyncio.gather(*map(read, streams))
        assert len(answers) == len(streams)
        assert routed.metric("refusals_total", reason="overloaded") == 1


async def test_bad_requests_are_refused_by_name() -> None:
    async with routed_cluster() as routed:
        submit, request = routed.dispatcher.submit, routed.request(PROMPT)
        with pytest.raises(UnknownModel):
            submit(replace(request, model="other"))
        with pytest.raises(InvalidRequest):
            submit(replace(request, prompt=()))
        with pytest.raises(ContextOverflow):
            submit(routed.request(PROMPT, 100_000))
        assert routed.dispatcher.num_live == 0


async def test_without_any_decode_worker_it_is_unavailable() -> None:
    async with routed_cluster(Shape(decode=0)) as routed:
        assert not routed.dispatcher.ready
        with pytest.raises(Unavailable):
            routed.dispatcher.submit(routed.request(PROMPT))


async def test_a_deadline_that_passes_while_decoding_ends_the_request() -> None:
    async with routed_cluster(Shape(step_delay_s=0.01)) as routed:
        with pytest.raises(DeadlineExceeded):
            await routed.ask(PROMPT, 200, time_left_s=0.3)


async def test_cancel_by_id_is_idempotent() -> None:
    async with routed_cluster(Shape(step_delay_s=0.005)) as routed:
        request = routed.request(PROMPT, 100)
        stream = routed.dispatcher.submit(request)
        assert routed.dispatcher.cancel(request.request_id)
        assert not routed.dispatcher.cancel(request.request_id)
        await stream.cancel()
        with pytest.raises(Cancelled):
            await read(stream)


async def test_a_draining_router_finishes_what_it_has_and_takes_no_more() -> None:
    async with routed_cluster(Shape(step_delay_s=0.002)) as routed:
        answer = asyncio.create_task(routed.ask(PROMPT, 20))
        await _accepted(routed)
        assert await routed.dispatcher.drain(10.0)
        assert (await answer).tokens[0] == routed.golden(PROMPT, 20)
        with pytest.raises(Unavailable):
            routed.dispatcher.submit(routed.request(PROMPT))


async def _accepted(routed: RoutedCluster) -> None:
    while not routed.dispatcher.num_live:  # noqa: ASYNC110 - bounded by the test's own timeout
        await asyncio.sleep(0)
