"""Export and import of chats: the dialogs, and the work, which runs on a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QFileDialog, QMessageBox, QWidget

from app.chat.conversation import Conversation
from app.chat.exchange.pdf import Written, write_all, write_chat_as
from app.chat.export import FORMATS, NotAChat, file_name, imported, with_suffix
from app.chat.session import ChatSession
from app.core.background import KeyedJobs
from app.core.notice import Notice
from app.core.translation import reason_of, tr, tr_n
from app.widgets.text import ask_where_to_save, plain_tip, reveal

log = logging.getLogger(__name__)

END_S: Final = 30.0
"""Seconds to wait for pending files when the window closes."""

MAX_NAMED: Final = 3
"""Maximum number of failed files that a notice names; any others are only counted."""


class ChatExchange(QObject):
    """Exports and imports chats.

    Args:
        over: parent of the dialogs.
        flush: stores typed text.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self, session: ChatSession, over: QWidget, flush: Callable[[], None], parent: QObject
    ) -> None:
        super().__init__(parent)
        self._session, self._over, self._flush = session, over, flush
        self._jobs = KeyedJobs("tandem-exchange", self)
        self._n_jobs = 0

    def close(self) -> None:
        """Wait until all files have been written."""
        self._jobs.close(END_S)

    @Slot(object, str)
    def export(self, ids: list[str], suffix: str = "") -> None:
        """Ask where to export chats, and write them.

        Args:
            suffix: one of `FORMATS`, to ask for a folder; "" to ask for a single chat's file.
        """
        self._flush()
        if suffix:
            self._export_all(ids, suffix)
            return
        chat = self._session.find(ids[0]) if ids else None
        if chat is None:
            return
        filters = ";;".join(map(tr, FORMATS.values()))
        title, name = tr("Export chat"), f"{file_name(chat)}.md"
        chosen, kind = ask_where_to_save(self._over, title, name, filters)
        path = with_suffix(Path(chosen), kind)
        if chosen and (path == Path(chosen) or self._may_replace(path)):
            self._write(chat.copy(), path)

    def _may_replace(self, path: Path) -> bool:
        # the dialog has checked a different path
        if not path.exists():
            return True
        text = tr("{name} already exists. Replace it?").format(name=path.name)
        answer = QMessageBox.question(self._over, tr("Export chat"), plain_tip(text))
        return answer is QMessageBox.StandardButton.Yes

    @Slot()
    def bring_in(self) -> None:
        """Ask the user for exported chats, and import them."""
        chosen, _ = QFileDialog.getOpenFileNames(
            self._over, tr("Import chats"), "", FORMATS[".json"]
        )
        if not chosen:
            return
        self._flush()
        chats: list[Conversation] = []
        failures: list[str] = []
        images = self._session.library.store.images

        def work() -> None:
            for path in chosen:
                try:
                    chats.append(imported(Path(path), images))
                except NotAChat as error:
                    failures.append(str(error))

        self._run(work, lambda: self._take(chats, failures))

    def _export_all(self, ids: list[str], suffix: str) -> None:
        title = tr_n("Export {n} chat to", "Export {n} chats to", len(ids))
        chosen = QFileDialog.getExistingDirectory(self._over, title)
        if not chosen:
            return
        chats = [self._session.library.opened(chat_id) or chat_id for chat_id in ids]
        copies = [chat if isinstance(chat, str) else chat.copy() for chat in chats]
        library, results = self._session.library, list[Written]()
        where = library.store.read, library.store.images, Path(chosen)
        self._run(
            lambda: results.append(write_all(copies, *where, suffix)),
            lambda: self._report_written(results[0], chosen),
        )

    def _write(self, chat: Conversation, path: Path) -> None:
        text = tr("“{title}” was saved as {path}.").format(title=chat.shown_title, path=path)
        images = self._session.library.store.images
        self._run(
            lambda: write_chat_as(chat, path, images),
            lambda: self.noticed.emit(_shown_in_folder(text, path)),
            path.name,
        )

    def _report_written(self, written: Written, folder: str) -> None:
        chats = tr_n("{n} chat", "{n} chats", len(written.paths))
        text = tr("{chats} saved in {folder}.").format(chats=chats, folder=folder)
        if written.failure:
            self.noticed.emit(Notice(written.failure, text, kind="error"))
        else:
            self.noticed.emit(_shown_in_folder(text, *written.paths[:1]))

    def _take(self, chats: list[Conversation], failures: list[str]) -> None:
        self._session.take(*chats)
        if len(chats) > 1:
            text = tr_n("{n} chat was imported.", "{n} chats were imported.", len(chats))
            self.noticed.emit(Notice(text))
        if failures:
            more = len(failures) - MAX_NAMED
            hint = tr_n("And {n} more file.", "And {n} more files.", more) if more > 0 else ""
            self.noticed.emit(Notice(" ".join(failures[:MAX_NAMED]), hint, kind="error"))

    def _run(self, work: Callable[[], None], then: Callable[[], None], name: str = "") -> None:
        self._n_jobs += 1

        def on_done(error: Exception | None) -> None:
            if error is None:
                then()
                return
            log.info("an export or import failed: %s", error)
            text = tr("{name} cannot be written: {why}.").format(
                name=name or tr("The folder"), why=reason_of(error)
            )
            hint = tr("Choose another folder, or free up disk space.") if name else ""
            self.noticed.emit(Notice(text, hint, kind="error"))

        self._jobs.run(str(self._n_jobs), work, on_done)


def _shown_in_folder(text: str, *paths: Path) -> Notice:
    if not paths:
        return Notice(text)
    return Notice(text, action=tr("Show in folder"), on_action=lambda: reveal(paths[0]))
