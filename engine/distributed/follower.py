"""The life of a process on a machine that follows machine 0."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from engine.distributed.machine_runtime import BLOCK, MachineRuntime
from engine.distributed.machines import END, LOAD, UNLOAD, Machines
from engine.errors import EngineError
from engine.formats.gguf.reader import GGUFFile
from engine.planning.draft import with_mtp_file
from engine.planning.saved_plans import params_from
from engine.util.progress import ignore, never

log = logging.getLogger(__name__)


def follow(machines: Machines, path: str, cpu_threads: int | None) -> None:
    """Do what machine 0 orders, until it says that this is the end.

    Args:
        path: path of this machine's copy of the model's file; "" for the path on machine 0.
        cpu_threads: number of threads of this machine's CPU ranks; None is one per core.

    Raises:
        EngineError: this machine failed in the middle of a step, or another one is gone.
    """
    models: dict[int, MachineRuntime] = {}
    while True:
        order, (*given,) = machines.orders.receive()
        if order == END:
            return
        machines.orders.expect()
        number, *values = given
        if order == LOAD:
            document, donor = values
            _load(machines, models, number, document, path, cpu_threads, models.get(donor))
            if donor in models and not models[donor].ranks:
                del models[donor]
        elif order == UNLOAD:
            models.pop(number).close()
        else:
            models[number].follow(order, values)


def _load(
    machines: Machines, models: dict[int, MachineRuntime], number: int,
    document: Mapping[str, Any], path: str, cpu_threads: int | None, donor: MachineRuntime | None,
) -> None:  # fmt: skip
    """Load a model as all machines do; it is missing afterwards if any of them cannot."""
    try:
        settings = {k: v for k, v in document.items() if k not in ("path", BLOCK)}
        given, block = params_from(settings, document["path"]), document[BLOCK]
        # templates, draft models and pictures are the business of machine 0 alone
        draft = "mtp" if block else "ngram" if given.draft_path else given.draft
        params = replace(
            given, path=path or given.path, cpu_threads=cpu_threads, chat_template="", draft=draft,
            mmproj="off",
        )  # fmt: skip
        with _opened(machines, params.path, block) as file:
            models[number] = MachineRuntime(file, params, ignore, never, machines, number, donor)
    except EngineError as error:
        log.warning("the model is not loaded: %s", error)


@contextmanager
def _opened(machines: Machines, path: str, block: str) -> Iterator[GGUFFile]:
    """Open this machine's copy of the file, with its MTP block if that has a file of its own.

    Args:
        path: path of the file.
        block: path of the file with the block on machine 0; "" for none.

    Raises:
        EngineError: one cannot be read, which the other machines know then.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(GGUFFile.open(Path(path)))
            whole = stack.enter_context(with_mtp_file(file, block and _own_copy(block, path)))
        except EngineError as error:
            machines.agreed(error)
            raise
        yield whole


def _own_copy(path: str, model: str) -> str:
    """Return the path of this machine's copy of a file that machine 0 has, beside the model or not.

    Raises:
        EngineError: there is none.
    """
    name = PurePath(path.replace("\\", "/")).name
    for found in (Path(model).parent / name, Path(path)):
        if found.is_file():
            return str(found)
    raise EngineError(f"There is no file {name} beside the model.", "Copy it there.")
