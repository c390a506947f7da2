"""The files of pictures: for each chat a folder beside the database, with each picture once.

They are named by the hash of their content and never change. A chat that is copied gets links to
the same files; those of a deleted chat are hidden, and go when nobody can bring the chat back.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from app.chat.message import ChatImage
from app.remote.client.address import is_remote
from engine import ModelLoaded, atomic_write, has_ended, process_mark

if TYPE_CHECKING:
    from app.chat.conversation import Conversation

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"""Suffixes of files that are taken for pictures before anybody has read them."""


def suffix_of(data: bytes) -> str:
    """Return the suffix of a picture's file by its first bytes; "" if models cannot see it."""
    beginnings = {b"\x89PNG\r\n": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"BM": ".bmp"}
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return next((suffix for mark, suffix in beginnings.items() if data.startswith(mark)), "")


def sees(model: ModelLoaded | None) -> bool:
    """Return whether a model may see pictures; a server does not tell it."""
    return model is not None and (model.vision is not None or is_remote(model.info.path))


log = logging.getLogger(__name__)

SUFFIX, HIDDEN = ".pictures", ".deleted-pictures"
"""Suffixes of the folder of a chat's pictures, and of a deleted chat's."""

OWNER: Final = "owner"
"""Name of the file in a hidden folder with the mark of the process that has hidden it."""

UNUSED_S: Final = 3600.0
"""Seconds after which a file that no message names goes: another window may just have made it."""


class ImageFolder:
    """The pictures of all chats.

    Args:
        folder: folder of the chats.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, chat: Conversation, picture: ChatImage) -> Path:
        """Return the path of a picture of a chat, whether or not there is such a file."""
        found = (place / picture.file for place in self._places(chat))
        return next((path for path in found if path.is_file()), self._of(chat.id) / picture.file)

    def own_path(self, chat_id: str, name: str) -> Path:
        """Return the path of a file in the folder of a chat."""
        return self._of(chat_id) / name

    def put(self, chat_id: str, data: bytes) -> tuple[str, bool]:
        """Keep a picture; return the name of its file, and whether the chat had it before.

        Raises:
            OSError: the disk is full or the folder cannot be written.
            ValueError: it is of no kind that models can see.
        """
        if not (suffix := suffix_of(data)):
            raise ValueError("no picture")
        path = self._of(chat_id) / f"{hashlib.sha256(data).hexdigest()[:40]}{suffix}"
        if had := path.is_file():
            os.utime(path)  # no message may name it any more, but one will
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(data)
        return path.name, had

    def remove(self, chat_id: str, name: str) -> None:
        """Delete a picture that turned out to be of no use."""
        with suppress(OSError):
            (self._of(chat_id) / name).unlink(missing_ok=True)

    def complete(self, chat: Conversation) -> None:
        """Bring all pictures of a chat into its folder, from that of the chat it was copied from.

        One that cannot be brought is left out: what was said is worth more.
        """
        try:
            self._complete(chat)
        except OSError as error:
            log.warning("not all pictures of %s are there: %s", chat.id, error)

    def _complete(self, chat: Conversation) -> None:
        wanted = {picture.file for picture in chat.all_pictures()}
        if not wanted:
            return
        own, hidden = self._of(chat.id), self._hidden(chat.id)
        if hidden.is_dir() and not own.exists():
            self.bring_back(chat.id)
        for name in wanted:
            if (own / name).is_file():
                continue
            known = (place / name for place in self._places(chat))
            if (source := next((path for path in known if path.is_file()), None)) is not None:
                own.mkdir(parents=True, exist_ok=True)
                _link(source, own / name)

    def hide(self, chat_id: str) -> None:
        """Hide the pictures of a chat that is deleted, or leave them to `tidy`."""
        own, hidden = self._of(chat_id), self._hidden(chat_id)
        with suppress(OSError):
            if own.is_dir():
                shutil.rmtree(hidden, ignore_errors=True)
                (own / OWNER).write_text(process_mark(), encoding="ascii")
                own.rename(hidden)

    def bring_back(self, chat_id: str) -> None:
        """Show the pictures of a deleted chat again; those that stay hidden are found there."""
        own, hidden = self._of(chat_id), self._hidden(chat_id)
        with suppress(OSError):
            if hidden.is_dir() and not own.exists():
                hidden.rename(own)
                (own / OWNER).unlink(missing_ok=True)

    def tidy(self, chats: Iterable[Conversation], chat_ids: Collection[str]) -> None:
        """Delete pictures of deleted chats, and those of no message.

        Args:
            chats: chats as they are on the disk, whose folders are looked at.
            chat_ids: ids of all chats.
        """
        with suppress(OSError):
            for hidden in self._folder.glob(f"*{HIDDEN}"):
                owner = _text(hidden / OWNER)
                if owner == process_mark() or has_ended(owner):
                    shutil.rmtree(hidden, ignore_errors=True)
            for own in self._folder.glob(f"*{SUFFIX}"):
                is_old = time.time() - own.stat().st_mtime > UNUSED_S
                if (
                    is_old and own.name.removesuffix(SUFFIX) not in chat_ids
                ):  # no chat was ever saved
                    shutil.rmtree(own, ignore_errors=True)
        for chat in chats:
            try:
                self._drop_unused(chat)
            except OSError as error:
                log.info("pictures of %s stay: %s", chat.id, error)

    def _drop_unused(self, chat: Conversation) -> None:
        own = self._of(chat.id)
        if not own.is_dir():
            return
        wanted = {picture.file for picture in chat.all_pictures()}
        for path in own.iterdir():
            if path.name not in wanted and time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
        if not wanted:
            with suppress(OSError):  # a young file stays
                own.rmdir()

    def _places(self, chat: Conversation) -> Iterator[Path]:
        """Yield the folders in which pictures of a chat may be."""
        for chat_id in filter(None, (chat.id, chat.origin)):
            yield self._of(chat_id)
            yield self._hidden(chat_id)

    def _of(self, chat_id: str) -> Path:
        return self._folder / f"{chat_id}{SUFFIX}"

    def _hidden(self, chat_id: str) -> Path:
        return self._folder / f"{chat_id}{HIDDEN}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that is not possible.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:
        with atomic_write(target) as file:
            file.write(source.read_bytes())
