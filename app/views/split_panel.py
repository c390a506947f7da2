"""The split panel: which devices take how much of the model, and what that costs.

Controls ask for other settings; a change is planned and shown at most once per turn of the event
loop, however many mouse events a drag sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QSpinBox, QVBoxLayout, QWidget

from app.plan_source import PlannerFactory
from app.split_figures import rank_labels, short_name
from app.split_model import LoadState, SplitModel, SplitPicture
from app.split_settings import MAX_CPU_RANKS, SplitSettings
from app.views.controls import ignore_wheel, keep_margin, label, line, show_number
from app.views.device_row import DeviceRow
from app.views.load_footer import LoadFooter
from app.views.load_options import LoadOptions
from app.views.split_header import SplitHeader
from app.views.split_summary import MemoryComparison, SplitSummary
from engine import DeviceInfo, DeviceSnapshot, LoadParams, ModelInfo, ModelLoaded, Planner

MIN_WIDTH = 360


class SplitPanel(QWidget):
    """Choose devices, shares and context; see bytes per device before and after loading.

    Args:
        planner_factory: opens a model file for planning.
    """

    load_requested = Signal()
    cancel_requested = Signal()
    eject_requested = Signal()
    settings_changed = Signal()

    def __init__(
        self, planner_factory: PlannerFactory = Planner, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._model = SplitModel(planner_factory)
        self.rows: list[DeviceRow] = []
        self._refresh_timer = QTimer(self, singleShot=True, interval=0)
        self._refresh_timer.timeout.connect(self._refresh)
        self._build()
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
        self._model.set_model(info)
        self.options.set_model_context(self._model.n_ctx_train)
        self.summary.set_speed(0.0)
        self._schedule()

    def set_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Use the latest memory figures; while loading those from before stay."""
        self._model.set_snapshots(snapshots)
        self._schedule()

    def set_state(self, state: LoadState) -> None:
        self._model.set_state(state)
        if state != "loaded":
            self.summary.set_speed(0.0)  # it was another model's, or another split's
        self._inputs.setEnabled(state != "loading")
        self.set_progress(0.0)
        self._schedule()

    def set_loaded(self, loaded: ModelLoaded) -> None:
        """The model is loaded: show what was predicted against what was measured."""
        self.set_state("loaded")
        self._model.loaded = loaded

    def set_progress(self, done: float) -> None:
        """Show which part of the load is done, 0 to 1."""
        self.footer.set_progress(done)

    def set_speed(self, tokens_per_s: float) -> None:
        self.summary.set_speed(tokens_per_s)

    # what the window asks

    def load_params(self) -> LoadParams:
        """What the person chose.

        Raises:
            EngineError: there is no device.
        """
        return self._model.load_params()

    def state(self) -> dict[str, Any]:
        """The settings for a JSON file."""
        return self._model.to_dict()

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take settings from `state` back, now or when devices are known."""
        self._model.restore(data)
        self._schedule()

    # changes by the person

    def _change(self, settings: SplitSettings) -> None:
        self._schedule()  # also where nothing changes: a control may show what was not accepted
        if self._model.change(settings):
            self.settings_changed.emit()

    def _schedule(self) -> None:
        if not self._refresh_timer.isActive():
            self._refresh_timer.start()

    # showing

    def _refresh(self) -> None:
        if not self._model.settings.ranks:
            return
        picture, loaded = self._model.picture(), self._model.loaded
        self._show_rows(picture)
        self.header.set_rows(picture.settings.mode, picture.rows)
        self.options.set_settings(picture.settings, picture.n_ctx)
        self.summary.set_plan(picture.plan, has_model=self._model.info is not None)
        self.comparison.set_loaded(loaded, rank_labels(loaded.params.devices if loaded else ()))
        self.problem.setText("\n".join(picture.problems))
        self.problem.setVisible(bool(picture.problems))
        self.footer.show_state(
            self._model.load_state, can_load=picture.can_load, has_changed=picture.has_changed
        )

    def _show_rows(self, picture: SplitPicture) -> None:
        if tuple(row.colour for row in self.rows) != picture.colours:
            self._remake_rows(picture.colours)
        settings = picture.settings
        is_single = settings.mode == "single"
        shown = {figures.index: figures for figures in picture.rows}
        for index, row in enumerate(self.rows):
            row.setVisible(index in shown)
            if index in shown:
                row.set_figures(
                    shown[index],
                    has_slider=not is_single and len(settings.active) > 1,
                    measured=picture.measured.get(index),
                )
        has_gpu = any(rank.device != "cpu" for rank in settings.ranks)
        self._cpu_ranks_host.setVisible(not has_gpu)
        show_number(self.cpu_ranks, 1 if is_single else settings.n_cpu_ranks)

    def _remake_rows(self, colours: Sequence[int]) -> None:
        """Have one row per rank; those that fit stay, so that a focus in them stays."""
        while self.rows and [row.colour for row in self.rows] != list(colours[: len(self.rows)]):
            self.rows.pop().deleteLater()
        for index in range(len(self.rows), len(colours)):
            row = DeviceRow(index, colours[index])
            row.share_changed.connect(self._on_share)
            row.switched.connect(self._on_switched)
            self._rows_layout.addWidget(row)
            self.rows.append(row)

    def _on_share(self, index: int, share: float) -> None:
        self._change(self._model.settings.with_share(index, share))

    def _on_switched(self, index: int, is_on: bool) -> None:
        self._change(self._model.settings.with_rank_on(index, is_on))

    # building

    def _build(self) -> None:
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        self.setMinimumWidth(MIN_WIDTH)
        self.footer = LoadFooter()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(self._make_scroll_area(), 1)
        layout.addWidget(self._make_verdict())
        layout.addWidget(self.footer)

    def _make_scroll_area(self) -> QScrollArea:
        self.comparison = MemoryComparison()
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(16, 8, 16, 8)
        column.setSpacing(10)
        column.addWidget(self._make_inputs())
        column.addWidget(self.comparison)
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidget(content)
        scroll.setWidgetResizable(True)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # its fields scroll into view
        keep_margin(scroll, column)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        return scroll

    def _make_inputs(self) -> QWidget:
        """Everything that is locked while a model loads."""
        self.header = SplitHeader()
        self.options = LoadOptions()
        self.unusable = label(role="muted")
        self.unusable.setWordWrap(True)
        self.unusable.hide()
        self._rows_layout = QVBoxLayout()
        self._rows_layout.setSpacing(0)
        self._inputs = QWidget()
        layout = QVBoxLayout(self._inputs)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(self.header)
        layout.addLayout(self._rows_layout)
        for widget in (self.unusable, self._make_cpu_ranks(), line(), self.options):
            layout.addWidget(widget)
        return self._inputs

    def _make_cpu_ranks(self) -> QWidget:
        self.cpu_ranks = QSpinBox()
        self.cpu_ranks.setRange(1, MAX_CPU_RANKS)
        self.cpu_ranks.setAccessibleName("CPU ranks")
        self.cpu_ranks.setToolTip("Split the model over several virtual devices of the CPU")
        ignore_wheel(self.cpu_ranks)
        self._cpu_ranks_host = QWidget()
        layout = QHBoxLayout(self._cpu_ranks_host)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(label("CPU ranks", "muted"), 1)
        layout.addWidget(self.cpu_ranks)
        return self._cpu_ranks_host

    def _make_verdict(self) -> QWidget:
        """What fits and what it costs; below the scroll area, so that it is always in view."""
        self.summary = SplitSummary()
        self.problem = label(role="shortage")
        self.problem.setWordWrap(True)
        self.problem.hide()
        verdict = QWidget()
        layout = QVBoxLayout(verdict)
        layout.setContentsMargins(16, 6, 16, 0)
        layout.setSpacing(8)
        layout.addWidget(self.problem)
        layout.addWidget(self.summary)
        return verdict

    def _connect(self) -> None:
        def on(signal: Any, make: Callable[..., SplitSettings]) -> None:
            """Let a signal ask for the settings that `make` gives, from the present and its own."""
            signal.connect(lambda *args: self._change(make(self._model.settings, *args)))

        header, options = self.header, self.options
        on(header.mode_chosen, lambda now, mode: now.with_mode(mode))
        on(header.even_requested, lambda now: now.with_weights([1.0] * len(now.ranks)))
        on(header.by_memory_requested, lambda _: self._model.split_by_memory())
        on(header.bar.dragged, lambda now, handle, x: now.with_boundary(handle, x))
        on(header.bar.stepped, lambda _, handle, notches: self._model.stepped(handle, notches))
        on(self.cpu_ranks.valueChanged, lambda now, count: now.with_cpu_ranks(count))
        on(options.context_changed, lambda now, n_ctx: replace(now, n_ctx=n_ctx))
        on(options.kv_type_changed, lambda now, kv_type: replace(now, kv_type=kv_type))
        on(options.threads_changed, lambda now, count: replace(now, cpu_threads=count))
        self.footer.load_requested.connect(self.load_requested)
        self.footer.cancel_requested.connect(self.cancel_requested)
        self.footer.eject_requested.connect(self.eject_requested)
