"""Texts in the window's language: catalogs, plurals, and what happens without one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog
from babel.messages.mofile import write_mo

from app.core import translation
from app.core.translation import language, languages, tr, tr_later, tr_n, use_language


@pytest.fixture
def catalogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with a German catalog of three texts; end in English again."""
    german = Catalog(locale="de", header_comment="")
    german.add("New chat", "Neuer Chat")
    german.add("Load", "Laden")
    german.add("Load", "Last", context="of a device")
    german.add(("{n} chat", "{n} chats"), ("{n} Chat", "{n} Chats"))
    with (tmp_path / "de.mo").open("wb") as file:
        write_mo(file, german)
    monkeypatch.setattr(translation, "_folder", lambda: tmp_path)
    yield tmp_path
    use_language("en")


def test_texts_are_english_until_a_language_is_chosen() -> None:
    assert tr("New chat") == "New chat"
    assert tr_n("{n} chat", "{n} chats", 1) == "1 chat"
    assert tr_n("{n} chat", "{n} chats", 0) == "0 chats"


@pytest.mark.usefixtures("catalogs")
@pytest.mark.parametrize("code", ["de", "de_AT"])
def test_a_language_is_used_for_what_its_catalog_holds(code: str) -> None:
    use_language(code)
    assert language() == "de"
    assert tr("New chat") == "Neuer Chat"
    assert tr_n("{n} chat", "{n} chats", 1) == "1 Chat"
    assert tr_n("{n} chat", "{n} chats", 2) == "2 Chats"
    assert tr("Not in the catalog") == "Not in the catalog"
    assert tr("") == ""  # not the catalog's header


@pytest.mark.usefixtures("catalogs")
def test_the_same_english_may_have_two_meanings() -> None:
    constant = tr_later("Load", "of a device")
    assert (tr("Load", "of a device"), tr(constant)) == ("Load", "Load")
    use_language("de")
    assert (tr("Load"), tr("Load", "of a device"), tr(constant)) == ("Laden", "Last", "Last")


@pytest.mark.usefixtures("catalogs")
def test_a_language_without_a_catalog_is_english() -> None:
    use_language("de")
    use_language("fi")
    assert language() == "en"
    assert tr("New chat") == "New chat"
    assert languages() == ("en", "de")
