"""Schemas that need themselves, with an end and without."""

from typing import Any

import pytest

from twostroke.engine.schema_ends import has_end

NODE = {"$ref": "#/$defs/node"}


def over(node: dict[str, Any]) -> dict[str, Any]:
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


ENDING = {
    "nothing": {},
    "a tree": over(an_object(children={"type": "array", "items": NODE})),
    "a list with null": over(an_object(next={"anyOf": [NODE, {"type": "null"}]})),
    "a list that may be null": over({**an_object(next=NODE), "type": ["object", "null"]}),
    "not required": over({"type": "object", "properties": {"next": NODE}}),
    "one of its kinds": over({"oneOf": [{"type": "string"}, an_object(next=NODE)]}),
    "a value": over({**an_object(next=NODE), "const": {}}),
    "through another": {"$defs": {"a": an_object(b={"$ref": "#/$defs/b"}), "b": {"type": "null"}}, "$ref": "#/$defs/a"},
    "an escaped name": {"$defs": {"a/b c": {"type": "null"}}, "$ref": "#/$defs/a~1b%20c"},
    "by its place in a list": {"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/0"}]},
    "a reference that leads nowhere": {"$ref": "#/$defs/none"},
    "a reference to elsewhere": {"$ref": "https://example.com/schema"},
    "a property called $ref": {"type": "object", "properties": {"$ref": {"type": "string"}}, "required": ["$ref"]},
}
ENDLESS = {
    "itself": {"$ref": "#"},
    "a list without an end": over(an_object(next=NODE)),
    "a full array": over({"type": "array", "items": NODE, "minItems": 1}),
    "the array's first": over({"type": "array", "prefixItems": [NODE], "minItems": 1}),
    "the array's rest": over({"type": "array", "prefixItems": [{"type": "null"}], "items": NODE, "minItems": 2}),
    "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "every kind of it": over({"anyOf": [an_object(a=NODE), an_object(b=NODE)]}),
    "all of it": over({"allOf": [{"type": "object"}, an_object(a=NODE)]}),
    "further properties": over({"type": "object", "additionalProperties": NODE, "required": ["a"]}),
}


@pytest.mark.parametrize("name", ENDING)
def test_an_end(name: str) -> None:
    assert has_end(ENDING[name])


@pytest.mark.parametrize("name", ENDLESS)
def test_no_end(name: str) -> None:
    assert not has_end(ENDLESS[name])
