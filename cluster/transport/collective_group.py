"""One generation of a pair's process group, and the thread that alone touches it.

    1. PairStore      on the decode side, one a process: a TCPStore that listens on the worker's own host
    2. connect        both sides meet in the store under the group's name: gloo for host memory, NCCL for two GPUs
    3. stage + send   pages copied into the staging buffer and summed, then posted as one flat message
       receive        into the staging buffer; `land` checks the sums and only then writes the pages
    4. close          the group, its staging buffer and its names in the store are gone

torch.distributed waits block, so each group has a `PairThread`. Every wait has a deadline, after which gloo has
closed its connection: an operation that was given up never touches its buffer again. Whoever waits for
the thread may stop waiting at any time, and a daemon thread holds up no exit. torch is imported here only.
"""

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
import structlog
import torch
import torch.distributed

from twostroke.cluster.core.errors import TransferFailed
from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.layout import PageMemory

distributed: Any = torch.distributed
"""The stubs know neither the stores nor how a group is made on one."""

log = structlog.get_logger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

DECODE_RANK, PREFILL_RANK = 0, 1
TAG = 0
ROW_WORDS = 1024
"""Sums are taken over rows and columns of this many words: no temporary as large as the message."""


@runtime_checkable
class DevicePages(Protocol):
    """A page memory that lies on a device. `tensor` is `[page, ...]`, contiguous."""

    @property
    def tensor(self) -> torch.Tensor: ...


def device_pages(memory: PageMemory) -> torch.Tensor | None:
    """The pool as bytes `[page, page_bytes]` when it lies on a GPU."""
    if not isinstance(memory, DevicePages) or memory.tensor.device.type != "cuda":
        return None
    return memory.tensor.view(memory.num_pages, -1).view(torch.uint8)


class PairThread:
    """Runs functions one after the other, off the event loop. One pair gives it one function at a time."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Cancellation ends the waiting, not the function. Raises TransferFailed once `stop` was called."""
        if self._stopped:
            raise TransferFailed("the group is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._jobs.put(partial(_run_job, loop, future, partial(function, *args, **kwargs)))
        try:
            return await future
        finally:
            del future  # else a failure, its traceback and this frame keep each other alive

    async def finish(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """As `run`, but the function has ended when this returns or raises, also by cancellation."""
        work = asyncio.ensure_future(self.run(function, *args, **kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
        finally:
            del work

    def stop(self, last: Callable[[], None]) -> None:
        """Run `last` after what is under way, then end. Does not wait. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._jobs.put(last)
            self._jobs.put(None)

    async def wait_ended(self, timeout_s: float) -> bool:
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _run_job(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Result]", job: Callable[[], Result]) -> None:
    """In the thread."""
    try:
        value = job()
    except Exception as error:
        _tell(loop, future.set_exception, error)
    else:
        _tell(loop, future.set_result, value)
    finally:
        del future


def _tell(loop: asyncio.AbstractEventLoop, settle: Callable[[Any], None], outcome: object) -> None:
    def settle_once() -> None:
        with suppress(asyncio.InvalidStateError):  # nobody waits any more
            settle(outcome)

    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle_once)


class PairStore:
    """The rendezvous, hosted by the decode side."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Blocks for milliseconds. Raises OSError when the host is not ours."""
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.bind(address)
            listener.listen(128)
            self.port: int = listener.getsockname()[1]
            # The listener is given away bound, because TCPStore itself would listen on every interface.
            self.store = distributed.TCPStore(
                host,
                self.port,
                None,
                True,
                timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
            )
            listener.detach()
        finally:
            listener.close()


class PairGroup:
    """One side of one generation. Everything but the constructor runs in the pair's thread.

    Every method that talks to the peer raises TransferFailed, within its deadline.
    """

    def __init__(
        self,
        memory: PageMemory,
        *,
        name: str,
        rank: int,
        backend: str,
        host: str,
        staging_bytes: int,
        timeout_s: float,
        slots: int = 1,
    ) -> None:
        """`host` is our own; gloo listens there. `slots` messages of `staging_bytes` can be staged at a time."""
        self._memory = memory
        self._name = name
        self._rank = rank
        self._host = host
        self._timeout_s = timeout_s
        self._staging_bytes = staging_bytes
        self._slots = slots
        self._pool = device_pages(memory) if backend == "nccl" else None
        self._staging: torch.Tensor | None = None
        self._store: Any = None
        self._group: Any = None

    def connect(self, store: Any) -> None:
        """Meet the peer in our own store, or in the one at `(host, port)`."""
        timeout = timedelta(seconds=self._timeout_s)
        try:
            if isinstance(store, tuple):
                store = distributed.TCPStore(*store, None, False, timeout, wait_for_workers=False)
            else:
                store = store.clone()
            self._store = store
            named = distributed.PrefixStore(self._name, store)
            if self._pool is not None:
                torch.cuda.set_device(self._pool.device)
                self._group = distributed.ProcessGroupNCCL(named, self._rank, 2, timeout)
            else:
                options = distributed.ProcessGroupGloo._Options()
                options._timeout = timeout
                options._threads = 1
                options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self._host)]
                self._group = distributed.ProcessGroupGloo(named, self._rank, 2, options)
            device = self._pool.device if self._pool is not None else None
            self._staging = torch.empty((self._slots, self._staging_bytes), dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise _failure("the group cannot be made", error) from error

    def stage(self, pages: Sequence[PageId], slot: int = 0) -> list[int]:
        """Copy the pages and return their sums; the pool is let go when this returns."""
        staging = self._buffer(len(pages), slot)
        if self._pool is not None:
            index = torch.tensor(list(pages), dtype=torch.int64, device=self._pool.device)
            torch.index_select(self._pool, 0, index, out=staging.view(len(pages), -1))
            torch.cuda.current_stream().synchronize()
        else:
            staging.numpy()[:] = np.frombuffer(self._memory.read(pages), dtype=np.uint8)
        return checksums(staging, len(pages))

    def send(self, num_pages: int, deadline_s: float, slot: int = 0) -> None:
        """Post what was staged and wait until it left. `deadline_s` is on time.monotonic."""
        try:
            self._peer.send([self._buffer(num_pages, slot)], 1 - self._rank, TAG).wait(_remaining(deadline_s))
        except RuntimeError as error:
            raise _failure("sending", error) from error

    def receive(self, num_pages: int, deadline_s: float) -> None:
        """Into the staging buffer."""
        try:
            self._peer.recv([self._buffer(num_pages)], 1 - self._rank, TAG).wait(_remaining(deadline_s))
        except RuntimeError as error:
            raise _failure("receiving", error) from error

    def land(self, pages: Sequence[PageId], expected: Sequence[int]) -> None:
        """Check what was received and write it. Raises TransferFailed, and writes nothing, if a page differs."""
        staging = self._buffer(len(pages))
        sums = checksums(staging, len(pages))
        if len(expected) != len(sums):
            raise TransferFailed(f"{len(expected)} checksums for {len(pages)} pages; two a page")
        for index in range(len(pages)):
            if sums[2 * index : 2 * index + 2] != list(expected[2 * index : 2 * index + 2]):
                raise TransferFailed(f"page {index} of the push arrived damaged")
        if self._pool is not None:
            index_tensor = torch.tensor(list(pages), dtype=torch.int64, device=self._pool.device)
            self._pool.index_copy_(0, index_tensor, staging.view(len(pages), -1))
            # The pages are announced at once, and the engine computes on a stream of its own.
            torch.cuda.current_stream().synchronize()
        else:
            self._memory.write(pages, staging.numpy().data)

    def close(self) -> None:
        """Idempotent. Never raises."""
        group, store = self._group, self._store
        self._group = self._store = self._staging = None
        try:
            if group is not None:
                group.abort()
            if store is not None and self._rank == DECODE_RANK:
                for key in store.list_keys():
                    if self._name in key:
                        store.delete_key(key)
        except RuntimeError as error:
            log.warning("group_close_failed", group=self._name, error=str(error))

    @property
    def _peer(self) -> Any:
        if self._group is None:
            raise TransferFailed("the group is closed")
        return self._group

    def _buffer(self, num_pages: int, slot: int = 0) -> torch.Tensor:
        if self._staging is None:
            raise TransferFailed("the group is closed")
        return self._staging[slot, : num_pages * self._memory.layout.page_bytes]


def checksums(data: torch.Tensor, num_pages: int) -> list[int]:
    """Two a page over its 32-bit words: their sum, and the sum of each times its position, modulo 2**64.

    Position r * ROW + c: the weighted sum comes from the sums of rows and of columns, without a product a word.
    """
    words = data.view(torch.int32)
    row = int(np.gcd(words.numel() // num_pages, ROW_WORDS))
    table = words.view(num_pages, -1, row)
    if data.device.type == "cpu":  # numpy sums narrow into wide integers several times faster than torch
        host = table.numpy()
        rows = torch.from_numpy(host.sum(2, dtype=np.int64))
        columns = torch.from_numpy(host.sum(1, dtype=np.int64))
    else:
        rows, columns = table.sum(2, dtype=torch.int64), table.sum(1, dtype=torch.int64)
    row_weights = torch.arange(rows.shape[1], device=data.device) * row
    weighted = (rows * row_weights).sum(1) + (columns * torch.arange(row, device=data.device)).sum(1)
    result: list[int] = torch.stack([rows.sum(1), weighted], dim=1).flatten().tolist()
    return result


def _remaining(deadline_s: float) -> timedelta:
    # Zero would mean no limit.
    return timedelta(seconds=max(0.001, deadline_s - time.monotonic()))


def _failure(what: str, error: RuntimeError) -> TransferFailed:
    return TransferFailed(f"{what}: {str(error).splitlines()[0][:300]}")
