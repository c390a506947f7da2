"""Menu of a model's saved plans, below a button that names the plan in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QFileDialog,
    QHBoxLayout,
    QInputDialog,
    QLineEdit,
    QMenu,
    QPushButton,
    QSizePolicy,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.core.units import decimal
from app.widgets.files import ask_where_to_save
from app.widgets.text import caption_text, label, set_tip

MAX_SHOWN: Final = 24
"""Length in characters of a name on the button at most."""
FILTER: Final = tr_later("Plans (*.json);;All files (*)")


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Plan in the menu.

    Attributes:
        name: name of the plan.
        speed: measured speed in tokens per second; 0 if it was not measured.
        problem: sentence on why the plan cannot be used now, which disables it; "" if it can.
    """

    name: str
    speed: float = 0.0
    problem: str = ""

    @property
    def text(self) -> str:
        """Name and measured speed, for a menu."""
        badge = decimal(f"\t{self.speed:.1f} tok/s") if self.speed else ""
        return caption_text(self.name) + badge


class PlanMenu(QWidget):
    """Button and menu to choose, save, rename, delete, export and import plans."""

    chosen = Signal(str)
    fastest_requested = Signal()
    save_requested = Signal(str)  # name
    rename_requested = Signal(str, str)  # old and new name
    delete_requested = Signal(str)
    export_requested = Signal(str, object)  # name, Path
    import_requested = Signal(object)  # Path
    command_requested = Signal()
    opened = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._entries: tuple[PlanEntry, ...] = ()
        self._current = ""
        self.menu = QMenu(self)
        self.menu.setToolTipsVisible(True)
        self.menu.aboutToShow.connect(self._on_menu)
        self.button = QPushButton()
        self.button.setMenu(self.menu)
        self.button.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        caption = label(tr("Plan"), "muted")
        caption.setBuddy(self.button)
        layout.addWidget(caption)
        layout.addWidget(self.button)
        self.set_plans((), "")
        self.setEnabled(False)

    def set_plans(self, entries: Sequence[PlanEntry], current: str) -> None:
        """Offer plans; `current` is the name of the one in use, "" if there is none."""
        self._entries, self._current = tuple(entries), current
        shown = current or tr("Not saved")
        elided = shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 1] + "…"
        self.button.setText(f"{caption_text(elided)} ▾")
        self.button.setAccessibleName(tr("Plan: {name}").format(name=shown))
        set_tip(self.button, shown if elided != shown else tr("Saved plans of this model"))

    def _on_menu(self) -> None:
        self.opened.emit()
        self.fill()

    def fill(self) -> None:
        """Fill the menu with the present plans."""
        menu = self.menu
        menu.clear()
        for entry in self._entries:
            action = menu.addAction(entry.text)
            action.setCheckable(True)
            action.setChecked(entry.name == self._current)
            action.setEnabled(not entry.problem)
            set_tip(action, entry.problem)
            action.triggered.connect(partial(self._choose, entry.name))
        if self._entries:
            fastest = menu.addAction(tr("Fastest that fits"))
            set_tip(fastest, tr("The fastest measured plan that fits into the free memory"))
            fastest.triggered.connect(lambda: self.fastest_requested.emit())
            menu.addSeparator()
        menu.addAction(tr("Save as…")).triggered.connect(lambda: self._save())
        if self._entries:
            for title, ask in (
                (tr("Rename"), self._rename), (tr("Delete"), self._delete),
                (tr("Export"), self._export),
            ):  # fmt: skip
                self._add_submenu(title, ask)
        menu.addAction(tr("Import…")).triggered.connect(lambda: self._import())
        menu.addSeparator()
        copy = menu.addAction(tr("Copy as command"))
        set_tip(copy, tr("Copies the terminal command that loads the model this way"))
        copy.triggered.connect(lambda: self.command_requested.emit())

    def _add_submenu(self, title: str, ask: object) -> None:
        """Add a submenu with one entry for each plan, the one in use first."""
        assert callable(ask)
        below = self.menu.addMenu(title)
        names = sorted((e.name for e in self._entries), key=lambda name: name != self._current)
        for name in names:
            below.addAction(caption_text(name)).triggered.connect(partial(self._ask, ask, name))

    def _ask(self, ask: object, name: str, _: bool = False) -> None:
        assert callable(ask)
        ask(name)

    def _choose(self, name: str, _: bool = False) -> None:
        self.chosen.emit(name)

    def _name(self, title: str, proposed: str) -> str:
        name, is_given = QInputDialog.getText(
            self, title, tr("Plan name:"), QLineEdit.EchoMode.Normal, proposed
        )
        return name.strip() if is_given else ""

    def _save(self) -> None:
        if name := self._name(tr("Save plan"), self._current):
            self.save_requested.emit(name)

    def _rename(self, name: str) -> None:
        new = self._name(tr("Rename plan"), name)
        if new and new != name:
            self.rename_requested.emit(name, new)

    def _delete(self, name: str) -> None:
        self.delete_requested.emit(name)

    def _export(self, name: str) -> None:
        proposed = f"{name.replace('/', '-')}.json"
        path, _ = ask_where_to_save(self, tr("Export plan"), proposed, tr(FILTER))
        if path:
            self.export_requested.emit(name, Path(path))

    def _import(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, tr("Import plan"), "", tr(FILTER))
        if path:
            self.import_requested.emit(Path(path))

    def focus(self) -> None:
        """Move the keyboard focus here."""
        self.button.setFocus(Qt.FocusReason.OtherFocusReason)
