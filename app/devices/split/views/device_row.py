"""Row of one rank in the split panel: its name, share and memory."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtWidgets import QCheckBox, QDoubleSpinBox, QHBoxLayout, QSlider, QVBoxLayout, QWidget

from app.core.translation import tr
from app.core.units import use_text
from app.devices.split.figures import RowFigures, share_text
from app.devices.split.views.device_details import DeviceDetails
from app.devices.split.views.memory_bar import MemoryBar
from app.widgets.buttons import IconButton
from app.widgets.controls import ColourDot, Switch, ignore_wheel, line, show_number
from app.widgets.sizes import scaled
from app.widgets.text import ElidedLabel, label
from app.widgets.theme import set_role, theme

SLIDER_STEPS = 1000


class DeviceRow(QWidget):
    """Shows `RowFigures`; the share can be set and locked, and the rank switched off.

    Args:
        index: place of the rank in the settings.
        colour: index of its device colour.
    """

    share_changed = Signal(int, float)  # index of the rank, share from 0 to 1
    switched = Signal(int, bool)
    locked = Signal(int, bool)
    joined = Signal(int, bool)  # True: the group of the rank above; False: a group of its own
    moved = Signal(int, int)  # places further down
    reserve_changed = Signal(int, int)  # MiB
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
        """Show a rank.

        Args:
            has_slider: whether there is a share to choose.
            place: the rank's number among those that can be reordered, from 0, and their count.
            joins: whether it is in the group of the rank above; None where there are no groups.
            measured: bytes that the loaded model takes on this rank.
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
        """Fill the details only while they are open."""
        is_open = self.more.isChecked()
        if is_open and self._shown is not None:
            figures, place = self._shown
            self.details.set_figures(figures, place=place)
        self.details.setVisible(is_open)

    def _set_share(self, figures: RowFigures) -> None:
        with QSignalBlocker(self.slider):
            self.slider.setValue(round(figures.asked * SLIDER_STEPS))
        show_number(self.number, 100 * figures.asked)
        for control, name in (
            (self.slider, tr("Share of {device}")),
            (self.number, tr("Share in percent of {device}")),
        ):
            control.setAccessibleName(name.format(device=figures.spoken))
            control.setEnabled(not figures.is_locked)
        self.lock.set_icon("lock" if figures.is_locked else "unlock")
        lock = (
            tr("Unlock the share of {device}")
            if figures.is_locked
            else tr("Lock the share of {device}")
        )
        self.lock.set_text(lock.format(device=figures.label))
        self.lock.setChecked(figures.is_locked)

    def _on_share(self, share: float) -> None:
        self.share_changed.emit(self.index, share)

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
        self.slider.valueChanged.connect(lambda v: self._on_share(v / SLIDER_STEPS))
        self.slider.sliderPressed.connect(self.gesture_began)
        self.slider.sliderReleased.connect(self.gesture_ended)
        self.number.valueChanged.connect(lambda v: self._on_share(v / 100))
        self.lock.clicked.connect(lambda is_on: self.locked.emit(self.index, is_on))
        self.join.clicked.connect(lambda is_on: self.joined.emit(self.index, is_on))
        self.more.toggled.connect(self._on_more)
        self.details.moved.connect(lambda steps: self.moved.emit(self.index, steps))
        self.details.reserve_changed.connect(lambda n: self.reserve_changed.emit(self.index, n))

    def _build(self) -> tuple[QWidget, QWidget]:
        """Lay everything out; return the parts that can hide: share and memory."""
        self.join.setText(tr("Same group as the device above"))
        header = QHBoxLayout()
        header.setSpacing(8)
        header.addWidget(ColourDot(self.colour))
        header.addWidget(self.title)
        header.addWidget(self.name, 1)
        header.addWidget(self.sensors)
        header.addWidget(self.more)
        header.addWidget(self.switch)
        share, memory = QWidget(), QWidget()
        share_layout = QHBoxLayout(share)
        share_layout.setContentsMargins(0, 0, 0, 0)
        share_layout.setSpacing(6)
        share_layout.addWidget(self.slider, 1)
        share_layout.addWidget(self.number)
        share_layout.addWidget(self.lock)
        texts = QHBoxLayout()
        texts.addWidget(self.use, 1)
        texts.addWidget(self.shares)
        memory_layout = QVBoxLayout(memory)
        memory_layout.setContentsMargins(0, 0, 0, 0)
        memory_layout.setSpacing(5)
        memory_layout.addWidget(self.memory_bar)
        memory_layout.addLayout(texts)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 9)
        layout.setSpacing(7)
        layout.addWidget(line())
        layout.addSpacing(2)
        layout.addLayout(header)
        for part in (self.join, share, memory, self.details):
            layout.addWidget(part)
        return share, memory


def is_short(figures: RowFigures) -> bool:
    """Return whether the model does not fit on the row's device."""
    return figures.free < 0 and figures.memory.total + figures.guests + figures.apart > 0
