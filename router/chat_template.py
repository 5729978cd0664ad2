"""Chat templates without `transformers` (which would bring torch in): the same Jinja environment, sandboxed.

A test proves the rendering equal to `transformers`. Templates come with the model and are not trusted with more
than text: the sandbox is immutable, and every failure, of the template's own `raise_exception` too, is the
client's InvalidRequest.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from datetime import datetime

import jinja2
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.records import dataclass
from twostroke.router.tool_calls import style_of

Message = Mapping[str, object]

MAX_SHOWN = 200
"""Characters of a template's own complaint that an error repeats; it may quote the messages."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat becomes a prompt, beyond its messages."""

    add_generation_prompt: bool = True
    """End where the assistant is to speak."""
    continue_final_message: bool = False
    """End within the last message, so that the answer goes on where that stops. Without `add_generation_prompt`."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """What the template may ask for beside: `chat_template_kwargs`, none with a name of `RESERVED`; and `tools`, as
    OpenAI has them.
    """


RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner", "namespace"),
        *("self", "loop", "caller", "varargs", "kwargs", "true", "false", "none", "True", "False", "None"),
    }
)
"""Names that a template's variables may not take."""


def unused_character(texts: Iterable[str]) -> str:
    """A character that is in none of them: one of Unicode's noncharacters. Raises InvalidRequest if all are."""
    seen = list(texts)
    for character in map(chr, range(0xFDD0, 0xFDF0)):
        if not any(character in text for text in seen):
            return character
    raise InvalidRequest("the messages hold every Unicode noncharacter from U+FDD0 to U+FDEF", "messages")


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a model says, for training; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML characters, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template. `special_tokens` are the names that templates use: `bos_token`, `eos_token`, ...

    Raises jinja2.TemplateSyntaxError for a template that does not compile. Thread-safe.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        asked_for = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.style = style_of(source, shows_tools="tools" in asked_for)

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> str:
        """The prompt's text. Raises InvalidRequest naming `messages`."""
        options = options or ChatOptions()
        if options.continue_final_message:
            return self._render_unfinished(messages, options)
        return self._render(messages, options)

    def _render_unfinished(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """Cut after the last message's text, which a mark finds again wherever the template puts it."""
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise InvalidRequest("only a message of text can be continued", f"messages[{len(messages) - 1}].content")
        mark = unused_character(str(value) for message in messages for value in message.values())
        text = self._render([*messages[:-1], {**messages[-1], "content": content + mark}], options)
        prompt, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequest("the chat template does not show the final message, so it cannot go on", "messages")
        return prompt.replace(mark, "")

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        try:
            return self._template.render(
                {
                    "tools": None,
                    **options.variables,
                    "messages": messages,
                    "documents": None,
                    "add_generation_prompt": options.add_generation_prompt,
                    **self._special_tokens,
                }
            )
        except jinja2.TemplateError as error:
            shown = str(error)[:MAX_SHOWN]
            raise InvalidRequest(f"the chat template refuses these messages: {shown}", "messages") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # Templates are programs: one that adds a string to a missing field fails like this.
            shown = str(error)[:MAX_SHOWN]
            raise InvalidRequest(f"the chat template cannot render these messages: {shown}", "messages") from error
