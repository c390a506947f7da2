"""The Links panel: a graph, a table, the cost of communication, and a button to measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QShowEvent, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QHBoxLayout, QHeaderView, QTableView, QVBoxLayout, QWidget

from app.core.translation import tr, tr_later, tr_n
from app.core.units import decimal
from app.devices.interconnect.interconnect import Edge, InterconnectPicture, Node
from app.devices.interconnect.views.interconnect_graph import (
    InterconnectGraph,
    latency_text,
    looks_of,
    rate_text,
    slot_line,
)
from app.widgets.buttons import button
from app.widgets.layout import fill, scaled
from app.widgets.text import label, plain_tip, row_item, set_tip
from app.widgets.theme import set_role

if TYPE_CHECKING:
    from engine import Prediction

HEADERS = (tr_later("Devices"), tr_later("Link"), tr_later("Latency"), tr_later("Speed"))
TIPS = (
    "",
    "",
    tr_later("Time for a one-token all-reduce between two ranks"),
    tr_later("All-reduce bandwidth between two ranks in a long prompt"),
)
SHORT_ROUTES = {
    "PCIe, directly": "PCIe P2P",
    "by the host's memory": tr_later("via host"),
    "the GPU's slot": tr_later("PCIe slot"),
    "own memory": tr_later("memory"),
    "the network": tr_later("network"),
}
"""Short route texts for the table; the full texts are in tooltips."""


class InterconnectPanel(QWidget):
    """Panel with the links and a button to measure them."""

    shown = Signal()  # the content may be outdated
    measure_requested = Signal()
    stop_requested = Signal()
    machines_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        self.graph = InterconnectGraph()
        self.table = QTableView()
        self.cost = label(role="muted")
        self.problems = label(role="shortage")
        self.status = label(role="muted")
        self.measure = button(tr("Measure"), name=tr("Measure devices and links"))
        self.machines = button(tr("Other machines…"), "quiet")
        self._rows = QStandardItemModel(self)
        self._is_measuring = False
        self._is_simulated = False
        self._build()
        self.set_token(None)

    def show_picture(
        self,
        picture: InterconnectPicture,
        devices: Sequence[str],
        labels: Sequence[str],
        *,
        is_simulated: bool = False,
    ) -> None:
        """Show links; `devices` are all device ids in colour order, with their `labels`."""
        looks = looks_of(devices, labels)
        names = {device: look.label for device, look in looks.items()}
        self.graph.show_picture(picture, looks)
        self._fill(picture, names)
        problems = dict.fromkeys(text for edge in picture.edges for text in edge.problems)
        self.problems.setText("\n".join(problems))
        self.problems.setVisible(bool(problems))
        self._is_simulated = is_simulated
        self._show_button()
        if not self._is_measuring:
            has_estimates = not all(edge.is_measured for edge in picture.edges)
            rests = [node for node in picture.nodes if node.slot_at_most]
            estimated = _estimate_text(is_simulated=is_simulated) if has_estimates else ""
            self.set_status(f"{_rest_text(rests, names)} {estimated}")

    def set_token(self, prediction: Prediction | None) -> None:
        """Show the communication cost per token that is predicted for the current split."""
        if prediction is None or len(prediction.ranks) < 2:
            self.cost.setText(tr("A single rank needs no communication."))
            return
        link, total = prediction.path.link_s, prediction.seconds
        part = f"{prediction.part(link):.0%}".replace("%", " %")
        text = tr(
            "Communication takes {part} of the time per token: {time} of {total} ms (predicted)."
        )
        time, ms = decimal(f"{1000 * link:.2f}"), decimal(f"{1000 * total:.1f}")
        self.cost.setText(text.format(part=part, time=time, total=ms))

    def set_measuring(self, is_measuring: bool) -> None:
        """Show whether measurements are running; while they are, the button stops them."""
        self._is_measuring = is_measuring
        self._show_button()

    def set_status(self, text: str, *, is_error: bool = False) -> None:
        """Show a sentence next to the button."""
        set_role(self.status, "shortage" if is_error else "muted")
        self.status.setText(text.strip())

    def _show_button(self) -> None:
        self.measure.setText(tr("Stop") if self._is_measuring else tr("Measure"))
        self.measure.setAccessibleName(
            tr("Stop measuring") if self._is_measuring else tr("Measure devices and links")
        )
        self.measure.setEnabled(not self._is_simulated)
        self.machines.setEnabled(not self._is_simulated)
        set_tip(self.measure,
            tr("These devices are simulated.") if self._is_simulated
            else tr(
                "Takes about a second per device and per pair. Transfers between GPUs are tested "
                "again, and predictions use the results."
            )
        )  # fmt: skip

    def _fill(self, picture: InterconnectPicture, names: dict[str, str]) -> None:
        self._rows.setRowCount(0)
        self.table.clearSpans()
        for node in picture.nodes:
            if node.slot:
                self._rows.appendRow(_slot_row(node, names))
                self.table.setSpan(self._rows.rowCount() - 1, 1, 1, len(HEADERS) - 1)
        for edge in picture.edges:
            self._rows.appendRow(_edge_row(edge, names))
        for column in (0, 2, 3):  # the link column takes the remaining width
            self.table.resizeColumnToContents(column)

    def _set_text_size(self, n_pixels: int) -> None:
        font = self.table.font()
        font.setPixelSize(n_pixels)
        self.table.setFont(font)

    def _build(self) -> None:
        self._rows.setHorizontalHeaderLabels([tr(text) for text in HEADERS])
        for column, tip in enumerate(TIPS):
            self._rows.setHeaderData(
                column, Qt.Orientation.Horizontal, plain_tip(tr(tip)), Qt.ItemDataRole.ToolTipRole
            )
        self.table.setModel(self._rows)
        self.table.setAccessibleName(tr("Links"))
        self.table.setShowGrid(False)
        self.table.setWordWrap(False)
        self.table.setTabKeyNavigation(False)
        self.table.verticalHeader().hide()
        scaled(self.table, self.table.verticalHeader().setDefaultSectionSize, 26)
        scaled(self.table, self._set_text_size, 12)
        self.table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        self.table.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        self.table.setSelectionMode(QTableView.SelectionMode.SingleSelection)
        header = self.table.horizontalHeader()
        header.setSectionResizeMode(1, QHeaderView.ResizeMode.Stretch)
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
        self.problems.hide()
        for text in (self.cost, self.problems, self.status):
            text.setWordWrap(True)
        self.measure.clicked.connect(self._on_button)
        set_tip(self.machines, tr("Run a model across several machines"))
        self.machines.clicked.connect(self.machines_requested)
        top = Qt.AlignmentFlag.AlignTop
        below = fill(
            QHBoxLayout(), (self.status, 1), (self.machines, 0, top), (self.measure, 0, top)
        )
        fill(
            QVBoxLayout(self), self.graph, self.cost, (self.table, 1), self.problems, below,
            margins=(16, 4, 16, 12), spacing=8,
        )  # fmt: skip

    def _on_button(self) -> None:
        (self.stop_requested if self._is_measuring else self.measure_requested).emit()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.shown.emit()


def _slot_row(node: Node, names: dict[str, str]) -> list[QStandardItem]:
    row = [row_item(text) for text in (names[node.device], slot_line(node), "", "")]
    if node.slot_at_most:
        set_tip(row[1], tr("The slot can be faster; idle GPUs slow it down."))
    return row


def _edge_row(edge: Edge, names: dict[str, str]) -> list[QStandardItem]:
    about = "" if edge.is_measured else "~ "
    ends = names[edge.a] if edge.a == edge.b else f"{names[edge.a]} – {names[edge.b]}"
    route = tr(SHORT_ROUTES.get(edge.route, edge.route))
    texts = (ends, route, about + latency_text(edge.facts), about + rate_text(edge.facts))
    tip = " ".join((f"{ends}: {tr(edge.route)}.", edge.detail, *edge.problems)).strip()
    return [row_item(text, tip) for text in texts]


def _rest_text(rests: Sequence[Node], names: dict[str, str]) -> str:
    if not rests:
        return ""
    who = ", ".join(names[node.device] for node in rests)
    return tr_n(
        "{who} is below full slot speed, perhaps because it is idle.",
        "{who} are below full slot speed, perhaps because they are idle.",
        len(rests), who=who,
    )  # fmt: skip


def _estimate_text(*, is_simulated: bool) -> str:
    if is_simulated:
        return tr("~ marks estimates.")
    return tr("~ marks estimates; measure to get real values.")
