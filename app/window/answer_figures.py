"""Where the figures of answers go: to the monitor, and to what remembers how fast a model is."""

from __future__ import annotations

from PySide6.QtCore import QObject, Slot

from app.chat.session import ChatSession
from app.core.engine_client import EngineClient, RunningAnswer
from app.devices.monitor.views.monitor_panel import MonitorPanel
from app.devices.split.session import SplitSession
from app.models.library.page import LibraryPage
from app.remote.client.address import is_remote
from app.window.side_panels import SidePanels
from engine import Finished


class AnswerFigures(QObject):
    """The way of the figures of answers; the monitor shows the speed of all together."""

    def __init__(
        self,
        client: EngineClient,
        chats: ChatSession,
        monitor: MonitorPanel,
        split: SplitSession,
        side_panels: SidePanels,
        library: LibraryPage,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client, self._monitor = client, monitor
        self._split, self._side_panels, self._library = split, side_panels, library
        chats.answering.connect(monitor.mark_message)
        client.rate.connect(monitor.add_rate)
        client.token_times.connect(monitor.add_times)
        client.finished.connect(self._on_finished)

    @Slot(object, object)
    def _on_finished(self, finished: Finished, answer: RunningAnswer) -> None:
        """Note the speed of an answer; one that shared the model is slower than the model is."""
        if not answer.was_alone:
            return
        self._monitor.note_guesses(finished)
        rate, model = finished.timings.decode_per_s, self._client.model
        is_here = model is not None and not is_remote(model.info.path)
        if is_here:
            self._split.note_answer(finished)
            self._side_panels.note_answer(finished, model)
            if (plain := finished.plain_per_s) > 0:
                self._library.note_speed(model, plain)
        if rate > 0:
            self._monitor.add_rate(rate)  # a short answer ends before the first reading of it
            self._monitor.add_rate(0.0)
