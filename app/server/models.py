"""The server's models: names, loading and unloading."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import engine  # modules that need torch are imported on first use
from app.server.async_engine import AsyncEngine
from app.server.refusal import Refusal
from engine import (
    EngineError,
    Event,
    Load,
    LoadParams,
    ModelInfo,
    ModelLoaded,
    Unload,
    read_model_info,
)

if TYPE_CHECKING:
    from engine import VisionInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Spell:
    """Converts token ids to bytes.

    Attributes:
        bytes_of: returns a token's bytes.
        is_hidden: returns whether answers hide a token, for example a control token.
    """

    bytes_of: Callable[[int], bytes]
    is_hidden: Callable[[int], bool]

    def __call__(self, token: int) -> bytes:
        return self.bytes_of(token)

    def shown(self, token: int) -> bytes:
        """Return a token's bytes as shown in an answer."""
        return b"" if self.is_hidden(token) else self.bytes_of(token)


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model offered to clients.

    Attributes:
        id: its name.
        others: alternative names.
        created: modification time of its file, in seconds since the epoch.
        n_ctx: context length; None while it is not loaded.
        vision: the loaded model's image support, if any.
    """

    id: str
    others: tuple[str, ...]
    created: int
    info: ModelInfo
    n_ctx: int | None = None
    vision: VisionInfo | None = None

    def loaded_as(self, model: ModelLoaded) -> OfferedModel:
        """Return a copy with the loaded model's details."""
        return replace(self, info=model.info, n_ctx=model.n_ctx, vision=model.vision)


def capabilities_of(info: ModelInfo, *, sees: bool = False) -> list[str]:
    """Return Ollama's `capabilities` list for a model.

    Every chat template supports tools, since the engine adds tool descriptions where necessary.
    """
    capabilities = ["completion"]
    if info.has_chat_template:
        capabilities.append("tools")
    if info.can_think or info.has_thoughts:
        capabilities.append("thinking")
    if sees:
        capabilities.append("vision")
    return capabilities


class Models(Protocol):
    """Interface to a server's models.

    Attributes:
        lost_hint: hint in errors about a lost model.
    """

    lost_hint: str

    @property
    def back_s(self) -> int:
        """Seconds after which clients should retry if the model was lost."""
        ...

    def problem(self) -> str:
        """Return why no model can answer now; "" if one is loaded or can be loaded."""
        ...

    def offered(self) -> Sequence[OfferedModel]:
        """Return all models."""
        ...

    async def ready(self, name: str) -> ModelLoaded:
        """Load the model with this id unless it is already loaded, and return it.

        Raises:
            Refusal: the model cannot be loaded now.
        """
        ...


AGAIN_S = (1, 2, 4, 8, 15)
"""Delays in seconds between attempts to reload a lost model; the last one repeats."""

LOADED_AGAIN = "The model is being reloaded."  # hint in errors while a lost model is reloaded
UNLOADABLE_S = 30  # Retry-After in seconds for a model that cannot be loaded
PERSON_S = 30  # Retry-After in seconds if the user has to load the model


def find_model(models: Models, name: str) -> OfferedModel:
    """Return the model with a name, or the first model if the name is "".

    Raises:
        Refusal: there is no such model, or no model at all.
    """
    offered = models.offered()
    if not offered:
        raise no_model()
    for one in offered:
        if name in ("", one.id, *one.others):
            return one
    raise Refusal(
        404, "There is no model {name}; available: {names}.", param="model", code="model_not_found",
        name=repr(name[:100]), names=", ".join(one.id for one in offered),
    )  # fmt: skip


def no_model() -> Refusal:
    """Return the refusal for requests while no model is loaded."""
    return Refusal(503, "No model is loaded.", "Open one in Tandem.", retry_after_s=PERSON_S)


def offered_file(info: ModelInfo, aliases: Sequence[str] = ()) -> OfferedModel:
    """Return the `OfferedModel` for a file."""
    path = Path(info.path)
    try:
        created = int(path.stat().st_mtime)
    except OSError:
        created = 0
    return OfferedModel(path.stem, (path.name, info.name, *aliases), created, info)


class SingleModel:
    """One model, which is reloaded after it was lost or unloaded.

    Args:
        aliases: alternative names.
        keep_s: seconds of inactivity after which it is unloaded; None for never.
    """

    lost_hint = LOADED_AGAIN

    def __init__(
        self, async_engine: AsyncEngine, params: LoadParams, info: ModelInfo,
        aliases: Sequence[str] = (), keep_s: float | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._params, self._keep_s = async_engine, params, keep_s
        self._offered = offered_file(info, aliases)
        self._loading: asyncio.Task[ModelLoaded] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._load_s = 0.0  # duration of the last load; 0 before the first
        self._again_s = 0  # delay before the next attempt to reload

    @property
    def back_s(self) -> int:
        return max(1, math.ceil(self._load_s), self._again_s)

    def problem(self) -> str:
        is_restored = self._restoring is None or self._restoring.done()
        return "" if is_restored else LOADED_AGAIN

    @property
    def _loaded(self) -> ModelLoaded | None:
        model = self._engine.model
        is_own = model is not None and model.params.path == self._params.path
        return model if is_own else None

    def offered(self) -> Sequence[OfferedModel]:
        model, one = self._loaded, self._offered
        if model is None:
            return [one]
        return [one.loaded_as(model)]

    async def load(self, on_progress: Callable[[Event], None] | None = None) -> ModelLoaded:
        """Load the model.

        Raises:
            EngineError: loading failed.
        """
        start = time.monotonic()
        event = await self._engine.run(Load(self._params), on_progress)
        assert isinstance(event, ModelLoaded), "the closing event of a load"
        self._load_s = time.monotonic() - start
        return event

    def restore(self, error: EngineError) -> None:
        """Reload a lost model without waiting for a request, since a load balancer sends none
        while `/health` fails."""
        if self._load_s and not self.problem():
            self._restoring = asyncio.create_task(self._restore())

    async def _restore(self) -> None:
        for n in count():
            try:
                await asyncio.shield(self.load_soon())
                return
            except EngineError:
                self._again_s = AGAIN_S[min(n, len(AGAIN_S) - 1)]
                await asyncio.sleep(self._again_s)
            finally:
                self._again_s = 0

    def load_soon(self) -> asyncio.Task[ModelLoaded]:
        """Return the task that loads the model, starting one if necessary."""
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self.load())
            self._loading.add_done_callback(_note_failure)
        return self._loading

    async def ready(self, name: str) -> ModelLoaded:
        self._stay()
        if self._loaded is not None and self._unloading is None:
            return self._loaded
        loading = self.load_soon()
        try:
            # several requests may be waiting for this load, and any of them may be cancelled
            return await asyncio.shield(loading)
        except EngineError as error:
            text = "The model cannot be loaded: {problem}"
            again_s = self.back_s if self.problem() else UNLOADABLE_S
            raise Refusal(
                503, text, error.hint, retry_after_s=again_s, problem=error.message
            ) from None

    def _stay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._keep_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._keep_s, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self._engine.is_idle:
            self._unloading = asyncio.create_task(self._unload())
        else:
            self._stay()

    async def _unload(self) -> None:
        try:
            await self._engine.run(Unload())
        finally:
            self._unloading = None

    def close(self) -> None:
        """Cancel the timers that unload and reload the model."""
        if self._timer is not None:
            self._timer.cancel()
        if self._restoring is not None:
            self._restoring.cancel()


def _note_failure(loading: asyncio.Task[ModelLoaded]) -> None:
    if not loading.cancelled() and (error := loading.exception()) is not None:
        log.warning("the model cannot be reloaded: %s", error)


class HeldModel:
    """The model that the window has loaded.

    Args:
        aliases: alternative names.
    """

    back_s = PERSON_S
    lost_hint = "Load the model again in Tandem."

    def __init__(self, async_engine: AsyncEngine, aliases: Sequence[str] = ()) -> None:
        self._engine, self._aliases = async_engine, tuple(aliases)

    def offered(self) -> Sequence[OfferedModel]:
        model = self._engine.model
        if model is None:
            return []
        return [offered_file(model.info, self._aliases).loaded_as(model)]

    def problem(self) -> str:
        return "" if self._engine.model is not None else "No model is loaded."

    async def ready(self, name: str) -> ModelLoaded:
        if self._engine.model is None:
            raise no_model()
        return self._engine.model


class Spelling:
    """Models' token bytes, read from their files on first use."""

    def __init__(self) -> None:
        self._path = ""
        self._spell: Spell | None = None

    async def of(self, path: str) -> Spell:
        """Return the token bytes for a model file.

        Raises:
            EngineError: the file cannot be read.
        """
        if self._spell is None or self._path != path:
            tokenizer = await _on_thread(partial(engine.load_tokenizer, path))
            self._spell = Spell(tokenizer.token_bytes, tokenizer.is_hidden)
            self._path = path
        return self._spell


T = TypeVar("T")

LOOK_S = 60.0  # interval in seconds between scans of the folders
IDLE_S = 0.02  # interval in seconds between checks whether all answers have finished
FindFiles = Callable[[], Iterable[Path]]
"""Finds model files; called on another thread."""

ChooseParams = Callable[[str], LoadParams]
"""Returns the load parameters for a path; called on another thread."""


class ModelShelf:
    """The models on disk that can be loaded."""

    def __init__(self, find: FindFiles) -> None:
        self._find = find
        self._known: dict[Path, tuple[int, OfferedModel | None]] = {}  # by path, with mtime
        self.models: Sequence[OfferedModel] = ()

    def look(self) -> None:
        """Scan for models, reading the headers of new and changed files."""
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
    try:
        info = read_model_info(path)
    except EngineError as error:
        log.info("%s is not offered: %s", path.name, error)
        return None
    return offered_file(info) if info.supported else None


class LibraryModels:
    """The models in some folders, and one that is loaded first.

    A request for another model waits until all running answers have finished; later requests queue.

    Args:
        first: the model that is loaded first.
        shelf: the other models.
        choose: returns the load parameters for a path.
        keep_s: seconds of inactivity after which a model is unloaded; None for never.
    """

    lost_hint = LOADED_AGAIN

    def __init__(
        self, async_engine: AsyncEngine, first: SingleModel, shelf: ModelShelf,
        choose: ChooseParams, keep_s: float | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._shelf = async_engine, shelf
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
        """Reload the lost model."""
        self._now.restore(error)

    def offered(self) -> Sequence[OfferedModel]:
        present = [*self._now.offered()]
        if self._first is not self._now:
            present += self._first.offered()
        taken = {one.id for one in present}
        others: list[OfferedModel] = []
        for one in self._shelf.models:
            if one.id not in taken:  # clients cannot distinguish files with the same name
                taken.add(one.id)
                others.append(one)
        return [*present, *others]

    async def ready(self, name: str) -> ModelLoaded:
        async with self._turn:
            if name not in [one.id for one in self._now.offered()]:
                await self._change(name)
            return await self._now.ready(name)

    async def _change(self, name: str) -> None:
        model = next((one for one in self.offered() if one.id == name), None)
        if model is None:
            text = "{name} no longer exists."
            raise Refusal(404, text, code="model_not_found", name=name[:100])
        while not self._engine.is_idle:
            await asyncio.sleep(IDLE_S)
        self._now.close()
        if name in [one.id for one in self._first.offered()]:
            self._now = self._first
            return
        try:
            params = await _on_thread(partial(self._choose, model.info.path))
        except EngineError as error:
            text = "The model cannot be loaded: {problem}"
            raise Refusal(503, text, error.hint, problem=error.message) from None
        self._now = SingleModel(self._engine, params, model.info, (), self._keep_s)

    def open(self) -> None:
        """Start scanning for models at regular intervals, on a thread."""
        self._looking = asyncio.create_task(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            try:
                await _on_thread(self._shelf.look)
            except OSError as error:
                log.warning("the model folders cannot be read: %s", error)
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """Stop scanning and cancel the current model's timers."""
        self._now.close()
        if self._looking is not None:
            self._looking.cancel()


async def _on_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:  # not the loop's executor, whose threads persist
        return await asyncio.get_running_loop().run_in_executor(pool, work)
