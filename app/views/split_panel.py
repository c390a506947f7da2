"""The split panel: which devices take how much of the model, and what that costs.

The panel holds one `SplitSettings`. Controls ask for another one; a change is planned and shown at
most once per turn of the event loop, however many mouse events a drag sends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QSpinBox, QVBoxLayout, QWidget

from app.plan_source import PlannerFactory, PlanSource
from app.split_figures import (
    Context,
    RowFigures,
    outside_bytes,
    plan_by_rank,
    rank_colour,
    rank_labels,
    row_figures,
    short_name,
    shortages,
)
from app.split_settings import (
    MAX_CPU_RANKS,
    SplitSettings,
    default_settings,
    from_dict,
    is_same_load,
    to_dict,
)
from app.split_steps import step_boundary
from app.views.controls import ignore_wheel, label, line
from app.views.device_row import DeviceRow
from app.views.load_footer import LoadFooter, LoadState
from app.views.load_options import LoadOptions
from app.views.split_header import SplitHeader
from app.views.split_summary import SplitSummary
from engine import (
    DeviceInfo,
    DeviceSnapshot,
    EngineError,
    LoadParams,
    ModelInfo,
    ModelLoaded,
    Plan,
    Planner,
)

TENSOR_NOTCH = 0.01


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
        self._plans = PlanSource(planner_factory)
        self._settings = SplitSettings()
        self._saved: Mapping[str, Any] | None = None
        self._devices: tuple[DeviceInfo, ...] = ()
        self._snapshots: tuple[DeviceSnapshot, ...] = ()
        self._outside: dict[str, int] = {}
        self._state: LoadState = "empty"
        self._loaded: ModelLoaded | None = None
        self._model_error = ""
        self._rows: dict[int, DeviceRow] = {}
        self._refresh_timer = QTimer(self, singleShot=True, interval=0)
        self._refresh_timer.timeout.connect(self._refresh)
        self._build()
        self._connect()

    # what the window tells

    def set_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Offer these devices; settings made before are kept for those that are still here."""
        saved = self._saved or (to_dict(self._settings) if self._devices else None)
        self._devices = tuple(devices)
        self._settings = from_dict(saved, devices) if saved else default_settings(devices)
        self._plans.set_free(self._free())
        self._show_unusable()
        self._schedule()

    def set_model(self, info: ModelInfo | None) -> None:
        """Plan for this model; None is no model."""
        self._model_error = ""
        try:
            self._plans.open(info)
        except EngineError as error:
            self._model_error = _sentence(error)
        n_ctx_train = info.n_ctx_train if info else 0
        self.options.set_model_context(n_ctx_train)
        n_ctx = self._settings.n_ctx
        if n_ctx and n_ctx_train and n_ctx > n_ctx_train:
            self._settings = dataclasses.replace(self._settings, n_ctx=n_ctx_train)
        self.summary.set_speed(0.0)
        self._schedule()

    def set_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Use the latest memory figures; while loading those from before stay."""
        self._snapshots = tuple(snapshots)
        if self._state != "loading":
            self._outside = outside_bytes(snapshots, self._loaded)
            self._plans.set_free(self._free())
        self._schedule()

    def set_state(self, state: LoadState) -> None:
        self._state = state
        if state in ("empty", "ready"):
            self._loaded = None
        self._inputs.setEnabled(state != "loading")
        self.set_progress(0.0)
        self._schedule()

    def set_loaded(self, loaded: ModelLoaded) -> None:
        """The model is loaded: show what was predicted against what was measured."""
        self.set_state("loaded")
        self._loaded = loaded
        self._schedule()

    def set_progress(self, done: float) -> None:
        """Args:
        done: part of the load that is done, 0 to 1.
        """
        self.footer.set_progress(done)

    def set_speed(self, tokens_per_s: float) -> None:
        self.summary.set_speed(tokens_per_s)

    # what the window asks

    def load_params(self) -> LoadParams:
        """What the person chose.

        Raises:
            EngineError: there is no device.
        """
        info = self._plans.info
        return self._settings.load_params(info.path if info else "")

    def state(self) -> dict[str, Any]:
        """The settings for a JSON file."""
        if not self._devices and self._saved is not None:
            return dict(self._saved)
        return to_dict(self._settings)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take settings from `state` back, now or when devices are known."""
        self._saved = data
        if self._devices:
            self._settings = from_dict(data, self._devices)
            self._schedule()

    # changes by the person

    def _change(self, settings: SplitSettings) -> None:
        if settings == self._settings:
            self._schedule()  # a control may show what was not accepted
            return
        self._settings = settings
        self._saved = None
        self._schedule()
        self.settings_changed.emit()

    def _on_step(self, handle: int, notches: int) -> None:
        notch = TENSOR_NOTCH
        if self._settings.mode == "layer" and self._plans.info:
            notch = 1 / max(1, self._plans.info.n_layer)
        try:
            changed = step_boundary(self._settings, handle, notches, notch, self._plans.boundary)
        except EngineError:
            changed = self._settings.with_boundary(
                handle, self._settings.boundary(handle) + notches * notch
            )
        self._change(changed)

    def _on_by_memory(self) -> None:
        free, ranks = self._free(), self._settings.ranks
        n_on = Counter(rank.device for rank in ranks if rank.is_on)
        weights = [free[rank.device] / max(1, n_on[rank.device]) for rank in ranks]
        self._change(self._settings.with_weights(weights))

    def _free(self) -> dict[str, int]:
        """Bytes by device that the model could have."""
        return {
            device.id: max(0, device.total_bytes - self._outside[device.id])
            if device.id in self._outside
            else device.free_bytes
            for device in self._devices
        }

    # showing

    def _schedule(self) -> None:
        if not self._refresh_timer.isActive():
            self._refresh_timer.start()

    def _refresh(self) -> None:
        if not self._settings.ranks:
            return
        plan, error = self._plan()
        context = self._context(plan)
        rows = row_figures(self._settings, context)
        self._show_rows(rows, context)
        self.header.set_rows(self._settings.mode, rows)
        self.summary.set_plan(plan)
        self.summary.set_loaded(self._loaded, self._loaded_labels())
        self._show_options(plan)
        problems = [error] if error else shortages(rows)
        self.problem.setText("\n".join(problems))
        self.problem.setVisible(bool(problems))
        can_load = self._plans.info is not None and not error
        self.footer.show_state(self._state, can_load=can_load, has_changed=self._has_changed())

    def _plan(self) -> tuple[Plan | None, str]:
        """The plan, or a sentence why there is none."""
        if self._model_error:
            return None, self._model_error
        try:
            return self._plans.plan(self._settings), ""
        except EngineError as error:
            return None, _sentence(error)

    def _context(self, plan: Plan | None) -> Context:
        return Context(
            devices={device.id: device for device in self._devices},
            snapshots={snapshot.device: snapshot for snapshot in self._snapshots},
            outside=self._outside,
            by_rank=plan_by_rank(self._settings, plan),
        )

    def _show_rows(self, rows: Sequence[RowFigures], context: Context) -> None:
        colours = [
            rank_colour(self._settings, context, i) for i in range(len(self._settings.ranks))
        ]
        for index in [i for i, row in self._rows.items() if [row.colour] != colours[i : i + 1]]:
            self._rows.pop(index).deleteLater()
        for index, colour in enumerate(colours):
            if index not in self._rows:
                self._rows[index] = self._make_row(index, colour)
        measured = self._measured()
        is_single = self._settings.mode == "single"
        n_on = len(self._settings.active)
        shown = {row.index: row for row in rows}
        for index, widget in self._rows.items():
            widget.setVisible(index in shown)
            if index in shown:
                widget.set_figures(
                    shown[index],
                    has_slider=not is_single and n_on > 1,
                    measured=measured.get(index),
                )
        has_gpu = any(rank.device != "cpu" for rank in self._settings.ranks)
        self._cpu_ranks_host.setVisible(not has_gpu)
        self.cpu_ranks.blockSignals(True)
        self.cpu_ranks.setValue(1 if is_single else self._settings.n_cpu_ranks)
        self.cpu_ranks.blockSignals(False)

    def _show_options(self, plan: Plan | None) -> None:
        info = self._plans.info
        n_ctx_train = info.n_ctx_train if info else 0
        n_ctx = plan.n_ctx if plan else self.load_params().context_for(n_ctx_train)
        self.options.set_settings(self._settings, n_ctx)

    def _show_unusable(self) -> None:
        texts = [f"{short_name(d.name)}: {d.reason}" for d in self._devices if not d.usable]
        self.unusable.setText("\n".join(texts))
        self.unusable.setVisible(bool(texts))

    def _has_changed(self) -> bool:
        if self._loaded is None:
            return False
        n_ctx_train = self._loaded.info.n_ctx_train
        return not is_same_load(self.load_params(), self._loaded.params, n_ctx_train)

    def _measured(self) -> dict[int, int]:
        """Measured bytes by rank, as long as the settings are those that are loaded."""
        if self._loaded is None or self._has_changed():
            return {}
        totals = [memory.measured.total for memory in self._loaded.memory]
        return dict(zip(self._settings.active, totals, strict=False))

    def _loaded_labels(self) -> list[str]:
        devices = self._loaded.params.devices if self._loaded else ()
        return rank_labels(devices)

    # building

    def _build(self) -> None:
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        self.header = SplitHeader()
        self.options = LoadOptions()
        self.summary = SplitSummary()
        self.footer = LoadFooter()
        self.problem = label(role="danger")
        self.problem.setWordWrap(True)
        self.problem.hide()
        self.unusable = label(role="muted")
        self.unusable.setWordWrap(True)
        self.unusable.hide()
        self._rows_layout = QVBoxLayout()
        self._rows_layout.setSpacing(0)
        self._inputs = QWidget()
        inputs = QVBoxLayout(self._inputs)
        inputs.setContentsMargins(0, 0, 0, 0)
        inputs.setSpacing(8)
        inputs.addWidget(self.header)
        inputs.addLayout(self._rows_layout)
        for widget in (self.unusable, self._make_cpu_ranks(), line(), self.options):
            inputs.addWidget(widget)
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(16, 8, 16, 8)
        column.setSpacing(10)
        for widget in (self._inputs, self.problem, self.summary):
            column.addWidget(widget)
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidget(content)
        scroll.setWidgetResizable(True)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(scroll, 1)
        layout.addWidget(self.footer)
        self.setMinimumWidth(340)

    def _make_cpu_ranks(self) -> QWidget:
        self._cpu_ranks_host = QWidget()
        self.cpu_ranks = QSpinBox()
        self.cpu_ranks.setRange(1, MAX_CPU_RANKS)
        self.cpu_ranks.setAccessibleName("CPU ranks")
        self.cpu_ranks.setToolTip("Split the model over several virtual devices of the CPU")
        ignore_wheel(self.cpu_ranks)
        layout = QHBoxLayout(self._cpu_ranks_host)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(label("CPU ranks", "muted"), 1)
        layout.addWidget(self.cpu_ranks)
        return self._cpu_ranks_host

    def _make_row(self, index: int, colour: int) -> DeviceRow:
        row = DeviceRow(index, colour)
        row.share_changed.connect(
            lambda i, share: self._change(self._settings.with_share(i, share))
        )
        row.switched.connect(lambda i, is_on: self._change(self._settings.with_rank_on(i, is_on)))
        self._rows_layout.insertWidget(index, row)
        return row

    def _connect(self) -> None:
        def change(make: Callable[..., SplitSettings]) -> Callable[..., None]:
            return lambda *args: self._change(make(*args))

        def replaced(name: str) -> Callable[..., None]:
            return change(lambda value: dataclasses.replace(self._settings, **{name: value}))

        self.header.mode_chosen.connect(change(lambda mode: self._settings.with_mode(mode)))
        self.header.even_requested.connect(
            change(lambda *_: self._settings.with_weights([1.0] * len(self._settings.ranks)))
        )
        self.header.by_memory_requested.connect(self._on_by_memory)
        self.header.bar.dragged.connect(change(lambda h, x: self._settings.with_boundary(h, x)))
        self.header.bar.stepped.connect(self._on_step)
        self.cpu_ranks.valueChanged.connect(change(lambda n: self._settings.with_cpu_ranks(n)))
        self.options.context_changed.connect(replaced("n_ctx"))
        self.options.kv_type_changed.connect(replaced("kv_type"))
        self.options.threads_changed.connect(replaced("cpu_threads"))
        self.footer.load_requested.connect(self.load_requested)
        self.footer.cancel_requested.connect(self.cancel_requested)
        self.footer.eject_requested.connect(self.eject_requested)


def _sentence(error: EngineError) -> str:
    return f"{error.message} {error.hint}".strip()
