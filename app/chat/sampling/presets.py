"""Named values of sampling: those that Tandem comes with, and a person's own.

Values are *chosen* ones: fields of `SamplingParams` by name that somebody has set. All others are
what the model's file recommends, or the engine's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot
from PySide6.QtWidgets import QInputDialog, QLineEdit, QMenu, QPushButton, QSizePolicy, QWidget

import engine
from app.core.background import LatestJob
from app.core.engine_sentences import translated
from app.core.settings import accepted_sampling
from app.core.translation import tr, tr_later
from app.widgets.text import caption_text, set_tip
from engine import EngineError, SamplingParams

Chosen = Mapping[str, Any]
"""Fields of `SamplingParams` that somebody has set, with their values."""

OF_THE_MODEL: Final = tr_later("From the model")
BUILT_IN: Final[Mapping[str, Chosen]] = {
    OF_THE_MODEL: {},
    tr_later("Precise"): {"temperature": 0.2, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    tr_later("Balanced"): {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    tr_later("Creative"): {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.1},
}
"""Presets that Tandem comes with; GPUs sample all of them by themselves."""

MAX_NAME: Final = 60
"""Largest number of characters of a preset's name."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Named values of sampling.

    Attributes:
        is_own: whether a person has made it.
    """

    name: str
    chosen: Chosen
    is_own: bool


def all_presets(own: Mapping[str, Any]) -> list[Preset]:
    """Return the presets that Tandem comes with, then a person's own, by name.

    Args:
        own: chosen values by name, as the settings store them; what is none is left out.
    """
    found = [Preset(tr(name), chosen, is_own=False) for name, chosen in BUILT_IN.items()]
    names = sorted((name for name in own if isinstance(own[name], dict)), key=str.casefold)
    return found + [Preset(name, accepted_sampling(own[name]), is_own=True) for name in names]


def params_of(chosen: Chosen, recommended: SamplingParams) -> SamplingParams:
    """Return what a model recommends, with the chosen values in place of some."""
    values = {name: getattr(recommended, name) for name in SamplingParams.__dataclass_fields__}
    return SamplingParams(**values | accepted_sampling(chosen))


def matching(
    presets: Sequence[Preset], chosen: Chosen, recommended: SamplingParams
) -> Preset | None:
    """Return the preset that has these values, a person's own first; None if there is none."""
    wanted = params_of(chosen, recommended)
    alike = [preset for preset in presets if params_of(preset.chosen, recommended) == wanted]
    return next((preset for preset in alike if preset.is_own), alike[0] if alike else None)


def name_problem(name: str, own: Mapping[str, Any], renamed: str = "") -> str:
    """Return why a preset cannot have a name, as a sentence; "" if it can.

    Args:
        renamed: name of the preset that is to get this one; "" for a new preset.
    """
    if name in map(tr, BUILT_IN):
        return tr("“{name}” is a preset that Tandem comes with.").format(name=name)
    if renamed and name != renamed and name in own:
        return tr("There is a preset “{name}” already.").format(name=name)
    return ""


def with_preset(own: Mapping[str, Any], name: str, chosen: Chosen) -> dict[str, Any]:
    """Return a person's presets with another one, in place of one of that name."""
    return {**own, name[:MAX_NAME]: dict(chosen)}


def without_preset(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a person's presets without one of them."""
    return {other: chosen for other, chosen in own.items() if other != name}


def with_new_name(own: Mapping[str, Any], name: str, new: str) -> dict[str, Any]:
    """Return a person's presets with another name for one of them."""
    return {new[:MAX_NAME] if other == name else other: own[other] for other in own}


PAUSE_MS = 400
"""Milliseconds without a change after which a form is checked."""


class FormCheck(QObject):
    """Says what is wrong with the form that settings ask for, once it is not changed any more."""

    checked = Signal(str)  # a sentence; "" if nothing is wrong

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._form: tuple[str, str, str] = ("", "", "")
        self._job = LatestJob("tandem-form", self)
        self._pause = QTimer(self, interval=PAUSE_MS, singleShot=True)
        self._pause.timeout.connect(self._check)
        self._job.done.connect(lambda _: self.checked.emit(""))
        self._job.failed.connect(self._on_failed)

    def look_at(self, params: SamplingParams) -> None:
        """Check the form of settings soon, if it is another one."""
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


MAX_SHOWN = 18
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
        short = shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 1] + "…"
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
