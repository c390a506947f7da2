"""The page of the engine: what was found, what can be installed, and an installation that runs."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QHideEvent, QKeyEvent
from PySide6.QtWidgets import QApplication, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app.core.translation import tr
from app.setup.page.views.choice_list import EngineChoices
from app.setup.page.views.install_panel import InstallPanel
from app.widgets.buttons import back_button, button
from app.widgets.controls import page_scroll
from app.widgets.flow import FlowBox
from app.widgets.shortcuts import is_pressed
from app.widgets.sizes import scaled
from app.widgets.text import label
from app.widgets.theme import set_role

WIDTH = 620
"""Largest width of what the page shows, in pixels."""


def has_focus(widget: QWidget) -> bool:
    """Return whether what has the focus is in a widget."""
    focused = QApplication.focusWidget()
    return focused is not None and widget.isAncestorOf(focused)


class EngineView(QWidget):
    """Page to install an engine, shown in place of the conversation."""

    install_requested = Signal(str)  # key of the chosen engine
    wheels_requested = Signal()
    environment_requested = Signal()
    left = Signal()
    covered = Signal()  # something else is shown in its place

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.choices, self.panel = EngineChoices(), InstallPanel()
        self.choices.chosen.connect(self._on_chosen)
        self._intro, self._found = label(role="muted"), label()
        self._space, self._problem = label(role="muted"), label(role="danger")
        for text in (self._intro, self._found, self._space, self._problem):
            text.setWordWrap(True)
        self.install = button(tr("Install"), "primary")
        self.install.clicked.connect(self._install)
        self.wheels = button(tr("Use a folder of wheels…"), "quiet")
        self.wheels.clicked.connect(self.wheels_requested)
        self.environment = button(tr("Use an existing Python environment…"), "quiet")
        self.environment.clicked.connect(self.environment_requested)
        self._choice = self._make_choice()
        self._scroll = self._make_scroll()
        self._build()
        self.show_choice()
        self.set_problem("")

    def set_intro(self, text: str) -> None:
        """Say what an engine is, or which one is in use."""
        self._intro.setText(text)

    def set_found(self, text: str) -> None:
        """Name the devices of this machine."""
        self._found.setText(text)

    def set_space(self, text: str, *, is_short: bool = False) -> None:
        """Say how much room there is, and where."""
        self._space.setText(text)
        set_role(self._space, "shortage" if is_short else "muted")
        self._space.setVisible(bool(text))

    def set_problem(self, text: str) -> None:
        """Say why something that was chosen cannot be used; "" for nothing."""
        self._problem.setText(text)
        self._problem.setVisible(bool(text))

    @property
    def problem(self) -> str:
        return self._problem.text()

    def show_choice(self) -> None:
        """Show what can be installed."""
        had_focus = has_focus(self.panel)
        self._choice.show()
        self.panel.hide()
        self._on_chosen()
        if had_focus:
            self.focus_first()

    def show_panel(self) -> None:
        """Show the installation in place of what can be installed."""
        self._choice.hide()
        self.panel.show()

    @property
    def is_choosing(self) -> bool:
        return not self._choice.isHidden()

    def focus_first(self) -> None:
        """Put the focus where the keyboard is needed first."""
        if self.is_choosing and self.install.isEnabled():
            self.install.setFocus()
        elif self.is_choosing:
            self.environment.setFocus()
        else:
            for control in (self.panel.pause, self.panel.resume, self.panel.retry):
                if not control.isHidden() and control.isEnabled():
                    control.setFocus()

    @Slot()
    def _on_chosen(self, _: str = "") -> None:
        self.install.setEnabled(bool(self.choices.key))

    @Slot()
    def _install(self) -> None:
        if self.choices.key:
            self.install_requested.emit(self.choices.key)

    def _make_choice(self) -> QWidget:
        choice = QWidget()
        first = QHBoxLayout()
        first.addWidget(self.install)
        first.addWidget(self._space, 1)
        others = FlowBox()
        others.set_widgets((self.wheels, self.environment))
        layout = QVBoxLayout(choice)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(self.choices)
        layout.addLayout(first)
        layout.addWidget(others)
        return choice

    def _make_scroll(self) -> QScrollArea:
        content = QWidget()
        scaled(content, content.setMaximumWidth, WIDTH)
        layout = QVBoxLayout(content)
        layout.setContentsMargins(0, 0, 12, 0)
        layout.setSpacing(10)
        for widget in (self._intro, self._found, self._problem, self._choice, self.panel):
            layout.addWidget(widget)
        layout.addStretch(1)
        scroll = page_scroll(content, layout, tr("Engine"))
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        return scroll

    def _build(self) -> None:
        back = back_button()
        back.clicked.connect(self.left)
        head = QHBoxLayout()
        head.addWidget(label(tr("Engine"), "title"), 1)
        head.addWidget(back)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(20, 16, 8, 8)
        layout.setSpacing(8)
        layout.addLayout(head)
        layout.addWidget(self._scroll, 1)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        if not event.spontaneous():  # as it is where the window is minimised
            self.covered.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("leave-page", event):
            self.left.emit()
        else:
            super().keyPressEvent(event)
