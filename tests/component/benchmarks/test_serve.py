"""The load benchmark against a small SSE server that answers well, badly, or not at all."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks import compare, serve
from benchmarks.sse_client import read_answer

Script = Callable[[dict[str, object]], list[bytes]]
"""The pieces, transfer framing included, that answer a completion."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}"


def frame(event: object) -> bytes:
    data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(text: str = "a", finish: str | None = None) -> bytes:
    return frame({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None})


def usage(num_tokens: int) -> bytes:
    return frame({"choices": [], "usage": {"completion_tokens": num_tokens}})


DONE = frame(b"[DONE]") + b"0\r\n\r\n"


def well(body: dict[str, object]) -> list[bytes]:
    num_tokens = body["max_tokens"]
    assert isinstance(num_tokens, int)
    return [HEAD, *[token() for _ in range(num_tokens)], token("", "length"), usage(num_tokens), DONE]


class SseServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, object]] = []
        self.release = asyncio.Event()
        """Held answers (an empty script) wait for it."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
            body = await reader.readexactly(int(fields["Content-Length"]))
            path = head.split(b" ")[1]
            if path == b"/v1/models":
                models = b'{"data": [{"id": "m"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
            elif path != b"/v1/completions":
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                self.bodies.append(json.loads(body))
                pieces = self.script(self.bodies[-1])
                if not pieces:
                    async with asyncio.timeout(10):
                        await self.release.wait()
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def running(script: Script) -> AsyncIterator[tuple[SseServer, str]]:
    scripted = SseServer(script)
    server = await asyncio.start_server(scripted.answer, "127.0.0.1", 0)
    async with server:
        yield scripted, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        scripted.release.set()
        server.close()
        async with asyncio.timeout(10):
            await server.wait_closed()


async def run(url: str, *more: str) -> serve.Report:
    options = ["--url", url, "--num-requests", "6", "--warmup", "0", "--concurrency", "2", "--input-len", "5"]
    return await serve.measure(serve.build_parser().parse_args([*options, "--output-len", "4", *more]))


async def test_a_closed_loop_asks_all_and_counts_tokens() -> None:
    async with running(well) as (server, url):
        report = await run(url, "--warmup", "2", "--slo-ttft", "60000")
    assert (report.model, report.summary.requests, report.summary.failed) == ("m", 6, 0)
    assert (report.summary.output_tokens, report.summary.chunks, report.summary.short_answers) == (24, 24, 0)
    assert (report.summary.itl_ms.samples, report.summary.good_share) == (18, 1.0)
    assert len(server.bodies) == 8
    assert len({json.dumps(body["prompt"]) for body in server.bodies}) == 8
    body = server.bodies[-1]
    assert (body["stream"], body["ignore_eos"], body["temperature"], body["max_tokens"]) == (True, True, 0, 4)
    assert body["stream_options"] == {"include_usage": True}


async def test_an_open_loop_sends_at_its_rate() -> None:
    async with running(well) as (_, url):
        report = await run(url, "--rate", "200")
    assert (report.summary.requests, report.summary.failed) == (6, 0)
    assert report.max_start_lag_ms >= 0


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([REFUSAL], "http 503"),
        ([HEAD, token(), frame({"error": {"type": "worker_lost"}}), DONE], "in stream: worker_lost"),
        ([HEAD, token(), token()], "truncated"),
        ([HEAD, usage(0), DONE], "no tokens"),
        ([HEAD, frame(b"{nonsense"), DONE], "malformed"),
        ([b"gibberish\r\n\r\n"], "malformed"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"], "malformed"),
        ([b""], "closed without an answer"),
    ],
)
async def test_a_failure_is_counted_by_its_kind(pieces: list[bytes], error: str) -> None:
    async with running(lambda body: pieces) as (_, url):
        report = await run(url)
    assert report.summary.errors == {error: 6}
    assert (report.summary.failed, report.summary.good_share, report.summary.ttft_ms.samples) == (6, 0.0, 0)


async def test_a_silent_server_meets_the_deadline() -> None:
    async with running(lambda body: []) as (_, url):
        report = await run(url, "--timeout", "0.05", "--num-requests", "2")
    assert report.summary.errors == {"timeout": 2}


async def test_a_failed_warm_up_measures_nothing() -> None:
    async with running(lambda body: [REFUSAL]) as (server, url):
        with pytest.raises(ConnectionError, match="http 503"):
            await run(url, "--warmup", "1")
    assert len(server.bodies) == 1


def test_an_event_is_stamped_when_its_end_arrives_wherever_it_was_cut() -> None:
    stream = HEAD + token() + token() + token("", "length") + usage(3) + DONE
    pieces = [(float(n), stream[n : n + 1]) for n in range(len(stream))]
    answer = read_answer(pieces, 0.0, 3)
    ends = [len(HEAD + token() * n) - 4 for n in (1, 2)]
    assert answer.error is None
    # The last chunk has no text, but one token is missing without it.
    assert answer.arrivals_s[:2] == tuple(map(float, ends))
    assert (len(answer.arrivals_s), answer.num_tokens) == (3, 3)


def test_nobody_listening_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--url", "http://127.0.0.1:1", "--num-requests", "1"]) == 2
    assert "nothing measured" in capsys.readouterr().err


async def test_exit_code_1_and_json_when_a_request_failed(tmp_path: Path) -> None:
    answered = 0

    def second_fails(body: dict[str, object]) -> list[bytes]:
        nonlocal answered
        answered += 1
        return [REFUSAL] if answered == 2 else well(body)

    out = tmp_path / "out.json"
    async with running(second_fails) as (_, url):
        arguments = ["--url", url, "--num-requests", "3", "--warmup", "0", "--json", str(out)]
        assert await asyncio.to_thread(serve.main, arguments) == 1
    written = json.loads(out.read_text())
    assert written["summary"]["errors"] == {"http 503": 1}
    assert written["configuration"]["num_requests"] == 3
    assert written["facts"]["cores"] >= 1


async def test_compare_takes_turns_and_repeats_no_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    async with running(well) as (server, url):
        rows = ["--row", f"one={url}", "--row", f"two={url}", "--json", str(out)]
        arguments = [*rows, "--runs", "2", "--num-requests", "2", "--warmup", "1", "--output-len", "3"]
        assert await asyncio.to_thread(compare.main, arguments) == 0
    assert len({json.dumps(body["prompt"]) for body in server.bodies}) == 2 * 2 * 3
    assert capsys.readouterr().out.splitlines()[2].startswith("| one | ")
    assert [len(runs) for runs in json.loads(out.read_text())["runs"].values()] == [2, 2]
