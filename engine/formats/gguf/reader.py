"""Opens a GGUF model with all of its parts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from engine.errors import InvalidGGUF, MissingShard, ModelFileError, Sentence
from engine.formats.gguf.header import HEADER_LIMIT, Header, HeaderEndsEarly, parse_header
from engine.formats.gguf.metadata import Metadata
from engine.formats.gguf.tensor_bytes import OpenPart, TensorBytes
from engine.formats.gguf.tensors import TensorInfo, quote

NAME: Final = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

MAX_NAMED: Final = 8  # maximum number of missing parts that a message lists


def part_paths(path: Path, meta: Metadata) -> tuple[Path, ...]:
    """Return all parts of a model in order, given any part and its metadata.

    Raises:
        InvalidGGUF: the names of the other parts cannot be derived from this one.
        MissingShard: parts are missing.
    """
    count = meta.int("split.count", 1)
    if count <= 1:
        return (path,)
    match = NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        problem = Sentence(
            "it is one of {n} parts, but its name does not end in '{name}'",
            n=count,
            name=f"-00001-of-{count:05d}.gguf",
        )
        raise InvalidGGUF(path, problem, "Give all parts their published names.")
    names = [f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    paths = tuple(path.with_name(name) for name in names)
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        n_more = len(missing) - MAX_NAMED
        more: list[str] = [Sentence("{n} more", n=n_more)] if n_more > 0 else []
        raise MissingShard(path, missing[:MAX_NAMED] + more)
    return paths


def check_agreement(paths: Sequence[Path], headers: Sequence[Header]) -> None:
    """Check that the parts belong to one model and have the right numbers.

    Raises:
        InvalidGGUF: a part does not fit; the error names that part.
    """
    first = headers[0].meta
    for i, (path, header) in enumerate(zip(paths, headers, strict=True)):
        _check_place(path, header.meta, i, len(paths))
        # later parts need not name the architecture
        name = header.meta.str("general.architecture", None)
        if name is not None and name != first.architecture:
            problem = Sentence("its architecture differs from that of {name}", name=paths[0].name)
            raise InvalidGGUF(path, problem, "Keep the parts of different models apart.")
    total = sum(len(header.tensors) for header in headers)
    if first.int("split.tensors.count", total) != total:
        problem = Sentence("its parts have {n} tensors in total, not the number it states", n=total)
        raise InvalidGGUF(paths[0], problem)


def _check_place(path: Path, meta: Metadata, no: int, count: int) -> None:
    no_here, count_here = meta.int("split.no"), meta.int("split.count")
    if (no_here, count_here) != (no, count):
        problem = Sentence(
            "it contains part {n} of {total}, contrary to its name", n=no_here + 1, total=count_here
        )
        raise InvalidGGUF(path, problem, "Give all parts their published names.")


FIRST_BYTES = 1 << 20
"""Size of the first read for a header; doubled until the header is complete."""


class GGUFFile:
    """A model in one or several files, open for reading; created by `open`.

    Use it as a context manager. Opening reads only the header; `raw` locates a tensor's bytes, and
    the result's `read` or `read_into` reads them.

    Attributes:
        path: path of the first part.
        meta: metadata of the first part; usable after `close`.
        tensors: tensors of all parts by name, in file order.
        companion: path of another file that some tensors come from; None if there is none.
        n_bytes: total size of the files, in bytes.
        stamps: values that change when the files are replaced.
    """

    def __init__(self, parts: list[OpenPart], headers: list[Header]) -> None:
        self._parts = parts
        self.companion: Path | None = None
        self.paths = paths = tuple(part.path for part in parts)
        self.path = paths[0]
        self.version = headers[0].version
        self.meta: Metadata = headers[0].meta
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_collect(paths, headers))
        self.n_bytes = sum(part.n_bytes for part in parts)
        self.stamps = tuple(part.stamp for part in parts)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a model, given its file or any of its parts.

        Raises:
            ModelFileError: the file does not exist, or reading it is not permitted.
            InvalidGGUF: the file is malformed, truncated or not GGUF, or its parts disagree.
            MissingShard: parts are missing.
            UnsupportedQuant: a tensor's type is unknown.
        """
        path = Path(path)
        with ExitStack() as undo:

            def open_part(path: Path) -> tuple[OpenPart, Header]:
                part = OpenPart(path)
                undo.callback(part.close)
                return part, _read_header(part)

            first = open_part(path)
            paths = part_paths(path, first[1].meta)
            opened = [first if part == path else open_part(part) for part in paths]
            parts, headers = [part for part, _ in opened], [header for _, header in opened]
            if len(parts) > 1:
                check_agreement(paths, headers)
            file = cls(parts, headers)
            undo.pop_all()
        return file

    def joined(
        self, kept: Mapping[str, TensorInfo], other: GGUFFile, added: Mapping[str, TensorInfo],
        meta: Metadata,
    ) -> GGUFFile:  # fmt: skip
        """Return this model with some of its tensors and some from another file.

        The result can be read as long as both files are open.
        """
        whole = copy(self)
        whole._parts = [*self._parts, *other._parts]
        first = len(self._parts)
        moved = {name: replace(t, part=first + t.part) for name, t in added.items()}
        whole.tensors = MappingProxyType({**kept, **moved})
        whole.companion, whole.meta = other.path, meta
        whole.stamps = (*self.stamps, *other.stamps)
        return whole

    def raw(self, tensor: TensorInfo) -> TensorBytes:
        """Return the bytes of a tensor, or of a range of its rows, to be sliced and read.

        The shape is that of the tensor, with the bytes in a row as the last axis.
        """
        shape = (*tensor.shape[:-1], tensor.row_bytes)
        return TensorBytes.of(self._parts[tensor.part], tensor.offset, shape)

    def check_unchanged(self) -> None:
        """Raise ModelFileError if a file has been modified since it was opened."""
        for part in self._parts:
            part.check_unchanged()

    def close(self) -> None:
        """Close the files."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_header(part: OpenPart) -> Header:
    # the header's length is known only after reading it
    limit, n_bytes = min(part.n_bytes, HEADER_LIMIT), FIRST_BYTES
    while n_bytes < limit:
        try:
            return _parse_start(part, n_bytes)
        except HeaderEndsEarly:
            n_bytes *= 2
    return _parse_start(part, limit)


def _parse_start(part: OpenPart, n_bytes: int) -> Header:
    data = bytearray(n_bytes)
    part.read_into(memoryview(data), 0)
    return parse_header(part.path, data, part.n_bytes)


def _collect(paths: tuple[Path, ...], headers: list[Header]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for i, header in enumerate(headers):
        for tensor in header.tensors:
            if tensor.name in tensors:
                other = paths[tensors[tensor.name].part].name
                problem = Sentence(
                    "its tensor {name} is also in {other}", name=quote(tensor.name), other=other
                )
                raise InvalidGGUF(paths[i], problem)
            tensors[tensor.name] = replace(tensor, part=i) if i else tensor
    return tensors


SAMPLES = 32
"""Number of sampled tensors, evenly spaced in file order."""

SAMPLE_BYTES = 4096
"""Number of bytes sampled from the middle of each of these tensors."""


def model_hash(file: GGUFFile) -> str:
    """Return a hash of a model's content, independent of its file name: 64 hexadecimal digits.

    It covers the header and samples of the weights, because a fine-tuned model often has the same
    header as its base model. This takes milliseconds.
    """
    digest = hashlib.sha256(file.meta.data)
    tensors = list(file.tensors.values())
    for tensor in tensors:
        entry = (tensor.name, tensor.type.name, tensor.shape, tensor.part, tensor.offset)
        digest.update(repr(entry).encode())
    for index in range(min(SAMPLES, len(tensors))):
        tensor = tensors[index * len(tensors) // min(SAMPLES, len(tensors))]
        raw = file.raw(tensor).flat()
        start = max(0, len(raw) - SAMPLE_BYTES) // 2
        digest.update(raw[start : start + SAMPLE_BYTES].read().data)
    return digest.hexdigest()


def check_unchanged(file: GGUFFile, stamps: object) -> None:
    """Raise ModelFileError if a file no longer has these stamps."""
    if file.stamps != stamps:
        raise ModelFileError(
            file.path,
            "{file} has changed since the model was loaded.",
            "Load it again.",
            file=file.path.name,
        )
