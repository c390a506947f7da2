"""README and docs: their commands work, and their links and paths lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from app.__main__ import main

ROOT = Path(__file__).parents[1]
DOCS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES = [*DOCS, "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]

SET_UP = ("pip install . && tandem --demo", 'pip install -e ".[dev]" && python -m pytest')
"""The two commands of the README that install; `.ci/run` runs the second one."""

BLOCK = re.compile(
    r"(<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL
)
"""A block of code, and the reason why no test runs it."""


def blocks(language: str, pages: list[str]) -> list[str]:
    """Return the blocks of code to run."""
    found = [one for page in pages for one in BLOCK.finditer((ROOT / page).read_text("utf-8"))]
    return [one["code"] for one in found if one["language"] == language and not one["why"]]


def commands() -> list[list[str]]:
    """Return all commands but those that install, split into words."""
    lines = [
        line for block in blocks("sh", DOCS) for line in block.splitlines() if line not in SET_UP
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_readme_has_the_main_commands_and_two_that_set_up() -> None:
    assert {words[1] for words in commands()} >= {"devices", "inspect", "plan", "generate", "tune"}
    text = (ROOT / "README.md").read_text("utf-8")
    assert [f"```sh\n{line}\n```" in text for line in SET_UP] == [True, True]
    assert len(text.splitlines()) <= 130


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_documents_works(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert words[0] == "tandem", "run it here, or say why not: <!-- not run: … -->"
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip()


def test_the_python_page_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = next((ROOT / "resources" / "demo").glob("*.gguf"))
    (code,) = blocks("python", ["docs/python.md"])
    here = {"model.gguf": str(demo), "cuda:0": "cpu", "cuda:1": "cpu", "4096": "512"}
    for written, name in here.items():
        assert written in code
        code = code.replace(written, name)
    exec(code, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text("utf-8"))
    here = [target for target in targets if not target.startswith("https://")]
    assert [target for target in here if not (folder / target).exists()] == []


@pytest.mark.parametrize("folder", ["app", "engine"])
def test_the_architecture_lists_all_rooms(folder: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    table = text.partition(f"| `{folder}/` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)(?:/|\.py)`", row)}
    modules = {path.stem for path in (ROOT / folder).glob("*.py")}
    packages = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    assert packages <= named
    assert named <= packages | modules


PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_]+(?:\.py)?/?)`")


PATHS = ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/how-a-layer-runs.md"]


@pytest.mark.parametrize("page", PATHS)
def test_paths_lead_somewhere(page: str) -> None:
    """They are relative to the repository or to `engine/`."""
    paths = set(PATH.findall((ROOT / page).read_text("utf-8")))
    roots = ROOT, ROOT / "engine", ROOT / "engine" / "model", ROOT / "engine" / "backends" / "cpu"
    assert [one for one in sorted(paths) if not any((root / one).exists() for root in roots)] == []
