"""What a chat's tools do to its grammar and how its answer is taken apart."""

import asyncio
from dataclasses import replace
from functools import partial

from twostroke.cluster.config import LimitsSection
from twostroke.cluster.core.errors import InvalidRequest, Overloaded
from twostroke.cluster.core.grammar import GrammarKind
from twostroke.router.answer_parts import MessageParser
from twostroke.router.apart import Apart
from twostroke.router.ask import Ask, Chat
from twostroke.router.encode import Inputs
from twostroke.router.grammar_gate import GrammarGate, check_grammar
from twostroke.router.prepare import GenerateParams, check_params
from twostroke.router.tool_calls import ChatStyle, make_parser
from twostroke.router.tools import ToolAsk

CHECK_S = 5.0
"""For all schemas of a request. Verdicts are kept, so that a client that comes again gets further."""


async def constrain(ask: Ask, style: ChatStyle, gate: GrammarGate | None, limits: LimitsSection) -> GenerateParams:
    """The parameters, with the grammar that its tools need. Every grammar in it is checked.

    Raises InvalidRequest naming the field, or Overloaded.
    """
    tools, form = _tools(ask), ask.params.grammar
    if tools.allowed and form is not None and form.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidRequest("with tools, the answer's form can only be a JSON schema", ask.params.grammar_field)
    await check_grammar(ask.params, gate)
    if not tools.allowed:
        return ask.params
    if not style.shows_tools and not tools.forced:
        raise InvalidRequest(
            "the chat template tells the model of no tools, so it can only be made to call one", "tools"
        )
    grammar = tools.grammar(style.tool_format, form)
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


def taken_apart(ask: Ask, inputs: Inputs, request_id: str) -> Apart | None:
    """None when there is nothing to find in the answer."""
    tools = _tools(ask)
    if not tools.allowed and not _finds_reasoning(ask, inputs):
        return None
    make_parser = partial(message_parser, ask, inputs)
    return Apart(request_id, inputs.style.tool_format, make_parser, named=tools.named)


def is_continuable(ask: Ask, apart: Apart | None) -> bool:
    """A call or reasoning that is cut is not read on, and which choices are best is not known once they are apart."""
    return apart is None and ask.num_shown == ask.params.n


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
