"""Reading of a conversation's images, and their placement between the tokens of its text."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from engine.errors import ANOTHER_TEMPLATE, ImageError, reason_of
from engine.text.messages import IMAGE_PLACEHOLDER, ImageFile
from engine.util.progress import IsCancelled, never
from engine.vision.images.decoding import MAX_IMAGES
from engine.vision.images.placed import PromptImage
from engine.vision.images.reading import ImageDecoder, image_base64

if TYPE_CHECKING:
    from engine.text.messages import ChatMessage
    from engine.vision.images.placed import VisionInfo
    from engine.vision.images.resizing import ImageProcessor

MAX_KEPT_BYTES = 64 << 20
"""Maximum size of cached pixels, in bytes; caching avoids reading images again in every turn."""

_NUMBERED = re.compile(f"{IMAGE_PLACEHOLDER}([0-9]+){IMAGE_PLACEHOLDER}")
"""Place of an image in a prompt's text, with the image's index in the conversation."""


@dataclass(frozen=True, eq=False)
class SeenImage:
    """An image in a conversation's prompt.

    Attributes:
        views: the image; or its tiles, followed by the whole image.
        texts: texts before each view, and after the last.
    """

    views: tuple[PromptImage, ...]
    texts: Sequence[str]


PromptImages = Sequence[SeenImage]
"""A conversation's images, in order."""


class ImageReader:
    """Reader of images in conversations with one model.

    Args:
        vision: the model's image processor.
        encoder: hash of the vision encoder.
    """

    def __init__(self, vision: VisionInfo, encoder: str) -> None:
        self.vision = vision
        self._encoder = encoder
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, SeenImage] = OrderedDict()
        self._used: WeakValueDictionary[bytes, SeenImage] = WeakValueDictionary()

    @property
    def rule(self) -> ImageProcessor:
        """The model's image processor."""
        return self.vision.rule

    def read(
        self, messages: Sequence[ChatMessage], is_cancelled: IsCancelled = never
    ) -> PromptImages:
        """Return a conversation's images; thread-safe.

        As long as the result is referenced, reading the same images again takes no time.

        Raises:
            ImageError: an image cannot be used, or there are too many.
            Cancelled: `is_cancelled` has returned True.
        """
        images = [image for message in messages for image in message.pictures]
        if len(images) > MAX_IMAGES:
            raise ImageError(
                "The conversation has {n} images; at most {most} are allowed.",
                n=len(images),
                most=MAX_IMAGES,
            )
        with ImageDecoder(len(images), is_cancelled) as decoder:
            return [self._read(image, decoder) for image in images]

    def _read(self, image: ImageFile | str, decoder: ImageDecoder) -> SeenImage:
        key = _key(image)
        with self._lock:
            found = self._kept.pop(key, None) or self._used.get(key)
        if found is None:
            if isinstance(image, ImageFile):
                image = image_base64(image.path)
            size, grid, views = decoder.views(image, self.rule.resizing)
            prompt_images = (PromptImage.of(view, size, self.rule, self._encoder) for view in views)
            found = SeenImage(tuple(prompt_images), self.rule.texts(*grid))
        with self._lock:
            self._kept[key] = self._used[key] = found
            while len(self._kept) > 1 and self._n_bytes > MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return found

    @property
    def _n_bytes(self) -> int:
        return sum(view.pixels.nbytes for seen in self._kept.values() for view in seen.views)


def _key(image: ImageFile | str) -> bytes:
    if isinstance(image, ImageFile):
        try:
            stat = Path(image.path).stat()
        except OSError as error:
            problem = reason_of(error)
            raise ImageError("An image cannot be read: {problem}.", problem=problem) from error
        image = f"{image.path}\0{stat.st_size} {stat.st_mtime_ns}"
    return blake2b(image.encode("utf-8", "replace"), digest_size=16).digest()


def by_number(images: PromptImages) -> Mapping[int, PromptImage]:
    """Return images and tiles by number."""
    return {view.number: view for image in images for view in image.views}


def with_numbers(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return text messages in which each image's index marks its place.

    Images with no place go before the text of their message.
    """
    marked: list[ChatMessage] = []
    n = 0
    for message in messages:
        parts = message.content.split(IMAGE_PLACEHOLDER)
        n_first = max(0, len(message.pictures) - len(parts) + 1)
        numbers = [
            f"{IMAGE_PLACEHOLDER}{n + i}{IMAGE_PLACEHOLDER}" for i in range(len(message.pictures))
        ]
        places = [*numbers[n_first:], *[""] * len(parts)]
        text = "".join(numbers[:n_first]) + parts[0]
        text += "".join(place + part for place, part in zip(places, parts[1:], strict=False))
        marked.append(replace(message, content=text, pictures=()))
        n += len(message.pictures)
    return marked


def encoded(text: str, images: PromptImages, encode: Callable[[str, bool], list[int]]) -> list[int]:
    """Return the token ids for a prompt text that contains image indices.

    Args:
        encode: returns a text's ids, given whether the prompt starts with the text.

    Raises:
        ImageError: the template has left out images or changed their order.
    """
    texts = _NUMBERED.split(text)
    numbers = [int(number) for number in texts[1::2]]
    if numbers != list(range(len(images))):
        raise ImageError("The model's chat template leaves out images.", ANOTHER_TEMPLATE)
    ids, held, is_first = list[int](), texts[0], True
    for image, after in zip(images, texts[2::2], strict=True):
        around = image.texts
        for view, before in zip(image.views, around[:-1], strict=True):
            if held + before or is_first:  # a prompt may begin with BOS
                ids += encode(held + before, is_first)
            ids += view.ids
            held, is_first = "", False
        held = around[-1] + after
    return ids + encode(held, is_first)


def without_numbers(text: str, rule: ImageProcessor) -> str:
    """Return a prompt's text with each image replaced by the text around its tokens."""
    around = "".join(rule.texts(1, 1))
    return _NUMBERED.sub(lambda _: around, text)
