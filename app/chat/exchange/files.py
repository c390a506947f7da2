"""Chats as files that a person has chosen: which names they get, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from app.chat import chat_file
from app.chat.conversation import Conversation
from app.chat.export import PDF, exported, file_name
from app.chat.pictures.folder import PictureFolder
from app.chat.pictures.sharing import write_beside, write_for_others
from app.chat.stored import read_stored, why_unreadable
from app.core.translation import tr, tr_later

BESIDE: Final = tr_later("{name} pictures")
"""Name of the folder with the pictures of a Markdown file."""


@dataclass(frozen=True, slots=True)
class Written:
    """What an export has written.

    Attributes:
        paths: files, one for each chat.
        failure: sentence that says why it has ended before; "" if it has not.
    """

    paths: tuple[Path, ...]
    failure: str = ""


def write_chat_as(chat: Conversation, path: Path, pictures: PictureFolder) -> None:
    """Write a chat in the form of the file's suffix; an earlier file is replaced as a whole.

    Pictures of a Markdown file go into a folder beside it; the others have them inside.

    Args:
        pictures: the pictures of all chats.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    suffix, path_of, beside = path.suffix.lower(), partial(pictures.path, chat), ""
    if suffix == PDF:
        from app.chat.exchange.pdf import pdf_of  # late: not needed but here

        data = pdf_of(chat, path_of)
    else:
        if suffix == ".md" and any(message.pictures for message in chat.messages):
            beside = tr(BESIDE).format(name=path.stem)
            write_beside(chat, path_of, path.with_name(beside))
        data = exported(chat, suffix, path_of, beside).encode(errors="replace")
    write_for_others(path, data)


def write_all(
    chats: Iterable[Conversation | str], stored: Path, folder: Path, suffix: str
) -> Written:
    """Write chats into a folder, each in a file with its title as the name; replace none.

    Args:
        chats: chats, or ids of chats in the folder `stored`.
        suffix: one of `FORMATS`.
    """
    paths: list[Path] = []
    for one in chats:
        try:
            if isinstance(one, Conversation):
                chat = one
            else:
                chat = read_stored(stored / f"{one}{chat_file.SUFFIX}").chat
            path = free_path(folder, file_name(chat), suffix)
            write_chat_as(chat, path, PictureFolder(stored))
        except (OSError, ValueError, RecursionError) as error:
            name = one if isinstance(one, str) else one.shown_title
            why = why_unreadable(error)
            return Written(
                tuple(paths), tr("“{title}” cannot be written: {why}.").format(title=name, why=why)
            )
        paths.append(path)
    return Written(tuple(paths))


def free_path(folder: Path, name: str, suffix: str) -> Path:
    """Return the path of a file that there is not yet."""
    path, number = folder / f"{name}{suffix}", 2
    while path.exists():
        path, number = folder / f"{name} ({number}){suffix}", number + 1
    return path
