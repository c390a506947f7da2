"""Presenter for files attached to drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QFileDialog

from app.chat.attachments.files import (
    AttachmentReader,
    DraftFile,
    FilePart,
    NoTextThere,
    ReadFile,
    parts_of,
)
from app.chat.conversation import Conversation
from app.chat.images.draft import DraftImages
from app.chat.images.files import SUFFIXES, reads_images
from app.chat.message import Attachment, framed
from app.chat.session import ChatSession
from app.chat.views.composer import Composer
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr
from app.widgets.buttons import IconButton
from app.widgets.layout import FlowArea, FlowBox
from engine import EngineError, one_line

if TYPE_CHECKING:
    from app.chat.views.chips import DraftChip

MAX_FILES: Final = 20

FRAME_TOKENS: Final = 40
"""Upper bound for the number of tokens that frame a file's text."""

MAX_NAME: Final = 60


class AttachmentPresenter(QObject):
    """The files in each chat's draft, shown as chips along with the draft's images (`pictures`)."""

    noticed = Signal(object)  # Notice
    changed = Signal()

    def __init__(
        self, session: ChatSession, client: EngineClient, composer: Composer,
        pictures: DraftImages, parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._session, self._client, self._composer = session, client, composer
        self._pictures = pictures
        pictures.changed.connect(self.refresh)
        self._reader: AttachmentReader | None = None
        self._files: dict[str, list[DraftFile]] = {}  # by chat id
        self._numbers = count()
        self.attach = IconButton("attach", tr("Attach files and images"), size=16)
        self.attach.clicked.connect(self.pick)
        composer.add_tool(self.attach)
        self.chips = FlowBox()
        self._area = FlowArea(self.chips)
        composer.add_above(self._area)
        composer.files_given.connect(self.add)
        composer.image_pasted.connect(pictures.add_pasted)
        session.opened.connect(self._on_opened)
        session.deleted.connect(self._forget)
        session.answer_closed.connect(self.refresh)
        client.loaded.connect(self._count_again)
        client.unloaded.connect(self.refresh)
        self.refresh()

    @property
    def files(self) -> list[DraftFile]:
        """The files in the open chat's draft."""
        return self._files.setdefault(self._session.current.id, [])

    @Slot()
    def pick(self) -> None:
        """Ask the user for files to attach."""
        title = tr("Attach files and images")
        chosen, _ = QFileDialog.getOpenFileNames(self._composer, title)
        self.add(chosen)

    @Slot(list)
    def add(self, paths: Sequence[str]) -> None:
        """Attach files; a notice names any that turn out to be unusable."""
        if pictures := [path for path in paths if path.lower().endswith(SUFFIXES)]:
            self._pictures.add_files([Path(path) for path in pictures])
            paths = [path for path in paths if path not in pictures]
        room = MAX_FILES - len(self.files)
        if len(paths) > room:
            text = tr("A message can have at most {n} files.").format(n=MAX_FILES)
            self.noticed.emit(Notice(text, kind="warning"))
        self._read(paths[: max(0, room)])
        self._keep()

    def ready_files(self) -> tuple[Attachment, ...] | None:
        """Return the files to send; if one is not ready, show a notice and return None."""
        for file in self.files:
            name = one_line(file.path.name, MAX_NAME)
            if file.file is None:
                text = tr("{name} is still being read.").format(name=name)
                self.noticed.emit(Notice(text, tr("Send again in a moment.")))
                return None
            if self._is_too_large(file):
                self._refuse_large(file, name)
                return None
        return tuple(file.attachment() for file in self.files)

    def draft_text(self) -> str:
        """Return the next message as the model will see it, with the files read so far."""
        files = [f.attachment() for f in self.files if f.file and not self._is_too_large(f)]
        return framed(self._composer.text, files)

    def clear(self) -> None:
        """Clear the files in the open chat's draft after sending."""
        self.files.clear()
        self._keep()

    def close(self) -> None:
        """Stop the child processes."""
        self._pictures.close()
        if self._reader is not None:
            self._reader.close()

    @Slot()
    def refresh(self) -> None:
        """Show the open chat's draft as chips."""
        chips = [*self._pictures.chips(), *(self._chip(file) for file in self.files)]
        self.chips.set_widgets(chips)
        self._area.fit()
        self._composer.set_has_files(bool(chips))
        self._composer.invite(pictures=reads_images(self._client.model))
        self.changed.emit()

    @Slot(object)
    def _on_opened(self, chat: Conversation) -> None:
        if chat.draft_files and chat.id not in self._files:
            self._read(chat.draft_files)
        self.refresh()

    def _read(self, paths: Sequence[str]) -> None:
        for path in paths:
            file = DraftFile(f"file {next(self._numbers)}", Path(path))
            self.files.append(file)
            then = partial(self._on_read, self._session.current.id, file)
            self._started_reader().read(file.key, file.path, self._model(), then)

    def _keep(self) -> None:
        self._session.set_draft_files(tuple(str(file.path) for file in self.files))
        self.refresh()

    def _started_reader(self) -> AttachmentReader:
        if self._reader is None:
            self._reader = AttachmentReader(self)
        return self._reader

    def _model(self) -> str:
        model = self._client.model
        return model.info.path if model is not None else ""

    def _chip(self, file: DraftFile) -> DraftChip:
        from app.chat.views.chips import DraftChip  # late, like the reader

        is_too_large = self._is_too_large(file)
        parts = self._parts(file) if is_too_large or file.part else ()
        can_show_pages = file.is_pdf and reads_images(self._client.model)
        chip = DraftChip(file, parts, is_too_large=is_too_large, can_show_pages=can_show_pages)
        chip.removed.connect(self._remove)
        chip.part_chosen.connect(self._choose)
        chip.pages_wanted.connect(self._show_pages)
        return chip

    def _room(self, without: DraftFile) -> int:
        # tokens left for a file after the chat, earlier files, and an eighth kept for the answer
        model = self._client.model
        if model is None or not model.n_ctx:  # a server that does not report its context length
            return 1 << 40
        earlier = self.files[: self.files.index(without)]
        used = self._session.current.context_tokens + sum(f.n_tokens or 0 for f in earlier)
        return max(0, model.n_ctx - model.n_ctx // 8 - used - FRAME_TOKENS * len(self.files))

    def _is_too_large(self, file: DraftFile) -> bool:
        return (file.n_tokens or 0) > self._room(file)

    def _parts(self, file: DraftFile) -> tuple[FilePart, ...]:
        if file.file is None or not file.file.marks:
            return ()
        return parts_of(file.file.marks, self._room(file))

    def _refuse_large(self, file: DraftFile, name: str) -> None:
        parts, room, chat = self._parts(file), self._room(file), self._session.current.id
        text = tr("{name} has {n} tokens, but only {room} are free in the context.").format(
            name=name, n=file.n_tokens, room=room
        )
        if parts:
            hint = tr("Choose a part of it, or load the model with a longer context.")
            first = tr("Attach the first part")
            offer = partial(self._choose, file, parts, 1)
            self.noticed.emit(Notice(text, hint, "warning", first, offer, chat=chat))
        else:
            hint = tr("Remove it, start a new chat, or load the model with a longer context.")
            self.noticed.emit(Notice(text, hint, "warning", chat=chat))

    def _on_read(self, chat_id: str, file: DraftFile, found: ReadFile | EngineError) -> None:
        files = self._files.get(chat_id, [])
        if file not in files:
            return  # it has been removed
        if isinstance(found, EngineError):
            files.remove(file)
            self._report(found, file.path)
        else:
            file.file = found
        self._keep()

    @Slot()
    def _count_again(self) -> None:
        for chat_id, files in self._files.items():
            for file in files:
                file.part, file.number, file.n_parts = None, 1, 1
                if file.file is not None:
                    then = partial(self._on_read, chat_id, file)
                    self._started_reader().count(file.key, file.file, self._model(), then)
        self.refresh()

    @Slot(object)
    def _remove(self, file: DraftFile) -> None:
        if file in self.files:
            self.files.remove(file)
        self._keep()
        self._composer.setFocus()

    @Slot(object, object, int)
    def _choose(self, file: DraftFile, parts: tuple[FilePart, ...], number: int) -> None:
        file.choose(parts, number)
        self.refresh()

    @Slot(str)
    def _forget(self, chat_id: str) -> None:
        self._files.pop(chat_id, None)

    def _report(self, error: EngineError, path: Path) -> None:
        if isinstance(error, NoTextThere) and error.is_picture:
            self._pictures.add_files([path])
            return
        is_scanned = isinstance(error, NoTextThere) and error.is_scanned
        if is_scanned and reads_images(self._client.model):
            show = partial(self._pictures.add_pages, path)
            self.noticed.emit(Notice.of(error, "", tr("Attach its pages as images"), show))
        else:
            self.noticed.emit(Notice.of(error))

    @Slot(object)
    def _show_pages(self, file: DraftFile) -> None:
        self._remove(file)
        self._pictures.add_pages(file.path)
