"""Replace a file as a whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def write_json(path: Path, value: object) -> None:
    """Write `value` beside `path` and move it there, so that a crash leaves the old file.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, ensure_ascii=False, indent=1)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
