"""Downloads as jobs of several files, with records that survive a restart. It knows no Qt."""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.models.downloads.transfer.part_file import PartFile
from app.models.downloads.transfer.remote_file import RemoteFile, destination, file_names
from app.models.downloads.transfer.source import Source
from app.models.downloads.transfer.transfer import FileTransfer, Patience
from engine import EngineError, read_file, replace_json

log = logging.getLogger(__name__)

JobState = Literal["waiting", "running", "paused", "failed", "done"]

MOST_RECORD = 1 << 20
"""Most bytes of a record."""

ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class DownloadJob:
    """A model that is being downloaded: its parts and what belongs to it.

    Attributes:
        id: 32 hexadecimal digits.
        title: what people see.
        publisher, model: folders of its files.
        folder: folder of models that those lie in.
        page: address to read about the model; "" for none.
        files: all files; the first one is the one to open.
        finished: names of those that are whole.
        problem, hint: why it failed and what to do; "" if it did not.
        needs_account: whether it failed since the server wants to know who asks.
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
        """Path of the file to open."""
        return self.paths()[0]

    def paths(self) -> list[Path]:
        """Return the path of each file.

        Raises:
            EngineError: a name cannot be used.
        """
        names = file_names([file.name for file in self.files])
        folder = Path(self.folder)
        return [
            destination(folder, self.publisher, self.model, names[file.name]) for file in self.files
        ]

    def part_files(self) -> list[PartFile]:
        """Return what has arrived of each file."""
        return [PartFile(path, file) for path, file in zip(self.paths(), self.files, strict=True)]


def new_job(
    title: str, repo: str, files: Sequence[RemoteFile], folder: Path, page: str = ""
) -> DownloadJob:
    """Return a job for files of a repository.

    Args:
        repo: repository as "owner/name", or the host of a plain link.

    Raises:
        EngineError: a name cannot be used.
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
    told: Callable[[int, bool], None],
    note: Callable[[str], None],
    patience: Patience | None = None,
) -> None:
    """Fetch the files of a job that are not there yet.

    Args:
        told: is called with the number of bytes that are there, and whether some are being compared
            with their hash.
        note: is called with the name of each file that has become whole.

    Raises:
        Cancelled: `stopped` was set.
        EngineError: it cannot go on.
    """
    n_before = 0
    for part in job.part_files():
        size = part.file.n_bytes

        def tell(n: int, is_checking: bool, n_before: int = n_before, size: int = size) -> None:
            told(n_before + (size if is_checking else n), is_checking)

        is_there = part.path.is_file() and part.path.stat().st_size == size
        if not is_there or (
            part.file.name not in job.finished and not part.is_whole_already(stopped.is_set, tell)
        ):
            FileTransfer(part, source, stopped, tell, patience).run()
        note(part.file.name)
        n_before += size


def discard_job(job: DownloadJob) -> None:
    """Delete what has arrived of the files that are not whole."""
    for part in job.part_files():
        part.discard()
    with suppress(OSError):  # not if something else lies in them
        job.path.parent.rmdir()
        job.path.parent.parent.rmdir()


class JobStore:
    """The records of downloads in a folder, one file each.

    Reading never fails: a record that is damaged or leads elsewhere is left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[DownloadJob]:
        """Return the downloads, the oldest first; those that ran are paused."""
        with suppress(OSError):
            paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            return [job for path in paths if (job := _read(path)) is not None]
        return []

    def save(self, job: DownloadJob) -> None:
        """Write the record of a download; what cannot be written is not there after a restart."""
        try:
            replace_json(self._folder / f"{job.id}.json", asdict(job))
        except OSError as error:
            log.info("a download's record cannot be written: %s", error.strerror)

    def delete(self, job: DownloadJob) -> None:
        """Delete the record of a download."""
        with suppress(OSError):
            (self._folder / f"{job.id}.json").unlink(missing_ok=True)


def _read(path: Path) -> DownloadJob | None:
    try:
        data = json.loads(read_file(path, MOST_RECORD))
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
        log.info("%s is no record of a download: %s", path.name, type(error).__name__)
        return None
    return replace(job, state="failed" if job.state == "failed" else "paused")


def _typed(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    """Return an object's fields if all of them have the type that they are declared with."""
    for name, value in data.items():
        wanted = {"int": int, "bool": bool}.get(cls.__annotations__[name], str)
        if type(value) is not wanted:
            raise TypeError(name)
    return data
