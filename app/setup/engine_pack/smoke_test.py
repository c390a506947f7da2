"""Trial of a pack in a child process: the bundled model has to answer with its libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import engine
from app.core.translation import tr
from app.setup.engine_pack.children.running import run_child
from engine import EngineError, one_line

LIMIT_S = 300.0
"""Longest wait in seconds; a disk that is read for the first time takes most of it."""

BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Environment variable that keeps Python from writing what it compiles."""

MODULE = "app.setup.engine_pack.children.smoke_program"


class PackFails(EngineError):
    """Error of a pack with which the engine does not answer."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Facts of a pack that has answered.

    Attributes:
        version: version of PyTorch.
        gpu_problem: sentence that says why no GPU can be used with it, else "".
    """

    version: str
    gpu_problem: str


def try_pack(
    folders: Sequence[str],
    is_stopped: Callable[[], bool] = lambda: False,
    command: Sequence[str] | None = None,
    *,
    writes_bytecode: bool = True,
) -> Tried:
    """Have a child process answer with the libraries in some folders.

    Args:
        command: what to run in place of this module.
        writes_bytecode: whether it keeps what Python compiles beside the libraries, whose import
            takes half as long from then on.

    Raises:
        Cancelled: `is_stopped`.
        PackFails: it does not answer.
    """
    variables = {"TANDEM_ENGINE_PACK": os.pathsep.join(folders)}
    environment = engine.child_environment(variables) | {BYTECODE: "1"}
    if writes_bytecode:
        del environment[BYTECODE]
    try:
        ended = run_child(
            command or engine.program_command(MODULE), environment, LIMIT_S, is_stopped
        )
    except OSError as error:
        raise _failure(error.strerror or str(error)) from None
    if ended.status is None:
        raise _failure(tr("it took more than {n} minutes").format(n=f"{LIMIT_S / 60:g}"))
    try:
        answer = json.loads(ended.output.splitlines()[-1])
        if ended.status == 0 and answer["n_tokens"] > 0:
            return Tried(str(answer["version"]), str(answer["gpu_problem"]))
    except (ValueError, IndexError, KeyError, TypeError):
        pass
    raise _failure(ended.last_line or tr("status {status}").format(status=ended.status))


def _failure(why: str) -> PackFails:
    return PackFails(
        tr("The new engine does not answer: {why}.").format(why=one_line(why, 300).rstrip(".")),
        tr("It is not used."),
    )
