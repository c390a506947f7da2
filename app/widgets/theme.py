"""Colours, fonts, icons and zoom; no other module in the app defines colours.

`apply_theme` sets the application's palette, font and style sheet; painted widgets use `theme()`
and `px`, and repaint on `theme_signals().changed`. The dynamic property `role` selects a widget's
rules in `resources/style.qss`.
"""

from __future__ import annotations

import atexit
import logging
import re
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Final

from PySide6.QtCore import QByteArray, QDir, QObject, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontDatabase,
    QGuiApplication,
    QIcon,
    QPainter,
    QPalette,
    QPixmap,
)
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QApplication, QWidget

from engine import temporary_folder

_percent = 100


def px(n: float) -> int:
    """Scale a length in pixels at 100 % to the current zoom."""
    return round(n * _percent / 100)


def zoom() -> int:
    """Return the current zoom in percent."""
    return _percent


def set_zoom(percent: int) -> None:
    """Set the zoom for the next `apply_theme`."""
    global _percent
    _percent = percent


log = logging.getLogger(__name__)

RESOURCES: Final = Path(__file__).resolve().parents[2] / "resources"
FONT_FAMILY: Final = "Inter"
FONT_PIXELS: Final = 13
ICON_SIZES: Final = (16, 20, 24, 32, 48)
INDICATORS: Final = {"chevron-up": "muted", "chevron-down": "muted", "check": "on_accent"}
"""Icons used in the style sheet, with their theme colours."""

LENGTH: Final = re.compile(r"(border-radius: )?\b(\d+)px")  # a length in the style sheet

_at_exit = ExitStack()
atexit.register(_at_exit.close)


@dataclass(frozen=True, slots=True)
class Theme:
    """A colour palette; colours are "#rrggbb".

    Attributes:
        window: background of the chat.
        surface: background of side panels.
        raised: background of cards and buttons.
        on_accent: text on top of the accent colour or a device colour.
        devices: one colour per device.
    """

    name: str
    window: str
    surface: str
    raised: str
    line: str
    text: str
    muted: str
    accent: str
    on_accent: str
    ok: str
    warn: str
    danger: str
    code_background: str
    devices: tuple[str, ...]

    def device_colour(self, index: int) -> str:
        """Return the colour for the device at this index in the device list."""
        return self.devices[index % len(self.devices)]


DARK: Final = Theme(
    name="dark",
    window="#15171c",
    surface="#1b1e25",
    raised="#232732",
    line="#2e3340",
    text="#e8eaf0",
    muted="#9aa3b5",
    accent="#6ea8fe",
    on_accent="#0d1420",
    ok="#46b98a",
    warn="#e5b454",
    danger="#f4777b",
    code_background="#12141a",
    devices=(
        "#5b9dff", "#f29d4b", "#46b98a", "#b58cff", "#f47fb0", "#dcc04e", "#3fbfc9", "#b9a08c",
        "#c3cad9",
    ),
)  # fmt: skip
LIGHT: Final = Theme(
    name="light",
    window="#f6f7f9",
    surface="#ffffff",
    raised="#f0f2f6",
    line="#dfe3ea",
    text="#1b1f27",
    muted="#5b6475",
    accent="#2f6fde",
    on_accent="#ffffff",
    ok="#16794f",
    warn="#8a5a00",
    danger="#c22f3a",
    code_background="#f3f5f9",
    devices=(
        "#2f6fde", "#c4641d", "#1a8560", "#7a4fd0", "#c23c7c", "#8d7211", "#0f7f8c", "#7d6450",
        "#4a5365",
    ),
)  # fmt: skip
THEMES: Final = {"dark": DARK, "light": LIGHT}


class ThemeSignals(QObject):
    """Emits `changed` after a new theme or zoom was applied."""

    changed = Signal()


class _Current:
    choice = "system"
    theme = DARK
    zoom = 0  # in percent; 0 if not applied yet
    is_following = False


def theme() -> Theme:
    """Return the theme in use."""
    return _Current.theme


@cache
def theme_signals() -> ThemeSignals:
    return ThemeSignals()


def apply_theme(app: QApplication, choice: str, percent: int | None = None) -> None:
    """Apply the "dark" or "light" theme, or for "system" the one that the desktop prefers.

    Args:
        percent: zoom for the whole window; None does not change it.
    """
    if percent is not None:
        set_zoom(percent)
    _Current.choice = choice if choice in THEMES else "system"
    if not _Current.is_following:
        _Current.is_following = True
        app.styleHints().colorSchemeChanged.connect(lambda _: _follow_system(app))
        app.setStyle("Fusion")
        _load_fonts()
    _dress(app)


@cache
def mix(first: str, second: str, weight: float) -> str:
    """Blend two colours; `weight` (0 to 1) is the weight of `second`."""
    a, b = QColor(first), QColor(second)
    parts = zip((a.red(), a.green(), a.blue()), (b.red(), b.green(), b.blue()), strict=True)
    return QColor(*(round(x + (y - x) * weight) for x, y in parts)).name()


def set_role(widget: QWidget, role: str, name: str = "role") -> None:
    """Set a widget's style sheet role, even if the widget is already visible.

    Args:
        name: property that holds the role.
    """
    if widget.property(name) == role:
        return
    widget.setProperty(name, role)
    widget.style().unpolish(widget)
    widget.style().polish(widget)


def icon(name: str, colour: str | None = None) -> QIcon:
    """Return an icon from `resources/icons` in `colour`, by default the theme's text colour."""
    return _icon(name, colour or theme().text, theme().muted)


@cache
def _icon(name: str, colour: str, disabled: str) -> QIcon:
    result = QIcon()
    for size in ICON_SIZES:
        result.addPixmap(_pixmap(name, colour, size), QIcon.Mode.Normal)
        result.addPixmap(_pixmap(name, mix(disabled, colour, 0.1), size), QIcon.Mode.Disabled)
    return result


def _pixmap(name: str, colour: str, size: int) -> QPixmap:
    pixmap = QPixmap(size, size)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    QSvgRenderer(QByteArray(_svg(name, colour).encode())).render(painter)
    painter.end()
    return pixmap


def _svg(name: str, colour: str) -> str:
    source = (RESOURCES / "icons" / f"{name}.svg").read_text(encoding="utf-8")
    return source.replace("currentColor", colour)


def _follow_system(app: QApplication) -> None:
    if _Current.choice == "system":
        _dress(app)


def _dress(app: QApplication) -> None:
    new = THEMES.get(_Current.choice) or _system_theme()
    if (new, zoom()) == (_Current.theme, _Current.zoom) and app.styleSheet():
        return
    is_changed = (new, zoom()) != (_Current.theme, _Current.zoom)
    if zoom() != _Current.zoom:
        app.setFont(_base_font())
    _Current.theme, _Current.zoom = new, zoom()
    app.setPalette(_palette(new))
    app.setStyleSheet(_style_sheet(new))
    if is_changed:
        theme_signals().changed.emit()


def _system_theme() -> Theme:
    is_light = QGuiApplication.styleHints().colorScheme() == Qt.ColorScheme.Light
    return LIGHT if is_light else DARK


def _load_fonts() -> None:
    for file in sorted((RESOURCES / "fonts").glob("*.otf")):
        if QFontDatabase.addApplicationFont(str(file)) < 0:
            log.warning("the font %s cannot be loaded", file.name)


def _base_font() -> QFont:
    """Return Inter with tabular digits, so that changing numbers keep their width."""
    font = QGuiApplication.font()
    if FONT_FAMILY in QFontDatabase.families():
        font.setFamily(FONT_FAMILY)
    font.setPixelSize(px(FONT_PIXELS))
    font.setFeature(QFont.Tag("tnum"), 1)
    return font


def _palette(colours: Theme) -> QPalette:
    role = QPalette.ColorRole
    palette = QPalette(QColor(colours.raised), QColor(colours.window))
    for key, value in {
        role.Window: colours.window,
        role.WindowText: colours.text,
        role.Base: colours.surface,
        role.AlternateBase: colours.raised,
        role.Text: colours.text,
        role.PlaceholderText: mix(colours.muted, colours.surface, 0.2),
        role.Button: colours.raised,
        role.ButtonText: colours.text,
        role.BrightText: colours.danger,
        role.ToolTipBase: colours.raised,
        role.ToolTipText: colours.text,
        role.Highlight: colours.accent,
        role.HighlightedText: colours.on_accent,
        role.Link: colours.accent,
        role.LinkVisited: colours.accent,
        role.Mid: colours.line,
    }.items():
        palette.setColor(key, QColor(value))
    for key in (role.WindowText, role.Text, role.ButtonText):
        palette.setColor(QPalette.ColorGroup.Disabled, key, QColor(_disabled(colours)))
    return palette


def _disabled(colours: Theme) -> str:
    return mix(colours.muted, colours.surface, 0.45)


def _style_sheet(colours: Theme) -> str:
    _write_indicators(colours)
    words = {k: v for k, v in asdict(colours).items() if isinstance(v, str)}
    words |= {
        "accent_hover": mix(colours.accent, colours.text, 0.12),
        "accent_pressed": mix(colours.accent, colours.window, 0.15),
        "banner": mix(colours.surface, colours.accent, 0.12),
        "banner_line": mix(colours.surface, colours.accent, 0.35),
        "warn_banner": mix(colours.surface, colours.warn, 0.10),
        "warn_line": mix(colours.surface, colours.warn, 0.40),
        "danger_banner": mix(colours.surface, colours.danger, 0.10),
        "danger_line": mix(colours.surface, colours.danger, 0.40),
        "disabled": _disabled(colours),
        "field": mix(colours.surface, colours.window, 0.5),
        "hover": mix(colours.surface, colours.raised, 0.6),
        "knob": colours.text,
        "raised_hover": mix(colours.raised, colours.line, 0.6),
        "selection": mix(colours.surface, colours.accent, 0.4),
        "device_rules": "\n".join(_device_rules(colours)),
    }
    source = (RESOURCES / "style.qss").read_text(encoding="utf-8")
    return Template(LENGTH.sub(_zoomed, source)).substitute(words)


def _zoomed(length: re.Match[str]) -> str:
    """Scale a style sheet length to the current zoom; thin lines keep their width."""
    n = int(length[2])
    if length[1]:  # rounded down, because Qt ignores radii above half the size
        return f"{length[1]}{n * zoom() // 100}px"
    return f"{n if n <= 1 else px(n)}px"


def _device_rules(colours: Theme) -> list[str]:
    return [
        f'QSlider[device="{i}"]::sub-page:horizontal:enabled {{ background: {colour}; }}'
        for i, colour in enumerate(colours.devices)
    ]


@cache
def _indicator_folder() -> Path:
    """Create a temporary folder for coloured icons, because style sheets load images from files."""
    folder = _at_exit.enter_context(temporary_folder(None))
    QDir.setSearchPaths("indicators", [str(folder)])
    return folder


def _write_indicators(colours: Theme) -> None:
    folder = _indicator_folder()
    for name, colour in INDICATORS.items():
        target = folder / f"{name}-{colours.name}.svg"
        target.write_text(_svg(name, getattr(colours, colour)), encoding="utf-8")
