"""The hits of a search over all chats: title, day, and a piece of the text with marks."""

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
    Signal,
    Slot,
)
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontMetrics,
    QPainter,
    QTextCharFormat,
    QTextLayout,
    QTextOption,
)
from PySide6.QtWidgets import (
    QListView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.chat.search.hits import MOST_HITS, Hit
from app.chat.search.words import Snippet
from app.core.translation import language, tr
from app.widgets.text import plain_tip
from app.widgets.theme import mix, px, theme

TEXT_PIXELS, TITLE_PIXELS = 12, 13
MOST_LINES: Final = 3
MARGIN: Final = 7
GAP: Final = 2

Index = QModelIndex | QPersistentModelIndex

_TOP: Final = QModelIndex()


class HitModel(QAbstractListModel):
    """Hits of one search."""

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
    """List of hits; one that is clicked or activated is chosen."""

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
        """Whether there may be more hits than those shown."""
        return len(self.hits) >= MOST_HITS

    @property
    def hits(self) -> list[Hit]:
        return self._model.hits

    def show_hits(self, hits: Sequence[Hit]) -> None:
        """Show the hits of a search, with the first one as the current one."""
        self._model.set_hits(hits)
        if hits:
            self.setCurrentIndex(self._model.index(0))

    def step(self, n_rows: int) -> None:
        """Make the hit so many rows below the current one, or above it, the current one."""
        if self.hits:
            row = self.currentIndex().row() + n_rows
            self.setCurrentIndex(self._model.index(min(max(0, row), len(self.hits) - 1)))

    @Slot()
    def choose_current(self) -> None:
        """Choose the current hit, if there is one."""
        self._choose(self.currentIndex())

    @Slot(QModelIndex)
    def _choose(self, index: QModelIndex) -> None:
        if index.isValid():
            self.chosen.emit(self.hits[index.row()])


class _HitDelegate(QStyledItemDelegate):
    """Drawing of a hit with plain texts: nothing that was said is read as HTML."""

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
        """Draw title and day; return their height."""
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
    """Return the day of a time (seconds since the epoch) as people say it."""
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
    return _layout(text, TEXT_PIXELS, width, MOST_LINES)


def _layout(text: Snippet, pixels: int, width: int, most_lines: int) -> QTextLayout:
    """Return a text in lines of a width, with its marks; lines beyond the most are left out."""
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
