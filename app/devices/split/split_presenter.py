"""Connects the split panel with the session of the split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Slot

from app.core.units import MIB
from app.devices.split.session import SplitSession
from app.devices.split.settings import SplitSettings
from app.devices.split.views.device_row import DeviceRow
from app.devices.split.views.split_panel import SplitPanel

if TYPE_CHECKING:
    from engine import Remedy


class SplitPresenter(QObject):
    """Shows a session's pictures in a panel, and turns the signals of its controls into changes."""

    def __init__(
        self, session: SplitSession, panel: SplitPanel, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._session, self._panel = session, panel
        self._show_session()
        self._wire_header()
        self._wire_options()
        self._wire_footer()
        panel.row_made.connect(self._wire_row)

    def _show_session(self) -> None:
        session, panel = self._session, self._panel
        session.pictured.connect(panel.show_picture)
        session.devices_changed.connect(panel.show_devices)
        session.model_changed.connect(panel.options.set_model_context)
        session.block_changed.connect(panel.options.rare.offer_block)
        session.state_changed.connect(panel.show_state)
        session.progressed.connect(panel.footer.set_progress)

    def _wire_header(self) -> None:
        session, header = self._session, self._panel.header
        self._on(header.mode_chosen, lambda now, mode: now.with_chosen_mode(mode))
        self._on(header.even_requested, lambda now: now.with_weights([1.0] * len(now.ranks)))
        header.by_memory_requested.connect(session.split_by_memory)
        header.by_speed_requested.connect(session.split_by_speed)
        header.bar.stepped.connect(session.step)
        header.bar.dragged.connect(session.drag)
        self._wire_gestures(header.bar)

    @Slot(object)
    def _wire_row(self, row: DeviceRow) -> None:
        self._on(row.share_changed, lambda now, index, share: now.with_share(index, share))
        self._on(row.switched, lambda now, index, is_on: now.with_rank_on(index, is_on))
        self._on(row.locked, lambda now, index, is_on: now.with_locked(index, is_on))
        self._on(row.joined, lambda now, index, joins: now.with_joined(index, joins))
        self._on(row.moved, lambda now, index, steps: now.with_rank_moved(index, steps))
        self._on(
            row.reserve_changed,
            lambda now, index, mib: now.with_reserve(now.ranks[index].device, mib * MIB),
        )
        self._wire_gestures(row)

    def _wire_options(self) -> None:
        options = self._panel.options
        self._on(self._panel.cpu_ranks.valueChanged, lambda now, n: now.with_cpu_ranks(n))
        self._on(options.changed, lambda now, name, value: replace(now, **{name: value}))
        options.rare.template_requested.connect(self.edit_template)
        self._wire_gestures(options)

    @Slot()
    def edit_template(self) -> None:
        """Open the dialog of the selected model's chat template."""
        from app.devices.split.template_preview import TemplatePreviewer  # late: few people need it
        from app.devices.split.views.rare_options import TemplateDialog

        session = self._session
        params = session.load_params()
        if not params.path:
            return
        dialog = TemplateDialog(self._panel, params.chat_template)
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

    def _wire_footer(self) -> None:
        session, panel = self._session, self._panel
        panel.remedies.chosen.connect(self._on_remedy)
        panel.footer.load_requested.connect(session.request_load)
        panel.footer.cancel_requested.connect(session.cancel_requested)
        panel.footer.undo_requested.connect(session.undo)
        panel.undo_requested.connect(session.undo)
        panel.redo_requested.connect(session.redo)

    def _wire_gestures(self, source: Any) -> None:
        """Make all changes while the mouse is down one step for undo."""
        source.gesture_began.connect(self._session.begin_gesture)
        source.gesture_ended.connect(self._session.end_gesture)

    def _on(self, signal: Any, make: Callable[..., SplitSettings]) -> None:
        """Change to what `make` returns for the present settings and the signal's arguments."""
        session = self._session
        signal.connect(lambda *args: session.change(make(session.settings, *args)))

    @Slot(object)
    def _on_remedy(self, remedy: Remedy) -> None:
        self._session.choose(remedy.params)
