"""Refusals and edges of the model's parts: RoPE, the page pool, and one conversion among many processes."""

import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from twostroke.cluster.core.errors import ConfigError
from twostroke.cluster.core.ids import PageId
from twostroke.cluster.core.layout import gqa_layout
from twostroke.engine.model import source
from twostroke.engine.model.config import parse_model_config
from twostroke.engine.model.decoder import rope_tables
from twostroke.engine.page_pool import PagePool

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rope_that_is_not_served_is_refused_by_name(field: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_model_config(BASE | field)


def test_linear_scaling_turns_a_factor_slower() -> None:
    plain = parse_model_config(BASE)
    scaled = parse_model_config(BASE | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    cos, sin = rope_tables(plain, 8, torch.device("cpu"))
    slow_cos, slow_sin = rope_tables(scaled, 29, torch.device("cpu"))
    torch.testing.assert_close(slow_cos[::4], cos)
    torch.testing.assert_close(slow_sin[::4], sin)
    assert math.isclose(float(cos[1, 0]), math.cos(1.0), rel_tol=1e-6)
    assert plain.rope_text != scaled.rope_text


@pytest.fixture
def pool() -> PagePool:
    layout = gqa_layout(model_fingerprint="m", layers=2, kv_heads=1, head_dim=4, dtype="float32", page_size=2)
    return PagePool(layout, 3, torch.device("cpu"))


def test_pages_outside_the_pool_and_data_of_another_length_are_refused(pool: PagePool) -> None:
    page = bytes(pool.layout.page_bytes)
    for bad in (-1, 3):
        with pytest.raises(IndexError):
            pool.read([PageId(bad)])
        with pytest.raises(IndexError):
            pool.write([PageId(0), PageId(bad)], memoryview(page * 2))
    with pytest.raises(ValueError, match="2 pages take"):
        pool.write([PageId(0), PageId(1)], memoryview(page))
    assert not pool.tensor.any()
    pool.write([], memoryview(b""))


def test_pages_come_back_in_the_order_asked_for(pool: PagePool) -> None:
    data = bytes(range(pool.layout.page_bytes)) + bytes(reversed(range(pool.layout.page_bytes)))
    pool.write([PageId(2), PageId(0)], memoryview(data))
    assert bytes(pool.read([PageId(2), PageId(0)])) == data
    assert bytes(pool.read([PageId(0)])) == data[pool.layout.page_bytes :]


def _convert(target: Path, log: Path, dies: bool) -> None:
    def make(directory: Path) -> None:
        (directory / "half").write_text("half")
        with log.open("a") as file:
            file.write("made\n")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        (directory / "config.json").write_text("{}")

    source._made(target, lambda line: None, make)


def test_a_killed_conversion_leaves_no_model_and_the_next_ones_make_it_once(tmp_path: Path) -> None:
    target, log = tmp_path / "model", tmp_path / "log"
    context = multiprocessing.get_context("spawn")

    def run(dies: bool, count: int) -> list[int | None]:
        processes = [context.Process(target=_convert, args=(target, log, dies)) for _ in range(count)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        return [process.exitcode for process in processes]

    # 1. killed in the middle: nothing under the name that counts, and the lock died with its holder
    assert run(dies=True, count=1) == [-signal.SIGKILL]
    assert not target.exists()
    # 2. two that start together: one makes it, the other waits and finds it
    assert run(dies=False, count=2) == [0, 0]
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "half"]
    assert log.read_text().count("made") == 2
