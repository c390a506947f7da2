"""Settings survive restarts, other versions and damaged files."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.settings import MAX_RECENT, Settings, SettingsStore, changed_sampling
from engine import SamplingParams
from tests.helpers.odd_files import make_odd_file, odd_files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "settings.json"


def test_what_was_changed_comes_back(path: Path) -> None:
    store = SettingsStore(path)
    changed = Settings(theme="light", recent_models=("/a.gguf",), sampling={"top_k": 7})
    store.put(changed)
    assert store.save()
    again = SettingsStore(path)
    assert again.current == changed
    assert again.current.sampling_params() == SamplingParams(top_k=7)


def test_a_path_that_is_no_text_does_not_cost_the_settings(path: Path) -> None:
    """File names on Linux are bytes; those that are not UTF-8 become lone surrogates."""
    store = SettingsStore(path)
    store.put(Settings(theme="light", recent_models=("/tmp/\udcff.gguf",)))
    assert store.save()
    assert SettingsStore(path).current == store.current


def test_keys_of_another_version_are_kept(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"theme": "dark", "from_the_future": [1, 2]}))
    store = SettingsStore(path)
    store.put(replace(store.current, theme="light"))
    store.save()
    assert json.loads(path.read_text())["from_the_future"] == [1, 2]
    assert json.loads(path.read_text())["theme"] == "light"


@odd_files
def test_what_is_no_file_is_set_aside(path: Path, kind: str) -> None:
    make_odd_file(path, kind)
    store = SettingsStore(path)
    assert store.current == Settings()
    assert os.path.lexists(path.with_name("settings.json.broken"))
    store.put(replace(store.current, theme="dark"))
    assert store.save()
    assert SettingsStore(path).current.theme == "dark"


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '"x"', "\x00"])
def test_a_broken_file_is_set_aside(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    store = SettingsStore(path)
    assert store.current == Settings()
    assert path.with_name("settings.json.broken").read_text() == content
    store.put(replace(store.current, theme="dark"))
    assert store.save()


def test_a_number_too_large_for_a_float_becomes_the_default(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f'{{"zoom": 1{"0" * 400}, "tray": true}}')
    current = SettingsStore(path).current
    assert (current.zoom, current.tray) == (Settings().zoom, True)


def test_values_of_the_wrong_kind_become_the_default(path: Path) -> None:
    path.parent.mkdir()
    wrong = {"theme": "pink", "recent_models": [1], "plans": "x", "system_prompt": "kept"}
    path.write_text(json.dumps(wrong))
    assert SettingsStore(path).current == Settings(system_prompt="kept")


def test_banned_strings_come_back_from_the_file_as_they_were(path: Path) -> None:
    banned = ("a testament to", " \n", "\u2014", '"')
    store = SettingsStore(path)
    store.put(Settings(sampling=changed_sampling(SamplingParams(banned_strings=banned))))
    assert store.save()
    assert SettingsStore(path).current.sampling_params() == SamplingParams(banned_strings=banned)


def test_sampling_that_the_engine_would_refuse_is_dropped() -> None:
    stored = Settings(sampling={"temperature": 99.0, "top_k": 3, "nonsense": 1, "stop": ["x"]})
    assert stored.sampling_params() == SamplingParams(top_k=3, stop=("x",))


def test_only_changed_sampling_is_stored() -> None:
    assert changed_sampling(SamplingParams(seed=4)) == {"seed": 4}


def test_recent_models_are_few_distinct_and_newest_first() -> None:
    settings = Settings()
    for number in [*range(20), 15]:
        settings = settings.with_recent(f"/{number}.gguf")
    assert settings.recent_models[:2] == ("/15.gguf", "/19.gguf")
    assert len(settings.recent_models) == len(set(settings.recent_models)) == MAX_RECENT


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = SettingsStore(tmp_path / "file" / "settings.json")
    store.put(replace(store.current, theme="dark"))
    assert not store.save()


def test_numbers_outside_their_limits_become_the_default(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"chat_cache_gib": -3}))
    assert SettingsStore(path).current == Settings()
    path.write_text(json.dumps({"chat_cache_gib": True}))
    assert SettingsStore(path).current == Settings()
    path.write_text(json.dumps({"chat_cache_gib": 0}))
    assert SettingsStore(path).current.chat_cache_gib == 0
