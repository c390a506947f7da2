"""One file from a server to the disk: several pieces at a time, until all have arrived."""

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
ENOUGH_BYTES = 64 << 10
"""Bytes after which a connection counts as one that works, though it was cut."""

N_CONNECTIONS = 4
SAVE_S = 3.0
POLL_S = 0.1
LEAVE_S = 2.0
"""Longest wait in seconds for connections that hang; they end by themselves, and write nothing."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long failing connections are tried again.

    Attributes:
        tries: failures in a row after which a connection gives up.
        base_s: pause after the first failure, in seconds; twice as long after each further one.
        most_s: longest pause.
    """

    tries: int = 7
    base_s: float = 1.0
    most_s: float = 20.0

    def pause_s(self, n_failures: int, asked_s: float) -> float:
        """Return how long to wait after so many failures in a row."""
        return max(asked_s, min(self.base_s * float(2 ** (n_failures - 1)), self.most_s))


class FileTransfer:
    """The transfer of one file; `run` ends when the file has its name, or with an error.

    Args:
        part: the file, opened here.
        told: is called with the number of bytes on the disk, and whether they are being compared
            with their hash, in which case they are counted from 0 again.
    """

    def __init__(
        self,
        part: PartFile,
        source: Source,
        stopped: threading.Event,
        told: Callable[[int, bool], None] = lambda _, __: None,
        patience: Patience | None = None,
    ) -> None:
        self._part, self._source, self._stopped, self._told = part, source, stopped, told
        self._patience = patience or Patience()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._under_way: dict[int, Range] = {}  # by thread
        self._n_written: dict[int, int] = {}  # by thread, since it has begun its piece
        self._error: EngineError | None = None
        self._n_workers = 0

    def run(self) -> None:
        """Fetch what is missing, compare it with its hash, and give it its name.

        Raises:
            Cancelled: `stopped` was set; what has arrived is kept.
            EngineError: it cannot go on; what has arrived is kept if it is of use.
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
        part.finish(self._stopped.is_set, lambda n: self._told(n, True))

    def _fetch_all(self) -> None:
        """Start connections and wait for them, saving now and then."""
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
            with suppress(EngineError):  # the disk may be full even for that
                self._part.save()
            raise self._error

    def _watch(self, threads: list[threading.Thread]) -> None:
        """Tell of progress and save it, until no connection works any more."""
        saved = time.monotonic()
        while any(thread.is_alive() for thread in threads) and not self._over.is_set():
            if self._stopped.wait(POLL_S):
                return
            self._told(self._part.n_done, False)
            if time.monotonic() - saved > SAVE_S:
                self._part.save()
                saved = time.monotonic()

    # on the threads

    def _work(self) -> None:
        """Fetch pieces until none is left for this thread."""
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
        """Return the next piece that nobody fetches; None ends the thread."""
        me = threading.get_ident()
        with self._lock:
            self._under_way.pop(me, None)
            if not (self._over.is_set() or self._stopped.is_set()):
                busy = merged(self._under_way.values())
                for first, behind in self._part.missing():
                    for start, end in gaps(busy, first, behind):
                        piece = start, min(start + PIECE_BYTES, end)
                        self._under_way[me] = piece
                        return piece
            self._n_workers -= 1
            return None

    def _gives_up(self, n_failures: int, failure: TryLater) -> bool:
        """Return whether this thread is to end: some servers allow few connections at a time.

        Raises:
            EngineError: it is the last one.
        """
        with self._lock:
            self._under_way.pop(threading.get_ident(), None)
            if n_failures < self._patience.tries:
                return False
            self._n_workers -= 1
            if self._n_workers:
                return True
        hint = tr("Resume it when the connection is better; what has arrived is kept.")
        raise EngineError(str(failure), hint)

    def _fetch(self, piece: Range) -> None:
        """Fetch the bytes of a piece; of the whole file, where the server ignores ranges.

        Raises:
            TryLater: some are missing.
            EngineError: the server or the disk does not go on.
        """
        start, end = piece
        with self._source.open(self._part.file, start, end) as answer:
            if answer.is_whole:
                if not self._takes_all():
                    return
                start, end = 0, self._part.file.n_bytes
            for chunk in answer.chunks:
                if start >= end or self._over.is_set() or self._stopped.is_set():
                    return  # one that has ended by itself can be used again
                behind = min(start + len(chunk), end)
                for first, last in self._part.missing(start, behind):
                    self._part.write(chunk[first - start : last - start], first)
                    self._n_written[threading.get_ident()] += last - first
                start = behind
        if start < end:
            raise TryLater(tr("The connection was cut."))

    def _takes_all(self) -> bool:
        """Return whether this thread is the one that reads the whole file."""
        everything = 0, self._part.file.n_bytes
        with self._lock:
            if everything in self._under_way.values():
                return self._under_way[threading.get_ident()] == everything
            self._under_way[threading.get_ident()] = everything
            return True
