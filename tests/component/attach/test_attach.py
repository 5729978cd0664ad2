"""The attached stream over real gRPC."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.children import child_environment
from tests.echo_app import EchoApp, Recorder, job, serve
from tests.waiting import until
from tests.wire_strategies import submit
from twostroke.cluster.attach import (
    WORKER_OUTBOX_BYTES,
    AttachedLink,
    AttachServicer,
    check,
    connect,
    describe,
    fetch_snapshot,
    request_drain,
)
from twostroke.cluster.core.errors import PeerLost
from twostroke.cluster.core.ids import Incarnation, PrefixKey, new_incarnation
from twostroke.cluster.core.messages import Cancel, Ended, Refused, TokenRun, Tokens
from twostroke.cluster.stream import Timing

FAST = Timing(beat_s=0.05, silence_s=0.3, hello_s=2.0)


class Pair:
    """One served app, one connected link."""

    def __init__(self, app: EchoApp, servicer: AttachServicer, port: int, router: Incarnation) -> None:
        self.app = app
        self.servicer = servicer
        self.address = f"127.0.0.1:{port}"
        self.router = router
        self.recorder = Recorder()
        self.link: AttachedLink


@asynccontextmanager
async def attached(timing: Timing = FAST) -> AsyncIterator[Pair]:
    """Ends with the no-leak check: sessions closed exactly once, no stream, no task."""
    app = EchoApp()
    server, servicer, port = await serve(app, timing)
    pair = Pair(app, servicer, port, new_incarnation())
    pair.link = await connect(pair.address, pair.router, pair.recorder, timing=timing)
    try:
        yield pair
    finally:
        pair.link.close("the test is over")
        await asyncio.wait_for(pair.link.wait_closed(), 5)
        for session in app.sessions[pair.router]:
            await asyncio.wait_for(session.closed_event.wait(), 5)
        await server.stop(1.0)
        await no_tasks()
        assert all(len(session.closes) == 1 for sessions in app.sessions.values() for session in sessions)
        assert servicer.num_attached == 0
        assert len(pair.recorder.losses) <= 1


async def no_tasks() -> None:
    await until(
        lambda: not any("attach." in task.get_name() or "link." in task.get_name() for task in asyncio.all_tasks())
    )


async def test_tokens_of_200_jobs_arrive_in_order() -> None:
    async with attached() as pair:
        assert pair.link.info == pair.app.info
        submits = [submit(prompt=tuple(range(number, number + 30)), job=job(number)) for number in range(200)]
        for one in submits:
            pair.link.send([one])
        await pair.recorder.until_ended(200)
        for one in submits:
            assert pair.recorder.tokens_of(one.job) == list(one.prompt)
        assert pair.app.sessions[pair.router][0].received == submits


async def test_cancel_and_refusal_are_answered() -> None:
    async with attached() as pair:
        pair.link.send([submit(prompt=(1,), job=job(1), max_tokens=0), submit(prompt=(), job=job(2)), Cancel(job(1))])
        await pair.recorder.until_ended(2)
        ends = [message for message in pair.recorder.messages if isinstance(message, Ended | Refused)]
        assert {end.job for end in ends} == {job(1), job(2)}
        pair.link.send([Cancel(job(1))])


async def test_a_prompt_larger_than_a_message_arrives_whole_and_in_order() -> None:
    async with attached() as pair:
        large = submit(prompt=tuple(range(700_000)), job=job(1), max_tokens=0)
        after = submit(prompt=(5,), job=job(2))
        pair.link.send([large, after])
        await pair.recorder.until_ended(1)
        assert pair.app.sessions[pair.router][0].received == [large, after]


async def test_an_idle_stream_lives() -> None:
    async with attached() as pair:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pair.recorder.lost.wait(), 3 * FAST.silence_s)
        pair.link.send([submit(prompt=(1,), job=job(1))])
        await pair.recorder.until_ended(1)


async def test_a_worker_that_stops_ends_its_streams() -> None:
    async with attached() as pair:
        pair.link.send([submit(prompt=tuple(range(500)), job=job(2))])
        await pair.recorder.until_ended(1)
        await pair.servicer.close("drained", flush_s=1.0)
        await asyncio.wait_for(pair.recorder.lost.wait(), 5)
        pair.link.send([submit(prompt=(1,), job=job(1))])
        assert pair.recorder.losses == ["the peer closed the stream"]


async def test_close_is_silent_and_frees_at_once() -> None:
    async with attached() as pair:
        pair.link.close("no longer wanted")
        pair.link.close("twice")
        await asyncio.wait_for(pair.app.sessions[pair.router][0].closed_event.wait(), 5)
        await pair.link.wait_closed()
        assert pair.recorder.losses == []


async def test_a_router_that_attaches_again_replaces_its_older_stream() -> None:
    async with attached() as pair:
        second = Recorder()
        link = await connect(pair.address, pair.router, second, timing=FAST)
        await asyncio.wait_for(pair.recorder.lost.wait(), 5)
        link.send([submit(prompt=(4, 5), job=job(1))])
        await second.until_ended(1)
        first, newer = pair.app.sessions[pair.router]
        assert first.closes == ["the router attached again"]
        assert newer.closes == []
        link.close("done")
        await link.wait_closed()


async def test_an_outbox_over_its_bound_closes_the_stream() -> None:
    async with attached() as pair:
        pair.link.send([submit(prompt=(1,), job=job(1), max_tokens=0)])
        await until(lambda: bool(pair.recorder.messages))
        session = pair.app.sessions[pair.router][0]
        tokens = Tokens((TokenRun(job(1), 0, tuple([1 << 31] * 100_000)),))
        session.outlet.deliver([tokens] * (WORKER_OUTBOX_BYTES // 500_000 + 2))
        await asyncio.wait_for(pair.recorder.lost.wait(), 5)
        assert "too slowly" in session.closes[0]


async def test_a_failing_app_ends_its_own_stream_only() -> None:
    async with attached() as pair:
        other = Recorder()
        link = await connect(pair.address, new_incarnation(), other, timing=FAST)
        pair.app.sessions[pair.router][0].closes.append("")  # its `receive` now raises
        pair.link.send([submit(prompt=(1,), job=job(1))])
        await asyncio.wait_for(pair.recorder.lost.wait(), 5)
        pair.app.sessions[pair.router][0].closes.remove("")
        link.send([submit(prompt=(9,), job=job(2))])
        await other.until_ended(1)
        link.close("done")
        await link.wait_closed()


async def test_nobody_there_is_peer_lost() -> None:
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:1"):
        await connect("127.0.0.1:1", new_incarnation(), Recorder(), timing=FAST)
    with pytest.raises(PeerLost):
        await describe("127.0.0.1:1", timeout_s=1.0)


async def test_a_listener_that_accepts_and_never_answers_is_peer_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerLost):
            await connect(address, new_incarnation(), Recorder(), timing=Timing(hello_s=0.5))


async def test_calls_of_their_own() -> None:
    async with attached() as pair:
        pair.app.keys = tuple(PrefixKey(number.to_bytes(16, "little")) for number in range(100_000))
        assert await describe(pair.address) == pair.app.info
        assert await fetch_snapshot(pair.address) == await pair.app.snapshot()
        assert await check(pair.address) == await pair.app.check()
        assert await request_drain(pair.address, 2.0)
        assert not await request_drain(pair.address, 0.5)


# ------------------------------------------------------------------------------- peers that die or freeze


@asynccontextmanager
async def worker_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.echo_app", stdout=asyncio.subprocess.PIPE, env=child_environment()
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield process, f"127.0.0.1:{int(line)}"
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.wait(), 10)


async def test_a_killed_worker_is_lost_at_once() -> None:
    async with worker_process() as (process, address):
        recorder = Recorder()
        link = await connect(address, new_incarnation(), recorder)
        process.kill()
        await asyncio.wait_for(recorder.lost.wait(), 2)
        await asyncio.wait_for(link.wait_closed(), 5)
    await no_tasks()


async def test_a_frozen_worker_is_lost_by_silence() -> None:
    async with worker_process() as (process, address):
        recorder = Recorder()
        link = await connect(address, new_incarnation(), recorder, timing=FAST)
        process.send_signal(signal.SIGSTOP)
        # More than the socket buffers hold: the writer is stuck, and must not delay the verdict.
        link.send([submit(prompt=tuple(range(60_000)), job=job(number)) for number in range(60)])
        await asyncio.wait_for(recorder.lost.wait(), 3)
        assert "no frame for" in recorder.losses[0]
        await asyncio.wait_for(link.wait_closed(), 5)
        process.send_signal(signal.SIGCONT)
    await no_tasks()


async def test_a_half_open_connection_is_noticed_by_both_sides() -> None:
    app = EchoApp()
    server, servicer, port = await serve(app, FAST)
    async with _proxy(port) as proxy:
        router, recorder = new_incarnation(), Recorder()
        link = await connect(f"127.0.0.1:{proxy.port}", router, recorder, timing=FAST)
        link.send([submit(prompt=(1,), job=job(1), max_tokens=0)])
        await until(lambda: bool(recorder.messages))
        proxy.passing = False
        await asyncio.wait_for(recorder.lost.wait(), 3)
        session = app.sessions[router][0]
        await asyncio.wait_for(session.closed_event.wait(), 3)
        assert "no frame for" in session.closes[0]
        await asyncio.wait_for(link.wait_closed(), 5)
    await server.stop(0)
    await no_tasks()
    assert servicer.num_attached == 0


class _Proxy:
    """Passes bytes until told to swallow them."""

    def __init__(self) -> None:
        self.passing = True
        self.port = 0

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if self.passing:
                    writer.write(data)
                    await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def _proxy(target: int) -> AsyncIterator[_Proxy]:
    proxy = _Proxy()
    tasks: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target)
        tasks.append(asyncio.create_task(proxy.pump(reader, back)))
        tasks.append(asyncio.create_task(proxy.pump(there, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
