"""Combinations of request parameters, and how each face is asked for one.

Drawn ones cover every pair of values of `VALUES` (a test counts); named ones are edges that pairs do not reach. They
are the same in every run. A new parameter gets its values in `VALUES`, its edges in `EDGES`, and, where a face calls
it otherwise or has none, a line in `http_body` or `grpc_request`.

Values are those of the tiny models: 256 bytes as tokens behind four special ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

from tests.gateway_server import CHAT
from tests.grpc_chats import grpc_chat
from tests.tiny_models import END_TOKEN, SPECIALS
from twostroke.proto.v1 import common_pb2
from twostroke.proto.v1 import inference_pb2 as pb

NUM_DRAWN = 96
CONTEXT = 512
"""Of the tiny model, in tokens."""
DEFAULT_MAX_TOKENS = 8
Json = dict[str, Any]


def token_of(character: str) -> int:
    """Of printable ASCII: bytes stand in the order of GPT-2's alphabet, which begins with `!`."""
    return len(SPECIALS) + ord(character) - ord("!")


TEXTS = {
    "one": ("a",),
    "sentence": ("The capital of France is",),
    "page": ("0123456789abcdef",),
    "unicode": ("naïve 日本語 😀 é",),
    "long": ("Once upon a time there was a router that never lost a token, " * 2,),
    "two": ("Once upon a time", "The quick brown fox jumps"),
    "ids": ("ids",),
    "context": ("x" * 480,),
}
IDS = [*range(4, 40), 0, *range(60, 75)]
"""A prompt of token ids, a special one among them."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
JSON = {"seed": 9, "max_tokens": 70, "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
CHOICE = {"structured_outputs": {"choice": ["yes", "no, never", "n\u00e9"]}}
REGEX = {"structured_outputs": {"regex": "[a-f]{3,9}[0-9]{2}"}, "max_tokens": 20}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}

WEATHER = {
    "name": "weather",
    "description": "Of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Orléans"]}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
OFFERED = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
STRICT = [{"type": "function", "function": {**WEATHER, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
TOOLS: Mapping[str, Json] = {
    "auto": {"tools": OFFERED},
    "none": {"tools": OFFERED, "tool_choice": "none"},
    "required": {"tools": OFFERED, "tool_choice": "required"},
    "one": {"tools": OFFERED, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": OFFERED, "tool_choice": NAMED},
    "strict": {"tools": STRICT},
}
"""Of chats, as HTTP has them."""

VALUES: Mapping[str, Sequence[Any]] = {
    "prompt": ("one", "sentence", "page", "unicode", "long", "two", "ids"),
    "max_tokens": (None, 1, 2, 5, 14),
    "min_tokens": (None, 1, 4),
    "n": (None, 2),
    "stop": (None, "e", ["é", "th", "a"], ["never in any answer"]),
    "stop_token_ids": (None, [token_of("e")], [*range(100, 140)]),
    "ignore_eos": (None, True),
    "temperature": (0, 0.7, 1, 2),
    "top_p": (None, 0.9, 0.3),
    "top_k": (None, 1, 20),
    "min_p": (None, 0.05, 0.4),
    "seed": (7, -3, (1 << 64) - 1),
    "presence_penalty": (None, 1.5, -2),
    "frequency_penalty": (None, 0.5, -1),
    "repetition_penalty": (None, 1.3, 0.8),
    "logit_bias": (None, {str(END_TOKEN): 8}, {str(token_of("e")): 6, str(token_of("a")): 6, "9": -100}),
    "response_format": (None, {"type": "json_object"}, FORM),
    "structured_outputs": (None, CHOICE["structured_outputs"], REGEX["structured_outputs"]),
    "logprobs": (None, 0, 5, 20),
    "prompt_logprobs": (None, 0, 4),
    "echo": (None, True),
    "tools": (None, "auto", "required", "one", "strict"),
    "chat": (None, {"add_generation_prompt": False}, {"continue_final_message": True}),
    "usage": (None, True),
    "priority": (None, 5),
    "cache": ("own", "shared"),
}
"""None: not sent. `chat` are fields of chats alone, `usage` asks streams for it, `cache` is the salt's, `tools`
is of `TOOLS`.
"""

GREEDY = {"temperature": 0}
END_FIRST = {**GREEDY, "logit_bias": {str(END_TOKEN): 100}}
E_ALWAYS = {**GREEDY, "logit_bias": {str(token_of("e")): 100}}
EDGES: Mapping[str, Json] = {
    "end token first": END_FIRST,
    "end token first, of one": {**END_FIRST, "max_tokens": 1},
    "end token first, of two": {**END_FIRST, "max_tokens": 2, "logprobs": 2},
    "end token at min_tokens": {**END_FIRST, "min_tokens": 3, "logprobs": 0},
    "end token second": {**END_FIRST, "min_tokens": 1, "max_tokens": 2},
    "end token ignored": {**END_FIRST, "ignore_eos": True, "max_tokens": 4},
    "stop id first": {**E_ALWAYS, "stop_token_ids": [token_of("e")]},
    "stop id first, of one": {**E_ALWAYS, "stop_token_ids": [token_of("e")], "max_tokens": 1, "n": 2},
    "stop id at min_tokens": {**E_ALWAYS, "stop_token_ids": [token_of("e")], "min_tokens": 4},
    "stop string first": {**E_ALWAYS, "stop": "e"},
    "stop string first, of one": {**E_ALWAYS, "stop": "e", "max_tokens": 1, "logprobs": 1},
    "stop string second": {**E_ALWAYS, "stop": "ee", "n": 3},
    "stop string second, of two": {**E_ALWAYS, "stop": ["ee", "eee"], "max_tokens": 2},
    "stop string cut short": {**E_ALWAYS, "stop": "eee", "max_tokens": 2, "logprobs": 0},
    "stop string under min_tokens": {**E_ALWAYS, "stop": "ee", "min_tokens": 5},
    "stop string before stop id": {**E_ALWAYS, "stop": "e", "stop_token_ids": [token_of("e")]},
    "all tokens under min_tokens": {"seed": 1, "min_tokens": 9, "max_tokens": 9, "n": 2},
    "one token": {**GREEDY, "max_tokens": 1, "logprobs": 20},
    "one token, three times": {"seed": 4, "max_tokens": 1, "n": 3, "logprobs": 1},
    "one token, its prompt scored": {"seed": 4, "max_tokens": 1, "n": 3, "logprobs": 1, "prompt_logprobs": 1},
    "echo scored": {**GREEDY, "echo": True, "logprobs": 3, "prompt_logprobs": 1, "n": 2},
    "echo of two": {"seed": 3, "echo": True, "logprobs": 2, "prompt": "two", "n": 2},
    "prompt of one token scored": {**GREEDY, "prompt": "one", "prompt_logprobs": 20},
    "prompt of a chunk": {**GREEDY, "prompt": "page", "logprobs": 1, "prompt_logprobs": 1},
    "long answer": {"seed": 5, "max_tokens": 60, "min_tokens": 60, "n": 2, "logprobs": 1, "usage": True},
    "greedy by top_k": {"seed": 5, "temperature": 2, "top_k": 1},
    "greedy by top_p": {"seed": 5, "temperature": 2, "top_p": 1e-9},
    "greedy by min_p": {"seed": 5, "temperature": 2, "min_p": 1},
    "wide": {"seed": 5, "temperature": 2, "top_k": 100_000, "top_p": 1, "n": 4},
    "strong penalties": {"seed": 6, "repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": 2},
    "inverse penalties": {"seed": 6, "repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": -2},
    "smallest seed": {"seed": -(1 << 63), "n": 2},
    "bias on all": {**GREEDY, "logit_bias": {str(token): -100 for token in range(4, 200)}, "logprobs": 1},
    "best of n": {"seed": 8, "best_of": 2, "n": 2},
    "best of more": {"seed": 8, "best_of": 5, "n": 2, "logprobs": 1},
    "prompts alone": {**GREEDY, "prompt": "two", "max_tokens": 0, "echo": True, "logprobs": 2},
    "prompt alone": {**GREEDY, "prompt": "unicode", "max_tokens": 0, "echo": True, "logprobs": 2},
    "whole context": {**GREEDY, "prompt": "context", "max_tokens": CONTEXT - 480, "ignore_eos": True},
    "rest of the context": {**GREEDY, "prompt": "context", "ignore_eos": True},
    "over the context": {**GREEDY, "max_tokens": CONTEXT},
    "a schema": JSON,
    "a schema, greedy": {**JSON, **GREEDY, "cache": "shared"},
    "a schema, twice, scored": {**JSON, "n": 2, "logprobs": 3, "prompt_logprobs": 1, "usage": True},
    "a schema, cut short": {**JSON, "max_tokens": 3, "logprobs": 0},
    "a schema, one token": {**JSON, "max_tokens": 1},
    "a schema and a stop string": {**JSON, "stop": '","', "prompt": "unicode"},
    "a regular expression and penalties": {
        **REGEX,
        "seed": 3,
        "presence_penalty": 2,
        "repetition_penalty": 1.5,
        "n": 3,
    },
    "a regular expression and filters": {**REGEX, "seed": 3, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    "a regular expression and a bias": {**REGEX, **E_ALWAYS, "logprobs": 1},
    "a choice": {**CHOICE, "seed": 2, "n": 4, "logprobs": 1},
    "a choice, greedy": {**CHOICE, **GREEDY, "prompt": "long"},
    "a grammar": {"structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}, "seed": 4, "max_tokens": 30},
    "tools": {"seed": 2, "tools": "required", "max_tokens": 70, "n": 2, "logprobs": 1},
    "tools, one": {**GREEDY, "tools": "one", "max_tokens": 70},
    "tools, named": {"seed": 3, "tools": "named", "max_tokens": 70, "n": 3},
    "tools, named, cut": {"seed": 3, "tools": "named", "max_tokens": 20, "n": 2},
    "tools, none": {"seed": 3, "tools": "none", "n": 2},
    "tools, cut by a stop string": {"seed": 3, "tools": "named", "max_tokens": 70, "stop": "city"},
    "tools or an object": {"seed": 4, "tools": "auto", "response_format": FORM, "max_tokens": 70, "n": 3},
    "tools of a strict function": {"seed": 5, "tools": "strict", "max_tokens": 40, "n": 3, "logprobs": 0},
    "refused: a keyword": {"structured_outputs": {"json": {"not": {}}}},
    "refused: a schema without an end": {"structured_outputs": {"json": {"$ref": "#"}}},
    "refused: a regular expression": {"structured_outputs": {"regex": "(?=a)b"}},
    "refused: a choice and min_tokens": {**CHOICE, "min_tokens": 2},
    "refused: a choice without an end token": {**CHOICE, "ignore_eos": True},
    "refused: min_tokens over max_tokens": {"min_tokens": 5, "max_tokens": 4},
    "refused: no choice": {"n": 0},
    "refused: too many choices": {"n": 129},
    "refused: hot": {"temperature": 2.5},
    "refused: top_p of nothing": {"top_p": 0},
    "refused: top_k below off": {"top_k": -2},
    "refused: empty stop": {"stop": [""]},
    "refused: many stops": {"stop": [str(number) for number in range(33)]},
    "refused: stop id of no token": {"stop_token_ids": [5, 260]},
    "refused: bias of no token": {"logit_bias": {"260": 1}},
    "refused: bias out of range": {"logit_bias": {"5": 101}},
    "refused: many log-probabilities": {"logprobs": 21},
    "refused: many of the prompt's": {"prompt_logprobs": 21},
    "refused: long salt": {"salt": "x" * 257},
    "refused: model": {"model": "another"},
}
FACES_OF: Mapping[str, Sequence[str]] = {
    "echo": ("completions", "grpc"),
    "best_of": ("completions", "grpc"),
    "chat": ("chat",),
    "tools": ("chat",),
}
"""Parameters that not every face has; the others leave them out. gRPC has `chat` and `tools` for its chats, and for
`echo` what it scores.
"""
FACES_DIFFER = frozenset({"whole context", "best of more", "prompt alone", "prompts alone"})
"""Edges that not every face takes: a chat template adds to the context, HTTP's streams do not choose the best, its
chats do not score a prompt alone.
"""


@dataclass(frozen=True)
class Combination:
    name: str
    params: Json
    """As `/v1/completions` calls them."""

    def __str__(self) -> str:
        return self.name

    @property
    def described(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.params.items())


def is_sound(params: Json) -> bool:
    """False for what is refused together, which edges have."""
    forms = [params[name] for name in ("response_format", "structured_outputs") if params[name]]
    if params["tools"] and params["structured_outputs"]:
        return False
    if len(forms) > 1 or ((forms or params["tools"]) and (params["min_tokens"] or params["ignore_eos"])):
        return False
    return (params["min_tokens"] or 0) <= (params["max_tokens"] or DEFAULT_MAX_TOKENS)


def covering(values: Mapping[str, Sequence[Any]], count: int) -> Iterator[Json]:
    """`count` sound assignments, each the best of some at covering pairs of values that came seldom or never."""
    random = Random(20261130)
    names = list(values)
    seen: dict[tuple[str, int, str, int], int] = {}
    for _ in range(count):
        tries = []
        while len(tries) < 12:
            row = {name: random.randrange(len(values[name])) for name in names}
            params = {name: values[name][row[name]] for name in names}
            if is_sound(params):
                pairs = [(one, row[one], other, row[other]) for one, other in combinations(names, 2)]
                tries.append((sum(1 / (1 + seen.get(pair, 0)) ** 4 for pair in pairs), len(tries), params, pairs))
        _, _, params, pairs = max(tries)
        for pair in pairs:
            seen[pair] = seen.get(pair, 0) + 1
        yield params


def all_combinations() -> list[Combination]:
    drawn = (
        Combination(f"drawn {number}", {name: value for name, value in params.items() if value is not None})
        for number, params in enumerate(covering(VALUES, NUM_DRAWN))
    )
    return [*drawn, *(Combination(name, params) for name, params in EDGES.items())]


# --------------------------------------------------------------------------------------------- how faces are asked


def _shared(combination: Combination, face: str) -> Json:
    """The parameters that the face has, with defaults for a short answer."""
    params = {name: value for name, value in combination.params.items() if face in FACES_OF.get(name, (face,))}
    params.pop("cache", None)
    return params


def _salt(combination: Combination, call: str) -> str:
    """Answers share cached pages only where the combination says so; else what they find there is the same."""
    if "salt" in combination.params:
        return str(combination.params["salt"])
    return "shared" if combination.params.get("cache") == "shared" else f"{combination.name} {call}"


def messages(prompt: str) -> list[Json]:
    """As a chat: two texts are turns with an answer between them, ids are a text in parts after a system message."""
    first, *more = TEXTS[prompt]
    if prompt == "ids":
        parts = [{"type": "text", "text": "one part"}, {"type": "text", "text": "and another"}]
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    turns = [{"role": "user", "content": first}]
    for text in more:
        turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": text}]
    return turns


def http_body(combination: Combination, path: str, streamed: bool) -> Json:
    face = "chat" if path == CHAT else "completions"
    params = _shared(combination, face)
    prompt = params.pop("prompt", "sentence")
    params |= TOOLS.get(params.pop("tools", ""), {})
    include_usage = params.pop("usage", False)
    chat = params.pop("chat", {})
    params.pop("salt", None)
    body: Json = {"model": "fake", "cache_salt": _salt(combination, f"{face} {streamed}"), **params}
    if streamed:
        body["stream"] = True
        if not combination.name.startswith("refused"):
            body.pop("prompt_logprobs", None)  # with whole answers only
        if include_usage:
            body["stream_options"] = {"include_usage": True}
    if face == "completions":
        texts = list(TEXTS[prompt])
        body["prompt"] = IDS if prompt == "ids" else texts if len(texts) > 1 else texts[0]
    else:
        body["messages"] = messages(prompt)
        body |= chat
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        if "max_tokens" in body and body["max_tokens"] % 2:
            body["max_completion_tokens"] = body.pop("max_tokens")
    return body


def grpc_request(combination: Combination, as_chat: bool) -> pb.GenerateRequest:
    """Raises ValueError for what the wire's types cannot say."""
    params = _shared(combination, "grpc")
    prompt = params.pop("prompt", "sentence")
    params.pop("usage", None)
    params.pop("salt", None)
    if params.pop("echo", False) and "logprobs" in params:
        params["prompt_logprobs"] = max(params["logprobs"], params.get("prompt_logprobs", 0))
    if "seed" in params:
        params["seed"] &= (1 << 64) - 1
    if isinstance(params.get("stop"), str):
        params["stop"] = [params["stop"]]
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    if "structured_outputs" in params:
        params["grammar"] = _grammar(params.pop("structured_outputs"))
    if "response_format" in params:
        asked = params.pop("response_format")
        params["grammar"] = _grammar({"json": asked.get("json_schema", {}).get("schema", {"type": "object"})})
    request = {"model": "fake", "cache_salt": _salt(combination, f"grpc {as_chat}"), **params}
    if as_chat:
        chat = combination.params.get("chat", {}) | TOOLS.get(combination.params.get("tools", ""), {})
        return pb.GenerateRequest(chat=grpc_chat({"messages": messages(prompt), **chat}), **request)
    if prompt == "ids":
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), **request)
    return pb.GenerateRequest(text=TEXTS[prompt][0], **request)


def _grammar(outputs: Json) -> common_pb2.Grammar:
    kinds = {
        "json": common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
        "regex": common_pb2.GRAMMAR_KIND_REGEX,
        "choice": common_pb2.GRAMMAR_KIND_CHOICE,
        "grammar": common_pb2.GRAMMAR_KIND_GRAMMAR,
    }
    [name] = kinds.keys() & outputs.keys()
    text = outputs[name] if isinstance(outputs[name], str) else json.dumps(outputs[name])
    return common_pb2.Grammar(kind=kinds[name], text=text, compact=outputs.get("disable_any_whitespace", False))
