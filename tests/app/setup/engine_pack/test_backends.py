"""The pack that uses most of a machine is recommended."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine
from app.setup.engine_pack.store import Pack, PackStore, find_offers, find_update
from tests.helpers.fake_pack import adopt_pack, make_pack


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    """Lock files of a small pack for the processor and a large one for each kind of GPU."""
    for number, backend in enumerate(("cpu", "cuda12", "cuda13", "rocm")):
        pack = make_pack(tmp_path, "https://x", f"9.{number}.0", n_bytes=30_000 * (1 + number))
        text = pack.lock.read_text().replace('backend = "cpu"', f'backend = "{backend}"')
        pack.lock.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("suitable", "recommended", "on_gpus"),
    [
        (("cpu",), "cpu", []),
        (("cuda13", "cpu"), "cuda13", ["cuda13"]),
        (("cuda12", "cpu"), "cuda12", ["cuda12"]),
        (("cuda13", "rocm", "cpu"), "cuda13", ["cuda13", "rocm"]),
        (("rocm", "cpu"), "rocm", ["rocm"]),
    ],
)
def test_the_best_comes_first(
    locks: Path,
    monkeypatch: pytest.MonkeyPatch,
    suitable: tuple[str, ...],
    recommended: str,
    on_gpus: list[str],
) -> None:
    monkeypatch.setattr(engine, "suitable_torch", lambda: suitable, raising=False)
    offers = find_offers(locks)
    assert [offer.backend for offer in offers if offer.is_recommended] == [recommended]
    assert offers[0].backend == recommended
    assert [offer.backend for offer in offers if offer.uses_gpus] == on_gpus
    assert len(offers) == 4


def test_without_a_pack_for_the_processor_the_smallest_is_recommended(
    locks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "suitable_torch", lambda: ("cpu",), raising=False)
    (locks / "pylock.cpu-9-0-0.toml").unlink()
    offers = find_offers(locks)
    assert [(offer.backend, offer.is_recommended) for offer in offers] == [
        ("cuda12", True), ("cuda13", False), ("rocm", False),
    ]  # fmt: skip


def test_an_update_is_another_lock_of_the_same_kind(locks: Path, tmp_path: Path) -> None:
    offers = find_offers(locks)
    assert find_update(None, offers) is None
    store = PackStore(tmp_path / "engines")
    old = adopt_pack(store)
    found = find_update(old, offers)
    assert found is not None
    assert (found.backend, found.lock.version) == ("cpu", "9.0.0")
    same = Pack(**{**{f: getattr(old, f) for f in old.__slots__}, "digest": found.lock.digest})
    assert find_update(same, offers) is None
    environment = Pack("n-1", "environment", "1", "3.11", (), source="/usr/bin/python3")
    assert find_update(environment, offers) is None
