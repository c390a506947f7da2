"""Settings and memory of a draft model, a small model that guesses for the one that is loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.formats.gguf.companions import Stamp, stamp_of
from engine.formats.gguf.reader import GGUFFile
from engine.hardware.backend_choice import uses_kernels
from engine.load_params import LoadParams
from engine.model.architectures.declare import declare, read_sizes
from engine.model.forward.batch import PROMPT_BATCH
from engine.model.forward.state import RecurrentState
from engine.planning.draft.mtp_file import draft_model_path
from engine.planning.rank_size import rank_memory, rank_size

if TYPE_CHECKING:
    from engine.model.architectures.declare import Declaration

MOST_KEPT = 8
"""Number of draft models' sizes that are remembered: a plan is made for each move of the mouse."""


def draft_params(params: LoadParams, n_ctx: int) -> LoadParams:
    """Return the settings with which the draft model of a model is loaded.

    It lies whole on one device, and has a context that is no longer than it was trained for.

    Args:
        params: settings of the model that it guesses for.
        n_ctx: context of that model, in tokens.

    Raises:
        ModelFileError: its file cannot be read or used.
    """
    wanted = LoadParams(
        path=params.draft_path, devices=(params.draft_device,), n_ctx=n_ctx,
        parallel=params.parallel, cpu_threads=params.cpu_threads, draft="off",
        fast_prompts=params.fast_prompts, n_batch=PROMPT_BATCH, reserve=params.reserve,
    )  # fmt: skip
    with GGUFFile.open(wanted.path) as file:
        _, hp = read_sizes(file, wanted)
    return replace(wanted, n_ctx=min(n_ctx, hp.n_ctx_train or n_ctx))


def draft_bytes(params: LoadParams, n_ctx: int) -> int:
    """Return the predicted bytes of a draft model; 0 without one.

    Args:
        params: settings of the model that it guesses for.
        n_ctx: context of that model, in tokens.

    Raises:
        EngineError: its file cannot be read, or is of a model that cannot be one.
    """
    if not draft_model_path(params):
        return 0
    stamp = stamp_of(Path(params.draft_path))  # of no file: opening it tells what is wrong
    wanted = LoadParams(
        path="", devices=params.devices, split=params.split, parallel=params.parallel,
        draft=params.draft, fast_prompts=params.fast_prompts,
    )  # fmt: skip
    return _bytes(wanted, n_ctx, stamp)


@lru_cache(MOST_KEPT)
def _bytes(params: LoadParams, n_ctx: int, stamp: Stamp) -> int:
    wanted = draft_params(params, n_ctx)
    with GGUFFile.open(wanted.path) as file:
        declaration = declare(file, wanted)
        check_rewinds(declaration, file)
        storage = "kernels" if uses_kernels(wanted.devices[0]) else "f32"
        size = rank_size(declaration, 0, storage, wanted.kv_type)
        hp, device = declaration.hp, wanted.devices[0]
    return rank_memory(wanted, hp, device, storage, size, 0, PROMPT_BATCH).total


def check_rewinds(declaration: Declaration, file: GGUFFile) -> None:
    """Check that a draft model can forget the guesses that were wrong.

    Raises:
        EngineError: it has recurrent layers.
    """
    if any(isinstance(state, RecurrentState) for state in declaration.states):
        raise EngineError(
            f"{file.path.name} cannot be a draft model: its recurrent layers cannot forget wrong "
            "guesses.",
            "Choose a model with attention only.",
        )
