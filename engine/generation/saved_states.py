"""Saving of a loaded model's cached sequences to state files, and loading them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.generation.results import StateLoaded, StateSaved
from engine.generation.state_file import StateFiles
from engine.hardware.faults import explain_faults
from engine.util.progress import IsCancelled, StateSink, ignore, never

if TYPE_CHECKING:
    from engine.generation.occupancy import Occupancy
    from engine.generation.scheduling.scheduler import Scheduler
    from engine.load_params import LoadParams
    from engine.model.architectures.description import ModelInfo
    from engine.runtime.thread_runtime import ThreadRuntime


class SavedStates:
    """The part of `engine.api.Model` that saves and loads what is cached of sequences."""

    info: ModelInfo
    model_hash: str
    params: LoadParams
    runtime: ThreadRuntime
    scheduler: Scheduler
    _occupancy: Occupancy

    def save_state(
        self,
        path: str | Path,
        *,
        ids: Sequence[int] | None = None,
        start: int = 0,
        stop: int | None = None,
        on_progress: StateSink = ignore,
        is_cancelled: IsCancelled = never,
    ) -> StateSaved:
        """Save what is cached of a sequence to a file, from which any split of this model goes on.

        An earlier file of that name is replaced as a whole, or stays; so it does where the cache
        has lost tokens and the file has more of the sequence, which the result describes then.
        Models with recurrent states can only be saved whole.

        Args:
            path: path of the file to write.
            ids: tokens of the sequence; None for the one that was computed last.
            start: first position to save; loading the file needs the positions before in the cache.
            stop: position after the last one to save; None is the end.
            on_progress: receiver of the number of saved bytes.
            is_cancelled: asked again and again; returning True ends the saving.

        Raises:
            StateFileError: nothing is in the cache, or the file cannot be written.
        """
        with self._in_state("saved", is_cancelled) as (files, is_cancelled):
            wanted = self.scheduler.last if ids is None else ids
            n_tokens, n_bytes = files.save(
                Path(path), list(wanted), start, stop, on_progress, is_cancelled
            )
        return StateSaved(str(path), n_tokens, n_bytes)

    def load_state(
        self,
        path: str | Path,
        *,
        n_tokens: int | None = None,
        on_progress: StateSink = ignore,
        is_cancelled: IsCancelled = never,
    ) -> StateLoaded:
        """Put a sequence saved with `save_state` into the cache, beside what is there.

        A prompt that begins with the same tokens then computes only the rest. Nothing changes
        before the file is found to be in order and of this model. Models with recurrent states can
        only be loaded whole, those with windows mostly so.

        Args:
            path: path of the file.
            n_tokens: number of tokens to load, from the first on; None is all that the context
                holds.
            on_progress: receiver of the number of loaded bytes.
            is_cancelled: asked again and again; returning True ends the loading.

        Raises:
            StateFileError: the file is damaged, or of another model or KV type.
            ContextOverflow: the context is too short for it.
        """
        with self._in_state("loaded", is_cancelled) as (files, is_cancelled):
            ids = files.load(Path(path), n_tokens, on_progress, is_cancelled)
            self.scheduler.note_last(ids)
        return StateLoaded(str(path), tuple(ids))

    @contextmanager
    def _in_state(
        self, done: str, is_cancelled: IsCancelled
    ) -> Iterator[tuple[StateFiles, IsCancelled]]:
        """Use the model to save or load its state."""
        doing = f"its state is being {done}"
        with self._occupancy.use(doing, is_cancelled) as is_cancelled:
            self.runtime.runner.check_loaded()
            with explain_faults(self.runtime.devices), self.scheduler.emptied() as places:
                yield (
                    StateFiles(
                        self.runtime, places, self.info.name, self.model_hash, self.params.rope
                    ),
                    is_cancelled,
                )
