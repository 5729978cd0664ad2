"""Random lives of prefill jobs: submits, cancels, lost routers, failed steps and transfers, expiry.

The golden answers are checked by the recorder, pages and jobs after every move by the bench, and the bytes of
announced pages here, whenever a shipment ends: that may be long after the job did.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.engine_builders import (
    VOCAB,
    expected_output,
    make_info,
    make_lease,
    make_prefill,
    make_submit,
    page_slots,
)
from twostroke.cluster.core.ids import Incarnation, JobId, PageId
from twostroke.cluster.core.messages import Role, Stroke, Submit
from twostroke.cluster.core.prefix import max_hit_pages
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.commands import PagesReady, PrefillDone, ShipmentDropped, ShipmentEnded
from twostroke.prefill_worker.scheduler import PrefillLimits

ROUTERS = [Incarnation("router-a"), Incarnation("router-b")]


@dataclass
class Shipment:
    submit: Submit
    pages: list[PageId] = field(default_factory=list)
    done: bool = False


class PrefillMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        num_pages=st.integers(4, 24),
        chunk_tokens=st.sampled_from([1, 3, 4, 8, 64]),
        max_waiting=st.integers(1, 4),
    )
    def start(self, page_size: int, num_pages: int, chunk_tokens: int, max_waiting: int) -> None:
        info = make_info(Role.PREFILL, page_size=page_size, num_pages=num_pages, chunk_tokens=chunk_tokens)
        self.bench = make_prefill(info, PrefillLimits(max_waiting=max_waiting, hold_s=5.0))
        self.page_size = page_size
        self.sent: list[tuple[Incarnation, Submit]] = []
        self.shipments: dict[JobId, Shipment] = {}

    @rule(
        length=st.integers(1, 40),
        first=st.integers(0, 1),
        held=st.integers(0, 3),
        max_tokens=st.integers(0, 6),
        end=st.integers(0, 3),
        delivered=st.integers(0, 3),
        time_left_s=st.sampled_from([2.0, 100.0]),
        router=st.sampled_from(ROUTERS),
    )
    def submit(
        self,
        length: int,
        first: int,
        held: int,
        max_tokens: int,
        end: int,
        delivered: int,
        time_left_s: float,
        router: Incarnation,
    ) -> None:
        prompt = tuple((first + position) % VOCAB for position in range(length))
        plain = make_submit(Stroke.PREFILL, prompt, max_tokens=6)
        ends = () if end else tuple(expected_output(plain)[:1])
        sampling = SamplingParams(max_tokens=max_tokens, end_token_ids=ends)
        name = f"job-{len(self.sent)}"
        output = expected_output(make_submit(Stroke.PREFILL, prompt, sampling=sampling))
        given = tuple(output[: min(delivered, max(0, len(output) - 1))])
        num_tokens = length + len(given)
        lease = None
        if max_tokens > len(given) + 1:
            num_pages = -(-num_tokens // self.page_size)
            num_held = min(held, max_hit_pages(num_tokens, self.page_size))
            lease = make_lease(num_pages, num_held=num_held, page_size=self.page_size, name=name)
        submit = make_submit(
            Stroke.PREFILL,
            prompt,
            name=name,
            delivered=given,
            sampling=sampling,
            lease=lease,
            time_left_s=time_left_s,
        )
        self.sent.append((router, submit))
        self.bench.send(submit, router)
        self.look()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        router, submit = data.draw(st.sampled_from(self.sent))
        self.bench.router(router)
        self.bench.cancel(submit.job.request_id, router)
        self.look()

    @rule(router=st.sampled_from(ROUTERS))
    def lose_router(self, router: Incarnation) -> None:
        self.bench.lose_router(router)
        self.look()

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()
            self.look()

    @rule()
    def fail_step(self) -> None:
        self.bench.fail_next = True
        self.bench.step()
        self.bench.fail_next = False
        self.look()

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.bench.wait(seconds)
        self.look()

    @precondition(lambda self: self.shipments)
    @rule(data=st.data(), error=st.sampled_from(["", "", "lost"]))
    def end_shipment(self, data: st.DataObject, error: str) -> None:
        job = data.draw(st.sampled_from(sorted(self.shipments)))
        self.finish_shipment(job, error if self.shipments[job].done else "lost")

    def finish_shipment(self, job: JobId, error: str) -> None:
        self.check_bytes(self.shipments.pop(job))
        self.bench.post(ShipmentEnded(job, error, 1, 1, 0.1, "loopback"))
        self.look()

    def look(self) -> None:
        """Take in what the shipping task would be told."""
        for event in self.bench.events:
            if isinstance(event, PagesReady):
                shipment = self.shipment(event.job)
                assert event.first == len(shipment.pages), "announcements are contiguous"
                shipment.pages += event.pages
            elif isinstance(event, PrefillDone):
                shipment = self.shipment(event.job)
                assert len(shipment.pages) == len(event.lease.shards[0].pages), "all pages before the commit"
                assert event.first_token == expected_output(shipment.submit)[event.first_token_index]
                shipment.done = True
            elif isinstance(event, ShipmentDropped):
                assert event.job in self.shipments, "a shipment that never began is not dropped"
        self.bench.events.clear()

    def shipment(self, job: JobId) -> Shipment:
        [submit] = [submit for _, submit in self.sent if submit.job == job]
        return self.shipments.setdefault(job, Shipment(submit))

    def check_bytes(self, shipment: Shipment) -> None:
        """Until it ends, every announced page holds the tokens of its position (FIELD-REPORTS A6)."""
        lease, size = shipment.submit.lease, self.page_size
        assert lease is not None
        tokens = shipment.submit.prompt + shipment.submit.delivered
        for index, page in enumerate(shipment.pages, start=lease.num_held):
            ids, marks = page_slots(self.bench, page)
            expected = tokens[index * size : (index + 1) * size]
            assert tuple(ids[: len(expected)]) == expected
            assert marks[: len(expected)] == list(range(index * size + 1, index * size + len(expected) + 1))

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(200):
            self.bench.run()
            self.look()
            for job in sorted(self.shipments):
                self.finish_shipment(job, "" if self.shipments[job].done else "lost")
            if self.bench.scheduler.idle:
                break
        self.bench.check_at_rest()
        for recorder in self.bench.routers.values():
            for answer in recorder.answers.values():
                assert (answer.ended is None) != (answer.refused is None), f"{answer.submit.job} has no one answer"


TestPrefill = PrefillMachine.TestCase
TestPrefill.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
