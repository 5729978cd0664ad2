"""How an answer looks: the JSON of the two endpoints, whole and as chunks. Pure."""

from collections.abc import Mapping
from dataclasses import field
from typing import Protocol

import orjson

from twostroke.cluster.core.records import dataclass
from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.request import RequestReport

Json = dict[str, object]


class Form(Protocol):
    """The endpoint's own part. `finish` is None while the choice goes on."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    is_plain: bool
    """Text in the middle of a choice is told as it is, whatever came before."""

    def whole_choice(self, index: int, text: str, finish: FinishReason, logprobs: Json | None) -> Json: ...

    def chunk_choice(
        self, index: int, text: str, finish: FinishReason | None, logprobs: Json | None, *, is_first: bool
    ) -> Json | None:
        """None when there is nothing to tell yet."""
        ...


class ChatForm:
    id_prefix = "chatcmpl-"
    is_plain = True
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_choice(self, index: int, text: str, finish: FinishReason, logprobs: Json | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish.value}

    def chunk_choice(
        self, index: int, text: str, finish: FinishReason | None, logprobs: Json | None, *, is_first: bool
    ) -> Json | None:
        delta: Json = {}
        if is_first:
            delta["role"] = "assistant"
        if text or is_first:
            delta["content"] = text
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish.value if finish else None}


class CompletionForm:
    id_prefix = "cmpl-"
    is_plain = True
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole_choice(self, index: int, text: str, finish: FinishReason, logprobs: Json | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.value}

    def chunk_choice(
        self, index: int, text: str, finish: FinishReason | None, logprobs: Json | None, *, is_first: bool
    ) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.value if finish else None}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every piece of one answer has in common."""

    form: Form
    request_id: str
    """The client's own, if it sent one."""
    model: str
    created: int
    """Unix seconds."""
    fingerprint: str = ""
    echoes: tuple[str, ...] = ()
    """With `echo`: the text of each prompt, which its answers begin with."""
    choices_per_prompt: int = 1
    include_usage: bool = False
    include_report: bool = False
    _chunk: Json = field(init=False)
    _around: dict[int, tuple[bytes, bytes]] = field(init=False, default_factory=dict)
    """Of each choice's text in a chunk of plain text, as JSON."""

    def __post_init__(self) -> None:
        chunk: Json = {**self._head(self.form.chunk_object), "choices": ()}
        if self.include_usage:
            chunk["usage"] = None
        object.__setattr__(self, "_chunk", chunk)

    def chunk(
        self,
        index: int,
        text: str,
        finish: FinishReason | None,
        logprobs: Json | None = None,
        *,
        is_first: bool,
        continuation: str = "",
    ) -> Json | None:
        if is_first:
            text = self._echo(index) + text
        choice = self.form.chunk_choice(index, text, finish, logprobs, is_first=is_first)
        if choice is not None and continuation:
            choice["continuation"] = continuation
        return None if choice is None else {**self._chunk, "choices": [choice]}

    def text_chunk(self, index: int, text: str) -> bytes:
        """As JSON of `chunk` for text in the middle of a choice, where the form is plain; in a third of the time."""
        around = self._around.get(index)
        if around is None:
            mark = "\x00text\x00"
            before, _, after = orjson.dumps(self.chunk(index, mark, None, is_first=False)).partition(orjson.dumps(mark))
            around = self._around[index] = before, after
        return around[0] + orjson.dumps(text) + around[1]

    def usage_chunk(self, report: RequestReport) -> Json:
        """The last chunk, without choices."""
        return {**self._chunk, **self._usage(report)}

    def whole(
        self,
        texts: Mapping[int, str],
        finishes: Mapping[int, FinishReason],
        logprobs: Mapping[int, Json | None],
        report: RequestReport,
        continuations: Mapping[int, str],
    ) -> Json:
        choices = [
            self.form.whole_choice(
                index, self._echo(index) + texts.get(index, ""), finishes[index], logprobs.get(index)
            )
            for index in sorted(finishes)
        ]
        for index, choice in zip(sorted(finishes), choices, strict=True):
            if index in continuations:
                choice["continuation"] = continuations[index]
        return {**self._head(self.form.whole_object), "choices": choices, **self._usage(report)}

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.choices_per_prompt] if self.echoes else ""

    def _head(self, kind: str) -> Json:
        return {
            "id": self.form.id_prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _usage(self, report: RequestReport) -> Json:
        usage: Json = {
            "usage": {
                "prompt_tokens": report.prompt_tokens,
                "completion_tokens": report.completion_tokens,
                "total_tokens": report.prompt_tokens + report.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": report.cached_tokens},
            }
        }
        if self.include_report:
            usage["twostroke"] = report
        return usage
