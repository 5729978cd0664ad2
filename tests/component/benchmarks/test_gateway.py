"""The gateway benchmark, briefly: every case is measured, and every answer is whole."""

import pytest

from benchmarks import gateway


async def test_each_case_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = gateway.build_parser().parse_args(["--seconds", "0.3", "--sizes", "100"])
    rows = await gateway.run_all(options, cores=[0])  # of one CPU nothing is pinned
    assert [(row.case, row.clients) for row in rows] == [
        ("streams", 64),
        ("requests", 32),
        ("requests", 32),
        ("first byte", 1),
        ("first byte", 64),
    ]
    for row in rows:
        assert row.requests >= row.clients
        assert row.tokens_per_s > 0
        assert 0 < row.first_p50_ms <= row.first_p99_ms
        assert row.choose_ms > 0
        assert (row.direct_p50_ms or 0) < (row.rest_p50_ms or row.first_p50_ms) <= row.first_p50_ms
    assert [row.direct_p50_ms is not None for row in rows] == [False, False, False, True, False]
    assert [row.rest_p50_ms is not None for row in rows] == [False, False, False, True, False]
    assert 0.5 < rows[0].events_per_token < 1.1
    told = [line for line in capsys.readouterr().out.splitlines() if "clients" in line]
    assert len(told) == len(rows)
