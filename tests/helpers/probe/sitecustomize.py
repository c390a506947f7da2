"""What a watched process runs when its Python starts: it tidies up and counts when it is asked to.

`tests.helpers.process_watch` puts this folder on the path of imports. SIGUSR2 has the process
collect garbage, give freed memory back to the system, and write how much it still holds into the
file `PID.json` of the folder that `TANDEM_PROBE` names. Each watched process has a file there.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

N_TYPES = 60
"""Number of types whose objects are counted: those with the most."""


def _count(*_: object) -> None:
    for _ in range(3):  # what a round frees may have been the last to hold something else
        gc.collect()
    n_blocks = sys.getallocatedblocks()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than GNU's
        ctypes.CDLL(None).malloc_trim(0)
    kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    told = {"n_blocks": n_blocks, "types": dict(kinds.most_common(N_TYPES))}
    path = _path()
    path.with_suffix(".new").write_text(json.dumps(told))
    path.with_suffix(".new").replace(path)


def _path() -> Path:
    return Path(os.environ["TANDEM_PROBE"], f"{os.getpid()}.json")


if "TANDEM_PROBE" in os.environ and hasattr(signal, "SIGUSR2"):
    signal.signal(signal.SIGUSR2, _count)
    with contextlib.suppress(OSError):
        _path().write_text("{}")
