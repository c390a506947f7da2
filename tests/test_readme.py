"""Promises of the README: they work as written."""

import re
import shlex
from pathlib import Path

import pytest

from app.__main__ import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

ENDLESS = ("chat", "serve")
"""Subcommands that go on until somebody ends them."""


def commands() -> list[list[str]]:
    """Every `tandem …` line that ends by itself."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [line[1:] for line in lines if line[:1] == ["tandem"] and line[1] not in ENDLESS]


def test_the_readme_shows_the_main_commands() -> None:
    assert {line[0] for line in commands()} >= {"devices", "inspect", "plan", "generate"}


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_a_command_of_the_readme_works(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    monkeypatch.chdir(README.parent)
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip()


PAGES = "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/how-a-layer-runs.md"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text("utf-8"))
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


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/how-a-layer-runs.md"])
def test_paths_lead_somewhere(page: str) -> None:
    """They are relative to the repository or to `engine/`."""
    paths = set(PATH.findall((ROOT / page).read_text("utf-8")))
    roots = ROOT, ROOT / "engine", ROOT / "engine" / "model", ROOT / "engine" / "backends" / "cpu"
    assert [one for one in sorted(paths) if not any((root / one).exists() for root in roots)] == []
