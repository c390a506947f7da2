"""What stands in the monitor's title bar: which view and graphs are shown, and the export."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QHBoxLayout, QMenu, QPushButton, QWidget

from app.core.translation import tr
from app.devices.monitor.figures import FIGURES, RATE
from app.widgets.buttons import IconButton, button
from app.widgets.text import set_tip


class MonitorHead(QWidget):
    """Buttons of the monitor."""

    chosen = Signal(bool, object)  # whether the overview is shown; names of the graphs
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
        set_tip(self.graphs, tr("Choose what is drawn"))
        self.graphs.setMenu(self._make_menu())
        self.save = IconButton("save", tr("Save what is shown"), self, size=14)
        self.save.setMenu(self._make_save_menu())
        self.save.setPopupMode(IconButton.ToolButtonPopupMode.InstantPopup)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        for widget in (self.overview, self.graphs, self.save):
            row.addWidget(widget)

    def show_choice(self, is_overview: bool, graphs: Sequence[str]) -> None:
        """Show which view and which graphs are chosen."""
        self._is_overview, self._graphs = is_overview, tuple(graphs)
        self.overview.setChecked(is_overview)
        self.graphs.setEnabled(not is_overview)
        for name, action in self._actions.items():
            action.setChecked(name in graphs)
            action.setEnabled(len(graphs) > 1 or name not in graphs)  # one at least

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
            (tr("As a table (CSV)…"), ".csv"), (tr("As a picture (PNG)…"), ".png"),
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
    """Return the names of all graphs in the order of the window."""
    first = ("memory", "load")
    return (*first, RATE, *(name for name in FIGURES if name not in first))


def graph_title(name: str) -> str:
    return tr("Tokens per second") if name == RATE else tr(FIGURES[name].title)
