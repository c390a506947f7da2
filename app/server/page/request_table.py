"""The table of requests: running ones first, then finished ones."""

from __future__ import annotations

import time
from typing import Any, Final

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, Qt, Slot
from PySide6.QtGui import QColor, QResizeEvent
from PySide6.QtWidgets import QHeaderView, QTableView

from app.core.translation import tr, tr_later, translated
from app.core.units import decimal
from app.server.page.log_view import ShownRequest
from app.widgets.layout import scaled
from app.widgets.text import plain_tip
from app.widgets.theme import px, theme, theme_signals
from engine import one_line

HEADERS: Final = (
    tr_later("Time"), tr_later("Route"), tr_later("Status"), tr_later("Tokens"),
    tr_later("tok/s"), tr_later("Client"),
)  # fmt: skip
ROUTE, STATUS, CLIENT = 1, 2, 5

PHASES: Final = {"waiting": tr_later("waiting"), "writing": tr_later("writing")}

MIN_HEIGHT, MIN_ROUTE = 132, 72

AnyIndex = QModelIndex | QPersistentModelIndex


class RequestRows(QAbstractTableModel):
    """Requests as table rows."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: tuple[ShownRequest, ...] = ()
        self.texts: list[tuple[str, ...]] = []  # cached, by row

    def show_rows(self, rows: tuple[ShownRequest, ...]) -> None:
        """Show these requests; if they are the same requests as before, keep the selection."""
        before, known = self._rows, dict(zip(self._rows, self.texts, strict=True))
        texts = [known.get(row) or _texts(row) for row in rows]
        if [row.number for row in rows] != [row.number for row in before]:
            self.beginResetModel()
            self._rows, self.texts = rows, texts
            self.endResetModel()
            return
        self._rows, self.texts = rows, texts
        for at, pair in enumerate(zip(rows, before, strict=True)):
            if pair[0] != pair[1]:
                self.dataChanged.emit(self.index(at, 0), self.index(at, len(HEADERS) - 1))

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008 Qt
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008, N802 Qt
        return 0 if parent.isValid() else len(HEADERS)

    def headerData(  # noqa: N802 Qt
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        if orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return tr(HEADERS[section])
        return None

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        row, column = self._rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self.texts[index.row()][column]
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(_tip(row))
        if role == Qt.ItemDataRole.ForegroundRole and column == STATUS:
            return _status_colour(row)
        return None

    @Slot()
    def recolour(self) -> None:
        """Use the new theme's colours."""
        if self._rows:
            end = self.index(len(self._rows) - 1, len(HEADERS) - 1)
            self.dataChanged.emit(self.index(0, 0), end, [Qt.ItemDataRole.ForegroundRole])


class RequestTable(QTableView):
    """Table of requests; with only one client, the client column is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = RequestRows()
        self.rows.setParent(self)  # keeps it alive
        self.setModel(self.rows)
        theme_signals().changed.connect(self.rows.recolour)
        self.setAccessibleName(tr("Requests"))
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setTabKeyNavigation(False)
        self.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        self.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QTableView.SelectionMode.SingleSelection)
        self.verticalHeader().hide()
        scaled(self, self.verticalHeader().setDefaultSectionSize, 26)
        scaled(self, self.setMinimumHeight, MIN_HEIGHT)
        scaled(self, self._set_text_size, 12)
        header = self.horizontalHeader()
        header.setHighlightSections(False)
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
        header.setMinimumSectionSize(24)
        header.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)

    def show_requests(self, requests: tuple[ShownRequest, ...]) -> None:
        self.rows.show_rows(requests)
        self.setColumnHidden(CLIENT, len({request.client for request in requests}) < 2)
        self._fit_columns()
        self._fit_route()

    def _fit_columns(self) -> None:
        header, width_of = self.horizontalHeader(), self.fontMetrics().horizontalAdvance
        for column, texts in enumerate(zip(*self.rows.texts, strict=True)):
            if column == ROUTE or self.isColumnHidden(column):
                continue
            longest = max(map(len, texts))
            near = {text for text in texts if len(text) >= longest - 1}  # digits have equal width
            widest = texts.index(max(near, key=width_of))
            needed = self.sizeHintForIndex(self.rows.index(widest, column)).width()
            header.resizeSection(column, max(needed, header.sectionSizeHint(column)))

    @Slot()
    def _fit_route(self) -> None:
        header = self.horizontalHeader()
        others = header.length() - header.sectionSize(ROUTE)
        width = max(px(MIN_ROUTE), self.viewport().width() - others)
        if width != header.sectionSize(ROUTE):
            header.resizeSection(ROUTE, width)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_route()

    def _set_text_size(self, n_pixels: int) -> None:
        font = self.font()
        font.setPixelSize(n_pixels)
        self.setFont(font)
        self._fit_columns()
        self._fit_route()


def status_text(request: ShownRequest) -> str:
    """Return a request's HTTP status, or its state while it is running."""
    if request.phase == "reading":
        return tr("reading {part} %").format(part=round(100 * request.read_part))
    if request.phase in PHASES:
        return tr(PHASES[request.phase])
    return str(request.status or "–")


def rate_text(tokens_per_s: float) -> str:
    """Format a speed; "" if it is unknown."""
    return decimal(f"{tokens_per_s:.1f}") if tokens_per_s else ""


def _texts(request: ShownRequest) -> tuple[str, ...]:
    came = time.strftime("%H:%M", time.localtime(request.began))
    route = (request.route.partition(" ")[2] or request.route).removeprefix("/v1/")
    tokens = str(request.n_tokens) if request.n_tokens else ""
    speed = rate_text(request.tokens_per_s)
    return came, one_line(route), status_text(request), tokens, speed, one_line(request.client)


def _tip(request: ShownRequest) -> str:
    came = time.strftime("%H:%M:%S", time.localtime(request.began))
    lines = [translated(request.problem), f"{came} {request.client}: {request.route}"]
    if request.model:
        lines.append(tr("Model: {name}").format(name=request.model))
    if request.n_prompt:
        lines.append(tr("Prompt: {n} tokens").format(n=request.n_prompt))
    if request.first_token_s:
        seconds = decimal(f"{request.first_token_s:.2f}")
        lines.append(tr("First token after {seconds} s").format(seconds=seconds))
    if request.seconds:
        lines.append(tr("{seconds} s in total").format(seconds=decimal(f"{request.seconds:.2f}")))
    return "\n".join(filter(None, lines))


def _status_colour(request: ShownRequest) -> QColor | None:
    if request.phase != "ended":
        return QColor(theme().ok)
    return QColor(theme().danger) if request.status >= 400 else None
