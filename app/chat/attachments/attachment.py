"""What a message keeps of a file, and how its text stands in the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine import one_line

MOST_NAME: Final = 120
"""Largest number of characters of a file's name in a prompt."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file, or a part of one, that goes with a message.

    Attributes:
        name: name of the file, without its folder.
        text: its text.
        n_bytes: size of the whole file.
        n_tokens: number of tokens of the text; 0 if unknown.
        part, n_parts: number of the part, from 1, and of all parts; both 1 for a whole file.
    """

    name: str
    text: str
    n_bytes: int = 0
    n_tokens: int = 0
    part: int = 1
    n_parts: int = 1

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attachment:
        """Return the attachment that a chat's file holds.

        Raises:
            KeyError, TypeError, AttributeError: the data is none.
        """
        name, text = data["name"], data["text"]
        numbers = [data.get("n_bytes", 0), data.get("n_tokens", 0)]
        numbers += [data.get("part", 1), data.get("n_parts", 1)]
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError("a file's name and text expected")
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError("numbers expected")
        return cls(name, text, *numbers)


def framed(text: str, attachments: Sequence[Attachment]) -> str:
    """Return the text of a message with its files in front of it, each between marks."""
    parts = []
    for file in attachments:
        name = one_line(file.name, MOST_NAME).replace('"', "'")
        part = f' part="{file.part} of {file.n_parts}"' if file.n_parts > 1 else ""
        parts.append(f'<file name="{name}"{part}>\n{file.text.strip(chr(10))}\n</file>')
    return "\n\n".join([*parts, text] if text else parts)
