"""What a message keeps of a picture, which files are pictures, and which models see them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from app.core.translation import tr
from app.remote.client.address import is_remote
from engine import ModelLoaded, one_line

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
"""Suffixes of files that are taken for pictures before anybody has read them."""

STORED: Final = re.compile(r"[0-9a-f]{40}\.(?:png|jpg|webp|gif|bmp)")
"""Names of pictures in the folder of a chat: a hash and a suffix, and so no path."""

MOST_NAME: Final = 60
"""Largest number of characters of a name in a sentence."""


@dataclass(frozen=True, slots=True)
class ChatPicture:
    """A picture that goes with a message.

    Attributes:
        name: name of the file that it came from, without its folder.
        file: name of its own file in the chat's folder of pictures.
        width, height: size in pixels, as it is to be seen.
        page: page of the document that it shows, from 1; 0 for a picture.
    """

    name: str
    file: str
    width: int
    height: int
    page: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChatPicture:
        """Return the picture that a chat's file names.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the data is none.
        """
        name, file = data["name"], data["file"]
        numbers = [data["width"], data["height"], data.get("page", 0)]
        if not isinstance(name, str) or not isinstance(file, str):
            raise TypeError("names expected")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("numbers expected")
        if not STORED.fullmatch(file) or 0 in numbers[:2]:
            raise ValueError("no picture")
        return cls(name, file, *numbers)

    @classmethod
    def all_of(cls, stored: Iterable[Mapping[str, Any]] | None) -> tuple[ChatPicture, ...]:
        """Return the pictures that a chat's file names.

        What is none is left out: a chat is more than its pictures.

        Raises:
            TypeError: there is no list of pictures.
        """
        found = []
        for data in stored or ():
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                found.append(cls.from_json(data))
        return tuple(found)

    @property
    def title(self) -> str:
        """The name in one line, and the page."""
        name = one_line(self.name, MOST_NAME)
        return tr("{name}, page {n}").format(name=name, n=self.page) if self.page else name

    @property
    def size(self) -> str:
        """The size in words."""
        return f"{self.width} x {self.height}"


def suffix_of(data: bytes) -> str:
    """Return the suffix of a picture's file by its first bytes; "" if models cannot see it."""
    beginnings = {b"\x89PNG\r\n": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"BM": ".bmp"}
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return next((suffix for mark, suffix in beginnings.items() if data.startswith(mark)), "")


def sees(model: ModelLoaded | None) -> bool:
    """Return whether a model may see pictures; a server does not tell it."""
    return model is not None and (model.sight is not None or is_remote(model.info.path))
