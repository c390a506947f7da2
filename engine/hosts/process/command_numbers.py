"""Numbers of commands that one host passes on to another one, which numbers them anew."""

from __future__ import annotations

from bisect import bisect_right


class CommandNumbers:
    """Numbers of commands of whoever submits them, such as the window, and a host's own ones.

    The host's count from 1 without a gap.

    Both only rise, so what is kept does not grow with the commands, only with the gaps between the
    window's numbers: commands of earlier processes, and those that could not be sent.
    """

    def __init__(self) -> None:
        self._n = 0
        self._own, self._windows = [0], [0]  # the first numbers of each run without a gap

    def add(self, window: int) -> None:
        """Note the window's number of the command that the host gets next."""
        if window - self._n - 1 != self._windows[-1] - self._own[-1]:
            self._windows.append(window)  # first, as another thread finds it by the host's
            self._own.append(self._n + 1)
        self._n += 1

    def of_window(self, own: int) -> int:
        """Return the window's number of a command of the host; 0 for none's."""
        at = bisect_right(self._own, own) - 1
        return self._windows[at] + own - self._own[at]

    def of_host(self, window: int) -> int:
        """Return the host's number of a command of the window; 0 for one that it never got."""
        at = bisect_right(self._windows, window) - 1
        own = self._own[at] + window - self._windows[at]
        end = self._own[at + 1] if at + 1 < len(self._own) else self._n + 1
        return own if own < end else 0
