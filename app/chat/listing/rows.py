"""The rows of the list of chats: pinned ones, folders with their chats, the others by day."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from enum import Enum

from app.chat.conversation import ChatSummary, DamagedChat
from app.chat.listing.folders import ChatFolder, Shelf
from app.core.translation import tr


class RowKind(Enum):
    """What a row of the list stands for."""

    HEADING = "heading"
    FOLDER = "folder"
    CHAT = "chat"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class ListRow:
    """A row of the list.

    Attributes:
        key: id of a chat, name of a folder, or name of a damaged file.
        when: when a chat was last changed, in seconds since the epoch.
        n_inside: number of chats in a folder.
        is_open: whether the chats of a folder are shown below it.
        is_inside: whether a chat is shown below its folder.
        is_answered: whether the answer in a chat is being written.
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
    """All that the list of chats shows.

    Attributes:
        current: id of the open chat.
        answered: ids of the chats in which an answer is being written.
        n_unread: number of chats that are still to be read.
    """

    chats: Sequence[ChatSummary] = ()
    shelf: Shelf = field(default_factory=Shelf)
    damaged: Sequence[DamagedChat] = ()
    current: str = ""
    answered: Collection[str] = ()
    n_unread: int = 0


def rows_of(contents: ListContents, today: date) -> list[ListRow]:
    """Return the rows of the list from the top."""
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
    """Return the heading for a chat last changed at `when` (seconds since the epoch)."""
    day = date.fromtimestamp(when) if when >= 0 else date.min
    if day >= today:
        return tr("TODAY")
    if day == today - timedelta(days=1):
        return tr("YESTERDAY")
    return tr("THIS WEEK") if day > today - timedelta(days=7) else tr("EARLIER")


def _by_day(rows: Iterable[ListRow], today: date) -> list[ListRow]:
    """Return the rows of chats, newest first, with a heading for each time."""
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
