"""Sampling in the window: of one chat or of all, presets, and the note about the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QInputDialog, QPlainTextEdit
from pytestqt.qtbot import QtBot

from app.chat.chat_presenter import BranchSteps
from app.chat.export import exported, imported
from app.main import Shell
from engine import AnswerRequest, SamplingParams
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of


def sent(shell: Shell) -> SamplingParams:
    command = host_of(shell).commands[-1]
    assert isinstance(command, AnswerRequest)
    return command.sampling


def heading(shell: Shell) -> str:
    return shell.window.sampling._heading.text()


def preset(shell: Shell) -> str:
    return shell.window.sampling.presets.text().removesuffix(" ▾")


def act_on_banner(shell: Shell) -> None:
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.on_action is not None
    notice.on_action()


def test_a_chat_has_values_of_its_own_over_a_restart_and_others_do_not(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    panel = shell.window.sampling
    panel.set_params(SamplingParams(temperature=0.3))
    ask(qtbot, shell, "first")
    assert heading(shell) == "Sampling for all chats"
    panel.own.click()
    assert heading(shell) == "Sampling for this chat"
    assert panel.params.temperature == 0.3, "it starts with the shared values"
    panel.set_params(SamplingParams(temperature=1.1, banned_strings=("very",)))
    ask(qtbot, shell, "second")
    assert (sent(shell).temperature, sent(shell).banned_strings) == (1.1, ("very",))
    first = shell.session.current.id
    shell.chat_presenter.new_chat()
    assert heading(shell) == "Sampling for all chats"
    ask(qtbot, shell, "another")
    assert (sent(shell).temperature, sent(shell).banned_strings) == (0.3, ())
    shell.window.close()

    again = make_shell(model=MODEL)
    assert again.window.sampling.params.temperature == 0.3
    again.chat_presenter.open_chat(first)
    assert heading(again) == "Sampling for this chat"
    assert again.window.sampling.own.isChecked()
    ask(qtbot, again, "third")
    assert (sent(again).temperature, sent(again).banned_strings) == (1.1, ("very",))


def test_taking_a_chat_s_values_away_can_be_undone(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    panel = shell.window.sampling
    ask(qtbot, shell, "Hi")
    panel.own.click()
    panel.set_params(SamplingParams(top_k=5))
    panel.own.click()
    assert (panel.params, heading(shell)) == (SamplingParams(), "Sampling for all chats")
    act_on_banner(shell)
    assert (panel.params, heading(shell)) == (SamplingParams(top_k=5), "Sampling for this chat")


def test_an_exported_chat_comes_back_with_its_values(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.window.sampling.own.click()
    shell.window.sampling.set_params(SamplingParams(top_k=5, stop=("END",), logit_bias=((3, -1),)))
    path = tmp_path / "chat.json"
    path.write_text(exported(shell.session.current, ".json"), encoding="utf-8")
    shell.session.take(imported(path))
    ask(qtbot, shell, "Again")
    assert sent(shell) == SamplingParams(top_k=5, stop=("END",), logit_bias=((3, -1),))


def test_a_fork_has_the_values_of_its_chat(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    panel, first = shell.window.sampling, shell.session.current
    panel.own.click()
    panel.set_params(SamplingParams(top_k=5))
    BranchSteps(shell.session, shell.session).fork(first.messages[-1].id)
    assert shell.session.current is not first
    panel.set_params(SamplingParams(top_k=6))
    ask(qtbot, shell, "Again")
    assert sent(shell).top_k == 6
    assert first.sampling == {"top_k": 5}


def test_values_that_another_version_knows_are_kept(make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    shell.session.set_sampling({"of_the_future": 3, "top_k": 2})
    shell.window.sampling.show_values({"top_k": 2}, SamplingParams())
    shell.window.sampling.set_params(SamplingParams(top_k=4))
    assert shell.session.current.sampling == {"of_the_future": 3, "top_k": 4}


def test_presets_are_used_saved_renamed_and_deleted(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)
    panel, menu = shell.window.sampling, shell.window.sampling.presets
    assert preset(shell) == "Model defaults"
    menu.chosen.emit("Precise")
    assert (preset(shell), panel.params.temperature) == ("Precise", 0.2)
    assert shell.window.composer._sampling.accessibleName() == "Sampling: Sampling · Precise"
    panel.set_params(replace(panel.params, temperature=0.31))
    assert preset(shell) == "Custom values"
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("Mine", True))
    menu._save()
    assert preset(shell) == "Mine"
    menu.chosen.emit("Creative")
    assert panel.params.temperature == 1.2
    shell.window.close()

    again = make_shell(model=MODEL)
    panel, menu = again.window.sampling, again.window.sampling.presets
    menu.fill()
    texts = [action.text() for action in menu.menu().actions() if action.text()]
    assert texts == [
        "Model defaults", "Precise", "Balanced", "Creative", "Mine", "Save as…", "Rename", "Delete",
    ]  # fmt: skip
    panel.own.click()
    menu.chosen.emit("Mine")
    ask(qtbot, again, "Hi")
    assert sent(again).temperature == 0.31
    menu.rename_requested.emit("Mine", "Precise")
    assert "built-in" in banner(again)
    menu.rename_requested.emit("Mine", "Ours")
    assert preset(again) == "Ours"
    menu.delete_requested.emit("Ours")
    assert again.settings.current.presets == {}
    assert preset(again) == "Custom values", "the values stay"
    act_on_banner(again)
    assert preset(again) == "Ours"


def test_a_preset_over_own_values_can_be_undone(make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    panel = shell.window.sampling
    panel.set_params(SamplingParams(top_k=3))
    panel.presets.chosen.emit("Balanced")
    assert panel.params.top_k == 40
    act_on_banner(shell)
    assert panel.params == SamplingParams(top_k=3)


def test_a_chat_s_values_become_those_of_all(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.window.sampling.own.click()
    shell.window.sampling.set_params(SamplingParams(top_k=9))
    shell.window.sampling.presets.for_all_requested.emit()
    shell.chat_presenter.new_chat()
    assert shell.window.sampling.params.top_k == 9


def test_the_panel_says_which_values_make_the_host_sample(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)
    panel = shell.window.sampling
    panel.set_params(SamplingParams(xtc_probability=0.5))
    assert panel.host_note.isHidden(), "always sampled on the CPU"
    model = shell.client.model
    assert model is not None
    params = replace(model.params, devices=("cuda:0", "cuda:1"))
    monkeypatch.setattr(shell.client._work, "model", replace(model, params=params))
    panel.set_params(SamplingParams(xtc_probability=0.5, dry_multiplier=0.8))
    assert not panel.host_note.isHidden()
    assert "DRY strength, XTC probability" in panel.host_note.text()
    on_host = {name for name, row in panel.rows.items() if not row.note.isHidden()}
    assert on_host == {"xtc_probability", "dry_multiplier"}
    panel.set_params(SamplingParams(top_k=0, top_p=1.0, min_p=0.0))
    assert "top-k, top-p and min-p are off" in panel.host_note.text()
    panel.set_params(SamplingParams(temperature=0.5, banned_strings=("very",)))
    assert panel.host_note.isHidden()


def test_a_wrong_schema_says_so_at_its_field_and_stays_with_its_chat(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    panel = shell.window.sampling
    ask(qtbot, shell, "first")
    panel.own.click()
    row = panel.rows["json_schema"]
    assert isinstance(row.editor, QPlainTextEdit)
    row.editor.setPlainText('{"properties": {"a": {"type": "foo"}}}')
    qtbot.waitUntil(lambda: "#/properties/a/type" in row.problem.text(), timeout=20_000)
    assert not row.problem.isHidden()
    row.editor.setPlainText('{"type": "object"}')
    assert row.problem.isHidden(), "the old error does not apply to a new text"
    ask(qtbot, shell, "second")
    assert sent(shell).json_schema == '{"type": "object"}'
    shell.chat_presenter.new_chat()
    assert row.editor.toPlainText() == ""
    assert row.problem.isHidden()
