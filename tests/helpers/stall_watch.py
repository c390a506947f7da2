"""A measurement of how long the GUI thread does not respond."""

import time

from PySide6.QtCore import QObject, Qt, QTimer, Slot


class StallWatch(QObject):
    """A timer of the GUI thread that records its delays.

    Attributes:
        worst_s: longest time without an answer, in seconds.
        late_s: every delay of more than 20 ms.
    """

    PERIOD_MS = 5

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self.worst_s = 0.0
        self.late_s: list[float] = []
        self._last = time.perf_counter()
        self._timer = QTimer(self, interval=self.PERIOD_MS, timerType=Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._tick)
        self._timer.start()

    def restart(self) -> None:
        """Discard all recorded delays."""
        self.worst_s, self.late_s, self._last = 0.0, [], time.perf_counter()

    def stop(self) -> None:
        self._timer.stop()

    @Slot()
    def _tick(self) -> None:
        now = time.perf_counter()
        delay = now - self._last - self.PERIOD_MS / 1000
        self._last = now
        self.worst_s = max(self.worst_s, delay)
        if delay > 0.02:
            self.late_s.append(delay)
