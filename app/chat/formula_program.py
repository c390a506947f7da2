"""The formula renderer's child process; it reads formulas as lines of JSON and replies with SVG."""

from __future__ import annotations

import json

from engine import answer_lines, ending_after

MAX_MEMORY = 512 << 20  # bytes
MAX_SECONDS = 2.0
MAX_SVG = 2 << 20  # characters
MAX_PIXELS = 6000.0  # width and height, in logical pixels
MARGIN = 1.0  # pixels for antialiasing at the edges

SHAPES = frozenset(("svg", "g", "path", "rect", "circle", "ellipse", "polygon"))
"""Allowed SVG elements, none of which can reference another file."""


def draw(latex: str, pixels: float, colour: str, is_display: bool) -> dict[str, object]:
    """Render a formula as SVG.

    Args:
        pixels: font size, in logical pixels.
        is_display: whether to use display style.

    Returns:
        "svg", "width", "height" and "depth" (pixels below the baseline); empty if the formula
        cannot be rendered or is too large.
    """
    # late: the process first reports that it is ready, and the window imports only the limits
    from xml.etree.ElementTree import tostring

    import ziamath

    ziamath.config.svg2 = False  # Qt draws SVG 1.2 Tiny
    try:
        made = ziamath.Latex(latex, size=pixels, color=colour, inline=not is_display, margin=MARGIN)
        width, height = (length + 2 * MARGIN for length in made.getsize())
        depth = MARGIN - made.getyofst()
        if not (0 < width <= MAX_PIXELS and 0 < height <= MAX_PIXELS):
            return {}
        image = made.svgxml()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 ziamath raises errors of all kinds for bad formulas
        return {}
    svg = tostring(image, encoding="unicode")
    if len(svg) > MAX_SVG or {element.tag for element in image.iter()} - SHAPES:
        return {}
    return {"svg": svg, "width": width, "height": height, "depth": depth}


def _answer(line: bytes) -> dict[str, object]:
    request = json.loads(line)
    with ending_after(2 * MAX_SECONDS):
        return draw(request["latex"], request["pixels"], request["colour"], request["is_display"])


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
