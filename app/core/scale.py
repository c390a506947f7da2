"""The window's zoom: every length in pixels that code names goes through `px`."""

from __future__ import annotations

_percent = 100


def px(n: float) -> int:
    """Return a length of the window at 100 % at the present zoom, in pixels."""
    return round(n * _percent / 100)


def zoom() -> int:
    """Return the present zoom in percent."""
    return _percent


def set_zoom(percent: int) -> None:
    """Use another zoom; `app.widgets.theme.apply_theme` makes it seen."""
    global _percent
    _percent = percent
