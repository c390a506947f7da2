"""The view of a display formula: centred, with a scroll bar if the formula is wide."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import Qt, Slot
from PySide6.QtGui import QContextMenuEvent, QFont, QKeyEvent, QPixmap, QWheelEvent
from PySide6.QtWidgets import QApplication, QFrame, QMenu, QScrollArea, QSizePolicy, QWidget

from app.chat.formulas import SCALE, FormulaImage, FormulaLook, formula_cache
from app.chat.markdown import DisplayFormula, Piece
from app.chat.views.prose_view import INDENT, MONOSPACE, QUOTE_INDENT, TEXT_PIXELS
from app.core.translation import tr
from app.widgets.layout import fit_height
from app.widgets.shortcuts import is_pressed
from app.widgets.text import PlainLabel, set_tip
from app.widgets.theme import px, theme
from engine import one_line

MARGIN: Final = 4
MAX_NAME: Final = 200  # characters of the accessible name


class FormulaView(QScrollArea):
    """View of a `DisplayFormula`, which is shown as source until it is rendered."""

    def __init__(self, shown: DisplayFormula, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shown = shown
        self._pictures = formula_cache()
        self._label = PlainLabel()
        self._label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._label.setMargin(MARGIN)
        self.setWidget(self._label)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.horizontalScrollBar().rangeChanged.connect(self._fit)
        left = shown.indent * INDENT + shown.quote * QUOTE_INDENT
        self.setViewportMargins(left, 0, 0, 0)
        source = shown.formula.source
        name = tr("Formula {source}").format(source=one_line(source, MAX_NAME))
        self.setAccessibleName(name)
        set_tip(self, source)
        self._look = FormulaLook(
            shown.formula.latex,
            is_display=True,
            pixels=px(TEXT_PIXELS) * SCALE,
            colour=theme().muted if shown.quote else theme().text,
            ratio=self.devicePixelRatioF(),
        )
        self._pictures.ready.connect(self._on_ready)  # before `want`, so as not to miss it
        is_coming = self._pictures.want(self._look)
        picture = self._pictures.find(self._look)
        if picture is None:
            self._show_source()
        else:
            self._show_picture(picture)
        self._is_settled = picture is not None or not is_coming
        if self._is_settled:
            self._pictures.ready.disconnect(self._on_ready)

    @property
    def plain_text(self) -> str:
        """The formula's source."""
        return self._shown.formula.source

    def take(self, piece: Piece) -> bool:
        """Return whether this view already shows the piece, as a formula cannot be updated."""
        return piece == self._shown

    @Slot()
    def copy(self) -> None:
        """Copy the formula's source."""
        QApplication.clipboard().setText(self.plain_text)

    @Slot(object)
    def _on_ready(self, look: FormulaLook) -> None:
        if look != self._look or self._is_settled:
            return
        self._is_settled = True
        self._pictures.ready.disconnect(self._on_ready)
        picture = self._pictures.find(look)
        if picture is not None:
            self._show_picture(picture)

    def _show_source(self) -> None:
        font = QFont()
        font.setFamilies(MONOSPACE)
        font.setPixelSize(px(TEXT_PIXELS - 1))
        self._label.setFont(font)
        self._label.setText(self.plain_text)
        self._label.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        self._label.setStyleSheet(f"background: {theme().raised}; border-radius: 4px;")
        self._fit()

    def _show_picture(self, picture: FormulaImage) -> None:
        self._label.setStyleSheet("")
        self._label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._label.setPixmap(QPixmap.fromImage(picture.image))
        self._fit()

    @Slot()
    def _fit(self) -> None:
        fit_height(self, self._label.sizeHint().height())

    def wheelEvent(self, event: QWheelEvent) -> None:
        if event.angleDelta().x():
            super().wheelEvent(event)
        else:
            event.ignore()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("copy", event):
            self.copy()
        else:
            super().keyPressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addAction(tr("Copy LaTeX")).triggered.connect(self.copy)
        menu.popup(event.globalPos())
