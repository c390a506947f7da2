"""Keeps the catalogs of the window's languages as the code has its texts.

    python -m tests.helpers.languages update   # new texts into resources/languages/*.po
    python -m tests.helpers.languages check    # lists what is missing or wrong

`update` keeps what is translated, drops texts that are gone, and compiles each catalog for the
window (`.mo`). New texts are empty in the `.po` file, and English in the window, until somebody
translates them there and runs `update` again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

from babel.messages.catalog import Catalog, Message
from babel.messages.extract import extract_from_file
from babel.messages.mofile import read_mo, write_mo
from babel.messages.pofile import read_po, write_po

from engine import SHARED_LOAD_OPTIONS, SamplingParams
from tests.helpers.templates import templates

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "resources" / "languages"
UPDATE = "python -m tests.helpers.languages update"

NOT_IN_WINDOW = (
    "app/cli", "app/__main__.py", "app/core/process/environment.py",
    "app/core/process/environment.py", "app/setup/engine_pack/children", "app/core/translation.py",
    "app/server", "app/core/engine_client/inbox.py",
)  # fmt: skip
"""Files and folders that show nothing in the window; what terminals and clients get is English."""

_WITH_CONTEXT = {1: (1,), 2: ((2, "c"), 1)}
KEYWORDS = {"tr": _WITH_CONTEXT, "tr_later": _WITH_CONTEXT, "tr_n": (1, 2)}
"""Functions of `app.core.translation`, and which of their arguments are texts."""

MADE = datetime(2026, 1, 1, tzinfo=UTC)
"""Date in all catalogs, so that they change with their texts alone."""

HEAD = """\
msgid ""
msgstr ""
"Language: {code}\\n"
"Content-Type: text/plain; charset=utf-8\\n"
"Plural-Forms: {plural}\\n"

"""


def sources() -> list[Path]:
    """Return the files of the app that show texts in the window."""
    files = sorted((ROOT / "app").rglob("*.py"))
    return [path for path in files if not _is_of_terminal(path)]


def _is_of_terminal(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()
    return name.startswith(NOT_IN_WINDOW) and not name.startswith("app/server/page")


def template() -> Catalog:
    """Return the catalog of all English texts, none of them translated."""
    made = Catalog(charset="utf-8")
    for path in sources():
        for _, text, _, context in extract_from_file("python", path, keywords=KEYWORDS):
            made.add(text, locations=[(path.relative_to(ROOT).as_posix(), 0)], context=context)
    for text in engine_texts():
        made.add(text, locations=[("engine/sampling_params.py", 0)])
    for text, path in templates().items():
        made.add(text, locations=[(path, 0)])
    for text in load_texts():
        made.add(text, locations=[("engine/load_params.py", 0)])
    return made


def engine_texts() -> Iterator[str]:
    """Yield the names, explanations and choices that the engine gives its sampling parameters."""
    for spec in fields(SamplingParams):
        yield from (choice.capitalize() for choice in spec.metadata.get("choices", ()))
        yield from (
            spec.metadata[key] for key in ("title", "help", "lowest") if spec.metadata.get(key)
        )


def load_texts() -> Iterator[str]:
    """Yield the texts that the engine gives its options of a load."""
    for option in SHARED_LOAD_OPTIONS.values():
        yield from filter(None, (option.title, option.tip, option.suffix, option.lowest))


def catalogs() -> dict[str, Path]:
    """Return the file of each language that the window has beside English, by its code."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.po"))}


def read_catalog(path: Path) -> Catalog:
    """Return a catalog as people write it."""
    with path.open("rb") as file:
        return read_po(file, locale=path.stem, abort_invalid=True)


def update(path: Path) -> None:
    """Bring a catalog to the texts of the code, and compile it."""
    old = read_catalog(path) if path.is_file() else Catalog(locale=path.stem, header_comment="#")
    new = Catalog(locale=path.stem, charset="utf-8", header_comment=old.header_comment)
    for message in template():
        if message.id:
            former = old.get(message.id, message.context)
            string = former.string if former else ""
            new.add(message.id, string, locations=message.locations, context=message.context)
    body = BytesIO()
    write_po(body, new, width=100, omit_header=True, include_lineno=False, sort_by_file=True)
    head = HEAD.format(code=path.stem, plural=new.plural_forms)
    path.write_bytes(f"{new.header_comment}\n{head}".encode() + body.getvalue())
    path.with_suffix(".mo").write_bytes(compiled(read_catalog(path)))


def compiled(catalog: Catalog) -> bytes:
    """Return a catalog in the form that the window reads."""
    catalog.creation_date = catalog.revision_date = MADE
    file = BytesIO()
    write_mo(file, catalog)
    return file.getvalue()


def key_of(message: Message) -> tuple[str, ...]:
    """Return context ("" for none) and English texts of a message."""
    context = message.context or ""  # bytes from `read_mo`
    return (context.decode() if isinstance(context, bytes) else context, *texts(message))


def texts(message: Message) -> list[str]:
    """Return the English texts of a message: one, or two with a plural."""
    return [message.id] if isinstance(message.id, str) else list(message.id)


def translations(message: Message) -> list[str]:
    """Return the translated texts of a message: one, or one for each form of the plural."""
    return [message.string] if isinstance(message.string, str) else list(message.string)


def placeholders(text: str) -> set[str]:
    """Return the names in braces."""
    return set(re.findall(r"\{(\w*)[^{}]*\}", text))


def problems(path: Path) -> list[str]:
    """Return what is wrong with a catalog: a line for each fault, [] if there is none."""
    catalog, wanted = read_catalog(path), {key_of(m) for m in template() if m.id}
    messages = {key_of(m): m for m in catalog if m.id}
    found = [f"missing: {key[1]!r}" for key in sorted(wanted - messages.keys())]
    found += [f"not in the code: {key[1]!r}" for key in sorted(messages.keys() - wanted)]
    for message in messages.values():
        found += _faults(message)
    found += [f"obsolete: {key!r}" for key in catalog.obsolete]
    with path.with_suffix(".mo").open("rb") as file:
        if _strings(read_mo(file)) != _strings(catalog):
            found.append(f"{path.stem}.mo is not what {path.name} compiles to")
    return found


def _faults(message: Message) -> Iterator[str]:
    name = repr(texts(message)[0])
    if message.fuzzy:
        yield f"fuzzy: {name}"
    if not all(translations(message)):
        yield f"not translated: {name}"
        return
    english = set().union(*map(placeholders, texts(message)))
    for text in translations(message):
        is_plural = len(texts(message)) > 1  # "one chat" may leave out its {n}
        given = placeholders(text) | (english & {"n"} if is_plural else set())
        if given != english:
            yield f"other placeholders: {name}: {text!r}"
        if re.search(r"(.{12,})\1", text):
            yield f"says something twice: {name}"


def _strings(catalog: Catalog) -> dict[tuple[str, ...], list[str]]:
    return {key_of(m): translations(m) for m in catalog if m.id and all(translations(m))}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("do", choices=("update", "check"))
    parser.add_argument("--new", metavar="CODE", help="begin a language, such as fr")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    files = [*catalogs().values(), *([FOLDER / f"{args.new}.po"] if args.new else [])]
    if args.do == "update":
        for path in files:
            update(path)
    found = [f"{path.name}: {line}" for path in files for line in problems(path)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
