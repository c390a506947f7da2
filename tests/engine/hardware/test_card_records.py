"""Verdicts on cards on disk: kept by card and versions; damage and other programs do no harm."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.hardware import card_records
from engine.hardware.card_records import CardRecords, CardVerdict, card_key, gpu_code_hash
from engine.hardware.devices.types import DeviceInfo

GIB = 1 << 30
GPU = DeviceInfo(
    "cuda:0", "cuda", "RTX 3090", 24 * GIB, 23 * GIB, uuid="GPU-1", pci_bus="0:1",
    compute_capability="8.6", driver="580.1",
)  # fmt: skip
PASSED, WRONG = CardVerdict("passed"), CardVerdict("wrong", "a norm came out wrong", "2026-03-01")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "cards.json"


def test_a_verdict_is_found_again(path: Path) -> None:
    CardRecords(path).keep("key", "card", WRONG)
    again = CardRecords(path)
    assert again.find("key", "card") == WRONG
    assert again.find("key", "another check") is None
    assert again.find("another key", "card") is None
    again.forget("key", "card")
    assert CardRecords(path).find("key", "card") is None


def test_without_a_path_verdicts_last_as_long_as_the_records() -> None:
    records = CardRecords(None)
    records.keep("key", "card", PASSED)
    assert records.find("key", "card") == PASSED
    assert CardRecords(None).find("key", "card") is None


def test_programs_do_not_delete_each_others_verdicts(path: Path) -> None:
    one, other = CardRecords(path), CardRecords(path)  # both read before either wrote
    one.keep("key", "card", PASSED)
    other.keep_all("key", {"product": WRONG, "attention": PASSED})
    other.keep("other key", "card", WRONG)
    again = CardRecords(path)
    assert [again.find("key", what) for what in ("card", "product", "attention")] == [
        PASSED, WRONG, PASSED,
    ]  # fmt: skip
    assert other.find("key", "card") == PASSED
    assert again.find("other key", "card") == WRONG


def test_equal_cards_share_their_verdicts_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = card_key(GPU)
    assert card_key(replace(GPU, id="cuda:1", uuid="GPU-2", pci_bus="0:2")) == key
    others = [replace(GPU, name="RTX 3080"), replace(GPU, driver="590"),
              replace(GPU, compute_capability="8.9"),
              replace(GPU, compute_capability="", arch="gfx1100"),
              replace(GPU, compute_capability="", arch="gfx1201")]  # fmt: skip
    keys = {key, *map(card_key, others)}
    for name in ("triton_version", "chosen_launcher", "package_version", "gpu_code_hash",
                 "_torch_version"):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(card_records, name, lambda: "another")
            keys.add(card_key(GPU))
    assert len(keys) == 1 + len(others) + 5


def test_the_key_changes_with_the_code_for_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(gpu_code_hash()) == 16
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "gemv.py"
    monkeypatch.setattr(card_records, "GPU_CODE", tmp_path)
    hashed = gpu_code_hash.__wrapped__
    assert hashed() == ""
    source.write_text("a")
    before = hashed()
    source.write_text("b")
    assert before != hashed() != ""


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"key": 1}', '{"key": {"card": "passed"}}',
     '{"key": {"card": ["fine", "", ""]}}',
     '{"key": {"card": ["passed", 1, ""]}}', '{"key": {"card": ["passed"]}}', "\0" * 100],
)  # fmt: skip
def test_damaged_files_count_as_unchecked(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    records = CardRecords(path)
    assert records.find("key", "card") is None
    records.keep("key", "card", PASSED)
    assert CardRecords(path).find("key", "card") == PASSED


def test_the_file_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_records, "MAX_CARDS", 3)
    monkeypatch.setattr(card_records, "MAX_CHECKS", 2)
    records = CardRecords(path)
    for card in "abcd":
        records.keep(card, "card", CardVerdict("crashed", "x" * 10_000))
    records.keep_all("b", {"1": PASSED, "2": PASSED, "3": PASSED})
    kept = json.loads(path.read_text())
    assert list(kept) == ["c", "d", "b"]
    assert list(kept["b"]) == ["2", "3"]
    assert kept["c"]["card"] == ["crashed", "x" * card_records.MAX_WHY, ""]


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    records = CardRecords(tmp_path / "file" / "cards.json")
    records.keep("key", "card", PASSED)
    records.keep("key", "product", WRONG)
    assert (records.find("key", "card"), records.find("key", "product")) == (PASSED, WRONG)
