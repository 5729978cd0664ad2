"""Prompt templates that operators change while the router runs.

    1. start    the files that the configuration names are read and tried; a mistake is a ConfigError
    2. chat     a chat asks for `current`; at most once in `check_interval_s` it looks whether a file has another time,
                size or inode (a mounted ConfigMap changes only its inode)
    3. change   the new content is read, compiled and tried on a probe; if all of that works it is swapped in for
                this chat and later ones, else an error is logged, once a change, and what was there stays

A version goes with every request into its log line: `name+digest` for a file whose first line says
`{# version: name #}` (that line is no part of a system prompt), else the digest of its content alone.
"""

import hashlib
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import jinja2
import structlog

from twostroke.cluster.config import TemplatesSection
from twostroke.cluster.core.clock import Clock, SystemClock
from twostroke.cluster.core.errors import ConfigError, InvalidRequest
from twostroke.cluster.core.records import dataclass
from twostroke.router.chat_template import ChatTemplate, Message

log = structlog.get_logger(__name__)

MAX_FILE_BYTES = 1 << 20
_VERSION = re.compile(r"\A\{#-?\s*version:\s*([\w.-]{1,64})\s*-?#\}[ \t]*\r?\n?")
_PROBE = "twostroke asks whether this is shown"


@dataclass(frozen=True, slots=True)
class Templates:
    """What a chat is made of at one moment."""

    chat: ChatTemplate | None
    """None: the model has none, and no file is named."""
    system: str
    """System message of chats without one; empty: none."""
    version: str
    """Of the files; empty when none is named."""

    def with_system(self, messages: list[Message]) -> list[Message]:
        if not self.system or any(message.get("role") == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


class TemplateStore:
    """The present templates. Thread-safe; `current` may read files, so call it off the event loop."""

    def __init__(
        self,
        config: TemplatesSection,
        own: ChatTemplate | None,
        special_tokens: Mapping[str, str],
        clock: Clock | None = None,
    ) -> None:
        """`own` is the model's template. Raises ConfigError with all that is wrong with the files."""
        self._config = config
        self._own = own
        self._special_tokens = special_tokens
        self._clock = clock or SystemClock()
        self._paths = [Path(name) for name in (config.chat_template, config.system_prompt) if name]
        self._lock = threading.Lock()
        self._stamps = [_stamp(path) for path in self._paths]
        self._looked_at = self._clock.now()
        self._current = self._load()

    def current(self) -> Templates:
        """Never fails: files that are wrong leave the last good ones in place."""
        if self._paths and self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()
        return self._current

    def _refresh(self) -> None:
        now = self._clock.now()
        if now - self._looked_at < self._config.check_interval_s:
            return
        self._looked_at = now
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            changed = self._load()
        except ConfigError as error:
            log.error("templates_refused", mistakes=error.mistakes, kept=self._current.version)
            return
        log.info("templates_changed", version=changed.version, before=self._current.version)
        self._current = changed

    def _load(self) -> Templates:
        mistakes: list[str] = []
        versions: list[str] = []
        chat, system = self._own, ""
        if self._config.chat_template:
            try:
                source, version = _read(self._config.chat_template)
                chat = _compiled(source, self._special_tokens)
                versions.append(f"chat:{version}")
            except (OSError, ValueError, jinja2.TemplateError) as error:
                mistakes.append(f"router.templates.chat_template: {self._config.chat_template}: {error}")
        if self._config.system_prompt:
            try:
                source, version = _read(self._config.system_prompt)
                system = _VERSION.sub("", source).strip()
                if not system:
                    raise ValueError("there is no text in it")
                versions.append(f"system:{version}")
            except (OSError, ValueError) as error:
                mistakes.append(f"router.templates.system_prompt: {self._config.system_prompt}: {error}")
        if mistakes:
            raise ConfigError(mistakes)
        return Templates(chat, system, " ".join(versions))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What differs when the file does; None while it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _read(name: str) -> tuple[str, str]:
    """(content, version). Raises OSError, or ValueError for what is too long or no UTF-8."""
    with open(name, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    text = data.decode("utf-8")
    digest = hashlib.blake2b(data, digest_size=4).hexdigest()
    named = _VERSION.match(text)
    return text, f"{named.group(1)}+{digest}" if named else digest


def _compiled(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Raises jinja2.TemplateError, or ValueError for a template that fails or loses a user's message."""
    template = ChatTemplate(source, special_tokens)
    try:
        text = template.render([{"role": "user", "content": _PROBE}])
    except InvalidRequest as error:
        raise ValueError(error.message) from None
    if _PROBE not in text:
        raise ValueError("it does not show a user's message")
    return template
