"""Layout of the split panel; `split_panel` fills it."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QSpinBox, QVBoxLayout, QWidget

from app.core.translation import tr
from app.devices.split.settings import MAX_CPU_RANKS
from app.devices.split.views.load_footer import LoadFooter
from app.devices.split.views.load_options import LoadOptions
from app.devices.split.views.remedies import RemedyButtons
from app.devices.split.views.split_header import SplitHeader
from app.devices.split.views.split_summary import MemoryComparison, SplitSummary
from app.widgets.controls import ignore_wheel, keep_margin, line
from app.widgets.sizes import scaled
from app.widgets.text import label, set_tip

MIN_WIDTH = 360


class SplitLayout(QWidget):
    """The panel's widgets in their places.

    Attributes:
        inputs: everything that is disabled while a model loads.
        unusable: names of devices that cannot be used, with reasons and commands to copy.
        problem: sentences on what does not fit.
        cpu_ranks_host: row with the number of CPU ranks.
        rows_layout: layout of the device rows.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.header, self.options = SplitHeader(), LoadOptions()
        self.comparison, self.summary = MemoryComparison(), SplitSummary()
        self.remedies, self.footer = RemedyButtons(), LoadFooter()
        self.unusable, self.problem = label(role="muted"), label(role="shortage")
        for text in (self.unusable, self.problem):
            text.setWordWrap(True)
            text.hide()
        self.unusable.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.cpu_ranks, self.cpu_ranks_host = QSpinBox(), QWidget()
        self.rows_layout = QVBoxLayout()
        self.inputs = self._make_inputs()
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        scaled(self, self.setMinimumWidth, MIN_WIDTH)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        layout.addWidget(self._make_scroll_area(), 1)
        layout.addWidget(self._make_verdict())
        layout.addWidget(self.footer)

    def _make_scroll_area(self) -> QScrollArea:
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(16, 8, 16, 8)
        column.setSpacing(10)
        column.addWidget(self.inputs)
        column.addWidget(self.comparison)
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidget(content)
        scroll.setWidgetResizable(True)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # its fields scroll into view
        keep_margin(scroll, column)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        return scroll

    def _make_inputs(self) -> QWidget:
        self.rows_layout.setSpacing(0)
        inputs = QWidget()
        layout = QVBoxLayout(inputs)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(self.header)
        layout.addLayout(self.rows_layout)
        for widget in (self.unusable, self._make_cpu_ranks(), line(), self.options):
            layout.addWidget(widget)
        return inputs

    def _make_cpu_ranks(self) -> QWidget:
        self.cpu_ranks.setRange(1, MAX_CPU_RANKS)
        self.cpu_ranks.setAccessibleName(tr("CPU ranks"))
        set_tip(self.cpu_ranks, tr("Split the model across several virtual CPU devices"))
        ignore_wheel(self.cpu_ranks)
        layout = QHBoxLayout(self.cpu_ranks_host)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(label(tr("CPU ranks"), "muted"), 1)
        layout.addWidget(self.cpu_ranks)
        return self.cpu_ranks_host

    def _make_verdict(self) -> QWidget:
        """Make the part on what fits and how fast it is: below the scroll area, always in view."""
        verdict = QWidget()
        layout = QVBoxLayout(verdict)
        layout.setContentsMargins(16, 6, 16, 0)
        layout.setSpacing(8)
        for widget in (self.problem, self.remedies, self.summary):
            layout.addWidget(widget)
        return verdict
