"""Strategies and builders for the messages of the attached stream."""

from hypothesis import strategies as st

from twostroke.cluster.core.events import PrefixSnapshot
from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.cluster.core.ids import Incarnation, JobId, LeaseId, PageId, PrefixKey, RequestId, WorkerId
from twostroke.cluster.core.layout import PageGroup, PageLayout
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.messages import (
    Ended,
    JobTimings,
    Lease,
    LeaseShard,
    Ledger,
    LoadReport,
    Outcome,
    PromptLogprobs,
    RefusalReason,
    Refused,
    Role,
    Stroke,
    Submit,
    TokenRun,
    WorkerInfo,
)
from twostroke.cluster.core.sampling import FinishReason, SamplingParams

U32 = (1 << 32) - 1
names = st.text(max_size=12)
counts = st.integers(0, U32)
longs = st.integers(0, (1 << 64) - 1)
token_ids = st.lists(counts, max_size=20).map(tuple)
seconds = st.floats(0, 1e9)
reals = st.floats(allow_nan=False)
jobs = st.builds(JobId, names.map(RequestId), counts, counts)
incarnations = st.text(min_size=1, max_size=12).map(Incarnation)
keys = st.binary(min_size=16, max_size=16).map(PrefixKey)


def layouts() -> st.SearchStrategy[PageLayout]:
    groups = st.builds(PageGroup, names, counts, counts, counts, names, names, longs, longs)
    return st.builds(PageLayout, counts, names, counts, names, names, st.lists(groups, max_size=2).map(tuple))


def shards() -> st.SearchStrategy[LeaseShard]:
    pages = st.lists(counts.map(PageId), max_size=20).map(tuple)
    return st.builds(LeaseShard, counts, names, counts, counts, pages)


def leases() -> st.SearchStrategy[Lease]:
    return st.builds(
        Lease,
        lease_id=names.map(LeaseId),
        job=jobs,
        epoch=longs,
        nonce=st.binary(max_size=16),
        worker_id=names.map(WorkerId),
        incarnation=names.map(Incarnation),
        layout=layouts(),
        transports=st.lists(names, max_size=3).map(tuple),
        device=names,
        num_held=counts,
        shards=st.lists(shards(), min_size=1, max_size=2).map(tuple),
        ttl_s=seconds,
    )


def infos() -> st.SearchStrategy[WorkerInfo]:
    return st.builds(
        WorkerInfo,
        worker_id=names.map(WorkerId),
        incarnation=incarnations,
        role=st.sampled_from(Role),
        address=names,
        model=names,
        layout=layouts(),
        num_pages=counts,
        max_context=counts,
        chunk_tokens=counts,
        transports=st.lists(names, max_size=3).map(tuple),
        device=names,
        weight_bytes=longs,
    )


def samplings() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        max_tokens=counts,
        seed=longs,
        temperature=reals,
        top_k=counts,
        top_p=reals,
        min_p=reals,
        repetition_penalty=reals,
        presence_penalty=reals,
        frequency_penalty=reals,
        min_tokens=counts,
        end_token_ids=token_ids,
        stop_token_ids=token_ids,
        ignore_eos=st.booleans(),
        grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), names, st.booleans()),
        logit_bias=st.lists(st.tuples(counts, reals), max_size=4).map(tuple),
        logprobs=st.none() | counts,
        prompt_logprobs=st.none() | counts,
    )


def _logprob(logprob: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprob:
    return TokenLogprob(logprob, rank, tuple(token for token, _ in top), tuple(value for _, value in top))


_singles = st.floats(width=32, allow_nan=False)
# Built once: a strategy made anew for each draw costs more than the draw.
_logprobs = st.builds(_logprob, _singles, counts, st.lists(st.tuples(counts, _singles), max_size=3))
_told_tokens = st.lists(st.tuples(counts, _logprobs), min_size=1, max_size=3)
_told_prompt = st.lists(_logprobs, max_size=3).map(tuple)


def logprobs() -> st.SearchStrategy[TokenLogprob]:
    return _logprobs


def submits() -> st.SearchStrategy[Submit]:
    return st.builds(
        Submit,
        job=jobs,
        stroke=st.sampled_from(Stroke),
        prompt=token_ids,
        delivered=token_ids,
        sampling=samplings(),
        time_left_s=seconds,
        salt=names,
        adapter=names,
        lease=st.none() | leases(),
    )


def runs(job: JobId) -> st.SearchStrategy[TokenRun]:
    plain = st.builds(TokenRun, st.just(job), counts, token_ids, st.just(()))  # `builds` infers fields of named tuples

    def build(first: int, told: list[tuple[int, TokenLogprob]]) -> TokenRun:
        return TokenRun(job, first, tuple(token for token, _ in told), tuple(value for _, value in told))

    return plain | st.builds(build, counts, _told_tokens)


def prompt_logprobs(job: JobId) -> st.SearchStrategy[PromptLogprobs]:
    return st.builds(PromptLogprobs, st.just(job), counts, _told_prompt)


def timings() -> st.SearchStrategy[JobTimings]:
    return st.builds(
        JobTimings, seconds, seconds, seconds, seconds, seconds, counts, counts, counts, longs, names, counts
    )


def ends(job: JobId) -> st.SearchStrategy[Ended]:
    return st.builds(
        Ended,
        st.just(job),
        st.sampled_from(Outcome),
        st.none() | st.sampled_from(FinishReason),
        counts,
        names,
        timings(),
    )


def refusals(job: JobId) -> st.SearchStrategy[Refused]:
    return st.builds(Refused, st.just(job), st.sampled_from(RefusalReason), names)


def loads() -> st.SearchStrategy[LoadReport]:
    return st.builds(
        LoadReport,
        ledger=st.builds(Ledger, counts, counts, counts, counts, counts),
        running=counts,
        waiting=counts,
        leases=counts,
        queued_tokens=longs,
        step_age_s=seconds,
        num_steps=longs,
        event_sequence=longs,
        draining=st.booleans(),
        generated_tokens=longs,
    )


def snapshots() -> st.SearchStrategy[PrefixSnapshot]:
    return st.builds(PrefixSnapshot, incarnations, longs, st.lists(keys, max_size=5).map(tuple))


def submit(*, prompt: tuple[int, ...], job: JobId | None = None, max_tokens: int = 8) -> Submit:
    return Submit(
        job=job if job is not None else JobId(RequestId("r"), 0, 0),
        stroke=Stroke.PREFILL,
        prompt=prompt,
        delivered=(),
        sampling=SamplingParams(max_tokens=max_tokens),
        time_left_s=60.0,
    )


def ended(job: JobId) -> Ended:
    return Ended(job, Outcome.FINISHED, FinishReason.LENGTH, 1)
