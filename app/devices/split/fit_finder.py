"""The search for what fits: on a thread, a moment after the last change."""

from __future__ import annotations

import threading

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.core.background import LatestJob
from app.devices.split.fit import FitAnswer, FitQuestion, find_out
from app.devices.split.plan_source import PlannerFactory

PAUSE_MS = 150
"""Milliseconds without another question after which a question is looked into."""


class FitFinder(QObject):
    """Answers the last question that was asked, on a thread with its own planner.

    Args:
        planner_factory: opens a model file for planning.
    """

    found = Signal(object)  # FitAnswer

    def __init__(self, planner_factory: PlannerFactory, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._factory = planner_factory
        self._wanted: FitQuestion | None = None
        self._is_stopped = threading.Event()
        self._job = LatestJob("tandem-fit", self)
        self._job.done.connect(self._on_done)
        self._timer = QTimer(self, singleShot=True, interval=PAUSE_MS)
        self._timer.timeout.connect(self._start)

    def ask(self, question: FitQuestion | None) -> None:
        """Look into `question` in a moment, in place of any earlier one; None asks nothing."""
        if question == self._wanted:
            return
        self._wanted = question
        self._is_stopped.set()
        self._job.drop()
        if question is None:
            self._timer.stop()
        else:
            self._timer.start()

    def stop(self) -> None:
        """Drop the question and wait for the thread."""
        self.ask(None)
        self._job.close()

    @Slot()
    def _start(self) -> None:
        question, factory = self._wanted, self._factory
        if question is not None:
            stopped = self._is_stopped = threading.Event()
            self._job.run(lambda: find_out(question, factory, stopped))

    @Slot(object)
    def _on_done(self, answer: FitAnswer | None) -> None:
        if answer is not None and answer.question == self._wanted:
            self.found.emit(answer)
