"""Decodes and resizes an image with Pillow; runs as a program in a child process."""

from __future__ import annotations

import json
import warnings
from base64 import b64decode, b64encode
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from engine.errors import Sentence
from engine.util.child_program import answer_lines, ending_after
from engine.vision.images.resizing import Resizing, TooNarrow, Views

MAX_FILE_BYTES = 32 << 20  # maximum size of an image file
MAX_IMAGES = 64  # maximum number of images in a conversation
MAX_PIXELS = 1 << 26  # maximum number of pixels in an image: 67 megapixels

MAX_MEMORY = 1280 << 20
"""Maximum memory for decoding: an image of `MAX_PIXELS` with alpha or rotated, the result, and the
buffers of a progressive JPEG."""

MAX_SECONDS = 20.0  # maximum time to decode and resize an image
MORE_SECONDS = 1.0  # seconds to add for each further image in a conversation
MAX_AT_ONCE = 2  # maximum number of images that are decoded in parallel
GRACE_S = 1.0  # seconds from the time limit until the child is killed

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Supported file formats, by Pillow's names; only the first frame of animations is used."""


FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

WHITE = (255, 255, 255, 255)

STRIP_PIXELS = 1 << 20
"""Pixels per strip when images with transparency or 16 bits are converted to RGB."""

Answer = dict[str, object]


DAMAGED = Sentence("it is damaged")


class UnusableImage(Exception):
    """Error for a file that is not an image, is damaged, or is too large.

    Attributes:
        problem: reason, as the end of a sentence.
        kind: "none", "damaged" or "large".
        n_pixels: number of pixels in an image that is too large; else 0.
    """

    def __init__(self, problem: Sentence, kind: str, n_pixels: int = 0) -> None:
        super().__init__(problem)
        self.problem, self.kind, self.n_pixels = problem, kind, n_pixels


def decode_image(data: bytes) -> Image.Image:
    """Decode a file's bytes to an upright image in RGB.

    Raises:
        UnusableImage: it cannot be used.
        MemoryError: there is too little memory.
    """
    Image.MAX_IMAGE_PIXELS = None  # the limit below applies
    warnings.simplefilter("ignore")  # e.g. about metadata
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                problem = Sentence(
                    "it has {width} x {height} pixels, more than {most} megapixels",
                    width=width, height=height, most=MAX_PIXELS // 1_000_000,
                )  # fmt: skip
                raise UnusableImage(problem, "large", width * height)
            ImageOps.exif_transpose(image, in_place=True)
            return in_rgb(image)
    except UnidentifiedImageError:
        formats = ", ".join(FORMATS)
        problem = Sentence("its format is not one of {formats}", formats=formats)
        raise UnusableImage(problem, "none") from None
    except (MemoryError, UnusableImage):
        raise
    except Exception:  # noqa: BLE001 Pillow raises all kinds for damaged files
        raise UnusableImage(DAMAGED, "damaged") from None


def prepared(data: str, resizing: Resizing) -> Answer:
    """Return a resized image, or a problem.

    Args:
        data: bytes of the image file, as base64.

    Returns:
        "width" and "height" of the image, "grid" with the rows and columns of its tiles, and
        "views" with the "size" of each and its "pixels", RGB bytes row by row as base64; or
        "problem" and "values", a template for the end of a sentence and its values.
    """
    try:
        upright = decode_image(b64decode(data, validate=True))
    except UnusableImage as error:
        return _refused(error.problem)
    except ValueError:
        return _refused(DAMAGED)
    width, height = upright.size
    try:
        views = resizing.views(width, height)
    except TooNarrow:
        return _refused(
            Sentence("it is too narrow, with {width} x {height} pixels", width=width, height=height)
        )
    return {
        "width": width, "height": height, "grid": views.grid,
        "views": [
            {"size": view.size, "pixels": b64encode(view.tobytes()).decode("ascii")}
            for view in _cut(upright, views, FILTERS[resizing.resample])
        ],
    }  # fmt: skip


def _refused(problem: Sentence) -> Answer:
    return {"problem": problem.template, "values": problem.values}


def _cut(image: Image.Image, views: Views, resample: Image.Resampling) -> list[Image.Image]:
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
    """Return an image in RGB on a white background."""
    is_deep = image.mode.startswith("I;16") or image.mode == "I"
    if not is_deep and "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    result = Image.new("RGB", image.size)
    n_rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, n_rows):  # whole copies would take several times the memory
        strip = image.crop((0, top, image.width, min(image.height, top + n_rows)))
        result.paste(_strip_in_rgb(strip), (0, top))
    return result


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
