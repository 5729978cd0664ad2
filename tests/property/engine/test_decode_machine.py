"""Random lives of decode jobs in a tight pool: leases, commits of present, older and wrong epochs, local prefill,
preemption, cancels, lost routers, failed steps, expiry. The recorder knows every token that must come.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine_builders import VOCAB, expected_output, fill_page, make_decode, make_info, make_submit
from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId
from twostroke.cluster.core.messages import Lease, Outcome, RenewLease, Role, Stroke, Submit
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.decode_worker.scheduler import DecodeLimits
from twostroke.engine.commands import Committed, LeaseClosed, LeaseOpened, LeaseRenewed, LeaseTouched, PagesReleased

ROUTERS = [Incarnation("router-a"), Incarnation("router-b")]


class DecodeMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        num_pages=st.integers(4, 24),
        chunk_tokens=st.sampled_from([1, 3, 4, 8, 64]),
        max_running=st.integers(1, 5),
        max_preemptions=st.integers(0, 2),
        local_resume_tokens=st.sampled_from([0, 4, 256]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        chunk_tokens: int,
        max_running: int,
        max_preemptions: int,
        local_resume_tokens: int,
    ) -> None:
        info = make_info(Role.DECODE, page_size=page_size, num_pages=num_pages, chunk_tokens=chunk_tokens)
        limits = DecodeLimits(max_running, 4, 5.0, max_preemptions, local_resume_tokens)
        self.bench = make_decode(info, limits)
        self.page_size = page_size
        self.sent: dict[JobId, tuple[Incarnation, Submit]] = {}
        self.open: dict[LeaseId, Lease] = {}
        self.old: list[Lease] = []
        self.closed: list[Lease] = []

    @rule(
        stroke=st.sampled_from([Stroke.RESERVE, Stroke.LOCAL]),
        length=st.integers(1, 30),
        first=st.integers(0, 1),
        max_tokens=st.integers(1, 20),
        end=st.integers(0, 5),
        delivered=st.integers(0, 3),
        time_left_s=st.sampled_from([2.0, 100.0]),
        router=st.sampled_from(ROUTERS),
    )
    def submit(
        self,
        stroke: Stroke,
        length: int,
        first: int,
        max_tokens: int,
        end: int,
        delivered: int,
        time_left_s: float,
        router: Incarnation,
    ) -> None:
        prompt = tuple((first + position) % VOCAB for position in range(length))
        plain = expected_output(make_submit(stroke, prompt, max_tokens=max_tokens))
        sampling = SamplingParams(max_tokens=max_tokens, end_token_ids=tuple(plain[end : end + 1]))
        output = expected_output(make_submit(stroke, prompt, sampling=sampling))
        given = tuple(output[: min(delivered, len(output) - 1)])
        submit = make_submit(
            stroke,
            prompt,
            name=f"job-{len(self.sent)}",
            delivered=given,
            sampling=sampling,
            time_left_s=time_left_s,
        )
        self.sent[submit.job] = (router, submit)
        self.bench.send(submit, router)
        self.look()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        submit = self.sent[lease.job][1]
        tokens, size = submit.prompt + submit.delivered, self.page_size
        for index, page in enumerate(lease.shards[0].pages, start=lease.num_held):
            fill_page(self.bench, page, index * size, tokens[index * size : (index + 1) * size])
        self.post_commit(lease, data.draw(st.integers(1, lease.epoch)))

    @precondition(lambda self: self.open or self.old)
    @rule(data=st.data())
    def commit_in_vain(self, data: st.DataObject) -> None:
        """Of an epoch that never was, or of a lease that has ended."""
        lease = data.draw(st.sampled_from([*self.open.values(), *self.old]))
        self.post_commit(lease, lease.epoch + 1 if lease.lease_id in self.open else lease.epoch)

    def post_commit(self, lease: Lease, epoch: int) -> None:
        submit = self.sent[lease.job][1]
        index = len(submit.delivered)
        self.bench.post(Committed(lease.job, lease.lease_id, epoch, expected_output(submit)[index], index))
        self.look()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["touch", "renew", "bump"]))
    def renew(self, data: st.DataObject, how: str) -> None:
        lease = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        if how == "touch":
            self.bench.post(LeaseTouched(lease.lease_id))
        else:
            router = self.sent[lease.job][0]
            self.bench.send(RenewLease(lease.job, bump_epoch=how == "bump"), router)
        self.look()

    @precondition(lambda self: self.closed)
    @rule()
    def release_quarantine(self) -> None:
        self.bench.post(PagesReleased(self.closed.pop(0).lease_id))
        self.look()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.sent)))
        router = self.sent[job][0]
        self.bench.router(router)
        self.bench.cancel(job.request_id, router)
        self.look()

    @rule(router=st.sampled_from(ROUTERS))
    def lose_router(self, router: Incarnation) -> None:
        self.bench.lose_router(router)
        self.look()

    @rule(steps=st.integers(1, 12))
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

    @invariant()
    def reads_only_what_was_written(self) -> None:
        if hasattr(self, "bench"):
            assert self.bench.executor.num_bad_reads == 0

    def look(self) -> None:
        """What the lease book would be told, and what it answers."""
        events, self.bench.events = self.bench.events, []
        for event in events:
            if isinstance(event, LeaseOpened):
                known = self.open.get(event.lease.lease_id)
                assert known is None or known.epoch < event.lease.epoch
                self.open[event.lease.lease_id] = event.lease
                if known is not None:
                    self.bench.post(LeaseRenewed(event.lease.lease_id, event.lease.epoch))
            elif isinstance(event, LeaseClosed):
                lease = self.open.pop(event.lease_id)
                self.old.append(lease)
                if not event.committed:
                    self.closed.append(lease)
        assert not self.bench.events, "a renewal's answer is for the router alone"

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(20):
            self.bench.run(5000)
            self.look()
            while self.closed:
                self.bench.post(PagesReleased(self.closed.pop(0).lease_id))
            if self.bench.scheduler.idle:
                break
            self.bench.wait(6.0)  # leases nobody commits run out
            self.look()
        self.bench.check_at_rest()
        for recorder in self.bench.routers.values():
            for answer in recorder.answers.values():
                assert (answer.ended is None) != (answer.refused is None), f"{answer.submit.job} has no one answer"
                if answer.ended is not None and answer.ended.outcome is Outcome.FINISHED:
                    assert answer.started is not None


TestDecode = DecodeMachine.TestCase
TestDecode.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
