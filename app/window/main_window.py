"""The main window: panel layout, shortcuts, and dropped files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PySide6.QtCore import QByteArray, QEvent, QMimeData, QSize, Qt, QTimer, Signal, Slot
from PySide6.QtGui import (
    QCloseEvent,
    QDragEnterEvent,
    QDragLeaveEvent,
    QDropEvent,
    QPaintEvent,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import (
    QApplication,
    QDockWidget,
    QFileDialog,
    QHBoxLayout,
    QMainWindow,
    QScrollArea,
    QStackedWidget,
    QTabBar,
    QVBoxLayout,
    QWidget,
)

from app.chat.running import RunningChip
from app.chat.sampling.panel import SamplingPanel
from app.chat.views.chat_list import ChatList
from app.chat.views.chat_view import MARGIN, ChatView
from app.chat.views.composer import Composer
from app.chat.views.message_column import COLUMN_WIDTH
from app.core.translation import tr
from app.models.current.model_views import ModelBar, StartView
from app.server.page.server_panel import ServerChip
from app.widgets.banner import FloatingBanner
from app.widgets.layout import Dock, Rail, is_in_front, scaled
from app.widgets.row_table import neighbour, tab_stops
from app.widgets.shortcuts import make_shortcut, with_keys
from app.widgets.text import PlainLabel
from app.widgets.theme import px, theme
from engine import one_line

SUFFIX = ".gguf"


def dropped_model(data: QMimeData) -> str:
    """Return the first local .gguf file among dropped files; "" if there is none."""
    paths = (url.toLocalFile() for url in data.urls() if url.isLocalFile())
    return next((path for path in paths if path.lower().endswith(SUFFIX)), "")


def accept_copy(event: QDropEvent) -> None:
    """Accept a drop as a copy; after a move, the file manager would delete the model file."""
    event.setDropAction(Qt.DropAction.CopyAction)
    event.accept()


class DropHint(PlainLabel):
    """Overlay shown while a model file is dragged over the window."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent=parent)
        self.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.hide()

    def show_for(self, path: str) -> None:
        colours = theme()
        room = max(200, self.width() * 2 // 3)
        text = one_line(tr("Drop to load {name}").format(name=Path(path).name))
        self.setText(self.fontMetrics().elidedText(text, Qt.TextElideMode.ElideMiddle, room))
        self.setStyleSheet(
            f"background: {colours.window}; color: {colours.text}; font-size: {px(18)}px;"
            f" border: 2px dashed {colours.accent};"
        )
        self.raise_()
        self.show()


LAYOUT_VERSION = 1
SIZE = QSize(1440, 900)
FRAME = QSize(0, 40)  # space for the window frame
SIDEBAR_WIDTH, SPLIT_WIDTH, MONITOR_HEIGHT = 216, 424, 190
CENTRE_WIDTH, RAIL_WIDTH = 360, 44
MIN_MIDDLE = 80
MAX_TITLE = 100


@dataclass(frozen=True, slots=True)
class Panels:
    """Contents of the docks; `plans` and `monitor_head` go into their title bars."""

    split: QWidget
    plans: QWidget
    placement: QWidget
    links: QWidget
    server: QWidget
    monitor: QWidget
    monitor_head: QWidget


class MainWindow(QMainWindow):
    """Layout of all widgets; `app.main` connects them."""

    model_dropped = Signal(str)
    model_picked = Signal(str)
    new_chat_requested = Signal()
    regenerate_requested = Signal()
    stop_requested = Signal()
    models_requested = Signal()
    settings_requested = Signal()
    shortcuts_requested = Signal()
    zoom_requested = Signal(int)  # 1: larger, -1: smaller, 0: normal
    page_left = Signal(str)  # name of a page shown by `show_page`
    panel_opened = Signal(object)  # QDockWidget
    closing = Signal()
    painted = Signal()  # on the first paint

    def __init__(self, panels: Panels) -> None:
        super().__init__()
        self.setWindowTitle("Tandem")
        self.setAcceptDrops(True)
        self.resize(SIZE)
        self.setMinimumHeight(480)
        scaled(self, self.setMinimumWidth, CENTRE_WIDTH + RAIL_WIDTH)  # `DockFit` hides panels
        self.model_bar, self.running = ModelBar(self), RunningChip(self)
        self.server = ServerChip(self)
        for chip in (self.server, self.running):
            self.model_bar.add_chip(chip)
        self.chat_list = ChatList(self)
        self.chat_view = ChatView(self)
        self.start_view = StartView(self)
        self.composer = Composer(self)
        self.sampling = SamplingPanel(self)
        self._middle = QStackedWidget(self)
        # below the pages' own minimum, as a long draft in a low window needs room for its buttons
        scaled(self._middle, self._middle.setMinimumHeight, MIN_MIDDLE)
        self._middle.addWidget(self.start_view)
        self._middle.addWidget(self.chat_view)
        self._centre = self._make_centre()
        self.banner = FloatingBanner(self._middle, COLUMN_WIDTH, MARGIN)
        self.setCentralWidget(self._centre)
        self.chat_list.search_left.connect(self.focus_middle)
        self.chat_view.zoomed.connect(self.zoom_requested)
        self.composer.sampling_clicked.connect(self.toggle_sampling)
        self.server.clicked.connect(lambda: self.show_dock(self.server_dock, True))
        for page in (self.model_bar, self.start_view):
            page.open_requested.connect(self.pick_model)
        self._make_docks(panels)
        self._make_rail()
        self._make_shortcuts()
        self._drop_hint = DropHint(self)
        self._is_painted, self._page_name = False, ""

    @Slot(str)
    def show_name(self, model: str) -> None:
        """Show the loaded model's name in the window title."""
        self.setWindowTitle(f"{one_line(model, MAX_TITLE)} – Tandem" if model else "Tandem")

    def come_to_front(self, activation: str) -> None:
        """Raise the window; Wayland requires an activation token from the requesting program."""
        if activation:
            os.environ["XDG_ACTIVATION_TOKEN"] = activation  # Qt reads and removes it
        self.setWindowState(self.windowState() & ~Qt.WindowState.WindowMinimized)
        self.show()
        self.raise_()
        self.activateWindow()

    @Slot(bool)
    def show_chat(self, has_messages: bool) -> None:
        """Show the conversation, or the start page if it is empty."""
        self._show_middle(self.chat_view if has_messages else self.start_view, "")

    def show_page(self, name: str, page: QWidget) -> None:
        """Show a page instead of the chat until `show_chat`; `name` identifies its rail button."""
        if self._middle.indexOf(page) < 0:
            self._middle.addWidget(page)
        self._show_middle(page, name)

    def _show_middle(self, page: QWidget, name: str) -> None:
        self._middle.setCurrentWidget(page)
        self.composer.setVisible(not name)
        self.banner.set_low(bool(name))  # keep the top of a page usable after an error
        left, self._page_name = self._page_name, name
        if left not in ("", name):
            self.page_left.emit(left)
        for other, page_button in self._page_buttons.items():
            page_button.setChecked(other == name)

    @Slot()
    def focus_middle(self) -> None:
        """Focus the message field, or the page shown instead."""
        page = self._middle.currentWidget()
        if page is not None and self.composer.isHidden():
            page.setFocus()
        else:
            self.composer.setFocus()

    @Slot(bool)
    def set_busy(self, busy: bool) -> None:
        self.composer.set_busy(busy)
        self._stop.setEnabled(busy)

    @Slot()
    def pick_model(self) -> None:
        """Ask the user for a model file."""
        files = tr("GGUF models (*{suffix});;All files (*)")
        path, _ = QFileDialog.getOpenFileName(
            self, tr("Open model"), "", files.format(suffix=SUFFIX)
        )
        if path:
            self.model_picked.emit(path)

    def layout_state(self) -> tuple[str, str]:
        """Return the window's geometry and dock layout as base64."""
        return _as_text(self.saveGeometry()), _as_text(self.saveState(LAYOUT_VERSION))

    def restore_layout(self, geometry: str, state: str) -> None:
        """Restore a layout saved by `layout_state`, as far as it fits."""
        docks = QByteArray.fromBase64(state.encode())
        if state:  # before the geometry, as hidden panels allow a smaller window
            self.restoreState(docks, LAYOUT_VERSION)
        if geometry:
            self.restoreGeometry(QByteArray.fromBase64(geometry.encode()))
        else:
            self.resize(SIZE.boundedTo(self.screen().availableSize() - FRAME))
        if state:  # again, at the window's final size
            self.restoreState(docks, LAYOUT_VERSION)
        for dock in self.findChildren(Dock):
            dock.keep_frame()

    def _make_centre(self) -> QWidget:
        scaled(self.composer, self.composer.setMaximumWidth, COLUMN_WIDTH)
        row = QHBoxLayout()
        row.setContentsMargins(MARGIN, 0, MARGIN, 16)
        row.addStretch(1)
        row.addWidget(self.composer, 1000)
        row.addStretch(1)
        centre = QWidget()
        # a fixed minimum, as a long label would otherwise push the docks aside
        scaled(centre, centre.setMinimumWidth, CENTRE_WIDTH)
        layout = QVBoxLayout(centre)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(self.model_bar)
        layout.addWidget(self._middle, 1)
        layout.addLayout(row)
        return centre

    def _make_docks(self, panels: Panels) -> None:
        side = Qt.DockWidgetArea
        right = side.RightDockWidgetArea
        self.setDockNestingEnabled(False)
        self.setCorner(Qt.Corner.BottomLeftCorner, side.LeftDockWidgetArea)
        self.setCorner(Qt.Corner.BottomRightCorner, side.BottomDockWidgetArea)
        self.chats_dock = QDockWidget(tr("Chats"), self)
        self.chats_dock.setObjectName("chats")
        self.chats_dock.setWidget(self.chat_list)
        self.addDockWidget(side.LeftDockWidgetArea, self.chats_dock)
        self.chats_dock.setFeatures(QDockWidget.DockWidgetFeature.NoDockWidgetFeatures)
        self.chats_dock.setTitleBarWidget(QWidget(self.chats_dock))
        self.split_dock = self._dock("split", tr("Split"), panels.split, right, panels.plans)
        self.placement_dock = self._dock("map", tr("Map"), panels.placement, right)
        self.links_dock = self._dock("links", tr("Links"), panels.links, right)
        self.server_dock = self._dock("server", tr("Server"), panels.server, right)
        self.sampling_dock = self._dock("sampling", tr("Sampling"), self.sampling, right)
        self.monitor_dock = self._dock(
            "monitor", tr("Monitor"), panels.monitor, side.BottomDockWidgetArea, panels.monitor_head
        )
        self.right_docks = (
            self.split_dock, self.placement_dock, self.links_dock, self.server_dock,
            self.sampling_dock,
        )  # fmt: skip
        for dock in self.right_docks[1:]:
            self.tabifyDockWidget(self.split_dock, dock)
            dock.hide()
        sides = [self.chats_dock, self.split_dock]
        self.resizeDocks(sides, [SIDEBAR_WIDTH, SPLIT_WIDTH], Qt.Orientation.Horizontal)
        self.resizeDocks([self.monitor_dock], [MONITOR_HEIGHT], Qt.Orientation.Vertical)

    def _dock(
        self,
        name: str,
        title: str,
        widget: QWidget,
        area: Qt.DockWidgetArea,
        beside: QWidget | None = None,
    ) -> QDockWidget:
        dock = Dock(name, title, widget, self, beside)
        dock.closed.connect(self.focus_middle)
        self.addDockWidget(area, dock)
        return dock

    def _make_rail(self) -> None:
        rail = Rail(self)
        rail.add_panel("chat", with_keys(tr("Chats"), "toggle-chats"), self.chats_dock)
        models = rail.add_page("models", with_keys(tr("Models"), "models"))
        models.clicked.connect(self.models_requested)
        rail.add_panel("split", tr("Split"), self.split_dock)
        rail.add_panel("map", tr("Tensor map"), self.placement_dock)
        rail.add_panel("links", tr("Links between devices"), self.links_dock)
        rail.add_panel("server", tr("Server for other programs"), self.server_dock)
        rail.add_panel("monitor", tr("Monitor"), self.monitor_dock)
        rail.add_space()
        text = with_keys(tr("Sampling and system prompt"), "sampling")
        rail.add_panel("sampling", text, self.sampling_dock)
        settings = rail.add_page("settings", with_keys(tr("Settings"), "settings"))
        settings.clicked.connect(self.settings_requested)
        self._page_buttons = {"models": models, "settings": settings}
        rail.panel_clicked.connect(self.toggle_dock)
        self.addToolBar(Qt.ToolBarArea.LeftToolBarArea, rail)
        self._rail = rail

    @Slot(object)
    def toggle_dock(self, dock: QDockWidget) -> None:
        """Hide a panel if it is in front; show it if it is hidden or behind another tab."""
        self.show_dock(dock, not is_in_front(dock))

    def show_dock(self, dock: QDockWidget, shown: bool) -> None:
        dock.setVisible(shown)
        if shown:
            dock.raise_()
            self.panel_opened.emit(dock)
        self._name_tabs()

    def _name_tabs(self) -> None:
        for tabs in self.findChildren(QTabBar):  # created by Qt for tabbed docks
            tabs.setAccessibleName(tr("Panels"))
        QTimer.singleShot(0, self, self._hide_stray_tabs)  # after the layout

    def _hide_stray_tabs(self) -> None:
        # Qt leaves tab bars from an earlier layout in a corner
        docks = [dock.geometry() for dock in self.findChildren(QDockWidget) if not dock.isHidden()]
        places = {(area.left(), area.width()) for area in docks}
        bars = self.findChildren(QTabBar, options=Qt.FindChildOption.FindDirectChildrenOnly)
        for tabs in bars:
            if (tabs.x(), tabs.width()) not in places:
                tabs.hide()

    def _make_shortcuts(self) -> None:
        for name, target in (
            ("new-chat", self.new_chat_requested.emit), ("search-chats", self._search),
            ("open-model", self.pick_model), ("models", self.models_requested.emit),
            ("toggle-chats", lambda: self.toggle_dock(self.chats_dock)),
            ("regenerate", self.regenerate_requested.emit),
            ("sampling", self.toggle_sampling), ("settings", self.settings_requested.emit),
            ("larger", partial(self.zoom_requested.emit, 1)),
            ("smaller", partial(self.zoom_requested.emit, -1)),
            ("normal-size", partial(self.zoom_requested.emit, 0)), ("quit", self.close),
            ("shortcuts", self.shortcuts_requested.emit),
        ):  # fmt: skip
            make_shortcut(name, self, target)
        self._stop = make_shortcut("stop", self, self.stop_requested.emit)
        self._stop.setEnabled(False)

    @Slot()
    def _search(self) -> None:
        self.show_dock(self.chats_dock, True)
        self.chat_list.focus_search()

    @Slot()
    def toggle_sampling(self) -> None:
        self.toggle_dock(self.sampling_dock)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._name_tabs()

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if not self._is_painted:
            self._is_painted = True
            QTimer.singleShot(0, self, self.painted.emit)  # after painting its children

    def focusNextPrevChild(self, forward: bool) -> bool:  # noqa: N802 Qt
        """Move the focus in screen order, as messages and device rows come and go.

        Qt also calls this when the focused widget is hidden or disabled; then, focus the message.
        """
        now = QApplication.focusWidget()
        if now is not None and not (now.isVisible() and now.isEnabled()):
            self.focus_middle()
            return True
        docks = [dock for dock in (*self.right_docks, self.monitor_dock) if is_in_front(dock)]
        tabs = self.findChildren(QTabBar)
        stops = tab_stops((self._rail, self.chats_dock, self._centre, *docks, *tabs))
        target = neighbour(stops, now, forward=forward)
        if target is None:
            return False
        reason = Qt.FocusReason
        target.setFocus(reason.TabFocusReason if forward else reason.BacktabFocusReason)
        _scroll_to(target)
        return True

    def closeEvent(self, event: QCloseEvent) -> None:
        self.closing.emit()
        event.accept()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        path = dropped_model(event.mimeData())
        if path:
            self._drop_hint.show_for(path)
            accept_copy(event)
        elif self.composer.isVisible():
            self.composer.dragEnterEvent(event)

    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self._drop_hint.hide()

    def dropEvent(self, event: QDropEvent) -> None:
        self._drop_hint.hide()
        path = dropped_model(event.mimeData())
        if path:
            accept_copy(event)
            self.model_dropped.emit(path)
        elif self.composer.isVisible():
            self.composer.dropEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._drop_hint.setGeometry(self.rect())

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.WindowStateChange:
            self._drop_hint.hide()


def _scroll_to(widget: QWidget) -> None:
    around = widget.parentWidget()
    while around is not None:
        if isinstance(around, QScrollArea) and around.isAncestorOf(widget):
            around.ensureWidgetVisible(widget)
        around = around.parentWidget()


def _as_text(data: QByteArray) -> str:
    return data.toBase64().toStdString()
