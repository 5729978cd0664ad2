"""What both clients do alike: answers as they are made and whole, over whatever way `_attempt` takes."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from twostroke.client.calls import DEFAULT_TIMEOUT_S, AnswerStream, Caller, Item
from twostroke.client.types import Answer, Ask, Message, Prompt, Sampling, Tools
from twostroke.cluster.core.errors import InvalidRequest


class AskingClient(ABC):
    """Safe to use from many tasks of one loop. Close it, or use it as a context."""

    def __init__(self, caller: Caller | None) -> None:
        self._caller = caller or Caller()
        self._model = ""
        """The served model's name, once it was asked for."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def _attempt(self, ask: Ask, left_s: float) -> AsyncGenerator[Item, None]:
        """One try, of `left_s` seconds at most. Raises TwostrokeError."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        cache_salt: str = "",
        continuation: str = "",
        tools: Tools | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> AnswerStream:
        """An answer as it is made; see `AnswerStream`. `model` empty: the one that is served. `continuation`: of an
        answer to the same request, which goes on. Raises InvalidRequest for `tools` without a conversation.
        """
        if tools is not None and not (prompt and isinstance(prompt[0], Message)):
            raise InvalidRequest("tools go with conversations", "tools")
        ask = Ask(model, prompt, sampling or Sampling(), cache_salt, continuation, tools)
        return AnswerStream(lambda left_s: self._attempt(ask, left_s), self._caller, timeout_s)

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        model: str = "",
        cache_salt: str = "",
        continuation: str = "",
        tools: Tools | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Answer:
        """The whole answer. Raises TwostrokeError."""
        stream = self.stream(
            prompt,
            sampling,
            model=model,
            cache_salt=cache_salt,
            continuation=continuation,
            tools=tools,
            timeout_s=timeout_s,
        )
        async with stream:
            async for _ in stream:
                pass
            return stream.answer
