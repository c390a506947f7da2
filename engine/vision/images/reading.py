"""Reads the images in messages, in a child process with limits."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from engine.errors import Cancelled, ImageError, Sentence, reason_of
from engine.util.programs import program_command
from engine.util.progress import IsCancelled, never
from engine.util.sandbox import ChildEnded, Excess, FairSemaphore, LimitedChild
from engine.vision.images.decoding import (
    GRACE_S,
    MAX_AT_ONCE,
    MAX_FILE_BYTES,
    MAX_MEMORY,
    MAX_SECONDS,
    MORE_SECONDS,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.vision.images.resizing import Resizing, Size

COMMAND = program_command("engine.vision.images.decoding")  # command of the child

_turns = FairSemaphore(MAX_AT_ONCE)
"""Limit on conversations that decode images in parallel; they take turns image by image."""


def image_base64(file: str | Path | bytes) -> str:
    """Return an image as base64, as in `ChatMessage.pictures`.

    Args:
        file: path of a PNG, JPEG, WebP, GIF or BMP file, or its bytes.

    Raises:
        ImageError: it cannot be read, or is too large.
    """
    data = file if isinstance(file, bytes) else image_bytes(Path(file))
    if len(data) > MAX_FILE_BYTES:
        raise _unusable(_too_many_bytes())
    return b64encode(data).decode("ascii")


def image_bytes(path: Path) -> bytes:
    """Return the bytes of an image file.

    Raises:
        ImageError: it cannot be read, or is too large.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ImageError(
                "{file} cannot be used: {problem}.", file=path.name, problem=_too_many_bytes()
            )
        return path.read_bytes()
    except OSError as error:
        problem = reason_of(error)
        raise ImageError(
            "{path} cannot be read: {problem}.", path=path.name, problem=problem
        ) from error


class DecodedImage(NamedTuple):
    """A decoded image, as an encoder sees it.

    Attributes:
        size: width and height of the image.
        grid: rows and columns of its tiles; (1, 1) if there are no tiles.
        views: RGB pixels of the tiles, row by row, then of the whole; each (height, width, 3).
    """

    size: Size
    grid: Size
    views: tuple[NDArray[np.uint8], ...]


class ImageDecoder:
    """Decoder for the n images in one conversation: a child process with a single time limit.

    `is_cancelled` may be polled on any thread; True stops the child.
    """

    def __init__(self, n: int = 1, is_cancelled: IsCancelled = never) -> None:
        self._left = self._most = MAX_SECONDS + MORE_SECONDS * (n - 1)
        self._is_cancelled = is_cancelled
        self._child: LimitedChild | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.close()

    def views(self, image: str, resizing: Resizing) -> DecodedImage:
        """Return an image's size and views; wait for this conversation's turn first.

        Args:
            image: see `image_base64`.

        Raises:
            ImageError: it is not an image, is damaged or too large, or takes too long.
            Cancelled: `is_cancelled` has returned True.
        """
        if len(image) > 4 * (MAX_FILE_BYTES // 3 + 1):
            raise _unusable(_too_many_bytes())
        request = json.dumps({"picture": image, "resizing": asdict(resizing)}) + "\n"
        if not _turns.acquire(self._is_cancelled):
            raise Cancelled(READING)
        begun = time.monotonic()
        try:
            answer = self._ask(request.encode("ascii", "replace"))
        finally:
            self._left -= time.monotonic() - begun
            _turns.release()
        if "problem" in answer:
            raise _unusable(Sentence(answer["problem"], **answer["values"]))
        rows, columns = answer["grid"]
        views = tuple(_pixels(view) for view in answer["views"])
        return DecodedImage((answer["width"], answer["height"]), (rows, columns), views)

    def _ask(self, request: bytes) -> dict[str, Any]:
        seconds = min(self._left, MAX_SECONDS + GRACE_S)
        try:
            if self._child is None:
                self._child = LimitedChild(COMMAND, MAX_MEMORY)
            self._child.wait_until_ready(self._is_cancelled)
            return self._child.ask(request, seconds, self._is_cancelled)
        except ChildEnded as error:
            if error.excess is Excess.CANCELLED:
                raise Cancelled(READING) from None
            if error.excess is Excess.TIME and seconds < MAX_SECONDS:
                raise ImageError(
                    "The images cannot be used: reading them takes more than {n:g} seconds.",
                    n=self._most,
                ) from None
            raise _unusable(_why(error)) from error
        except OSError as error:
            raise ImageError(
                "The program that reads images cannot be started: {problem}.",
                "Allow Tandem to start programs, or remove the image.",
                problem=reason_of(error),
            ) from error


def _pixels(view: dict[str, Any]) -> NDArray[np.uint8]:
    width, height = view["size"]
    return np.frombuffer(b64decode(view["pixels"]), np.uint8).reshape(height, width, 3)


READING = Sentence("Reading the images")


def _unusable(problem: Sentence) -> ImageError:
    return ImageError("An image cannot be used: {problem}.", problem=problem)


def _why(ended: ChildEnded) -> Sentence:
    if ended.excess is Excess.TIME:
        return Sentence("reading it takes more than {n:g} seconds", n=MAX_SECONDS)
    if ended.is_out_of_memory:
        return Sentence("reading it takes more than {n} MiB of memory", n=MAX_MEMORY >> 20)
    return Sentence("the program that reads it crashed (status {status})", status=str(ended.status))


def _too_many_bytes() -> Sentence:
    return Sentence("its file is larger than {n} MiB", n=MAX_FILE_BYTES >> 20)
