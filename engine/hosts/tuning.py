"""Measured search for the best split: short runs of a model that is re-split repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from engine.api import Model
from engine.errors import (
    Cancelled,
    EngineError,
    OutOfDeviceMemory,
    Sentence,
    SplitError,
    StateFileError,
)
from engine.events import Tune, TuneProgress, TuneStarted
from engine.formats.gguf.reader import GGUFFile, model_hash
from engine.generation.benchmark import BenchTest, measure_drafts, with_draft_trials
from engine.load_params import SPLIT_MODES, LoadParams
from engine.planning.planner import Planner
from engine.planning.search.estimate import REPETITIONS, TrialSize, TuneEstimate, TunePlan
from engine.planning.search.model_space import Candidate
from engine.planning.search.results import Sample, Trial, TuneResult, best_of, reason_for_best
from engine.planning.search.results_file import TuneFile, device_set_of
from engine.planning.search.split_search import Infeasible, SplitSearch, TrialBudget
from engine.planning.speed.forecast import Forecaster
from engine.runtime.measuring.machine_speed import other_load
from engine.util.files import cache_folder, temporary_folder
from engine.util.progress import IsCancelled, ignore, never

if TYPE_CHECKING:
    from engine.generation.benchmark import BenchResult
    from engine.planning.search.results import DraftTrial

Hold = Callable[[Model | None], None]

SEARCH = Sentence("The search")

FIXED = ("path", "n_ctx", "kv_type", "control_vectors", "control_layers")
"""Settings that stay the same when a model is re-split."""


class TrialModel:
    """A search's model, which is re-split for each trial, as that is faster than loading.

    Args:
        size: token counts of a trial; they are reduced if a trial takes too long.
        is_cancelled: polled; returning True stops a trial.
        model: already loaded model, if any.
        hold: called with the loaded model, or None, after every change.
    """

    def __init__(
        self, size: TrialSize, is_cancelled: IsCancelled = never, model: Model | None = None,
        hold: Hold = ignore,
    ) -> None:  # fmt: skip
        self.model, self.size = model, size
        self._is_cancelled, self._hold = is_cancelled, hold

    def measure(self, candidate: Candidate) -> Sample:
        """Measure prefill and decode on one split.

        Raises:
            Infeasible: the split cannot run on this machine.
            Cancelled: the search was cancelled.
            EngineError: the file can no longer be read.
        """
        if self._is_cancelled():
            raise Cancelled(SEARCH)
        try:
            model, size = self._split(candidate.params), self.size
            # decode comes first, as its warm-up compiles and records for both
            decode = self._bench(model, BenchTest(n_gen=size.n_gen), warm_up=True)
            prefill = self._bench(model, BenchTest(n_prompt=size.n_prompt), warm_up=False)
        except (OutOfDeviceMemory, SplitError) as error:
            raise Infeasible(error.message) from None
        self.size = size.fitting(prefill.avg_ts, decode.avg_ts)
        return Sample(
            prefill.samples_ts,
            decode.samples_ts,
            tuple(rank.computed_s for rank in decode.ranks),
            tuple(rank.waited_s for rank in decode.ranks),
            model.fallbacks,
        )

    def measure_drafts(self, params: LoadParams) -> tuple[DraftTrial, ...]:
        """Measure a split with each drafter; see `engine.generation.benchmark`.

        Raises:
            Cancelled: the search was cancelled.
            EngineError: the split can no longer run on this machine.
        """
        model, n_tokens = self._split(params), 2 * self.size.n_gen
        ways = model.draft_variants()
        return measure_drafts(model, model.generate, ways, n_tokens, self._is_cancelled)

    def _bench(self, model: Model, test: BenchTest, *, warm_up: bool) -> BenchResult:
        return model.bench(test, REPETITIONS, warm_up=warm_up, is_cancelled=self._is_cancelled)

    def _split(self, params: LoadParams) -> Model:
        model = self.model
        if model is None:
            model = self.model = Model(params, is_cancelled=self._is_cancelled)
            self._hold(model)
        elif model.params != params:
            try:
                model.split_as(params, is_cancelled=self._is_cancelled)
            finally:
                if not model.is_loaded:
                    self.close()
        return model

    def close(self) -> None:
        """Free the model, if one is loaded."""
        model, self.model = self.model, None
        if model is not None:
            self._hold(None)
            model.close()


def tune(
    params: LoadParams, *, goal: str = "chat", budget_s: float | None = None,
    modes: Sequence[str] = SPLIT_MODES, on_start: Callable[[TuneEstimate], None] = ignore,
    on_progress: Callable[[TuneProgress], None] = ignore, is_cancelled: IsCancelled = never,
    forecaster: Forecaster | None = None, file: TuneFile | None = None, with_drafts: bool = False,
) -> TuneResult:  # fmt: skip
    """Find the fastest split on this machine by measuring.

    Args:
        params: settings shared by all trials; its devices are the choices, its split is ignored.
        goal: "chat" or "prompts"; see `engine.planning.search.results.GOALS`.
        budget_s: limit in seconds, which the current trial may exceed; None for up to ten minutes.
        modes: split modes to choose from.
        on_start: called with an estimate of the search before it starts.
        on_progress: called after each trial.
        is_cancelled: called before each token; returning True ends the search with the best so far.
        forecaster: predicts speeds and learns from the trials; None for this machine's.
        file: store for the result; None for this user's.
        with_drafts: whether to also measure the best split with each drafter.

    Raises:
        EngineError: the file or a device cannot be used, or nothing fits.
    """
    with closing(Planner(params.path)) as planner:
        tuning = Tuning(planner, params, forecaster or Forecaster.of_machine(), goal, budget_s)
        tuning.prepare(modes=modes)
        on_start(tuning.estimate)
        trials = TrialModel(tuning.estimate.size, is_cancelled)
        try:
            store = file or TuneFile.of_user()
            return tuning.run(trials, on_progress, store, with_drafts=with_drafts)
        finally:
            trials.close()


class Tuning:
    """One search for the fastest split of a model."""

    def __init__(
        self, planner: Planner, params: LoadParams, forecaster: Forecaster, goal: str,
        budget_s: float | None,
    ) -> None:  # fmt: skip
        self._planner, self._params, self._forecaster = planner, params, forecaster
        self._goal, self._budget_s = goal, budget_s
        self._plan: TunePlan | None = None
        self._others: tuple[tuple[str, float], ...] = ()

    def prepare(
        self, held: dict[str, int] | None = None, modes: Sequence[str] = SPLIT_MODES
    ) -> None:
        """Determine the splits to try.

        Args:
            held: bytes by device that will be freed before the search and so count as free.
            modes: split modes to choose from.

        Raises:
            EngineError: nothing fits, or a device does not exist on this machine.
        """
        free = dict(self._forecaster.free_bytes)
        for device, n_bytes in (held or {}).items():
            free[device] = free.get(device, 0) + n_bytes
        self._plan = TunePlan(
            self._planner, self._params, self._forecaster, self._goal, self._budget_s, free, modes
        )
        self._free = free

    @property
    def plan(self) -> TunePlan:
        """Splits to try; available after `prepare`."""
        assert self._plan is not None, "it has to be prepared first"
        return self._plan

    @property
    def estimate(self) -> TuneEstimate:
        """Estimate of the search; available after `prepare`."""
        return self.plan.estimate

    def run(
        self, model: TrialModel, on_progress: Callable[[TuneProgress], None],
        file: TuneFile | None, *, with_drafts: bool = False,
    ) -> TuneResult:  # fmt: skip
        """Search until finished or cancelled; store and return the result.

        Args:
            with_drafts: whether to then measure the best split with each drafter.
        """
        self._others = other_load(self._params.all_devices)
        begun, plan = time.perf_counter(), self.plan
        clock = TrialBudget(plan.estimate.budget_s, plan.estimate.trial_s)
        n_done = 0

        def report(trial: Trial) -> None:
            nonlocal n_done
            n_done += 1
            at = best_of(search.trials, plan.goal)
            best = None if at is None else search.trials[at]
            on_progress(TuneProgress(n_done, max(n_done, plan.estimate.n_trials), trial, best))

        search = SplitSearch(plan.space, plan.goal, model.measure, clock, report)
        search.run()
        result = self._result(search, time.perf_counter() - begun)
        if with_drafts and result.is_complete and result.winner is not None:
            params = result.winner.params
            result = with_draft_trials(result, lambda: model.measure_drafts(params))
        self._learn(result, model.size)
        if file is not None and result.best is not None:
            file.keep(result)
        return result

    def _result(self, search: SplitSearch, seconds: float) -> TuneResult:
        plan, trials = self.plan, tuple(search.trials)
        with GGUFFile.open(self._params.path) as file:
            digest = model_hash(file)
        return TuneResult(
            model_name=self._planner.info.name,
            model_hash=digest,
            n_ctx=plan.n_ctx,
            device_set=device_set_of(self._params, self._forecaster),
            goal=plan.goal,
            trials=trials,
            regions=plan.space.regions(),
            best=best_of(trials, plan.goal),
            reason=reason_for_best(trials, plan.goal),
            seconds=seconds,
            is_complete=search.is_complete,
            when=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            others=self._others,
        )

    def _learn(self, result: TuneResult, size: TrialSize) -> None:
        quant = self._planner.info.quant
        for trial in result.trials:
            if trial.sample is None:
                continue
            evaluation = self._planner.evaluate(trial.params, self._free)
            seconds = size.n_prompt / trial.prefill_ts
            learn = self._forecaster
            learn.learn_prefill(evaluation, trial.params, quant, size.n_prompt, seconds)
            learn.learn_decode(
                evaluation, trial.params, quant, 1 / trial.decode_ts, size.n_gen // 2
            )


class Interlude:
    """A search during which a loaded model, if any, makes room; it is restored afterwards.

    Args:
        model: loaded model, if any.
        hold: called with the loaded model, or None, after every change.
        is_closing: returns whether restoring the model is pointless.
    """

    def __init__(self, model: Model | None, hold: Hold, is_closing: IsCancelled) -> None:
        self._model, self._hold, self._is_closing = model, hold, is_closing

    def run(
        self,
        command: Tune,
        send: Callable[[TuneStarted | TuneProgress], None],
        is_cancelled: IsCancelled,
    ) -> TuneResult:
        """Run a command's search, and restore the model.

        Args:
            send: called with the search's events.

        Raises:
            EngineError: the search was impossible, or the model could not be restored.
        """
        params = command.params
        with closing(Planner(params.path)) as planner:
            tuning = Tuning(
                planner, params, Forecaster.of_machine(), command.goal, command.budget_s
            )
            tuning.prepare(self._held(), command.modes)
            send(TuneStarted(tuning.estimate))
            with temporary_folder(_folder()) as folder:
                return self._search(
                    tuning, folder / "state", params, send, is_cancelled,
                    with_drafts=command.with_drafts,
                )  # fmt: skip

    def _held(self) -> dict[str, int]:
        if self._model is None:
            return {}
        devices = ("cpu", *self._model.params.all_devices)
        return self._model.runtime.free_once_closed(dict.fromkeys(devices, 0))

    def _search(
        self, tuning: Tuning, state: Path, params: LoadParams, send: Callable[[TuneProgress], None],
        is_cancelled: IsCancelled, *, with_drafts: bool,
    ) -> TuneResult:  # fmt: skip
        before = self._model.params if self._model else None
        self._save(state)
        trials = TrialModel(tuning.estimate.size, is_cancelled, self._lent(params), self._hold)
        try:
            return tuning.run(trials, send, TuneFile.of_user(), with_drafts=with_drafts)
        finally:
            if before is None or self._is_closing():
                trials.close()
            else:
                self._load_state(self._restored(trials.model, before), state)

    def _lent(self, params: LoadParams) -> Model | None:
        model = self._model
        if model is None or can_be_split_as(model, params):
            return model
        self._hold(None)
        model.close()
        return None

    def _save(self, path: Path) -> None:
        """Save the cache; if that fails, conversations are recomputed later."""
        if self._model is not None and self._model.n_cached:
            with suppress(StateFileError):
                self._model.save_state(path)

    def _load_state(self, model: Model, path: Path) -> None:
        if path.exists():
            with suppress(EngineError):
                model.load_state(path)

    def _restored(self, model: Model | None, params: LoadParams) -> Model:
        if model is not None and can_be_split_as(model, params):
            with suppress(EngineError):
                model.split_as(params, is_cancelled=self._is_closing)
                return model
        if model is not None:
            self._hold(None)
            model.close()
        again = Model(params, is_cancelled=self._is_closing)
        self._hold(again)
        return again


def can_be_split_as(model: Model, params: LoadParams) -> bool:
    """Return whether a loaded model differs from `params` only in the split."""
    return all(getattr(model.params, name) == getattr(params, name) for name in FIXED)


def _folder() -> Path | None:
    """Return a folder on disk for a conversation's cache, as temporary folders may be in memory."""
    folder = cache_folder()
    if folder is None:
        return None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    return None
