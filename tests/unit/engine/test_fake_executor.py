"""The fake executor equals its golden answer, and only with the right pages."""

import pytest

from tests.engine_builders import VOCAB, make_prompt
from twostroke.cluster.core.ids import JobId, PageId, RequestId
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.engine.fake_executor import GREEDY, FakeExecutor, golden, golden_logprobs
from twostroke.engine.plan import Plan, SampleInput

JOB = JobId(RequestId("a"), 0, 1)


def step(executor: FakeExecutor, pages: list[int], computed: int, tokens: list[int], output: list[int]) -> int:
    sample = SampleInput(GREEDY, (), output)
    plan = Plan([JOB], [computed], [len(tokens)], tokens, [[PageId(page) for page in pages]], [sample])
    [token] = executor.launch(plan).result().tokens
    assert token is not None
    return token


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 11])
def test_chunks_through_scattered_pages_give_the_golden_answer(chunk: int) -> None:
    executor = FakeExecutor(num_pages=8, page_size=4, vocab_size=VOCAB, max_positions=32)
    tokens, pages, output = list(make_prompt(11)), [6, 1, 3, 0], list[int]()
    computed = 0
    while len(output) < 4:
        end = min(computed + chunk, len(tokens))
        token = step(executor, pages[: -(-end // 4)], computed, tokens[computed:end], output)
        computed = end
        if end == len(tokens):
            tokens.append(token)
            output.append(token)
    assert output == golden(make_prompt(11), 4, VOCAB)
    assert executor.num_bad_reads == 0


def test_a_page_of_another_context_changes_the_answer_and_is_counted() -> None:
    executor = FakeExecutor(num_pages=8, page_size=4, vocab_size=1 << 30, max_positions=32)
    tokens = list(make_prompt(9))
    right = step(executor, [0, 1, 2], 0, tokens, [])
    executor.memory.write([PageId(1)], memoryview(bytes(executor.memory.layout.page_bytes)))
    wrong = step(executor, [0, 1, 2], 8, tokens[8:], [])
    assert (right == wrong, executor.num_bad_reads) == (False, 1)


@pytest.mark.parametrize("pages", [[0, 1], [0, 1, 2, 3]])
def test_a_page_table_of_the_wrong_length_is_an_error(pages: list[int]) -> None:
    executor = FakeExecutor(num_pages=8, page_size=4, vocab_size=VOCAB, max_positions=32)
    with pytest.raises(IndexError):
        step(executor, pages, 8, [5], [])


def test_temperature_brings_in_the_seed_and_greedy_does_not() -> None:
    def answer(seed: int, temperature: float) -> list[int]:
        return golden([1, 2, 3], 8, 1 << 20, SamplingParams(max_tokens=8, seed=seed, temperature=temperature))

    assert answer(1, 0.0) == answer(2, 0.0)
    assert answer(1, 1.0) != answer(2, 1.0)
    assert answer(1, 1.0) == answer(1, 1.0)


def test_an_end_token_ends_the_golden_answer_but_not_before_min_tokens() -> None:
    plain = golden([1, 2, 3], 6, VOCAB)
    ended = SamplingParams(max_tokens=6, end_token_ids=(plain[2],))
    assert golden([1, 2, 3], 6, VOCAB, ended) == plain[: plain.index(plain[2]) + 1]
    held_off = SamplingParams(max_tokens=6, min_tokens=6, end_token_ids=(plain[2],))
    assert plain[2] not in golden([1, 2, 3], 6, VOCAB, held_off)


def test_a_bias_wins_over_the_likeliest_and_bans() -> None:
    plain = golden([1, 2, 3], 1, VOCAB)[0]
    banned = golden([1, 2, 3], 1, VOCAB, SamplingParams(max_tokens=8, logit_bias=((plain, -100.0),)))
    assert banned == [(plain + 1) % VOCAB]
    wanted = (plain + 50) % VOCAB
    assert golden([1, 2, 3], 1, VOCAB, SamplingParams(max_tokens=8, logit_bias=((wanted, 100.0),))) == [wanted]


def test_log_probabilities_are_of_the_context_alone() -> None:
    tokens = [*make_prompt(6), *golden(make_prompt(6), 3, VOCAB)]
    told = golden_logprobs(tokens, 6, 2, VOCAB)
    assert [value.rank for value in told] == [1, 1, 1]  # greedy
    assert [value.top_ids[0] for value in told] == tokens[6:]
    assert told[0].top == (-0.0625, -0.125)
