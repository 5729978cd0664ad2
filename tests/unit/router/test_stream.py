"""Who reads a stream is woken when there is something to do."""

import asyncio

from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.request import ChoiceEnd, Delta, StreamItem
from twostroke.router.stream import BufferedStream

TIMEOUT_S = 5.0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_reader_of_the_whole_sleeps_until_many_tokens_wait_or_the_end() -> None:
    stream, seen = BufferedStream(lambda: None, wake_tokens=3), list[StreamItem]()

    async def read() -> None:
        async for item in stream:
            seen.append(item)

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        group.create_task(read())
        await settle()
        for token in range(2):
            assert stream.put(Delta(0, "ab"[token], (token,))) == token + 1
            await settle()
        assert seen == []
        assert stream.put(Delta(0, "c", (2,))) == 3
        await settle()
        assert seen == [Delta(0, "abc", (0, 1, 2))]
        end = ChoiceEnd(0, FinishReason.STOP, 4)
        assert stream.put(Delta(0, "d", (3,))) == 1
        assert stream.put(end) == 1
        stream.close()
    assert seen[1:] == [Delta(0, "d", (3,)), end]


async def test_every_item_wakes_the_reader_of_a_stream() -> None:
    stream = BufferedStream(lambda: None)
    items = [Delta(0, "a", (7,)), Delta(0, "", ()), ChoiceEnd(0, FinishReason.LENGTH, 1)]
    async with asyncio.timeout(TIMEOUT_S):
        reading = aiter(stream)
        for item in items:
            waiting = asyncio.ensure_future(anext(reading))
            await settle()
            stream.put(item)
            assert await waiting == item
