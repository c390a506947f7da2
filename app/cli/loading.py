"""Model loading with a progress line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import engine  # modules that need torch are imported on first use
from app.cli.load_options import add_load, load_params
from app.cli.output import note, note_progress
from app.cli.split.default_split import with_default_split
from app.core.process.interruption import importing
from engine import LoadParams, LoadProgress

if TYPE_CHECKING:
    from app.remote.client.model import RemoteModel
    from engine import Model


def load(args: argparse.Namespace) -> Model:
    """Load the model that the options name; progress and warnings go to stderr.

    Raises:
        EngineError: the model cannot be loaded.
    """
    model = open_model(with_default_split(args, load_params(args)))
    note_warnings(model)
    return model


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the load options that were given."""
    known = argparse.ArgumentParser()
    add_load(known)
    return [
        action.option_strings[0]
        for action in known._actions
        if action.default is None and getattr(args, action.dest, None) is not None
    ]


def note_warnings(model: Model | RemoteModel, known: Collection[str] = ()) -> tuple[str, ...]:
    """Write a model's new warnings to stderr; return all its warnings."""
    for warning in model.warnings:
        if warning not in known:
            note(warning)
    return model.warnings


class LoadWatch:
    """Progress line for a load.

    Attributes:
        bytes_per_s: rate at which weights are read, over all devices; None until known.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._first: tuple[float, int] | None = None
        self._n_done = 0

    def __call__(self, progress: LoadProgress) -> None:
        now, n_done = time.perf_counter(), progress.done_bytes
        if self._first is None:
            self._first = now, n_done  # how long the earlier bytes took is unknown
        elif n_done > self._n_done and now > self._first[0]:
            self.bytes_per_s = (n_done - self._first[1]) / (now - self._first[0])
        self._n_done = n_done
        done = n_done / max(1, progress.total_bytes)
        speed = f"  {self.bytes_per_s / 1e9:.1f} GB/s" if self.bytes_per_s else ""
        note_progress(f"Loading {done:4.0%}{speed}  {progress.doing}")


def open_model(params: LoadParams, watch: LoadWatch | None = None) -> Model:
    """Load a model, with progress on stderr.

    Raises:
        EngineError: the model cannot be loaded.
    """
    with importing():
        model_class = engine.Model  # imports torch; exceptions must not interrupt this
    try:
        return model_class(params, on_progress=watch or LoadWatch())
    finally:
        note_progress()
