"""The texts of the window and their translations: nothing forgotten, nothing left over."""

import re
import tomllib
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog

from app.core import translation
from tests.helpers import languages
from tests.helpers.languages import ROOT, UPDATE, catalogs, problems, sources
from tests.helpers.shown_texts import bad_lookups, forgotten_texts
from tests.helpers.templates import finished_sentences

DU = re.compile(r"\b(?i:du|dein\w*|dir|dich)\b|\b(Wähle|Öffne|Lies|Gib|Prüfe|Versuche|Starte)\b")
ENDS = ".…:?!"
PROMPT = "You are a helpful assistant."
"""What a model is told, which is addressed otherwise than people."""


@pytest.fixture
def german(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a catalog of one file with two texts, in a folder of its own."""
    code = tmp_path / "app" / "page.py"
    code.parent.mkdir()
    code.write_text('label(tr("New chat"))\ntr_n("{n} chat", "{n} chats", 2)\n')
    monkeypatch.setattr(languages, "ROOT", tmp_path)
    monkeypatch.setattr(languages, "engine_texts", lambda: ())
    monkeypatch.setattr(languages, "load_texts", lambda: ())
    monkeypatch.setattr(languages, "templates", dict)
    path = tmp_path / "de.po"
    languages.update(path)
    return path


def translate(path: Path, text: str, german: str) -> None:
    """Write a translation into a catalog, as a person does."""
    old = f'msgid "{text}"\nmsgstr ""'
    assert old in path.read_text("utf-8")
    path.write_text(path.read_text("utf-8").replace(old, f'msgid "{text}"\nmsgstr "{german}"'))
    languages.update(path)


def named(paths: list[Path], find: object) -> str:
    """Return what a rule finds in files, one below the other."""
    assert callable(find)
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in find(path)]
    return "\n  ".join(["", *found]) if found else ""


@pytest.mark.parametrize("path", catalogs().values(), ids=catalogs())
def test_a_catalog_holds_exactly_the_texts_of_the_code_all_translated(path: Path) -> None:
    found = "\n  ".join(problems(path))
    help_ = f"run `{UPDATE}`, translate what is empty in {path.relative_to(ROOT)}, run it again"
    assert not found, f"{help_}:\n  {found}"


def german_slips(english: str, german: str) -> list[str]:
    """Return what does not follow the rules at the head of the German catalog."""
    rules = {
        "addresses people with du": bool(DU.search(german)),
        "ends otherwise": english[-1] in ENDS and german[-1] != english[-1],
        "has a gap before …": german.endswith(" …") and not english.endswith(" …"),
        "has English quotes": "“" in english and "„" not in german,
        "has English keys": "Ctrl" in german,
    }
    return [f"{rule}: {german!r}" for rule, is_broken in rules.items() if is_broken]


def test_german_follows_its_rules() -> None:
    catalog = languages.read_catalog(languages.FOLDER / "de.po")
    found = []
    for message in catalog:
        if message.id and message.id != PROMPT:
            pairs = zip(languages.texts(message), languages.translations(message), strict=True)
            found += [slip for english, german in pairs for slip in german_slips(english, german)]
    assert not found, "\n  ".join(["German texts against the rules in de.po:", *found])


def test_slips_in_german_are_found() -> None:
    assert len(german_slips("Open “{name}” (Ctrl+O).", 'Öffne "{name}" (Ctrl+O)')) == 4
    assert german_slips("Open “{name}” (Ctrl+O).", "„{name}“ öffnen (Strg+O).") == []


def test_an_installed_tandem_has_the_catalogs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = project["tool"]["setuptools"]
    assert packages["package-data"]["resources"] == ["**/*"]
    assert not any("lang" in name for name in packages["exclude-package-data"]["resources"])
    for path in catalogs().values():
        assert path.with_suffix(".mo").is_file(), f"run `{UPDATE}`"


def test_only_texts_that_a_catalog_can_hold_are_looked_up() -> None:
    found = named(sources(), bad_lookups)
    assert not found, f'look up one whole text, tr("{{n}} files").format(n=n):{found}'


def test_what_the_window_shows_is_looked_up() -> None:
    found = named(sources(), forgotten_texts)
    assert not found, f"texts without tr():{found}"


def test_sentences_of_the_engine_are_templates() -> None:
    found = "\n  ".join(finished_sentences())
    assert not found, f'write EngineError("{{path}} cannot be read.", path=path):\n  {found}'


def test_the_window_can_speak_german() -> None:
    assert "de" in translation.languages()


def test_an_update_keeps_translations_and_drops_old_texts(german: Path) -> None:
    translate(german, "New chat", "Neuer Chat")
    code = german.parent / "app" / "page.py"
    code.write_text('label(tr("New chat"))\nlabel(tr("Quit"))\n')
    languages.update(german)
    catalog = languages.read_catalog(german)
    assert {m.id: m.string for m in catalog if m.id} == {"New chat": "Neuer Chat", "Quit": ""}
    assert problems(german) == ["not translated: 'Quit'"]


def test_faults_of_a_catalog_are_found(german: Path) -> None:
    code = german.parent / "app" / "page.py"
    code.write_text('tr("{n} of {total} files")\ntr("Quit")\n')
    assert problems(german)[:2] == ["missing: 'Quit'", "missing: '{n} of {total} files'"]
    assert "not in the code: 'New chat'" in problems(german)
    languages.update(german)
    translate(german, "Quit", "Ende")
    translate(german, "{n} of {total} files", "{n} von {gesamt} Dateien")
    assert len(problems(german)) == 1
    assert "other placeholders" in problems(german)[0]


def test_a_translation_that_was_pasted_twice_is_found(german: Path) -> None:
    (german.parent / "app" / "page.py").write_text('tr("Quit")\n')
    languages.update(german)
    translate(german, "Quit", "Programm beenden.Programm beenden.")
    assert problems(german) == ["says something twice: 'Quit'"]


def test_a_catalog_that_is_not_compiled_is_found(german: Path) -> None:
    translate(german, "New chat", "Neuer Chat")
    german.with_suffix(".mo").write_bytes(languages.compiled(Catalog(locale="de")))
    assert "de.mo is not what de.po compiles to" in problems(german)


@pytest.mark.parametrize(
    "line",
    [
        'label("Open")', 'label(f"{n} files are open")', 'field.setAccessibleName("name")',
        'what = "Nothing is loaded."', 'say("Select a model")', 'return f"{n} devices"',
        'return "1 device"', 'TITLES = {"a": "Chats"}', 'Notice(text=why, hint="Quit")',
        'button(tr("Open"), "quiet", "open it")', 'label("on" if on else tr("off"))',
    ],
)  # fmt: skip
def test_a_forgotten_text_is_found(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.helpers.shown_texts.ROOT", tmp_path)
    (tmp_path / "page.py").write_text(line)
    assert len(forgotten_texts(tmp_path / "page.py")) == 1


@pytest.mark.parametrize(
    "line",
    [
        'label(tr("Open"))', 'label(text, "muted")', 'log.info("a file is open")', 'label("12 ×")',
        'raise ValueError("no such file")', '"""The page of a chat."""', 'set_role(view, "warn")',
        'label(tr("{n} files").format(n=f"{n:.0f} MiB"))', 'self.setObjectName("Chat list")',
    ],
)  # fmt: skip
def test_what_nobody_reads_need_not_be_looked_up(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.helpers.shown_texts.ROOT", tmp_path)
    (tmp_path / "page.py").write_text(line)
    assert forgotten_texts(tmp_path / "page.py") == []


@pytest.mark.parametrize(
    "line", ['tr(f"{n} files")', 'tr("a" + b)', 'tr("{n}".format(n=1))', "tr_n(one, many, 2)"]
)
def test_a_text_that_is_made_before_it_is_looked_up_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(line)
    assert len(bad_lookups(tmp_path / "page.py")) == (2 if "many" in line else 1)
