"""A prefill and a decode scheduler together give the answer of one process without a cache."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_builders import (
    VOCAB,
    Pair,
    expected_output,
    make_decode,
    make_info,
    make_prefill,
    make_submit,
)
from twostroke.cluster.core.messages import Role, Stroke
from twostroke.cluster.core.sampling import SamplingParams

requests = st.lists(
    st.tuples(
        st.integers(1, 40), st.integers(0, 1), st.integers(2, 12), st.integers(0, 3), st.sampled_from([0.0, 1.0])
    ),
    min_size=1,
    max_size=6,
)


@given(requests, st.sampled_from([1, 4, 16]), st.sampled_from([1, 3, 16, 64]), st.sampled_from([1, 5, 64]))
@settings(max_examples=60, deadline=None)
def test_disaggregated_equals_golden(
    wanted: list[tuple[int, int, int, int, float]], page_size: int, prefill_chunk: int, decode_chunk: int
) -> None:
    num_pages = 80 // page_size + 2
    prefill = make_prefill(
        make_info(Role.PREFILL, page_size=page_size, num_pages=num_pages, chunk_tokens=prefill_chunk)
    )
    decode = make_decode(make_info(Role.DECODE, page_size=page_size, num_pages=num_pages, chunk_tokens=decode_chunk))
    pair = Pair(prefill, decode)
    for number, (length, first, max_tokens, num_delivered, temperature) in enumerate(wanted):
        prompt = tuple((first + position) % VOCAB for position in range(length))
        sampling = SamplingParams(max_tokens=max_tokens, seed=7, temperature=temperature)
        whole = expected_output(make_submit(Stroke.RESERVE, prompt, sampling=sampling))
        delivered = whole[: min(num_delivered, max_tokens - 2)]
        submit = make_submit(Stroke.RESERVE, prompt, name=f"r{number}", sampling=sampling, delivered=delivered)
        assert delivered + pair.submit(submit).tokens == whole
    prefill.check_at_rest()
    decode.check_at_rest()
