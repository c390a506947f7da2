"""The dialog of the chat template: what it shows, what it refuses, and what is loaded then."""

from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

import engine
from app.devices.split.template_preview import TemplateDialog
from engine import AnswerRequest, ChatMessage, LoadParams, Model, SamplingParams
from tests.app.conftest import MakePanel
from tests.helpers.fake_planner import CPU
from tests.helpers.split_panels import WiredPanel, settle
from tests.helpers.tiny_gguf import tiny_gguf

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)


@pytest.fixture
def panel(make_panel: MakePanel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WiredPanel:
    """Return a panel with a model whose file has a template."""
    path = tiny_gguf(tmp_path / "m.gguf", chat_template=TEMPLATE)
    read = engine.load_chat_template
    monkeypatch.setattr("engine.load_chat_template", lambda _, source: read(path, source))
    return make_panel([CPU])


def opened(panel: WiredPanel, qtbot: QtBot) -> TemplateDialog:
    panel.options.rare.head.setChecked(True)
    panel.options.rare.template.click()
    dialog = next(w for w in QApplication.topLevelWidgets() if isinstance(w, TemplateDialog))
    qtbot.waitUntil(lambda: bool(dialog.preview.toPlainText()), timeout=20_000)
    return dialog


def test_a_template_is_seen_changed_used_and_given_back(panel: WiredPanel, qtbot: QtBot) -> None:
    assert panel.options.rare.template.text() == "From the file…"
    dialog = opened(panel, qtbot)
    assert dialog.source.toPlainText() == TEMPLATE
    assert dialog.preview.toPlainText().startswith("<s>[system]You are a helpful assistant.[user]")
    own = TEMPLATE.replace("[{{ m.role }}]", "<{{ m.role }}>")
    dialog.source.setPlainText(own)
    qtbot.waitUntil(lambda: "<user>Hello!" in dialog.preview.toPlainText(), timeout=20_000)
    dialog.use.click()
    settle()
    assert panel.session.load_params().chat_template == own
    assert panel.session.to_dict()["chat_template"] == own
    assert panel.options.rare.template.text() == "Own…"
    dialog = opened(panel, qtbot)
    assert dialog.source.toPlainText() == own
    dialog.reset.click()
    settle()
    assert panel.session.load_params().chat_template == ""


def test_a_broken_template_is_explained_and_cannot_be_used(panel: WiredPanel, qtbot: QtBot) -> None:
    dialog = opened(panel, qtbot)
    for wrong in ("{% for m in %}", "{% for i in range(10**9) %}{% endfor %}"):
        dialog.source.setPlainText(wrong)
        dialog.flush()
        qtbot.waitUntil(lambda: not dialog.use.isEnabled(), timeout=30_000)
        assert "template" in dialog.preview.toPlainText()
        dialog.source.setPlainText(TEMPLATE)
        dialog.flush()
        qtbot.waitUntil(dialog.use.isEnabled, timeout=30_000)
    dialog.reject()
    assert panel.session.load_params().chat_template == ""


def test_an_answer_is_asked_for_with_the_template(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", chat_template=TEMPLATE)
    own = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    with Model(LoadParams(str(path), chat_template=own)) as model:
        request = AnswerRequest(
            (ChatMessage("user", "hello"),), sampling=SamplingParams(temperature=0, max_tokens=1)
        )
        answer = model.answer(request)
        list(answer)
        assert model.tokenizer.decode(answer.ids, skip_special=True) == "hello!"
