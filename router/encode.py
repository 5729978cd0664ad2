"""From what a client wrote to token ids, off the event loop: tokenizing takes milliseconds for long texts, and the
libraries let the loop run on. A short prompt is done on the loop, since to hand it to a thread takes longer; one of
middle size too, while nobody else's answer would wait for it. What cannot fit is refused before that work.
"""

import asyncio
import json
from collections.abc import Iterable, Sequence

import orjson

from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.records import dataclass
from twostroke.router.ask import Chat, Prompt, Prompts
from twostroke.router.prepare import check_ids, check_length
from twostroke.router.renaming import renamed
from twostroke.router.request import Generator, ServedModel
from twostroke.router.tokenizer import ChatPrompt, Tokenizer
from twostroke.router.tool_calls import ChatStyle

SHORT_CHARACTERS = 512
SHORT_ALONE_CHARACTERS = 8192
"""While no request is live: some 2 ms of work, against half a millisecond to hand it over and back."""


@dataclass(frozen=True, slots=True)
class Encoded:
    field: str
    """Of the body, where the prompt stands."""
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a request is made of, encoded."""

    prompts: list[Encoded]
    template: str = ""
    """Version of the template files that made a chat's."""
    echoes: tuple[str, ...] = ()
    """What `echo` repeats of each prompt."""
    style: ChatStyle = ChatStyle()
    opens_reasoning: bool = False


class Encoder:
    """All methods raise InvalidRequest (ContextOverflow) naming the field."""

    def __init__(self, tokenizer: Tokenizer, generator: Generator) -> None:
        self._tokenizer = tokenizer
        self._generator = generator

    async def inputs(self, prompt: Prompts | Chat, model: ServedModel, chat_field: str) -> Inputs:
        """`chat_field`: where the client put its chat."""
        if isinstance(prompt, Chat):
            chat = await self.chat(prompt, model, chat_field)
            return Inputs([Encoded(chat_field, chat.tokens)], chat.template, (), chat.style, chat.opens_reasoning)
        encoded = await self.prompts(prompt.prompts, model)
        return Inputs(encoded, echoes=await self.echoes(prompt.prompts) if prompt.echo else ())

    async def chat(self, chat: Chat, model: ServedModel, field: str = "messages") -> ChatPrompt:
        return await asyncio.to_thread(self._chat, chat, model, field)

    def _chat(self, chat: Chat, model: ServedModel, field: str) -> ChatPrompt:
        length = sum(len(text) for message in chat.messages for text in message.values() if isinstance(text, str))
        length += sum(len(json.dumps(message["tool_calls"])) for message in chat.messages if "tool_calls" in message)
        if chat.options.variables:
            length += len(orjson.dumps(chat.options.variables))
        check_length(length, model, self._tokenizer, field)
        with renamed({"messages": field}):
            return self._tokenizer.encode_chat(chat.messages, chat.options)

    async def prompts(self, prompts: Sequence[tuple[str, Prompt]], model: ServedModel) -> list[Encoded]:
        for field, prompt in prompts:
            if isinstance(prompt, str):
                check_length(len(prompt), model, self._tokenizer, field)
            else:
                check_ids(prompt, self._tokenizer.vocab_size, field)
        short = SHORT_CHARACTERS if self._generator.num_live else SHORT_ALONE_CHARACTERS
        if sum(len(prompt) for _, prompt in prompts if isinstance(prompt, str)) <= short:
            return self._encode(prompts)
        return await asyncio.to_thread(self._encode, prompts)

    def _encode(self, prompts: Iterable[tuple[str, Prompt]]) -> list[Encoded]:
        return [
            Encoded(field, self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            for field, prompt in prompts
        ]

    async def echoes(self, prompts: Sequence[tuple[str, Prompt]]) -> tuple[str, ...]:
        """What `echo` puts before the answers: texts as they came, ids as the text they stand for."""
        return await asyncio.to_thread(self._echoes, prompts)

    async def decode(self, ids: Sequence[int], max_tokens: int, field: str) -> str:
        """The text of any ids, control tokens among them as the tokenizer shows them."""
        if len(ids) > max_tokens:
            raise InvalidRequest(f"at most {max_tokens} tokens, not {len(ids)}", field)
        check_ids(ids, self._tokenizer.vocab_size, field)
        return await asyncio.to_thread(self._tokenizer.decode, ids)

    def _echoes(self, prompts: Iterable[tuple[str, Prompt]]) -> tuple[str, ...]:
        return tuple(prompt if isinstance(prompt, str) else self._text(prompt) for _, prompt in prompts)

    def _text(self, tokens: Sequence[int]) -> str:
        """As an answer of these tokens would be shown."""
        decoder = self._tokenizer.text_decoders(())
        return "".join(decoder.push(token).text for token in tokens) + decoder.finish()
