"""Sampling presets: built-in ones and the user's own.

A preset has *chosen* values for some fields of `SamplingParams`. Other fields have the values that
the model's file recommends, or else the engine's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot
from PySide6.QtWidgets import QInputDialog, QLineEdit, QMenu, QPushButton, QSizePolicy, QWidget

import engine
from app.core.background import LatestJob
from app.core.settings import accepted_sampling
from app.core.translation import tr, tr_later, translated
from app.widgets.text import caption_text, set_tip
from engine import EngineError, SamplingParams

Chosen = Mapping[str, Any]
"""Explicitly set values by field of `SamplingParams`."""

OF_THE_MODEL: Final = tr_later("Model defaults")
BUILT_IN: Final[Mapping[str, Chosen]] = {
    OF_THE_MODEL: {},
    tr_later("Precise"): {"temperature": 0.2, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    tr_later("Balanced"): {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    tr_later("Creative"): {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
}
"""Built-in presets; all of them allow sampling on GPUs."""

MAX_NAME: Final = 60


@dataclass(frozen=True, slots=True)
class Preset:
    """Sampling values with a name, built-in or the user's own."""

    name: str
    chosen: Chosen
    is_own: bool


def all_presets(own: Mapping[str, Any]) -> list[Preset]:
    """Return the built-in presets, followed by the user's own, sorted by name.

    Args:
        own: values by preset name, from the settings; invalid entries are skipped.
    """
    found = [Preset(tr(name), chosen, is_own=False) for name, chosen in BUILT_IN.items()]
    names = sorted((name for name in own if isinstance(own[name], dict)), key=str.casefold)
    return found + [Preset(name, accepted_sampling(own[name]), is_own=True) for name in names]


def params_of(chosen: Chosen, recommended: SamplingParams) -> SamplingParams:
    """Return the recommended values with the chosen ones applied."""
    values = {name: getattr(recommended, name) for name in SamplingParams.__dataclass_fields__}
    return SamplingParams(**values | accepted_sampling(chosen))


def matching(
    presets: Sequence[Preset], chosen: Chosen, recommended: SamplingParams
) -> Preset | None:
    """Return the preset with these values, preferably the user's own; None if there is none."""
    params = params_of(chosen, recommended)
    equal = [preset for preset in presets if params_of(preset.chosen, recommended) == params]
    return next((preset for preset in equal if preset.is_own), equal[0] if equal else None)


def name_problem(name: str, own: Mapping[str, Any], renamed: str = "") -> str:
    """Return a sentence saying why a new or renamed preset cannot have this name, or ""."""
    if name in map(tr, BUILT_IN):
        return tr("“{name}” is a built-in preset.").format(name=name)
    if renamed and name != renamed and name in own:
        return tr("A preset named “{name}” already exists.").format(name=name)
    return ""


def with_preset(own: Mapping[str, Any], name: str, chosen: Chosen) -> dict[str, Any]:
    """Return the user's presets with one added or replaced."""
    return {**own, name[:MAX_NAME]: dict(chosen)}


def without_preset(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the user's presets with one removed."""
    return {other: chosen for other, chosen in own.items() if other != name}


def with_new_name(own: Mapping[str, Any], name: str, new: str) -> dict[str, Any]:
    """Return the user's presets with one renamed."""
    return {new[:MAX_NAME] if other == name else other: own[other] for other in own}


PAUSE_MS = 400
"""Milliseconds without a change after which the structured output options are checked."""


class FormCheck(QObject):
    """Validator for the structured output options; it runs when the user stops typing."""

    checked = Signal(str)  # the error, or ""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._form: tuple[str, str, str] = ("", "", "")
        self._job = LatestJob("tandem-form", self)
        self._pause = QTimer(self, interval=PAUSE_MS, singleShot=True)
        self._pause.timeout.connect(self._check)
        self._job.done.connect(lambda _: self.checked.emit(""))
        self._job.failed.connect(self._on_failed)

    def look_at(self, params: SamplingParams) -> None:
        """Schedule a check of new options."""
        form = params.json_schema, params.grammar, params.regex
        if form == self._form:
            return
        self._form = form
        self._job.drop()
        self.checked.emit("")
        if any(form):
            self._pause.start()
        else:
            self._pause.stop()

    def close(self) -> None:
        """Wait for the thread."""
        self._pause.stop()
        self._job.close()

    @Slot()
    def _check(self) -> None:
        self._job.run(partial(_check, *self._form))

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self.checked.emit(translated(str(error)))


def _check(json_schema: str, grammar: str, regex: str) -> None:
    form = engine.form_of(json_schema, grammar, regex)
    if form is not None:
        engine.check_grammar(form)


MAX_SHOWN = 18  # characters of the name on the button


class PresetMenu(QPushButton):
    """Button with a menu to choose, save, rename and delete presets."""

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
        """Set the presets in the menu.

        Args:
            current: name of the active preset, or "".
            is_own: whether the active values are a chat's own.
        """
        self._presets, self._current, self._is_own = tuple(presets), current, is_own
        shown = current or tr("Custom values")
        short = shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 1] + "…"
        self.setText(f"{caption_text(short)} ▾")
        self.setAccessibleName(tr("Preset: {name}").format(name=shown))
        set_tip(self, shown if short != shown else tr("Presets for all values"))

    def fill(self) -> None:
        """Rebuild the menu."""
        menu = self.menu()
        menu.clear()
        own = [preset for preset in self._presets if preset.is_own]
        for preset in self._presets:
            if own and preset is own[0]:
                menu.addSeparator()
            action = menu.addAction(caption_text(preset.name))
            action.setCheckable(True)
            action.setChecked(preset.name == self._current)
            action.triggered.connect(lambda _, name=preset.name: self.chosen.emit(name))
        menu.addSeparator()
        menu.addAction(tr("Save as…")).triggered.connect(lambda: self._save())
        if own:
            self._add_submenu(menu, tr("Rename"), own, self._rename)
            self._add_submenu(menu, tr("Delete"), own, self.delete_requested.emit)
        if self._is_own:
            menu.addSeparator()
            for_all = menu.addAction(tr("Use for all chats"))
            set_tip(for_all, tr("Applies these values to all chats without their own"))
            for_all.triggered.connect(lambda: self.for_all_requested.emit())

    def _add_submenu(
        self, menu: QMenu, title: str, own: Sequence[Preset], do: Callable[[str], None]
    ) -> None:
        below = menu.addMenu(title)
        for preset in own:
            action = below.addAction(caption_text(preset.name))
            action.triggered.connect(lambda _, name=preset.name: do(name))

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

    def _rename(self, name: str) -> None:
        new = self._name(tr("Rename preset"), name)
        if new and new != name:
            self.rename_requested.emit(name, new)
