"""The chip that counts running answers, and the list that it opens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QObject, Qt, QTimer, Signal, Slot
from PySide6.QtWidgets import QGridLayout, QSizePolicy, QWidget

from app.chat.chat_presenter import ChatPresenter
from app.chat.session import ChatSession
from app.core.engine_client import AnswerStage, EngineClient, RunningAnswer
from app.core.translation import tr, tr_n
from app.core.units import decimal
from app.widgets.buttons import Chip, ElidedButton, IconButton
from app.widgets.controls import Sheet
from app.widgets.text import label, set_tip
from app.widgets.theme import set_role
from engine import one_line


def stage_text(answer: RunningAnswer) -> str:
    """Return an answer's progress as text for the list of running answers."""
    if answer.stage is AnswerStage.WAITING:
        return tr("waiting")
    if answer.stage is AnswerStage.READING:
        share = round(100 * answer.n_read / max(1, answer.n_prompt))
        return tr("reading the prompt · {share} %").format(share=share)
    if not answer.tokens_per_s:
        return tr("writing")
    rate = decimal(f"{answer.tokens_per_s:.1f}")
    return tr("writing · {rate} tok/s").format(rate=rate)


@dataclass(frozen=True, slots=True)
class RunningRow:
    """An answer in the list, with its chat and its progress as text."""

    chat_id: str
    title: str
    stage: str


class RunningChip(Chip):
    """Chip with the number of running answers; a click opens the list."""

    chosen = Signal(str)  # id of the chat to open
    stop_requested = Signal(str)  # id of the chat whose answer is to be stopped

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.list = RunningList(self)
        self.list.chosen.connect(self.chosen)
        self.list.stop_requested.connect(self.stop_requested)
        self.clicked.connect(lambda: self.list.show_below(self))
        set_tip(self, tr("Click to view or stop them"))

    def show_rows(self, rows: Sequence[RunningRow], tokens_per_s: float, *, wanted: bool) -> None:
        """Show the running answers, oldest first.

        Args:
            tokens_per_s: total speed; 0 if not yet known.
            wanted: whether to show the chip.
        """
        n = len(rows)
        texts = running_text(n), tr_n("{n} answer", "{n} answers", n), str(n)
        self.set_texts(texts if wanted else ())
        self.list.show_rows(rows, tokens_per_s)
        if not wanted:
            self.list.hide()


class RunningList(Sheet):
    """Sheet with the running answers: chats, progress, and stop buttons."""

    chosen = Signal(str)
    stop_requested = Signal(str)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(tr("Running answers"), parent)
        self._heading = label(role="heading")
        self._rows = QGridLayout()
        self._rows.setHorizontalSpacing(8)
        self._rows.setVerticalSpacing(0)
        self._rows.setColumnStretch(0, 1)
        self.column.addWidget(self._heading)
        self.column.addSpacing(6)
        self.column.addLayout(self._rows)
        self.column.addStretch()
        self.rows: dict[str, RowView] = {}

    def show_rows(self, rows: Sequence[RunningRow], tokens_per_s: float) -> None:
        """Show the running answers; existing rows keep their place and focus."""
        rate = decimal(f"{tokens_per_s:.1f}")
        speed = tr("{rate} tok/s in total").format(rate=rate) if tokens_per_s else ""
        self._heading.setText(" · ".join(filter(None, (running_text(len(rows)), speed))))
        wanted = [row.chat_id for row in rows]
        is_new = list(self.rows) != wanted
        for chat_id in [key for key in self.rows if key not in wanted]:
            self.rows.pop(chat_id).remove()
        for row in rows:
            if row.chat_id not in self.rows:
                self.rows[row.chat_id] = self._add(row.chat_id)
            self.rows[row.chat_id].show_row(row)
        if is_new and self.isVisible():
            self.fit()

    def _add(self, chat_id: str) -> RowView:
        view = RowView(self._rows)
        view.title.clicked.connect(lambda: self._choose(chat_id))
        view.stop.clicked.connect(lambda: self.stop_requested.emit(chat_id))
        return view

    @Slot(str)
    def _choose(self, chat_id: str) -> None:
        self.hide()
        self.chosen.emit(chat_id)


class RowView:
    """The widgets for an answer in the list: title button, progress, stop button."""

    def __init__(self, grid: QGridLayout) -> None:
        self.title = ElidedButton()
        self.title.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        set_role(self.title, "row")
        self.stage = label(role="muted")
        self.stop = IconButton("stop", tr("Stop the answer"), size=16)
        self._grid, row = grid, grid.rowCount()
        grid.addWidget(self.title, row, 0)
        grid.addWidget(self.stage, row, 1, Qt.AlignmentFlag.AlignRight)
        grid.addWidget(self.stop, row, 2)

    def show_row(self, row: RunningRow) -> None:
        """Show an answer's current state."""
        title = one_line(row.title)
        self.title.set_full_text(title)
        self.title.setAccessibleName(tr("Go to “{title}”").format(title=title))
        self.title.setAccessibleDescription(row.stage)
        self.stage.setText(row.stage)
        stop = tr("Stop the answer in “{title}”").format(title=title)
        self.stop.set_text(stop)
        self.stop.setAccessibleName(stop)  # `set_text` would cut a title at brackets

    def remove(self) -> None:
        """Remove the widgets from the grid."""
        for widget in (self.title, self.stage, self.stop):
            self._grid.removeWidget(widget)
            widget.hide()
            widget.deleteLater()


def running_text(n: int) -> str:
    """Return the number of running answers as text."""
    return tr_n("{n} answer running", "{n} answers running", n)


REFRESH_MS = 250


class RunningPresenter(QObject):
    """Presenter for the running answers; it hides the chip if the only one is in the open chat."""

    def __init__(
        self,
        session: ChatSession,
        client: EngineClient,
        chats: ChatPresenter,
        chip: RunningChip,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._chip = session, chip
        self._tokens_per_s = 0.0
        self._timer = QTimer(self, interval=REFRESH_MS)  # runs while the list is open
        self._timer.timeout.connect(self.show)
        chip.clicked.connect(self._follow)
        chip.chosen.connect(chats.open_chat)
        chip.stop_requested.connect(session.stop_answer)
        session.answers_changed.connect(self.show)
        session.opened.connect(self.show)
        session.chats_changed.connect(self.show)
        client.rate.connect(self._on_rate)

    @Slot(float, int)
    def _on_rate(self, tokens_per_s: float, n_answers: int) -> None:
        self._tokens_per_s = tokens_per_s if n_answers > 1 else 0.0

    @Slot()
    def _follow(self) -> None:
        self._timer.start()
        self.show()

    @Slot()
    def show(self) -> None:
        """Show the running answers and their progress."""
        answers = self._session.answers
        rows = [
            RunningRow(one.chat.id, one.chat.shown_title, stage_text(one.running))
            for one in answers
        ]
        is_elsewhere = any(one.chat is not self._session.current for one in answers)
        self._chip.show_rows(rows, self._tokens_per_s, wanted=is_elsewhere)
        if not self._chip.list.isVisible():
            self._timer.stop()
