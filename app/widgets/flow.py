"""A box of widgets in lines that wrap as text does."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QRect, QSize, Qt, QTimer, Slot
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QScrollArea, QSizePolicy, QWidget

from app.core.scale import px

GAP = 6

MOST_HEIGHT = 176
"""Largest height of an area of such a box, in pixels."""


class FlowBox(QWidget):
    """Box of widgets at their preferred size, as many in a line as fit."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._widgets: tuple[QWidget, ...] = ()
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Minimum)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)

    def set_widgets(self, widgets: Sequence[QWidget]) -> None:
        """Replace the widgets."""
        for old in self._widgets:
            old.hide()
            old.deleteLater()
        self._widgets = tuple(widgets)
        for widget in widgets:
            widget.setParent(self)
            widget.show()
        self._arrange(self.width())
        self.updateGeometry()

    @property
    def n_widgets(self) -> int:
        """Number of widgets in the box."""
        return len(self._widgets)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        return max((place.bottom() + 1 for place in self._places(width)), default=0)

    def sizeHint(self) -> QSize:
        return QSize(240, self.heightForWidth(max(240, self.width())))

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self.heightForWidth(max(1, self.width())))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange(event.size().width())

    def _arrange(self, width: int) -> None:
        for widget, place in zip(self._widgets, self._places(width), strict=True):
            widget.setGeometry(place)

    def _places(self, width: int) -> list[QRect]:
        """Return the place of each widget; one wider than the box is cut to its width."""
        x = y = line = 0
        places = []
        for widget in self._widgets:
            size = widget.sizeHint().boundedTo(QSize(width, 1 << 20))
            if x and x + size.width() > width:
                x, y, line = 0, y + line + GAP, 0
            places.append(QRect(x, y, size.width(), size.height()))
            x, line = x + size.width() + GAP, max(line, size.height())
        return places


class FlowArea(QScrollArea):
    """Area of a flow box, as high as that is up to a limit; hidden while it is empty."""

    def __init__(self, box: FlowBox) -> None:
        super().__init__()
        self._box, self._n_shown = box, 0
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setWidget(box)
        self.fit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.fit()

    def fit(self) -> None:
        """Follow what is in the box now; show the last widget if there are more than before."""
        wanted = self._box.heightForWidth(max(1, self.viewport().width()))
        self.setFixedHeight(min(wanted, px(MOST_HEIGHT)))
        self.setVisible(wanted > 0)
        if self._box.n_widgets > self._n_shown:
            QTimer.singleShot(0, self._show_last)
        self._n_shown = self._box.n_widgets

    @Slot()
    def _show_last(self) -> None:
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum())
