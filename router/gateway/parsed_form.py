"""A chat answer with parts: text, reasoning and tool calls, whole and as chunks. Made for one request.

whole     message.content (null where there are only calls), reasoning_content, tool_calls
chunk     a delta with whatever has become certain; none while nothing has
finish    `tool_calls` where the model called of its own accord, or because some call was required
"""

from collections.abc import Collection, Iterable
from hashlib import blake2b

from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.answer_parts import CallArguments, CallBegin, Content, MessageParser, Part, Reasoning, gather
from twostroke.router.gateway.forms import ChatForm, Json
from twostroke.router.tool_calls import ChatStyle, ToolFormat, make_parser


def call_id(request_id: str, index: int, number: int, tool_format: ToolFormat) -> str:
    """The same for a request however it is answered. Mistral's templates take nine letters and digits, no more."""
    digest = blake2b(f"{request_id}/{index}/{number}".encode(), digest_size=12).hexdigest()
    return digest[:9] if tool_format is ToolFormat.MISTRAL else f"call_{digest}"


class ParsedChatForm(ChatForm):
    """`names`: of the functions that may be called; for these and the rest see `tool_calls.make_parser`. `named`: one
    function was called by its name, which ends as text does.
    """

    def __init__(
        self,
        request_id: str,
        style: ChatStyle,
        names: Collection[str],
        *,
        max_calls: int = 0,
        reasoning: bool = False,
        opened: bool = False,
        named: bool = False,
    ) -> None:
        self._request_id = request_id
        self._style = style
        self._names = names
        self._max_calls = max_calls
        self._reasoning = reasoning
        self._opened = opened
        self._named = named
        self._parsers: dict[int, MessageParser] = {}
        self._called: set[int] = set()

    def whole_choice(self, index: int, text: str, finish: FinishReason, logprobs: Json | None) -> Json:
        parser = self._parser()
        parsed = gather([*parser.push(text), *parser.finish()])
        content = None if parsed.calls and not parsed.content else parsed.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            calls = enumerate(parsed.calls)
            message["tool_calls"] = [self._call(index, number, call.name, call.arguments) for number, call in calls]
        reason = self._reason(finish, called=bool(parsed.calls))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def chunk_choice(
        self, index: int, text: str, finish: FinishReason | None, logprobs: Json | None, *, is_first: bool
    ) -> Json | None:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._parser()
        parts = parser.push(text)
        if finish is not None:
            parts += parser.finish()
        delta = self._delta(index, parts)
        if is_first:
            delta = {"role": "assistant", "content": "", **delta}
        # Log-probabilities of text that is held back are told all the same: the parser does not know which they are.
        if not delta and finish is None and logprobs is None:
            return None
        reason = None if finish is None else self._reason(finish, called=index in self._called)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _parser(self) -> MessageParser:
        return make_parser(
            self._style, self._names, max_calls=self._max_calls, reasoning=self._reasoning, opened=self._opened
        )

    def _delta(self, index: int, parts: Iterable[Part]) -> Json:
        texts: dict[str, str] = {}
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for part in parts:
            match part:
                case Content(text):
                    texts["content"] = texts.get("content", "") + text
                case Reasoning(text):
                    texts["reasoning_content"] = texts.get("reasoning_content", "") + text
                case CallBegin(number, name):
                    self._called.add(index)
                    names[number], arguments[number] = name, ""
                case CallArguments(number, text):
                    arguments[number] = arguments.get(number, "") + text
        delta: Json = {**texts}
        if arguments:
            delta["tool_calls"] = [
                {"index": number, **self._call(index, number, names[number], text)}
                if number in names
                else {"index": number, "function": {"arguments": text}}
                for number, text in arguments.items()
            ]
        return delta

    def _call(self, index: int, number: int, name: str, arguments: str) -> Json:
        return {
            "id": call_id(self._request_id, index, number, self._style.tool_format),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _reason(self, finish: FinishReason, *, called: bool) -> str:
        return "tool_calls" if called and finish is FinishReason.STOP and not self._named else finish.value
