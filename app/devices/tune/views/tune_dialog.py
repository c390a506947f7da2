"""The tuning dialog: an estimate, live results, the winner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QStandardItemModel
from PySide6.QtWidgets import (
    QComboBox,
    QDialog,
    QHBoxLayout,
    QHeaderView,
    QProgressBar,
    QSpinBox,
    QTableView,
    QVBoxLayout,
    QWidget,
)

import engine
from app.core.notice import Notice
from app.core.translation import tr, tr_later, translated
from app.core.units import decimal
from app.devices.split.figures import rank_labels
from app.devices.tune.results import (
    GOAL_TEXTS,
    Point,
    estimate_text,
    point_of,
    request_rate,
    result_text,
)
from app.devices.tune.views.tune_plot import TunePlot
from app.widgets.banner import Banner
from app.widgets.buttons import button
from app.widgets.layout import fill
from app.widgets.text import label, plain_tip, row_item, unbroken
from app.widgets.theme import px, set_role
from engine import EngineError

if TYPE_CHECKING:
    from engine import Goal, Region, Trial, TuneEstimate, TuneResult

State = Literal["ready", "running", "done"]
MIN_S, MAX_S = 5, 3600  # range of the time limit, in seconds
ASK_MS: Final = 250  # milliseconds from a change of the time limit to a new estimate
SHOWN_MS: Final = 60
"""Milliseconds from opening to the first estimate, which holds the GIL and so delays painting."""
HEADERS = (
    tr_later("Split"), tr_later("Prompt tok/s"), tr_later("Answer tok/s"),
    tr_later("Overall tok/s"),
    tr_later("Measured"),
)  # fmt: skip
COUNTING: Final = tr_later("Planning the search …")


class TuneDialog(QDialog):
    """Dialog with a search's estimate and results; emits requests to start, stop or apply it."""

    estimate_requested = Signal(str, object)  # goal, seconds or None
    start_requested = Signal(str, float)  # goal, seconds
    cancel_requested = Signal()
    apply_requested = Signal(object)  # LoadParams of the winner

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Find the best split"))
        self.resize(720, 660)
        self.state: State = "ready"
        self._trials: list[Trial] = []
        self._devices: tuple[str, ...] = ()
        self._note = ""
        self._estimate: TuneEstimate | None = None
        self._result: TuneResult | None = None
        self._ask = QTimer(self, singleShot=True, interval=ASK_MS)
        self._ask.timeout.connect(self._ask_estimate)
        self._first_ask = QTimer(self, singleShot=True, interval=SHOWN_MS)
        self._first_ask.timeout.connect(self._ask_default_estimate)
        self._make_fields()
        self._make_results()
        self._make_buttons()
        self._build()
        self._set_state("ready")

    def open_for(self, devices: Sequence[str], note: str = "") -> None:
        """Open for a new search over these devices, or show the running search.

        Args:
            note: sentence about what the search ignores.
        """
        if self.state != "running":
            self._devices, self._note = tuple(devices), note
            self._forget()
            self._set_state("ready")
            self._estimate = None
            self.what.setText(tr(COUNTING))
            self._first_ask.start()
        self.show()
        self.raise_()
        self.activateWindow()

    def show_estimate(self, estimate: TuneEstimate, regions: Sequence[Region] = ()) -> None:
        """Show a search's estimate, and shade the shares that do not fit."""
        self._estimate = estimate
        self.what.setText(f"{estimate_text(estimate)} {self._note}".strip())
        if not self.budget.hasFocus():
            self.budget.blockSignals(True)
            self.budget.setValue(round(estimate.budget_s))
            self.budget.blockSignals(False)
        self._show_regions(regions)
        self._set_state(self.state)

    def wait(self) -> None:
        """Show that the search is waiting for the engine."""
        self.outcome.setText(tr("The search starts as soon as the engine is free …"))
        self.progress.setRange(0, 0)
        self._set_state("running")

    def begin(self, estimate: TuneEstimate) -> None:
        """Show that the search has started."""
        self._forget()
        self._estimate = estimate
        self.what.setText(f"{estimate_text(estimate)} {self._note}".strip())
        self.progress.setRange(0, max(1, estimate.n_trials))
        self.progress.setValue(0)
        self._set_state("running")

    def add_trial(self, trial: Trial, n_done: int, n_trials: int, best: Trial | None) -> None:
        """Show a new trial, or new measurements from a repeated trial."""
        same = (at for at, known in enumerate(self._trials) if known.params == trial.params)
        at = next(same, None)
        if at is None:
            self._trials.append(trial)
        else:
            self._trials[at] = trial
        self.progress.setRange(0, max(1, n_trials))
        self.progress.setValue(n_done)
        self._show_trials(best)
        text = tr("{n} of about {total}")
        if best is not None:
            text = tr("{n} of about {total} · best so far: {split}")
        split = point_of(best, self._goal, self._devices).text if best is not None else ""
        self.outcome.setText(text.format(n=n_done, total=n_trials, split=split))

    def finish(self, result: TuneResult) -> None:
        """Show the result of the search."""
        self._result = result
        self._trials = list(result.trials)
        self._show_regions(result.regions)
        self._show_trials(result.winner)
        self.outcome.setText(unbroken(result_text(result)))
        self._set_state("done")
        if self.apply.isEnabled():
            self.apply.setFocus()

    def fail(self, error: EngineError) -> None:
        """Show why an estimate or a search failed."""
        self.banner.show_notice(Notice.of(error))
        self.outcome.setText("")
        if self._estimate is None:
            self.what.setText("")
        self._set_state("ready" if not self._trials else "done")

    def choose(self, goal: str, budget_s: float) -> None:
        """Set the goal and the time limit."""
        self.goal.setCurrentIndex(self.goal.findData(goal))
        self.budget.setValue(round(budget_s))

    @property
    def _goal(self) -> Goal:
        return engine.GOALS[self.goal.currentData()]

    def _ask_estimate(self) -> None:
        self.estimate_requested.emit(self.goal.currentData(), float(self.budget.value()))

    def _on_budget(self) -> None:
        self._first_ask.stop()
        self._ask.start()

    def _on_goal(self) -> None:
        self.what.setText(tr(COUNTING))
        self._ask_default_estimate()

    def _ask_default_estimate(self) -> None:
        """Request an estimate with the default time limit."""
        self.estimate_requested.emit(self.goal.currentData(), None)

    def _on_start(self) -> None:
        if self.state == "running":
            self.cancel.setEnabled(False)
            self.cancel_requested.emit()
            return
        self._forget()
        self.start_requested.emit(self.goal.currentData(), float(self.budget.value()))

    def _on_apply(self) -> None:
        winner = self._result.winner if self._result else None
        if winner is not None:
            self.apply_requested.emit(winner.params)
            self.close()

    def _set_state(self, state: State) -> None:
        self.state = state
        is_running = state == "running"
        for field in (self.goal, self.budget):
            field.setEnabled(not is_running)
        self.start.setVisible(not is_running)
        self.start.setEnabled(self._estimate is not None)
        self.start.setText(tr("Search again") if state == "done" else tr("Start"))
        self.cancel.setVisible(is_running)
        self.cancel.setEnabled(True)
        self.progress.setVisible(is_running)
        winner = self._result.winner if self._result else None
        self.apply.setEnabled(state == "done" and winner is not None)
        set_role(self.apply, "primary" if self.apply.isEnabled() else "")
        set_role(self.start, "" if self.apply.isEnabled() else "primary")

    def _forget(self) -> None:
        self._trials, self._result = [], None
        self.banner.dismiss()
        self.outcome.setText("")
        self.progress.setValue(0)
        self._rows.setRowCount(0)
        self.plot.show_points((), None)

    def _show_trials(self, best: Trial | None) -> None:
        goal, devices = self._goal, self._devices
        points = [point_of(trial, goal, devices) for trial in self._trials]
        at = next((n for n, t in enumerate(self._trials) if best and t.params == best.params), None)
        self.plot.show_points(points, at)
        self._rows.setRowCount(len(points))
        for row, (trial, point) in enumerate(zip(self._trials, points, strict=True)):
            for column, text in enumerate(_row_texts(trial, point, goal, is_best=row == at)):
                tip = translated(trial.problem or trial.predicted_reason)
                self._rows.setItem(row, column, row_item(text, tip))
        if at is not None:
            self.table.scrollTo(self._rows.index(len(points) - 1, 0))

    def _show_regions(self, regions: Sequence[Region]) -> None:
        first = rank_labels(self._devices)[0] if self._devices else ""
        spans = [(region.start, region.stop) for region in regions]
        self.plot.show_regions(spans, first)

    # widgets

    def _make_fields(self) -> None:
        self.goal = QComboBox()
        for name, (text, tip) in GOAL_TEXTS.items():
            self.goal.addItem(tr(text), name)
            self.goal.setItemData(
                self.goal.count() - 1, plain_tip(tr(tip)), Qt.ItemDataRole.ToolTipRole
            )
        self.goal.setAccessibleName(tr("Optimise for"))
        self.goal.currentIndexChanged.connect(self._on_goal)
        self.budget = QSpinBox()
        self.budget.setRange(MIN_S, MAX_S)
        self.budget.setSuffix(" s")
        self.budget.setSingleStep(10)
        self.budget.setAccessibleName(tr("Time limit in seconds"))
        self.budget.setMinimumWidth(px(90))
        self.budget.valueChanged.connect(self._on_budget)
        self.what = label()
        self.what.setWordWrap(True)

    def _make_results(self) -> None:
        self.progress = QProgressBar()
        self.progress.setAccessibleName(tr("Completed runs"))
        self.plot = TunePlot()
        self.outcome = label()
        self.outcome.setWordWrap(True)
        self._rows = QStandardItemModel(0, len(HEADERS), self)
        self._rows.setHorizontalHeaderLabels([tr(text) for text in HEADERS])
        self.table = QTableView()
        self.table.setModel(self._rows)
        self.table.setAccessibleName(tr("Splits tried"))
        self.table.setShowGrid(False)
        self.table.setTabKeyNavigation(False)
        self.table.verticalHeader().hide()
        self.table.verticalHeader().setDefaultSectionSize(26)
        self.table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        self.table.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        header = self.table.horizontalHeader()
        header.setHighlightSections(False)
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
        self.banner = Banner()

    def _make_buttons(self) -> None:
        self.start = button(tr("Start"), "primary")
        self.start.clicked.connect(self._on_start)
        self.cancel = button(tr("Stop"), name=tr("Stop the search"))
        self.cancel.clicked.connect(self._on_start)
        self.apply = button(tr("Apply"), name=tr("Use the best split"))
        self.apply.clicked.connect(self._on_apply)
        self.close_button = button(tr("Close"))
        self.close_button.clicked.connect(self.close)
        for each in (self.cancel, self.apply, self.close_button):
            each.setAutoDefault(False)

    def _build(self) -> None:
        fields = QHBoxLayout()
        for text, field in ((tr("Optimise for"), self.goal), (tr("Time limit"), self.budget)):
            caption = label(text, "muted")
            caption.setBuddy(field)
            fill(fields, caption, field, 12)
        fields.addStretch()
        right = self.apply, self.cancel, self.start
        buttons = fill(QHBoxLayout(), self.close_button, None, *right)
        fill(
            QVBoxLayout(self), self.banner, fields, self.what, self.progress, (self.plot, 3),
            self.outcome, (self.table, 2), buttons, margins=(20, 16, 20, 16), spacing=10,
        )  # fmt: skip

    def closeEvent(self, event: QCloseEvent) -> None:
        self._ask.stop()
        self._first_ask.stop()
        if self.state == "running":
            self.cancel_requested.emit()
        event.accept()  # Qt's default would call `reject`

    def reject(self) -> None:
        if self.state == "running":
            self._on_start()
        else:
            super().reject()


def _row_texts(trial: Trial, point: Point, goal: Goal, *, is_best: bool) -> tuple[str, ...]:
    text = tr("Best · {split}").format(split=point.text) if is_best else point.text
    if not point.can_run:
        return text, "–", "–", tr("cannot run"), ""
    rates = (trial.prefill_ts, trial.decode_ts, request_rate(trial, goal))
    how = tr("alternately") if trial.is_final else tr("once")
    return text, *(decimal(f"{rate:.1f}") for rate in rates), how
