"""Row for one rank in the split panel: its name, share and memory."""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QRectF, QSignalBlocker, QSize, Qt, Signal
from PySide6.QtGui import QBrush, QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import (
    QCheckBox,
    QDoubleSpinBox,
    QHBoxLayout,
    QSizePolicy,
    QSlider,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.core.units import MIB, size_text, use_text
from app.devices.split.figures import RowFigures, kinds_of, share_text
from app.widgets.buttons import IconButton
from app.widgets.controls import ColourDot, Switch, ignore_wheel, line, show_number
from app.widgets.layout import NO_MARGINS, fill, scaled
from app.widgets.text import ElidedLabel, LegendLabel, Sign, label, set_tip
from app.widgets.theme import mix, px, set_role, theme, theme_signals

TONES = (0.0, 0.42, 0.62, 0.74)
"""How far weights, KV cache, compute buffers and overhead fade into the background, 0 to 1."""
SIBLING_TONE = 0.8  # fade for other ranks on the same device
GUEST_TONE = 0.55  # fade for bytes in host memory that belong to no CPU rank
MIN_WIDTH = 3  # minimum width of the model's part, in pixels


class MemoryBar(QWidget):
    """Stacked bar for a row's memory figures."""

    HEIGHT = 9

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._figures: RowFigures | None = None
        self._measured: int | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def set_figures(self, figures: RowFigures, measured: int | None = None) -> None:
        """Show `figures`, and a tick at the model's measured size in bytes."""
        if figures == self._figures and measured == self._measured:
            return
        self._figures, self._measured = figures, measured
        text = breakdown(figures)
        set_tip(self, text.replace(" · ", "\n"))
        self.setAccessibleName(tr("Memory of {device}").format(device=figures.label))
        self.setAccessibleDescription(text)
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(200, px(self.HEIGHT))

    def paintEvent(self, event: QPaintEvent) -> None:
        colours = theme()
        painter = QPainter(self)
        painter.fillRect(self.rect(), QColor(colours.raised))
        figures = self._figures
        if figures is None or not figures.total:
            return
        used = sum(size for size, _ in self._parts(figures))
        scale = self.width() / max(figures.total, used + figures.reserve)
        left = 0.0
        for size, brush in self._parts(figures):
            painter.fillRect(QRectF(left, 0, size * scale, self.height()), brush)
            left += size * scale
        if figures.reserve:
            start = max(used, figures.total - figures.reserve) * scale
            kept = QRectF(start, 0, figures.reserve * scale, self.height())
            painter.fillRect(kept, _hatch(colours.accent, Qt.BrushStyle.FDiagPattern))
        if used + figures.reserve > figures.total:
            end = figures.total * scale
            over = QRectF(end, 0, self.width() - end, self.height())
            painter.fillRect(over, QColor(colours.danger))
            painter.fillRect(QRectF(end - 1, 0, 2, self.height()), QColor(colours.text))
        if 0 < figures.memory.total * scale < MIN_WIDTH:
            own = QRectF(0, 0, MIN_WIDTH, self.height())
            painter.fillRect(own, QColor(colours.device_colour(figures.colour)))
        elif self._measured is not None:
            tick = QRectF(self._measured * scale - 1, 0, 2, self.height())
            painter.fillRect(tick, QColor(colours.text))

    def _parts(self, figures: RowFigures) -> Iterator[tuple[int, QBrush]]:
        colours = theme()
        own = colours.device_colour(figures.colour)
        memory = figures.memory
        kinds = (
            memory.weights,
            memory.kv,
            memory.compute + memory.padding + memory.draft + memory.pictures,
            figures.overhead,
        )
        for size, tone in zip(kinds, TONES, strict=True):
            yield size, QBrush(QColor(mix(own, colours.surface, tone)))
        for sibling, size in figures.siblings:
            colour = mix(colours.device_colour(sibling), colours.surface, SIBLING_TONE)
            yield size, QBrush(QColor(colour))
        guests = QBrush(QColor(mix(colours.muted, colours.surface, GUEST_TONE)))
        yield figures.visiting, guests
        yield figures.outside, _hatch(colours.muted, Qt.BrushStyle.BDiagPattern)


def _hatch(colour: str, style: Qt.BrushStyle) -> QBrush:
    hatch = QBrush(QColor(mix(colour, theme().surface, 0.2)))
    hatch.setStyle(style)
    return hatch


def breakdown(figures: RowFigures) -> str:
    """Return the bar as text: "weights 9.1 GiB · KV cache 2.0 GiB · ..."."""
    parts = [
        *kinds_of(figures),
        (tr_later("other ranks"), sum(size for _, size in figures.siblings)),
        (tr_later("other programs"), figures.outside),
        (tr_later("kept free"), figures.reserve),
        (tr_later("free") if figures.free >= 0 else tr_later("missing"), abs(figures.free)),
    ]
    always = ("free", "missing", "other programs")
    shown = [(name, size) for name, size in parts if size or name in always]
    return " · ".join(f"{tr(name)} {size_text(size)}" for name, size in shown)


RESERVE_STEP_MIB = 256
OWN_KINDS = ("weights", "KV cache", "compute", "overhead")
"""Kinds of memory that the rank itself uses, in the order of `TONES`."""


class DeviceDetails(QWidget):
    """Bytes by kind, in the memory bar's colours, and controls for reserve and order."""

    reserve_changed = Signal(int)  # MiB
    moved = Signal(int)  # number of places down

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._figures: RowFigures | None = None
        self.kinds = LegendLabel()
        self.kinds.setWordWrap(True)
        self.note = label(role="muted")
        self.note.setWordWrap(True)
        self.reserve = QSpinBox()
        self.reserve.setSuffix(" MiB")
        self.reserve.setSingleStep(RESERVE_STEP_MIB)
        self.reserve.setKeyboardTracking(False)
        scaled(self.reserve, self.reserve.setFixedWidth, 112)
        set_tip(self.reserve, tr("Memory to keep free for other programs"))
        ignore_wheel(self.reserve)
        self.up, self.down = (
            IconButton("chevron-up", tr("Move up")),
            IconButton("chevron-down", tr("Move down")),
        )
        self._build()
        self.reserve.valueChanged.connect(self.reserve_changed)
        self.up.clicked.connect(lambda: self.moved.emit(-1))
        self.down.clicked.connect(lambda: self.moved.emit(1))
        theme_signals().changed.connect(self.refresh)

    def set_figures(self, figures: RowFigures, *, place: tuple[int, int]) -> None:
        """Show a rank's figures; `place` is its index and the number of ranks."""
        with QSignalBlocker(self.reserve):
            self.reserve.setMaximum(max(0, figures.total // MIB))
        show_number(self.reserve, figures.reserve // MIB)
        self.reserve.setAccessibleName(
            tr("Memory to keep free on {device} in mebibytes").format(device=figures.label)
        )
        number, count = place
        for button, text, is_possible in (
            (self.up, tr("Move {device} up"), number > 0),
            (self.down, tr("Move {device} down"), number < count - 1),
        ):
            button.set_text(text.format(device=figures.label))
            button.setEnabled(is_possible)
            button.setVisible(count > 1)
        self._order.setVisible(count > 1)
        self.note.setText(figures.note)
        self.note.setVisible(bool(figures.note))
        if figures != self._figures:
            self._figures = figures
            self.refresh()

    def refresh(self) -> None:
        """Show the kinds of memory in the theme's colours."""
        figures, colours = self._figures, theme()
        if figures is None:
            return
        own = colours.device_colour(figures.colour)
        tones = dict(zip(OWN_KINDS, TONES, strict=True))
        parts = []
        for name, size in kinds_of(figures):
            colour = mix(own, colours.surface, tones.get(name, 0.0))
            if name not in tones:
                colour = mix(colours.muted, colours.surface, GUEST_TONE)
            text = f"{tr(name)} {size_text(size)}".replace(" ", "\N{NO-BREAK SPACE}")
            parts.append(Sign(colour, "■", text))
        self.kinds.set_signs(parts, "" if parts else tr("No part of the model is here."))

    def _build(self) -> None:
        self._order = label(tr("Order"), "muted")
        caption, order = label(tr("Keep free"), "muted"), (self._order, self.up, self.down)
        line = fill(QHBoxLayout(), caption, self.reserve, (None, 1), *order, spacing=6)
        fill(QVBoxLayout(self), self.kinds, self.note, line, margins=NO_MARGINS, spacing=6)


SLIDER_STEPS = 1000


class DeviceRow(QWidget):
    """Shows `RowFigures`, with controls to set and lock the share and to switch off the rank."""

    share_changed = Signal(int, float)  # index of the rank, share from 0 to 1
    switched = Signal(int, bool)
    locked = Signal(int, bool)
    joined = Signal(int, bool)  # True: join the group above; False: start a new group
    moved = Signal(int, int)  # index, number of places down
    reserve_changed = Signal(int, int)  # index, MiB
    gesture_began = Signal()
    gesture_ended = Signal()

    def __init__(self, index: int, colour: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.index = index
        self.colour = colour
        self.title = label(role="heading")
        self.name = ElidedLabel()
        self.sensors = label(role="muted")
        self.switch = Switch()
        self.more = IconButton("chevron-down", tr("Show details"), size=14)
        self.more.setCheckable(True)
        self.join = QCheckBox()
        self.slider = self._make_slider()
        self.number = self._make_number()
        self.lock = IconButton("unlock", tr("Lock"), size=16)
        self.lock.setCheckable(True)
        self.memory_bar = MemoryBar()
        self.use = ElidedLabel()
        self.use.setProperty("role", "muted")
        self.shares = label(role="muted")
        self.details = DeviceDetails()
        self.details.hide()
        self._shown: tuple[RowFigures, tuple[int, int]] | None = None
        self._share, self._memory = self._build()
        self._connect()

    def set_figures(
        self,
        figures: RowFigures,
        *,
        has_slider: bool,
        place: tuple[int, int],
        joins: bool | None = None,
        measured: int | None = None,
    ) -> None:
        """Show a rank's figures.

        Args:
            has_slider: whether the share can be set.
            place: index among the ranks that can be reordered, and the number of such ranks.
            joins: whether the rank belongs to the group above it; None if there are no groups.
            measured: bytes that the loaded model was measured to use on this rank.
        """
        self.title.setText(figures.label)
        self.name.set_full_text(figures.name)
        self.sensors.setText(figures.sensors)
        self.switch.setChecked(figures.is_on)
        self.switch.setAccessibleName(tr("Use {device}").format(device=figures.label))
        is_open = self.more.isChecked()
        more = tr("Hide details of {device}") if is_open else tr("Show details of {device}")
        self.more.set_text(more.format(device=figures.label))
        self.join.setVisible(joins is not None)
        name = tr("{device}: same group as the device above").format(device=figures.label)
        self.join.setAccessibleName(name)
        with QSignalBlocker(self.join):
            self.join.setChecked(bool(joins))
        self._set_share(figures)
        self.memory_bar.set_figures(figures, measured)
        taken = figures.memory.total + figures.overhead + figures.visiting
        self.use.set_full_text(use_text(taken, figures.total, figures.free))
        set_role(self.use, "shortage" if is_short(figures) else "muted")
        self.shares.setText(share_text(figures) if has_slider or figures.is_taker else "")
        self._shown = figures, place
        self._show_details()
        is_used = figures.is_on or figures.is_taker
        self._share.setVisible(figures.is_on and has_slider)
        self._memory.setVisible(is_used)

    def _show_details(self) -> None:
        is_open = self.more.isChecked()
        if is_open and self._shown is not None:
            figures, place = self._shown
            self.details.set_figures(figures, place=place)
        self.details.setVisible(is_open)

    def _set_share(self, figures: RowFigures) -> None:
        with QSignalBlocker(self.slider):
            self.slider.setValue(round(figures.requested * SLIDER_STEPS))
        show_number(self.number, 100 * figures.requested)
        for control, name in (
            (self.slider, tr("Share of {device}")),
            (self.number, tr("Share in percent of {device}")),
        ):
            control.setAccessibleName(name.format(device=figures.spoken))
            control.setEnabled(not figures.is_locked)
        self.lock.set_icon("lock" if figures.is_locked else "unlock")
        is_locked = figures.is_locked
        text = tr("Unlock the share of {device}") if is_locked else tr("Lock the share of {device}")
        self.lock.set_text(text.format(device=figures.label))
        self.lock.setChecked(figures.is_locked)

    def _on_more(self, is_open: bool) -> None:
        self.more.set_icon("chevron-up" if is_open else "chevron-down")
        self._show_details()

    def _make_slider(self) -> QSlider:
        slider = QSlider(Qt.Orientation.Horizontal)
        slider.setRange(0, SLIDER_STEPS)
        slider.setSingleStep(SLIDER_STEPS // 100)
        slider.setPageStep(SLIDER_STEPS // 20)
        slider.setProperty("device", str(self.colour % len(theme().devices)))
        ignore_wheel(slider)
        return slider

    def _make_number(self) -> QDoubleSpinBox:
        number = QDoubleSpinBox()
        number.setRange(0, 100)
        number.setDecimals(1)
        number.setSuffix(" %")
        scaled(number, number.setFixedWidth, 84)
        number.setKeyboardTracking(False)
        ignore_wheel(number)
        return number

    def _connect(self) -> None:
        self.switch.clicked.connect(lambda is_on: self.switched.emit(self.index, is_on))
        self.slider.valueChanged.connect(
            lambda v: self.share_changed.emit(self.index, v / SLIDER_STEPS)
        )
        self.slider.sliderPressed.connect(self.gesture_began)
        self.slider.sliderReleased.connect(self.gesture_ended)
        self.number.valueChanged.connect(lambda v: self.share_changed.emit(self.index, v / 100))
        self.lock.clicked.connect(lambda is_on: self.locked.emit(self.index, is_on))
        self.join.clicked.connect(lambda is_on: self.joined.emit(self.index, is_on))
        self.more.toggled.connect(self._on_more)
        self.details.moved.connect(lambda steps: self.moved.emit(self.index, steps))
        self.details.reserve_changed.connect(lambda n: self.reserve_changed.emit(self.index, n))

    def _build(self) -> tuple[QWidget, QWidget]:
        self.join.setText(tr("Same group as the device above"))
        header = fill(
            QHBoxLayout(), ColourDot(self.colour), self.title, (self.name, 1), self.sensors,
            self.more, self.switch, spacing=8,
        )  # fmt: skip
        share, memory = QWidget(), QWidget()
        controls = (self.slider, 1), self.number, self.lock
        fill(QHBoxLayout(share), *controls, margins=NO_MARGINS, spacing=6)
        texts = fill(QHBoxLayout(), (self.use, 1), self.shares)
        fill(QVBoxLayout(memory), self.memory_bar, texts, margins=NO_MARGINS, spacing=5)
        fill(
            QVBoxLayout(self), line(), 2, header, self.join, share, memory, self.details,
            margins=(0, 0, 0, 9), spacing=7,
        )  # fmt: skip
        return share, memory


def is_short(figures: RowFigures) -> bool:
    """Return whether the model does not fit on the row's device."""
    return figures.free < 0 and figures.memory.total + figures.guests + figures.apart > 0
