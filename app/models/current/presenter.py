"""The presenter of the model in use: connects its session with its views and the split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

from app.core import paths
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr, tr_later
from app.devices.split.session import SplitSession
from app.models.current.session import ModelSession
from app.models.current.views.model_bar import ModelBar
from app.models.current.views.start_view import StartView
from app.remote.client.address import is_remote, split_path
from engine import ModelInfo, ModelLoaded

if TYPE_CHECKING:
    from engine import Choice


DEMO_PROMPTS = (
    tr_later("What is Tandem?"), tr_later("What is tensor parallelism?"),
    tr_later("What is a KV cache?"), tr_later("What does Q4_K_M mean?"),
)  # fmt: skip
"""Messages that the bundled model has an answer to; it knows English alone, so it is asked in
English whatever the window's language."""


@dataclass(frozen=True, slots=True)
class ModelViews:
    """The widgets that show the model in use and open others."""

    bar: ModelBar
    start: StartView


class ModelPresenter(QObject):
    """Connection of one `ModelSession` with its views and the split.

    Args:
        keep: stores settings and has them written.
    """

    changed = Signal(str)  # name of the loaded model, "" for none
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
        """Suggest a split, unless somebody has already chosen one for this model."""
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
        """Show the old split in the panel, as the new one could not be applied."""
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
