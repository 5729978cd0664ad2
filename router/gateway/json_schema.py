"""Pieces of JSON schemas, for the OpenAPI document. Objects are closed, so that a field nobody described is noticed."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

STRING: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
NUMBER: Json = {"type": "number"}
NULL: Json = {"type": "null"}
REPORT: Json = {"type": "object", "description": "With `x-twostroke-report: 1`: where the time went."}


def object_of(optional: Mapping[str, Json] | None = None, /, **required: Json) -> Json:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(items: Json) -> Json:
    return {"type": "array", "items": items}


def or_null(schema: Json) -> Json:
    return {"anyOf": [schema, NULL]}
