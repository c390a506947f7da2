"""The text of an answer, as a column of prose, code, tables and formulas.

An existing text is shown in small steps, starting from its beginning or end, and can then grow.
Portions stay hidden until they are complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from PySide6.QtCore import QPoint, QTimer, Signal, Slot
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.chat.markdown import (
    CodeBlock,
    DisplayFormula,
    MarkdownStream,
    Piece,
    Portion,
    Rule,
    Table,
    TextLine,
    TextSpan,
    normal,
    portions,
)
from app.chat.views.prose_view import START, ProseView, TextBlock, TextMark
from app.core.process.spare_time import take_step
from app.widgets.row_table import place_among

MIN_PAUSE_S, MAX_PAUSE_S = 0.04, 0.25
SHARE_OF_TIME = 0.03  # share of one core that a growing answer may use
SMOOTHING = 0.3
LINE_LENGTH = 80  # characters, for estimates

if TYPE_CHECKING:
    from app.chat.views.code_view import CodeView
    from app.chat.views.formula_view import FormulaView
    from app.chat.views.table_view import TableView

    SingleView = CodeView | TableView | FormulaView  # each shows one piece; a ProseView shows many
    BodyView = ProseView | SingleView


@dataclass(slots=True)
class _Shown:
    # a piece on screen that may still change, and how to return to the state before it
    piece: Piece
    n_views: int
    mark: TextMark | None  # end of the preceding text, if that is in a prose view


@dataclass(frozen=True, slots=True)
class _Made:
    # a portion of text on screen
    start: int  # offset of the portion's source
    n_views: int
    n_lines: int  # estimated


def rough_lines(text: str) -> int:
    """Estimate how many lines a text takes on screen."""
    return text.count("\n") + len(text) // LINE_LENGTH + 2


class MessageBody(QWidget):
    """Markdown view; final pieces are written once, others are updated incrementally."""

    place_wanted = Signal(QPoint)  # target of a link within the message, in global coordinates

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._layout = QVBoxLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(10)
        self._stream = MarkdownStream()
        self._pending = ""
        self._views: list[BodyView] = []
        self._open: list[_Shown] = []  # pieces at the end that are not yet final
        self._text = ""  # the text to show in steps
        self._steps: Iterator[None] | None = None
        self._made: list[_Made] = []  # portions of `_text`, from top to bottom
        self._due_at = 0.0
        self._cost_s = 0.0  # CPU time per update, including painting
        self._cpu_s = time.thread_time()
        self._timer = QTimer(self, singleShot=True)
        self._timer.timeout.connect(self.flush)

    def begin(self, text: str, *, from_end: bool = False) -> None:
        """Set a text to show in steps; see `make_next`."""
        self._text = normal(text)
        self._steps = self._make(from_end=from_end) if text else None

    def make_next(self) -> bool:
        """Show the next part of the text; return False if there is none."""
        if self._steps is None:
            return False
        if not take_step(self._steps):
            self._steps = None
            self.flush()
        return True

    @property
    def n_lines(self) -> int:
        """Estimated number of lines in the portions on screen."""
        return sum(made.n_lines for made in self._made)

    def append(self, text: str) -> None:
        """Append text; updates are delayed in proportion to their cost."""
        self._pending += text
        if self._steps is not None:
            return
        wait_s = self._due_at - time.perf_counter()
        if wait_s <= 0:
            self.flush()
        elif not self._timer.isActive():
            self._timer.start(int(wait_s * 1000) + 1)

    def set_text(self, text: str) -> None:
        """Replace the text."""
        for view in self._views:
            self._discard(view)
        self._views, self._open, self._made, self._steps = [], [], [], None
        self._stream, self._pending = MarkdownStream(), text
        self.flush()

    @Slot()
    def flush(self) -> None:
        """Show all pending text now."""
        self._timer.stop()
        if not self._pending or self._steps is not None:
            return
        if self._made:
            self._open_end()
        self._measure()
        text, self._pending = self._pending, ""
        complete = self._stream.feed(text)
        self._show(complete + self._stream.tail())
        del self._open[: len(complete)]

    def pieces_shown(self) -> list[str]:
        """Return the text on screen, view by view."""
        return [view.plain_text for view in self._views]

    def _make(self, *, from_end: bool) -> Iterator[None]:
        found = yield from portions(self._text)
        for portion in reversed(found) if from_end else found:
            views: list[BodyView] = []
            for pieces in portion.steps():
                self._write_portion(portion, pieces, views)
                yield
            n_lines = sum(map(rough_lines, portion.sources))
            self._made.insert(
                0 if from_end else len(self._made), _Made(portion.start, len(views), n_lines)
            )
            first = 0 if from_end else len(self._views)
            for number, view in enumerate(views, first):
                self._insert(number, view)
                view.show()  # Qt would only do so after the next layout
            yield

    def _write_portion(
        self, portion: Portion, pieces: Sequence[Piece], views: list[BodyView]
    ) -> None:
        if portion.is_one and views and not isinstance(view := views[0], ProseView):
            view.take(pieces[0])
            return
        for is_prose, group in groupby(pieces, lambda piece: isinstance(piece, TextLine | Rule)):
            if not is_prose:
                views += [_single_view(piece, self) for piece in group]  # type: ignore[arg-type]
            elif views and isinstance(last := views[-1], ProseView):
                last.write(list(group))  # type: ignore[arg-type]
            else:
                views.append(prose := ProseView(self))
                prose.write(list(group))  # type: ignore[arg-type]
        for view in views:
            view.hide()

    def _open_end(self) -> None:
        # rewrite the last block of a text shown in steps, so that it can grow; if the last line is
        # incomplete, also the block before, as the line may become part of it
        n_open = 1 if self._text.endswith("\n") else 2
        start = self._made[-n_open:][0].start
        n_views = sum(made.n_views for made in self._made[-n_open:])
        for view in self._views[len(self._views) - n_views :]:
            self._discard(view)
        del self._views[len(self._views) - n_views :]
        self._made = []
        self._stream, self._pending = MarkdownStream(), self._text[start:] + self._pending

    def _measure(self) -> None:
        # schedule the next update by the thread's CPU time since the last one, which includes the
        # layout and painting that Qt does later
        cpu_s, now = time.thread_time(), time.perf_counter()
        if now < self._due_at + MAX_PAUSE_S:  # the thread did little else meanwhile
            self._cost_s += SMOOTHING * (cpu_s - self._cpu_s - self._cost_s)
        self._cpu_s = cpu_s
        pause_s = min(max(MIN_PAUSE_S, self._cost_s / SHARE_OF_TIME), MAX_PAUSE_S)
        self._due_at = now + pause_s

    def _show(self, pieces: list[Piece]) -> None:
        n_same = 0
        for old, new in zip(self._open, pieces, strict=False):
            if old.piece != new:
                break
            n_same += 1
        is_last = n_same == len(self._open) - 1
        if is_last and n_same < len(pieces) and self._extend(self._open[-1], pieces[n_same]):
            n_same += 1
        self._take_back(n_same, pieces[n_same] if n_same < len(pieces) else None)
        for piece in pieces[n_same:]:
            self._write(piece)

    def _extend(self, shown: _Shown, new: Piece) -> bool:
        view = self._views[-1]
        if not isinstance(view, ProseView):
            if not view.take(new):
                return False
        elif (added := _added(shown.piece, new)) is not None:
            view.extend(added)
        else:
            return False
        shown.piece = new
        return True

    def _take_back(self, n_kept: int, following: Piece | None) -> None:
        if n_kept == len(self._open):
            return
        first = self._open[n_kept]
        del self._open[n_kept:]
        n_views = first.n_views
        if first.mark is not None:
            last = self._views[n_views - 1]
            assert isinstance(last, ProseView)
            last.truncate(first.mark)
        elif isinstance(following, TextLine | Rule):
            reused = self._views[n_views]
            if isinstance(reused, ProseView):
                reused.truncate(START)
                n_views += 1
        for view in self._views[n_views:]:
            self._discard(view)
        del self._views[n_views:]

    def _write(self, piece: Piece) -> None:
        last = self._views[-1] if self._views else None
        prose = last if isinstance(last, ProseView) else None
        is_reused = prose is not None and prose.is_empty
        mark = prose.mark() if prose is not None and not is_reused else None
        self._open.append(_Shown(piece, len(self._views) - is_reused, mark))
        if not isinstance(piece, TextLine | Rule):
            self._insert(len(self._views), _single_view(piece, self))
            return
        if prose is None:
            prose = ProseView(self)
            self._insert(len(self._views), prose)
        prose.write([piece])

    def _insert(self, number: int, view: BodyView) -> None:
        self._views.insert(number, view)
        self._layout.insertWidget(number, view)
        place_among(self._views, number)
        if isinstance(view, TextBlock):
            view.note_wanted.connect(self._show_note)

    @Slot(str)
    def _show_note(self, label: str) -> None:
        for view in self._views:
            place = view.note_place(label) if isinstance(view, ProseView) else None
            if place is not None:
                self.place_wanted.emit(view.mapToGlobal(place.center()))
                return

    def _discard(self, view: BodyView) -> None:
        self._layout.removeWidget(view)
        view.hide()
        view.deleteLater()


def _single_view(piece: CodeBlock | Table | DisplayFormula, parent: QWidget) -> SingleView:
    if isinstance(piece, CodeBlock):
        from app.chat.views.code_view import CodeView

        return CodeView(piece, parent)
    if isinstance(piece, Table):
        from app.chat.views.table_view import TableView

        return TableView(piece, parent)
    from app.chat.views.formula_view import FormulaView

    return FormulaView(piece, parent)


def _added(old: Piece, new: Piece) -> tuple[TextSpan, ...] | None:
    # the spans appended to a line, or None if the change is not an extension
    if not isinstance(old, TextLine) or not isinstance(new, TextLine):
        return None
    if replace(old, spans=()) != replace(new, spans=()) or len(new.spans) < len(old.spans):
        return None
    if not old.spans:
        return new.spans
    before, last = old.spans[:-1], old.spans[-1]
    grown = new.spans[len(before)]
    is_same = new.spans[: len(before)] == before and replace(grown, text=last.text) == last
    if not is_same or not grown.text.startswith(last.text):
        return None
    rest = replace(grown, text=grown.text[len(last.text) :])
    return (rest, *new.spans[len(old.spans) :])
