"""The menu of saved plans and its actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, Qt, Signal, Slot
from PySide6.QtGui import QGuiApplication
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

import engine
from app.core.background import LatestJob
from app.core.notice import Notice
from app.core.translation import tr, tr_later, translated
from app.core.units import decimal
from app.devices.split.session import SplitSession
from app.devices.split.settings import is_same_load
from app.widgets.layout import NO_MARGINS, fill
from app.widgets.text import ask_where_to_save, caption_text, label, set_tip
from engine import DeviceInfo, EngineError, Finished, LoadParams, ModelInfo, ModelLoaded

if TYPE_CHECKING:
    from engine import ModelKey

MAX_SHOWN: Final = 24  # maximum name length on the button, in characters
FILTER: Final = tr_later("Plans (*.json);;All files (*)")


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A plan in the menu.

    Attributes:
        speed: measured tokens per second; 0 if not measured.
        problem: why the plan is disabled; "" if it is enabled.
    """

    name: str
    speed: float = 0.0
    problem: str = ""

    @property
    def text(self) -> str:
        """Name and measured speed."""
        badge = decimal(f"\t{self.speed:.1f} tok/s") if self.speed else ""
        return caption_text(self.name) + badge


class PlanMenu(QWidget):
    """Button with a menu to choose, save, rename, delete, export and import plans."""

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
        self.menu.aboutToShow.connect(self.opened)
        self.menu.aboutToShow.connect(self.fill)
        self.button = QPushButton()
        self.button.setMenu(self.menu)
        self.button.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        caption = label(tr("Plan"), "muted")
        caption.setBuddy(self.button)
        fill(QHBoxLayout(self), caption, self.button, margins=NO_MARGINS, spacing=6)
        self.set_plans((), "")
        self.setEnabled(False)

    def set_plans(self, entries: Sequence[PlanEntry], current: str) -> None:
        """Offer plans; `current` is the name of the active plan, or ""."""
        self._entries, self._current = tuple(entries), current
        shown = current or tr("Not saved")
        elided = shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 1] + "…"
        self.button.setText(f"{caption_text(elided)} ▾")
        self.button.setAccessibleName(tr("Plan: {name}").format(name=shown))
        set_tip(self.button, shown if elided != shown else tr("Saved plans for this model"))

    def fill(self) -> None:
        """Fill the menu."""
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
            set_tip(fastest, tr("The fastest measured plan that fits in free memory"))
            fastest.triggered.connect(lambda: self.fastest_requested.emit())
            menu.addSeparator()
        menu.addAction(tr("Save as…")).triggered.connect(lambda: self._save())
        if self._entries:
            for title, run in (
                (tr("Rename"), self._rename), (tr("Delete"), self.delete_requested.emit),
                (tr("Export"), self._export),
            ):  # fmt: skip
                self._add_submenu(title, run)
        menu.addAction(tr("Import…")).triggered.connect(lambda: self._import())
        menu.addSeparator()
        copy = menu.addAction(tr("Copy as command"))
        set_tip(copy, tr("Copies the terminal command that loads the model with these settings"))
        copy.triggered.connect(lambda: self.command_requested.emit())

    def _add_submenu(self, title: str, run: Callable[[str], None]) -> None:
        submenu = self.menu.addMenu(title)
        names = sorted((e.name for e in self._entries), key=lambda name: name != self._current)
        for name in names:
            action = submenu.addAction(caption_text(name))
            action.triggered.connect(lambda _=False, name=name: run(name))

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


MIN_TOKENS: Final = 16  # tokens; speeds of shorter answers are not saved


class PlansPresenter(QObject):
    """Fills the menu with the plans saved for the selected model and performs the menu's actions.

    Args:
        command: returns the terminal command for a load.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        menu: PlanMenu,
        split: SplitSession,
        command: Callable[[LoadParams], str],
        parent: QObject | None = None,
        *,
        store: Callable[[], engine.PlanStore] = lambda: engine.PlanStore.of_user(),
        devices: Callable[[], list[DeviceInfo]] = lambda: engine.list_devices(wait=False),
    ) -> None:
        super().__init__(parent)
        self._menu, self._split = menu, split
        self._command = command
        self._make_store, self._list_devices = store, devices
        self._store: engine.PlanStore | None = None
        self._info: ModelInfo | None = None
        self._key: ModelKey | None = None
        self._plans: list[engine.SavedPlan] = []
        self._devices: list[DeviceInfo] = []
        self._keys = LatestJob("tandem-plan-key", self)
        self._search = LatestJob("tandem-plan-search", self)
        self._notes = LatestJob("tandem-plan-note", self)
        self._keys.done.connect(self._on_key)
        self._search.done.connect(self._on_fastest)
        self._notes.done.connect(lambda _: self.refresh())
        for job in (self._search, self._notes):  # loading reports unreadable models
            job.failed.connect(self._fail)
        self._connect()

    def set_model(self, info: ModelInfo) -> None:
        """Offer the plans saved for this model."""
        if self._info is not None and self._info.path == info.path and self._key is not None:
            return
        self._info, self._key, self._plans = info, None, []
        self._menu.setEnabled(False)
        self._menu.set_plans((), "")
        self._keys.drop()
        self._keys.run(lambda: (info.path, engine.model_key(info.path)))

    @Slot()
    def show_current(self) -> None:
        """Show the name of the plan that matches the current settings, if any."""
        if self._key is not None:
            self._menu.set_plans([self._entry(plan) for plan in self._plans], self._current())

    @Slot()
    def refresh(self) -> None:
        """Reload the plans, because the command line can save plans too."""
        if self._key is None:
            return
        self._devices = self._list_devices()
        self._plans = self._of_user().plans(self._key)
        self.show_current()

    def note_answer(self, finished: Finished, loaded: ModelLoaded | None) -> None:
        """Save an answer's speed without draft tokens in the plan that is loaded."""
        key, times = self._key, finished.timings
        if key is None or loaded is None or finished.usage.completion_tokens < MIN_TOKENS:
            return
        name = self._name_of(loaded.params)
        if name and finished.plain_per_s > 0:
            when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            badge = engine.PlanBadge(times.prompt_per_s, finished.plain_per_s, loaded.n_ctx, when)
            store = self._of_user()
            self._notes.run(lambda: store.save(key, replace(store.find(key, name), badge=badge)))

    def close(self) -> None:
        """Wait for running jobs."""
        for job in (self._keys, self._search, self._notes):
            job.close()

    # menu actions

    def _connect(self) -> None:
        menu = self._menu
        menu.opened.connect(self.refresh)
        menu.chosen.connect(lambda name: self._do(lambda key: self._choose(key, name)))
        menu.fastest_requested.connect(self._find_fastest)
        menu.save_requested.connect(lambda name: self._do(lambda key: self._save(key, name)))
        menu.rename_requested.connect(
            lambda old, new: self._do(lambda key: self._rename(key, old, new))
        )
        menu.delete_requested.connect(lambda name: self._do(lambda key: self._delete(key, name)))
        menu.export_requested.connect(
            lambda name, path: self._do(lambda key: self._export(key, name, path))
        )
        menu.import_requested.connect(lambda path: self._do(lambda key: self._import(key, path)))
        menu.command_requested.connect(lambda: self._do(lambda _: self._copy()))

    def _do(self, action: Callable[[ModelKey], None]) -> None:
        """Perform an action for the selected model; show errors in a banner."""
        if self._key is None:
            return
        try:
            action(self._key)
        except EngineError as error:
            self._fail(error)
        else:
            self.refresh()

    def _choose(self, key: ModelKey, name: str) -> None:
        assert self._info is not None
        plan = self._of_user().find(key, name)
        self._split.choose(plan.resolved(self._info.path, self._list_devices()))

    def _save(self, key: ModelKey, name: str, badge: engine.PlanBadge | None = None) -> None:
        params = self._split.load_params()
        plan = engine.SavedPlan.of(name, params, self._list_devices(), badge)
        self._of_user().save(key, plan)

    def _rename(self, key: ModelKey, old: str, new: str) -> None:
        store = self._of_user()
        plan = store.find(key, old)
        renamed = replace(engine.SavedPlan.of(new, plan.params, ()), devices=plan.devices)
        is_other = old.casefold() != renamed.name.casefold()
        if is_other and any(p.name.casefold() == renamed.name.casefold() for p in self._plans):
            what = tr("A plan “{name}” already exists.").format(name=renamed.name)
            raise EngineError(what, tr("Choose another name."))
        store.save(key, replace(renamed, badge=plan.badge))
        if is_other:
            store.delete(key, old)

    def _delete(self, key: ModelKey, name: str) -> None:
        store = self._of_user()
        plan = store.find(key, name)
        store.delete(key, name)

        def restore() -> None:
            self._do(lambda _: store.save(key, plan))

        what = tr("Plan “{name}” deleted.").format(name=name)
        self.noticed.emit(Notice(what, action=tr("Undo"), on_action=restore))

    def _export(self, key: ModelKey, name: str, path: Path) -> None:
        engine.export_plan(self._of_user().find(key, name), path)
        what = tr("Plan “{name}” exported to {file}.").format(name=name, file=path.name)
        self.noticed.emit(Notice(what))

    def _import(self, key: ModelKey, path: Path) -> None:
        plan = engine.import_plan(path)
        self._of_user().save(key, plan)
        self.noticed.emit(Notice(tr("Plan “{name}” imported.").format(name=plan.name)))

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self._command(self._split.load_params()))
        self.noticed.emit(Notice(tr("Command copied.")))

    @Slot()
    def _find_fastest(self) -> None:
        if self._key is None or self._info is None:
            return
        path, plans, devices = self._info.path, list(self._plans), self._list_devices()

        def search() -> engine.SavedPlan | None:
            with closing(engine.Planner(path)) as planner:
                return engine.fastest_plan(plans, planner, path, devices)

        self._search.run(search)

    @Slot(object)
    def _on_fastest(self, plan: engine.SavedPlan | None) -> None:
        if plan is None:
            what = tr("No plan fits in free memory.")
            self._fail(EngineError(what, tr("Free some memory.")))
        else:
            self._do(lambda key: self._choose(key, plan.name))

    @Slot(object)
    def _on_key(self, found: tuple[str, ModelKey]) -> None:
        path, key = found
        if self._info is not None and path == self._info.path:
            self._key = key
            self._menu.setEnabled(True)
            try:
                self.refresh()
            except EngineError as error:
                self._fail(error)

    @Slot(object)
    def _fail(self, error: EngineError) -> None:
        self.noticed.emit(Notice.of(error))

    # the model's plans

    def _of_user(self) -> engine.PlanStore:
        if self._store is None:
            self._store = self._make_store()
        return self._store

    def _entry(self, plan: engine.SavedPlan) -> PlanEntry:
        speed = plan.badge.decode_ts if plan.badge else 0.0
        try:
            plan.resolved("", self._devices)
        except EngineError as error:
            return PlanEntry(plan.name, speed, translated(error.message))
        return PlanEntry(plan.name, speed)

    def _current(self) -> str:
        try:
            return self._name_of(self._split.load_params())
        except EngineError:
            return ""

    def _name_of(self, params: LoadParams) -> str:
        """Return the name of the plan that loads the model in the same way, or ""."""
        n_ctx_train = self._info.n_ctx_train if self._info else 0
        for plan in self._plans:
            try:
                wanted = plan.resolved(params.path, self._devices)
            except EngineError:
                continue
            if is_same_load(wanted, params, n_ctx_train):
                return plan.name
        return ""
