"""The largest memory of another process while something runs."""

import threading
from types import TracebackType

import psutil


class PeakMemory:
    """A thread that looks at the memory of this process's children inside a `with` block.

    Attributes:
        peak_bytes: largest resident size of any child that was seen.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._is_done.set()
        self._thread.join()

    def _look(self) -> None:
        me = psutil.Process()
        while not self._is_done.wait(0.005):
            for child in me.children():
                try:
                    self.peak_bytes = max(self.peak_bytes, child.memory_info().rss)
                except psutil.Error:
                    continue
