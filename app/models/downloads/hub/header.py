"""The header of a model on a server, fetched without the model, so that it can be planned for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import engine
from app.core.translation import tr
from app.models.downloads.transfer.remote_file import RemoteFile
from app.models.downloads.transfer.source import Source, TryLater
from engine import Cancelled, EngineError

FIRST_BYTES = 1 << 20
MOST_BYTES = 64 << 20
MOST_PARTS = 32
"""Number of parts up to which their headers are fetched, as each is a request or more."""


def fetch_header(
    source: Source,
    parts: Sequence[RemoteFile],
    folder: Path,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Path:
    """Write files that have a model's headers, and holes in place of its weights.

    Args:
        parts: the files of the model, in order.
        folder: empty folder for the files.

    Returns:
        The first of them.

    Raises:
        EngineError: a header cannot be fetched, or it is none.
    """
    if len(parts) > MOST_PARTS:
        raise EngineError(tr("The model has {n} files.").format(n=len(parts)))
    paths = []
    for number, part in enumerate(parts, 1):
        path = folder / f"model-{number:05}-of-{len(parts):05}.gguf"
        data = _first_bytes(source, part, is_stopped)
        try:
            with path.open("wb") as file:
                file.write(data)
                file.truncate(part.n_bytes)  # a hole takes no room
        except OSError as error:
            why = error.strerror or error
            raise EngineError(tr("The header cannot be written: {why}.").format(why=why)) from None
        paths.append(path)
    return paths[0]


def _first_bytes(source: Source, file: RemoteFile, is_stopped: Callable[[], bool]) -> bytes:
    """Return the first bytes of a file, as many as its header has."""
    data, wanted = bytearray(), FIRST_BYTES
    while True:
        wanted = min(wanted, file.n_bytes, MOST_BYTES)
        _extend(source, file, data, wanted, is_stopped)
        if engine.is_header_whole(data, file.n_bytes):
            return bytes(data)
        if wanted >= min(file.n_bytes, MOST_BYTES):
            raise EngineError(tr("The model's header is too long, or damaged."))
        wanted *= 2


def _extend(
    source: Source, file: RemoteFile, data: bytearray, wanted: int, is_stopped: Callable[[], bool]
) -> None:
    """Fetch bytes until there are as many as wanted.

    Raises:
        EngineError: they cannot be fetched.
    """
    try:
        with source.open(file, len(data), wanted) as answer:
            if answer.is_whole:
                data.clear()
            for chunk in answer.chunks:
                data += chunk
                if is_stopped():
                    raise Cancelled("The look at the model")
                if len(data) >= wanted:
                    break
    except TryLater as failure:
        raise EngineError(str(failure), tr("Try it again.")) from None
    del data[wanted:]
    if len(data) < wanted:
        raise EngineError(tr("The connection was cut."), tr("Try it again."))
