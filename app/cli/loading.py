"""Loading a model with a progress line, for the subcommands that compute."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import engine  # names that need torch are resolved when they are used
from app.cli.arguments import load_params
from app.cli.output import note
from engine import LoadParams, LoadProgress

if TYPE_CHECKING:
    from engine import Model


def load(args: argparse.Namespace) -> Model:
    """Load what the common options ask for; progress and warnings go to stderr.

    Raises:
        EngineError: it cannot be loaded.
    """
    model = open_model(load_params(args))
    for warning in model.warnings:
        note(warning)
    return model


def open_model(params: LoadParams) -> Model:
    """Load a model, with progress on stderr.

    Raises:
        EngineError: it cannot be loaded.
    """
    try:
        return engine.Model(params, on_progress=_show)
    finally:
        if sys.stderr.isatty():
            note("\r\x1b[K", end="")


def _show(progress: LoadProgress) -> None:
    if sys.stderr.isatty():
        done = progress.done_bytes / max(1, progress.total_bytes)
        note(f"\rLoading {done:4.0%}", end="")
