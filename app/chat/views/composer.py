"""The message field with the context gauge and a button that sends or stops."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QMimeData, QRectF, QSize, Qt, QTimer, Signal, Slot
from PySide6.QtGui import (
    QColor,
    QDragEnterEvent,
    QDropEvent,
    QFocusEvent,
    QImage,
    QKeyEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPlainTextEdit, QSizePolicy, QVBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.buttons import ElidedButton, button
from app.widgets.layout import scaled
from app.widgets.shortcuts import is_pressed, with_keys
from app.widgets.text import label, set_tip
from app.widgets.theme import px, set_role, theme, theme_signals

WARN_SHARE, DANGER_SHARE = 0.8, 0.95


@dataclass(frozen=True, slots=True)
class ContextUsage:
    """Token counts for the open chat and its draft.

    Attributes:
        size: context length; 0 while no model is loaded.
        n_before: tokens in the system prompt, messages and chat template.
        n_draft: tokens in the draft.
        n_answer: tokens in the running answer.
        n_kept: part of `n_before` that remains if all older messages are dropped.
        is_counted: whether the counts are from the tokenizer rather than from the last answer.
    """

    size: int = 0
    n_before: int = 0
    n_draft: int = 0
    n_answer: int = 0
    n_kept: int = 0
    is_counted: bool = False

    @property
    def used(self) -> int:
        """Total number of tokens."""
        return self.n_before + self.n_draft + self.n_answer

    @property
    def share(self) -> float:
        """Used share of the context; above 1 if the tokens do not fit."""
        return self.used / self.size if self.size else 0.0

    @property
    def fits(self) -> bool:
        """Whether the prompt and the draft leave room for at least one answer token."""
        return not self.size or not self.n_draft or self.used < self.size

    @property
    def fits_alone(self) -> bool:
        """Whether the draft fits if all older messages are dropped."""
        return self.n_kept + self.n_draft < self.size

    def tip(self) -> str:
        """Return the counts as text, one per line."""
        lines = [
            tr("{used} of {size} tokens").format(used=_spaced(self.used), size=_spaced(self.size))
        ]
        if not self.is_counted:
            return lines[0]
        before = tr("{n} system prompt, messages and template")
        lines.append(before.format(n=_spaced(self.n_before)))
        if self.n_draft:
            lines.append(tr("{n} this message").format(n=_spaced(self.n_draft)))
        if self.n_answer:
            lines.append(tr("{n} the answer so far").format(n=_spaced(self.n_answer)))
        left = self.size - self.used
        if left > 0:
            lines.append(tr("{n} left for the answer").format(n=_spaced(left)))
        else:
            lines.append(tr("{n} too many").format(n=_spaced(1 - left)))
        return "\n".join(lines)


class ContextGauge(QWidget):
    """Gauge that shows a `ContextUsage` as a percentage and a ring, with details in a tooltip."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._label = label(role="muted")
        self._ring = _Ring(self)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(self._label)
        layout.addWidget(self._ring)
        self.show_usage(ContextUsage())

    @property
    def text(self) -> str:
        """The percentage as shown."""
        return self._label.text()

    def show_usage(self, usage: ContextUsage) -> None:
        """Show the usage; hide the gauge if there is no context."""
        share = min(usage.share, 1.0)
        percent = tr("context {share} %").format(share=f"{100 * share:.0f}")
        text = percent if usage.fits else tr("too long")
        self._label.setText(text)
        set_role(self._label, "muted" if usage.fits else "danger")
        self._ring.set_share(share)
        set_tip(self, usage.tip())
        self.setAccessibleName(text)
        self.setAccessibleDescription(usage.tip())
        self.setVisible(usage.size > 0)

    def set_compact(self, compact: bool) -> None:
        """Set whether to show only the ring, without the text."""
        self._label.setHidden(compact)


class _Ring(QWidget):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._share = 0.0
        scaled(self, self.setFixedSize, 16, 16)
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
        area = QRectF(px(2), px(2), px(12), px(12))
        painter.setPen(QPen(QColor(colours.line), 2.5))
        painter.drawEllipse(area)
        pen = QPen(QColor(filled), 2.5)
        pen.setCapStyle(Qt.PenCapStyle.FlatCap)
        painter.setPen(pen)
        painter.drawArc(area, 90 * 16, -int(self._share * 360 * 16))
        painter.end()


MAX_LINES = 12

IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
"""MIME types of images that are passed on without decoding."""


class GrowingEdit(QPlainTextEdit):
    """Text field that grows from one line to twelve, then scrolls.

    Args:
        has_lines: whether Enter inserts a line break and Ctrl+Enter submits.
    """

    submitted = Signal()
    focus_changed = Signal()
    files_given = Signal(list)  # paths of pasted files, if `takes_files`
    image_pasted = Signal(object)  # bytes of a file, or a QImage, if `takes_files`

    def __init__(self, parent: QWidget | None = None, *, has_lines: bool = False) -> None:
        super().__init__(parent)
        self._has_lines = has_lines
        self.takes_files = False
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setTabChangesFocus(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setProperty("role", "message")
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)
        theme_signals().changed.connect(self._fit)
        self._fit()

    @Slot()
    def _fit(self) -> None:
        n_lines = max(1, int(self.document().size().height()))  # plain text layouts count lines
        height = min(n_lines, MAX_LINES) * self.fontMetrics().lineSpacing() + 6
        is_scrolling = n_lines > MAX_LINES
        policy = Qt.ScrollBarPolicy
        self.setVerticalScrollBarPolicy(
            policy.ScrollBarAsNeeded if is_scrolling else policy.ScrollBarAlwaysOff
        )
        if height != self.height():
            self.setFixedHeight(height)

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.height())

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("new-line", event):
            super().keyPressEvent(event)
        elif is_pressed("submit-lines" if self._has_lines else "send", event):
            self.submitted.emit()
        elif is_pressed("stop", event):
            event.ignore()
        else:
            super().keyPressEvent(event)

    def canInsertFromMimeData(self, source: QMimeData) -> bool:  # noqa: N802 Qt
        """Refuse files, which the window opens instead."""
        if self.takes_files and has_image(source) and not source.hasUrls():
            return True
        return not source.hasUrls() and super().canInsertFromMimeData(source)

    def insertFromMimeData(self, source: QMimeData) -> None:  # noqa: N802 Qt
        """Accept pasted files and images, if `takes_files`."""
        paths = local_files(source) if self.takes_files else []
        picture = pasted_image(source) if self.takes_files and not paths else None
        if paths:
            self.files_given.emit(paths)
        elif picture is not None:
            self.image_pasted.emit(picture)
        else:
            super().insertFromMimeData(source)

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.focus_changed.emit()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.focus_changed.emit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()


def local_files(data: QMimeData) -> list[str]:
    """Return the paths of pasted or dropped local files."""
    return [url.toLocalFile() for url in data.urls() if url.isLocalFile()]


def has_image(data: QMimeData) -> bool:
    """Return whether the data has an image but no text."""
    is_picture = data.hasImage() or any(map(data.hasFormat, IMAGE_TYPES))
    return is_picture and not data.hasFormat("text/plain")


def pasted_image(data: QMimeData) -> bytes | QImage | None:
    """Return a pasted or dropped image, preferably as the bytes of its file."""
    if not has_image(data):
        return None
    kind = next((kind for kind in IMAGE_TYPES if data.hasFormat(kind)), None)
    if kind is not None:
        return bytes(data.data(kind).data())
    image = data.imageData()
    return image if isinstance(image, QImage) and not image.isNull() else None


DRAFT_MS = 250  # delay before typed text is reported
COMPACT_WIDTH = 360  # below this width the gauge shows only its ring
MIN_SAMPLING = 40  # minimum width of the sampling button


class Composer(QFrame):
    """Message field: Enter sends the message, Shift+Enter inserts a line break."""

    sent = Signal(str)
    stop_requested = Signal()
    draft_changed = Signal(str)
    sampling_clicked = Signal()
    files_given = Signal(list)  # paths of dropped or pasted files
    image_pasted = Signal(object)  # bytes of a file, or a QImage
    wait_cancelled = Signal()  # do not send the message automatically

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "composer")
        self._is_busy = self._has_files = self._is_waiting = False
        self.setAcceptDrops(True)
        self.edit = GrowingEdit(self)
        self.invite(pictures=False)
        self.edit.setAccessibleName(tr("Message"))
        self.edit.submitted.connect(self.submit)
        self.edit.textChanged.connect(self._on_typed)
        self.edit.focus_changed.connect(self.update)  # the frame shows the focus
        self.edit.takes_files = True
        self.edit.files_given.connect(self.files_given)
        self.edit.image_pasted.connect(self.image_pasted)
        self._sampling = ElidedButton(tr("Sampling"))
        self._sampling.setProperty("role", "pill")
        scaled(self._sampling, self._sampling.setMinimumWidth, MIN_SAMPLING)
        self._sampling.clicked.connect(self.sampling_clicked)
        self.gauge = ContextGauge(self)
        self._send = button(tr("Send"), "primary")
        self._send.clicked.connect(self._press)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self._sampling)
        self._tools = QHBoxLayout()
        self._tools.setSpacing(8)
        row.addLayout(self._tools)
        row.addStretch()
        row.addWidget(self.gauge)
        row.addWidget(self._send)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(14, 12, 12, 12)
        layout.setSpacing(10)
        layout.addWidget(self.edit)
        layout.addWidget(self._make_wait())
        layout.addLayout(row)
        self._column = layout
        self.setFocusProxy(self.edit)
        self._draft_timer = QTimer(self, singleShot=True, interval=DRAFT_MS)
        self._draft_timer.timeout.connect(self._report_draft)
        self._update_button()

    def _make_wait(self) -> QWidget:
        self._wait, self._wait_text = QWidget(), label(role="muted")
        self._wait_text.setWordWrap(True)
        self._cancel_wait = button(
            tr("Cancel"), "quiet", tr("Do not send the message automatically")
        )
        self._cancel_wait.clicked.connect(self.wait_cancelled)
        row = QHBoxLayout(self._wait)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(self._wait_text, 1)
        row.addWidget(self._cancel_wait)
        self._wait.hide()
        return self._wait

    def show_wait(self, text: str, *, can_cancel: bool) -> None:
        """Show a status below the message, for example what it waits for; "" hides it."""
        self._wait_text.setText(text)
        self._cancel_wait.setVisible(can_cancel)
        self._is_waiting = can_cancel
        self._wait.setVisible(bool(text))
        self._update_button()

    def add_above(self, widget: QWidget) -> None:
        """Add a widget above the text."""
        self._column.insertWidget(0, widget)

    def set_has_files(self, has_files: bool) -> None:
        """Set whether files are attached, which can be sent without text."""
        self._has_files = has_files
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
        """Set whether an answer is running, so that the button stops it."""
        self._is_busy = busy
        self._update_button()

    def set_sampling_summary(self, text: str) -> None:
        self._sampling.set_full_text(text)
        self._sampling.setAccessibleName(tr("Sampling: {text}").format(text=text))

    @Slot()
    def submit(self) -> None:
        """Send the message, unless it is empty."""
        if self.text.strip() or self._has_files:
            self.sent.emit(self.text)

    @Slot()
    def _press(self) -> None:
        if self._is_busy:
            self.stop_requested.emit()
        else:
            self.submit()

    def invite(self, *, pictures: bool) -> None:
        """Show in the empty field what can be dropped: images only if the model reads them."""
        self.edit.setPlaceholderText(
            tr("Message, or drop images and files anywhere")
            if pictures
            else tr("Message, or drop a .gguf anywhere")
        )
        self.edit.viewport().update()  # Qt would keep the old text until the next repaint

    @Slot()
    def _on_typed(self) -> None:
        self._update_button()
        if not self._draft_timer.isActive():  # a restart on every key would postpone the report
            self._draft_timer.start()

    @Slot()
    def _report_draft(self) -> None:
        self.draft_changed.emit(self.text)

    def flush_draft(self) -> None:
        """Report the draft now, before the chat changes or the window closes."""
        if self._draft_timer.isActive():
            self._draft_timer.stop()
            self._report_draft()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        data = event.mimeData()
        if attachable(data) or (has_image(data) and not local_files(data)):
            event.setDropAction(Qt.DropAction.CopyAction)
            event.accept()
        else:
            event.ignore()  # the window opens models

    def dropEvent(self, event: QDropEvent) -> None:
        data = event.mimeData()
        paths = attachable(data)
        picture = None if paths else pasted_image(data)
        if not paths and picture is None:
            event.ignore()
            return
        event.setDropAction(Qt.DropAction.CopyAction)
        event.accept()
        if paths:
            self.files_given.emit(paths)
        else:
            self.image_pasted.emit(picture)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.gauge.set_compact(self.width() < px(COMPACT_WIDTH))

    def _update_button(self) -> None:
        self._send.setText(tr("Stop") if self._is_busy else tr("Send"))
        set_tip(
            self._send,
            with_keys(tr("Stop"), "stop") if self._is_busy else with_keys(tr("Send"), "send"),
        )
        set_role(self._send, "" if self._is_busy else "primary")
        is_ready = (self._has_files or bool(self.text.strip())) and not self._is_waiting
        self._send.setEnabled(self._is_busy or is_ready)


def attachable(data: QMimeData) -> list[str]:
    """Return the dropped files to attach; none if a model is among them."""
    paths = local_files(data)
    return [] if any(path.lower().endswith(".gguf") for path in paths) else paths


def _spaced(n: int) -> str:
    return f"{n:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
