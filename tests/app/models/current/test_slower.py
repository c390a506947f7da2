"""A person sees that a GPU is slower than it could be, why, and what helps, while it is so."""

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QLabel
from pytestqt.qtbot import QtBot

from app.main import Shell
from app.models.current.model_views import SHORT, TEXT, ModelBar, SlowerChip
from app.widgets.controls import MAX_SHEET_HEIGHT
from app.widgets.theme import THEMES
from engine import Fallback, FallbacksChanged, LoadParams
from tests.helpers.fake_host import Script, model_loaded
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of
from tests.helpers.split_panels import settle

GRAPH = Fallback("graph", ("cuda:0",), "no kernel reads such a <b>cache</b>")
DRAWN = Fallback("sampling", ("cuda:0", "cuda:1"), "top-k is too large", "Lower it.")


def chip_of(shell: Shell) -> SlowerChip:
    return shell.window.model_bar.slower


def reasons(chip: SlowerChip) -> list[str]:
    return [text.text() for text in chip.reasons.findChildren(QLabel) if not text.isHidden()]


def test_a_fast_model_has_no_chip(make_shell: MakeShell) -> None:
    assert not chip_of(make_shell(model=MODEL)).isVisible()


def test_the_chip_opens_what_is_slower_why_and_what_helps(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """The chip says it, so no banner does."""
    script.fallbacks = (GRAPH, DRAWN)
    shell = make_shell(model=MODEL)
    chip = chip_of(shell)
    shell.window.resize(1440, 900)
    qtbot.waitUntil(lambda: chip.text() == TEXT)
    assert chip.isVisible()
    assert banner(shell) == ""
    assert not chip.reasons.isVisible()
    qtbot.mouseClick(chip, Qt.MouseButton.LeftButton)
    assert chip.reasons.isVisible()
    assert reasons(chip) == [
        "On GPU 0, kernels are launched one by one",
        "No kernel reads such a <b>cache</b>.",
        f"Token generation is slower. {GRAPH.help}",
        "Tokens are sampled on the CPU, not on GPU 0 and GPU 1",
        "Top-k is too large.",
        "Token generation is slower. Lower it.",
    ]
    texts = chip.reasons.findChildren(QLabel)
    assert {text.textFormat() for text in texts} == {Qt.TextFormat.PlainText}
    assert "On GPU 0, kernels are launched one by one: no" in chip.accessibleDescription()
    qtbot.keyClick(chip.reasons, Qt.Key.Key_Escape)
    assert not chip.reasons.isVisible()


def test_the_chip_follows_an_answer_and_another_split(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    chip = chip_of(shell)
    script.extra = [FallbacksChanged((DRAWN,))]
    ask(qtbot, shell, "Hi")
    assert chip.isVisible()
    assert shell.client.model is not None
    assert shell.client.model.fallbacks == (DRAWN,)
    chip.click()
    script.extra = [FallbacksChanged(())]
    ask(qtbot, shell, "Hi")
    assert not chip.isVisible()
    assert not chip.reasons.isVisible(), "there is nothing to read any more"
    script.fallbacks = (GRAPH,)
    shell.models.apply(shell.client.model.params)
    assert not chip.isVisible()
    qtbot.waitUntil(chip.isVisible)
    script.fallbacks = ()
    shell.models.apply(shell.client.model.params)
    qtbot.waitUntil(lambda: shell.client.model is not None and not shell.client.model.fallbacks)
    assert not chip.isVisible()


def test_it_goes_with_the_model(qtbot: QtBot, make_shell: MakeShell, script: Script) -> None:
    script.fallbacks = (GRAPH,)
    shell = make_shell(model=MODEL)
    shell.models.eject()
    qtbot.waitUntil(lambda: shell.client.model is None)
    assert not chip_of(shell).isVisible()
    host_of(shell).send(1, FallbacksChanged((GRAPH,)))
    qtbot.wait(100)
    assert not chip_of(shell).isVisible(), "it is about a model that is gone"


@pytest.mark.parametrize(("width", "text"), [(1200, TEXT), (430, TEXT), (300, SHORT)])
def test_a_narrow_bar_keeps_the_chip(
    qtbot: QtBot, qapp: QApplication, width: int, text: str
) -> None:
    bar = ModelBar()
    qtbot.addWidget(bar)
    bar.resize(width, bar.height())
    bar.show()
    bar.show_loaded(model_loaded(LoadParams(MODEL), fallbacks=(GRAPH,)))
    assert (bar.slower.isVisible(), bar.slower.text()) == (True, text)
    settle()
    shown = [child for child in (bar._name, bar.slower, bar._button) if child.isVisible()]
    assert len(shown) == 3
    assert bar._button.geometry().right() < width
    assert bar.slower.geometry().right() < bar._button.geometry().left()


@pytest.mark.parametrize("n", [1, 3, 12])
@pytest.mark.parametrize("theme", sorted(THEMES))
def test_all_reasons_have_room_or_can_be_scrolled(
    qtbot: QtBot, make_shell: MakeShell, script: Script, n: int, theme: str
) -> None:
    script.fallbacks = tuple(
        Fallback("exchange", ("cuda:0", "cuda:1"), f"reason {k} " * 12) for k in range(n)
    )
    shell = make_shell(model=MODEL)
    shell.keep(replace(shell.settings.current, theme=theme))
    chip = chip_of(shell)
    chip.click()
    popup = chip.reasons
    bar = popup._scroll.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.isVisible() == (n == 12))
    assert popup.height() <= MAX_SHEET_HEIGHT
    assert (bar.maximum() > 0) == (n == 12), "nothing is cut off"
    left = shell.window.mapFromGlobal(popup.pos()).x()
    assert left >= 0
    assert left + popup.width() <= shell.window.width()
    popup.hide()
