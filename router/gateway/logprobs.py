"""Log-probabilities, `echo` and `logit_bias` over HTTP: what is read of them, and how they look in an answer.

    chat         logprobs, top_logprobs 0-20   ->  content: token, logprob, bytes, top_logprobs
    completions  logprobs 0-20, echo           ->  tokens, token_logprobs, top_logprobs, text_offset
    both         prompt_logprobs 0-20          ->  as vLLM has it: null, then {token id: logprob, rank, decoded_token}

Every token that usage counts has its entry, also an end token and those of a stop string. In a stream an entry comes
with the first text at or after its token, at the latest with the finish reason: text that is held back holds back
its tokens. A token is shown as its text, a special one by its name, and one that is no whole characters as
`bytes:\\xe2\\x82`. `text_offset` counts characters from the start of the choice's text, that is, of an echoed prompt; a
continuation counts on.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from twostroke.cluster.core.errors import InvalidRequest
from twostroke.cluster.core.logprobs import TokenLogprob
from twostroke.cluster.wire.logprobs import show_token

Json = dict[str, object]
Spell = Callable[[int], bytes]
Entry = tuple[int, TokenLogprob | None]
"""A token and what is told of it; None of a prompt's first."""

LOGIT_BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}


def read_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Raises InvalidRequest unless it maps decimal token ids to numbers. Ranges are `router.prepare`'s to check."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(f"the keys of logit_bias are token ids, not {key[:32]!r}", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise InvalidRequest(f"the bias of token {key} must be a number", "logit_bias")
        if int(key) in biases:
            raise InvalidRequest(f"logit_bias has token {int(key)} twice", "logit_bias")
        biases[int(key)] = bias if abs(bias) < 1000 else 1000.0
    return tuple(biases.items())


class LogprobsForm(Protocol):
    """One choice's entries as JSON; called with consecutive parts of them."""

    def part(self, entries: Sequence[Entry]) -> Json: ...


class ChatLogprobs:
    def __init__(self, spell: Spell, top: int) -> None:
        self._spell = spell
        self._top = top

    def part(self, entries: Sequence[Entry]) -> Json:
        content = []
        for token, told in entries:
            assert told is not None
            best = zip(told.top_ids[: self._top], told.top[: self._top], strict=True)
            top = [self._show(other, logprob) for other, logprob in best]
            content.append({**self._show(token, told.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _show(self, token: int, logprob: float) -> Json:
        data = self._spell(token)
        return {"token": show_token(data), "logprob": logprob, "bytes": list(data)}


class CompletionLogprobs:
    def __init__(self, spell: Spell, top: int, text_bytes: Spell, before: Sequence[int] = ()) -> None:
        """`text_bytes` gives what a token adds to the text: nothing for a special one. `before`: tokens of the text
        that came with earlier answers.
        """
        self._spell = spell
        self._top = top
        self._text_bytes = text_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = len(self._utf8.decode(b"".join(map(text_bytes, before))))

    def part(self, entries: Sequence[Entry]) -> Json:
        offsets: list[int] = []
        for token, _ in entries:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(self._text_bytes(token)))
        return {
            "tokens": [show_token(self._spell(token)) for token, _ in entries],
            "token_logprobs": [None if told is None else told.logprob for _, told in entries],
            "top_logprobs": [None if told is None else self._best(token, told) for token, told in entries],
            "text_offset": offsets,
        }

    def _best(self, token: int, told: TokenLogprob) -> dict[str, float]:
        """The best ones, and the token itself. Two that look alike are one key, the better one's."""
        best: dict[str, float] = {}
        for other, logprob in zip(told.top_ids[: self._top], told.top[: self._top], strict=True):
            best.setdefault(show_token(self._spell(other)), logprob)
        best.setdefault(show_token(self._spell(token)), told.logprob)
        return best


class Scores:
    """What one answer, to one prompt or several, tells beside text. Choice c answers prompt c // choices_per_prompt."""

    def __init__(
        self,
        spell: Spell,
        prompts: Sequence[Sequence[int]],
        choices_per_prompt: int,
        *,
        make_form: Callable[[], LogprobsForm] | None = None,
        echo: bool = False,
        prompt_top: int | None = None,
        prompt_in_choices: bool = False,
    ) -> None:
        """`make_form` makes a choice's form, None when no log-probabilities are wanted; with `echo` they begin with the
        prompt's. `prompt_top`: alternatives in `prompt_logprobs`, None when that is not wanted.
        """
        self._spell = spell
        self._prompts = prompts
        self._choices_per_prompt = choices_per_prompt
        self._make_form = make_form
        self._echo = echo
        self._prompt_top = prompt_top
        self._prompt_in_choices = prompt_in_choices
        self._prompt_entries: dict[int, list[Entry]] = {}
        self._forms: dict[int, LogprobsForm] = {}
        self._waiting: dict[int, list[Entry]] = {}

    def take_prompt(self, choice: int, values: Sequence[TokenLogprob]) -> None:
        """Before every other call about a choice of the same prompt."""
        number = choice // self._choices_per_prompt
        self._prompt_entries[number] = list(zip(self._prompts[number], (None, *values), strict=True))

    def add(self, choice: int, token_ids: Sequence[int], values: Sequence[TokenLogprob]) -> None:
        """More tokens of a choice; nothing to do when their log-probabilities are not wanted."""
        if self._make_form is not None:
            self._of(choice).extend(zip(token_ids, values, strict=True))

    def take(self, choice: int) -> Json | None:
        """Of the choice's tokens since the last call; None when there are none or none are wanted."""
        if self._make_form is None or not self._of(choice):
            return None
        waiting, self._waiting[choice] = self._waiting[choice], []
        if choice not in self._forms:
            self._forms[choice] = self._make_form()
        return self._forms[choice].part(waiting)

    def _of(self, choice: int) -> list[Entry]:
        if choice not in self._waiting:
            self._waiting[choice] = list(self._of_prompt(choice)) if self._echo else []
        return self._waiting[choice]

    def _of_prompt(self, choice: int) -> Sequence[Entry]:
        return self._prompt_entries.get(choice // self._choices_per_prompt, ())

    def add_prompt(self, answer: Json) -> None:
        """Put `prompt_logprobs` into a whole answer, if it is wanted."""
        if self._prompt_top is None:
            return
        if not self._prompt_in_choices:
            answer["prompt_logprobs"] = self._show_prompt(0)
            return
        choices = answer["choices"]
        assert isinstance(choices, list)
        for part in choices:
            part["prompt_logprobs"] = self._show_prompt(part["index"])

    def _show_prompt(self, choice: int) -> list[Json | None]:
        entries = self._of_prompt(choice)
        return [None if value is None else self._prompt_entry(token, value) for token, value in entries]

    def _prompt_entry(self, token: int, value: TokenLogprob) -> Json:
        best = [(token, value.logprob, value.rank)]
        pairs = zip(value.top_ids[: self._prompt_top], value.top[: self._prompt_top], strict=True)
        best += [(other, logprob, rank) for rank, (other, logprob) in enumerate(pairs, 1) if other != token]
        return {
            str(other): {"logprob": logprob, "rank": rank, "decoded_token": show_token(self._spell(other))}
            for other, logprob, rank in best
        }
