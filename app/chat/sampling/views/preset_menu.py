"""Menu of presets, below a button that names the one in use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QInputDialog, QLineEdit, QMenu, QPushButton, QSizePolicy, QWidget

from app.chat.sampling.presets import Preset
from app.core.translation import tr
from app.widgets.text import caption_text, set_tip

MOST_SHOWN = 18
"""Largest number of characters of a name on the button."""


class PresetMenu(QPushButton):
    """Button and menu to choose, save, rename and delete presets."""

    chosen = Signal(str)  # name
    save_requested = Signal(str)  # name
    rename_requested = Signal(str, str)  # old and new name
    delete_requested = Signal(str)
    for_all_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._presets: tuple[Preset, ...] = ()
        self._current = ""
        self._is_own = False
        menu = QMenu(self)
        menu.setToolTipsVisible(True)
        menu.aboutToShow.connect(self.fill)
        self.setMenu(menu)
        self.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        self.set_presets((), "", is_own=False)

    def set_presets(self, presets: Sequence[Preset], current: str, *, is_own: bool) -> None:
        """Offer presets.

        Args:
            current: name of the one whose values are in use; "" if there is none.
            is_own: whether the values in use are those of one chat.
        """
        self._presets, self._current, self._is_own = tuple(presets), current, is_own
        shown = current or tr("Own values")
        short = shown if len(shown) <= MOST_SHOWN else shown[: MOST_SHOWN - 1] + "…"
        self.setText(f"{caption_text(short)} ▾")
        self.setAccessibleName(tr("Preset: {name}").format(name=shown))
        set_tip(self, shown if short != shown else tr("Presets: all values at once"))

    def fill(self) -> None:
        """Fill the menu with the present presets."""
        menu = self.menu()
        menu.clear()
        own = [preset for preset in self._presets if preset.is_own]
        for preset in self._presets:
            if own and preset is own[0]:
                menu.addSeparator()
            action = menu.addAction(caption_text(preset.name))
            action.setCheckable(True)
            action.setChecked(preset.name == self._current)
            action.triggered.connect(partial(self._choose, preset.name))
        menu.addSeparator()
        menu.addAction(tr("Save as…")).triggered.connect(lambda: self._save())
        if own:
            self._add_submenu(menu, tr("Rename"), own, self._rename)
            self._add_submenu(menu, tr("Delete"), own, self._delete)
        if self._is_own:
            menu.addSeparator()
            for_all = menu.addAction(tr("Use for all chats"))
            set_tip(for_all, tr("All chats without values of their own get these values"))
            for_all.triggered.connect(lambda: self.for_all_requested.emit())

    def _add_submenu(self, menu: QMenu, title: str, own: Sequence[Preset], do: object) -> None:
        assert callable(do)
        below = menu.addMenu(title)
        for preset in own:
            below.addAction(caption_text(preset.name)).triggered.connect(partial(do, preset.name))

    def _choose(self, name: str, _: bool = False) -> None:
        self.chosen.emit(name)

    def _name(self, title: str, proposed: str) -> str:
        name, is_given = QInputDialog.getText(
            self, title, tr("Name of the preset:"), QLineEdit.EchoMode.Normal, proposed
        )
        return name.strip() if is_given else ""

    def _save(self) -> None:
        names = [preset.name for preset in self._presets if preset.is_own]
        proposed = self._current if self._current in names else ""
        if name := self._name(tr("Save preset"), proposed):
            self.save_requested.emit(name)

    def _rename(self, name: str, _: bool = False) -> None:
        new = self._name(tr("Rename preset"), name)
        if new and new != name:
            self.rename_requested.emit(name, new)

    def _delete(self, name: str, _: bool = False) -> None:
        self.delete_requested.emit(name)
