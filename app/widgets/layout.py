"""Wrapping widget boxes, sizes that follow the zoom, docks and the rail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from PySide6.QtCore import QObject, QRect, QSize, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QCloseEvent, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractScrollArea,
    QBoxLayout,
    QDockWidget,
    QFrame,
    QHBoxLayout,
    QLayout,
    QMainWindow,
    QScrollArea,
    QSizePolicy,
    QToolBar,
    QWidget,
)

from app.core.translation import tr
from app.widgets.buttons import IconButton
from app.widgets.text import label
from app.widgets.theme import px, theme_signals

Box = TypeVar("Box", bound=QBoxLayout)


def fill(
    box: Box,
    *parts: QWidget | QLayout | int | tuple[Any, ...] | None,
    margins: tuple[int, int, int, int] | None = None,
    spacing: int | None = None,
) -> Box:
    """Add parts to a box layout and return it.

    Args:
        parts: widgets, layouts, None for a stretch, a number of pixels for a gap, or tuples of one
            of these and further arguments to `addWidget`, `addLayout` or `addStretch`.
    """
    if margins is not None:
        box.setContentsMargins(*margins)
    if spacing is not None:
        box.setSpacing(spacing)
    for part in parts:
        item, *options = part if isinstance(part, tuple) else (part,)
        if isinstance(item, QWidget):
            box.addWidget(item, *options)
        elif isinstance(item, QLayout):
            box.addLayout(item, *options)
        elif item is None:
            box.addStretch(*options)
        else:
            box.addSpacing(item)
    return box


NO_MARGINS = (0, 0, 0, 0)
GAP = 6

MAX_HEIGHT = 176  # maximum height of a `FlowArea`, in pixels


class FlowBox(QWidget):
    """Box that lays out widgets at their preferred size and wraps lines."""

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
        """Return each widget's geometry; no widget is wider than the box."""
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
    """Scroll area as high as its flow box, up to a limit; hidden if empty."""

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
        """Fit the height to the box; if widgets were added, scroll to the end."""
        needed = self._box.heightForWidth(max(1, self.viewport().width()))
        self.setFixedHeight(min(needed, px(MAX_HEIGHT)))
        self.setVisible(needed > 0)
        if self._box.n_widgets > self._n_shown:
            QTimer.singleShot(0, self._show_last)
        self._n_shown = self._box.n_widgets

    @Slot()
    def _show_last(self) -> None:
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum())


class _Scaled(QObject):
    """Calls a widget's setter again whenever the zoom changes."""

    def __init__(self, widget: QWidget, apply: Callable[..., object], sizes: tuple[int, ...]):
        super().__init__(widget)
        self._apply, self._sizes = apply, sizes
        theme_signals().changed.connect(self._refresh)
        self._refresh()

    @Slot()
    def _refresh(self) -> None:
        self._apply(*map(px, self._sizes))


def scaled(widget: QWidget, apply: Callable[..., object], *sizes: int) -> None:
    """Call `apply` with zoomed sizes, now and after each zoom change."""
    _Scaled(widget, apply, sizes)


def fit_height(area: QAbstractScrollArea, height: int) -> None:
    """Set an area's height to fit its content and its horizontal scroll bar."""
    bar = area.horizontalScrollBar()
    if bar.maximum() > 0:
        height += bar.sizeHint().height()
    if height != area.height():
        area.setFixedHeight(height)


ICON_SIZE = 20


class Rail(QToolBar):
    """Column of icon buttons at the left edge of the window."""

    panel_clicked = Signal(object)  # QDockWidget

    def __init__(self, parent: QMainWindow) -> None:
        super().__init__(tr("Views"), parent)
        self.setObjectName("rail")
        self.setProperty("role", "rail")
        scaled(self, self._set_icon_size, ICON_SIZE)
        self.setMovable(False)
        self.setFloatable(False)
        self.toggleViewAction().setVisible(False)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.PreventContextMenu)

    def _set_icon_size(self, size: int) -> None:
        self.setIconSize(QSize(size, size))  # Qt passes it on to the buttons

    def add_page(self, icon: str, text: str) -> IconButton:
        """Add and return a button for a page; the window checks it while the page is visible."""
        made = self._add_button(icon, text)
        made.clicked.connect(lambda is_checked: made.setChecked(not is_checked))
        return made

    def add_panel(self, icon: str, text: str, dock: QDockWidget) -> IconButton:
        """Add and return a button for a panel; it is checked while the panel is visible."""
        made = self._add_button(icon, text)
        dock.visibilityChanged.connect(made.setChecked)

        def click() -> None:
            made.setChecked(is_in_front(dock))  # the click itself must not check it
            self.panel_clicked.emit(dock)

        made.clicked.connect(click)
        return made

    def _add_button(self, icon: str, text: str) -> IconButton:
        made = IconButton(icon, text, self, size=ICON_SIZE)
        made.setCheckable(True)
        self.addWidget(made)
        return made

    def add_space(self) -> None:
        """Place all buttons added later at the bottom."""
        space = QWidget(self)
        space.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Expanding)
        self.addWidget(space)


def is_in_front(dock: QDockWidget) -> bool:
    """Return whether a panel is visible and not hidden behind another tab."""
    return dock.isVisible() and not dock.visibleRegion().isEmpty()


FRAME = (
    Qt.WindowType.Window
    | Qt.WindowType.CustomizeWindowHint
    | Qt.WindowType.WindowTitleHint
    | Qt.WindowType.WindowMinMaxButtonsHint
    | Qt.WindowType.WindowCloseButtonHint
)
"""Window flags for a detached panel, which has the desktop's frame."""


class Dock(QDockWidget):
    """A dock for one panel; its title moves it, and a button or a double click detaches it.

    Args:
        name: language-independent name in the saved layout.
        beside: widget to the right of the title, in the title bar.
    """

    closed = Signal()

    def __init__(
        self,
        name: str,
        title: str,
        content: QWidget,
        parent: QMainWindow,
        beside: QWidget | None = None,
    ) -> None:
        super().__init__(title, parent)
        self.setObjectName(name)
        self.setWidget(content)
        self._float = IconButton("detach", "", self, size=14)
        self._float.clicked.connect(self._toggle_floating)
        close = IconButton("close", tr("Close {title}").format(title=title), self, size=14)
        close.clicked.connect(self.close)
        shown = label(title, "title")
        bar = QFrame(self)
        bar.setProperty("role", "panel")
        extra = (beside, 4) if beside is not None else ()
        layout = QHBoxLayout(bar)
        fill(layout, shown, None, *extra, self._float, close, margins=(16, 8, 8, 4), spacing=2)
        self.setTitleBarWidget(bar)
        self.topLevelChanged.connect(self._on_floating)
        self._on_floating(False)

    @Slot(bool)
    def _on_floating(self, is_floating: bool) -> None:
        text = tr("Put back {title}") if is_floating else tr("Detach {title}")
        self._float.set_text(text.format(title=self.windowTitle()))
        self.keep_frame()

    def keep_frame(self) -> None:
        """Give a detached panel a frame, which Qt omits if the title bar is custom.

        Restoring a layout removes the frame without emitting a signal.
        """
        if self.isFloating() and self.windowFlags() & Qt.WindowType.FramelessWindowHint:
            is_shown = not self.isHidden()
            self.setWindowFlags(FRAME)
            self.setVisible(is_shown)

    def closeEvent(self, event: QCloseEvent) -> None:
        super().closeEvent(event)
        self.closed.emit()

    @Slot()
    def _toggle_floating(self) -> None:
        self.setFloating(not self.isFloating())
