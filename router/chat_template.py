"""Chat templates without `transformers` (which would bring torch in): the same Jinja environment, sandboxed.

A test proves the rendering equal to `transformers`. Templates come with the model and are not trusted with more
than text: the sandbox is immutable, and every failure, of the template's own `raise_exception` too, is the
client's InvalidRequest.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.cluster.core.errors import InvalidRequest

Message = Mapping[str, object]


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

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt's text, ending where the assistant is to speak. Raises InvalidRequest(messages)."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError) as error:
            # Templates are programs: one that adds a string to a missing field fails like this.
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error}", "messages"
            ) from error
