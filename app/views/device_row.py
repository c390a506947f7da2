"""One rank in the split panel: who it is, how much it takes, and where the bytes go."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtWidgets import QDoubleSpinBox, QHBoxLayout, QSlider, QVBoxLayout, QWidget

from app.split_figures import RowFigures, share_text
from app.theme import set_role, theme
from app.units import use_text
from app.views.controls import (
    ColourDot,
    ElidedLabel,
    Switch,
    ignore_wheel,
    label,
    line,
    show_number,
)
from app.views.memory_bar import MemoryBar

SLIDER_STEPS = 1000


class DeviceRow(QWidget):
    """Shows `RowFigures`; the share can be set by slider or number, and the rank switched off.

    Args:
        index: of the rank in the settings.
        colour: index of its device colour.
    """

    share_changed = Signal(int, float)  # index of the rank, share from 0 to 1
    switched = Signal(int, bool)

    def __init__(self, index: int, colour: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.index = index
        self.colour = colour
        self.title = label(role="heading")
        self.name = ElidedLabel()
        self.sensors = label(role="muted")
        self.switch = Switch()
        self.slider = self._make_slider()
        self.number = self._make_number()
        self.memory_bar = MemoryBar()
        self.use = ElidedLabel()
        self.use.setProperty("role", "muted")
        self.shares = label(role="muted")
        self._controls = self._build()
        self.switch.clicked.connect(lambda is_on: self.switched.emit(self.index, is_on))
        self.slider.valueChanged.connect(lambda v: self._on_share(v / SLIDER_STEPS))
        self.number.valueChanged.connect(lambda v: self._on_share(v / 100))

    def set_figures(
        self, figures: RowFigures, *, has_slider: bool, measured: int | None = None
    ) -> None:
        """Show a rank.

        Args:
            has_slider: whether there is a share to choose.
            measured: bytes that the loaded model takes here.
        """
        self.title.setText(figures.label)
        self.name.set_full_text(figures.name)
        self.sensors.setText(figures.sensors)
        self.switch.setChecked(figures.is_on)
        self.switch.setAccessibleName(f"Use {figures.label}")
        self._set_share(figures.asked)
        for control in (self.slider, self.number):
            control.setAccessibleName(f"Share of {figures.spoken}")
        self.memory_bar.set_figures(figures, measured)
        self.use.set_full_text(use_text(figures.memory.total, figures.total, figures.free))
        set_role(self.use, "shortage" if is_short(figures) else "muted")
        self.shares.setText(share_text(figures) if has_slider else "")
        self._controls[0].setVisible(figures.is_on and has_slider)
        self._controls[1].setVisible(figures.is_on)

    def _set_share(self, share: float) -> None:
        with QSignalBlocker(self.slider):
            self.slider.setValue(round(share * SLIDER_STEPS))
        show_number(self.number, 100 * share)

    def _on_share(self, share: float) -> None:
        self.share_changed.emit(self.index, share)

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
        number.setFixedWidth(84)
        number.setKeyboardTracking(False)
        ignore_wheel(number)
        return number

    def _build(self) -> tuple[QWidget, QWidget]:
        """Lay everything out; the parts that hide are the share and the memory."""
        header = QHBoxLayout()
        header.setSpacing(8)
        header.addWidget(ColourDot(self.colour))
        header.addWidget(self.title)
        header.addWidget(self.name, 1)
        header.addWidget(self.sensors)
        header.addWidget(self.switch)
        share, memory = QWidget(), QWidget()
        share_layout = QHBoxLayout(share)
        share_layout.setContentsMargins(0, 0, 0, 0)
        share_layout.setSpacing(10)
        share_layout.addWidget(self.slider, 1)
        share_layout.addWidget(self.number)
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
        layout.addWidget(share)
        layout.addWidget(memory)
        return share, memory


def is_short(figures: RowFigures) -> bool:
    """Whether the model does not fit on the row's device."""
    return figures.is_on and figures.free < 0 and figures.memory.total > 0
