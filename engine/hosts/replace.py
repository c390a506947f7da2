"""Replacement of a loaded model by another one; the old one is kept where the new one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.api import Model
from engine.errors import DeviceStopped, EngineError, OutOfDeviceMemory
from engine.util.progress import IsCancelled, ProgressSink, never

if TYPE_CHECKING:
    from engine.load_params import LoadParams


def replace_model(
    old: Model | None,
    params: LoadParams,
    on_progress: ProgressSink,
    is_cancelled: IsCancelled,
    hold: Callable[[Model | None], None],
    is_closing: IsCancelled = never,
) -> None:
    """Load a model in place of another, and keep the old one if the new one fails.

    Where both fit, the old one is freed last. Where not, it makes room first and is loaded again
    after a failure. One whose GPU has stopped working is not kept.

    Args:
        old: loaded model; None for none.
        params: settings of the new model.
        on_progress: receiver of the loading's progress.
        is_cancelled: asked again and again; returning True ends the loading.
        hold: receiver of the loaded model, or None, after every change.
        is_closing: returns whether loading the old model again is no longer of use.

    Raises:
        EngineError: the new model was not loaded.
    """
    try:
        new = Model(params, on_progress, is_cancelled)
    except OutOfDeviceMemory:
        if old is None:
            raise
    except DeviceStopped:
        if old is not None and old.has_stopped:  # it can neither answer nor be saved
            hold(None)
            old.close()
        raise
    else:
        hold(new)
        if old is not None:
            old.close()
        return
    hold(None)
    old.close()
    try:
        hold(Model(params, on_progress, is_cancelled))
    except EngineError as error:
        _reload(old, on_progress, hold, error, is_closing)
        raise


def _reload(
    old: Model,
    on_progress: ProgressSink,
    hold: Callable[[Model | None], None],
    error: EngineError,
    is_closing: IsCancelled,
) -> None:
    """Load the old model again, which made room in vain; if that fails, the hint says so."""
    try:
        hold(Model(old.params, on_progress, is_closing))
    except EngineError:
        lost = f"{old.info.name} was unloaded to make room and could not be loaded again."
        error.hint = f"{error.hint} {lost}".strip()
