"""The child that reads pictures, and what its answers mean; for one thread at a time."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from PySide6.QtGui import QImage

import engine  # for names that only pictures need, which are resolved when they are used
from app.chat.pictures.picture import MOST_NAME
from app.chat.pictures.program import MAX_MEMORY, MAX_SECONDS
from app.core.background import KeptChild
from app.core.translation import tr
from engine import EngineError, one_line, program_command

log = logging.getLogger(__name__)

COMMAND: Final = program_command("app.chat.pictures.program")


class PictureChild:
    """A child that reads pictures; it starts when it is asked, and anew after it was ended."""

    def __init__(self) -> None:
        self._child = KeptChild(COMMAND)

    def size(self, path: Path, name: str) -> tuple[int, int]:
        """Return the width and height of a picture, all of which has been read.

        Raises:
            EngineError: it cannot be used; the sentence calls it by `name`.
        """
        width, height = self._ask({"picture": str(path.absolute()), "side": 0}, name)["size"]
        return width, height

    def image(self, path: Path, side: int, name: str) -> QImage:
        """Return a picture with sides of at most `side` pixels.

        Raises:
            EngineError: it cannot be used.
        """
        answer = self._ask({"picture": str(path.absolute()), "side": side}, name)
        width, height = answer["shown"]
        pixels = b64decode(answer["pixels"])
        return QImage(pixels, width, height, 3 * width, QImage.Format.Format_RGB888).copy()

    def page(self, path: Path, number: int) -> tuple[bytes, int]:
        """Return a page of a document as a PNG file, and the number of its pages.

        Raises:
            EngineError: it cannot be used.
        """
        answer = self._ask({"pdf": str(path.absolute()), "page": number}, path.name)
        return b64decode(answer["png"]), int(answer["n_pages"])

    def kill(self) -> None:
        """End the child, whatever it does, and read nothing any more; any thread may call it."""
        self._child.kill()

    def close(self) -> None:
        """End the child, and close its pipes."""
        self._child.close()

    def _ask(self, request: Mapping[str, object], name: str) -> dict[str, Any]:
        try:
            answer = self._child.ask(request, MAX_MEMORY, MAX_SECONDS)
        except (engine.ChildEnded, OSError) as error:
            log.info("%s is not read: %s", one_line(name, MOST_NAME), error)
            raise refusal({"problem": "excess"}, name) from None
        if "problem" in answer:
            raise refusal(answer, name)
        return answer


def refusal(answer: Mapping[str, Any], name: str) -> EngineError:
    """Return the error of a problem that the child reports."""
    million, hint = 1_000_000, ""
    kind = answer["problem"]
    texts = {
        "none": tr("{name} is no picture that models can see."),
        "damaged": tr("{name} is damaged and cannot be opened."),
        "large": tr("{name} has {n} megapixels; at most {most} can be used."),
        "bytes": tr("{name} is larger than the 32 MiB that a picture may have."),
        "excess": tr("{name} cannot be read: it takes too long or too much memory."),
        "unreadable": tr("{name} cannot be read: {why}."),
        "locked": tr("{name} is locked by a password. Attach a copy without one."),
        "no-pdf": tr("{name} is no PDF that can be read."),
    }
    if kind == "none":
        hint = tr("PNG, JPEG, WebP, GIF and BMP files can be attached.")
    elif kind in ("large", "bytes", "excess"):
        hint = tr("Attach a smaller copy, or the part that matters.")
    text = texts[kind].format(
        name=one_line(name, MOST_NAME), why=answer.get("why", ""),
        n=answer.get("n_pixels", 0) // million, most=engine.MOST_PIXELS // million,
    )  # fmt: skip
    return EngineError(text, hint)
