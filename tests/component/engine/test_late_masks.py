"""A grammar whose masks are slow delays its own job alone, with a model that computes."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.engine_builders import ROUTER, job_id, make_info, make_nonces, make_submit
from tests.tiny_models import VOCAB_SIZE, make_tiny_model
from twostroke.cluster.core.grammar import ANY_OBJECT
from twostroke.cluster.core.ids import JobId
from twostroke.cluster.core.messages import Ended, Role, Stroke, Tokens
from twostroke.cluster.core.sampling import SamplingParams
from twostroke.decode_worker.scheduler import DecodeLimits, DecodeScheduler
from twostroke.engine.commands import Event, FromRouter, ToRouter, WarmedUp
from twostroke.engine.loop import EngineLoop
from twostroke.engine.model.load import load_executor

DEADLINE_S = 60.0
"""Kernels are compiled in the first step."""
ALL = b"\xff" * (VOCAB_SIZE // 8 + 1)


class Slow:
    """Allows every token, once it is let."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def mask(self, output: Sequence[int], ends: Sequence[int]) -> bytes:
        assert self.opened.wait(DEADLINE_S)
        return ALL


class Heard:
    """What the engine told, by job."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.is_warm = False
        self.tokens: dict[JobId, list[int]] = {}
        self.ended: list[JobId] = []

    def __call__(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                self.is_warm |= isinstance(event, WarmedUp)
                for message in event.messages if isinstance(event, ToRouter) else ():
                    if isinstance(message, Tokens):
                        for run in message.runs:
                            self.tokens.setdefault(run.job, []).extend(run.tokens)
                    elif isinstance(message, Ended):
                        self.ended.append(message.job)
            self._changed.notify_all()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_there, DEADLINE_S)


def test_others_go_on_while_a_mask_is_late(tmp_path: Path) -> None:
    executor = load_executor(make_tiny_model(tmp_path), page_size=4, num_pages=64)
    heard, slow = Heard(), Slow()
    scheduler = DecodeScheduler(make_info(Role.DECODE, num_pages=64), VOCAB_SIZE, DecodeLimits(), make_nonces())
    loop = EngineLoop(scheduler, executor, heard)
    loop.start()
    heard.wait_for(lambda: heard.is_warm)
    constrained = SamplingParams(max_tokens=8, grammar=ANY_OBJECT)
    loop.post(FromRouter(ROUTER, make_submit(Stroke.LOCAL, name="slow", sampling=constrained), slow))
    loop.post(FromRouter(ROUTER, make_submit(Stroke.LOCAL, name="beside", max_tokens=40)))
    heard.wait_for(lambda: job_id("beside") in heard.ended)
    assert heard.ended == [job_id("beside")]
    assert job_id("slow") not in heard.tokens
    slow.opened.set()
    loop.post(FromRouter(ROUTER, make_submit(Stroke.LOCAL, name="free", max_tokens=8)))
    heard.wait_for(lambda: len(heard.ended) == 3)
    assert heard.tokens[job_id("slow")] == heard.tokens[job_id("free")] == heard.tokens[job_id("beside")][:8]
    loop.stop()
    scheduler.check_integrity()
