"""Compiles grammars that nobody has vouched for, in a process that may die of them: the child of `router.grammar_gate`.

    stdout   `READY` once
    stdin    a grammar a line, as JSON        stdout   a verdict a line: what is wrong with it, empty when nothing is

A grammar that takes more CPU time than its limit ends the process by a timer of the kernel's, one that eats memory by a
limit of its. CPU time and not the clock's: what is too complex must not depend on what else the machine does. The
process ends with its standard input, so none is left when the parent is gone.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from random import Random

from twostroke.cluster.core.grammar import Grammar, GrammarKind
from twostroke.engine.grammar import GrammarCompiler, GrammarError, to_library
from twostroke.engine.grammar_words import words_of
from twostroke.engine.plan import ConstraintBroken
from twostroke.engine.schema_ends import has_end
from twostroke.engine.vocabulary import byte_vocabulary

MEMORY_BYTES = 2 << 30
NUM_WALKS = 2
NUM_STEPS = 192
"""Bytes of an answer. Some regular expressions cost nothing until their hundredth character."""
NUM_WORD_STEPS = 32
READY = b"ready\n"
_END = 257


def to_line(grammar: Grammar) -> bytes:
    """A grammar as the child reads it."""
    return json.dumps([grammar.kind.value, grammar.text, grammar.compact]).encode() + b"\n"


def find_fault(compiler: GrammarCompiler, grammar: Grammar) -> str:
    """Compile it and follow a few answers for a while, since much of the work is done at the first tokens; and those
    of its words, which a random answer may not get to.
    """
    try:
        check_end(grammar)
        for seed in range(NUM_WALKS):
            _follow(compiler, grammar, Random(seed), NUM_STEPS)
        for word in words_of(grammar):
            # One that is wrong only by itself is not wrong.
            with suppress(GrammarError):
                _follow(compiler, word, Random(0), NUM_WORD_STEPS)
    except (GrammarError, ConstraintBroken, ValueError, RecursionError) as error:
        return str(error)
    return ""


def _follow(compiler: GrammarCompiler, grammar: Grammar, random: Random, num_steps: int) -> None:
    state = compiler.compile(grammar)
    output: list[int] = []
    while len(output) < num_steps:
        bits = state.mask(output, (_END,))
        allowed = [token for token in range(256) if bits[token >> 3] >> (token & 7) & 1]
        if not allowed:
            return
        output.append(random.choice(allowed))


def check_end(grammar: Grammar) -> None:
    """Raises GrammarError for a schema that no finite answer fits."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        to_library(grammar)
        if not has_end(json.loads(grammar.text)):
            raise GrammarError("it needs itself for ever: no finite answer fits it")


def main(limit_s: float) -> None:
    """`limit_s` of CPU time for each grammar."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    compiler = GrammarCompiler(byte_vocabulary)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        kind, text, compact = json.loads(line)
        # Without a handler the signal ends the process, whatever native code is at work.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        fault = find_fault(compiler, Grammar(GrammarKind(kind), text, compact))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(fault), flush=True)
