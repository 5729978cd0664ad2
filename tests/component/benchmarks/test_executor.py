"""The executor benchmark on a tiny model: every case is measured and told."""

import json
from pathlib import Path

import pytest

from benchmarks import executor
from tests.tiny_models import make_tiny_model


def test_each_case_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model(tmp_path / "llama")
    out = tmp_path / "rows.json"
    sizes = ["--prompt", "20", "--chunk", "7", "20", "--rows", "1", "3", "--context", "9", "--page-size", "4"]
    arguments = [*sizes, "--model", str(tmp_path / "llama"), "--linear", "float32", "--repeats", "2"]
    assert executor.main([*arguments, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    cases = [(row["stroke"], row["size"], row["context"]) for row in rows]
    assert cases == [("prefill", 7, 20), ("prefill", 20, 20), ("decode", 1, 9), ("decode", 3, 9)]
    assert all(0 < row["best_ms"] <= row["median_ms"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
