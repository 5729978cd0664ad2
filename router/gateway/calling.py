"""What a chat's tools do to its grammar and to the form of its answer."""

import asyncio
from dataclasses import replace

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest, Overloaded
from twostroke.router.answer_parts import MessageParser
from twostroke.router.gateway.encode import Inputs
from twostroke.router.gateway.parsed_form import ParsedChatForm
from twostroke.router.gateway.schema import Ask, Chat
from twostroke.router.gateway.tools import ToolAsk
from twostroke.router.grammar_gate import GrammarGate, check_grammar
from twostroke.router.prepare import GenerateParams, check_params
from twostroke.router.tool_calls import ChatStyle, make_parser

CHECK_S = 5.0
"""For all schemas of a request. Verdicts are kept, so that a client that comes again gets further."""


async def constrain(ask: Ask, style: ChatStyle, gate: GrammarGate | None, limits: LimitsSection) -> GenerateParams:
    """The parameters, with the grammar that its tools need. Every grammar in it is checked.

    Raises InvalidRequest naming the field, or Overloaded.
    """
    await check_grammar(ask.params, gate)
    tools = _tools(ask)
    if not tools.allowed:
        return ask.params
    if not style.shows_tools and not tools.forced:
        raise InvalidRequest(
            "the chat template tells the model of no tools, so it can only be made to call one", "tools"
        )
    grammar = tools.grammar(style.tool_format, ask.params.grammar)
    if grammar is None:
        return ask.params
    params = replace(ask.params, grammar=grammar, grammar_field="tools")
    check_params(params, limits)
    try:
        async with asyncio.timeout(CHECK_S):
            # One by one first: what is wrong with a schema is to be said of it.
            for schema in tools.schemas:
                await check_grammar(replace(params, grammar=schema.grammar, grammar_field=schema.field), gate)
            await check_grammar(params, gate)
    except TimeoutError:
        raise Overloaded("the schemas of these tools are not all checked yet") from None
    return params


def parsed_form(ask: Ask, inputs: Inputs, request_id: str) -> ParsedChatForm | None:
    """The form of a chat's answer that is to be taken apart; None when there is nothing to find in it."""
    tools, reasoning = _tools(ask), _finds_reasoning(ask, inputs)
    if not reasoning and not tools.allowed:
        return None
    return ParsedChatForm(
        request_id,
        inputs.style,
        tools.names,
        max_calls=tools.max_calls,
        reasoning=reasoning,
        opened=inputs.opens_reasoning,
        named=tools.named,
    )


def message_parser(ask: Ask, inputs: Inputs) -> MessageParser:
    """What takes an answer apart, where it is told in parts."""
    tools = _tools(ask)
    return make_parser(
        inputs.style,
        tools.names,
        max_calls=tools.max_calls,
        reasoning=_finds_reasoning(ask, inputs),
        opened=inputs.opens_reasoning,
    )


def _finds_reasoning(ask: Ask, inputs: Inputs) -> bool:
    # A grammar of no free text begins with the first token, and leaves no room for reasoning.
    free = ask.params.grammar is None and not _tools(ask).forced
    return isinstance(ask.prompt, Chat) and inputs.style.marks_reasoning and free


def _tools(ask: Ask) -> ToolAsk:
    return ask.prompt.tools if isinstance(ask.prompt, Chat) else ToolAsk()
