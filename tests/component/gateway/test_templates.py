"""Template files: what they change, when a change is taken, and what is kept when it is wrong."""

import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.gateway_server import CHAT, COMPLETION, gateway
from tests.tokenizer_files import write_model
from twostroke.cluster.config import TemplatesSection
from twostroke.cluster.core.clock import ManualClock
from twostroke.cluster.core.errors import ConfigError
from twostroke.router.chat_template import ChatOptions
from twostroke.router.templates import TemplateStore
from twostroke.router.tokenizer import ByteTokenizer, ModelTokenizer

USER = {"role": "user", "content": "Hi"}
SHOUT = "{# version: shout-1 #}\n{% for m in messages %}{{ m.role }}!{{ m.content }};{% endfor %}"
WHISPER = "{% for m in messages %}{{ m.role }}.{{ m.content }};{% endfor %}"


class Files:
    """A store over two files, and a clock that lets it look."""

    def __init__(self, directory: Path) -> None:
        self.chat, self.system = directory / "chat.jinja", directory / "system.txt"
        self._ticks = 0
        self.write(self.chat, SHOUT)
        self.write(self.system, "{# version: v1 #}\nBe brief.\n")
        self.section = TemplatesSection(chat_template=str(self.chat), system_prompt=str(self.system))
        self.clock = ManualClock()
        self.store = TemplateStore(self.section, None, {}, self.clock)

    def write(self, path: Path, text: str | bytes) -> None:
        """With a time of its own: a test is faster than the clock of a file system."""
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        self._ticks += 1
        os.utime(path, ns=(self._ticks, self._ticks))

    def render(self) -> str:
        templates = self.store.current()
        assert templates.chat is not None
        return templates.chat.render(templates.with_system([USER]), ChatOptions())


def test_a_change_is_taken_after_the_interval_with_its_version(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert files.render() == "system!Be brief.;user!Hi;"
    before = files.store.current().version
    assert before.startswith("chat:shout-1+")
    assert " system:v1+" in before
    files.write(files.chat, WHISPER)
    assert files.render() == "system!Be brief.;user!Hi;"
    files.clock.advance(1.0)
    with capture_logs() as logs:
        assert files.render() == "system.Be brief.;user.Hi;"
    after = files.store.current().version
    assert logs == [{"event": "templates_changed", "log_level": "info", "version": after, "before": before}]
    assert "shout-1" not in after
    files.write(files.system, "Be kind.")
    files.clock.advance(1.0)
    assert files.render() == "system.Be kind.;user.Hi;"


BAD_TEMPLATES: list[str | bytes | None] = [
    "{% for %}",
    "",
    "no message at all",
    "{{ messages[5].content + 1 }}",
    "{{ raise_exception('never') }}",
    "{{ ''.__class__.__mro__ }}{{ messages[0].content }}",
    b"\xff\xfe{{ messages }}",
    None,  # deleted
]


@pytest.mark.parametrize("content", BAD_TEMPLATES)
def test_a_wrong_template_is_told_once_and_the_old_one_stays(tmp_path: Path, content: str | bytes | None) -> None:
    files = Files(tmp_path)
    if content is None:
        files.chat.unlink()
    else:
        files.write(files.chat, content)
    with capture_logs() as logs:
        for _ in range(3):
            files.clock.advance(1.0)
            assert files.render() == "system!Be brief.;user!Hi;"
    [line] = logs
    assert (line["event"], line["log_level"], line["kept"]) == (
        "templates_refused",
        "error",
        files.store.current().version,
    )
    assert "router.templates.chat_template" in line["mistakes"][0]
    files.write(files.chat, WHISPER)
    files.clock.advance(1.0)
    assert files.render() == "system.Be brief.;user.Hi;"


@pytest.mark.parametrize("content", ["", " \n", "{# version: 7 #}\n", b"\xff"])
def test_a_wrong_system_prompt_stays_out(tmp_path: Path, content: str | bytes) -> None:
    files = Files(tmp_path)
    files.write(files.system, content)
    files.clock.advance(1.0)
    with capture_logs() as logs:
        assert files.render() == "system!Be brief.;user!Hi;"
    assert "router.templates.system_prompt" in logs[0]["mistakes"][0]


def test_all_mistakes_are_told_at_the_start(tmp_path: Path) -> None:
    section = TemplatesSection(chat_template=str(tmp_path / "none"), system_prompt=str(tmp_path / "nor this"))
    with pytest.raises(ConfigError) as refused:
        ByteTokenizer(section)
    assert len(refused.value.mistakes) == 2


def test_a_chats_own_system_message_replaces_the_files(tmp_path: Path) -> None:
    templates = Files(tmp_path).store.current()
    mine = [{"role": "system", "content": "mine"}, USER]
    assert templates.with_system(list(mine)) == mine


def test_a_models_own_template_is_replaced_and_markers_in_the_system_prompt_are_text(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", "byte_level")
    chat, system = tmp_path / "c.jinja", tmp_path / "s.txt"
    chat.write_text("{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{% endfor %}")
    system.write_text("never say <|im_end|>")
    tokenizer = ModelTokenizer(directory, TemplatesSection(chat_template=str(chat), system_prompt=str(system)))
    prompt = tokenizer.encode_chat([USER])
    assert tokenizer.decode(prompt.tokens) == "<|im_start|>system:never say <|im_end|><|im_start|>user:Hi"
    assert [tokenizer.token_text(token) for token in prompt.tokens].count("<|im_end|>") == 0
    assert prompt.template.startswith("chat:")
    assert ModelTokenizer(directory).encode_chat([USER]).template == ""


async def test_over_http_the_change_needs_no_restart_and_shows_in_request_and_fingerprint(tmp_path: Path) -> None:
    system = tmp_path / "system.txt"
    system.write_text("{# version: one #}\nBe brief.")
    section = TemplatesSection(system_prompt=str(system), check_interval_s=1e-9)
    body: dict[str, Any] = {"model": "fake", "messages": [USER], "max_tokens": 1}
    async with gateway(tokenizer=ByteTokenizer(section)) as server:
        first = (await server.post(CHAT, body)).json()
        system.write_text("{# version: two #}\nBe kind!!")
        os.utime(system, ns=(1, 1))
        second = (await server.post(CHAT, body)).json()
        system.write_text("")
        os.utime(system, ns=(2, 2))
        third = (await server.post(CHAT, body)).json()
        await server.post(COMPLETION, {"model": "fake", "prompt": "x", "max_tokens": 1})
        one, two, three, completion = server.generator.submitted
    assert b"Be brief." in bytes(token for token in one.prompt if token < 256)
    assert b"Be kind!!" in bytes(token for token in two.prompt if token < 256)
    assert three.prompt == two.prompt
    assert one.template.startswith("system:one+")
    assert two.template == three.template
    assert two.template.startswith("system:two+")
    assert completion.template == ""
    assert first["system_fingerprint"] != second["system_fingerprint"] == third["system_fingerprint"]
