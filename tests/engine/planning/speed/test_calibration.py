"""Predictions learn from real runs; a damaged file is no error."""

import json
import random
import threading
from pathlib import Path

import pytest

from engine.hardware.devices.types import DeviceInfo
from engine.planning.speed import forecast as calibration
from engine.planning.speed.facts import Path as TimePath
from engine.planning.speed.facts import Prediction, RankTime
from engine.planning.speed.forecast import DECODE, PREFILL, Calibration, Subject, device_set

RTX, CPU = "RTX 3090 580 1.0", "Xeon 2 1.0"
ONE = Subject((RTX,), DECODE, "Q4_K_M")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "below" / "calibration.json"


def test_the_median_of_the_last_runs_counts(file: Path) -> None:
    known = Calibration(file)
    assert known.factor(ONE) == 1.0
    for measured in (2.0, 2.2, 40.0):
        known.note(ONE, 1.0, measured)
    assert known.factor(ONE) == pytest.approx((2.0 * 2.2) ** 0.5)
    for _ in range(9):
        known.note(ONE, 2.0, 1.0)
    assert known.factor(ONE) == pytest.approx(0.5)
    assert Calibration(file).factor(ONE) == pytest.approx(0.5)


def test_a_run_beside_a_busy_program_is_soon_outvoted() -> None:
    known = Calibration()
    known.note(ONE, 1.0, 30.0)
    assert known.factor(ONE) == pytest.approx(2.0), "it is one against the prediction"
    known.note(ONE, 1.0, 1.1)
    assert known.factor(ONE) == pytest.approx(1.1)
    known.note(ONE, 1.0, 1.2)
    known.note(ONE, 1.0, 30.0)
    assert known.factor(ONE) == pytest.approx(1.2)


@pytest.mark.parametrize("n", range(1, 9))
def test_a_correction_goes_towards_what_was_measured_and_not_past_it(n: int) -> None:
    known, drawn = Calibration(), random.Random(n)
    known.note(Subject(ONE.devices, DECODE, "another model"), 1.0, 3.0)
    known.note(Subject((CPU, RTX), DECODE, "Q4_K_M"), 1.0, 0.5)
    for _ in range(n):
        before, ratio = known.factor(ONE), drawn.uniform(0.2, 5.0)
        known.note(ONE, 1.0, ratio)
        after = known.factor(ONE)
        assert min(before, ratio) <= after * 1.0001
        assert after <= max(before, ratio) * 1.0001


def test_what_is_known_of_the_same_devices_counts_for_others(file: Path) -> None:
    known = Calibration(file)
    for _ in range(2):
        known.note(ONE, 1.0, 2.0)
        known.note(Subject(ONE.devices, DECODE, "Q8_0"), 1.0, 3.0)
    assert known.factor(Subject(ONE.devices, DECODE, "F16")) == pytest.approx(2.0)
    assert known.factor(Subject((CPU, RTX), DECODE, "F16")) == pytest.approx(2.0), "one of them"
    assert known.factor(Subject((CPU,), DECODE, "Q8_0")) == 1.0
    assert known.factor(Subject(ONE.devices, PREFILL, "Q8_0")) == 1.0
    assert known.factor(Subject(("RTX 4090 580",), DECODE, "Q8_0")) == 1.0


@pytest.mark.parametrize(
    ("predicted", "measured"),
    [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, float("nan")), (1.0, float("inf")), (1e-9, 1.0)],
)
def test_nonsense_teaches_nothing(file: Path, predicted: float, measured: float) -> None:
    known = Calibration(file)
    known.note(ONE, predicted, measured)
    assert known.factor(ONE) == 1.0
    assert not file.exists()


def test_the_file_stays_small(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_SUBJECTS", 3)
    known = Calibration(file)
    subjects = [Subject((f"device {n}",), DECODE) for n in range(5)]
    for subject in subjects:
        known.note(subject, 1.0, 2.0)
    known.note(Subject(("x" * 5000,), DECODE), 1.0, 2.0)
    again = Calibration(file)
    assert [again.factor(subject) for subject in subjects] == pytest.approx(
        [1.0, 1.0, 2**0.5, 2**0.5, 2**0.5]
    )
    assert len(json.loads(file.read_text())["ratios"]) == 3


GOOD = {"devices": [RTX], "test": DECODE, "about": "Q4_K_M", "values": [2.0]}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "7", '{"ratios": 3}', '{"ratios": [3, null, {}]}',
        "[" * 100_000, "\x00\xff", '{"ratios": [{"devices": 1, "test": [], "values": [2]}]}',
        json.dumps({"ratios": [{**GOOD, "values": "many"}]}),
        json.dumps({"ratios": [{**GOOD, "values": [None, "2", True, 1e99, 10**400, -1]}]}),
        json.dumps({"ratios": [{**GOOD, "about": {}}]}),
    ],
    ids=range(13),
)  # fmt: skip
def test_a_damaged_file_is_an_empty_one(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text, encoding="latin-1")
    known = Calibration(file)
    assert known.factor(ONE) == 1.0
    known.note(ONE, 1.0, 4.0)
    assert Calibration(file).factor(ONE) == pytest.approx(2.0)


def test_what_is_good_in_a_file_is_kept(file: Path) -> None:
    file.parent.mkdir()
    document = {"ratios": [{"devices": 1}, {**GOOD, "values": [2.0, None, 2.0]}]}
    file.write_text(json.dumps(document))
    assert Calibration(file).factor(ONE) == pytest.approx(2.0)


def test_a_huge_file_is_not_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Calibration(file).note(ONE, 1.0, 4.0)
    monkeypatch.setattr("engine.util.files.MAX_BYTES", 10)
    assert Calibration(file).factor(ONE) == 1.0


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "below").write_text("a file where a folder should be")
    known = Calibration(tmp_path / "below" / "calibration.json")
    known.note(ONE, 1.0, 4.0)
    assert known.factor(ONE) == pytest.approx(2.0)
    nowhere = Calibration(None)
    nowhere.note(ONE, 1.0, 4.0)
    assert nowhere.factor(ONE) == pytest.approx(2.0)


def test_two_programs_add_to_each_other(file: Path) -> None:
    a, b = Calibration(file), Calibration(file)
    a.note(ONE, 1.0, 4.0)
    b.note(Subject(("other",), DECODE), 1.0, 0.25)
    assert Calibration(file).factor(ONE) == pytest.approx(2.0)
    assert Calibration(file).factor(Subject(("other",), DECODE)) == pytest.approx(0.5)


def test_threads_may_note_at_once(file: Path) -> None:
    known = Calibration(file)
    subjects = [Subject((f"device {n}",), DECODE) for n in range(8)]
    threads = [threading.Thread(target=known.note, args=(s, 1.0, 4.0)) for s in subjects]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [Calibration(file).factor(s) for s in subjects] == pytest.approx([2.0] * 8)
    assert [path.name for path in file.parent.iterdir()] == ["calibration.json"]


def test_it_is_kept_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    Calibration.of_user().note(ONE, 1.0, 4.0)
    assert (tmp_path / "cache" / "calibration.json").is_file()
    assert Calibration.of_user().factor(ONE) == pytest.approx(2.0)


def test_another_driver_is_another_set_of_devices() -> None:
    gpu = DeviceInfo("cuda:0", "cuda", "RTX 3090", 1, 1, driver="580.65")
    newer = DeviceInfo("cuda:0", "cuda", "RTX 3090", 1, 1, driver="590.1")
    cpu = DeviceInfo("cpu", "cpu", "Xeon", 1, 1, n_cores=2)
    names = {device_set(devices) for devices in ([gpu], [newer], [gpu, gpu], [gpu, cpu], [cpu])}
    assert len(names) == 5


def test_a_prediction_is_corrected(file: Path) -> None:
    rank = RankTime(0, "cpu", 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    prediction = Prediction(4, 1.0, (rank,), TimePath(memory_s=1.0))
    known = Calibration(file)
    assert known.corrected(ONE, prediction) is prediction
    known.note(ONE, 1.0, 4.0)
    assert known.corrected(ONE, prediction).tokens_per_s == pytest.approx(2.0)
