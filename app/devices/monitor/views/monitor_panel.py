"""Graphs of the last two minutes, or an overview of all devices.

Drawing slows generation, so everything is drawn once per snapshot, and not at all while the panel
is hidden.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QMenu,
    QPushButton,
    QScrollArea,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_n
from app.core.units import GIB, decimal, drafts_text
from app.devices.monitor.record import DEFAULT_GRAPHS, FIGURES, RATE, MonitorRecord
from app.devices.monitor.views.graph import WINDOW_S, HistoryPlot, TimelinePlot
from app.devices.monitor.views.overview import DeviceState, Overview
from app.devices.split.figures import rank_labels, short_name
from app.widgets.buttons import IconButton, button
from app.widgets.layout import NO_MARGINS, fill, scaled
from app.widgets.text import ElidedLabel, set_tip
from app.widgets.theme import theme_signals
from engine import DeviceInfo, DeviceSnapshot, Finished, TokenTimes


class MonitorHead(QWidget):
    """The monitor's buttons."""

    chosen = Signal(bool, object)  # whether the overview is shown; graph names
    export_requested = Signal(str)  # ".csv" or ".png"

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._is_overview = False
        self._graphs: tuple[str, ...] = ()
        self.overview = button(tr("Overview"), "quiet")
        self.overview.setCheckable(True)
        set_tip(self.overview, tr("All devices at a glance, one line each"))
        self.overview.clicked.connect(self._on_overview)
        self.graphs = QPushButton(f"{tr('Graphs')} ▾")
        self.graphs.setProperty("role", "quiet")
        self.graphs.setAccessibleName(tr("Graphs"))
        set_tip(self.graphs, tr("Choose graphs"))
        self.graphs.setMenu(self._make_menu())
        self.save = IconButton("save", tr("Save this view"), self, size=14)
        self.save.setMenu(self._make_save_menu())
        self.save.setPopupMode(IconButton.ToolButtonPopupMode.InstantPopup)
        parts = self.overview, self.graphs, self.save
        fill(QHBoxLayout(self), *parts, margins=NO_MARGINS, spacing=2)

    def show_choice(self, is_overview: bool, graphs: Sequence[str]) -> None:
        """Show which view and which graphs are selected."""
        self._is_overview, self._graphs = is_overview, tuple(graphs)
        self.overview.setChecked(is_overview)
        self.graphs.setEnabled(not is_overview)
        for name, action in self._actions.items():
            action.setChecked(name in graphs)
            action.setEnabled(len(graphs) > 1 or name not in graphs)  # at least one stays selected

    def _make_menu(self) -> QMenu:
        menu = QMenu(self)
        self._actions = {}
        for name in graph_names():
            action = self._actions[name] = menu.addAction(graph_title(name))
            action.setCheckable(True)
            action.triggered.connect(self._on_graph)
        return menu

    def _make_save_menu(self) -> QMenu:
        menu = QMenu(self)
        for text, suffix in (
            (tr("As a table (CSV)…"), ".csv"), (tr("As an image (PNG)…"), ".png"),
        ):  # fmt: skip
            menu.addAction(text).triggered.connect(
                lambda _=False, suffix=suffix: self.export_requested.emit(suffix)
            )
        return menu

    @Slot()
    def _on_overview(self) -> None:
        self.chosen.emit(self.overview.isChecked(), self._graphs)

    @Slot()
    def _on_graph(self) -> None:
        graphs = tuple(name for name, action in self._actions.items() if action.isChecked())
        self.chosen.emit(self._is_overview, graphs)


def graph_names() -> tuple[str, ...]:
    """Return the names of all graphs, in the window's order."""
    first = ("memory", "load")
    return (*first, RATE, *(name for name in FIGURES if name not in first))


def graph_title(name: str) -> str:
    return tr("Tokens per second") if name == RATE else tr(FIGURES[name].title)


MAX_IN_LINE: Final = 4


class MonitorPanel(QWidget):
    """Panel with graphs of snapshots, rates, message marks and token times.

    Attributes:
        plots: graphs by name; only selected ones are visible and drawn.
        timeline: how the ranks spend their time, shown once it has data.
        server: figures from the server that runs the model.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.record = MonitorRecord()
        self._names: dict[str, str] = {}
        self._ranks: tuple[str, ...] = ()
        self._is_overview = False
        self._graphs: tuple[str, ...] = DEFAULT_GRAPHS
        self.plots = {
            name: HistoryPlot(tr(figure.title), figure.unit, figure.top)
            for name, figure in FIGURES.items()
        }
        self.plots[RATE] = HistoryPlot(tr("Tokens per second"), "tok/s")
        self.memory, self.load, self.speed = (self.plots[name] for name in DEFAULT_GRAPHS)
        self.timeline = TimelinePlot()
        self.overview = Overview()
        self._build()
        theme_signals().changed.connect(self._on_theme)

    def choose(self, is_overview: bool, graphs: Sequence[str]) -> None:
        """Show either the overview or these graphs."""
        self._is_overview, self._graphs = is_overview, tuple(graphs)
        self._lay_out()
        self._stack.setCurrentIndex(int(is_overview))
        if self.isVisible() and self.record.latest:
            self._draw()

    def set_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Set the devices' product names."""
        self._names = {device.id: short_name(device.name) for device in devices}

    def add_snapshots(self, snapshots: Sequence[DeviceSnapshot]) -> None:
        """Add a snapshot of each device, and draw."""
        if not snapshots:
            return
        self.record.add(snapshots)
        sizes = [s.total_bytes / GIB for s in snapshots if s.total_bytes]
        if sizes:
            self.memory.set_top(max(sizes))
        if self.isVisible():
            self._draw()

    @Slot(str)
    def show_server(self, text: str) -> None:
        """Show figures from the server that runs the model; "" if none does."""
        self.server.set_full_text(text)
        self.server.setVisible(bool(text))

    def add_rate(self, tokens_per_s: float, n_answers: int = 1) -> None:
        """Add the total rate over all answers, 0 once they finish; drawn with the next snapshot."""
        self.record.add_rate(tokens_per_s, n_answers)

    def note_drafts(self, finished: Finished) -> None:
        """Show an answer's gain from draft tokens; drawn with the next snapshot."""
        usage, gain = finished.usage, finished.timings.draft_gain
        self.record.drafts = drafts_text(usage.n_accepted, usage.n_drafted, gain)

    def set_ranks(self, devices: Sequence[str]) -> None:
        """Set the devices of the loaded model's ranks; empty if there is no model."""
        self._ranks = tuple(devices)
        self.timeline.set_ranks(rank_labels(devices))
        self.timeline.hide()

    def add_times(self, times: TokenTimes) -> None:
        """Add the ranks' times for one token; drawn with the next snapshot."""
        self.timeline.add(time.monotonic(), times)

    def mark_message(self) -> None:
        """Draw a line at the current time."""
        self.record.mark_message()

    def table(self) -> list[list[str]]:
        """Return the visible graphs, or all figures if the overview is visible, as table rows."""
        names = graph_names() if self._is_overview else self._graphs
        return self.record.table(names, self.record.now_s - WINDOW_S)

    def _draw(self) -> None:
        if self._is_overview:
            labels = self.record.labels()
            states = [
                DeviceState(
                    labels[s.device],
                    self._names.get(s.device, ""),
                    self.record.colours[s.device],
                    s,
                )
                for s in self.record.latest
            ]
            self.overview.show_states(states)
            return
        now = self.record.now_s
        marks = self.record.marks(now - WINDOW_S)
        for name in self._graphs:
            plot, history = self.plots[name], self.record.histories[name]
            colours = {RATE: 0} if name == RATE else self.record.colours
            plot.show_history(history, colours, now)
            plot.set_marks([(now - mark.time_s, mark.clock()) for mark in marks])
        self._show_latest()
        self._show_timeline()

    def _show_timeline(self) -> None:
        if not self.timeline.has_data:
            return
        self.timeline.show()
        places = list(self.record.colours)
        colours = [
            (places.index(device) if device in places else len(places))
            + self._ranks[:rank].count(device)
            for rank, device in enumerate(self._ranks)
        ]
        self.timeline.show_until(self.record.now_s, colours)

    def _show_latest(self) -> None:
        labels = self.record.labels()
        for name in self._graphs:
            history, plot = self.record.histories[name], self.plots[name]
            if name == RATE:
                rate = history.last(RATE)
                n = self.record.n_answers if rate > 0 else 0
                note = tr_n("{n} answer", "{n} answers", n) if n > 1 else self.record.drafts
                speed = tr("Speed"), 0, decimal(f"{rate:.1f}")
                plot.set_latest([speed] if rate > 0 else [], note)
                continue
            plot.set_latest(
                [
                    (labels[device], colour, decimal(FIGURES[name].form.format(value)))
                    for device, colour in self.record.colours.items()
                    if not math.isnan(value := history.last(device))
                ]
            )

    def _on_theme(self) -> None:
        self._show_latest()
        self._show_timeline()

    def _build(self) -> None:
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        self.server = ElidedLabel()
        self.server.setProperty("role", "muted")
        self.server.setContentsMargins(16, 8, 16, 0)
        self.server.hide()
        column = QVBoxLayout(self)
        self._stack = QStackedLayout()
        fill(column, self.server, (self._stack, 1), margins=NO_MARGINS, spacing=0)
        self._stack.addWidget(self._make_graphs())
        self._stack.addWidget(self._make_overview())
        self._lay_out()
        scaled(self, self.setMinimumHeight, 120)
        self._show_latest()

    def _make_graphs(self) -> QWidget:
        graphs = QWidget()
        column = self._graph_lines = QVBoxLayout(graphs)
        column.setContentsMargins(16, 10, 16, 8)
        self._lines = QHBoxLayout(), QHBoxLayout()
        for line in self._lines:
            line.setSpacing(24)
            column.addLayout(line)
        for plot in (*self.plots.values(), self.timeline):
            plot.setParent(graphs)
            plot.hide()
        return graphs

    def _make_overview(self) -> QWidget:
        inner = QWidget()
        fill(QVBoxLayout(inner), self.overview, None, margins=(16, 6, 16, 8))
        scroll = QScrollArea()
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setWidgetResizable(True)
        scroll.setWidget(inner)
        return scroll

    def _lay_out(self) -> None:
        shown = [*(self.plots[name] for name in self._graphs), self.timeline]
        n_graphs = len(self._graphs)
        first = n_graphs + 1 if n_graphs <= MAX_IN_LINE else -(-n_graphs // 2)
        for plot in (*self.plots.values(), self.timeline):
            for line in self._lines:
                line.removeWidget(plot)
            if plot is not self.timeline:
                plot.setVisible(plot in shown)
        for at, plot in enumerate(shown):
            self._lines[at >= first].addWidget(plot, 1)
        for at, line in enumerate(self._lines):
            self._graph_lines.setStretch(at, min(1, line.count()))

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self.record.latest:
            self._draw()
