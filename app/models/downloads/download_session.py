"""The queue of downloads, their threads, and their records across restarts."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.core.translation import reason_of, tr
from app.core.units import TransferProgress
from app.models.downloads.hub.client import check_online
from app.models.downloads.transfer.part_file import PartFile
from app.models.downloads.transfer.source import Denied, RemoteFile, Source, destination, file_names
from app.models.downloads.transfer.transfer import FileTransfer, Patience
from engine import Cancelled, EngineError, read_file, replace_json

log = logging.getLogger(__name__)

JobState = Literal["waiting", "running", "paused", "failed", "done"]

MAX_RECORD = 1 << 20  # maximum size of a record in bytes

ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class DownloadJob:
    """A download of a model and its helper files.

    Attributes:
        id: 32 hexadecimal digits.
        publisher, model: names of the nested folders in `folder` where the files are stored.
        page: address of the model's web page; "" if it has none.
        files: all files; the first is the one to open.
        finished: names of complete files.
        problem, hint: why the download failed and what to do; "" if it did not fail.
        needs_account: whether it failed because access was denied.
    """

    id: str
    title: str
    publisher: str
    model: str
    folder: str
    page: str
    files: tuple[RemoteFile, ...]
    finished: tuple[str, ...] = ()
    state: JobState = "waiting"
    problem: str = ""
    hint: str = ""
    needs_account: bool = False

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def path(self) -> Path:
        """Path to the file to open."""
        return self.paths()[0]

    def paths(self) -> list[Path]:
        """Return the path of each file.

        Raises:
            EngineError: a name is invalid.
        """
        names = file_names([file.name for file in self.files])
        folder = Path(self.folder)
        return [
            destination(folder, self.publisher, self.model, names[file.name]) for file in self.files
        ]

    def part_files(self) -> list[PartFile]:
        """Return the partial file of each file."""
        return [PartFile(path, file) for path, file in zip(self.paths(), self.files, strict=True)]


def new_job(
    title: str, repo: str, files: Sequence[RemoteFile], folder: Path, page: str = ""
) -> DownloadJob:
    """Create a job that downloads files from a repository.

    Args:
        repo: repository as "owner/name", or the host for a plain link.

    Raises:
        EngineError: a name is invalid.
    """
    publisher, _, model = repo.partition("/")
    first = files[0].name.rpartition("/")[2]
    job = DownloadJob(
        uuid.uuid4().hex, title, publisher, model or first[: -len(".gguf")], str(folder), page,
        tuple(files),
    )  # fmt: skip
    job.paths()
    return job


def run_job(
    job: DownloadJob,
    source: Source,
    stopped: threading.Event,
    report: Callable[[int, bool], None],
    note: Callable[[str], None],
    patience: Patience | None = None,
) -> None:
    """Fetch a job's missing files.

    Args:
        report: receives the number of bytes on disk, and whether they are being verified.
        note: receives the name of each completed file.

    Raises:
        Cancelled: `stopped` was set.
        EngineError: the download failed.
    """
    n_before = 0
    for part in job.part_files():
        size = part.file.n_bytes

        def report_file(
            n: int, is_checking: bool, n_before: int = n_before, size: int = size
        ) -> None:
            report(n_before + (size if is_checking else n), is_checking)

        is_there = part.path.is_file() and part.path.stat().st_size == size
        is_known = part.file.name in job.finished
        if not is_there or not (is_known or part.is_verified(stopped.is_set, report_file)):
            FileTransfer(part, source, stopped, report_file, patience).run()
        note(part.file.name)
        n_before += size


def discard_job(job: DownloadJob) -> None:
    """Delete a job's incomplete files."""
    for part in job.part_files():
        part.discard()
    with suppress(OSError):  # the folders may contain other files
        job.path.parent.rmdir()
        job.path.parent.parent.rmdir()


class JobStore:
    """Download records in a folder, one file per download; invalid files are ignored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[DownloadJob]:
        """Return the downloads, oldest first; those that have not failed become paused."""
        with suppress(OSError):
            paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            return [job for path in paths if (job := _read(path)) is not None]
        return []

    def save(self, job: DownloadJob) -> None:
        """Write a download's record; if that fails, the download is lost after a restart."""
        try:
            replace_json(self._folder / f"{job.id}.json", asdict(job))
        except OSError as error:
            log.info("a download's record cannot be written: %s", error.strerror)

    def delete(self, job: DownloadJob) -> None:
        """Delete a download's record."""
        with suppress(OSError):
            (self._folder / f"{job.id}.json").unlink(missing_ok=True)


def _read(path: Path) -> DownloadJob | None:
    try:
        data = json.loads(read_file(path, MAX_RECORD))
        files = tuple(RemoteFile(**_typed(RemoteFile, entry)) for entry in data.pop("files"))
        finished = tuple(map(str, data.pop("finished")))
        job = DownloadJob(**_typed(DownloadJob, data), files=files, finished=finished)
        job.paths()
        is_ours = ID.fullmatch(job.id) is not None and path.stem == job.id and files
        if not is_ours or job.state == "done":
            return None
    except (
        OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, EngineError,
    ) as error:  # fmt: skip
        log.info("%s is not a download record: %s", path.name, type(error).__name__)
        return None
    return replace(job, state="failed" if job.state == "failed" else "paused")


def _typed(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    for name, value in data.items():
        expected = {"int": int, "bool": bool}.get(cls.__annotations__[name], str)
        if type(value) is not expected:
            raise TypeError(name)
    return data


MAX_RUNNING = 2
TELL_MS = 300
JOIN_S = 4.0


@dataclass(slots=True)
class _Run:
    thread: threading.Thread
    stopped: threading.Event
    is_leaving: bool = False  # whether the partial download will be deleted
    complete: tuple[str, ...] = ()  # names of files


class DownloadSession(QObject):
    """A window's downloads; does not use the network before `add` or `resume` is called.

    Args:
        open_source: opens connections for one download; called on the download's thread.
    """

    listed = Signal()  # downloads were added or removed
    changed = Signal(str)  # id
    done = Signal(object)  # DownloadJob
    failed = Signal(object)  # DownloadJob

    _ended = Signal(str, object)  # EngineError or None

    def __init__(
        self, store: JobStore, open_source: Callable[[], Source], parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._store, self._open_source = store, open_source
        self._runs: dict[str, _Run] = {}
        self._progress: dict[str, TransferProgress] = {}
        self._is_closed = False
        self._jobs = {job.id: job for job in store.load()}
        for job in self._jobs.values():
            self._progress[job.id] = TransferProgress(_n_arrived(job))
        self._timer = QTimer(self, interval=TELL_MS)
        self._timer.timeout.connect(self._tell)
        self._ended.connect(self._on_ended)

    @property
    def jobs(self) -> list[DownloadJob]:
        """All downloads, in the order in which they were added."""
        return list(self._jobs.values())

    def progress(self, job_id: str) -> TransferProgress:
        return self._progress.setdefault(job_id, TransferProgress())

    def add(self, job: DownloadJob) -> bool:
        """Queue a download; return whether it is new."""
        for other in self.jobs:
            if other.path != job.path:
                continue
            if other.id in self._runs or (other.files == job.files and other.state != "done"):
                self.resume(other.id)
                return False
            self._remove(other.id)  # a new version was published
        self._put(replace(job, state="waiting"))
        self.listed.emit()
        self._start_next()
        return True

    def resume(self, job_id: str) -> None:
        """Queue a paused or failed download."""
        job = self._jobs[job_id]
        if job.state in ("paused", "failed"):
            self._put(replace(job, state="waiting", problem="", hint="", needs_account=False))
            self._start_next()

    def pause(self, job_id: str) -> None:
        """Pause a download; its partial files are kept."""
        run = self._runs.get(job_id)
        if run is not None:
            run.stopped.set()
        elif self._jobs[job_id].state == "waiting":
            self._put(replace(self._jobs[job_id], state="paused"))

    def cancel(self, job_id: str) -> None:
        """Stop a download and delete its partial files, or remove a completed one from the list."""
        job, run = self._jobs[job_id], self._runs.get(job_id)
        if run is not None:
            run.is_leaving = True
            run.stopped.set()
            return
        if job.state == "done":
            self._remove(job_id)
            return
        thread = threading.Thread(target=self._discard, args=(job,), daemon=True)
        self._runs[job_id] = _Run(thread, threading.Event(), is_leaving=True)
        thread.start()

    def close(self) -> None:
        """Pause all downloads, so that they can be resumed after a restart."""
        self._is_closed = True
        self._timer.stop()
        for run in self._runs.values():
            run.stopped.set()
        until = time.monotonic() + JOIN_S
        for job_id, run in self._runs.items():
            run.thread.join(max(until - time.monotonic(), 0.0))
            job = replace(self._jobs[job_id], state="paused")
            if not run.is_leaving:
                self._store.save(replace(job, finished=(*job.finished, *run.complete)))

    def _put(self, job: DownloadJob) -> None:
        self._jobs[job.id] = job
        self._store.save(job)
        self.changed.emit(job.id)

    def _remove(self, job_id: str) -> None:
        job = self._jobs.pop(job_id)
        self._progress.pop(job_id, None)
        self._store.delete(job)
        self.listed.emit()

    def _start_next(self) -> None:
        for job in self.jobs:
            if self._is_closed or len(self._runs) >= MAX_RUNNING:
                return
            if job.state == "waiting" and job.id not in self._runs:
                self._put(replace(job, state="running"))
                stopped = threading.Event()
                thread = threading.Thread(
                    target=self._work, args=(job, stopped), name="tandem-download", daemon=True
                )
                self._runs[job.id] = _Run(thread, stopped)
                thread.start()
                self._timer.start()

    # on threads

    def _work(self, job: DownloadJob, stopped: threading.Event) -> None:
        progress, error = self.progress(job.id), None

        def note(name: str) -> None:
            run = self._runs.get(job.id)
            if run is not None and name not in job.finished:
                run.complete = (*run.complete, name)

        try:
            check_online()
            source = self._open_source()
            try:
                run_job(
                    job, source, stopped,
                    lambda n, is_checking: progress.note(n, is_checking=is_checking), note,
                )  # fmt: skip
            finally:
                source.close()
        except EngineError as failure:
            error = failure
        except OSError as failure:
            why = reason_of(failure)
            error = EngineError(tr("The download failed: {why}.").format(why=why))
        if isinstance(error, Cancelled) and self._is_leaving(job.id):
            discard_job(job)
        self._ended.emit(job.id, error)

    def _is_leaving(self, job_id: str) -> bool:
        run = self._runs.get(job_id)
        return run is not None and run.is_leaving

    def _discard(self, job: DownloadJob) -> None:
        discard_job(job)
        self._ended.emit(job.id, Cancelled("The download"))

    # on the GUI thread

    @Slot(str, object)
    def _on_ended(self, job_id: str, error: EngineError | None) -> None:
        run = self._runs.pop(job_id, None)
        if self._is_closed or run is None:
            return
        job = replace(self._jobs[job_id], finished=(*self._jobs[job_id].finished, *run.complete))
        if not self._runs:
            self._timer.stop()
        if error is None:
            self._store.delete(job)  # from now on, the models page lists it
            job = self._jobs[job_id] = replace(job, state="done")
            self.changed.emit(job_id)
            self.done.emit(job)
        elif run.is_leaving:
            self._remove(job_id)
        elif isinstance(error, Cancelled):
            self._put(replace(job, state="paused"))
        else:
            log.info("a download failed: %s", error)
            job = replace(
                job, state="failed", problem=error.message, hint=error.hint,
                needs_account=isinstance(error, Denied),
            )  # fmt: skip
            self._put(job)
            self.failed.emit(job)
        self._start_next()

    @Slot()
    def _tell(self) -> None:
        for job_id in list(self._runs):
            self.changed.emit(job_id)


def _n_arrived(job: DownloadJob) -> int:
    n_bytes = 0
    for part in job.part_files():
        if part.path.is_file():
            n_bytes += part.file.n_bytes
        else:
            part.look()
            n_bytes += part.n_done
    return n_bytes
