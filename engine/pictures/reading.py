"""Reads picture files as messages hold them, in a child process with limits."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.errors import PictureError
from engine.limited.child import ChildEnded, Excess, LimitedChild
from engine.pictures.limits import GRACE_S, MAX_MEMORY, MAX_SECONDS, MOST_FILE_BYTES
from engine.programs import program_command

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.pictures.resizing import Resizing
    from engine.pictures.tiling import Size

COMMAND = program_command("engine.pictures.program")
"""Command of the child."""


def picture_text(file: str | Path | bytes) -> str:
    """Return a picture as `ChatMessage.pictures` has it: the bytes of its file as base64.

    Args:
        file: path of a PNG, JPEG, WebP, GIF or BMP file, or its bytes.

    Raises:
        PictureError: it cannot be read, or is too large.
    """
    data = file if isinstance(file, bytes) else picture_bytes(Path(file))
    if len(data) > MOST_FILE_BYTES:
        raise PictureError(f"A picture cannot be used: {_too_many_bytes()}.")
    return b64encode(data).decode("ascii")


def picture_bytes(path: Path) -> bytes:
    """Return the bytes of a picture's file.

    Raises:
        PictureError: it cannot be read, or is too large.
    """
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise PictureError(f"{path.name} cannot be used: {_too_many_bytes()}.")
        return path.read_bytes()
    except OSError as error:
        problem = error.strerror or str(error)
        raise PictureError(f"{path.name} cannot be read: {problem}.") from error


class ReadPicture(NamedTuple):
    """What a tower sees of a picture's file.

    Attributes:
        size: width and height of the picture.
        grid: rows and columns of its tiles; (1, 1) where it is seen as a whole alone.
        views: RGB pixels of the tiles row by row and then of the whole, each (height, width, 3).
    """

    size: Size
    grid: Size
    views: tuple[NDArray[np.uint8], ...]


def read_views(picture: str, resizing: Resizing) -> ReadPicture:
    """Return a picture's size and what a tower sees of it.

    Args:
        picture: see `picture_text`.

    Raises:
        PictureError: it is no picture, damaged or too large.
    """
    if len(picture) > 4 * (MOST_FILE_BYTES // 3 + 1):
        raise PictureError(f"A picture cannot be used: {_too_many_bytes()}.")
    request = json.dumps({"picture": picture, "resizing": asdict(resizing)}) + "\n"
    answer = _asked(request.encode("ascii", "replace"))
    if "problem" in answer:
        raise PictureError(f"A picture cannot be used: {answer['problem']}.")
    rows, columns = answer["grid"]
    views = tuple(_pixels(view) for view in answer["views"])
    return ReadPicture((answer["width"], answer["height"]), (rows, columns), views)


def _pixels(view: dict[str, Any]) -> NDArray[np.uint8]:
    width, height = view["size"]
    return np.frombuffer(b64decode(view["pixels"]), np.uint8).reshape(height, width, 3)


def _asked(request: bytes) -> dict[str, Any]:
    """Return the answer of a child."""
    try:
        child = LimitedChild(COMMAND, MAX_MEMORY)
        try:
            child.wait_until_ready()
            return child.ask(request, MAX_SECONDS + GRACE_S)
        finally:
            child.close()
    except ChildEnded as error:
        raise PictureError(f"A picture cannot be used: {_why(error)}.") from error
    except OSError as error:
        raise PictureError(
            f"The program that reads pictures cannot be started: {error}.",
            "Let Tandem start programs, or leave the picture out.",
        ) from error


def _why(ended: ChildEnded) -> str:
    if ended.excess is Excess.TIME:
        return f"reading it takes more than {MAX_SECONDS:g} seconds"
    if ended.is_out_of_memory:
        return f"reading it takes more than {MAX_MEMORY >> 20} MiB of memory"
    return f"it ends the program that reads it, with status {ended.status}"


def _too_many_bytes() -> str:
    return f"its file has more than {MOST_FILE_BYTES >> 20} MiB"
