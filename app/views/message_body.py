"""The text of an answer as a column of prose and code, which grows while it is written."""

from __future__ import annotations

import time

from PySide6.QtCore import QTimer, Slot
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.chat.markdown import Code, MarkdownStream, Piece
from app.views.code_view import CodeView
from app.views.prose_view import Mark, ProseView

MIN_PAUSE_S, MAX_PAUSE_S = 0.04, 0.25
SHARE_OF_TIME = 0.03  # of one core that showing an answer may take from the engine
SMOOTHING = 0.3


class MessageBody(QWidget):
    """Shows markdown. Blocks that are complete are written once; only the last is written again."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(10)
        self._stream = MarkdownStream()
        self._pending = ""
        self._views: list[ProseView | CodeView] = []
        self._n_final = 0  # views that belong to complete blocks
        self._mark: Mark | None = None  # in the last of them, when it is prose
        self._due_at = 0.0
        self._cost_s = 0.0  # of one showing, painting included
        self._cpu_s = time.thread_time()
        self._timer = QTimer(self, singleShot=True)
        self._timer.timeout.connect(self.flush)

    def append(self, text: str) -> None:
        """Add text; it shows at once or, when showing is slow, after a pause in proportion."""
        self._pending += text
        wait_s = self._due_at - time.perf_counter()
        if wait_s <= 0:
            self.flush()
        elif not self._timer.isActive():
            self._timer.start(int(wait_s * 1000) + 1)

    def set_text(self, text: str) -> None:
        """Show another text from its beginning."""
        self._truncate_all()
        self._stream, self._pending = MarkdownStream(), text
        self.flush()

    @Slot()
    def flush(self) -> None:
        """Show all that was added."""
        self._timer.stop()
        if not self._pending:
            return
        self._measure()
        text, self._pending = self._pending, ""
        final = self._stream.feed(text)
        if final:
            self._take_back()
            self._write(final)
            self._set_mark()
        self._write_tail(self._stream.tail())

    def pieces_shown(self) -> list[str]:
        """What stands on screen, view by view (for tests and for copying)."""
        return [
            view.code if isinstance(view, CodeView) else view.document().toPlainText()
            for view in self._views
        ]

    def _measure(self) -> None:
        """Set the next showing by what this thread computed since the last one.

        Laying out and painting happen later, in Qt; only the thread's own clock sees all of it.
        """
        cpu_s, now = time.thread_time(), time.perf_counter()
        if now < self._due_at + MAX_PAUSE_S:  # a showing just before, so it is what cost this
            self._cost_s += SMOOTHING * (cpu_s - self._cpu_s - self._cost_s)
        self._cpu_s = cpu_s
        pause_s = min(max(MIN_PAUSE_S, self._cost_s / SHARE_OF_TIME), MAX_PAUSE_S)
        self._due_at = now + pause_s

    def _write_tail(self, tail: list[Piece]) -> None:
        last = self._views[-1] if len(self._views) > self._n_final else None
        if isinstance(last, CodeView) and len(tail) == 1 and isinstance(tail[0], Code):
            last.set_code(tail[0])
            return
        self._take_back()
        self._write(tail)

    def _write(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Code):
                self._add(CodeView(piece, self))
                continue
            last = self._views[-1] if self._views else None
            if not isinstance(last, ProseView):
                last = ProseView(self)
                self._add(last)
            last.write([piece])

    def _add(self, view: ProseView | CodeView) -> None:
        self._views.append(view)
        self._layout.addWidget(view)

    def _set_mark(self) -> None:
        self._n_final = len(self._views)
        last = self._views[-1] if self._views else None
        self._mark = last.mark() if isinstance(last, ProseView) else None

    def _take_back(self) -> None:
        """Remove what was written for the block that is not complete."""
        for view in self._views[self._n_final :]:
            self._layout.removeWidget(view)
            view.hide()
            view.deleteLater()
        del self._views[self._n_final :]
        if self._mark is not None:
            last = self._views[-1]
            assert isinstance(last, ProseView)
            last.truncate(self._mark)

    def _truncate_all(self) -> None:
        self._n_final, self._mark = 0, None
        self._take_back()
