"""The engine page: detected devices, available engines, and the running installation."""

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
from app.widgets.layout import NO_MARGINS, FlowBox, fill, scaled
from app.widgets.shortcuts import is_pressed
from app.widgets.text import caption_text, label
from app.widgets.theme import set_role


@dataclass(frozen=True, slots=True)
class ShownEngine:
    """An engine on the page."""

    key: str  # kind of PyTorch
    title: str
    details: str  # purpose and size
    problem: str = ""  # why it cannot be selected
    is_recommended: bool = False


class EngineChoiceRow(QWidget):
    """Row for one engine: a radio button and details."""

    def __init__(self, shown: ShownEngine) -> None:
        super().__init__()
        self.key = shown.key
        self.setProperty("role", "card")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.radio = QRadioButton(caption_text(shown.title))
        self.radio.setEnabled(not shown.problem)
        details = shown.problem or shown.details
        self._details = label(details, "muted")
        self._details.setWordWrap(True)
        self._details.setContentsMargins(24, 0, 0, 0)
        self.radio.setAccessibleName(
            tr("{name}, recommended").format(name=shown.title)
            if shown.is_recommended
            else shown.title
        )
        self.radio.setAccessibleDescription(details)
        head = fill(QHBoxLayout(), self.radio, (None, 1))
        if shown.is_recommended:
            head.addWidget(label(tr("Recommended"), "ok"))
        fill(QVBoxLayout(self), head, self._details, margins=(12, 8, 12, 8), spacing=2)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if self.radio.isEnabled():
            self.radio.setFocus()
            self.radio.setChecked(True)
        super().mousePressEvent(event)


class EngineChoices(QWidget):
    """List of engines, navigable with the arrow keys."""

    chosen = Signal(str)  # key

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(tr("Engines"))
        self.rows: list[EngineChoiceRow] = []
        self._shown: list[ShownEngine] = []
        self._group: QObject | None = None
        self._layout = fill(QVBoxLayout(self), margins=NO_MARGINS, spacing=6)

    @property
    def key(self) -> str:
        """Key of the selected engine; "" if none is."""
        return next((row.key for row in self.rows if row.radio.isChecked()), "")

    def show_engines(self, engines: Sequence[ShownEngine], key: str) -> None:
        """Show engines with `key` selected, unless the same engines are already shown."""
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
        """Focus the selected engine."""
        for row in self.rows:
            if row.radio.isChecked():
                row.radio.setFocus()


STEPS = 1000


class InstallPanel(QWidget):
    """Panel for a running, paused or failed installation."""

    pause_requested = Signal()
    resume_requested = Signal()  # also after a failure
    cancel_requested = Signal()
    leave_requested = Signal()  # after a failure, back to the choice of engines

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._title, self._stage = label(role="heading"), label(role="muted")
        self._problem, self._hint = label(role="danger"), label(role="muted")
        for text in (self._title, self._stage, self._problem, self._hint):
            text.setWordWrap(True)
        self._bar = QProgressBar(self, minimum=0, maximum=STEPS, textVisible=False)
        self._bar.setAccessibleName(tr("Installation progress"))
        self.pause, self.resume = button(tr("Pause")), button(tr("Resume"), "primary")
        self.retry = button(tr("Try again"), "primary")
        self.cancel, self.leave = button(tr("Cancel")), button(tr("Choose another engine"))
        self._controls = (self.pause, self.resume, self.retry, self.leave, self.cancel)
        self.pause.clicked.connect(self.pause_requested)
        for control in (self.resume, self.retry):
            control.clicked.connect(self.resume_requested)
        self.cancel.clicked.connect(self.cancel_requested)
        self.leave.clicked.connect(self.leave_requested)
        row = fill(QHBoxLayout(), *self._controls, (None, 1), spacing=8)
        parts = self._title, self._bar, self._stage, self._problem, self._hint, row
        fill(QVBoxLayout(self), *parts, margins=(16, 12, 16, 14), spacing=8)

    @property
    def text(self) -> str:
        """The installation's state as text."""
        return self._stage.text() if self._problem.isHidden() else self._problem.text()

    def show_running(self, title: str, share: float | None, stage: str, *, pauses: bool) -> None:
        """Show a running installation; `share` is the completed fraction, if known."""
        self._show(title, share, stage, (self.pause, self.cancel))
        self.pause.setEnabled(pauses)

    def show_paused(self, title: str, share: float | None, stage: str) -> None:
        """Show a paused installation."""
        self._show(title, share or 0.0, stage, (self.resume, self.cancel))

    def show_failure(self, title: str, problem: str, hint: str) -> None:
        """Show a failed installation."""
        self._show(title, None, "", (self.retry, self.leave), problem, hint)

    def _show(
        self, title: str, share: float | None, stage: str, controls: tuple[QWidget, ...],
        problem: str = "", hint: str = "",
    ) -> None:  # fmt: skip
        had_focus = any(control.hasFocus() for control in self._controls)
        self._title.setText(title)
        self._bar.setMaximum(0 if share is None else STEPS)  # 0 shows a busy indicator
        self._bar.setValue(round(STEPS * (share or 0.0)))
        self._bar.setVisible(not problem)
        for text, words in ((self._stage, stage), (self._problem, problem), (self._hint, hint)):
            text.setText(words)
            text.setVisible(bool(words))
        for control in self._controls:
            control.setVisible(control in controls)
        if had_focus and not any(control.hasFocus() for control in controls):
            controls[0].setFocus()  # the clicked button is now hidden


WIDTH = 620  # maximum content width in pixels


def has_focus(widget: QWidget) -> bool:
    """Return whether the focus is inside a widget."""
    focused = QApplication.focusWidget()
    return focused is not None and widget.isAncestorOf(focused)


class EngineView(QWidget):
    """Page for installing an engine, shown instead of the chat."""

    install_requested = Signal(str)  # key of the selected engine
    wheels_requested = Signal()
    environment_requested = Signal()
    left = Signal()
    covered = Signal()  # another page is shown instead

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
        """Set the introduction."""
        self._intro.setText(text)

    def set_found(self, text: str) -> None:
        """Set the text about this machine's devices."""
        self._found.setText(text)

    def set_space(self, text: str, *, is_short: bool = False) -> None:
        """Set the text about disk space."""
        self._space.setText(text)
        set_role(self._space, "shortage" if is_short else "muted")
        self._space.setVisible(bool(text))

    def set_problem(self, text: str) -> None:
        """Show why the choice cannot be used; "" if it can."""
        self._problem.setText(text)
        self._problem.setVisible(bool(text))

    @property
    def problem(self) -> str:
        return self._problem.text()

    def show_choice(self) -> None:
        """Show the available engines."""
        had_focus = has_focus(self.panel)
        self._choice.show()
        self.panel.hide()
        self._on_chosen()
        if had_focus:
            self.focus_first()

    def show_panel(self) -> None:
        """Show the installation instead of the available engines."""
        self._choice.hide()
        self.panel.show()

    @property
    def is_choosing(self) -> bool:
        return not self._choice.isHidden()

    def focus_first(self) -> None:
        """Focus the control that the user needs first."""
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
        first = fill(QHBoxLayout(), self.install, (self._space, 1))
        others = FlowBox()
        others.set_widgets((self.wheels, self.environment))
        fill(QVBoxLayout(choice), self.choices, first, others, margins=NO_MARGINS, spacing=8)
        return choice

    def _make_scroll(self) -> QScrollArea:
        content = QWidget()
        scaled(content, content.setMaximumWidth, WIDTH)
        parts = self._intro, self._found, self._problem, self._choice, self.panel, (None, 1)
        layout = fill(QVBoxLayout(content), *parts, margins=(0, 0, 12, 0), spacing=10)
        scroll = page_scroll(content, layout, tr("Engine"))
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        return scroll

    def _build(self) -> None:
        back = back_button()
        back.clicked.connect(self.left)
        head = fill(QHBoxLayout(), (label(tr("Engine"), "title"), 1), back)
        fill(QVBoxLayout(self), head, (self._scroll, 1), margins=(20, 16, 8, 8), spacing=8)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        if not event.spontaneous():  # spontaneous: the window was minimised
            self.covered.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("leave-page", event):
            self.left.emit()
        else:
            super().keyPressEvent(event)
