"""Pictures in requests, as `ChatMessage` has them."""

from __future__ import annotations

import re

from app.server.refusal import bad_value
from engine import IMAGE_PLACEHOLDER

_DATA = re.compile(r"data:[a-z]+/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class ShownParts:
    """Text and pictures of a message, made of its parts in order.

    Attributes:
        text: the text, with a mark where each picture stands.
    """

    def __init__(self) -> None:
        self.text = ""
        self._pictures: list[str] = []
        self._is_behind_text = False

    @property
    def has_any(self) -> bool:
        """Whether a part was added."""
        return self._is_behind_text or bool(self._pictures)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Files of the pictures as base64, in order."""
        return tuple(self._pictures)

    def add_text(self, text: str) -> None:
        """Add a text; between two texts is a line break."""
        text = text.replace(IMAGE_PLACEHOLDER, "")
        self.text += ("\n" if self._is_behind_text else "") + text
        self._is_behind_text = True

    def add_file(self, data: str) -> None:
        """Add a picture's file as base64."""
        self.text += IMAGE_PLACEHOLDER
        self._pictures.append(data)
        self._is_behind_text = False

    def add_address(self, url: str, place: str) -> None:
        """Add the picture of a data URI.

        Raises:
            Refusal: the address is another one; nothing is fetched for a client.
        """
        found = _DATA.match(url)
        if found is None:
            raise bad_value(
                place, f"{place} must be a data URI such as data:image/png;base64,...; this server "
                "fetches no other addresses.",
            )  # fmt: skip
        self.add_file(url[found.end() :])
