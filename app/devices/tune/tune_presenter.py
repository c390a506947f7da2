"""Connects the tuning dialog to the engine and the split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

import engine
from app.core.background import LatestJob
from app.core.engine_client import EngineClient
from app.core.translation import tr, tr_later
from app.devices.split.session import SplitSession
from app.devices.tune.views.tune_dialog import TuneDialog
from engine import EngineError, LoadParams, TuneProgress

if TYPE_CHECKING:
    from engine import TuneResult


@dataclass(frozen=True, slots=True)
class Question:
    """A search to estimate.

    Attributes:
        params: parameters common to all runs.
        goal: key of `engine.GOALS`.
        budget_s: time limit in seconds; None uses the estimate's default.
        free_bytes: free memory by device, including what the loaded model uses.
    """

    params: LoadParams
    goal: str
    budget_s: float | None
    free_bytes: Mapping[str, int]


Answer = tuple["engine.TuneEstimate", tuple["engine.Region", ...]]
"""The estimate, and the shares that do not fit."""


def estimate(question: Question) -> Answer:
    """Return a search's plan and the shares it excludes; slow.

    Raises:
        EngineError: nothing fits, or the file cannot be read.
    """
    with closing(engine.Planner(question.params.path)) as planner:
        plan = engine.TunePlan(
            planner, question.params, engine.Forecaster.of_machine(), question.goal,
            question.budget_s, question.free_bytes,
        )  # fmt: skip
        return plan.estimate, tuple(plan.space.regions())


LEFT_OUT = tr_later("Pins to one of several ranks on a device are ignored.")


def _is_of_rank(override: tuple[str, str]) -> bool:
    """Return whether an override names a rank by index, so that its target depends on the split."""
    return override[1].startswith("#")


class TunePresenter(QObject):
    """Handles the dialog's requests: estimates, searches, and applying the winner."""

    choosing = Signal()  # the winner is about to become the split and must be applied

    def __init__(
        self,
        dialog: TuneDialog,
        split: SplitSession,
        client: EngineClient,
        parent: QObject | None = None,
        *,
        estimate: Callable[[Question], Answer] = estimate,
    ) -> None:
        super().__init__(parent)
        self.dialog, self._split, self._client = dialog, split, client
        self._estimate = estimate
        self._is_searching = False
        self._job = LatestJob("tandem-tune-plan", self)
        self._job.done.connect(self._on_estimate)
        self._job.failed.connect(dialog.fail)
        dialog.estimate_requested.connect(self._ask)
        dialog.start_requested.connect(self._start)
        dialog.cancel_requested.connect(self._cancel)
        dialog.apply_requested.connect(self._apply)
        client.tune_started.connect(dialog.begin)
        client.tune_progress.connect(self._on_progress)
        client.tuned.connect(self._on_tuned)
        client.tune_failed.connect(self._on_failed)

    @Slot()
    def open(self) -> None:
        """Show the dialog for the current split."""
        self.dialog.open_for(self._split.tune_devices(), tr(LEFT_OUT) if self._has_pins() else "")

    def close(self) -> None:
        """Wait for the thread and close the dialog."""
        self._job.close()
        self.dialog.close()

    @Slot(str, object)
    def _ask(self, goal: str, budget_s: float | None) -> None:
        try:
            params = self._params()
        except EngineError as error:
            self.dialog.fail(error)
            return
        question = Question(params, goal, budget_s, self._split.free_bytes())
        self._job.run(lambda: self._estimate(question))

    @Slot(str, float)
    def _start(self, goal: str, budget_s: float) -> None:
        try:
            params = self._params()
        except EngineError as error:
            self.dialog.fail(error)
            return
        self._is_searching = True
        self.dialog.wait()
        self._client.tune(params, goal, budget_s)

    def _params(self) -> LoadParams:
        params = self._split.load_params()
        if not params.path:
            raise EngineError(tr("No model is open."), tr("Open a model first."))
        return replace(
            params,
            devices=self._split.tune_devices(),
            split=None,
            split_mode="tensor",
            groups=None,
            overrides=tuple(entry for entry in params.overrides if not _is_of_rank(entry)),
        )

    def _has_pins(self) -> bool:
        try:
            return any(map(_is_of_rank, self._split.load_params().overrides))
        except EngineError:
            return False

    @Slot()
    def _cancel(self) -> None:
        if self._is_searching:
            self._client.cancel()

    @Slot(object)
    def _apply(self, params: LoadParams) -> None:
        self.choosing.emit()
        self._split.choose(params)

    @Slot(object)
    def _on_estimate(self, answer: Answer) -> None:
        if self.dialog.state != "running":
            self.dialog.show_estimate(*answer)

    @Slot(object)
    def _on_progress(self, progress: TuneProgress) -> None:
        dialog = self.dialog
        dialog.add_trial(progress.trial, progress.n_done, progress.n_trials, progress.best)

    @Slot(object)
    def _on_tuned(self, result: TuneResult) -> None:
        self._is_searching = False
        self.dialog.finish(result)

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        self._is_searching = False
        self.dialog.fail(error)
