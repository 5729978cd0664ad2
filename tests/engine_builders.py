"""Builders with defaults for tests of the engine and of both schedulers, all on the fake executor.

`Bench` drives one scheduler as the engine thread would, and checks after every move that pages, jobs and leases
add up; it poisons every free page, so that reading one changes an answer. `Recorder` is the router: it checks
the protocol (each job ends once, tokens come in order) and keeps what it was told. `Pair` joins two benches.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId, RequestId, WorkerId
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import (
    Cancel,
    Ended,
    Lease,
    Leased,
    LeaseShard,
    LoadReport,
    Outcome,
    PromptLogprobs,
    Refused,
    Role,
    RouterMessage,
    Started,
    Stroke,
    Submit,
    TokenRun,
    Tokens,
    WorkerInfo,
    WorkerMessage,
)
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.decode_worker.scheduler import DecodeLimits, DecodeScheduler
from twostroke.engine.commands import (
    Command,
    Committed,
    Event,
    FromRouter,
    LeaseClosed,
    LeaseOpened,
    PagesReady,
    PagesReleased,
    PrefillDone,
    RouterGone,
    ShipmentDropped,
    ShipmentEnded,
    ToRouter,
)
from twostroke.engine.fake_executor import FakeExecutor, fake_layout, golden
from twostroke.engine.scheduling import RoleScheduler
from twostroke.prefill_worker.scheduler import PrefillLimits, PrefillScheduler

VOCAB = 97
ROUTER = Incarnation("router-a")
POISON = 0xDEADBEEF


def make_info(
    role: Role, *, page_size: int = 4, num_pages: int = 32, chunk_tokens: int = 16, max_context: int = 128
) -> WorkerInfo:
    return WorkerInfo(
        worker_id=WorkerId(f"{role.value}-0"),
        incarnation=Incarnation(f"{role.value}-life-1"),
        role=role,
        address="127.0.0.1:1",
        model="fake",
        layout=fake_layout(page_size),
        num_pages=num_pages,
        max_context=min(max_context, page_size * num_pages),
        chunk_tokens=chunk_tokens,
        transports=("loopback",),
    )


def make_prefill(info: WorkerInfo | None = None, limits: PrefillLimits | None = None) -> "Bench":
    info = info or make_info(Role.PREFILL)
    return Bench(info, PrefillScheduler(info, VOCAB, limits or PrefillLimits()))


def make_decode(info: WorkerInfo | None = None, limits: DecodeLimits | None = None) -> "Bench":
    info = info or make_info(Role.DECODE)
    return Bench(info, DecodeScheduler(info, VOCAB, limits or DecodeLimits(), make_nonces()))


def make_nonces() -> Callable[[], bytes]:
    """Nonces that differ and repeat from run to run."""
    count = 0

    def draw() -> bytes:
        nonlocal count
        count += 1
        return count.to_bytes(16, "little")

    return draw


def job_id(name: str = "a", attempt: int = 1) -> JobId:
    return JobId(RequestId(name), 0, attempt)


def make_prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + 7 * index) % VOCAB for index in range(length))


def make_submit(
    stroke: Stroke,
    prompt: Sequence[int] = make_prompt(10),
    *,
    name: str = "a",
    max_tokens: int = 8,
    delivered: Sequence[int] = (),
    lease: Lease | None = None,
    time_left_s: float = 100.0,
    sampling: SamplingParams | None = None,
    salt: str = "",
) -> Submit:
    return Submit(
        job=job_id(name),
        stroke=stroke,
        prompt=tuple(prompt),
        delivered=tuple(delivered),
        sampling=sampling or SamplingParams(max_tokens=max_tokens),
        time_left_s=time_left_s,
        salt=salt,
        lease=lease,
    )


def make_lease(num_pages: int, *, num_held: int = 0, page_size: int = 4, name: str = "a") -> Lease:
    """A lease on some decode worker that the test does not run."""
    pages = tuple(PageId(page) for page in range(100, 100 + num_pages - num_held))
    return Lease(
        lease_id=LeaseId(f"lease-{name}"),
        job=job_id(name),
        epoch=1,
        nonce=b"n" * 16,
        worker_id=WorkerId("decode-0"),
        incarnation=Incarnation("decode-life-1"),
        layout=fake_layout(page_size),
        transports=("loopback",),
        device="cpu",
        num_held=num_held,
        shards=(LeaseShard(0, "127.0.0.1:2", 0, 1, pages),),
        ttl_s=30.0,
    )


def page_slots(bench: "Bench", page: PageId) -> tuple[list[int], list[int]]:
    """Token ids and marks (position + 1) in a page of the fake layout."""
    slots = bench.executor.memory.page(page).cast("I").tolist()
    size = bench.info.layout.page_size
    return slots[:size], slots[size:]


def fill_page(bench: "Bench", page: PageId, first_position: int, tokens: Sequence[int]) -> None:
    """What a verified transfer leaves in a page: `tokens` at `first_position ...`, poison behind them."""
    size = bench.info.layout.page_size
    padding = [POISON] * (size - len(tokens))
    marks = list(range(first_position + 1, first_position + len(tokens) + 1))
    slots = array("I", [*tokens, *padding, *marks, *padding])
    bench.executor.memory.write([page], memoryview(slots.tobytes()))


@dataclass
class Answer:
    """What a router was told about one job."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    prompt: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second on."""
    started: Started | None = None
    leases: list[Lease] = field(default_factory=list)
    refused: Refused | None = None
    ended: Ended | None = None


class Recorder:
    """A router without opinions. Every broken promise of the protocol is an AssertionError."""

    def __init__(self) -> None:
        self.answers: dict[JobId, Answer] = {}

    def sent(self, submit: Submit) -> None:
        self.answers[submit.job] = Answer(submit)

    def hear(self, messages: Sequence[WorkerMessage]) -> None:
        for message in messages:
            match message:
                case Tokens(runs):
                    assert runs, "an empty Tokens message"
                    for run in runs:
                        self._tokens(run)
                case Leased(job, lease):
                    self._live(job).leases.append(lease)
                case Started(job, _, first_token):
                    answer = self._live(job)
                    assert answer.started is None, f"{job} started twice"
                    answer.started = message
                    wanted = expected_output(answer.submit)[len(answer.submit.delivered) :]
                    assert not answer.tokens, f"{job} started after its first token"
                    told = wanted[0] if answer.submit.stroke is Stroke.RESERVE else None
                    assert first_token == told, f"{job} started with {first_token}"
                case Refused(job, _, _):
                    assert not self._live(job).leases, f"{job} was refused after it was accepted"
                    self._live(job).refused = message
                case Ended(job, _, _, _, _, _):
                    self._end(job, message)
                case PromptLogprobs(job, first, logprobs):
                    answer = self._live(job)
                    assert not answer.tokens, f"{job}: a token came before the prompt's log-probabilities"
                    assert first <= len(answer.prompt) + 1, f"{job}: some of the prompt's are missing"
                    answer.prompt[first - 1 :] = logprobs
                case LoadReport():
                    pass

    def _live(self, job: JobId) -> Answer:
        answer = self.answers[job]
        assert answer.ended is None, f"a message about {job} after its end"
        assert answer.refused is None, f"a message about {job} after its refusal"
        return answer

    def _tokens(self, run: TokenRun) -> None:
        answer = self._live(run.job)
        submit = answer.submit
        skipped = 1 if submit.stroke is Stroke.RESERVE else 0  # the prefill side tells the first one
        assert run.first_index == len(submit.delivered) + skipped + len(answer.tokens), f"{run.job}: order"
        answer.tokens += run.tokens
        expected = expected_output(submit)[run.first_index : run.first_index + len(run.tokens)]
        assert list(run.tokens) == expected, f"{run.job}: wrong tokens at {run.first_index}"

    def _end(self, job: JobId, ended: Ended) -> None:
        answer = self._live(job)
        answer.ended = ended
        submit, expected = answer.submit, expected_output(answer.submit)
        if ended.outcome is Outcome.FINISHED:
            assert ended.num_output == len(expected), f"{job} finished early or late"
            if expected:
                assert ended.finish_reason is submit.sampling.finish_after(len(expected), expected[-1])
        else:
            assert ended.finish_reason is None
        skipped = 1 if submit.stroke is Stroke.RESERVE and answer.started is not None else 0
        assert ended.num_output == len(submit.delivered) + skipped + len(answer.tokens), f"{job}: tokens in all"


def expected_output(submit: Submit) -> list[int]:
    """The whole answer, delivered tokens included."""
    return list(_golden(submit.prompt, submit.sampling))


@lru_cache(maxsize=4096)
def _golden(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    return tuple(golden(prompt, sampling.max_tokens, VOCAB, sampling))


class Bench:
    """A scheduler, its fake executor, and hands that do what the engine thread does."""

    def __init__(self, info: WorkerInfo, scheduler: RoleScheduler) -> None:
        self.info = info
        self.scheduler = scheduler
        self.executor = FakeExecutor(info.num_pages, info.layout.page_size, VOCAB, info.max_context)
        self.routers: dict[Incarnation, Recorder] = {}
        self.events: list[Event] = []
        self.now_s = 0.0
        self.fail_next = False
        self._poison_free_pages()

    def router(self, router: Incarnation = ROUTER) -> Recorder:
        return self.routers.setdefault(router, Recorder())

    def answer(self, name: str = "a", router: Incarnation = ROUTER) -> Answer:
        return self.router(router).answers[job_id(name)]

    def post(self, command: Command) -> list[Event]:
        """One command and the flush after it; returns the events that are not for routers."""
        self.scheduler.handle(command, self.now_s)
        return self._flush()

    def send(self, message: RouterMessage, router: Incarnation = ROUTER) -> list[Event]:
        if isinstance(message, Submit):
            self.router(router).sent(message)
        return self.post(FromRouter(router, message))

    def cancel(self, name: str = "a", router: Incarnation = ROUTER) -> list[Event]:
        return self.send(Cancel(job_id(name)), router)

    def lose_router(self, router: Incarnation = ROUTER) -> list[Event]:
        """What was not yet told is never told; the router starts anew under the same name."""
        self.routers.pop(router, None)
        return self.post(RouterGone(router))

    def step(self) -> bool:
        """One turn of the engine; False when there was nothing to compute."""
        plan = self.scheduler.plan(self.now_s)
        self._flush()
        if plan is None:
            return False
        assert plan.num_tokens <= self.info.chunk_tokens, "over the token budget"
        assert min(plan.num_new) > 0, "a row without tokens"
        singles = [count == 1 for count in plan.num_new]
        assert singles == sorted(singles, reverse=True), "rows of one token come first"
        if self.fail_next:
            self.fail_next = False
            self.scheduler.fail(plan, "the device is broken", self.now_s)
        else:
            self.scheduler.apply(plan, self.executor.launch(plan).result(), self.now_s)
        self._flush()
        return True

    def run(self, max_steps: int = 1000) -> None:
        """Step until there is nothing to compute."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"still computing after {max_steps} steps")

    def wait(self, seconds: float) -> None:
        """Let time pass, and the engine notice it."""
        self.now_s += seconds
        self.scheduler.plan(self.now_s)
        self._flush()

    def take(self, kind: type[Event]) -> list[Event]:
        """Remove and return the events of one kind."""
        taken = [event for event in self.events if isinstance(event, kind)]
        self.events = [event for event in self.events if not isinstance(event, kind)]
        return taken

    @property
    def load(self) -> LoadReport:
        return self.scheduler.load(self.now_s)

    def check_at_rest(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.idle
        assert self.load.ledger.at_rest, self.load.ledger
        assert (self.load.running, self.load.waiting, self.load.leases, self.load.queued_tokens) == (0, 0, 0, 0)
        assert self.executor.num_bad_reads == 0

    def _flush(self) -> list[Event]:
        others: list[Event] = []
        for event in self.scheduler.take_events():
            if isinstance(event, ToRouter):
                self.routers[event.router].hear(event.messages)
            else:
                others.append(event)
        self.events += others
        self.scheduler.check_integrity()
        self._poison_free_pages()
        return others

    def _poison_free_pages(self) -> None:
        """A free page may be written by nobody and read by nobody (FIELD-REPORTS B16)."""
        assert isinstance(self.scheduler, PrefillScheduler | DecodeScheduler)
        poison = array("I", [POISON] * (self.info.layout.page_bytes // 4)).tobytes()
        for page in self.scheduler.free_pages():
            self.executor.memory.write([page], memoryview(poison))


class Pair:
    """A prefill and a decode bench, with a transfer that copies pages when they are announced."""

    def __init__(self, prefill: Bench, decode: Bench) -> None:
        self.prefill = prefill
        self.decode = decode

    def submit(self, submit: Submit) -> Answer:
        """RESERVE, then PREFILL with the lease, then everything to the end; returns the joined answer."""
        self.decode.send(replace(submit, stroke=Stroke.RESERVE, lease=None))
        lease = self.decode.router().answers[submit.job].leases[0]
        self.prefill.send(replace(submit, stroke=Stroke.PREFILL, lease=lease))
        while self.prefill.step() or self.carry():
            pass
        self.decode.run()
        prefilled = self.prefill.router().answers[submit.job]
        decoded = self.decode.router().answers[submit.job]
        return replace(decoded, tokens=prefilled.tokens + decoded.tokens)

    def carry(self) -> bool:
        """Do what the shipping task and the lease book do; False when there was nothing to do."""
        moved = False
        for event in self.prefill.take(PagesReady):
            assert isinstance(event, PagesReady)
            targets = event.lease.shards[0].pages[event.first : event.first + len(event.pages)]
            self.decode.executor.memory.write(targets, self.prefill.executor.memory.read(event.pages))
            moved = True
        for done in self.prefill.take(PrefillDone):
            assert isinstance(done, PrefillDone)
            commit = Committed(
                done.job, done.lease.lease_id, done.lease.epoch, done.first_token, done.first_token_index
            )
            self.decode.post(commit)
            self.prefill.post(ShipmentEnded(done.job, "", done.lease.num_pages, 0, 0.0, "loopback"))
            moved = True
        for dropped in self.prefill.take(ShipmentDropped):
            assert isinstance(dropped, ShipmentDropped)
            self.prefill.post(ShipmentEnded(dropped.job, dropped.reason, 0, 0, 0.0, "loopback"))
            moved = True
        self.decode.take(LeaseOpened)
        for closed in self.decode.take(LeaseClosed):
            assert isinstance(closed, LeaseClosed)
            if not closed.committed:
                self.decode.post(PagesReleased(closed.lease_id))
                moved = True
        return moved
