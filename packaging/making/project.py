"""The project as packages see it: its files, its version, and the time that stands in archives."""

from __future__ import annotations

import os
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINUX = ROOT / "packaging" / "linux"


@dataclass(frozen=True, slots=True)
class Project:
    """What is packaged.

    Attributes:
        version: version in pyproject.toml, the only place that has one.
        epoch: seconds since 1970 that every packed file bears, so that the same commit gives the
            same bytes: the time of the commit.
        effort: how hard archives are compressed, 0 to 9.
    """

    version: str
    epoch: int
    effort: int = 6

    @classmethod
    def read(cls, effort: int = 6) -> Project:
        """Read pyproject.toml and the commit's time."""
        with (ROOT / "pyproject.toml").open("rb") as file:
            version = tomllib.load(file)["project"]["version"]
        epoch = os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct")
        return cls(version, int(epoch), effort)


def output(*command: str) -> str:
    """Run a command in the project's folder and return what it prints.

    Raises:
        SystemExit: it fails; its own message is shown.
    """
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} has failed with status {done.returncode}.")
    return done.stdout.strip()
