"""Promises of the README: they work as written."""

import re
import shlex
from pathlib import Path

import pytest

from app.__main__ import main

README = Path(__file__).parents[1] / "README.md"

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


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README.read_text("utf-8")))
def test_a_link_of_the_readme_leads_somewhere(target: str) -> None:
    assert target.startswith("https://") or (README.parent / target).exists()
