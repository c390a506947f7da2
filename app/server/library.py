"""Several models, of which one is loaded: a request that names another has that one loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from app.server.link import EngineLink
from app.server.models import LOADED_AGAIN, OfferedModel, SingleModel, offered_file
from app.server.refusal import Refusal
from engine import EngineError, LoadParams, ModelLoaded, read_model_info

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 60.0
"""Interval, in seconds, at which the folders are looked through again."""

IDLE_S = 0.02
"""Interval, in seconds, at which the end of all answers is waited for."""

FindFiles = Callable[[], Iterable[Path]]
"""What looks for model files; called on another thread."""

ChooseParams = Callable[[str], LoadParams]
"""What says how the model of a path is to be loaded; called on another thread."""


class ModelShelf:
    """The models that were found on the disk and can be loaded."""

    def __init__(self, find: FindFiles) -> None:
        self._find = find
        self._known: dict[Path, tuple[int, OfferedModel | None]] = {}  # by path, with its time
        self.models: Sequence[OfferedModel] = ()

    def look(self) -> None:
        """Look for models; takes as long as reading the headers of new files."""
        known: dict[Path, tuple[int, OfferedModel | None]] = {}
        for path in self._find():
            try:
                changed = path.stat().st_mtime_ns
            except OSError:
                continue
            before = self._known.get(path)
            is_same = before is not None and before[0] == changed
            known[path] = before if before and is_same else (changed, _read(path))
        self._known = known
        self.models = [model for _, model in known.values() if model is not None]


def _read(path: Path) -> OfferedModel | None:
    """Return a file as a model that can be asked for; None if it cannot be run."""
    try:
        info = read_model_info(path)
    except EngineError as error:
        log.info("%s is not offered: %s", path.name, error)
        return None
    return offered_file(info) if info.supported else None


class LibraryModels:
    """The models of some folders, and one that is loaded from the beginning.

    Requests come one after another: one for another model waits until the answers of the loaded
    one have ended, and those that come behind it wait for it.

    Args:
        first: the model that is loaded first.
        shelf: where the others stand.
        choose: says how one of them is to be loaded.
        keep_s: seconds without a request after which one is unloaded; None for never.
    """

    lost_hint = LOADED_AGAIN

    def __init__(
        self, link: EngineLink, first: SingleModel, shelf: ModelShelf, choose: ChooseParams,
        keep_s: float | None = None,
    ) -> None:  # fmt: skip
        self._link, self._shelf = link, shelf
        self._choose, self._keep_s = choose, keep_s
        self._now = self._first = first
        self._turn = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    @property
    def back_s(self) -> int:
        return self._now.back_s

    def problem(self) -> str:
        return self._now.problem()

    def restore(self, error: EngineError) -> None:
        """Load the model that was lost again."""
        self._now.restore(error)

    def offered(self) -> Sequence[OfferedModel]:
        present = [*self._now.offered()]
        if self._first is not self._now:
            present += self._first.offered()
        taken = {one.id for one in present}
        others: list[OfferedModel] = []
        for one in self._shelf.models:
            if one.id not in taken:  # two files of one name cannot be told apart by it
                taken.add(one.id)
                others.append(one)
        return [*present, *others]

    async def ready(self, name: str) -> ModelLoaded:
        async with self._turn:
            if name not in [one.id for one in self._now.offered()]:
                await self._change(name)
            return await self._now.ready(name)

    async def _change(self, name: str) -> None:
        """Switch to another model, once all answers have ended."""
        model = next((one for one in self.offered() if one.id == name), None)
        if model is None:
            raise Refusal(404, f"{name[:100]} is not there any more.", code="model_not_found")
        while not self._link.is_idle:
            await asyncio.sleep(IDLE_S)
        self._now.close()
        if name in [one.id for one in self._first.offered()]:
            self._now = self._first
            return
        try:
            params = await _on_thread(partial(self._choose, model.info.path))
        except EngineError as error:
            raise Refusal(503, f"The model cannot be loaded: {error}", error.hint) from None
        self._now = SingleModel(self._link, params, model.info, (), self._keep_s)

    def open(self) -> None:
        """Look for models from now on, on a thread."""
        self._looking = asyncio.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            try:
                await _on_thread(self._shelf.look)
            except OSError as error:
                log.warning("the folders of models cannot be read: %s", error)
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """End the search for models, and the wait for unloading one."""
        self._now.close()
        if self._looking is not None:
            self._looking.cancel()


async def _on_thread(work: Callable[[], T]) -> T:
    """Return what some work returns, done on a thread that ends with it."""
    with ThreadPoolExecutor(1) as pool:  # not the loop's, whose threads would stay
        return await asyncio.get_running_loop().run_in_executor(pool, work)
