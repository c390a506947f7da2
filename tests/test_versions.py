"""Versions of Python and Triton that pyproject.toml allows are those that CI tries."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).parents[1]


@pytest.fixture
def tritons() -> list[Requirement]:
    """Return what the extras ask for of Triton, for Linux and for Windows."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = [Requirement(line) for line in (*extras["gpu"], *extras["dev"]) if "triton" in line]
    assert {one.name for one in found} == {"triton", "triton-windows"}
    return found


def test_all_systems_have_the_same_tritons(tritons: list[Requirement]) -> None:
    assert len({str(one.specifier) for one in tritons}) == 1


def test_ci_compiles_with_the_oldest_triton(tritons: list[Requirement]) -> None:
    (tried,) = re.findall(r"triton==([\d.]+)", (REPO / ".ci" / "run").read_text(encoding="utf-8"))
    lowest = next(bound for bound in tritons[0].specifier if bound.operator == ">=")
    assert tried == f"{lowest.version}.0"


def test_this_python_is_one_that_the_package_names() -> None:
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named
