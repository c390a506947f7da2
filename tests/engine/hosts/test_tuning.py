"""The measured search with real models: its trials, its result, what it learns and restores."""

import threading
from pathlib import Path

import pytest

from engine import (
    Calibration,
    EngineError,
    Forecaster,
    LoadParams,
    Model,
    OutOfDeviceMemory,
    TuneEstimate,
    TuneFile,
    TuneProgress,
    TuneResult,
    known_facts,
    known_links,
    list_devices,
    read_topology,
    tune,
)
from engine.hosts.tuning import TrialModel
from engine.planning.search.estimate import TrialSize
from engine.planning.search.model_space import Candidate
from engine.planning.search.results import DraftTrial, reason_for_drafts
from engine.planning.search.split_search import Infeasible
from tests.helpers.mtp_models import mtp_gguf
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tune")
    return str(tiny_gguf(folder / "m.gguf", n_layer=4, quant="Q8_0", n_head_kv=4))


@pytest.fixture
def forecaster(tmp_path: Path) -> Forecaster:
    devices = list_devices()
    facts = {device.id: known_facts(device) for device in devices}
    links = known_links(devices, read_topology())
    return Forecaster(devices, facts, links, Calibration(tmp_path / "c.json"))


def search(path: str, forecaster: Forecaster, **options: object) -> TuneResult:
    params = LoadParams(path, ("cpu", "cpu"), n_ctx=48, cpu_threads=2)
    options = {"file": TuneFile(), "budget_s": 60.0, **options}
    return tune(params, forecaster=forecaster, **options)  # type: ignore[arg-type]


def test_two_ranks_are_searched_measured_and_explained(
    path: str, forecaster: Forecaster, tmp_path: Path
) -> None:
    announced: list[TuneEstimate] = []
    steps: list[TuneProgress] = []
    before = set(threading.enumerate())
    file = TuneFile(tmp_path / "t.json")
    found = search(path, forecaster, on_start=announced.append, on_progress=steps.append, file=file)
    assert set(threading.enumerate()) <= before, "nothing stays loaded"
    assert len(announced) == 1
    assert [step.n_done for step in steps] == list(range(1, len(steps) + 1))
    assert steps[-1].n_trials >= len(steps)
    assert found.is_complete
    assert {t.devices for t in found.trials} == {("cpu",), ("cpu", "cpu")}
    for trial in found.trials:
        assert trial.prefill_ts > 0
        assert trial.decode_ts > 0
        assert sum(trial.shares) == pytest.approx(1)
        assert trial.params.n_ctx == 48
        assert trial.sample is not None
        assert len(trial.sample.busy_s) == len(trial.sample.waited_s) == len(trial.devices)
    assert len({trial.params for trial in found.trials}) == len(found.trials)
    winner = found.winner
    assert winner is not None
    assert f"{winner.decode_ts:.1f} tok/s" in found.reason
    assert max(len(t.sample.decode_ts) for t in found.trials if t.sample) > 2, "repeated at the end"
    key = found.model_hash, 48, found.device_set, "chat"
    assert TuneFile(tmp_path / "t.json").find(*key, path) == found
    assert (tmp_path / "c.json").exists(), "predictions were corrected"


def test_cancelling_gives_what_was_found(path: str, forecaster: Forecaster) -> None:
    steps: list[TuneProgress] = []
    found = search(path, forecaster, on_progress=steps.append, is_cancelled=lambda: len(steps) >= 2)
    assert len(found.trials) == 2
    assert not found.is_complete
    assert found.winner is not None
    at_once = search(path, forecaster, is_cancelled=lambda: True)
    assert at_once.trials == ()
    assert at_once.winner is None


def test_what_runs_out_of_memory_is_a_trial_without_a_result(
    path: str, forecaster: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Model.split_as

    def full(model: Model, params: LoadParams, *arguments: object, **options: object) -> None:
        if len(params.devices) == 2:
            raise OutOfDeviceMemory("cpu", 2, 1, "to test it")
        original(model, params, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "split_as", full)
    found = search(path, forecaster)
    failed = [trial for trial in found.trials if trial.sample is None]
    assert failed
    assert all(len(trial.devices) == 2 and trial.problem for trial in failed)
    assert found.winner is not None
    assert found.winner.devices == ("cpu",)


def test_a_file_that_is_gone_ends_it_with_an_error(tmp_path: Path, forecaster: Forecaster) -> None:
    with pytest.raises(EngineError):
        search(str(tmp_path / "none.gguf"), forecaster)
    path = tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(EngineError, match="There is no file"):
        search(str(path), forecaster, on_progress=lambda _: path.unlink(missing_ok=True))


def test_a_stand_splits_what_is_loaded(path: str) -> None:
    held: list[bool] = []
    trials = TrialModel(TrialSize(8, 4), hold=lambda model: held.append(model is not None))
    try:
        first = LoadParams(path, ("cpu",), n_ctx=32)
        trials.measure(Candidate(first, 1, (1.0,)))
        model = trials.model
        second = LoadParams(path, ("cpu", "cpu"), (3, 1), n_ctx=32)
        sample = trials.measure(Candidate(second, 2, (0.75, 0.25)))
        assert trials.model is model
        assert model is not None
        assert model.params == second
        assert len(sample.prefill_ts) == len(sample.decode_ts) == 2
        wrong = LoadParams(path, ("cpu", "cpu"), (1, 2, 3), n_ctx=32)
        with pytest.raises(Infeasible):
            trials.measure(Candidate(wrong, 3, ()))
        assert model.params == second, "what was loaded stays"
    finally:
        trials.close()
    assert held == [True, False]


def test_trials_become_shorter_where_they_take_long(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = LoadParams(path, n_ctx=200)
    trials = TrialModel(TrialSize(150, 20))
    try:
        trials.measure(Candidate(params, 1, (1.0,)))
        assert trials.size == TrialSize(150, 20)
        monkeypatch.setattr("engine.planning.search.estimate.LONG_S", 0.0)
        trials.measure(Candidate(params, 1, (1.0,)))
        assert trials.size == TrialSize(128, 16)
    finally:
        trials.close()


def test_the_best_split_is_measured_with_guesses(path: str, forecaster: Forecaster) -> None:
    """Each way that the file allows, and kept with the result."""
    mtp = str(mtp_gguf(Path(path).with_name("mtp.gguf"), quant="Q8_0"))
    for file, ways in ((path, ["off", "ngram"]), (mtp, ["off", "ngram", "mtp"])):
        params = LoadParams(file, ("cpu",), n_ctx=256, cpu_threads=2)
        store = TuneFile()
        found = tune(params, forecaster=forecaster, file=store, with_drafts=True)
        assert [trial.way for trial in found.drafts] == ways
        assert all(min(trial.prose_ts, trial.quoting_ts) > 0 for trial in found.drafts)
        assert "Speculative decoding" in found.reason
        key = found.model_hash, 256, found.device_set, "chat"
        assert store.find(*key, file) == found


def test_what_guesses_bring_is_said() -> None:
    plain, text = DraftTrial("off", 20.0, 20.0), DraftTrial("ngram", 20.0, 50.0)
    assert reason_for_drafts([plain]) == ""
    assert reason_for_drafts([plain, text, DraftTrial("mtp", 28.0, 44.0)]) == (
        "Speculative decoding pays off here. With draft tokens from the text, new text is 1.00"
        " times as fast, and repeated text 2.50 times as fast. With draft tokens from the model's"
        " own block (MTP), new text is 1.40 times as fast, and repeated text 2.20 times as fast."
        " The best draft tokens come from the model's own block (MTP)."
    )
    assert reason_for_drafts([plain, DraftTrial("ngram", 19.6, 20.2)]).startswith(
        "Speculative decoding does not pay off here"
    )
