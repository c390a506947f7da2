"""The program that draws formulas: for each line of JSON with a formula, one with its SVG."""

from __future__ import annotations

import json

from engine import answer_lines, ending_after

MAX_MEMORY = 512 << 20
"""Largest number of bytes that the program may take."""

MAX_SECONDS = 2.0
"""Longest time for one formula."""

MAX_SVG = 2 << 20
"""Largest number of characters of a picture."""

MAX_PIXELS = 6000.0
"""Largest width and height of a picture, in logical pixels."""

MARGIN = 1.0
"""Pixels around a picture, for the soft edges of its letters."""

SHAPES = frozenset(("svg", "g", "path", "rect", "circle", "ellipse", "polygon"))
"""Elements of a picture; none of them names another file."""


def draw(latex: str, pixels: float, colour: str, is_display: bool) -> dict[str, object]:
    """Return the picture of a formula as SVG.

    Args:
        pixels: size of its letters, in logical pixels.
        is_display: whether sums and fractions are as large as in a line of their own.

    Returns:
        "svg", "width", "height" and "depth", the pixels below the baseline; nothing if it cannot be
        drawn or is too large.
    """
    # late: the process says that it is ready before, and the window reads the limits alone
    from xml.etree.ElementTree import tostring

    import ziamath

    ziamath.config.svg2 = False  # Qt draws SVG 1.2 Tiny
    try:
        made = ziamath.Latex(latex, size=pixels, color=colour, inline=not is_display, margin=MARGIN)
        width, height = (length + 2 * MARGIN for length in made.getsize())
        depth = MARGIN - made.getyofst()
        if not (0 < width <= MAX_PIXELS and 0 < height <= MAX_PIXELS):
            return {}
        picture = made.svgxml()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 whatever a formula leads to there, it has no picture
        return {}
    svg = tostring(picture, encoding="unicode")
    if len(svg) > MAX_SVG or {element.tag for element in picture.iter()} - SHAPES:
        return {}
    return {"svg": svg, "width": width, "height": height, "depth": depth}


def _answer(line: bytes) -> dict[str, object]:
    request = json.loads(line)
    with ending_after(2 * MAX_SECONDS):
        return draw(request["latex"], request["pixels"], request["colour"], request["is_display"])


if __name__ == "__main__":
    answer_lines(_answer, MAX_MEMORY)
