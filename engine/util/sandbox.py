"""A child process that answers each line with a line, and is killed if it exceeds its limits.

It is for untrusted input, such as templates, formulas and documents: no request can hang this
process or exhaust the machine's memory.
"""

from __future__ import annotations

import _thread
import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import psutil

from engine.errors import Sentence
from engine.util.child_program import OUT_OF_MEMORY, PIPE_BUFFER
from engine.util.pack import VARIABLE
from engine.util.programs import NO_WINDOW, child_environment, tie_child
from engine.util.progress import IsCancelled, never

LOOK_S = 0.01
"""Interval between checks of the child's memory, in seconds."""


class Excess(Enum):
    """Reasons for killing a process: exceeded limits, or a cancelled request."""

    TIME = auto()
    MEMORY = auto()
    CANCELLED = auto()


class ChildEnded(Exception):
    """Exit of a child without an answer: why it was killed, if it was, and its exit status."""

    def __init__(self, excess: Excess | None, status: int | None) -> None:
        super().__init__(f"excess {excess}, status {status}")
        self.excess = excess
        self.status = status

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the child exceeded its memory limit."""
        return self.excess is Excess.MEMORY or self.status == OUT_OF_MEMORY


class LimitedChild:
    """A process that answers one request after another, from one thread at a time.

    Its first line says that it is ready. Its error output is discarded. It exits when its standard
    input is closed, and therefore with this process.

    Args:
        start_s: seconds within which it must be ready.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, command: Sequence[str], max_bytes: int, start_s: float = 20.0) -> None:
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=_environment(), creationflags=NO_WINDOW, bufsize=PIPE_BUFFER,
        )  # fmt: skip
        tie_child(self.pid)
        self._max_bytes, self._start_s = max_bytes, start_s
        self._is_ready = False

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def wait_until_ready(self, is_cancelled: IsCancelled = never) -> None:
        """Wait until the child has finished its imports.

        Raises:
            OSError: the child exits or stays silent instead.
            ChildEnded: `is_cancelled` returned True.
        """
        if self._is_ready:
            return
        line, excess = self._exchange(b"", self._start_s, is_cancelled)
        if excess is Excess.CANCELLED:
            raise ChildEnded(excess, self._status())
        if excess:
            message = Sentence(
                "it took more than {n:g} s or {size} MiB",
                n=self._start_s,
                size=self._max_bytes >> 20,
            )
            raise OSError(0, message)  # `strerror` keeps the template
        if not line:
            raise OSError(0, Sentence("it exited with status {status}", status=str(self._status())))
        self._is_ready = True

    def ask(
        self, request: bytes, seconds: float, is_cancelled: IsCancelled = never
    ) -> dict[str, Any]:
        """Return the answer, a line of JSON, to a request.

        Args:
            is_cancelled: polled on another thread; returning True kills the child.

        Raises:
            ChildEnded: there is no answer, and the child has exited or is about to.
        """
        line, excess = self._exchange(request, seconds, is_cancelled)
        if excess or not line.endswith(b"\n"):
            raise ChildEnded(excess, self._status())
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def kill(self) -> None:
        """Kill the process. Thread-safe."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and close its pipes."""
        self.kill()
        self._status()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()

    def _exchange(
        self, request: bytes, seconds: float, is_cancelled: IsCancelled
    ) -> tuple[bytes, Excess | None]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = b""
        watch = AnswerWatch(self._process, seconds, self._max_bytes, is_cancelled)
        with watch, suppress(OSError):
            stdin.write(request)
            stdin.flush()
            line = stdout.readline()
        return line, watch.excess

    def _status(self) -> int | None:
        # None if the process takes long to exit
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(5)
        return None


class AnswerWatch:
    """A thread that kills a process if the `with` block exceeds its time or memory.

    Read timeouts would not suffice, because a stopped process does not read either, and pipes have
    no timeouts on Windows. The thread is started without waiting for it: if there is no memory for
    its first step, it exits silently, and `threading.Thread.start` would wait forever. The process
    then exits on its own later; see `engine.util.child_program`.

    Args:
        is_cancelled: returning True also kills the process.

    Attributes:
        excess: why the process was killed, or None; final after the block.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], seconds: float, max_bytes: int,
        is_cancelled: IsCancelled = never,
    ) -> None:  # fmt: skip
        self.excess: Excess | None = None
        self._process = process
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._is_cancelled = is_cancelled
        self._is_done = threading.Event()
        self._looking = threading.Lock()

    def __enter__(self) -> AnswerWatch:
        try:
            _thread.start_new_thread(self._look, ())
        except RuntimeError as error:  # "can't start new thread": lack of memory
            raise MemoryError(str(error)) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        with self._looking:  # wait for the thread's last check
            pass

    def _look(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._is_done.wait(LOOK_S):
            with self._looking:
                if self._is_done.is_set():
                    return
                if self._is_cancelled():
                    self.excess = Excess.CANCELLED
                elif time.monotonic() > deadline:
                    self.excess = Excess.TIME
                elif _memory_of(self._process.pid) > self._max_bytes:
                    self.excess = Excess.MEMORY
                if self.excess:
                    self._process.kill()
                    return


def _memory_of(pid: int) -> int:
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(getattr(memory, "private", memory.rss))  # "private" exists only on Windows


def _environment() -> dict[str, str]:
    # without the variable for the engine's libraries, which would keep the pack locked
    return {name: value for name, value in child_environment().items() if name != VARIABLE}


POLL_S = 0.05
"""Interval at which a waiting thread checks for cancellation, in seconds."""


class FairSemaphore:
    """A semaphore that admits `n` threads in order of arrival, with cancellable waits."""

    def __init__(self, n: int) -> None:
        self._n_free = n
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    def acquire(self, is_cancelled: IsCancelled) -> bool:
        """Wait for a turn; return False if `is_cancelled` returns True first."""
        me = object()
        with self._changed:
            self._line.append(me)
            try:
                while not self._n_free or self._line[0] is not me:
                    if is_cancelled():
                        return False
                    self._changed.wait(POLL_S)
                self._n_free -= 1
                return True
            finally:
                self._line.remove(me)
                self._changed.notify_all()

    def release(self) -> None:
        """Release the semaphore."""
        with self._changed:
            self._n_free += 1
            self._changed.notify_all()
