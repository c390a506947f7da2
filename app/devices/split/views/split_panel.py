"""The split panel: the share of each device, and the memory and speed that follow."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtWidgets import (
    QButtonGroup,
    QHBoxLayout,
    QPushButton,
    QScrollArea,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.devices.split.figures import LoadState, RowFigures, SplitPicture, rank_labels, short_name
from app.devices.split.settings import MAX_CPU_RANKS, MODES, Mode
from app.devices.split.views.device_row import DeviceRow
from app.devices.split.views.load_options import LoadFields
from app.devices.split.views.split_bar import Segment, ShareBar
from app.devices.split.views.split_footer import (
    LoadFooter,
    MemoryComparison,
    RemedyButtons,
    SplitSummary,
)
from app.widgets.controls import ignore_wheel, keep_margin, line, show_number
from app.widgets.layout import scaled
from app.widgets.shortcuts import make_local_shortcut
from app.widgets.text import ElidedLabel, label, set_tip
from engine import DeviceInfo

MODE_TEXTS: dict[Mode, tuple[str, str]] = {
    "single": (tr_later("One device"), tr_later("The whole model on one device")),
    "tensor": (
        tr_later("Tensor"),
        tr_later("Every layer is split across devices, which all work at the same time"),
    ),
    "layer": (
        tr_later("Layers"),
        tr_later("Each device gets whole layers; the devices work one after the other"),
    ),
    "groups": (
        tr_later("Groups"),
        tr_later("Each group of devices gets whole layers, and splits each of them"),
    ),
}
HINT = tr_later("Drag or arrow keys")


class SplitHeader(QWidget):
    """Shows mode and shares; emits changes that the person makes."""

    mode_chosen = Signal(str)
    even_requested = Signal()
    by_memory_requested = Signal()
    by_speed_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.bar = ShareBar()
        self.hint = ElidedLabel(tr(HINT))
        self._modes = QButtonGroup(self)
        self._below = QWidget()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 2)
        layout.setSpacing(7)
        layout.addWidget(self._make_modes())
        layout.addWidget(self.bar)
        layout.addWidget(self._make_below())

    def mode_button(self, mode: Mode) -> QPushButton:
        """Return the button that chooses `mode`."""
        button = self._modes.button(MODES.index(mode))
        assert isinstance(button, QPushButton)
        return button

    def set_rows(self, mode: Mode, rows: Sequence[RowFigures], groups: Sequence[int] = ()) -> None:
        """Show the ranks.

        Args:
            groups: sizes of the groups of ranks that are on, in mode "groups".
        """
        self.mode_button(mode).setChecked(True)
        for each in MODES:  # Tab stops at the chosen one, the arrow keys lead to the others
            policy = Qt.FocusPolicy.StrongFocus if each == mode else Qt.FocusPolicy.ClickFocus
            self.mode_button(each).setFocusPolicy(policy)
        active = [row for row in rows if row.is_on]
        takers = [row for row in rows if row.is_taker and row.effective]
        is_split = mode != "single" and len(active) > 1
        self.bar.set_segments(
            [
                Segment(row.colour, row.share, row.spoken, row.is_taker, row.is_locked)
                for row in (*active, *takers)
            ]
        )
        labels = [row.label for row in active]
        self.hint.set_full_text(groups_text(labels, groups) if groups else tr(HINT))
        self.bar.setVisible(is_split or bool(takers))
        self._below.setVisible(is_split)

    def _make_modes(self) -> QWidget:
        host = QWidget()
        host.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        host.setProperty("role", "segments")
        layout = QHBoxLayout(host)
        layout.setContentsMargins(1, 1, 1, 1)
        layout.setSpacing(0)
        for number, mode in enumerate(MODES):
            text, help_text = MODE_TEXTS[mode]
            button = QPushButton(tr(text))
            button.setCheckable(True)
            button.setProperty("role", "segment")
            set_tip(button, tr(help_text))
            self._modes.addButton(button, number)
            layout.addWidget(button, 1)
        self._modes.idClicked.connect(lambda number: self.mode_chosen.emit(MODES[number]))
        return host

    def _make_below(self) -> QWidget:
        layout = QHBoxLayout(self._below)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(0)
        self.hint.setProperty("role", "muted")
        layout.addWidget(self.hint, 1)
        for text, tip, signal in (
            (tr("Even"), tr("The same share for every device"), self.even_requested),
            (tr("By memory"), tr("Shares in proportion to free memory"), self.by_memory_requested),
            (
                tr("By speed"),
                tr("Shares in proportion to memory bandwidth"),
                self.by_speed_requested,
            ),
        ):
            button = QPushButton(text)
            button.setProperty("role", "link")
            set_tip(button, tip)
            button.clicked.connect(signal)
            layout.addWidget(button)
        return self._below


def groups_text(labels: Sequence[str], groups: Sequence[int]) -> str:
    """Return the groups as "GPU 0 + GPU 1 → GPU 2"."""
    left = list(labels)
    parts = []
    for size in groups:
        parts.append(" + ".join(left[:size]))
        del left[:size]
    return " → ".join(parts)


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
        self.header, self.options = SplitHeader(), LoadFields()
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


class SplitPanel(SplitLayout):
    """Shows a `SplitPicture`: devices, shares, context, and the bytes and speed that follow.

    Attributes:
        rows: rows of all ranks, in the order of the settings.
    """

    row_made = Signal(object)  # new DeviceRow, before it is shown
    undo_requested = Signal()  # by a key
    redo_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows: list[DeviceRow] = []
        make_local_shortcut("undo-split", self, self.undo_requested.emit)
        make_local_shortcut("redo-split", self, self.redo_requested.emit)

    @Slot(object)
    def show_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """Name the devices that cannot be used, with reasons and the commands that help."""
        lines: list[str] = []
        for device in devices:
            if not device.usable:
                lines.append(f"{short_name(device.name)}: {device.reason}")
                if device.remedy and device.remedy not in lines:
                    lines.append(device.remedy)
        unusable = "\n".join(lines)
        self.unusable.setText(unusable)
        self.unusable.setVisible(bool(unusable))

    @Slot(str)
    def show_state(self, state: LoadState) -> None:
        """Disable the inputs while the engine loads or splits the model."""
        self.inputs.setEnabled(state not in ("loading", "applying"))
        self.footer.set_progress(0.0)

    @Slot(object)
    def show_picture(self, picture: SplitPicture) -> None:
        """Show everything that follows from the present settings."""
        settings, loaded = picture.settings, picture.loaded
        self._show_rows(picture)
        groups = settings.groups if settings.mode == "groups" else ()
        self.header.set_rows(settings.mode, picture.rows, groups)
        self.options.set_settings(settings, picture.n_ctx)
        self.options.set_most(picture.fit.n_ctx, picture.n_ctx)
        self.summary.show_figures(
            picture.plan,
            picture.speed,
            has_model=picture.has_model,
            chosen=picture.chosen_because,
            elsewhere=picture.elsewhere,
        )
        self.comparison.set_loaded(loaded, rank_labels(loaded.params.devices if loaded else ()))
        self.problem.setText("\n".join(picture.problems))
        self.problem.setVisible(bool(picture.problems))
        remedies = picture.fit.remedies if picture.problems else ()
        self.remedies.set_remedies(remedies, is_current=picture.fit.is_current)
        self.footer.show_state(picture)

    def _show_rows(self, picture: SplitPicture) -> None:
        self._arrange_rows(picture.colours)
        settings = picture.settings
        is_single = settings.mode == "single"
        shown = {figures.index: figures for figures in picture.rows}
        n = len(settings.ranks)
        for index, row in enumerate(self.rows):
            row.setVisible(index in shown)
            if index in shown:
                can_join = settings.mode == "groups" and index in settings.active[1:]
                row.set_figures(
                    shown[index],
                    has_slider=not is_single and len(settings.active) > 1,
                    place=(0, 1) if is_single else (index, n),
                    joins=settings.ranks[index].joins if can_join else None,
                    measured=picture.measured.get(index),
                )
        is_alone = all(rank.device == "cpu" for rank in settings.ranks)
        self.cpu_ranks_host.setVisible(is_alone)
        show_number(self.cpu_ranks, 1 if is_single else settings.n_cpu_ranks)

    def _arrange_rows(self, colours: Sequence[int]) -> None:
        """Arrange one row per rank; rows that exist are kept, and with them the focus."""
        if [row.colour for row in self.rows] == list(colours):
            return
        known = {row.colour: row for row in self.rows}
        for colour, row in known.items():
            if colour not in colours:
                row.hide()
                row.deleteLater()
        self.rows = []
        for index, colour in enumerate(colours):
            row = known.get(colour) or self._make_row(colour)
            row.index = index
            self.rows_layout.removeWidget(row)
            self.rows_layout.addWidget(row)
            self.rows.append(row)

    def _make_row(self, colour: int) -> DeviceRow:
        row = DeviceRow(0, colour)
        self.row_made.emit(row)
        return row
