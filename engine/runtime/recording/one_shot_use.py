"""Use of one-shot all-reduces, which ends where kernels of ranks wait for each other in vain."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.gpu.decode.rank_capture import OneShotControl

log = logging.getLogger(__name__)


class OneShotUse:
    """The one-shot all-reduces of a model's ranks, while they are in use.

    Attributes:
        control: the all-reduces; None if there are none, or retired.
    """

    def __init__(self, control: OneShotControl | None) -> None:
        self.control = control
        self._has_tried_again = False

    def may_try_again(self, why: str) -> bool:
        """Return whether to repeat what failed because kernels of ranks meet, or might have.

        The first time it is repeated as it was: what had to be allocated or loaded is there by
        then. The second time one-shot all-reduces are retired.
        """
        if self.control is None:
            return False
        if self._has_tried_again:
            self.control.retire(why)
            self.control = None
            return True
        log.info("kernels of the ranks meet once more: %s", why)
        self._has_tried_again = True
        return True

    def note_success(self) -> None:
        """Note that kernels have met: the next failure is a first one again."""
        self._has_tried_again = False
