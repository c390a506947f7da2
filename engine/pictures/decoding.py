"""Decodes and resizes a picture with Pillow; runs in the child alone, see `program`."""

from __future__ import annotations

import warnings
from base64 import b64decode, b64encode
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from engine.pictures.limits import FORMATS, MOST_PIXELS
from engine.pictures.resizing import Resizing, TooNarrow

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

WHITE = (255, 255, 255, 255)

Answer = dict[str, object]


def prepared(data: str, resizing: Resizing) -> Answer:
    """Return a picture as it is resized, or what is wrong with it.

    Args:
        data: bytes of its file, as base64.

    Returns:
        "width" and "height" of the picture, "resized" with both of the resized one, and "pixels"
        with its RGB bytes row by row as base64; or "problem" with the end of a sentence.
    """
    Image.MAX_IMAGE_PIXELS = None  # the limit below counts
    warnings.simplefilter("ignore")  # such as of metadata that is of no use here
    try:
        with Image.open(BytesIO(b64decode(data, validate=True)), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                return _too_large(width, height)
            upright = in_rgb(ImageOps.exif_transpose(image))
        target = resizing.target(*upright.size)
    except UnidentifiedImageError:
        return {"problem": f"it is none of {', '.join(FORMATS)}"}
    except TooNarrow:
        return {"problem": f"{width} x {height} pixels are too narrow"}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 Pillow raises all kinds for damaged files
        return {"problem": f"it is damaged ({type(error).__name__})"}
    if target != upright.size:
        resized = upright.resize(target, FILTERS[resizing.resample])
    else:
        resized = upright
    pixels = b64encode(resized.tobytes()).decode("ascii")
    return {
        "width": upright.width, "height": upright.height, "resized": target, "pixels": pixels,
    }  # fmt: skip


def in_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB; what is transparent becomes white."""
    if image.mode.startswith("I;16") or image.mode == "I":
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        layered = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layered.size, WHITE), layered).convert("RGB")
    return image.convert("RGB")


def _too_large(width: int, height: int) -> Answer:
    most = MOST_PIXELS // 1_000_000
    return {"problem": f"{width} x {height} pixels are more than {most} megapixels"}
