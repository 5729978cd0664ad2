"""The fields that ask for a form of the answer: OpenAI's `response_format` and, of `/v1/responses`, `text.format`;
Anthropic's `output_config.format`; vLLM's `structured_outputs`.

    response_format      {"type": "text" | "json_object"}, {"type": "json_schema", "json_schema": {"name", "schema"}}
    structured_outputs   one of json, json_object, regex, choice, grammar; disable_any_whitespace, which can also
                         stand alone beside a response_format

A schema is enforced whether `strict` is set or not, and with everything in it: what cannot be enforced is refused.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import orjson

from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.grammar import ANY_OBJECT, Grammar, GrammarKind

MAX_CHOICES = 1024
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_TEXTS = {"regex": GrammarKind.REGEX, "grammar": GrammarKind.GRAMMAR}
_OUTPUTS = ("json", "json_object", "regex", "choice", "grammar")

FORMAT_SCHEMA = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "schema": {"type": "object"},
                "strict": {"type": "boolean"},
            },
        },
    },
}
OUTPUTS_SCHEMA = {
    "type": "object",
    "properties": {
        "json": {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "json_object": {"const": True},
        "regex": {"type": "string"},
        "choice": {"type": "array", "minItems": 1, "items": {"type": "string"}},
        "grammar": {"type": "string"},
        "disable_any_whitespace": {"type": "boolean"},
    },
}
"""What the OpenAPI document says of them."""


class Placed(NamedTuple):
    """A grammar, and the field of the body that it came from."""

    grammar: Grammar
    field: str


def read_text_format(value: object) -> Placed | None:
    """`text.format` of `/v1/responses`: a `response_format` with the parts of its schema beside the type."""
    field = "text.format"
    if value is None:
        return None
    form = _object(value, field)
    if form.get("type") != "json_schema":
        return _read_response_format(form, field)
    return _read_json_schema({name: form[name] for name in form if name != "type"}, field)


def read_output_config(value: object) -> Placed | None:
    """`output_config` of `/v1/messages`: a schema is all that it may ask for."""
    if value is None:
        return None
    config = _object(value, "output_config")
    asked = next((name for name in config if name != "format" and config[name] is not None), None)
    if asked is not None:
        raise InvalidRequest(f"{asked[:128]} is not supported here", f"output_config.{asked[:128]}")
    if config.get("format") is None:
        return None
    field = "output_config.format"
    form = _object(config["format"], field)
    if form.get("type") != "json_schema":
        raise InvalidRequest("type must be json_schema", f"{field}.type")
    check_known(form, ("type", "schema"), field)
    return Placed(schema_grammar(form.get("schema"), f"{field}.schema"), f"{field}.schema")


def read_form(response_format: object, structured_outputs: object) -> Placed | None:
    """Raises InvalidRequest naming the field."""
    form = None if response_format is None else _read_response_format(response_format)
    if structured_outputs is None:
        return form
    outputs = _object(structured_outputs, "structured_outputs")
    check_known(outputs, (*_OUTPUTS, "disable_any_whitespace"), "structured_outputs")
    compact = outputs.get("disable_any_whitespace") or False
    if not isinstance(compact, bool):
        raise InvalidRequest("must be true or false", "structured_outputs.disable_any_whitespace")
    if form is None:
        return _read_structured_outputs(outputs, compact)
    if any(outputs.get(name) is not None for name in _OUTPUTS):
        raise InvalidRequest("response_format asks for a form already", "structured_outputs")
    return Placed(replace(form.grammar, compact=compact), form.field)


def schema_grammar(schema: object, field: str, *, compact: bool = False) -> Grammar:
    """Raises InvalidRequest naming `field` for what is no schema. The order of properties is the answer's."""
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema is an object", field)
    return Grammar(GrammarKind.JSON_SCHEMA, _dumped(schema, field), compact)


def _read_response_format(value: object, field: str = "response_format") -> Placed | None:
    form = _object(value, field)
    match form.get("type"):
        case "text":
            check_known(form, ("type",), field)
            return None
        case "json_object":
            check_known(form, ("type",), field)
            return Placed(ANY_OBJECT, field)
        case "json_schema":
            check_known(form, ("type", "json_schema"), field)
            return _read_json_schema(form.get("json_schema"), f"{field}.json_schema")
        case _:
            raise InvalidRequest("type must be one of text, json_object, json_schema", f"{field}.type")


def _read_json_schema(value: object, field: str) -> Placed:
    form = _object(value, field)
    check_known(form, ("name", "description", "schema", "strict"), field)
    name = form.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest("a name has 1 to 64 letters, digits, _ and -", f"{field}.name")
    if not isinstance(form.get("description"), str | None):
        raise InvalidRequest("a description must be a string", f"{field}.description")
    if not isinstance(form.get("strict"), bool | None):
        raise InvalidRequest("strict must be true or false", f"{field}.strict")
    if form.get("schema") is None:
        return Placed(ANY_OBJECT, field)
    return Placed(schema_grammar(form["schema"], f"{field}.schema"), f"{field}.schema")


def _read_structured_outputs(form: Mapping[str, object], compact: bool) -> Placed:
    asked = [name for name in _OUTPUTS if form.get(name) is not None]
    if len(asked) != 1:
        raise InvalidRequest(f"exactly one of {', '.join(_OUTPUTS)}, not {len(asked)}", "structured_outputs")
    name, value = asked[0], form[asked[0]]
    field = f"structured_outputs.{name}"
    return Placed(_output(name, value, field, compact), field)


def _output(name: str, value: object, field: str, compact: bool) -> Grammar:
    match name:
        case "json":
            return schema_grammar(_parsed(value, field) if isinstance(value, str) else value, field, compact=compact)
        case "json_object":
            if value is not True:
                raise InvalidRequest("json_object can only be true", field)
            return Grammar(ANY_OBJECT.kind, ANY_OBJECT.text, compact)
        case "choice":
            return _choice(value, field)
        case _:
            if not isinstance(value, str) or not value:
                raise InvalidRequest(f"{name} must be a text", field)
            return Grammar(_TEXTS[name], value)


def _choice(value: object, field: str) -> Grammar:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"choice must be a list of 1 to {MAX_CHOICES} texts", field)
    for index, item in enumerate(value):
        if not isinstance(item, str) or not item:
            raise InvalidRequest("a choice must be a text, and not empty", f"{field}[{index}]")
    return Grammar(GrammarKind.CHOICE, _dumped(value, field))


def _parsed(text: str, field: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InvalidRequest("it is not JSON", field) from None


def _dumped(value: object, field: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        # Only its depth can be wrong: it came from JSON.
        raise InvalidRequest("it is nested too deep", field) from None


def _object(value: object, field: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest("must be an object", field)
    return value


def check_known(given: Iterable[object], names: tuple[str, ...], field: str) -> None:
    """Raises InvalidRequest for a field of an object that is not one of `names`."""
    unknown = next((str(name) for name in given if name not in names), None)
    if unknown is not None:
        raise InvalidRequest(f"unknown field {unknown[:128]!r}", f"{field}.{unknown[:128]}")
