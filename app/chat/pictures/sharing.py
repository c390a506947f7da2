"""Pictures of a chat in the files that are made of it for other programs, and taken from those."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from app.chat.pictures.picture import ChatPicture
from engine import atomic_write

if TYPE_CHECKING:
    from app.chat.conversation import Conversation
    from app.chat.pictures.folder import PictureFolder

PathOf = Callable[[ChatPicture], Path]
"""Function that returns where a picture is, whether or not there is such a file."""

NAME: Final = "picture_files"
"""Name in an exported chat's JSON of the pictures: their files by name, as base64."""

TYPES: Final = {
    ".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif",
    ".bmp": "image/bmp",
}  # fmt: skip


def nowhere(_: ChatPicture) -> Path:
    """Return a path where no picture is."""
    return Path()


def picture_files(chat: Conversation, path_of: PathOf) -> dict[str, str]:
    """Return the files of a chat's pictures by name, as base64; those that are gone are left out.

    Raises:
        OSError: one cannot be read.
    """
    files = {picture.file: path_of(picture) for picture in chat.all_pictures()}
    return {
        name: b64encode(path.read_bytes()).decode("ascii")
        for name, path in files.items()
        if path.is_file()
    }


def take_files(chat: Conversation, files: object, folder: PictureFolder) -> None:
    """Keep the pictures of an imported chat.

    Args:
        files: what `picture_files` has returned, or anything that a stranger has written there.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    wanted = {picture.file for picture in chat.all_pictures()}
    for name, text in files.items() if isinstance(files, Mapping) else ():
        if name not in wanted or not isinstance(text, str):
            continue
        try:
            made, had = folder.put(chat.id, b64decode(text, validate=True))
        except ValueError:  # no picture
            continue
        if made != name and not had:
            folder.remove(chat.id, made)


def in_html(picture: ChatPicture, path_of: PathOf) -> str:
    """Return a picture as HTML that has all of it.

    Raises:
        OSError: it cannot be read.
    """
    path, title = path_of(picture), escape(picture.title)
    if not path.is_file():
        return f"<p>[{title}]</p>"
    data = b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{title}" src="data:{TYPES[path.suffix]};base64,{data}"></p>'


def in_markdown(picture: ChatPicture, beside: str) -> str:
    """Return a picture as Markdown.

    Args:
        beside: name of the folder in which its file is; "" for none.
    """
    title = "".join(c for c in picture.title if c not in "[]\\")
    return f"![{title}]({quote(beside)}/{picture.file})" if beside else f"[{title}]"


def write_beside(chat: Conversation, path_of: PathOf, folder: Path) -> None:
    """Write the pictures that a chat shows into a folder.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    shown = {picture.file: picture for message in chat.messages for picture in message.pictures}
    for name, picture in shown.items():
        if (path := path_of(picture)).is_file():
            folder.mkdir(exist_ok=True)
            write_for_others(folder / name, path.read_bytes())


def write_for_others(path: Path, data: bytes) -> None:
    """Write a file as a whole, with the permissions that new files have: it is to be passed on.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    is_new = not path.exists()
    if is_new:
        path.touch()
    try:
        mode = S_IMODE(path.stat().st_mode)
        with atomic_write(path) as file:
            file.write(data)
        path.chmod(mode)
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise
