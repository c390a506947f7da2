"""The chat list with a search field, and the list of search hits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any, Final

from PySide6.QtCore import (
    QAbstractListModel,
    QDate,
    QLocale,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPointF,
    QRect,
    QSize,
    Qt,
    QTimer,
    Signal,
    Slot,
)
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontMetrics,
    QKeyEvent,
    QPainter,
    QTextCharFormat,
    QTextLayout,
    QTextOption,
)
from PySide6.QtWidgets import (
    QLineEdit,
    QListView,
    QStackedWidget,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QVBoxLayout,
    QWidget,
)

from app.chat.listing.folders import ListContents
from app.chat.search import MAX_HITS, Hit, Snippet
from app.chat.views.chat_rows import ChatRowsView
from app.core.translation import language, tr, tr_n
from app.widgets.buttons import button
from app.widgets.layout import scaled
from app.widgets.shortcuts import is_pressed, with_keys
from app.widgets.text import label, plain_tip, set_tip
from app.widgets.theme import mix, px, theme, theme_signals

TEXT_PIXELS, TITLE_PIXELS = 12, 13
MAX_LINES: Final = 3
MARGIN: Final = 7
GAP: Final = 2

Index = QModelIndex | QPersistentModelIndex

_TOP: Final = QModelIndex()


class HitModel(QAbstractListModel):
    """Model of search hits."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.hits: list[Hit] = []

    def set_hits(self, hits: Sequence[Hit]) -> None:
        self.beginResetModel()
        self.hits = list(hits)
        self.endResetModel()

    def rowCount(self, parent: Index = _TOP) -> int:
        return 0 if parent.isValid() else len(self.hits)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        hit = self.hits[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return hit.title.text
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return f"{hit.title.text}. {hit.text.text} {shown_day(hit.updated, date.today())}"
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(hit.text.text)
        return None


class HitList(QListView):
    """List of search hits."""

    chosen = Signal(object)  # Hit

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._model = HitModel(self)
        self.setModel(self._model)
        self.setItemDelegate(_HitDelegate(self))
        self.setAccessibleName(tr("Found in chats"))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.setResizeMode(QListView.ResizeMode.Adjust)
        self.setEditTriggers(QListView.EditTrigger.NoEditTriggers)
        self.setSpacing(1)
        self.activated.connect(self._choose)
        self.clicked.connect(self._choose)

    @property
    def is_cut(self) -> bool:
        """Whether there may be more hits."""
        return len(self.hits) >= MAX_HITS

    @property
    def hits(self) -> list[Hit]:
        return self._model.hits

    def show_hits(self, hits: Sequence[Hit]) -> None:
        """Show a search's hits and select the first one."""
        self._model.set_hits(hits)
        if hits:
            self.setCurrentIndex(self._model.index(0))

    def step(self, n_rows: int) -> None:
        """Move the selection down, or up for a negative number."""
        if self.hits:
            row = self.currentIndex().row() + n_rows
            self.setCurrentIndex(self._model.index(min(max(0, row), len(self.hits) - 1)))

    @Slot()
    def choose_current(self) -> None:
        """Choose the selected hit, if any."""
        self._choose(self.currentIndex())

    @Slot(QModelIndex)
    def _choose(self, index: QModelIndex) -> None:
        if index.isValid():
            self.chosen.emit(self.hits[index.row()])


class _HitDelegate(QStyledItemDelegate):
    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:
        hit = _hit_at(index)
        view = option.widget
        width = view.viewport().width() if isinstance(view, QListView) else 200
        height = QFontMetrics(_font(TITLE_PIXELS)).height()
        if hit.text.text:
            height += GAP + round(_lines(hit.text, width - 2 * px(MARGIN)).boundingRect().height())
        return QSize(0, height + 2 * px(MARGIN))

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        hit = _hit_at(index)
        panel = QStyleOptionViewItem(option)
        self.initStyleOption(panel, index)
        panel.text = ""
        view = option.widget
        view.style().drawControl(QStyle.ControlElement.CE_ItemViewItem, panel, painter, view)
        margin = px(MARGIN)
        rect: QRect = option.rect.adjusted(margin, margin, -margin, -margin)
        painter.save()
        painter.setClipRect(option.rect)
        height = self._paint_title(painter, hit, rect)
        if hit.text.text:
            painter.setPen(QColor(theme().muted))
            place = QPointF(rect.left(), rect.top() + height + GAP)
            _lines(hit.text, rect.width()).draw(painter, place)
        painter.restore()

    def _paint_title(self, painter: QPainter, hit: Hit, rect: QRect) -> int:
        small = QFontMetrics(_font(TEXT_PIXELS))
        metrics = QFontMetrics(_font(TITLE_PIXELS))
        day = shown_day(hit.updated, date.today())
        room = rect.width() - small.horizontalAdvance(day) - 8
        title = Snippet(
            metrics.elidedText(hit.title.text, Qt.TextElideMode.ElideRight, room), hit.title.marks
        )
        painter.setPen(QColor(theme().text))
        _layout(title, TITLE_PIXELS, room, 1).draw(painter, QPointF(rect.topLeft()))
        painter.setFont(_font(TEXT_PIXELS))
        painter.setPen(QColor(theme().muted))
        line = QRect(rect.left(), rect.top(), rect.width(), metrics.height())
        painter.drawText(line, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, day)
        return metrics.height()


def shown_day(when: float, today: date) -> str:
    """Return the day of `when` (in seconds since the epoch) as text, for example "Yesterday"."""
    day = date.fromtimestamp(when) if when >= 0 else date.min
    if day >= today:
        return tr("Today")
    if day == today - timedelta(days=1):
        return tr("Yesterday")
    form = "d MMM" if day.year == today.year else "MMM yyyy"
    return QLocale(language()).toString(QDate(day.year, day.month, day.day), form)


def _hit_at(index: Index) -> Hit:
    model = index.model()
    assert isinstance(model, HitModel)
    return model.hits[index.row()]


def _lines(text: Snippet, width: int) -> QTextLayout:
    return _layout(text, TEXT_PIXELS, width, MAX_LINES)


def _layout(text: Snippet, pixels: int, width: int, most_lines: int) -> QTextLayout:
    layout = QTextLayout(text.text, _font(pixels))
    option = QTextOption()
    option.setWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
    layout.setTextOption(option)
    layout.setFormats([_mark(start, end) for start, end in text.marks if end <= len(text.text)])
    layout.beginLayout()
    top = 0.0
    for _ in range(most_lines):
        line = layout.createLine()
        if not line.isValid():
            break
        line.setLineWidth(max(1, width))
        line.setPosition(QPointF(0, top))
        top += line.height()
    layout.endLayout()
    return layout


def _mark(start: int, end: int) -> QTextLayout.FormatRange:
    found = QTextLayout.FormatRange()
    found.start, found.length = start, end - start
    form = QTextCharFormat()
    form.setFontWeight(QFont.Weight.DemiBold)
    form.setForeground(QColor(theme().text))
    form.setBackground(QColor(mix(theme().surface, theme().accent, 0.4)))
    found.format = form
    return found


def _font(pixels: int) -> QFont:
    font = QFont()
    font.setPixelSize(px(pixels))
    return font


SEARCH_MS = 120
MIN_WIDTH = 144
STEPS = {"previous-hit": -1, "next-hit": 1, "hits-back": -5, "hits-on": 5}
"""Number of rows by which each shortcut in the search field moves the selection."""


class ChatList(QWidget):
    """List of chats with a search field; it only emits change requests."""

    new_requested = Signal()
    search_requested = Signal(str)  # query; "" when the search ends
    hit_chosen = Signal(object)  # Hit
    search_left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "panel")
        scaled(self, self.setMinimumWidth, MIN_WIDTH)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._contents = ListContents()
        self._is_chosen_when_found, self._is_final = False, True
        self._searched = ""  # query for the hits on screen
        self.search = _Search(self)
        self._set_up_search()
        new = button(tr("New chat"))
        set_tip(new, with_keys(tr("New chat"), "new-chat"))
        new.clicked.connect(self.new_requested)
        self.list = ChatRowsView(self)
        self._hits: HitList | None = None
        self._pages = QStackedWidget()
        self._pages.addWidget(self.list)
        self._status = label(role="muted")
        self._status.setWordWrap(True)
        self._status.hide()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(12, 12, 12, 8)
        layout.setSpacing(8)
        layout.addWidget(self.search)
        layout.addWidget(new)
        layout.addWidget(self._status)
        layout.addWidget(self._pages, 1)
        theme_signals().changed.connect(self._pages.update)

    @property
    def hits(self) -> HitList:
        """The list of hits, created on first use."""
        if self._hits is None:
            self._hits = HitList(self)
            self._hits.chosen.connect(self.hit_chosen)
            self._pages.addWidget(self._hits)
        return self._hits

    def show_contents(self, contents: ListContents) -> None:
        """Show the chats and select the open one."""
        self._contents = contents
        self.list.show_contents(contents)
        self._show_status()

    def show_hits(self, typed: str, hits: Sequence[Hit], *, is_final: bool = True) -> None:
        """Show the hits for a query, unless the query has changed since.

        Args:
            is_final: whether all chats have been searched.
        """
        if typed != self.search.text() or not typed.strip():
            return
        is_other, self._searched = typed != self._searched, typed
        self._pages.setCurrentWidget(self.hits)
        if is_other or list(hits) != self.hits.hits:
            self.hits.show_hits(hits)
        self._show_status()
        self._is_final = is_final
        if self._is_chosen_when_found and (hits or is_final):
            self._is_chosen_when_found = False
            self.hits.choose_current()

    def shown_titles(self) -> list[str]:
        """Return the texts of all rows, from top to bottom."""
        return [row.text for row in self.list.row_model.rows]

    @Slot()
    def focus_search(self) -> None:
        self.search.setFocus()
        self.search.selectAll()

    def _set_up_search(self) -> None:
        search = self.search
        search.setClearButtonEnabled(True)
        search.setPlaceholderText(tr("Search chats"))
        search.setAccessibleName(tr("Search chats"))
        tip = tr("Up and Down select a result; Enter opens it.")
        title = with_keys(tr("Search all chats"), "search-chats")
        set_tip(search, f"{title}. {tip}")
        scaled(search, search.setMinimumHeight, 32)
        search.returnPressed.connect(self._choose_hit)
        search.escaped.connect(self._leave_search)
        search.stepped.connect(lambda n_rows: self.hits.step(n_rows))
        self._search_timer = QTimer(self, singleShot=True, interval=SEARCH_MS)
        self._search_timer.timeout.connect(self._ask)
        search.textChanged.connect(self._on_typed)

    @Slot()
    def _on_typed(self) -> None:
        self._is_chosen_when_found = False
        if self.search.text().strip():
            self._search_timer.start()
        else:
            self._search_timer.stop()
            self._searched = ""
            self._pages.setCurrentWidget(self.list)
            self._show_status()
            self.search_requested.emit("")

    @Slot()
    def _ask(self) -> None:
        self._search_timer.stop()
        self.search_requested.emit(self.search.text())

    @Slot()
    def _choose_hit(self) -> None:
        typed = self.search.text()
        is_shown = bool(typed == self._searched and (self._is_final or self.hits.hits))
        if typed.strip() and is_shown:
            self.hits.choose_current()
        elif typed.strip():
            self._is_chosen_when_found = True
            self._ask()

    @Slot()
    def _leave_search(self) -> None:
        self.search.clear()
        self.search_left.emit()

    def _show_status(self) -> None:
        n, texts = self._contents.n_unread, []
        if self._searched and not self.hits.hits:
            texts.append(tr("No chats match."))
        if self._searched and self.hits.is_cut:
            n_shown = len(self.hits.hits)
            texts.append(tr("The first {n} are shown.").format(n=n_shown))
        if n:
            texts.append(
                tr_n("{n} chat is still being read.", "{n} chats are still being read.", n)
            )
        self._status.setText(" ".join(texts))
        self._status.setVisible(bool(texts))


class _Search(QLineEdit):
    escaped = Signal()
    stepped = Signal(int)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        n_rows = next((n for name, n in STEPS.items() if is_pressed(name, event)), 0)
        if is_pressed("leave-search", event):
            self.escaped.emit()
        elif n_rows:
            self.stepped.emit(n_rows)
        else:
            super().keyPressEvent(event)
