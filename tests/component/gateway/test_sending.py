"""A client that takes nothing is left; one that is slow between sends is not."""

import asyncio

import pytest
from starlette.types import Message, Send

from twostroke.router.gateway.sending import SendLimit

LIMIT_S = 0.02


async def send_all(send: Send, *kinds: str) -> None:
    async with asyncio.timeout(5), SendLimit(send, LIMIT_S) as out:
        for kind in kinds:
            await out.send({"type": kind})


async def test_a_stuck_send_ends_the_block() -> None:
    async def send(message: Message) -> None:
        if message["type"] == "stuck":
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await send_all(send, "quick", "stuck")


async def test_waiting_between_sends_takes_as_long_as_it_takes() -> None:
    sent: list[Message] = []
    looked = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)

    async with asyncio.timeout(5), SendLimit(send, LIMIT_S) as out:
        await out.send({"type": "first"})
        asyncio.get_running_loop().call_later(4 * LIMIT_S, looked.set)
        await looked.wait()
        await out.send({"type": "second"})
    assert [message["type"] for message in sent] == ["first", "second"]


async def test_an_error_of_the_block_is_its_own() -> None:
    async def send(message: Message) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await send_all(send, "first")
