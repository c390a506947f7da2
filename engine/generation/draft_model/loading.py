"""A draft model beside the model that it guesses for: loading, failing, freeing."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Generic

from engine.decoding.drafting.guesses import Answer
from engine.errors import EngineError, OutOfDeviceMemory
from engine.formats.gguf.reader import GGUFFile
from engine.generation.draft_model.source import ModelSource
from engine.planning.draft.memory import draft_params
from engine.runtime.opening import open_runtime
from engine.runtime.thread_runtime import ThreadRuntime
from engine.util.progress import IsCancelled, ignore

if TYPE_CHECKING:
    from engine.load_params import LoadParams

log = logging.getLogger(__name__)


class DraftModel(Generic[Answer]):
    """A loaded draft model, whole on one device.

    Args:
        params: settings of the model that it guesses for.
        main: ranks of that model.
        is_cancelled: asked again and again; returning True ends the loading.

    Attributes:
        device: name of its device.
        source: its guesses.

    Raises:
        EngineError: its file cannot be used, its device is full, or it was cancelled.
    """

    def __init__(self, params: LoadParams, main: ThreadRuntime, is_cancelled: IsCancelled) -> None:
        wanted = draft_params(params, main.n_ctx)
        (self.device,) = wanted.devices
        with GGUFFile.open(wanted.path) as file:
            try:
                self._runtime = open_runtime(file, wanted, ignore, is_cancelled)
            except OutOfDeviceMemory as error:
                error.hint = f"{error.hint} Or do without the draft model.".strip()
                raise
        self._failed: Callable[[str], None] = lambda why: None
        me = weakref.ref(self)  # a cycle would keep weights alive
        self.source: ModelSource[Answer] = ModelSource(
            self._runtime.runner, main.runner.n_vocab, lambda error: _fail(me(), error),
            lambda: _turn(me()),
        )  # fmt: skip
        self.attach(main)

    def attach(self, main: ThreadRuntime) -> None:
        """Count its memory for the ranks of a model from now on, and tell that of a failure."""
        self._main = main
        held = [rank.held for rank in self._runtime.ranks]
        main.note_beside("draft", sum(use.weights + use.kv for use in held))
        fallbacks, device = main.fallbacks, self.device
        self._failed = lambda why: fallbacks.report("draft", (device,), why)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the two models' threads compute by turns: they would spin in each other's way."""
        self._main.rest()
        try:
            yield
        finally:
            self._runtime.rest()

    def fail(self, error: Exception) -> None:
        """Free the model, which has failed, and say so once."""
        log.warning("The draft model has failed: %s", error, exc_info=error)
        self._failed(str(error) if isinstance(error, EngineError) else "of a bug, see the log")
        self._runtime.close()

    def close(self) -> None:
        """Free all memory, and raise nothing; safe to call twice."""
        self._runtime.close()


def _fail(draft: DraftModel[Answer] | None, error: Exception) -> None:
    if draft is not None:
        draft.fail(error)


def _turn(draft: DraftModel[Answer] | None) -> AbstractContextManager[None]:
    return nullcontext() if draft is None else draft.turn()
