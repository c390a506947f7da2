"""Opens a GGUF model with all its parts, over memory maps."""

from __future__ import annotations

import mmap as memory_maps
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from mmap import ACCESS_READ, PAGESIZE, mmap
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidGGUF, ModelFileError
from engine.gguf.header import HEADER_LIMIT, Header, parse_header
from engine.gguf.metadata import Metadata
from engine.gguf.shards import check_agreement, part_paths
from engine.gguf.tensors import TensorInfo, quote


class GGUFFile:
    """A model, of one file or several parts, open for reading; made by `open`.

    Use as a context manager. Opening reads the header alone; a tensor's bytes are read from the
    disk when the view that `raw` returns is accessed.

    Attributes:
        path: path of the first part.
        paths: paths of all parts.
        version: version of the GGUF format.
        meta: metadata of the first part; usable after `close` too.
        tensors: tensors of all parts by name, in file order.
        n_bytes: total size of the files, in bytes.
    """

    def __init__(self, paths: tuple[Path, ...], maps: list[mmap], headers: list[Header]) -> None:
        self._maps = maps
        self.path = paths[0]
        self.paths = paths
        self.version = headers[0].version
        self.meta: Metadata = headers[0].meta
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_collect(paths, headers))
        self.n_bytes = sum(map(len, maps))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a model, given its file or any of its parts.

        Raises:
            ModelFileError: there is no such file, or it may not be read.
            InvalidGGUF: it is malformed, truncated or not GGUF, or its parts disagree.
            MissingShard: parts are missing.
            UnsupportedQuant: a tensor's type is unknown.
        """
        path = Path(path)
        with ExitStack() as undo:

            def open_part(part: Path) -> tuple[mmap, Header]:
                view = _map(part)
                undo.callback(view.close)
                return view, _read_header(part, view)

            asked = open_part(path)
            paths = part_paths(path, asked[1].meta)
            parts = [asked if part == path else open_part(part) for part in paths]
            maps, headers = [part[0] for part in parts], [part[1] for part in parts]
            if len(parts) > 1:
                check_agreement(paths, headers)
            file = cls(paths, maps, headers)
            undo.pop_all()
        return file

    def raw(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, or of a range of its rows, without a copy.

        Returns:
            A read-only view (n_rows, row_bytes). Accessing it after another program has truncated
            the file kills the process, as with every memory map.

        Raises:
            ValueError: the file is closed.
        """
        if not self._maps:
            raise ValueError(f"{self.path.name} is closed")
        view = np.frombuffer(self._maps[tensor.part], np.uint8, tensor.n_bytes, tensor.offset)
        return view.reshape(tensor.n_rows, tensor.row_bytes)

    def release(self, tensor: TensorInfo) -> None:
        """Free the memory that a tensor's bytes were read into; they can be read again."""
        advice = getattr(memory_maps, "MADV_DONTNEED", None)
        if advice is None or not self._maps:
            return
        start = -(-tensor.offset // PAGESIZE) * PAGESIZE
        n_bytes = (tensor.offset + tensor.n_bytes) // PAGESIZE * PAGESIZE - start
        if n_bytes > 0:
            self._maps[tensor.part].madvise(advice, start, n_bytes)

    def close(self) -> None:
        """Close the files; a view still in use keeps its file mapped until it is deleted."""
        maps, self._maps = self._maps, []
        for view in maps:
            with suppress(BufferError):
                view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _map(path: Path) -> mmap:
    try:
        # before it is opened: opening a pipe would wait for a writer
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(path, f"{path} is a folder.", "Pick a .gguf file in it.")
        if not stat.S_ISREG(mode):
            raise ModelFileError(path, f"{path} is not a regular file.", "Pick a .gguf file.")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise InvalidGGUF(path, "it is empty")
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    except FileNotFoundError:
        message = f"There is no file {path}."
        raise ModelFileError(path, message, "It may have been moved or deleted.") from None
    except PermissionError:
        message = f"You are not allowed to read {path}."
        raise ModelFileError(path, message, "Change the file's permissions.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(path, f"{path} cannot be read: {reason}.") from None


def _read_header(path: Path, view: mmap) -> Header:
    with memoryview(view) as whole, whole[:HEADER_LIMIT] as start:
        return parse_header(path, start, len(view))


def _collect(paths: tuple[Path, ...], headers: list[Header]) -> dict[str, TensorInfo]:
    """Return the tensors of all parts by name, each marked with its part."""
    tensors: dict[str, TensorInfo] = {}
    for i, header in enumerate(headers):
        for tensor in header.tensors:
            if tensor.name in tensors:
                other = paths[tensors[tensor.name].part].name
                raise InvalidGGUF(paths[i], f"its tensor {quote(tensor.name)} is in {other} too")
            tensors[tensor.name] = replace(tensor, part=i) if i else tensor
    return tensors
