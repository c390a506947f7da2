"""The model in use: opening its file, loading it, and its presenter. If a load fails, the previous
model stays loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

import engine
from app.core import paths
from app.core.engine_client import EngineClient, EngineState, is_cancelled
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import reason_of, tr, tr_later, translated
from app.devices.split.session import SplitSession
from app.models.current.model_views import ModelBar, StartView
from app.remote.client.address import is_remote, remote_info, split_path
from engine import EngineError, LoadParams, ModelInfo, ModelLoaded

if TYPE_CHECKING:
    from engine import Choice

JOIN_S = 5.0


class ModelSession(QObject):
    """The selected model file and the state of its load.

    Args:
        plan: returns the selected model's load parameters; called when loading starts.
        suggest: called when a file is opened; returns a function that suggests a split and is
            called on another thread.

    Attributes:
        is_returning: whether the engine that replaces the current one will reload the model.
    """

    selected = Signal(object)  # ModelInfo
    suggested = Signal(object)  # Choice (a split), before the model is loaded
    loading = Signal(object)  # ModelInfo
    applying = Signal(object)  # ModelInfo of the loaded model, when a live split starts
    kept = Signal(object)  # ModelLoaded, after a failed live split
    replacing = Signal()  # the loaded model is about to be unloaded
    progressed = Signal(float)  # 0 to 1
    doing = Signal(str)  # loading step; "" while reading the file
    loaded = Signal(object)  # ModelLoaded
    emptied = Signal(object)  # ModelInfo of a model that can be loaded again, or None
    noticed = Signal(object)  # Notice
    fallbacks_changed = Signal(object)  # tuple of the loaded model's Fallbacks
    blocked = Signal(object)  # ModelInfo of a model that waits for `unblock`

    _read = Signal(int, object, object)  # ModelInfo or EngineError, Choice or None; from a thread

    def __init__(
        self,
        client: EngineClient,
        plan: Callable[[], LoadParams],
        parent: QObject,
        suggest: Callable[[], Callable[[ModelInfo], Choice | None]] = lambda: lambda _: None,
    ) -> None:
        super().__init__(parent)
        self._client, self._plan, self._suggest = client, plan, suggest
        self._info: ModelInfo | None = None
        self._number = 0
        self._reader: threading.Thread | None = None
        self._is_held, self._waiting = False, ""
        self._is_reading = False
        self._is_blocked = self.is_returning = False
        self._requested = ""  # path that `unblock` opens
        self._read.connect(self._on_read)
        client.load_progress.connect(self.progressed)
        client.load_doing.connect(self.doing)
        client.loaded.connect(self._on_loaded)
        client.load_failed.connect(self._on_failed)
        client.resplit_done.connect(lambda done: self._on_loaded(done.model))
        client.resplit_failed.connect(self._on_resplit_failed)
        client.unloaded.connect(self._on_unloaded)
        client.lost.connect(lambda *_: self._on_unloaded())
        client.fallbacks_changed.connect(self.fallbacks_changed)

    @property
    def info(self) -> ModelInfo | None:
        """The header of the most recently selected file, if any."""
        return self._info

    @property
    def is_opening(self) -> bool:
        """Whether a load is pending: the file is being read, or the load waits for the engine."""
        return bool(self._waiting) or self._is_reading or self.is_returning

    def hold(self) -> None:
        """Delay opening files until `release`, because the devices are not known yet."""
        self._is_held = True

    def release(self) -> None:
        """Open the most recently requested file, if any; open later files immediately."""
        self._is_held, path, self._waiting = False, self._waiting, ""
        if path:
            self.open(path)

    def block(self, *, is_returning: bool = False) -> None:
        """Delay loads until `unblock`, because there is no engine; still open and plan files.

        Args:
            is_returning: see the attribute.
        """
        self._is_blocked, self.is_returning = True, is_returning

    def unblock(self) -> bool:
        """Allow loads and open the requested file, if any; return whether there is one."""
        self._is_blocked = self.is_returning = False
        path, self._requested = self._requested, ""
        if path:
            self.open(path)
        return bool(path)

    def open(self, path: str) -> None:
        """Read a file's header on a thread, then load the model; load a remote model directly."""
        if self._is_held and not is_remote(path):
            self._waiting = path
            return
        self._number += 1
        self._is_reading = not is_remote(path)
        if is_remote(path):
            self._open_remote(path)
            return
        number, suggest = self._number, self._suggest()

        def read() -> None:
            result = _info_or_error(path)
            choice = suggest(result) if isinstance(result, ModelInfo) else None
            self._read.emit(number, result, choice)

        self._reader = threading.Thread(target=read, name="tandem-header", daemon=True)
        self._reader.start()

    def _open_remote(self, path: str) -> None:
        try:
            info = remote_info(path)
        except EngineError as error:
            self.noticed.emit(Notice.of(error))
            return
        self._waiting = ""
        self._on_read(self._number, info, None)

    @Slot()
    def load(self) -> None:
        """Load the selected model with the current plan."""
        if self._info is None or self._must_wait(self._info):
            return
        try:
            path = self._info.path
            params = LoadParams(path) if is_remote(path) else self._plan()
        except EngineError as error:
            self.noticed.emit(Notice.of(error))
            return
        self.replacing.emit()
        self._client.load(params)
        self.loading.emit(self._info)

    def load_again(self, loaded: ModelLoaded) -> None:
        """Reload a model that was lost, with the parameters it had."""
        if self._info != loaded.info:
            self._info = loaded.info
            self.selected.emit(loaded.info)
        if self._must_wait(loaded.info):
            return
        self._client.load(loaded.params)
        self.loading.emit(loaded.info)

    def _must_wait(self, info: ModelInfo) -> bool:
        """Return whether the model waits for `unblock`."""
        if self._is_blocked and not is_remote(info.path):
            self._requested = info.path
            self.blocked.emit(info)
            return True
        return False

    def apply(self, params: LoadParams) -> None:
        """Change the loaded model's split; the chat is kept."""
        if self._client.model is not None:
            self._client.resplit(params)
            self.applying.emit(self._client.model.info)

    @Slot()
    def cancel(self) -> None:
        if self._client.state is EngineState.LOADING:
            self._client.cancel()

    @Slot()
    def eject(self) -> None:
        self.replacing.emit()
        self._client.unload()

    def close(self) -> None:
        """Wait for the thread that reads a header."""
        self._number += 1
        if self._reader is not None:
            self._reader.join(JOIN_S)

    @Slot(int, object, object)
    def _on_read(
        self, number: int, result: ModelInfo | EngineError, suggested: Choice | None
    ) -> None:
        if number != self._number:
            return
        self._is_reading = False
        if isinstance(result, EngineError):
            self.noticed.emit(Notice.of(result))
            return
        self._info = result
        self.selected.emit(result)
        if suggested is not None:
            self.suggested.emit(suggested)
        self.load()

    @Slot(object)
    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self._info = loaded.info
        self.loaded.emit(loaded)
        if loaded.warnings:  # in one notice, because a second notice would replace it
            text = " ".join(map(translated, loaded.warnings))
            self.noticed.emit(Notice(text, kind="warning", is_of_engine=True))

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        if not is_cancelled(error):
            self.noticed.emit(self._explained(error))
        if self._client.model is not None:
            self._info = self._client.model.info
            self.selected.emit(self._info)
            self.loaded.emit(self._client.model)
        else:
            self.emptied.emit(self._info)

    @Slot(object)
    def _on_resplit_failed(self, error: EngineError) -> None:
        model = self._client.model
        if not is_cancelled(error):
            kept = tr("The old split is kept.") if model else ""
            self.noticed.emit(Notice.of(error, kept))
        if model is not None:
            self.kept.emit(model)
        else:
            self.emptied.emit(self._info)

    def _explained(self, error: EngineError) -> Notice:
        model = self._client.model
        if model is None:
            return Notice.of(error)
        return Notice.of(error, tr("{name} is still loaded.").format(name=model.info.name))

    @Slot()
    def _on_unloaded(self) -> None:
        if self._client.state is not EngineState.LOADING:  # a load emits its own signals
            self.emptied.emit(self._info)


def _info_or_error(path: str) -> ModelInfo | EngineError:
    try:
        return engine.read_model_info(Path(path))
    except EngineError as error:
        return error
    except OSError as error:
        what = tr("{name} cannot be read: {why}.")
        return EngineError(what.format(name=Path(path).name, why=reason_of(error)))


DEMO_PROMPTS = (
    tr_later("What is Tandem?"), tr_later("What is tensor parallelism?"),
    tr_later("What is a KV cache?"), tr_later("What does Q4_K_M mean?"),
)  # fmt: skip
"""Messages that the demo model can answer; it knows only English, so they are sent in English."""


@dataclass(frozen=True, slots=True)
class ModelViews:
    """The widgets that show the model in use."""

    bar: ModelBar
    start: StartView


class ModelPresenter(QObject):
    """Connects a `ModelSession` to its views and the split; `keep` saves settings."""

    changed = Signal(str)  # name of the loaded model; "" if there is none
    noticed = Signal(object)  # Notice

    def __init__(
        self,
        models: ModelSession,
        views: ModelViews,
        split: SplitSession,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._models, self._views, self._split = models, views, split
        self._settings, self._keep = settings, keep
        self._loaded_name = self._loading_name = ""
        self._is_demo = False
        self._wire_choices()
        self._wire_results()

    def start(self) -> None:
        """Show the models that can be opened."""
        self._show()

    @Slot()
    def open_demo(self) -> None:
        path = paths.demo_model()
        if path is None:
            self.noticed.emit(Notice(tr("This installation has no demo model."), kind="warning"))
        else:
            self._models.open(str(path))

    def _wire_choices(self) -> None:
        models, views = self._models, self._views
        for page in (views.bar, views.start):
            page.demo_requested.connect(self.open_demo)
            page.recent_chosen.connect(models.open)
        for source in (views.bar, self._split):
            source.load_requested.connect(models.load)
            source.cancel_requested.connect(models.cancel)
        views.bar.eject_requested.connect(models.eject)
        self._split.apply_requested.connect(self._apply)
        self._split.settings_changed.connect(self._keep_plan)

    def _wire_results(self) -> None:
        models = self._models
        models.selected.connect(self._on_selected)
        models.suggested.connect(self._on_suggested)
        models.loading.connect(self._on_loading)
        models.applying.connect(self._on_applying)
        models.kept.connect(self._on_kept)
        models.progressed.connect(self._views.bar.set_progress)
        models.doing.connect(self._views.bar.set_doing)
        models.progressed.connect(self._split.progressed)
        models.loaded.connect(self._on_loaded)
        models.emptied.connect(self._on_emptied)
        models.fallbacks_changed.connect(self._views.bar.set_fallbacks)
        models.noticed.connect(self.noticed)

    @Slot(object)
    def _on_selected(self, info: ModelInfo) -> None:
        self._views.bar.show_selected(info)
        if is_remote(info.path):
            self._split.set_elsewhere(split_path(info.path).host)
            return
        self._split.set_model(info)
        plan = self._settings.current.plans.get(info.path)
        if isinstance(plan, dict):
            self._split.restore(plan)
        self._split.set_state("ready")

    @Slot(object)
    def _on_suggested(self, choice: Choice) -> None:
        if not isinstance(self._settings.current.plans.get(choice.params.path), dict):
            self._split.suggest(choice)

    @Slot(object)
    def _on_loading(self, info: ModelInfo) -> None:
        self._views.bar.show_loading(info)
        if not is_remote(info.path):
            self._split.set_state("loading")
        self._loading_name = info.name
        self._show()

    @Slot()
    def _apply(self) -> None:
        params = self._split.resplit_params()
        if params is not None:
            self._models.apply(params)

    @Slot(object)
    def _on_applying(self, info: ModelInfo) -> None:
        self._views.bar.show_loading(info)
        self._split.set_state("applying")

    @Slot(object)
    def _on_kept(self, loaded: ModelLoaded) -> None:
        self._split.choose(loaded.params)
        self._on_loaded(loaded)

    @Slot(object)
    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self._loaded_name, self._loading_name = loaded.info.name, ""
        demo = paths.demo_model()
        self._is_demo = demo is not None and loaded.info.path == str(demo)
        self._views.bar.show_loaded(loaded)
        if not is_remote(loaded.info.path):
            self._split.set_state("loaded")
            self._split.set_loaded(loaded)
        self._keep(self._settings.current.with_recent(loaded.info.path))
        self._keep_plan()
        self._show()

    @Slot(object)
    def _on_emptied(self, info: ModelInfo | None) -> None:
        self._loaded_name = self._loading_name = ""
        if info is None:
            self._views.bar.show_empty()
            self._split.set_state("empty")
        else:
            self._views.bar.show_selected(info)
            self._split.set_state("empty" if is_remote(info.path) else "ready")
        self._show()

    @Slot()
    def _keep_plan(self) -> None:
        if self._models.info is not None and not is_remote(self._models.info.path):
            current = self._settings.current
            self._keep(current.with_plan(self._models.info.path, self._split.to_dict()))

    def _show(self) -> None:
        recent, name = self._settings.current.recent_models, self._loaded_name
        has_demo = paths.demo_model() is not None
        self._views.bar.set_menu(recent, has_demo=has_demo)
        self._views.start.show_state(
            name, loading=self._loading_name, recent=recent, has_demo=has_demo,
            prompts=DEMO_PROMPTS if self._is_demo else (),
        )  # fmt: skip
        self.changed.emit(name)
