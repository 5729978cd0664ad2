"""The blocks of a typed answer do not depend on how its parts were cut."""

from random import Random

from twostroke.router.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning
from twostroke.router.gateway.blocks import Blocks, Kind

ANSWER: list[Part] = [
    Reasoning("Hm, let me think."),
    Content("Let me see."),
    CallBegin(0, "weather"),
    CallArguments(0, '{"city": "Paris"}'),
    CallBegin(1, "now"),
    CallArguments(1, "{}"),
    Content("Done."),
]


def cut(part: Part, random: Random) -> list[Part]:
    match part:
        case Content(text):
            return [Content(piece) for piece in pieces(text, random)]
        case Reasoning(text):
            return [Reasoning(piece) for piece in pieces(text, random)]
        case CallArguments(number, text):
            return [CallArguments(number, piece) for piece in pieces(text, random)]
    return [part]


def pieces(text: str, random: Random) -> list[str]:
    at = random.randrange(len(text) + 1)
    return [piece for piece in (text[:at], text[at:]) if piece]


def test_however_the_parts_are_cut() -> None:
    random = Random(1)
    for _ in range(50):
        blocks = Blocks()
        opened: list[int] = []
        closed: list[int] = []
        for piece in [piece for part in ANSWER for piece in cut(part, random)]:
            step = blocks.take(piece)
            if step.opened is not None:
                opened.append(step.opened.index)
            if step.closed is not None:
                closed.append(step.closed.index)
        last = blocks.close()
        assert last is not None
        told = [(block.kind, block.number, block.name, block.text) for block in blocks.all]
        assert told == [
            (Kind.REASONING, 0, "", "Hm, let me think."),
            (Kind.TEXT, 0, "", "Let me see."),
            (Kind.CALL, 0, "weather", '{"city": "Paris"}'),
            (Kind.CALL, 1, "now", "{}"),
            (Kind.TEXT, 1, "", "Done."),
        ]
        assert opened == [0, 1, 2, 3, 4]
        assert [*closed, last.index] == opened
        assert blocks.close() is None
