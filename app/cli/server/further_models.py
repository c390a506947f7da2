"""Models beside the one of `tandem serve`, each loaded when a request names it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from app.cli.split.default_split import with_comfortable_context, with_default_split
from app.core.paths import models_dir
from app.models.library.places import known_places
from app.models.library.scan import scan
from engine import EngineError, LoadParams


@dataclass(frozen=True, slots=True)
class FurtherModels:
    """Finder of further models, and of the way in which each is loaded.

    Attributes:
        find: looks for their files.
        choose: says how the model of a path is loaded.
    """

    find: Callable[[], Iterable[Path]]
    choose: Callable[[str], LoadParams]


def further_models(args: argparse.Namespace, given: LoadParams) -> FurtherModels:
    """Return what the options say about further models.

    They are loaded like the first one, but for what concerns that file alone.

    Args:
        given: how the first one is loaded, before a split was chosen for it.

    Raises:
        EngineError: there is no such folder.
    """
    for folder in args.models:
        if not Path(folder).is_dir():
            raise EngineError(f"There is no folder {folder}.", "Name another one with --models.")
    usual = replace(
        given, split=None, groups=None, overrides=(), n_cpu_blocks=0, n_cpu_moe=0,
        control_vectors=(), control_layers=None, chat_template="",
        rope_scaling="", rope_factor=0.0, rope_base=0.0,
    )  # fmt: skip

    def find() -> list[Path]:
        places = known_places((*args.models, models_dir()))
        return [one.path for one in scan(places) if not one.missing]

    def choose(path: str) -> LoadParams:
        return with_comfortable_context(args, with_default_split(args, replace(usual, path=path)))

    return FurtherModels(find, choose)
