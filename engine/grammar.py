"""Grammars compiled against a vocabulary and followed token by token (llguidance, ADR 0009). No torch.

    Grammar --compile--> template, kept in a bounded cache --copy--> GrammarState, one a job
    mask(output)         take in the tokens since the last call, then say which may come next

A state is a function of its grammar and the output alone: a continuation, a hand-over or a preemption rebuilds it from
the tokens delivered, and every worker gives the same masks.

The library bounds most of its own work (`_LIMITS`). What it does not bound it is not given: texts over `MAX_TEXT`,
brackets nested deeper than `MAX_DEPTH`; and a router compiles a client's grammar in a process of its own first
(`router.grammar_gate`), under a time limit.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.engine.plan import ConstraintBroken
from twostroke.engine.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TEXT = 64 << 10
"""Characters of a grammar."""
MAX_DEPTH = 64
"""Levels of nesting in a grammar: what compiles one recurses, and a native stack that overflows ends the process."""
KEPT = 64
"""Compiled grammars that are kept."""
_MAX_MESSAGE = 300
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)
"""The library's own, but for memory: a state of a lexer takes 1 to 2 kB, and each job of a grammar may have as many."""
_SPACE = r"[ \n\r\t]{1,20}"
"""White space between the parts of a JSON value, where it is not compact: enough to indent with."""


class GrammarError(Exception):
    """What is wrong with a grammar, for its author."""


class GrammarState:
    """Implements `engine.plan.Constraint`."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size
        """Of the vocabulary; the token past it is the matcher's own end."""
        self._num_taken = 0

    def mask(self, output: Sequence[int], ends: Sequence[int]) -> bytes:
        news = list(output[self._num_taken :])
        try:
            fits = not news or self._matcher.consume_tokens(news)
            bits = bytearray(self._matcher.compute_bitmask()) if fits else bytearray()
        except BaseException as error:  # a panic of the library's is no Exception, and must end this job alone
            raise ConstraintBroken(f"the grammar broke: {_message(str(error))}") from error
        if not fits:
            raise ConstraintBroken(_broken(self._matcher, f"output token {self._num_taken} or later does not fit it"))
        self._num_taken += len(news)
        if self._matcher.is_error():
            raise ConstraintBroken(_broken(self._matcher, "it cannot be followed"))
        byte, bit = self._size >> 3, 1 << (self._size & 7)
        if bits[byte] & bit:
            bits[byte] &= ~bit
            for end in ends:
                if end < self._size:
                    bits[end >> 3] |= 1 << (end & 7)
        if not any(bits):
            raise ConstraintBroken("the grammar allows no token of this model's vocabulary here")
        return bytes(bits)


class BrokenState:
    """Implements `engine.plan.Constraint` for a grammar that could not be compiled: it breaks at its first token."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def mask(self, output: Sequence[int], ends: Sequence[int]) -> bytes:
        raise ConstraintBroken(self._reason)


class GrammarCompiler:
    """`load` gives the vocabulary; it is called at the first grammar, once. Thread-safe; every call may block."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._size = 0
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> GrammarState:
        """A fresh state. Raises GrammarError."""
        with self._lock:
            template = self._kept.get(grammar)
            if template is None:
                template = self._compile(grammar)
                self._kept[grammar] = template
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(grammar)
            return GrammarState(template.deep_copy(), self._size)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            vocabulary = self._load()
            self._size = vocabulary.size
            self._tokenizer = LLTokenizer(_Tokens(vocabulary))  # type: ignore[arg-type]  # duck-typed, as documented
        text = to_library(grammar)
        try:
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        except BaseException as error:  # as in `GrammarState.mask`
            raise GrammarError(_message(str(error))) from error
        if matcher.is_error():
            raise GrammarError(_message(matcher.get_error()))
        return matcher


class _Tokens:
    """A vocabulary as the library wants it, with one more token for its end.

    Forced text is not tokenized here, so calling it gives the plainest of tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [*vocabulary.token_bytes, b""]
        self.eos_token_id = vocabulary.size
        self.special_token_ids = [token for token, data in enumerate(self.tokens) if not data]
        self._of_bytes = {data: token for token, data in enumerate(vocabulary.token_bytes) if len(data) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        known = (self._of_bytes.get(data[at : at + 1]) for at in range(len(data)))
        return [token for token in known if token is not None]


def to_library(grammar: Grammar) -> str:
    """The library's form of a grammar. Raises GrammarError for what is wrong on the face of it."""
    if len(grammar.text) > MAX_TEXT:
        raise GrammarError(f"it has {len(grammar.text)} characters; at most {MAX_TEXT} are taken")
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return _from_schema(grammar)
            case GrammarKind.CHOICE:
                return LLMatcher.grammar_from_regex("|".join(map(re.escape, _choices(grammar.text))))
            case GrammarKind.REGEX:
                _check_brackets(grammar.text)
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.GRAMMAR:
                _check_brackets(grammar.text)
                return grammar_from("grammar", grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_message(str(error))) from None


def _check_brackets(text: str) -> None:
    depth = 0
    for bracket in re.findall(r"\\.|[(\[{}\])]", text, re.DOTALL):
        depth += (bracket in "([{") - (bracket in ")]}")
        if depth > MAX_DEPTH:
            raise _too_deep()


def _check_schema(schema: object) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        level = [part for value in level for part in _parts(value) if isinstance(part, dict | list)]


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> GrammarError:
    return GrammarError(f"it is nested more than {MAX_DEPTH} deep")


def _from_schema(grammar: Grammar) -> str:
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema is an object")
    _check_schema(schema)
    options: JsonCompileOptions = {"lenient": False, "whitespace_flexible": not grammar.compact}
    if not grammar.compact:
        options["whitespace_pattern"] = _SPACE
    return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise GrammarError("choices are a list of texts, none of them empty")
    return choices


def _broken(matcher: LLMatcher, what: str) -> str:
    return f"the grammar broke: {_message(matcher.get_error()) or what}"


def _message(text: str) -> str:
    """The library's words, on one line and without its own state."""
    if text.startswith("panic"):
        return "it cannot be compiled"
    if text.startswith("NoExtension"):
        return "no text fits it"
    return " ".join(text.partition("<backtrace>")[0].replace("<non-verbose/>", "").split())[:_MAX_MESSAGE]
