"""Host-side collectives in a captured token: each one splits the capture into graph segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engine.backends.gpu.launch.graph import host_step_value

if TYPE_CHECKING:
    from engine.model.forward.communicator import Communicator, Group
    from engine.model.forward.ops import FusedAllReduce


class HostCollectives:
    """A communicator whose collectives become host steps between the graphs of a captured token.

    Args:
        inner: makes the collectives; see `engine.backends.gpu.launch.graph.host_step`.
    """

    def __init__(self, inner: Communicator) -> None:
        self.rank = inner.rank
        self._inner = inner

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        return _given(group, lambda: self._inner.all_reduce(x, group, shape))

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        if len(group) == 1:
            return self._inner.gather(x, group, alike)
        return host_step_value(lambda: self._inner.gather(x, group, alike))

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        return self._inner.one_shot(group, n)

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        return _given(group, lambda: self._inner.broadcast(x, source, group, shape))


def _given(group: Group, collective: Callable[[], Tensor]) -> Tensor:
    """Return the value of a collective that gives every member one; a group of one never splits."""
    if len(group) == 1:
        return collective()
    found = host_step_value(collective)
    assert found is not None, "all members of a group get a value"
    return found
