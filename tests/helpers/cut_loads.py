"""Loads of a model whose file another program changes meanwhile, in a process of its own.

`python -m tests.helpers.cut_loads MODEL RANKS` prints a JSON list with the class, the sentence and
the hint of the error of each: `N_POINTS` loads of a file that is cut short, one of a file that is
written to, a re-split with a file that is cut, and another. If the file were mapped, the process
would end.
"""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from engine import LoadParams
from engine.api import Model
from engine.errors import EngineError
from engine.formats.gguf.reader import GGUFFile
from engine.runtime import loader

N_POINTS = 4
"""Number of loads, each cut at another of the model's tensors."""


def main(path: Path, n_ranks: int) -> None:
    with GGUFFile.open(path) as file:
        tensors = list(file.tensors.values())
    copy = path.with_name("cut.gguf")
    params = LoadParams(str(copy), ("cpu",) * n_ranks, n_ctx=64)
    found = []
    for point in range(N_POINTS):
        shutil.copy(path, copy)
        n_kept = tensors[point * len(tensors) // N_POINTS].offset
        with before_tensor(1, partial(os.truncate, copy, n_kept)):
            found.append(outcome(lambda: Model(params)))
    shutil.copy(path, copy)
    with before_tensor(2, partial(write_into, copy)):
        found.append(outcome(lambda: Model(params)))
    with Model(params) as model:
        params = LoadParams(str(copy), ("cpu",) * (n_ranks + 1), n_ctx=64)
        with before_tensor(3, partial(os.truncate, copy, tensors[0].offset)):
            found.append(outcome(lambda: model.split_as(params)))
        found.append(outcome(lambda: model.split_as(params)))
    sys.stdout.write(json.dumps(found))


def write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"GGUF")


@contextmanager
def before_tensor(n: int, action: Callable[[], object]) -> Iterator[None]:
    """Call `action` before the tensor number `n` of those that ranks load, from 1 on."""
    load, count = loader._value, itertools.count(1)

    def act_and_load(*args: object) -> object:
        if next(count) == n:
            action()
        return load(*args)

    loader._value = act_and_load
    try:
        yield
    finally:
        loader._value = load


def outcome(action: Callable[[], object]) -> tuple[str, str, str]:
    try:
        action()
    except EngineError as error:
        return type(error).__name__, str(error), error.hint
    return "", "", ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
