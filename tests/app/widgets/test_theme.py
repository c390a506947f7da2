"""Themes: every colour is readable, every role is styled, every icon is drawn."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from PySide6.QtGui import QColor, QFontInfo, QImage
from PySide6.QtWidgets import QApplication, QLabel, QPushButton
from pytestqt.qtbot import QtBot

from app.widgets.theme import (
    RESOURCES,
    THEMES,
    Theme,
    apply_theme,
    icon,
    mix,
    set_role,
    theme,
    theme_signals,
)

ICONS = (
    "chat", "models", "split", "monitor", "settings", "send", "stop", "copy", "edit", "regenerate",
    "delete", "plus", "search", "open", "eject", "close", "sun", "moon", "map", "links",
)  # fmt: skip
ROLES = (
    "primary", "quiet", "pill", "card", "rail", "sidebar", "muted", "title", "composer",
    "userBubble", "danger", "segment", "banner",
)  # fmt: skip


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2 defines it."""
    parts = (QColor(colour).redF(), QColor(colour).greenF(), QColor(colour).blueF())
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", THEMES)
def test_every_text_colour_reaches_wcag_aa_on_every_surface(name: str) -> None:
    """WCAG AA asks for 4.5:1, on each background that has text on it."""
    colours = THEMES[name]
    for ground in (colours.window, colours.surface, colours.raised, colours.code_background):
        for text in ("text", "muted", "danger", "warn", "ok"):
            assert contrast(getattr(colours, text), ground) >= 4.5, (text, ground)
    assert contrast(colours.on_accent, colours.accent) >= 4.5


@pytest.mark.parametrize("name", THEMES)
def test_texts_can_be_read_on_every_banner(qapp: QApplication, name: str) -> None:
    apply_theme(qapp, name)
    colours = THEMES[name]
    grounds = re.findall(r'role="banner"\][^{]*{ background: (#\w+);', qapp.styleSheet())
    assert len(set(grounds)) == 3  # information, warnings, errors
    for ground in grounds:
        for text in ("text", "muted"):
            assert contrast(getattr(colours, text), ground) >= 4.5, (text, ground)
    for kind, ground in zip(("warn", "danger"), grounds[1:], strict=True):
        assert contrast(getattr(colours, kind), ground) >= 4.5, kind


@pytest.mark.parametrize("name", THEMES)
def test_device_colours_are_distinct_and_stand_out(name: str) -> None:
    """WCAG asks for 3:1 between graphics and the panel; no two devices look alike."""
    colours = THEMES[name]
    for colour in colours.devices:
        assert contrast(colour, colours.surface) >= 3.0, colour
        assert contrast(colours.on_accent, colour) >= 3.0, colour
    assert len(set(colours.devices)) == len(colours.devices) >= 9  # eight GPUs and the CPU
    assert colours.device_colour(len(colours.devices)) == colours.devices[0]


@pytest.mark.parametrize("name", THEMES)
def test_the_style_sheet_fills_in_completely(qapp: QApplication, name: str) -> None:
    """No $word is left in the sheet, and each role has a rule."""
    apply_theme(qapp, name)
    sheet = qapp.styleSheet()
    assert "$" not in sheet
    for role in ROLES:
        assert f'[role="{role}"]' in sheet, role
    for colour in re.findall(r"#\w+", sheet):
        assert QColor(colour).isValid(), colour


@pytest.mark.parametrize("name", ICONS)
def test_every_icon_is_drawn_in_the_asked_colour(qapp: QApplication, name: str) -> None:
    """Every pixel that is more than half opaque is red."""
    image = icon(name, "#ff0000").pixmap(24, 24).toImage()
    image = image.convertToFormat(QImage.Format.Format_ARGB32)
    pixels = [image.pixelColor(x, y) for x in range(image.width()) for y in range(image.height())]
    solid = [p for p in pixels if p.alpha() > 128]
    assert solid
    assert all(p.red() > 250 and p.green() == p.blue() == 0 for p in solid)


def test_switching_the_theme_says_so_once(qapp: QApplication, qtbot: QtBot) -> None:
    """`changed` is emitted for another theme, not when the same one is applied again."""
    apply_theme(qapp, "dark")
    with qtbot.waitSignal(theme_signals().changed, timeout=1000):
        apply_theme(qapp, "light")
    assert theme() is THEMES["light"]
    with qtbot.assertNotEmitted(theme_signals().changed):
        apply_theme(qapp, "light")
    apply_theme(qapp, "dark")


def test_an_unknown_choice_follows_the_desktop(qapp: QApplication) -> None:
    """A damaged settings file must not keep the window from opening."""
    apply_theme(qapp, "chartreuse")
    assert theme() in THEMES.values()


def test_texts_are_in_the_bundled_font_with_digits_of_one_width(
    qapp: QApplication, qtbot: QtBot
) -> None:
    """Changing numbers keep their place, also in labels that a role gives another size."""
    apply_theme(qapp, "dark")
    label = QLabel("0")
    qtbot.addWidget(label)
    set_role(label, "muted")
    label.ensurePolished()
    assert QFontInfo(label.font()).family() == "Inter"
    widths = {label.fontMetrics().horizontalAdvance(digit * 4) for digit in "0123456789"}
    assert len(widths) == 1


def test_a_role_set_later_changes_the_look(qapp: QApplication, qtbot: QtBot) -> None:
    """`set_role` restyles a widget that is already on screen."""
    apply_theme(qapp, "dark")
    button = QPushButton(" ")
    qtbot.addWidget(button)
    button.resize(60, 30)
    button.show()
    before = button.grab().toImage().pixelColor(30, 15).name()
    set_role(button, "primary")
    after = button.grab().toImage().pixelColor(30, 15).name()
    assert after == theme().accent != before


def test_mix_meets_both_ends_and_the_middle() -> None:
    """A weight of 0 gives the first colour, 1 the second."""
    assert [mix("#000000", "#ffffff", w) for w in (0.0, 0.5, 1.0)] == [
        "#000000", "#808080", "#ffffff",
    ]  # fmt: skip


def test_the_themes_define_the_same_words() -> None:
    """Each field of both themes is a colour, and the font's licence travels with it."""
    for colours in THEMES.values():
        for field in fields(Theme):
            value = getattr(colours, field.name)
            if isinstance(value, str) and field.name != "name":
                assert QColor(value).isValid(), field.name
    assert "SIL OPEN FONT LICENSE" in (RESOURCES / "fonts" / "OFL.txt").read_text(encoding="utf-8")
