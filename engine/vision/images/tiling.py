"""Grids of square tiles into which pictures are cut, and the sizes to which they are brought."""

from __future__ import annotations

Size = tuple[int, int]


def best_grid(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tiles whose proportions are most like a picture's.

    Of grids of the same proportions a larger one counts while the picture has more than half of
    its pixels (InternVL 1.5, arXiv 2404.16821).

    Args:
        side: side of a tile, in pixels.
        least, most: bounds of the number of tiles.
    """
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if rows * columns >= least
    ]
    best, found = float("inf"), (1, 1)
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        off = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * side * side * rows * columns
        if off < best or (off == best and is_filled):
            best, found = off, (rows, columns)
    return found


def with_longest(width: int, height: int, longest: int) -> Size:
    """Return the size of a picture whose longer side is brought to `longest` (Idefics 3).

    The other side keeps the proportions, rounded down and then up to an even number.
    """
    if width >= height:
        return longest, _even(int(longest / (width / height)))
    return _even(int(longest * (width / height))), longest


def in_tiles(width: int, height: int, side: int) -> Size:
    """Return the size of a picture whose sides are brought up to multiples of `side` (Idefics 3).

    The shorter one follows from the longer one's new length.
    """
    if width >= height:
        wide = _above(width, side)
        return wide, _above(int(wide / (width / height)), side)
    high = _above(height, side)
    return _above(int(high * (width / height)), side), high


def _even(n: int) -> int:
    return max(1, n + n % 2)


def _above(n: int, side: int) -> int:
    """Return the smallest multiple of a tile's side that is not below n, and one at least."""
    return max(1, -(-n // side)) * side
