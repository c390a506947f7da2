"""Progress of an installation, as the window and the command line show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


class InstallStage(Enum):
    """Stages of an installation, in their order."""

    FETCHING = auto()
    CHECKING = auto()
    UNPACKING = auto()
    TRYING = auto()


@dataclass(frozen=True, slots=True)
class InstallProgress:
    """How far an installation is.

    Attributes:
        stage: what it is doing; `InstallStage.TRYING` has no numbers.
        n_done: bytes of this stage that are done.
        n_bytes: bytes of this stage; 0 where they are unknown.
        name: file that it is busy with, "" for none.
    """

    stage: InstallStage
    n_done: int = 0
    n_bytes: int = 0
    name: str = ""


Told = Callable[[InstallProgress], None]
IsStopped = Callable[[], bool]
