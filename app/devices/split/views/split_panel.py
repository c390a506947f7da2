"""The split panel: the share of each device, and the memory and speed that follow."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QWidget

from app.devices.split.figures import rank_labels, short_name
from app.devices.split.picture import LoadState, SplitPicture
from app.devices.split.views.device_row import DeviceRow
from app.devices.split.views.split_layout import SplitLayout
from app.widgets.controls import show_number
from app.widgets.shortcuts import make_local_shortcut
from engine import DeviceInfo


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
