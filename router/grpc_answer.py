"""How an answer looks over gRPC: the items of one request as messages."""

from collections.abc import Callable, Iterator, Sequence

from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.core.sampling import FinishReason
from twostroke.proto.v1 import common_pb2
from twostroke.proto.v1 import inference_pb2 as pb
from twostroke.router.apart import Apart
from twostroke.router.request import ChoiceEnd, Continuation, Delta, PromptScores, RequestReport, StreamItem

_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_REPORT_FIELDS = frozenset(field.name for field in pb.Report.DESCRIPTOR.fields)


class Telling:
    """Made for one request."""

    def __init__(
        self,
        prompt: Sequence[int],
        spell: Callable[[int], bytes],
        seal: Callable[[Continuation], str],
        apart: Apart | None,
        *,
        with_logprobs: bool,
    ) -> None:
        """`apart`: None when there is nothing to find in the answer. `with_logprobs`: the client asked for them, which
        `best_of` has made for its own use too.
        """
        self._prompt = prompt
        self._spell = spell
        self._seal = seal
        self._apart = apart
        self._with_logprobs = with_logprobs

    def messages(self, item: StreamItem) -> Iterator[pb.GenerateResponse]:
        """To be asked with every item, in order."""
        match item:
            case Delta():
                yield pb.GenerateResponse(delta=self._delta(item))
            case PromptScores(_, logprobs):
                told = [self._logprob(token, value) for token, value in zip(self._prompt[1:], logprobs, strict=True)]
                yield pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(logprobs=told))
            case ChoiceEnd():
                if self._apart is not None:
                    held = self._taken_apart(self._apart, item.choice, "", is_last=True)
                    if held.text or held.reasoning_content or held.tool_calls:
                        yield pb.GenerateResponse(delta=held)
                yield pb.GenerateResponse(choice_end=self._end(item))
            case RequestReport():
                yield pb.GenerateResponse(
                    finished=pb.Finished(
                        prompt_tokens=item.prompt_tokens,
                        completion_tokens=item.completion_tokens,
                        cached_tokens=item.cached_tokens,
                        report=pb.Report(**{name: getattr(item, name) for name in _REPORT_FIELDS}),
                    )
                )

    def _delta(self, item: Delta) -> pb.Delta:
        told: list[pb.TokenLogprob] = []
        if self._with_logprobs:
            told = [self._logprob(token, value) for token, value in zip(item.token_ids, item.logprobs, strict=True)]
        if self._apart is None:
            return pb.Delta(choice=item.choice, text=item.text, token_ids=item.token_ids, logprobs=told)
        delta = self._taken_apart(self._apart, item.choice, item.text, is_last=False)
        delta.token_ids.extend(item.token_ids)
        delta.logprobs.extend(told)
        return delta

    @staticmethod
    def _taken_apart(apart: Apart, choice: int, text: str, *, is_last: bool) -> pb.Delta:
        parsed = apart.take(choice, text, is_last=is_last)
        calls = [
            pb.ToolCallDelta(
                index=number,
                id=apart.call_id(choice, number) if call.name else "",
                name=call.name,
                arguments=call.arguments,
            )
            for number, call in enumerate(parsed.calls, parsed.first)
        ]
        return pb.Delta(choice=choice, text=parsed.content, reasoning_content=parsed.reasoning, tool_calls=calls)

    def _end(self, item: ChoiceEnd) -> pb.ChoiceEnd:
        reason = _FINISH[item.finish_reason]
        if self._apart is not None and self._apart.ends_with_calls(item.choice, item.finish_reason):
            reason = common_pb2.FINISH_REASON_TOOL_CALLS
        sealed = "" if item.continuation is None else self._seal(item.continuation)
        return pb.ChoiceEnd(
            choice=item.choice, finish_reason=reason, completion_tokens=item.num_output, continuation=sealed
        )

    def _logprob(self, token: int, told: TokenLogprob) -> pb.TokenLogprob:
        def one(token_id: int, logprob: float) -> pb.Logprob:
            return pb.Logprob(token_id=token_id, logprob=logprob, token=self._spell(token_id))

        top = [one(other, logprob) for other, logprob in zip(told.top_ids, told.top, strict=True)]
        return pb.TokenLogprob(token=one(token, told.logprob), rank=told.rank, top=top)
