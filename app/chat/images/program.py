"""The image decoder's child process: requests and replies are lines of JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import engine
from engine import answer_lines, ending_after

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_MEMORY: Final = 1536 << 20  # bytes, as in the engine's own image reader
MAX_SECONDS: Final = 30.0  # per image or page
PAGE_SIDE: Final = 1600  # longer side of a rendered page, in pixels
MAX_PDF: Final = 256 << 20  # bytes

LOCKED, NO_PDF = "locked", "no-pdf"
"""Values of "problem" for a PDF."""


def answer(request: dict[str, Any]) -> dict[str, object]:
    """Handle a request.

    Args:
        request: "picture", path of an image, with "side", the maximum width and height of the
            decoded pixels (0 to return none); or "pdf", path of a PDF, with "page", from 1.

    Returns:
        "size" of an image, and RGB "pixels" with size "shown"; or "n_pages" of a PDF, and the page
        as "png"; or a "problem": `LOCKED`, `NO_PDF`, one from `UnusableImage`, "unreadable"
        with "why", or "bytes" for a file that is too large.
    """
    try:
        if "pdf" in request:
            return _page(Path(request["pdf"]), int(request["page"]))
        image = engine.decode_image(engine.image_bytes(Path(request["picture"])))
    except engine.UnusableImage as error:
        return {"problem": error.kind, "n_pixels": error.n_pixels}
    except engine.ImageError as error:
        cause = error.__cause__
        return _unreadable(cause) if isinstance(cause, OSError) else {"problem": "bytes"}
    except OSError as error:
        return _unreadable(error)
    found: dict[str, object] = {"size": image.size}
    if side := int(request["side"]):
        image.thumbnail((side, side), reducing_gap=3.0)
        found |= {"shown": image.size, "pixels": _text(image.tobytes())}
    return found


def _unreadable(error: OSError) -> dict[str, object]:
    return {"problem": "unreadable", "why": error.strerror or str(error)}


def _page(path: Path, number: int) -> dict[str, object]:
    import pypdfium2

    if path.stat().st_size > MAX_PDF:
        return {"problem": NO_PDF}
    try:
        document = pypdfium2.PdfDocument(path)
        page = document[number - 1]
        width, height = page.get_size()
        scale = PAGE_SIDE / max(width, height, 1.0)
        image: Image = page.render(scale=scale).to_pil().convert("RGB")
    except pypdfium2.PdfiumError as error:
        return {"problem": LOCKED if "password" in str(error).lower() else NO_PDF}
    except (IndexError, ValueError):
        return {"problem": NO_PDF}
    return {"n_pages": len(document), "png": _text(_png(image))}


def _png(image: Image) -> bytes:
    from io import BytesIO

    held = BytesIO()
    image.save(held, "PNG", compress_level=3)
    return held.getvalue()


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _answer(line: bytes) -> dict[str, object]:
    with ending_after(2 * MAX_SECONDS):
        return answer(json.loads(line))


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
