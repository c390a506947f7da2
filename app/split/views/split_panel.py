"""The split panel: which devices take how much of the model, and what that costs.

Controls ask for other settings; a change is planned and shown at most once per turn of the event
loop, however many mouse events a drag sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QKeySequence, QShortcut
from PySide6.QtWidgets import QWidget

from app.split.figures import rank_labels, short_name
from app.split.fit_finder import FitFinder
from app.split.state import LoadState, SplitState
from app.split.picture import SplitPicture
from app.split.plan_source import PlannerFactory
from app.split.settings import SplitSettings
from app.split.speed import MachineFactory, this_machine
from app.split.views.device_row import DeviceRow
from app.split.views.split_layout import SplitLayout
from app.units import MIB
from app.widgets.controls import show_number
from engine import (
    Choice,
    DeviceInfo,
    DeviceSnapshot,
    Finished,
    LoadParams,
    ModelInfo,
    ModelLoaded,
    Planner,
    Remedy,
)


class SplitPanel(SplitLayout):
    """Choose devices, shares and context; see bytes and speed before and after loading.

    Args:
        planner_factory: opens a model file for planning.
        machine_factory: finds out what is known of devices.
    """

    load_requested = Signal()
    apply_requested = Signal()
    cancel_requested = Signal()
    settings_changed = Signal()
    pictured = Signal(object)  # SplitPicture that is shown now

    def __init__(
        self,
        planner_factory: PlannerFactory = Planner,
        machine_factory: MachineFactory = this_machine,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._model = SplitState(planner_factory, machine_factory)
        self._finder = FitFinder(planner_factory, self)
        self._dragged: tuple[int, float] | None = None
        self.rows: list[DeviceRow] = []
        self._refresh_timer = QTimer(self, singleShot=True, interval=0)
        self._refresh_timer.timeout.connect(self._refresh)
        self._connect()

    # what the window tells

    def set_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Offer these devices; settings made before are kept for those that are still here."""
        self._model.set_devices(devices)
        unusable = [f"{short_name(d.name)}: {d.reason}" for d in devices if not d.usable]
        self.unusable.setText("\n".join(unusable))
        self.unusable.setVisible(bool(unusable))
        self._schedule()

    def set_model(self, info: ModelInfo | None) -> None:
        """Plan for this model; None is no model."""
        self._finder.ask(None)
        self._model.set_model(info)
        self.options.set_model_context(self._model.n_ctx_train)
        self._schedule()

    def set_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Use the latest memory figures; while loading those from before stay."""
        self._model.set_snapshots(snapshots)
        self._schedule()

    def set_state(self, state: LoadState) -> None:
        self._model.set_state(state)
        self.inputs.setEnabled(state not in ("loading", "applying"))
        self.set_progress(0.0)
        self._schedule()

    def set_loaded(self, loaded: ModelLoaded) -> None:
        """The model is loaded: show what was predicted against what was measured."""
        self.set_state("loaded")
        self._model.set_loaded(loaded)

    def set_progress(self, done: float) -> None:
        """Show which part of the load is done, 0 to 1."""
        self.footer.set_progress(done)

    def note_answer(self, finished: Finished) -> None:
        """An answer ended: show its speed beside what was predicted."""
        self._model.note_answer(finished)
        self._schedule()

    # what the window asks

    def load_params(self) -> LoadParams:
        """What the person chose.

        Raises:
            EngineError: there is no device.
        """
        self._place_dragged()
        return self._model.load_params()

    def resplit_params(self) -> LoadParams | None:
        """What to ask the loaded model for; None where it has to be loaded again."""
        self._place_dragged()
        return self._model.resplit_params()

    def state(self) -> dict[str, Any]:
        """The settings for a JSON file."""
        self._place_dragged()
        return self._model.to_dict()

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take settings from `state` back, now or when devices are known."""
        self._model.restore(data)
        self._schedule()

    def choose(self, params: LoadParams) -> None:
        """Choose to load what `params` say; the person can undo it."""
        self._change(self._model.settings_of(params))

    def set_overrides(self, overrides: tuple[tuple[str, str], ...]) -> None:
        """Choose what is moved by itself; the person can undo it."""
        self._change(replace(self._model.settings, overrides=overrides))

    def tune_devices(self) -> tuple[str, ...]:
        """What a search for the best split may choose from: the ranks that are on, or all."""
        ranks = self._model.settings.ranks
        on = tuple(rank.device for rank in ranks if rank.is_on)
        return on if len(on) > 1 else tuple(rank.device for rank in ranks)

    def free_bytes(self) -> dict[str, int]:
        """Bytes by device that the model could have."""
        return self._model.free()

    def read_speeds(self) -> None:
        """Predict with what was measured of devices and links meanwhile."""
        self._model.speed.set_devices(self._model.devices)
        self._schedule()

    def suggest(self, choice: Choice) -> None:
        """Begin with where the model is best put, and say why; context and the rest stay."""
        self._model.suggest(choice)
        self._schedule()

    def suggester(self) -> Callable[[ModelInfo], Choice | None]:
        """What finds out, on another thread, where to put a model if nobody says."""
        return self._model.suggester()

    def stop(self) -> None:
        """End what goes on beside the window."""
        self._finder.stop()
        self._refresh_timer.stop()

    def closeEvent(self, event: QCloseEvent) -> None:
        self.stop()
        super().closeEvent(event)

    # changes by the person

    def _change(self, settings: SplitSettings) -> None:
        self._schedule()  # also where nothing changes: a control may show what was not accepted
        if self._model.change(settings):
            self.settings_changed.emit()

    def _on_dragged(self, handle: int, position: float) -> None:
        """Only the last of many events in one turn of the event loop counts."""
        self._dragged = handle, position
        self._schedule()

    def _place_dragged(self) -> None:
        dragged, self._dragged = self._dragged, None
        if dragged is not None:
            self._change(self._model.dragged(*dragged))

    def _begin_gesture(self) -> None:
        self._model.history.begin()

    def _end_gesture(self) -> None:
        self._place_dragged()
        self._model.history.end()

    def undo(self) -> None:
        """Take the last change back."""
        self._step(self._model.undo)

    def redo(self) -> None:
        """Do again what was taken back."""
        self._step(self._model.redo)

    def _step(self, go: Callable[[], bool]) -> None:
        self._place_dragged()
        if not self._model.is_busy and go():
            self._schedule()
            self.settings_changed.emit()

    def _on_remedy(self, remedy: Remedy) -> None:
        self.choose(remedy.params)

    def _schedule(self) -> None:
        if not self._refresh_timer.isActive():
            self._refresh_timer.start()

    # showing

    def _refresh(self) -> None:
        if not self._model.settings.ranks:
            return
        self._place_dragged()
        self._refresh_timer.stop()
        picture, loaded = self._model.picture(), self._model.loaded
        settings = picture.settings
        self._show_rows(picture)
        groups = settings.groups if settings.mode == "groups" else ()
        self.header.set_rows(settings.mode, picture.rows, groups)
        self.options.set_settings(settings, picture.n_ctx)
        self.options.set_most(picture.fit.n_ctx, picture.n_ctx)
        has_model = self._model.info is not None
        self.summary.show_figures(
            picture.plan, picture.speed, has_model=has_model, chosen=picture.chosen_because
        )
        self.comparison.set_loaded(loaded, rank_labels(loaded.params.devices if loaded else ()))
        self.problem.setText("\n".join(picture.problems))
        self.problem.setVisible(bool(picture.problems))
        remedies = picture.fit.remedies if picture.problems else ()
        self.remedies.set_remedies(remedies, is_current=picture.fit.is_current)
        self.footer.show_state(self._model.load_state, picture)
        self._ask_what_fits()
        self.pictured.emit(picture)

    def _ask_what_fits(self) -> None:
        if not self._model.is_busy:
            self._finder.ask(self._model.fit_question())

    def _show_rows(self, picture: SplitPicture) -> None:
        self._arrange_rows(picture.colours)
        settings = picture.settings
        is_single = settings.mode == "single"
        shown = {figures.index: figures for figures in picture.rows}
        n = len(settings.ranks)
        for index, row in enumerate(self.rows):
            row.setVisible(index in shown)
            if index in shown:
                can_join = settings.mode == "groups" and index in settings.active[1:]
                row.set_figures(
                    shown[index],
                    has_slider=not is_single and len(settings.active) > 1,
                    place=(0, 1) if is_single else (index, n),
                    joins=settings.ranks[index].joins if can_join else None,
                    measured=picture.measured.get(index),
                )
        has_gpu = any(rank.device != "cpu" for rank in settings.ranks)
        self.cpu_ranks_host.setVisible(not has_gpu)
        show_number(self.cpu_ranks, 1 if is_single else settings.n_cpu_ranks)

    def _arrange_rows(self, colours: Sequence[int]) -> None:
        """One row per rank, in order; those that there were stay, so that a focus in them stays."""
        if [row.colour for row in self.rows] == list(colours):
            return
        known = {row.colour: row for row in self.rows}
        for colour, row in known.items():
            if colour not in colours:
                row.hide()
                row.deleteLater()
        self.rows = []
        for index, colour in enumerate(colours):
            row = known.get(colour) or self._make_row(colour)
            row.index = index
            self.rows_layout.removeWidget(row)
            self.rows_layout.addWidget(row)
            self.rows.append(row)

    def _make_row(self, colour: int) -> DeviceRow:
        row = DeviceRow(0, colour)
        self._on(row.share_changed, lambda now, index, share: now.with_share(index, share))
        self._on(row.switched, lambda now, index, is_on: now.with_rank_on(index, is_on))
        self._on(row.locked, lambda now, index, is_on: now.with_locked(index, is_on))
        self._on(row.joined, lambda now, index, joins: now.with_joined(index, joins))
        self._on(row.moved, lambda now, index, steps: now.with_rank_moved(index, steps))
        self._on(
            row.reserve_changed,
            lambda now, index, mib: now.with_reserve(now.ranks[index].device, mib * MIB),
        )
        row.gesture_began.connect(self._begin_gesture)
        row.gesture_ended.connect(self._end_gesture)
        return row

    def _on(self, signal: Any, make: Callable[..., SplitSettings]) -> None:
        """Let a signal ask for the settings that `make` gives, from the present and its own."""
        signal.connect(lambda *args: self._change(make(self._model.settings, *args)))

    def _connect(self) -> None:
        on, header, options = self._on, self.header, self.options
        on(header.mode_chosen, lambda now, mode: now.with_mode(mode))
        on(header.even_requested, lambda now: now.with_weights([1.0] * len(now.ranks)))
        on(header.by_memory_requested, lambda _: self._model.split_by_memory())
        on(header.by_speed_requested, lambda _: self._model.split_by_speed())
        on(header.bar.stepped, lambda _, handle, notches: self._model.stepped(handle, notches))
        on(self.cpu_ranks.valueChanged, lambda now, count: now.with_cpu_ranks(count))
        on(options.context_changed, lambda now, n_ctx: replace(now, n_ctx=n_ctx))
        on(options.kv_type_changed, lambda now, kv_type: replace(now, kv_type=kv_type))
        on(options.p2p_changed, lambda now, p2p: replace(now, p2p=p2p))
        on(options.threads_changed, lambda now, count: replace(now, cpu_threads=count))
        header.bar.dragged.connect(self._on_dragged)
        for source in (header.bar, options):
            source.gesture_began.connect(self._begin_gesture)
            source.gesture_ended.connect(self._end_gesture)
        self.remedies.chosen.connect(self._on_remedy)
        self._finder.found.connect(self._model.set_fit)
        self._finder.found.connect(self._schedule)
        self.footer.load_requested.connect(self.load_requested)
        self.footer.apply_requested.connect(self.apply_requested)
        self.footer.cancel_requested.connect(self.cancel_requested)
        self.footer.undo_requested.connect(self.undo)
        for key, slot in (
            (QKeySequence.StandardKey.Undo, self.undo),
            (QKeySequence("Ctrl+Shift+Z"), self.redo),
        ):
            shortcut = QShortcut(key, self)
            shortcut.setContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
            shortcut.activated.connect(slot)
