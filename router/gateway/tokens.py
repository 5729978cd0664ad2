"""`/tokenize` and `/detokenize`, in the shapes that vLLM gave them. Nothing is generated, nothing is admitted."""

import asyncio
from functools import partial
from typing import Annotated

from pydantic import BaseModel, ConfigDict, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from twostroke.cluster.config import RouterSection
from twostroke.cluster.core.errors import InvalidRequest
from twostroke.router.ask import Chat
from twostroke.router.content import read_chat_options, read_ids, read_messages
from twostroke.router.encode import Encoder
from twostroke.router.gateway.body import parse_body, read_body
from twostroke.router.gateway.errors import json_response
from twostroke.router.gateway.schema import IDS, Messages, Tools, Variables, validate
from twostroke.router.prepare import check_length, serving
from twostroke.router.request import Generator, ServedModel
from twostroke.router.tokenizer import Tokenizer
from twostroke.router.tools import read_tools


class _TokenBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str | None = None
    """Not needed: one model is served."""


class _TokenizeBody(_TokenBody):
    return_token_strs: bool = False


class TokenizeTextBody(_TokenizeBody):
    prompt: str
    add_special_tokens: bool = True


class TokenizeChatBody(_TokenizeBody):
    messages: Messages
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Variables = None
    tools: Tools = None


class DetokenizeBody(_TokenBody):
    tokens: Annotated[object, WithJsonSchema(IDS)]


class Tokens:
    """The two endpoints."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer, config: RouterSection) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._config = config
        self._encoder = Encoder(tokenizer, generator)

    async def tokenize(self, request: Request) -> Response:
        data = await read_body(request.scope, request.receive, self._config)
        body, chat = await parse_body(data, self._parse, self._config)
        model = serving(body.model, self._generator)
        if chat is not None:
            tokens = (await self._encoder.chat(chat, model)).tokens
        else:
            assert isinstance(body, TokenizeTextBody)
            tokens = await self._text(body, model)
        texts = [self._tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return json_response(
            {"count": len(tokens), "max_model_len": model.max_context, "tokens": tokens, "token_strs": texts}
        )

    async def _text(self, body: TokenizeTextBody, model: ServedModel) -> list[int]:
        check_length(len(body.prompt), model, self._tokenizer, "prompt")
        return await asyncio.to_thread(self._tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens)

    def _parse(self, fields: dict[str, object]) -> tuple[TokenizeTextBody | TokenizeChatBody, Chat | None]:
        if fields.get("messages") is None:
            return validate(TokenizeTextBody, fields), None
        if fields.get("prompt") is not None:
            raise InvalidRequest("either prompt or messages, not both", "messages")
        body = validate(TokenizeChatBody, fields)
        if body.add_special_tokens:
            raise InvalidRequest("the chat template brings the special tokens", "add_special_tokens")
        limits = self._config.limits
        tools = read_tools(body.tools, None, None, limits)
        options = read_chat_options(
            body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs, tools
        )
        return body, Chat(read_messages(body.messages, limits.max_messages, with_tools=True), options)

    async def detokenize(self, request: Request) -> Response:
        data = await read_body(request.scope, request.receive, self._config)
        body = await parse_body(data, partial(validate, DetokenizeBody), self._config)
        serving(body.model, self._generator)
        if not isinstance(body.tokens, list):
            raise InvalidRequest("tokens must be a list of token ids", "tokens")
        ids = read_ids(body.tokens, "tokens")
        text = await self._encoder.decode(ids, self._config.limits.max_prompt_tokens, "tokens")
        return json_response({"prompt": text})
