"""Use of one-shot all-reduces, which ends where kernels of ranks wait for each other in vain."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.backends.gpu.decode.rank_capture import OneShotControl

log = logging.getLogger(__name__)


class KernelMeetings(NamedTuple):
    """Whether kernels of a model's ranks meet, in one-shot all-reduces.

    Attributes:
        some: whether any do.
        wait: whether they wait for each other, as on cards. Then passes of a size are computed once
            before without waiting, see `ModelRunner.rehearse`.
    """

    some: bool
    wait: bool


class OneShotUse:
    """The one-shot all-reduces of a model's ranks, while they are in use.

    Args:
        has_gpus: whether ranks compute on GPUs.

    Attributes:
        control: the all-reduces; None if there are none, or retired.
    """

    def __init__(self, control: OneShotControl | None, *, has_gpus: bool = False) -> None:
        self.control = control
        self._has_gpus = has_gpus
        self._has_tried_again = False
        self._of_machines: KernelMeetings | None = None
        self._agreed: Callable[[str], str] | None = None

    @property
    def here(self) -> KernelMeetings:
        """Meetings of this machine's ranks."""
        return KernelMeetings(self.control is not None, self.control is not None and self._has_gpus)

    @property
    def meetings(self) -> KernelMeetings:
        """Meetings of all machines' ranks, the same on all machines."""
        return self.here if self._of_machines is None else self._of_machines

    def join(self, meetings: KernelMeetings, agreed: Callable[[str], str]) -> None:
        """Do as other machines do from now on, whose ranks take part in each pass.

        Args:
            meetings: meetings of all machines' ranks.
            agreed: tells all machines what is wrong here, "" if nothing is; returns what is wrong
                on the first machine where anything is.
        """
        self._of_machines, self._agreed = meetings, agreed

    def agreed(self, problem: str) -> str:
        """Return what is wrong on the first machine where anything is; called on all of them."""
        return problem if self._agreed is None else self._agreed(problem)

    def without_waiting(self) -> AbstractContextManager[object]:
        """Return a context in which no kernel waits for another rank."""
        return nullcontext() if self.control is None else self.control.without_waiting()

    def may_try_again(self, why: str) -> bool:
        """Return whether to repeat what failed because kernels of ranks meet, or might have.

        The first time it is repeated as it was: what had to be allocated or loaded is there by
        then. The second time one-shot all-reduces are retired.
        """
        if not self.meetings.some:
            return False
        if self._has_tried_again:
            self._retire(why)
            return True
        log.info("kernels of the ranks meet once more: %s", why)
        self._has_tried_again = True
        return True

    def _retire(self, why: str) -> None:
        """Let ranks use other collectives, on all machines."""
        if self.control is not None:
            self.control.retire(why)
            self.control = None
        if self._of_machines is not None:
            self._of_machines = KernelMeetings(some=False, wait=False)

    def note_success(self) -> None:
        """Note that kernels have met: the next failure is a first one again."""
        self._has_tried_again = False
