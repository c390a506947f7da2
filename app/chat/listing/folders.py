"""Folders and rows of the chat list: pinned chats, folders, then other chats by day."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Final

from PySide6.QtCore import QObject, Signal

from app.chat.conversation import ChatSummary, DamagedChat
from app.core.background import KeyedJobs
from app.core.notice import Notice
from app.core.translation import reason_of, tr
from engine import one_line, read_file, replace_json

log = logging.getLogger(__name__)

SCHEMA: Final = 1
MAX_NAME: Final = 80
MAX_BYTES: Final = 16 << 20
FLUSH_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ChatFolder:
    """A folder, expanded or collapsed, with the ids of its chats; some may have been deleted."""

    name: str
    chats: frozenset[str] = frozenset()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Shelf:
    """The ordered folders, ids of pinned chats, and keys `unknown` to this version of Tandem."""

    folders: tuple[ChatFolder, ...] = ()
    pinned: frozenset[str] = frozenset()
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(folder.name for folder in self.folders)

    def folder_of(self, chat_id: str) -> str:
        """Return the name of a chat's folder; "" if it is in none."""
        return next((folder.name for folder in self.folders if chat_id in folder.chats), "")

    def with_folder(self, name: str) -> Shelf:
        """Return a shelf with this folder added, unless it already exists."""
        name = valid_name(name)
        if not name or name in self.names:
            return self
        return replace(self, folders=(*self.folders, ChatFolder(name)))

    def without_folder(self, name: str) -> Shelf:
        """Return a shelf with a folder removed."""
        return replace(self, folders=tuple(f for f in self.folders if f.name != name))

    def with_back(self, folder: ChatFolder) -> Shelf:
        """Return a shelf with a deleted folder restored, except chats that have moved since."""
        moved = {chat for other in self.folders for chat in other.chats}
        shelf = self.moved(folder.chats - moved, folder.name)
        return shelf.opened(folder.name, is_open=folder.is_open)

    def renamed(self, name: str, new: str) -> Shelf:
        """Return a shelf with a folder renamed, unless the new name is taken."""
        new = valid_name(new)
        if not new or new in self.names:
            return self
        return self._with(name, lambda folder: replace(folder, name=new))

    def opened(self, name: str, *, is_open: bool) -> Shelf:
        """Return a shelf with a folder expanded or collapsed."""
        return self._with(name, lambda folder: replace(folder, is_open=is_open))

    def moved(self, chat_ids: Collection[str], name: str) -> Shelf:
        """Return a shelf with chats moved to a folder, or out of all folders for ""."""
        shelf = self.with_folder(name)
        folders = tuple(
            replace(
                folder,
                chats=folder.chats.difference(chat_ids)
                | (frozenset(chat_ids) if folder.name == name else frozenset()),
            )
            for folder in shelf.folders
        )
        return replace(shelf, folders=folders)

    def with_pins(self, chat_ids: Collection[str], *, is_pinned: bool) -> Shelf:
        """Return a shelf with chats pinned or unpinned."""
        pinned = self.pinned | set(chat_ids) if is_pinned else self.pinned.difference(chat_ids)
        return replace(self, pinned=pinned)

    def _with(self, name: str, change: Callable[[ChatFolder], ChatFolder]) -> Shelf:
        folders = (change(f) if f.name == name else f for f in self.folders)
        return replace(self, folders=tuple(folders))

    def to_json(self) -> dict[str, Any]:
        folders = [
            {"name": f.name, "is_open": f.is_open, "chats": sorted(f.chats)} for f in self.folders
        ]
        known = {"schema": SCHEMA, "folders": folders, "pinned": sorted(self.pinned)}
        return {**self.unknown, **known}

    @classmethod
    def from_json(cls, data: object) -> Shelf:
        """Return a shelf stored by `to_json`, without invalid entries (raises ValueError)."""
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        folders: dict[str, ChatFolder] = {}
        for item in _list(data.get("folders")):
            name = valid_name(item.get("name")) if isinstance(item, dict) else ""
            if name and name not in folders:
                is_open = item.get("is_open") is not False
                folders[name] = ChatFolder(name, frozenset(_texts(item.get("chats"))), is_open)
        unknown = {k: v for k, v in data.items() if k not in ("schema", "folders", "pinned")}
        return cls(tuple(folders.values()), frozenset(_texts(data.get("pinned"))), unknown)


class ShelfStore(QObject):
    """The current shelf, and its file, which a thread writes."""

    changed = Signal()
    noticed = Signal(object)  # Notice

    def __init__(self, path: Path, parent: QObject) -> None:
        super().__init__(parent)
        self._path = path
        self._jobs = KeyedJobs("tandem-folders", self)
        self._changes: deque[Callable[[Shelf], Shelf]] = deque()
        self._is_loss_known = False
        try:
            self.current = _read(path)
        except OSError as error:  # the first change will report it
            log.info("the chat folders cannot be read: %s", error)
            self.current = Shelf()
        self._stored = self.current

    def change(self, change: Callable[[Shelf], Shelf]) -> None:
        """Apply a change to the shelf and to the file."""
        shelf = change(self.current)
        if shelf == self.current:
            return
        self.current = shelf
        self._changes.append(change)
        self._jobs.run("", self._write, self._on_written)
        self.changed.emit()

    def close(self) -> None:
        """Wait until everything has been written."""
        self._jobs.close(FLUSH_S)

    def _write(self) -> None:
        shelf, changes = _read(self._path), list(self._changes)
        for change in changes:
            shelf = change(shelf)
        replace_json(self._path, shelf.to_json(), ensure_ascii=False)
        self._stored = shelf
        for _ in changes:
            self._changes.popleft()

    def _on_written(self, error: Exception | None) -> None:
        if error is None:
            if not self._changes and self._stored != self.current:  # changed by another window
                self.current = self._stored
                self.changed.emit()
        elif not self._is_loss_known:
            self._is_loss_known = True
            reason = reason_of(error)
            text = tr("The chat folders cannot be saved ({reason}).").format(reason=reason)
            hint = tr("They are kept in memory until the window closes.")
            self.noticed.emit(Notice(text, hint, "warning"))


def valid_name(name: object) -> str:
    """Return a folder's name as a single line; "" if it is invalid."""
    return one_line(name)[:MAX_NAME].strip() if isinstance(name, str) else ""


def _read(path: Path) -> Shelf:
    try:
        return Shelf.from_json(json.loads(read_file(path, MAX_BYTES).decode()))
    except FileNotFoundError:
        return Shelf()
    except (ValueError, RecursionError) as error:
        log.info("the file with the chat folders is damaged and was set aside: %s", error)
        path.replace(path.with_name(path.name + ".broken"))
        return Shelf()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: object) -> Iterable[str]:
    return (text for text in _list(value) if isinstance(text, str))


class RowKind(Enum):
    """Kind of row."""

    HEADING = "heading"
    FOLDER = "folder"
    CHAT = "chat"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class ListRow:
    """A row in the chat list.

    Attributes:
        key: id of a chat, name of a folder, or name of a damaged file.
        when: when a chat last changed, in seconds since the epoch.
        n_inside: number of chats in a folder.
        is_open: whether a folder is expanded.
        is_inside: whether a chat is shown below its folder.
        is_answered: whether an answer is being generated in a chat.
    """

    kind: RowKind
    text: str
    key: str = ""
    when: float = 0.0
    n_inside: int = 0
    is_open: bool = False
    is_inside: bool = False
    is_answered: bool = False
    damaged: DamagedChat | None = None


@dataclass(frozen=True, slots=True)
class ListContents:
    """Contents of the chat list.

    Attributes:
        current: id of the open chat.
        answered: ids of the chats with running answers.
        n_unread: number of old chats still to be imported.
    """

    chats: Sequence[ChatSummary] = ()
    shelf: Shelf = field(default_factory=Shelf)
    damaged: Sequence[DamagedChat] = ()
    current: str = ""
    answered: Collection[str] = ()
    n_unread: int = 0


def rows_of(contents: ListContents, today: date) -> list[ListRow]:
    """Return the rows of the list, from top to bottom."""
    shelf = contents.shelf
    newest = sorted(contents.chats, key=lambda chat: chat.updated, reverse=True)
    place = {chat: folder.name for folder in shelf.folders for chat in folder.chats}
    inside: dict[str, list[ListRow]] = {name: [] for name in shelf.names}
    pinned: list[ListRow] = []
    rest: list[ListRow] = []
    for chat in newest:
        name, is_pinned = place.get(chat.id, ""), chat.id in shelf.pinned
        row = _chat_row(chat, contents, is_inside=bool(name) and not is_pinned)
        (pinned if is_pinned else inside.get(name, rest)).append(row)
    rows = [_heading(tr("PINNED")), *pinned] if pinned else []
    if shelf.folders:
        rows.append(_heading(tr("FOLDERS")))
    for folder in shelf.folders:
        chats = inside[folder.name]
        rows.append(_folder_row(folder, len(chats)))
        rows += chats * folder.is_open
    rows += _by_day(rest, today)
    if contents.damaged:
        rows.append(_heading(tr("DAMAGED")))
    for file in sorted(contents.damaged, key=lambda file: file.path.name):
        rows.append(ListRow(RowKind.DAMAGED, file.path.name, file.path.name, damaged=file))
    return rows


def day_group(when: float, today: date) -> str:
    """Return the heading for a chat that last changed at `when` (in seconds since the epoch)."""
    day = date.fromtimestamp(when) if when >= 0 else date.min
    if day >= today:
        return tr("TODAY")
    if day == today - timedelta(days=1):
        return tr("YESTERDAY")
    return tr("THIS WEEK") if day > today - timedelta(days=7) else tr("EARLIER")


def _by_day(rows: Iterable[ListRow], today: date) -> list[ListRow]:
    found: list[ListRow] = []
    heading = ""
    for row in rows:
        if (group := day_group(row.when, today)) != heading:
            heading = group
            found.append(_heading(group))
        found.append(row)
    return found


def _chat_row(chat: ChatSummary, contents: ListContents, *, is_inside: bool) -> ListRow:
    return ListRow(
        RowKind.CHAT,
        chat.title or tr("New chat"),
        chat.id,
        when=chat.updated,
        is_inside=is_inside,
        is_answered=chat.id in contents.answered,
    )


def _folder_row(folder: ChatFolder, n_inside: int) -> ListRow:
    kind, name = RowKind.FOLDER, folder.name
    return ListRow(kind, name, name, n_inside=n_inside, is_open=folder.is_open)


def _heading(text: str) -> ListRow:
    return ListRow(RowKind.HEADING, text)
