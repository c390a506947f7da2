"""Decodes and resizes an image with Pillow; runs in the child alone, see `program`."""

from __future__ import annotations

import json
import warnings
from base64 import b64decode, b64encode
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from engine.util.child_program import answer_lines, ending_after
from engine.vision.images.resizing import Resizing, TooNarrow, Views

MAX_FILE_BYTES = 32 << 20
"""Largest number of bytes of an image's file."""

MAX_IMAGES = 64
"""Largest number of images of a conversation."""

MAX_PIXELS = 1 << 26
"""Largest number of pixels of an image: 67 megapixels."""

MAX_MEMORY = 1280 << 20
"""Largest number of bytes of memory for decoding: an image of `MAX_PIXELS` with alpha or turned,
the result, and what a progressive JPEG needs beside them."""

MAX_SECONDS = 20.0
"""Longest time to decode and resize an image."""

MORE_SECONDS = 1.0
"""Seconds that each further image adds to that, for all of a conversation together."""

MAX_AT_ONCE = 2
"""Largest number of images that are decoded at once."""

GRACE_S = 1.0
"""Seconds after that time for the child to end by itself; then it is killed."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of files that are read, as Pillow names them; of several frames the first counts."""


FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

WHITE = (255, 255, 255, 255)

STRIP_PIXELS = 1 << 20
"""Number of pixels of a strip, in which images with transparency or 16 bits become RGB."""

Answer = dict[str, object]


class UnusableImage(Exception):
    """Error of a file that is no image, damaged or too large; its text ends a sentence.

    Attributes:
        kind: which of these it is: "none", "damaged" or "large".
        n_pixels: number of pixels of one that is too large; else 0.
    """

    def __init__(self, text: str, kind: str, n_pixels: int = 0) -> None:
        super().__init__(text)
        self.kind, self.n_pixels = kind, n_pixels


def decode_image(data: bytes) -> Image.Image:
    """Return the image of a file's bytes as it is to be seen, in RGB.

    Raises:
        UnusableImage: it cannot be used.
        MemoryError: there is too little memory.
    """
    Image.MAX_IMAGE_PIXELS = None  # the limit below counts
    warnings.simplefilter("ignore")  # such as of metadata that is of no use here
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                most = MAX_PIXELS // 1_000_000
                text = f"{width} x {height} pixels are more than {most} megapixels"
                raise UnusableImage(text, "large", width * height)
            ImageOps.exif_transpose(image, in_place=True)
            return in_rgb(image)
    except UnidentifiedImageError:
        raise UnusableImage(f"it is none of {', '.join(FORMATS)}", "none") from None
    except (MemoryError, UnusableImage):
        raise
    except Exception:  # noqa: BLE001 Pillow raises all kinds for damaged files
        raise UnusableImage("it is damaged", "damaged") from None


def prepared(data: str, resizing: Resizing) -> Answer:
    """Return an image as it is resized, or what is wrong with it.

    Args:
        data: bytes of its file, as base64.

    Returns:
        "width" and "height" of the image, "grid" with the rows and columns of its tiles, and
        "views" with the "size" of each and its "pixels", RGB bytes row by row as base64; or
        "problem" with the end of a sentence.
    """
    try:
        upright = decode_image(b64decode(data, validate=True))
    except UnusableImage as error:
        return {"problem": str(error)}
    except ValueError:
        return {"problem": "it is damaged"}
    try:
        views = resizing.views(*upright.size)
    except TooNarrow:
        return {"problem": f"{upright.width} x {upright.height} pixels are too narrow"}
    return {
        "width": upright.width, "height": upright.height, "grid": views.grid,
        "views": [
            {"size": view.size, "pixels": b64encode(view.tobytes()).decode("ascii")}
            for view in _cut(upright, views, FILTERS[resizing.resample])
        ],
    }  # fmt: skip


def _cut(image: Image.Image, views: Views, resample: Image.Resampling) -> list[Image.Image]:
    """Return what an encoder sees of an image: all of it, or its tiles and then all of it."""
    last = image
    for size in views.sizes:
        last = _resized(last, size, resample)
    rows, columns = views.grid
    if rows * columns == 1:
        return [last]
    wide, high = last.width // columns, last.height // rows
    corners = [(column * wide, row * high) for row in range(rows) for column in range(columns)]
    tiles = [last.crop((left, top, left + wide, top + high)) for left, top in corners]
    whole = last if views.is_whole_last else image
    return [*tiles, _resized(whole, (wide, high), resample)]


def _resized(image: Image.Image, size: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    return image if image.size == size else image.resize(size, resample)


def in_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB; what is transparent becomes white."""
    is_deep = image.mode.startswith("I;16") or image.mode == "I"
    if not is_deep and "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    found = Image.new("RGB", image.size)
    n_rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, n_rows):  # whole copies would take several times the memory
        strip = image.crop((0, top, image.width, min(image.height, top + n_rows)))
        found.paste(_strip_in_rgb(strip), (0, top))
    return found


def _strip_in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or image.mode == "I":
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        layered = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, WHITE), layered).convert("RGB")
    return image.convert("RGB")


def _answer(line: bytes) -> Answer:
    request = json.loads(line)
    with ending_after(MAX_SECONDS + 4 * GRACE_S):
        return prepared(request["picture"], Resizing(**request["resizing"]))


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
