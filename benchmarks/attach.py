"""What the attached stream costs a token: one worker, one router, `--jobs` jobs that each get a token a step.

    python -m benchmarks.attach --jobs 64 --steps 2000

Both ends run in this process over gRPC on 127.0.0.1; the figure is wall time over tokens, so it is the sum of
sender, receiver and gRPC, on one core.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence

from benchmarks.bare_worker import LAYOUT, BareWorker
from twostroke.cluster.attach import AttachServicer, connect
from twostroke.cluster.core.ids import Incarnation, JobId, RequestId, WorkerId, new_incarnation
from twostroke.cluster.core.link import Outlet, WorkerLink
from twostroke.cluster.core.messages import (
    Role,
    RouterMessage,
    Stroke,
    Submit,
    TokenRun,
    Tokens,
    WorkerInfo,
    WorkerMessage,
)
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.cluster.wire.channel import bind, new_server
from twostroke.proto.v1.worker_pb2_grpc import add_WorkerServicer_to_server

STEPS_AHEAD = 8
"""Steps that may be queued before the receiver has seen them."""


class Source(BareWorker):
    """Implements `WorkerApp` as far as the benchmark needs it."""

    def __init__(self, num_jobs: int) -> None:
        super().__init__(
            WorkerInfo(WorkerId("w"), new_incarnation(), Role.DECODE, "", "none", LAYOUT, 1, 1, 1, ("grpc",))
        )
        self.outlet: Outlet
        self.jobs: list[JobId] = []
        self.full = asyncio.Event()
        self._num_jobs = num_jobs

    def attach(self, router: Incarnation, outlet: Outlet) -> "Source":
        self.outlet = outlet
        return self

    def receive(self, messages: Sequence[RouterMessage]) -> None:
        self.jobs.extend(message.job for message in messages)
        if len(self.jobs) == self._num_jobs:
            self.full.set()

    def closed(self, reason: str) -> None:
        self.jobs.clear()


class Sink:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.news = asyncio.Event()

    def on_messages(self, link: WorkerLink, messages: Sequence[WorkerMessage]) -> None:
        for message in messages:
            if isinstance(message, Tokens):
                self.num_tokens += len(message.runs)
        self.news.set()

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        raise SystemExit(f"the stream broke: {reason}")


async def measure(num_jobs: int, num_steps: int) -> float:
    """Microseconds a token."""
    source, sink = Source(num_jobs), Sink()
    server = new_server()
    servicer = AttachServicer(source)
    add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    link = await connect(f"127.0.0.1:{port}", new_incarnation(), sink)
    params = SamplingParams(max_tokens=num_steps)
    link.send([Submit(JobId(RequestId(f"r{n}"), 0, 0), Stroke.LOCAL, (1,), (), params, 60.0) for n in range(num_jobs)])
    await asyncio.wait_for(source.full.wait(), 10)
    started_s = time.perf_counter()
    for step in range(num_steps):
        source.outlet.deliver([Tokens(tuple(TokenRun(job, step, (step,)) for job in source.jobs))])
        while sink.num_tokens < (step + 1 - STEPS_AHEAD) * num_jobs:
            sink.news.clear()
            await asyncio.wait_for(sink.news.wait(), 10)
    while sink.num_tokens < num_steps * num_jobs:
        sink.news.clear()
        await asyncio.wait_for(sink.news.wait(), 10)
    elapsed_s = time.perf_counter() - started_s
    link.close("done")
    await link.wait_closed()
    await server.stop(0)
    return elapsed_s / (num_steps * num_jobs) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    figure = asyncio.run(measure(arguments.jobs, arguments.steps))
    print(f"{arguments.jobs} jobs, {arguments.steps} steps: {figure:.2f} us a token, both ends")


if __name__ == "__main__":
    main()
