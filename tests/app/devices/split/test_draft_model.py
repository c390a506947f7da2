"""A draft model is chosen as a file, kept, and given up with the model that it guesses for."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog

from app.devices.split.saving import from_dict, to_dict
from app.devices.split.settings import SplitSettings, resplit_params, settings_for
from tests.app.conftest import MakePanel
from tests.helpers.fake_planner import CPU, INFO
from tests.helpers.split_panels import settle

Pick = Callable[[str], None]


@pytest.fixture
def pick(monkeypatch: pytest.MonkeyPatch) -> Pick:
    """Return what makes the next file dialog give a path."""

    def give(path: str) -> None:
        monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_: (path, ""))

    return give


def test_a_file_is_chosen_used_and_given_up(make_panel: MakePanel, pick: Pick) -> None:
    panel = make_panel([CPU])
    field = panel.options.rare.draft_model
    assert field.currentText() == "No model"
    pick("/models/small.GGUF")
    field.activated.emit(field.count() - 1)
    settle()
    assert panel.session.load_params().draft == "/models/small.GGUF"
    assert field.currentText() == "small.GGUF"
    for path in ("", "/models/notes.txt"):
        pick(path)
        field.activated.emit(field.count() - 1)
        settle()
        assert field.currentText() == "small.GGUF", "nothing was chosen"
    field.activated.emit(0)
    settle()
    assert panel.session.load_params().draft == "auto"


def test_a_block_that_no_file_has_cannot_be_chosen(make_panel: MakePanel) -> None:
    panel = make_panel([CPU])
    field = panel.options.rare.draft_model

    def block() -> tuple[str, bool, str]:
        index = field.model().index(1, 0)
        is_there = bool(index.flags() & Qt.ItemFlag.ItemIsEnabled)
        return field.itemText(1), is_there, field.itemData(1, Qt.ItemDataRole.ToolTipRole) or ""

    why = "Neither this model's file nor its folder has an MTP block."
    for has_mtp in (False, True, False):
        panel.session.set_model(replace(INFO, has_mtp=has_mtp))
        settle()
        assert block() == ("MTP block", has_mtp, "" if has_mtp else why)
    panel.session.set_model(None)
    assert block()[1], "nothing is known of a model to come"


def test_the_model_s_own_block_is_a_choice(make_panel: MakePanel) -> None:
    """GPUs load it only if it is asked for; a model that has it is not loaded again for another."""
    panel = make_panel([CPU])
    field = panel.options.rare.draft_model
    assert field.itemText(1) == "MTP block"
    plain = panel.session.load_params()
    field.activated.emit(1)
    settle()
    wanted = panel.session.load_params()
    assert (wanted.draft, wanted.draft_path) == ("mtp", "")
    assert resplit_params(wanted, plain, 0) is None
    assert resplit_params(wanted, wanted, 0) is not None
    assert (
        settings_for(SplitSettings(ranks=panel.session.settings.ranks), wanted).draft_path == "mtp"
    )
    assert field.currentIndex() == 1


@pytest.mark.parametrize("saved", ["small.gguf", "mtp", "notes.txt", 7, None])
def test_it_is_kept_unless_the_file_is_damaged(saved: object) -> None:
    found = from_dict({"draft_path": saved}, [CPU])
    assert found.draft_path == (saved if saved in ("small.gguf", "mtp") else "")


def test_no_guesses_are_none_of_a_draft_model_either() -> None:
    settings = from_dict({"draft_path": "small.gguf", "n_draft": 0}, [CPU])
    assert settings.load_params("m.gguf").draft == "off"
    other: SplitSettings = settings.for_another_model(None)
    assert other.draft_path == "", "it has another vocabulary"


def test_the_tokens_to_guess_from_are_kept_for_the_model_alone() -> None:
    settings = from_dict({"draft_vocab": 4096}, [CPU])
    assert settings.load_params("m.gguf").draft_vocab == 4096
    assert to_dict(settings)["draft_vocab"] == 4096
    assert settings.for_another_model(None).draft_vocab == 0
    assert replace(settings, n_draft=0).load_params("m.gguf").draft_vocab == 0
    assert from_dict({"draft_vocab": 3}, [CPU]).draft_vocab == 0, "so few are none"
