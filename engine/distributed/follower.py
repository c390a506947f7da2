"""The life of a process on a machine that follows machine 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.distributed.machine_runtime import MachineRuntime
from engine.distributed.machines import END, LOAD, UNLOAD, Machines
from engine.errors import EngineError
from engine.gguf.reader import GGUFFile
from engine.planning.params_json import params_from
from engine.progress import ignore, never

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
        given = params_from({k: v for k, v in document.items() if k != "path"}, document["path"])
        # templates, draft models and pictures are the business of machine 0 alone
        draft = "ngram" if given.draft_path else given.draft
        params = replace(
            given, path=path or given.path, cpu_threads=cpu_threads, chat_template="", draft=draft,
            mmproj="off",
        )  # fmt: skip
        with _opened(machines, params.path) as file:
            models[number] = MachineRuntime(file, params, ignore, never, machines, number, donor)
    except EngineError as error:
        log.warning("the model is not loaded: %s", error)


def _opened(machines: Machines, path: str) -> GGUFFile:
    """Open this machine's copy of the file.

    Raises:
        EngineError: it cannot be read, which the other machines know then.
    """
    try:
        return GGUFFile.open(Path(path))
    except EngineError as error:
        machines.agreed(error)
        raise
