"""The split panel: each device's share, and the resulting memory use and speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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

from app.core.translation import tr, tr_later, translated
from app.core.units import MIB
from app.devices.split.figures import LoadState, RowFigures, SplitPicture, rank_labels, short_name
from app.devices.split.session import SplitSession
from app.devices.split.settings import MAX_CPU_RANKS, MODES, Mode, SplitSettings
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
from app.widgets.layout import NO_MARGINS, fill, scaled
from app.widgets.shortcuts import make_local_shortcut
from app.widgets.text import ElidedLabel, label, set_tip
from engine import DeviceInfo

if TYPE_CHECKING:
    from engine import Remedy

MODE_TEXTS: dict[Mode, tuple[str, str]] = {
    "single": (tr_later("One device"), tr_later("The whole model on one device")),
    "tensor": (
        tr_later("Tensor"),
        tr_later("Every layer is split across all devices, which work at the same time"),
    ),
    "layer": (
        tr_later("Layers"),
        tr_later("Each device gets whole layers; the devices work one after the other"),
    ),
    "groups": (
        tr_later("Groups"),
        tr_later("Each group of devices gets whole layers and splits each layer"),
    ),
}
HINT = tr_later("Drag or arrow keys")


class SplitHeader(QWidget):
    """Shows the mode and the shares; emits the user's changes."""

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
        parts = self._make_modes(), self.bar, self._make_below()
        fill(QVBoxLayout(self), *parts, margins=(0, 0, 0, 2), spacing=7)

    def mode_button(self, mode: Mode) -> QPushButton:
        """Return the button for `mode`."""
        button = self._modes.button(MODES.index(mode))
        assert isinstance(button, QPushButton)
        return button

    def set_rows(self, mode: Mode, rows: Sequence[RowFigures], groups: Sequence[int] = ()) -> None:
        """Show the ranks; `groups` are the active ranks per group."""
        self.mode_button(mode).setChecked(True)
        for each in MODES:  # Tab reaches only the selected button; arrow keys reach the others
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
        layout = fill(QHBoxLayout(host), margins=(1, 1, 1, 1), spacing=0)
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
        self.hint.setProperty("role", "muted")
        layout = fill(QHBoxLayout(self._below), (self.hint, 1), margins=NO_MARGINS, spacing=0)
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
    """The panel's layout.

    Attributes:
        inputs: all widgets that are disabled while a model loads.
        unusable: unusable devices, with reasons and commands to copy.
        problem: sentences about what does not fit.
        cpu_ranks_host: row for the number of CPU ranks.
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
        parts = (self._make_scroll_area(), 1), self._make_verdict(), self.footer
        fill(QVBoxLayout(self), *parts, margins=NO_MARGINS, spacing=0)

    def _make_scroll_area(self) -> QScrollArea:
        content = QWidget()
        parts = self.inputs, self.comparison, (None, 1)
        column = fill(QVBoxLayout(content), *parts, margins=(16, 8, 16, 8), spacing=10)
        scroll = QScrollArea()
        scroll.setWidget(content)
        scroll.setWidgetResizable(True)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # focused fields scroll into view anyway
        keep_margin(scroll, column)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        return scroll

    def _make_inputs(self) -> QWidget:
        self.rows_layout.setSpacing(0)
        inputs = QWidget()
        fill(
            QVBoxLayout(inputs), self.header, self.rows_layout, self.unusable,
            self._make_cpu_ranks(), line(), self.options, margins=NO_MARGINS, spacing=8,
        )  # fmt: skip
        return inputs

    def _make_cpu_ranks(self) -> QWidget:
        self.cpu_ranks.setRange(1, MAX_CPU_RANKS)
        self.cpu_ranks.setAccessibleName(tr("CPU ranks"))
        set_tip(self.cpu_ranks, tr("Split the model across several virtual CPU devices"))
        ignore_wheel(self.cpu_ranks)
        caption = label(tr("CPU ranks"), "muted")
        fill(QHBoxLayout(self.cpu_ranks_host), (caption, 1), self.cpu_ranks, margins=NO_MARGINS)
        return self.cpu_ranks_host

    def _make_verdict(self) -> QWidget:
        verdict = QWidget()
        parts = self.problem, self.remedies, self.summary
        fill(QVBoxLayout(verdict), *parts, margins=(16, 6, 16, 0), spacing=8)
        return verdict


class SplitPanel(SplitLayout):
    """Shows a session's figures and applies changes from the controls to the session.

    Attributes:
        rows: one row per rank, in the order of the settings.
    """

    def __init__(self, session: SplitSession, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.rows: list[DeviceRow] = []
        session.pictured.connect(self.show_picture)
        session.devices_changed.connect(self.show_devices)
        session.model_changed.connect(self.options.set_model_context)
        session.block_changed.connect(self.options.rare.offer_block)
        session.state_changed.connect(self.show_state)
        session.progressed.connect(self.footer.set_progress)
        self._connect_header()
        self._connect_options()
        self.remedies.chosen.connect(self._on_remedy)
        self.footer.load_requested.connect(session.request_load)
        self.footer.cancel_requested.connect(session.cancel_requested)
        self.footer.undo_requested.connect(session.undo)
        make_local_shortcut("undo-split", self, session.undo)
        make_local_shortcut("redo-split", self, session.redo)

    def _connect_header(self) -> None:
        session, header = self._session, self.header
        self._on(header.mode_chosen, lambda now, mode: now.with_chosen_mode(mode))
        self._on(header.even_requested, lambda now: now.with_weights([1.0] * len(now.ranks)))
        header.by_memory_requested.connect(session.split_by_memory)
        header.by_speed_requested.connect(session.split_by_speed)
        header.bar.stepped.connect(session.step)
        header.bar.dragged.connect(session.drag)
        self._connect_gestures(header.bar)

    def _connect_options(self) -> None:
        self._on(self.cpu_ranks.valueChanged, lambda now, n: now.with_cpu_ranks(n))
        self._on(self.options.changed, lambda now, name, value: replace(now, **{name: value}))
        self.options.rare.template_requested.connect(self._edit_template)
        self._connect_gestures(self.options)

    def _connect_gestures(self, source: Any) -> None:
        """Make all changes during a mouse gesture a single undo step."""
        source.gesture_began.connect(self._session.begin_gesture)
        source.gesture_ended.connect(self._session.end_gesture)

    def _on(self, signal: Any, make: Callable[..., SplitSettings]) -> None:
        """On `signal`, call `make(settings, *args)` and use the settings it returns."""
        session = self._session
        signal.connect(lambda *args: session.change(make(session.settings, *args)))

    @Slot(object)
    def _on_remedy(self, remedy: Remedy) -> None:
        self._session.choose(remedy.params)

    @Slot()
    def _edit_template(self) -> None:
        from app.devices.split.template_preview import (  # imported here because it is rarely used
            TemplateDialog,
            TemplatePreviewer,
        )

        session = self._session
        params = session.load_params()
        if not params.path:
            return
        dialog = TemplateDialog(self, params.chat_template)
        previewer = TemplatePreviewer(params.path, dialog)
        previewer.made.connect(dialog.show_preview)
        dialog.typed.connect(previewer.ask)
        dialog.chosen.connect(
            lambda source: session.change(replace(session.settings, chat_template=source))
        )
        dialog.finished.connect(previewer.close)
        dialog.finished.connect(dialog.deleteLater)
        dialog.open()
        previewer.ask(params.chat_template)

    @Slot(object)
    def show_devices(self, devices: Sequence[DeviceInfo]) -> None:
        """List the unusable devices, with reasons and commands that may help."""
        lines: list[str] = []
        for device in devices:
            if not device.usable:
                lines.append(f"{short_name(device.name)}: {translated(device.reason)}")
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
        """Show the settings and their figures."""
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
        """Lay out one row per rank; existing rows are reused so that they keep the focus."""
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
        self._on(row.share_changed, lambda now, index, share: now.with_share(index, share))
        self._on(row.switched, lambda now, index, is_on: now.with_rank_on(index, is_on))
        self._on(row.locked, lambda now, index, is_on: now.with_locked(index, is_on))
        self._on(row.joined, lambda now, index, joins: now.with_joined(index, joins))
        self._on(row.moved, lambda now, index, steps: now.with_rank_moved(index, steps))
        self._on(
            row.reserve_changed,
            lambda now, index, mib: now.with_reserve(now.ranks[index].device, mib * MIB),
        )
        self._connect_gestures(row)
        return row
