"""Whether an answer to a JSON schema can end: a schema may need itself for ever.

    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}

compiles, and every answer to it goes on until its `max_tokens`. What can end is a least fixed point over the schema's
references: first those that need no other, then those that need only such, until nothing is added.
"""

import re
from collections.abc import Iterator
from urllib.parse import unquote

_NESTING = ("object", "array")


def has_end(schema: object) -> bool:
    """Whether a value of finite size may fit `schema`, as far as references go; what is wrong with it otherwise, and
    references that lead nowhere, are the library's to say. `schema` is not nested too deep to recurse into.
    """
    targets = {ref: _find(schema, ref) for ref in _references(schema)}
    ending = {ref for ref, target in targets.items() if target is None}
    while True:
        found = {ref for ref, target in targets.items() if ref not in ending and _ends(target, ending)}
        if not found:
            return _ends(schema, ending)
        ending |= found


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for part in node.values():
            yield from _references(part)
    elif isinstance(node, list):
        for part in node:
            yield from _references(part)


def _find(schema: object, ref: str) -> object | None:
    """What a JSON pointer within the schema leads to; None for any other reference."""
    if not re.match(r"#(/|$)", ref):
        return None
    node = schema
    for part in ref[2:].split("/") if len(ref) > 1 else ():
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return None
    return node


def _ends(node: object, ending: set[str]) -> bool:
    """Whether `node` has an end, given the references that are known to have one."""
    if not isinstance(node, dict) or "const" in node or "enum" in node:
        return True
    if isinstance(node.get("$ref"), str) and node["$ref"] not in ending:
        return False
    if not all(_ends(part, ending) for part in _items(node.get("allOf"))):
        return False
    for name in ("anyOf", "oneOf"):
        parts = _items(node.get(name))
        if parts and not any(_ends(part, ending) for part in parts):
            return False
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return any(kind not in _NESTING or _kind_ends(kind, node, ending) for kind in kinds)


def _kind_ends(kind: object, node: dict[str, object], ending: set[str]) -> bool:
    if kind == "object":
        properties, rest = node.get("properties"), node.get("additionalProperties")
        known = properties if isinstance(properties, dict) else {}
        required = [name for name in _items(node.get("required")) if isinstance(name, str)]
        return all(_ends(known.get(name, rest), ending) for name in required)
    least, first = node.get("minItems"), _items(node.get("prefixItems"))
    if not isinstance(least, int):
        return True
    items = [*first[:least], *([node.get("items")] if least > len(first) else [])]
    return all(_ends(item, ending) for item in items)


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []
