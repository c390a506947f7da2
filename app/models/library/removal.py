"""The files of a model, moved to the trash together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from app.core.translation import tr, tr_n
from app.core.units import decimal_size
from app.models.library.scan import FoundModel

log = logging.getLogger(__name__)


def files_of(found: FoundModel, all_models: Iterable[FoundModel]) -> list[Path]:
    """Return the files that go with a model: its parts, and helpers that no other model needs."""
    others = [other for other in all_models if other.path != found.path]
    needed = {path for other in others for path in (other.projector, other.draft)}
    helpers = (found.projector, found.draft)
    return [*found.parts, *(path for path in helpers if path is not None and path not in needed)]


def question_of(found: FoundModel, files: list[Path]) -> str:
    """Return the question before files are moved, with their number and size."""
    n_bytes = sum(path.stat().st_size for path in files if path.exists())
    return tr("Move {name} to the trash ({files}, {size})?").format(
        name=found.name,
        files=tr_n("{n} file", "{n} files", len(files)),
        size=decimal_size(n_bytes),
    )


def move_to_trash(files: Iterable[Path]) -> list[Path]:
    """Move files to the trash; return those that could not be moved, and stay."""
    from send2trash import send2trash  # late: on some systems it starts a service

    kept = []
    for path in files:
        try:
            send2trash(path)
        except OSError as error:
            log.info("%s stays: %s", path.name, error.strerror or type(error).__name__)
            kept.append(path)
    return kept
