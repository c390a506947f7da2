"""Image files, deduplicated, in one folder per chat next to the database.

Files are named after their hash and never change. Copied chats get hard links. A deleted chat's
folder is first hidden, and deleted once the chat's deletion can no longer be undone.
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
"""Suffixes of image files."""


def suffix_of(data: bytes) -> str:
    """Return the suffix for an image, given its first bytes; "" if the format is unsupported."""
    beginnings = {b"\x89PNG\r\n": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"BM": ".bmp"}
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return next((suffix for mark, suffix in beginnings.items() if data.startswith(mark)), "")


def reads_images(model: ModelLoaded | None) -> bool:
    """Return whether a model may read images; True for remote ones, as servers do not report it."""
    return model is not None and (model.vision is not None or is_remote(model.info.path))


log = logging.getLogger(__name__)

SUFFIX, HIDDEN = ".pictures", ".deleted-pictures"
"""Suffixes of image folders, for chats and for deleted chats."""

OWNER: Final = "owner"
"""File in a hidden folder, with the mark of the process that hid it."""

UNUSED_S: Final = 3600.0
"""Age in seconds at which an unused file is deleted; another window may use a newer one."""


class ImageFolder:
    """The images for all chats in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, chat: Conversation, image: ChatImage) -> Path:
        """Return the path of a chat's image, whether or not the file exists."""
        found = (place / image.file for place in self._places(chat))
        return next((path for path in found if path.is_file()), self._of(chat.id) / image.file)

    def own_path(self, chat_id: str, name: str) -> Path:
        """Return the path of a file in a chat's own folder."""
        return self._of(chat_id) / name

    def put(self, chat_id: str, data: bytes) -> tuple[str, bool]:
        """Store an image; return the name of its file, and whether the file already existed.

        Raises:
            OSError: the disk is full or the folder is read-only.
            ValueError: the format is unsupported.
        """
        if not (suffix := suffix_of(data)):
            raise ValueError("not an image")
        path = self._of(chat_id) / f"{hashlib.sha256(data).hexdigest()[:40]}{suffix}"
        if had := path.is_file():
            os.utime(path)  # protects it from `tidy` until a message uses it
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(data)
        return path.name, had

    def remove(self, chat_id: str, name: str) -> None:
        """Delete an unusable image."""
        with suppress(OSError):
            (self._of(chat_id) / name).unlink(missing_ok=True)

    def complete(self, chat: Conversation) -> None:
        """Link a copied chat's images into its own folder, as far as possible."""
        try:
            self._complete(chat)
        except OSError as error:
            log.warning("not all images of %s could be copied: %s", chat.id, error)

    def _complete(self, chat: Conversation) -> None:
        used = {image.file for image in chat.all_images()}
        if not used:
            return
        own, hidden = self._of(chat.id), self._hidden(chat.id)
        if hidden.is_dir() and not own.exists():
            self.bring_back(chat.id)
        for name in used:
            if (own / name).is_file():
                continue
            known = (place / name for place in self._places(chat))
            if (source := next((path for path in known if path.is_file()), None)) is not None:
                own.mkdir(parents=True, exist_ok=True)
                _link(source, own / name)

    def hide(self, chat_id: str) -> None:
        """Hide a deleted chat's images; if that fails, `tidy` deletes them later."""
        own, hidden = self._of(chat_id), self._hidden(chat_id)
        with suppress(OSError):
            if own.is_dir():
                shutil.rmtree(hidden, ignore_errors=True)
                (own / OWNER).write_text(process_mark(), encoding="ascii")
                own.rename(hidden)

    def bring_back(self, chat_id: str) -> None:
        """Unhide a restored chat's images; if that fails, `path` still finds them."""
        own, hidden = self._of(chat_id), self._hidden(chat_id)
        with suppress(OSError):
            if hidden.is_dir() and not own.exists():
                hidden.rename(own)
                (own / OWNER).unlink(missing_ok=True)

    def tidy(self, chats: Iterable[Conversation], chat_ids: Collection[str]) -> None:
        """Delete images of deleted chats, and unused images of `chats` (as loaded from disk)."""
        with suppress(OSError):
            for hidden in self._folder.glob(f"*{HIDDEN}"):
                owner = _text(hidden / OWNER)
                if owner == process_mark() or has_ended(owner):
                    shutil.rmtree(hidden, ignore_errors=True)
            for own in self._folder.glob(f"*{SUFFIX}"):
                is_old = time.time() - own.stat().st_mtime > UNUSED_S
                if is_old and own.name.removesuffix(SUFFIX) not in chat_ids:  # never saved
                    shutil.rmtree(own, ignore_errors=True)
        for chat in chats:
            try:
                self._drop_unused(chat)
            except OSError as error:
                log.info("unused images of %s cannot be deleted: %s", chat.id, error)

    def _drop_unused(self, chat: Conversation) -> None:
        own = self._of(chat.id)
        if not own.is_dir():
            return
        used = {image.file for image in chat.all_images()}
        for path in own.iterdir():
            if path.name not in used and time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
        if not used:
            with suppress(OSError):  # the folder may not be empty
                own.rmdir()

    def _places(self, chat: Conversation) -> Iterator[Path]:
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
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:
        with atomic_write(target) as file:
            file.write(source.read_bytes())
