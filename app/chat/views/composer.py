"""The message field, with the gauge of the context and one button to send or stop."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QVBoxLayout, QWidget

from app.chat.views.growing_edit import GrowingEdit
from app.theme import set_role, theme, theme_signals
from app.widgets.buttons import button
from app.widgets.text import label, set_tip

DRAFT_MS = 250  # a draft is reported this long after the first key since the last report
COMPACT_WIDTH = 360  # below this width the gauge of the context shows only its ring
WARN_SHARE, DANGER_SHARE = 0.8, 0.95


class Composer(QFrame):
    """Field for a message: Enter sends it, Shift+Enter starts a line."""

    sent = Signal(str)
    stop_requested = Signal()
    draft_changed = Signal(str)
    sampling_clicked = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "composer")
        self._is_busy = False
        self.edit = GrowingEdit(self)
        self.edit.setPlaceholderText("Message, or drop a .gguf anywhere")
        self.edit.setAccessibleName("Message")
        self.edit.submitted.connect(self._submit)
        self.edit.textChanged.connect(self._on_typed)
        self.edit.focus_changed.connect(self.update)  # the frame shows the focus
        self._sampling = button("Sampling")
        self._sampling.setStyleSheet("border-radius: 12px; padding: 4px 12px; font-size: 12px;")
        self._sampling.clicked.connect(self.sampling_clicked)
        self._gauge = ContextGauge(self)
        self._send = button("Send", "primary")
        self._send.setMinimumWidth(64)
        self._send.clicked.connect(self._press)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self._sampling)
        self._tools = QHBoxLayout()
        self._tools.setSpacing(8)
        row.addLayout(self._tools)
        row.addStretch()
        row.addWidget(self._gauge)
        row.addWidget(self._send)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(14, 12, 12, 12)
        layout.setSpacing(10)
        layout.addWidget(self.edit)
        layout.addLayout(row)
        self.setFocusProxy(self.edit)
        self._draft_timer = QTimer(self, singleShot=True, interval=DRAFT_MS)
        self._draft_timer.timeout.connect(self._report_draft)
        self._update_button()

    def add_tool(self, tool: QWidget) -> None:
        """Add a button below the text."""
        self._tools.addWidget(tool)

    @property
    def text(self) -> str:
        return self.edit.toPlainText()

    def set_text(self, text: str) -> None:
        """Show a draft."""
        self._draft_timer.stop()
        if text != self.text:
            self.edit.blockSignals(True)
            self.edit.setPlainText(text)
            self.edit.blockSignals(False)
        self._update_button()

    def set_busy(self, busy: bool) -> None:
        """Set whether an answer is being written, which the button then stops."""
        self._is_busy = busy
        self._update_button()

    def set_context(self, used: int, size: int) -> None:
        self._gauge.set_use(used, size)

    def set_sampling_summary(self, text: str) -> None:
        self._sampling.setText(text)
        self._sampling.setAccessibleName(f"Sampling: {text}")

    @Slot()
    def _submit(self) -> None:
        if self.text.strip():
            self.sent.emit(self.text)

    @Slot()
    def _press(self) -> None:
        if self._is_busy:
            self.stop_requested.emit()
        else:
            self._submit()

    @Slot()
    def _on_typed(self) -> None:
        self._update_button()
        if not self._draft_timer.isActive():  # typing on and on must not put it off
            self._draft_timer.start()

    @Slot()
    def _report_draft(self) -> None:
        self.draft_changed.emit(self.text)

    def flush_draft(self) -> None:
        """Report the draft now, before the chat changes or the window closes."""
        if self._draft_timer.isActive():
            self._draft_timer.stop()
            self._report_draft()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._gauge.set_compact(self.width() < COMPACT_WIDTH)

    def _update_button(self) -> None:
        self._send.setText("Stop" if self._is_busy else "Send")
        set_tip(self._send, "Stop (Esc)" if self._is_busy else "Send (Enter)")
        set_role(self._send, "" if self._is_busy else "primary")
        self._send.setEnabled(self._is_busy or bool(self.text.strip()))


class ContextGauge(QWidget):
    """Gauge of the context: a percentage and a ring for the part that the conversation fills."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._label = label(role="muted")
        self._ring = _Ring(self)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(self._label)
        layout.addWidget(self._ring)
        self.set_use(0, 0)

    def set_use(self, used: int, size: int) -> None:
        """Show `used` of `size` tokens; hide the gauge while `size` is 0."""
        share = min(used / size, 1.0) if size else 0.0
        text = f"context {share:.0%}".replace("%", " %")
        self._label.setText(text)
        self._ring.set_share(share)
        set_tip(self, f"{used:,} of {size:,} tokens".replace(",", " "))
        self.setAccessibleName(f"{text}, {used} of {size} tokens")
        self.setVisible(size > 0)

    def set_compact(self, compact: bool) -> None:
        self._label.setHidden(compact)


class _Ring(QWidget):
    """Ring that is filled by a share of 0 to 1."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._share = 0.0
        self.setFixedSize(QSize(16, 16))
        theme_signals().changed.connect(self.update)

    def set_share(self, share: float) -> None:
        if share != self._share:
            self._share = share
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        colours = theme()
        filled = colours.accent
        if self._share >= WARN_SHARE:
            filled = colours.danger if self._share >= DANGER_SHARE else colours.warn
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        area = QRectF(2, 2, 12, 12)
        painter.setPen(QPen(QColor(colours.line), 2.5))
        painter.drawEllipse(area)
        pen = QPen(QColor(filled), 2.5)
        pen.setCapStyle(Qt.PenCapStyle.FlatCap)
        painter.setPen(pen)
        painter.drawArc(area, 90 * 16, -int(self._share * 360 * 16))
        painter.end()
