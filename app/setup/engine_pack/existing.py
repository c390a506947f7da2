"""Uses an existing Python environment that has torch, instead of a pack."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from app.core.translation import tr
from app.setup.engine_pack import activation
from app.setup.engine_pack.children.environment_facts import NAMES
from app.setup.engine_pack.children.running import run_child
from app.setup.engine_pack.installation import Installed, Tried, try_pack
from app.setup.engine_pack.lock import this_python
from app.setup.engine_pack.store import Pack, PackStore, disk_error
from engine import EngineError, one_line, temporary_folder

LIMIT_S = 60.0
BACKEND = "environment"
PACKAGE = "tandem-llm"
REQUIREMENT = re.compile(r"([\w-]+)\s*((?:[<>]=?[\d.]+,?)+)")
BOUND = re.compile(r"(>=|<)([\d.]+)")
NUMBERS = re.compile(r"\d+(\.\d+)*")
FACTS = Path(__file__).with_name("children") / "environment_facts.py"


def find_python(place: Path) -> Path:
    """Return the Python executable at a path, or in the environment in a folder.

    Raises:
        EngineError: there is no Python executable.
    """
    names = ("Scripts/python.exe", "python.exe", "bin/python3", "bin/python")
    for path in (place, *(place / name for name in names)):
        if path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    raise EngineError(
        tr("There is no Python in {place}.").format(place=place),
        tr("Choose a Python executable, or the folder of a virtual environment."),
    )


def use_environment(
    place: Path,
    store: PackStore | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    attempt: Callable[..., Tried] = try_pack,
) -> Installed:
    """Test an existing Python environment and use it from now on.

    Args:
        place: the environment's folder or Python executable.

    Raises:
        Cancelled: `is_stopped` returned True.
        EngineError: the environment cannot be used; the current engine stays in use.
    """
    store = store or PackStore()
    python = find_python(place)
    facts = _facts(python, is_stopped)
    _check(python, facts)
    folders = tuple(str(folder) for folder in facts["folders"])
    with store.locked():
        tried = attempt(folders, is_stopped, writes_bytecode=False)
        pack = Pack(
            name="", backend=BACKEND, version=str(facts["versions"]["torch"]),
            python=this_python(), folders=folders, source=str(python),
        )  # fmt: skip
        try:
            with temporary_folder(store.folder) as work:
                made = work / "pack"
                made.mkdir()
                installed = Installed(store.adopt(made, pack), tried.gpu_problem)
        except OSError as error:
            raise disk_error(store.folder, error) from None
    activation.activate()
    return installed


def _facts(python: Path, is_stopped: Callable[[], bool]) -> dict[str, Any]:
    """Run `environment_facts` and return its output.

    Raises:
        EngineError: the program cannot be started or its output is invalid.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    try:
        ended = run_child((str(python), str(FACTS)), environment, LIMIT_S, is_stopped)
        facts = json.loads(ended.output.splitlines()[-1]) if ended.output.strip() else None
        if ended.status == 0 and isinstance(facts, dict):
            return facts
        why = ended.last_line
    except (OSError, ValueError) as error:
        why = str(error)
    raise EngineError(
        tr("{python} is not a working Python: {why}.").format(
            python=python, why=one_line(why, 200).rstrip(".")
        )
    )


def _check(python: Path, facts: dict[str, Any]) -> None:
    is_same = (facts["python"], facts["kind"]) == (this_python(), sys.implementation.name)
    if not is_same or not facts["is_64_bit"]:
        raise EngineError(
            tr("{python} is {kind} {version}, but Tandem needs {own}.").format(
                python=python, kind=one_line(str(facts["kind"]), 40),
                version=one_line(str(facts["python"]), 20),
                own=f"{sys.implementation.name} {this_python()}",
            ),
            tr("Create an environment with that version."),
        )  # fmt: skip
    _check_versions(python, facts["versions"])


def _check_versions(python: Path, versions: Mapping[str, str]) -> None:
    """Check that an environment has supported versions of the engine's dependencies.

    Raises:
        EngineError: a dependency is missing or has an unsupported version.
    """
    missing = [name for name, version in versions.items() if not version]
    if missing:
        raise EngineError(
            tr("{python} lacks {names}.").format(python=python, names=", ".join(missing)),
            tr("Install them there: pip install {names}").format(names=" ".join(missing)),
        )
    wrong = [
        f"{name} {one_line(version, 40)}" for name, version in versions.items()
        if not is_within(version, _bounds().get(name, ""))
    ]  # fmt: skip
    if wrong:
        required = " ".join(f'"{name}{bounds}"' for name, bounds in sorted(_bounds().items()))
        raise EngineError(
            tr("{python} has {names}, which Tandem does not support.").format(
                python=python, names=", ".join(wrong)
            ),
            tr("Install them there: pip install {names}").format(names=required),
        )


def is_within(version: str, bounds: str) -> bool:
    """Return whether a version is within bounds such as ">=2.11,<3"; True if unclear."""
    own = _numbers(version)
    for bound in bounds.split(","):
        match = BOUND.fullmatch(bound.strip())
        if match and own:
            limit = _numbers(match[2])
            if own < limit if match[1] == ">=" else own >= limit:
                return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = NUMBERS.match(version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _bounds() -> dict[str, str]:
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return {}
    matches = (REQUIREMENT.match(line) for line in lines)
    bounds = {match[1]: match[2] for match in matches if match}
    return {name: bounds[name] for name in NAMES if name in bounds}
