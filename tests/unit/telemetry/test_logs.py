import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from twostroke.cluster.telemetry.logs import configure_logging, log_request


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines_from_structlog_and_from_the_standard_library() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", "router", stream)
    log = structlog.get_logger("twostroke.test")
    log_request(
        log,
        request_id="r1",
        endpoint="/v1/completions",
        outcome="finished",
        client_request_id="c" * 500,
        facts={"prompt_tokens": 3},
    )
    log.debug("hidden")
    logging.getLogger("other").warning("from %s", "elsewhere")

    ours, theirs = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert ours["event"] == "request"
    assert (ours["request_id"], ours["outcome"], ours["prompt_tokens"]) == ("r1", "finished", 3)
    assert len(ours["client_request_id"]) == 128
    assert ours["role"] == theirs["role"] == "router"
    assert (theirs["event"], theirs["level"]) == ("from elsewhere", "warning")


def test_an_exception_is_on_the_line() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", "router", stream)
    try:
        raise ValueError("broken")
    except ValueError as error:
        structlog.get_logger("t").error("task_failed", exc_info=error)
    assert "ValueError: broken" in json.loads(stream.getvalue())["exception"]


def test_what_orjson_does_not_take_is_told_all_the_same() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", "router", stream)
    odd = {"half": "\ud800", "long": 1 << 70, "error": ValueError("broken"), "names": {"a"}}
    structlog.get_logger("t").info("odd", **odd)
    told = json.loads(stream.getvalue())
    assert (told["half"], told["long"], told["error"], told["names"]) == (
        "\ud800",
        1 << 70,
        "ValueError('broken')",
        "{'a'}",
    )
