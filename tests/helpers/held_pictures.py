"""A reading of pictures that lasts until it is let go, or cancelled."""

import threading

import pytest

from engine.errors import Cancelled, ImageError
from engine.util.progress import IsCancelled, never
from engine.vision.images.reading import DecodedImage, ImageDecoder
from engine.vision.images.resizing import Resizing

PATIENCE_S = 6.0
"""Seconds after which a held reading fails, so that a test without a second thread ends."""


class HeldPictures:
    """What takes the place of `ImageDecoder` where conversations are read.

    Attributes:
        n_read: number of pictures that were read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_read = 0
        self.begun, self.may_end, self.cancelled = (threading.Event() for _ in range(3))
        place = "engine.generation.image_prompts.ImageDecoder"
        monkeypatch.setattr(place, lambda n, is_cancelled=never: _Held(self, n, is_cancelled))


class _Held(ImageDecoder):
    def __init__(self, held: HeldPictures, n: int, is_cancelled: IsCancelled) -> None:
        super().__init__(n, is_cancelled)
        self._held, self._is_over = held, is_cancelled

    def views(self, picture: str, resizing: Resizing) -> DecodedImage:
        self._held.begun.set()
        for _ in range(int(PATIENCE_S / 0.005)):
            if self._is_over():
                self._held.cancelled.set()
                raise Cancelled("Reading the images")
            if self._held.may_end.wait(0.005):
                self._held.n_read += 1
                return super().views(picture, resizing)
        raise ImageError("Nobody let the reading end.")
