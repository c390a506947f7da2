"""The page of the engine: what was found, what can be installed, and an installation that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QObject, Qt, Signal, Slot
from PySide6.QtGui import QHideEvent, QKeyEvent, QMouseEvent
from PySide6.QtWidgets import (
    QApplication,
    QButtonGroup,
    QHBoxLayout,
    QProgressBar,
    QRadioButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr
from app.widgets.buttons import back_button, button
from app.widgets.controls import page_scroll
from app.widgets.layout import FlowBox, scaled
from app.widgets.shortcuts import is_pressed
from app.widgets.text import caption_text, label
from app.widgets.theme import set_role


@dataclass(frozen=True, slots=True)
class ShownEngine:
    """An engine as the page offers it.

    Attributes:
        key: kind of PyTorch, which names the choice.
        title: its name, in a few words.
        details: what it is for and how large it is.
        problem: why it cannot be chosen here; "" if it can.
        is_recommended: whether it is the best one for the devices here.
    """

    key: str
    title: str
    details: str
    problem: str = ""
    is_recommended: bool = False


class EngineChoiceRow(QWidget):
    """Row of one engine: a radio button and what there is to know."""

    def __init__(self, shown: ShownEngine) -> None:
        super().__init__()
        self.key = shown.key
        self.setProperty("role", "card")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.radio = QRadioButton(caption_text(shown.title))
        self.radio.setEnabled(not shown.problem)
        said = shown.problem or shown.details
        self._details = label(said, "muted")
        self._details.setWordWrap(True)
        self._details.setContentsMargins(24, 0, 0, 0)
        self.radio.setAccessibleName(
            tr("{name}, recommended").format(name=shown.title)
            if shown.is_recommended
            else shown.title
        )
        self.radio.setAccessibleDescription(said)
        head = QHBoxLayout()
        head.addWidget(self.radio)
        head.addStretch(1)
        if shown.is_recommended:
            head.addWidget(label(tr("Recommended"), "ok"))
        layout = QVBoxLayout(self)
        layout.setContentsMargins(12, 8, 12, 8)
        layout.setSpacing(2)
        layout.addLayout(head)
        layout.addWidget(self._details)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if self.radio.isEnabled():
            self.radio.setFocus()
            self.radio.setChecked(True)
        super().mousePressEvent(event)


class EngineChoices(QWidget):
    """List of engines; the arrow keys go from one to the next."""

    chosen = Signal(str)  # key

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(tr("Engines"))
        self.rows: list[EngineChoiceRow] = []
        self._shown: list[ShownEngine] = []
        self._group: QObject | None = None
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(6)

    @property
    def key(self) -> str:
        """Key of the chosen engine; "" for none."""
        return next((row.key for row in self.rows if row.radio.isChecked()), "")

    def show_engines(self, engines: Sequence[ShownEngine], key: str) -> None:
        """Show engines, of which the one with `key` is chosen, unless the same are shown."""
        if list(engines) == self._shown:
            return
        self._shown = list(engines)
        had_focus = any(row.radio.hasFocus() for row in self.rows)
        for old in self.rows:
            old.hide()
            old.deleteLater()
        if self._group is not None:
            self._group.deleteLater()
        group = self._group = QButtonGroup(self)
        self.rows = [EngineChoiceRow(shown) for shown in engines]
        for row in self.rows:
            group.addButton(row.radio)
            self._layout.addWidget(row)
            row.radio.setChecked(row.key == key and row.radio.isEnabled())
            row.radio.toggled.connect(self._on_toggled)
        if had_focus:
            self.focus_choice()

    @Slot(bool)
    def _on_toggled(self, is_on: bool) -> None:
        if is_on:
            self.chosen.emit(self.key)

    def focus_choice(self) -> None:
        """Put the focus on the chosen engine."""
        for row in self.rows:
            if row.radio.isChecked():
                row.radio.setFocus()


STEPS = 1000


class InstallPanel(QWidget):
    """Panel of the installation that runs, is paused or has failed."""

    pause_requested = Signal()
    resume_requested = Signal()  # also after a failure
    cancel_requested = Signal()
    leave_requested = Signal()  # to the choice, after a failure

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._title, self._stage = label(role="heading"), label(role="muted")
        self._problem, self._hint = label(role="danger"), label(role="muted")
        for text in (self._title, self._stage, self._problem, self._hint):
            text.setWordWrap(True)
        self._bar = QProgressBar(self, minimum=0, maximum=STEPS, textVisible=False)
        self._bar.setAccessibleName(tr("Progress of the installation"))
        self.pause, self.resume = button(tr("Pause")), button(tr("Resume"), "primary")
        self.retry = button(tr("Try again"), "primary")
        self.cancel, self.leave = button(tr("Cancel")), button(tr("Choose another engine"))
        self._controls = (self.pause, self.resume, self.retry, self.leave, self.cancel)
        self.pause.clicked.connect(self.pause_requested)
        for control in (self.resume, self.retry):
            control.clicked.connect(self.resume_requested)
        self.cancel.clicked.connect(self.cancel_requested)
        self.leave.clicked.connect(self.leave_requested)
        row = QHBoxLayout()
        row.setSpacing(8)
        for control in self._controls:
            row.addWidget(control)
        row.addStretch(1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 12, 16, 14)
        layout.setSpacing(8)
        for widget in (self._title, self._bar, self._stage, self._problem, self._hint):
            layout.addWidget(widget)
        layout.addLayout(row)

    @property
    def text(self) -> str:
        """Text of the panel about the installation's state."""
        return self._stage.text() if self._problem.isHidden() else self._problem.text()

    def show_running(self, title: str, share: float | None, stage: str, *, pauses: bool) -> None:
        """Show an installation that runs.

        Args:
            share: how much of it is done, 0 to 1; None where nobody knows.
            pauses: whether this stage can be paused.
        """
        self._show(title, share, stage, (self.pause, self.cancel))
        self.pause.setEnabled(pauses)

    def show_paused(self, title: str, share: float | None, stage: str) -> None:
        """Show an installation that is paused, or that the last window has left."""
        self._show(title, share or 0.0, stage, (self.resume, self.cancel))

    def show_failure(self, title: str, problem: str, hint: str) -> None:
        """Show why an installation has failed, and how to go on."""
        self._show(title, None, "", (self.retry, self.leave), problem, hint)

    def _show(
        self, title: str, share: float | None, stage: str, controls: tuple[QWidget, ...],
        problem: str = "", hint: str = "",
    ) -> None:  # fmt: skip
        had_focus = any(control.hasFocus() for control in self._controls)
        self._title.setText(title)
        self._bar.setMaximum(0 if share is None else STEPS)  # 0 makes it go to and fro
        self._bar.setValue(round(STEPS * (share or 0.0)))
        self._bar.setVisible(not problem)
        for text, words in ((self._stage, stage), (self._problem, problem), (self._hint, hint)):
            text.setText(words)
            text.setVisible(bool(words))
        for control in self._controls:
            control.setVisible(control in controls)
        if had_focus and not any(control.hasFocus() for control in controls):
            controls[0].setFocus()  # the one that was pressed has gone


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
