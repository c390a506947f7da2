"""Finds and checks the files of a model that is split into parts.

The parts lie in one folder under names such as `model-00002-of-00003.gguf`. The names count from
one, the key `split.no` from zero. The first part holds the metadata, each part its own tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from engine.errors import InvalidGGUF, MissingShard
from engine.formats.gguf.header import Header
from engine.formats.gguf.metadata import Metadata

NAME: Final = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

MAX_NAMED: Final = 8  # missing parts that a message lists


def part_paths(path: Path, meta: Metadata) -> tuple[Path, ...]:
    """Return all parts of the model that a file belongs to, in order; itself if it is whole.

    Args:
        path: path of any part.
        meta: metadata of that part.

    Raises:
        InvalidGGUF: the names of the other parts cannot be derived from this one.
        MissingShard: parts are missing.
    """
    count = meta.int("split.count", 1)
    if count <= 1:
        return (path,)
    match = NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        problem = (
            f"it is one of {count} parts, but its name does not end in '-00001-of-{count:05d}.gguf'"
        )
        raise InvalidGGUF(path, problem, "Give all parts the names they were published under.")
    names = [f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    paths = tuple(path.with_name(name) for name in names)
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        more = [f"{len(missing) - MAX_NAMED} more"] if len(missing) > MAX_NAMED else []
        raise MissingShard(path, missing[:MAX_NAMED] + more)
    return paths


def check_agreement(paths: Sequence[Path], headers: Sequence[Header]) -> None:
    """Check that the parts belong to one model and have the right numbers.

    Raises:
        InvalidGGUF: a part does not fit; the error names it.
    """
    first = headers[0].meta
    for i, (path, header) in enumerate(zip(paths, headers, strict=True)):
        _check_place(path, header.meta, i, len(paths))
        # the later parts need not name the architecture
        name = header.meta.str("general.architecture", None)
        if name is not None and name != first.architecture:
            problem = f"its architecture differs from that of {paths[0].name}"
            raise InvalidGGUF(path, problem, "Put the parts of one model together.")
    total = sum(len(header.tensors) for header in headers)
    if first.int("split.tensors.count", total) != total:
        problem = f"its parts have {total} tensors in all, not the number that it states"
        raise InvalidGGUF(paths[0], problem)


def _check_place(path: Path, meta: Metadata, no: int, count: int) -> None:
    found, of = meta.int("split.no"), meta.int("split.count")
    if (found, of) != (no, count):
        problem = f"its content is part {found + 1} of {of}, unlike its name"
        raise InvalidGGUF(path, problem, "Give all parts the names they were published under.")
