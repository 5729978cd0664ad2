"""Shipments of one prefill worker, on a loop whose time is its own."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from tests.faulty_transport import FaultyTransport
from tests.transfer_builders import DECODE, LAYOUT, DecodeSide, make_lease, random_pages
from twostroke.cluster.core.ids import PageId
from twostroke.cluster.telemetry.metrics import WorkerMetrics
from twostroke.cluster.transport.loopback import LoopbackTransport, Receiver
from twostroke.engine.commands import PagesReady, PrefillDone, ShipmentDropped, ShipmentEnded, ShipmentTouched
from twostroke.prefill_worker.shipping import TOUCH_INTERVAL_S, Shipping

PUSH_S = 0.3
NUM_PAGES = 8


class Line:
    """A shipping desk whose pushes take PUSH_S each, as on a slow network; what it posts is noted with its time."""

    def __init__(self) -> None:
        self.side = DecodeSide()
        self.lease = make_lease(list(range(NUM_PAGES)))
        self.side.book.open(self.lease)
        receivers = {DECODE: Receiver(self.side.book, self.side.memory)}
        transport = FaultyTransport(LoopbackTransport(random_pages(LAYOUT, NUM_PAGES), receivers), self._slow)
        self.registry = CollectorRegistry()
        self.ended = asyncio.Event()
        self.posted: list[tuple[float, ShipmentTouched | ShipmentEnded]] = []
        self.shipping = Shipping([transport], self._post, WorkerMetrics(self.registry, "fake", "prefill-0"))

    async def _slow(self, where: str) -> None:
        if where == "push":
            await asyncio.sleep(PUSH_S)

    def _post(self, command: ShipmentTouched | ShipmentEnded) -> None:
        self.posted.append((asyncio.get_running_loop().time(), command))
        if isinstance(command, ShipmentEnded):
            self.ended.set()

    def failures(self, reason: str) -> float:
        labels = {"model_name": "fake", "engine": "prefill-0", "reason": reason}
        return self.registry.get_sample_value("twostroke_kv_transfer_failures_total", labels) or 0.0


@pytest.mark.looptime
async def test_the_engine_hears_of_a_shipment_that_gets_on() -> None:
    """In time for a hold that is shorter than the whole transfer, and not of every part."""
    line = Line()
    job = line.lease.job
    line.shipping.on_event(PagesReady(job, line.lease, 0, (PageId(0),)))
    for page in range(1, NUM_PAGES):
        await asyncio.sleep(PUSH_S)
        line.shipping.on_event(PagesReady(job, line.lease, page, (PageId(page),)))
    line.shipping.on_event(PrefillDone(job, line.lease, 7, 0))
    await line.ended.wait()
    *touches, (_, end) = line.posted
    assert isinstance(end, ShipmentEnded)
    assert end.error == ""
    times = [at_s for at_s, _ in touches]
    assert all(isinstance(command, ShipmentTouched) and command.job == job for _, command in touches)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert len(gaps) >= 2
    assert all(TOUCH_INTERVAL_S <= gap <= TOUCH_INTERVAL_S + PUSH_S + 1e-6 for gap in gaps), gaps
    await line.shipping.close()


async def test_what_is_dropped_before_it_begins_is_no_failed_transfer() -> None:
    """A first token that ends the answer: nothing was to be sent."""
    line = Line()
    job = line.lease.job
    line.shipping.on_event(PagesReady(job, line.lease, 0, (PageId(0),)))
    line.shipping.on_event(ShipmentDropped(job, "finished"))
    await line.ended.wait()
    assert [command for _, command in line.posted] == [ShipmentEnded(job, "finished", 0, 0, 0.0, "")]
    assert (line.failures("transfer_failed"), line.failures("dropped")) == (0, 1)
    await line.shipping.close()
