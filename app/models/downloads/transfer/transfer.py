"""Downloads one file in pieces over several connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from app.core.translation import tr
from app.models.downloads.transfer.part_file import (
    PartFile,
    Range,
    WrongBytes,
    gaps,
    merged,
    n_bytes,
)
from app.models.downloads.transfer.source import FileChanged, Source, TryLater
from engine import Cancelled, EngineError

PIECE_BYTES = 32 << 20
ENOUGH_BYTES = 64 << 10  # a connection lost after this many bytes does not count as failed

N_CONNECTIONS = 4
SAVE_S = 3.0
POLL_S = 0.1
LEAVE_S = 2.0  # maximum wait for hanging connections, in seconds; they no longer write anything


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry policy for failing connections.

    Attributes:
        tries: consecutive failures before a connection gives up.
        base_s: pause after the first failure, in seconds; doubled after each further failure.
        most_s: maximum pause in seconds.
    """

    tries: int = 7
    base_s: float = 1.0
    most_s: float = 20.0

    def pause_s(self, n_failures: int, wait_s: float) -> float:
        """Return the pause after `n_failures` consecutive failures, at least `wait_s`."""
        return max(wait_s, min(self.base_s * float(2 ** (n_failures - 1)), self.most_s))


class FileTransfer:
    """Download of one file.

    Args:
        part: the file, opened by `run`.
        report: receives a number of bytes, and whether they are verified or only on disk.
    """

    def __init__(
        self,
        part: PartFile,
        source: Source,
        stopped: threading.Event,
        report: Callable[[int, bool], None] = lambda _, __: None,
        patience: Patience | None = None,
    ) -> None:
        self._part, self._source, self._stopped, self._report = part, source, stopped, report
        self._patience = patience or Patience()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._in_progress: dict[int, Range] = {}  # by thread
        self._n_written: dict[int, int] = {}  # by thread, in the current piece
        self._error: EngineError | None = None
        self._n_workers = 0

    def run(self) -> None:
        """Fetch the missing bytes, verify them and rename the file.

        Raises:
            Cancelled: `stopped` was set; the partial download is kept.
            EngineError: the download failed; the partial file is kept if it is still valid.
        """
        part = self._part
        part.open()
        try:
            self._fetch_all()
            part.save()
        except (FileChanged, WrongBytes):
            part.discard()
            raise
        finally:
            part.close()
        part.finish(self._stopped.is_set, lambda n: self._report(n, True))

    def _fetch_all(self) -> None:
        n_pieces = -(-n_bytes(self._part.missing()) // PIECE_BYTES)
        self._n_workers = min(N_CONNECTIONS, n_pieces)
        threads = [
            threading.Thread(target=self._work, name="tandem-piece", daemon=True)
            for _ in range(self._n_workers)
        ]
        for thread in threads:
            thread.start()
        try:
            self._watch(threads)
        finally:
            self._over.set()
            until = time.monotonic() + LEAVE_S
            for thread in threads:
                thread.join(max(until - time.monotonic(), 0.0))
        if self._error is None and self._stopped.is_set():
            self._error = Cancelled("The download")
        if self._error is not None:
            with suppress(EngineError):  # the disk may be full
                self._part.save()
            raise self._error

    def _watch(self, threads: list[threading.Thread]) -> None:
        saved = time.monotonic()
        while any(thread.is_alive() for thread in threads) and not self._over.is_set():
            if self._stopped.wait(POLL_S):
                return
            self._report(self._part.n_done, False)
            if time.monotonic() - saved > SAVE_S:
                self._part.save()
                saved = time.monotonic()

    # on the threads

    def _work(self) -> None:
        n_failures = 0
        try:
            while (piece := self._take()) is not None:
                n_missing = n_bytes(self._part.missing(*piece))
                self._n_written[threading.get_ident()] = 0
                try:
                    self._fetch(piece)
                    n_failures = 0
                except TryLater as failure:
                    n_written = self._n_written[threading.get_ident()]
                    has_worked = n_written >= min(ENOUGH_BYTES, n_missing)
                    n_failures = 1 if has_worked else n_failures + 1
                    if self._gives_up(n_failures, failure):
                        return
                    self._over.wait(self._patience.pause_s(n_failures, failure.wait_s))
        except Cancelled:  # the file was closed
            pass
        except EngineError as error:
            with self._lock:
                self._error = self._error or error
            self._over.set()

    def _take(self) -> Range | None:
        """Return the next free piece, or None if the thread should stop."""
        me = threading.get_ident()
        with self._lock:
            self._in_progress.pop(me, None)
            if not (self._over.is_set() or self._stopped.is_set()):
                busy = merged(self._in_progress.values())
                for first, last in self._part.missing():
                    for start, end in gaps(busy, first, last):
                        piece = start, min(start + PIECE_BYTES, end)
                        self._in_progress[me] = piece
                        return piece
            self._n_workers -= 1
            return None

    def _gives_up(self, n_failures: int, failure: TryLater) -> bool:
        """Return whether this thread should stop, because some servers allow few connections.

        Raises:
            EngineError: this is the last thread.
        """
        with self._lock:
            self._in_progress.pop(threading.get_ident(), None)
            if n_failures < self._patience.tries:
                return False
            self._n_workers -= 1
            if self._n_workers:
                return True
        hint = tr("Resume when the connection is better; the partial download is kept.")
        raise EngineError(str(failure), hint)

    def _fetch(self, piece: Range) -> None:
        """Fetch a piece, or the whole file if the server ignores ranges.

        Raises:
            TryLater: bytes are missing.
            EngineError: a server or disk error occurred.
        """
        start, end = piece
        with self._source.open(self._part.file, start, end) as answer:
            if answer.is_whole:
                if not self._takes_all():
                    return
                start, end = 0, self._part.file.n_bytes
            for chunk in answer.chunks:
                if start >= end or self._over.is_set() or self._stopped.is_set():
                    return  # a fully read response leaves the connection reusable
                stop = min(start + len(chunk), end)
                for first, last in self._part.missing(start, stop):
                    self._part.write(chunk[first - start : last - start], first)
                    self._n_written[threading.get_ident()] += last - first
                start = stop
        if start < end:
            raise TryLater(tr("The connection was lost."))

    def _takes_all(self) -> bool:
        everything = 0, self._part.file.n_bytes
        with self._lock:
            if everything in self._in_progress.values():
                return self._in_progress[threading.get_ident()] == everything
            self._in_progress[threading.get_ident()] = everything
            return True
