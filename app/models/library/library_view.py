"""The table of models on this machine, and a dialog with a model's details."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import (
    QModelIndex,
    QPersistentModelIndex,
    QPoint,
    QSortFilterProxyModel,
    Qt,
    Signal,
    Slot,
)
from PySide6.QtGui import QColor, QKeyEvent, QStandardItem, QStandardItemModel
from PySide6.QtWidgets import (
    QDialog,
    QHBoxLayout,
    QHeaderView,
    QLineEdit,
    QMenu,
    QStackedWidget,
    QTableView,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later, tr_n, translated
from app.core.units import context_text, decimal, decimal_size, rate_text
from app.devices.split.figures import rank_labels
from app.models.library.library_session import LastUse, LibraryEntry, Mark, RunningModel
from app.models.library.scan import OPENED, YOUR_FOLDERS, FoundModel, file_identity
from app.widgets.buttons import button
from app.widgets.layout import fill, scaled
from app.widgets.row_table import RowTable
from app.widgets.shortcuts import is_pressed
from app.widgets.text import caption_text, label, row_item
from app.widgets.theme import theme, theme_signals
from engine import one_line

if TYPE_CHECKING:
    from engine import Inspection

UNKNOWN = "…"


@dataclass(frozen=True, slots=True)
class LibraryCell:
    """A cell's text and sort key.

    Attributes:
        tip: tooltip, or "".
        spoken: text for screen readers if `text` contains symbols, else "".
    """

    text: str
    order: float | str
    tip: str = ""
    spoken: str = ""


def cells(entry: LibraryEntry, last: LastUse, *, is_pinned: bool, mark: Mark) -> list[LibraryCell]:
    """Return the cells in a model's row; see `HEADERS`."""
    found, info = entry.found, entry.info
    unread = "" if entry.problem else UNKNOWN
    return [
        _name_cell(found, is_pinned=is_pinned, mark=mark),
        outlook(entry),
        _last_cell(last),
        LibraryCell(decimal_size(found.n_bytes), found.n_bytes),
        LibraryCell(info.quant if info else unread, info.quant if info else ""),
        LibraryCell(
            f"{count_text(info.n_params)} {info.architecture}" if info else unread,
            info.n_params if info else 0,
            tr("Parameter count and architecture"),
        ),
        LibraryCell(
            context_text(info.n_ctx_train) if info and info.n_ctx_train else unread,
            info.n_ctx_train if info else 0,
        ),
        LibraryCell(tr(found.program), found.program.casefold(), str(found.path.parent)),
    ]


HEADERS = (
    tr_later("Model"),
    tr_later("On these devices"),
    tr_later("Last run"),
    tr_later("Size"),
    tr_later("Type"),
    tr_later("Parameters"),
    tr_later("Context"),
    tr_later("From"),
)


def _name_cell(found: FoundModel, *, is_pinned: bool, mark: Mark) -> LibraryCell:
    """Return a model's name and state, for example "● Qwen · loaded"."""
    helpers = [path.name for path in (found.projector, found.draft) if path is not None]
    with_helpers = tr("with {files}").format(files=", ".join(helpers))
    signs = "★ " * is_pinned + "● " * (mark == "loaded")
    words = [found.name]
    if found.projector is not None:
        words.append(tr("vision"))
    if mark:
        words.append(tr("loaded") if mark == "loaded" else tr("loading …"))
    return LibraryCell(
        signs + " · ".join(words),
        found.name.casefold(),
        str(found.path) + f"\n{with_helpers}" * bool(helpers),
        ", ".join([*words, *[tr("pinned")] * is_pinned]),
    )


def _last_cell(last: LastUse) -> LibraryCell:
    if not last.tokens_per_s:
        return LibraryCell(tr("opened") if last.plan else "–", 0.5 if last.plan else 0, last.plan)
    rate = f"{rate_text(last.tokens_per_s)} tok/s"
    return LibraryCell(rate, last.tokens_per_s, last.plan)


def outlook(entry: LibraryEntry) -> LibraryCell:
    """Return the prediction for a model ("~ 61 tok/s · 32k"), or why it cannot run."""
    if entry.problem:
        return LibraryCell(tr("cannot be opened"), -2.0, entry.problem)
    prospect = entry.prospect
    if prospect is None and entry.is_judged:
        return LibraryCell("–", -1.5, tr("No plan can be made for this file."))
    if prospect is None:
        return LibraryCell(UNKNOWN, -1.0)
    if not prospect.fits:
        return LibraryCell(
            tr("too large"), 0.0, tr("There is not enough free memory for this model.")
        )
    where = ", ".join(dict.fromkeys(rank_labels(prospect.devices)))
    context = context_text(prospect.n_ctx if prospect.n_ctx < 4096 else prospect.n_ctx & ~1023)
    is_timed = prospect.tokens_per_s > 0
    tip = (
        tr("On {devices} with a context of {n} tokens; predicted speed")
        if is_timed
        else tr("On {devices} with a context of {n} tokens")
    ).format(devices=where, n=prospect.n_ctx)
    if not is_timed:
        return LibraryCell(tr("fits · {context}").format(context=context), 0.5, tip)
    rate = rate_text(prospect.tokens_per_s)
    return LibraryCell(f"~ {rate} tok/s · {context}", prospect.tokens_per_s, tip)


def count_text(n: int) -> str:
    """Return a count as "8.0 B" or "135 M"."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return decimal(f"{n / size:.1f} {unit}") if n < 100 * size else f"{n / size:.0f} {unit}"
    return str(n)


ORDER: Final = Qt.ItemDataRole.UserRole
PIN: Final = Qt.ItemDataRole.UserRole + 1
PATH: Final = Qt.ItemDataRole.UserRole + 2
MARK: Final = Qt.ItemDataRole.UserRole + 3

DROPPABLE: Final = (7, 6, 5, 2, 4, 3)
"""Columns of `HEADERS` that a narrow table hides, least important first."""

BUTTON_WIDTH: Final = 240

ZERO_WIDTH_SPACE: Final = "\u200b"  # allows a line break

Index = QModelIndex | QPersistentModelIndex


class LibraryView(QWidget):
    """Table of models; signals carry a model's path."""

    open_requested = Signal(str)
    eject_requested = Signal()
    reveal_requested = Signal(str)
    pin_requested = Signal(str)
    details_requested = Signal(str)
    remove_requested = Signal(str)
    refresh_requested = Signal()
    folder_requested = Signal()
    download_requested = Signal()
    left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._entries: dict[Path, LibraryEntry] = {}
        self._pinned: frozenset[str] = frozenset()
        self._uses: Mapping[str, LastUse] = {}
        self._running = RunningModel()
        self._rows = QStandardItemModel(0, len(HEADERS), self)
        self._rows.setHorizontalHeaderLabels([tr(text) for text in HEADERS])
        self._shown = _Sorted(self)
        self._shown.setSourceModel(self._rows)
        self.search = QLineEdit()
        self.search.setPlaceholderText(tr("Search models"))
        self.search.setAccessibleName(tr("Search models"))
        self.search.setClearButtonEnabled(True)
        self.search.textChanged.connect(self._shown.set_words)
        self.search.returnPressed.connect(self._open_first)
        self.table = RowTable(tr("Models"))
        self._set_up_table()
        self._middle = QStackedWidget()
        self._middle.addWidget(self.table)
        self._where = label(role="muted")
        self._middle.addWidget(self._make_empty())
        self._status = label(role="muted")
        self._status.setWordWrap(True)
        self._build()
        self.set_status(is_busy=False)
        theme_signals().changed.connect(self._refresh_marks)

    def set_entries(
        self, entries: Sequence[LibraryEntry], pinned: Collection[str], uses: Mapping[str, LastUse]
    ) -> None:
        """Replace all models and keep the selection.

        Args:
            pinned: paths of models to list first.
            uses: last use by path.
        """
        chosen = self.selected
        self._uses = uses
        self._pinned = frozenset(pinned)
        self._entries = {entry.found.path: entry for entry in entries}
        self._rows.setRowCount(0)
        for entry in entries:
            self._rows.appendRow(self._items(entry))
        if chosen is not None:
            self._select(chosen)

    def set_entry(self, entry: LibraryEntry) -> None:
        """Update one model."""
        if entry.found.path not in self._entries:
            return
        self._entries[entry.found.path] = entry
        for row in range(self._rows.rowCount()):
            if self._rows.item(row, 0).data(PATH) == str(entry.found.path):
                for column, item in enumerate(self._items(entry)):
                    self._rows.setItem(row, column, item)

    def set_running(self, running: RunningModel) -> None:
        """Mark the model that is loaded and the one being loaded."""
        self._running = running
        self._refresh_marks()

    def is_loaded(self, path: str) -> bool:
        """Return whether the file at a path is the loaded model."""
        loaded = self._running.loaded
        return loaded is not None and loaded.identity == file_identity(path) is not None

    @Slot()
    def _refresh_marks(self) -> None:
        for row in range(self._rows.rowCount()):
            name = self._rows.item(row, 0)
            entry = self._entries[Path(name.data(PATH))]
            if name.data(MARK) or self._running.mark(entry.found):
                self.set_entry(entry)

    def show_folders(self, folders: Sequence[str]) -> None:
        """Set the folders that are named if no models are found."""
        text = tr(
            "Tandem searches {folders} and the folders used by Hugging Face, LM Studio, Ollama,"
            " llama.cpp and Jan."
        )
        shown = ", ".join(folders).replace(os.sep, os.sep + ZERO_WIDTH_SPACE)
        self._where.setText(text.format(folders=shown))

    def set_status(self, *, is_busy: bool) -> None:
        """Show the number of models, and whether the search is running."""
        n = len(self._entries)
        count = tr_n("{n} model", "{n} models", n)
        if is_busy:
            reading = tr("{models} · reading …").format(models=count)
            self._status.setText(reading if n else tr("Searching for models …"))
        elif n:
            self._status.setText(count)
        else:
            self._status.setText("")
        self._middle.setCurrentIndex(0 if n or is_busy else 1)

    @property
    def selected(self) -> str | None:
        """Path of the selected model."""
        index = self.table.currentIndex()
        return self._path_at(index) if index.isValid() else None

    def menu_for(self, path: str) -> QMenu:
        """Return a model's context menu."""
        menu = QMenu(self)
        found, is_pinned = self._entries[Path(path)].found, path in self._pinned
        is_own = found.program in (YOUR_FOLDERS, OPENED)
        if self._running.mark(found) == "loaded":
            menu.addAction(tr("Eject")).triggered.connect(self.eject_requested)
        else:
            menu.addAction(tr("Open")).triggered.connect(lambda: self.open_requested.emit(path))
        for text, signal in (
            (tr("Unpin") if is_pinned else tr("Pin"), self.pin_requested),
            (tr("Details…"), self.details_requested),
            (tr("Show in folder"), self.reveal_requested),
        ):
            menu.addAction(text).triggered.connect(lambda _=False, s=signal: s.emit(path))
        menu.addSeparator()
        remove = menu.addAction(tr("Move to trash…"))
        if not is_own:  # other programs manage their own files
            text = tr("Remove it in {program}").format(program=found.program)
            remove.setText(caption_text(text))
        remove.setEnabled(is_own)
        remove.triggered.connect(lambda: self.remove_requested.emit(path))
        return menu

    def _items(self, entry: LibraryEntry) -> list[QStandardItem]:
        path, mark = str(entry.found.path), self._running.mark(entry.found)
        is_pinned = path in self._pinned
        items = []
        last = self._uses.get(path, LastUse())
        for cell in cells(entry, last, is_pinned=is_pinned, mark=mark):
            item = row_item(cell.text, cell.tip)
            item.setData(cell.spoken or None, Qt.ItemDataRole.AccessibleTextRole)
            item.setData(cell.order, ORDER)
            item.setData(is_pinned, PIN)
            item.setData(path, PATH)
            item.setData(mark, MARK)
            items.append(item)
        _colour(items[0], mark)
        return items

    def _path_at(self, index: QModelIndex) -> str:
        return str(index.siblingAtColumn(0).data(PATH))

    def _select(self, path: str) -> None:
        for row in range(self._shown.rowCount()):
            index = self._shown.index(row, 0)
            if index.data(PATH) == path:
                self.table.setCurrentIndex(index)

    @Slot()
    def _open_first(self) -> None:
        if self._shown.rowCount():
            self.open_requested.emit(self._path_at(self._shown.index(0, 0)))

    @Slot(QPoint)
    def _show_menu(self, place: QPoint) -> None:
        index = self.table.indexAt(place)
        if index.isValid():
            self.table.setCurrentIndex(index)
            menu = self.menu_for(self._path_at(index))
            menu.exec(self.table.viewport().mapToGlobal(place))
            menu.deleteLater()

    def _set_up_table(self) -> None:
        table = self.table
        table.setModel(self._shown)
        table.setSortingEnabled(True)
        table.sortByColumn(0, Qt.SortOrder.AscendingOrder)
        table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        table.customContextMenuRequested.connect(self._show_menu)
        table.chosen.connect(lambda index: self.open_requested.emit(self._path_at(index)))
        table.set_headers(DROPPABLE)

    def _make_empty(self) -> QWidget:
        title = label(tr("No models found"), "title")
        download = button(tr("Download a model…"), "primary")
        download.clicked.connect(self.download_requested)
        folder = button(tr("Add folder…"), name=tr("Add a folder of models"))
        folder.clicked.connect(self.folder_requested)
        for words in (title, self._where):
            words.setAlignment(Qt.AlignmentFlag.AlignCenter)
            words.setWordWrap(True)
        made = QWidget()
        layout = fill(QVBoxLayout(made), (None, 2), title, self._where, 8, spacing=8)
        for choice in (download, folder):
            scaled(choice, choice.setFixedWidth, BUTTON_WIDTH)
            layout.addWidget(choice, 0, Qt.AlignmentFlag.AlignHCenter)
        layout.addStretch(3)
        return made

    def _build(self) -> None:
        folder = button(tr("Add folder…"))
        folder.clicked.connect(self.folder_requested)
        again = button(tr("Refresh"), "quiet", tr("Search for models again"))
        again.clicked.connect(self.refresh_requested)
        title = label(tr("Models"), "title")
        head = fill(QHBoxLayout(), title, (self.search, 1), folder, spacing=8)
        foot = fill(QHBoxLayout(), (self._status, 1), again)
        parts = head, (self._middle, 1), foot
        fill(QVBoxLayout(self), *parts, margins=(20, 16, 20, 8), spacing=10)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("leave-page", event):
            self.left.emit()
        else:
            super().keyPressEvent(event)


def _colour(name: QStandardItem, mark: Mark) -> None:
    if mark:
        name.setForeground(QColor(theme().ok if mark == "loaded" else theme().accent))


class _Sorted(QSortFilterProxyModel):
    """Filter for rows that contain all search words; pinned rows always come first."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._words: list[str] = []
        self.setDynamicSortFilter(True)

    @Slot(str)
    def set_words(self, text: str) -> None:
        self._words = text.casefold().split()
        self.invalidate()

    def filterAcceptsRow(self, row: int, parent: Index) -> bool:  # noqa: N802 Qt
        model = self.sourceModel()
        columns = range(model.columnCount())
        texts = [str(model.index(row, column, parent).data() or "") for column in columns]
        whole = " ".join(texts).casefold()
        return all(word in whole for word in self._words)

    def lessThan(self, left: Index, right: Index) -> bool:  # noqa: N802 Qt
        pins = bool(left.data(PIN)), bool(right.data(PIN))
        if pins[0] != pins[1]:
            return pins[0] == (self.sortOrder() is Qt.SortOrder.AscendingOrder)
        a, b = left.data(ORDER), right.data(ORDER)
        return bool(a < b) if type(a) is type(b) else str(a) < str(b)


class DetailsDialog(QDialog):
    """Dialog with a file's metadata and tensors, and a search field."""

    def __init__(self, inspection: Inspection, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(one_line(inspection.info.name, 100))
        self.resize(760, 560)
        self.search = QLineEdit()
        self.search.setPlaceholderText(tr("Search"))
        self.search.setAccessibleName(tr("Search the header"))
        self.metadata = _table(tr("Metadata"), (tr("Key"), tr("Value")), inspection.metadata)
        self.tensors = _table(
            tr("Tensors"),
            (tr("Name"), tr("Type"), tr("Shape")),
            ((t.name, t.type, " × ".join(map(str, t.shape))) for t in inspection.tensors),
        )
        tabs = QTabWidget()
        tabs.addTab(self.metadata, tr("Metadata"))
        tabs.addTab(self.tensors, tr_n("{n} tensor", "{n} tensors", len(inspection.tensors)))
        tabs.tabBar().setAccessibleName(tr("Parts of the header"))
        layout = fill(QVBoxLayout(self), self.search, (tabs, 1))
        for warning in inspection.warnings:
            text = label(translated(warning), "warn")
            text.setWordWrap(True)
            layout.addWidget(text)
        for table in (self.metadata, self.tensors):
            self.search.textChanged.connect(_filter_of(table).setFilterFixedString)


def _table(name: str, headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> QTableView:
    model = QStandardItemModel(0, len(headers))
    model.setHorizontalHeaderLabels(list(headers))
    for texts in rows:
        model.appendRow([row_item(text, text) for text in texts])
    shown = QSortFilterProxyModel()
    shown.setSourceModel(model)
    shown.setFilterKeyColumn(-1)
    shown.setFilterCaseSensitivity(Qt.CaseSensitivity.CaseInsensitive)
    table = QTableView()
    table.setModel(shown)
    model.setParent(table)  # Qt's views do not own their models
    shown.setParent(table)
    table.setAccessibleName(name)
    table.setShowGrid(False)
    table.setTabKeyNavigation(False)
    table.verticalHeader().hide()
    table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
    header = table.horizontalHeader()
    header.setHighlightSections(False)
    header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
    header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
    header.setStretchLastSection(True)
    return table


def _filter_of(table: QTableView) -> QSortFilterProxyModel:
    model = table.model()
    assert isinstance(model, QSortFilterProxyModel)
    return model
