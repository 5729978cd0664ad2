"""The answer of a chat taken apart into text, reasoning and tool calls, choice by choice. Made for one request.

take ... take, is_last    what has become certain of each choice's text; then how the choice ends
"""

from collections.abc import Callable
from hashlib import blake2b

from twostroke.cluster.core.sampling import FinishReason
from twostroke.router.answer_parts import MessageParser, Parsed, gather
from twostroke.router.tool_calls import ToolFormat


def call_id(request_id: str, choice: int, number: int, tool_format: ToolFormat) -> str:
    """The same for a request however it is answered. Mistral's templates take nine letters and digits, no more."""
    digest = blake2b(f"{request_id}/{choice}/{number}".encode(), digest_size=12).hexdigest()
    return digest[:9] if tool_format is ToolFormat.MISTRAL else f"call_{digest}"


class Apart:
    def __init__(
        self, request_id: str, tool_format: ToolFormat, make_parser: Callable[[], MessageParser], *, named: bool
    ) -> None:
        """`make_parser`: of a choice. `named`: one function was called by its name, which ends as text does."""
        self._request_id = request_id
        self._tool_format = tool_format
        self._make_parser = make_parser
        self._named = named
        self._parsers: dict[int, MessageParser] = {}
        self._called: set[int] = set()

    def take(self, choice: int, text: str, *, is_last: bool) -> Parsed:
        """What is certain now and was not before."""
        parser = self._parsers.get(choice)
        if parser is None:
            parser = self._parsers[choice] = self._make_parser()
        parts = parser.push(text)
        if is_last:
            parts += parser.finish()
        parsed = gather(parts)
        if parsed.calls:
            self._called.add(choice)
        return parsed

    def call_id(self, choice: int, number: int) -> str:
        return call_id(self._request_id, choice, number, self._tool_format)

    def ends_with_calls(self, choice: int, finish: FinishReason) -> bool:
        """The model called of its own accord, or because some call was required; and the choice was not cut."""
        return choice in self._called and finish is FinishReason.STOP and not self._named
