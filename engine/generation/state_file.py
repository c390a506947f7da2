"""Saving a model's KV cache and recurrent states, and loading them on any split of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from engine.errors import ContextOverflow, Sentence, StateFileError, reason_of
from engine.generation.kv_cache import OutOfPages
from engine.generation.results import StateLoaded, StateSaved
from engine.generation.state_format import (
    Contents,
    Entry,
    StateHeader,
    entries,
    has_images,
    header,
    identity,
)
from engine.generation.state_strips import (
    CopyProgress,
    pieces,
    read_units,
    read_whole,
    strips_of,
    write,
)
from engine.hardware.faults import explain_faults
from engine.model.forward.batch import Piece
from engine.model.forward.pages import GONE, PAGE, n_alike
from engine.model.forward.state import KVState, RecurrentState, windows_of
from engine.model.sharding.split import Run, as_one, runs
from engine.runtime.memory import CachedRows
from engine.util.files import atomic_write
from engine.util.progress import IsCancelled, StateSink, ignore, never

if TYPE_CHECKING:
    from engine.generation.cache_manager import KVCacheManager, SequenceCache
    from engine.generation.scheduler import Scheduler
    from engine.generation.stream import Occupancy
    from engine.load_params import LoadParams
    from engine.model.architectures.description import ModelInfo
    from engine.runtime.interface import SlotState
    from engine.runtime.thread_runtime import ThreadRuntime


class StateFiles:
    """Reader and writer of one loaded model's state files.

    Args:
        manager: the cache; no sequence may be running.
        name: name of the model, for error messages.
        model_hash: see `engine.formats.gguf.reader`.
        rope: changed RoPE settings, as in `LoadParams.rope`; "" for none.
    """

    def __init__(
        self, runtime: ThreadRuntime, manager: KVCacheManager, name: str, model_hash: str,
        rope: str = "",
    ) -> None:  # fmt: skip
        self._runtime, self._manager, self._name = runtime, manager, name
        self._runner, self._kv_type = runtime.runner, runtime.plan.kv_type
        self._n_ranks = len(runtime.plan.devices)
        first = runtime.ranks[0]
        self._states = first.trunk_states
        self._windows = windows_of(first.states)
        self._recurrent = [s for s in self._states if isinstance(s, RecurrentState)]
        self._identity = identity(
            model_hash, self._kv_type, first.trunk_slots, runtime.directions, rope
        )

    @torch.inference_mode()
    def save(
        self, path: Path, ids: Sequence[int], start: int, stop: int | None, on_progress: StateSink,
        is_cancelled: IsCancelled,
    ) -> tuple[int, int]:  # fmt: skip
        """Write a cached sequence to a state file; see `Model.save_state`.

        If some of its pages are gone, an existing file that has more of the sequence is kept.

        Args:
            ids: tokens of the sequence.

        Returns:
            Number of the sequence's tokens in the file, and the file's size in bytes.
        """
        cache = self._manager.allocate(ids)
        try:
            n_in_file = 0
            if cache.n < min(len(ids), len(ids) if stop is None else stop):
                n_in_file = self._n_in_file(path, ids, start)
            if n_in_file > cache.n:
                return n_in_file, path.stat().st_size
            contents = self._contents(path, cache, start, stop)
            return self._write(path, cache, contents, on_progress, is_cancelled)
        finally:
            self._manager.free(cache, is_kept=False)

    def _n_in_file(self, path: Path, ids: Sequence[int], start: int) -> int:
        """Return how many tokens the file already has, if it starts at `start` or earlier."""
        try:
            with path.open("rb") as file:
                found = StateHeader(path, file)
                found.check_identity(self._identity, self._name)
                contents = found.contents(file, self._runtime.hp.n_vocab, self._windows)
                found.places(entries(self._states, self._kv_type, contents))
        except (OSError, StateFileError):
            return 0
        n = n_alike(contents.ids, ids)
        can_be_cut = not self._recurrent and all(window.n is None for window in self._windows)
        is_usable = contents.start <= start and (can_be_cut or n == len(contents.ids))
        return n if is_usable else 0

    def _write(
        self, path: Path, cache: SequenceCache, contents: Contents, on_progress: StateSink,
        is_cancelled: IsCancelled,
    ) -> tuple[int, int]:  # fmt: skip
        found = entries(self._states, self._kv_type, contents)
        total = sum(entry.n_bytes for entry in found)
        progress = CopyProgress(total, on_progress, is_cancelled, Sentence("Saving"))
        first = header(found, self._identity, contents)
        states = {
            saved: self._runner.whole_state(self._manager.checkpoints.state(contents.ids[:n]))
            for saved, n in self._lengths(contents, len(contents.ids))
        }
        try:
            with atomic_write(path) as file:
                file.write(first)
                for entry in found:
                    for part in self._parts(entry, contents, cache, states):
                        write(file, part)
                        progress.add(part.nbytes)
        except OSError as error:
            raise StateFileError(
                path,
                "The {size:.1f} MiB state cannot be saved as {file}: {problem}.",
                "Free space on that disk, or choose another folder.",
                size=(total + len(first)) / (1 << 20),
                file=str(path),
                problem=reason_of(error),
            ) from None
        return len(contents.ids), len(first) + total

    def _contents(self, path: Path, cache: SequenceCache, start: int, stop: int | None) -> Contents:
        n = cache.n if stop is None else min(stop, cache.n)
        if not 0 <= start < n:
            raise StateFileError(
                path,
                "The cache has no tokens from {start} to {stop} to save.",
                "Ask the model something first.",
                start=start,
                stop=n,
            )
        firsts = [max(start, _first_held(table)) for table in cache.sequence.tables]
        sees_all = all(
            first <= max(start, window.first_seen(n))
            for first, window in zip(firsts, self._windows, strict=True)
        )
        if not sees_all or (self._recurrent and (start or n < cache.n)):
            raise self._indivisible(path, is_saved=True, hint=Sentence("Save the whole state."))
        kept = self._manager.checkpoints.lengths(cache.sequence.ids)
        saved = next((length for length in kept if length < n), 0)
        return Contents(cache.sequence.ids[:n], start, saved, firsts)

    def _indivisible(self, path: Path, *, is_saved: bool, hint: str) -> StateFileError:
        part = Sentence(
            "a recurrent state" if self._recurrent else "layers with an attention window"
        )
        return StateFileError(
            path,
            "{model} has {part}, so its state can only be saved as a whole."
            if is_saved
            else "{model} has {part}, so its state can only be loaded as a whole.",
            hint,
            model=self._name,
            part=part,
        )

    def _lengths(self, contents: Contents, stop: int) -> list[tuple[bool, int]]:
        kept = ((True, contents.n_saved), (False, stop))
        return [(saved, n) for saved, n in kept if self._recurrent and n]

    def _parts(
        self, entry: Entry, contents: Contents, cache: SequenceCache,
        states: Mapping[bool, SlotState],
    ) -> Iterator[Tensor]:  # fmt: skip
        if entry.state < 0:
            is_wide = has_images(contents.ids)
            yield torch.tensor(contents.ids, dtype=torch.int64 if is_wide else torch.int32)
            return
        if entry.group < 0:
            state = states[entry.saved][self._recurrent_number(entry)]
            yield from pieces(state[entry.tensor].contiguous())
            return
        cut = self._states[entry.state].cuts()[entry.tensor]
        for run in runs(cut, as_one(cut), 0, range(self._n_ranks)):
            rows = self._rows(run.source, run.start, run.n, entry, cache, len(contents.ids))
            for part in strips_of(rows):
                yield self._runner.read_rows(part)

    def _recurrent_number(self, entry: Entry) -> int:
        return sum(isinstance(s, RecurrentState) for s in self._states[: entry.state])

    def _rows(
        self, rank: int, unit: int, n: int, entry: Entry, cache: SequenceCache, stop: int
    ) -> CachedRows:  # fmt: skip
        slots = _slots(cache, entry.group, entry.first, stop)
        row_bytes = entry.shape[-1] * entry.size
        return CachedRows(rank, entry.state, entry.tensor, (unit, unit + n), slots, row_bytes)

    @torch.inference_mode()
    def load(
        self, path: Path, n_tokens: int | None, on_progress: StateSink, is_cancelled: IsCancelled
    ) -> list[int]:
        """Load a state file; return its tokens, which are then cached; see `Model.load_state`."""
        try:
            with path.open("rb") as file:
                found = StateHeader(path, file)
                found.check_identity(self._identity, self._name)
                contents = found.contents(file, self._runtime.hp.n_vocab, self._windows)
                expected = entries(self._states, self._kv_type, contents)
                places = found.places(expected)
                stop = self._n_to_load(path, contents, n_tokens)
                if self._is_cached(contents.ids[:stop]):
                    return list(contents.ids[:stop])
                progress = CopyProgress(
                    self._n_bytes(expected, stop), on_progress, is_cancelled, Sentence("Loading")
                )
                cache = self._opened(path, contents)
                try:
                    self._fill(file, expected, places, contents, cache, stop, progress)
                finally:
                    self._manager.free(cache, is_kept=False)
        except OSError as error:
            raise StateFileError(
                path,
                "{file} cannot be read: {problem}.",
                "Without it, the conversation is recomputed.",
                file=str(path),
                problem=reason_of(error),
            ) from None
        return list(contents.ids[:stop])

    def _is_cached(self, ids: Sequence[int]) -> bool:
        cache = self._manager.allocate(ids)
        self._manager.free(cache, is_kept=False)
        return cache.n == len(ids)

    def _n_to_load(self, path: Path, contents: Contents, n_tokens: int | None) -> int:
        n_ctx, n = self._runtime.n_ctx, len(contents.ids)
        stop = min(n, n_ctx, n if n_tokens is None else n_tokens)
        sees_all = all(
            first <= max(contents.start, window.first_seen(stop))
            for first, window in zip(contents.firsts, self._windows, strict=True)
        )
        if stop < n and (self._recurrent or not sees_all):
            if n > n_ctx:
                raise ContextOverflow(n, n_ctx)
            hint = Sentence("Load all {n} tokens.", n=n)
            raise self._indivisible(path, is_saved=False, hint=hint)
        return stop

    def _opened(self, path: Path, contents: Contents) -> SequenceCache:
        cache = self._manager.allocate(contents.ids[: contents.start])
        if cache.n < contents.start:
            self._manager.free(cache, is_kept=False)
            raise StateFileError(
                path,
                "{file} begins after token {n}, and the tokens before that are not in the cache.",
                "Load the state of the earlier tokens first.",
                file=path.name,
                n=contents.start,
            )
        return cache

    def _n_bytes(self, expected: Sequence[Entry], stop: int) -> int:
        total = 0
        for entry in expected[1:]:
            n_bytes, n_units = entry.n_bytes // max(1, entry.shape[0]), entry.shape[0]
            if entry.group >= 0:
                n_bytes = n_bytes // max(1, entry.shape[1]) * max(0, stop - entry.first)
                n_units = sum(run.n for _, run in self._goals(entry))
            total += n_bytes * n_units
        return total

    def _goals(self, entry: Entry) -> list[tuple[int, Run]]:
        cut = self._states[entry.state].cuts()[entry.tensor]
        return [
            (rank, run)
            for rank in range(self._n_ranks)
            for run in runs(as_one(cut), cut, rank, [0])
        ]

    def _fill(
        self, file: BinaryIO, expected: list[Entry], places: Mapping[str, int],
        contents: Contents, cache: SequenceCache, stop: int, progress: CopyProgress,
    ) -> None:  # fmt: skip
        """Copy the tokens before `stop` to all ranks, and register them in the cache."""
        try:
            cache.sequence.reserve(
                stop - cache.n, [first // PAGE * PAGE for first in contents.firsts]
            )
        except OutOfPages:
            raise ContextOverflow(stop, cache.n + self._manager.n_free_tokens(cache)) from None
        states: dict[bool, list[dict[str, Tensor]]] = {
            saved: [{} for _ in self._recurrent] for saved in (False, True)
        }
        for entry in expected[1:]:
            begin = places[entry.name]
            if entry.group < 0:
                whole = torch.empty(entry.shape)
                read_whole(file, begin, whole, progress)
                states[entry.saved][self._recurrent_number(entry)][entry.tensor] = whole
                continue
            for rank, run in self._goals(entry):
                rows = self._rows(rank, run.goal, run.n, entry, cache, stop)
                put = self._runner.write_rows
                read_units(file, begin, entry.shape[1], run.start, rows, put, progress)
        self._clear_mtp(contents, cache, stop)
        cache.sequence.append(contents.ids[cache.n : stop])
        for saved, n in self._lengths(contents, stop):
            n_bytes = sum(x.nbytes for layer in states[saved] for x in layer.values())
            self._manager.checkpoints.keep(contents.ids[:n], states[saved], n_bytes)

    def _clear_mtp(self, contents: Contents, cache: SequenceCache, stop: int) -> None:
        """Zero MTP blocks' keys and values for the loaded tokens, as the file has none."""
        n_trunk = len(self._states)
        for layer, state in enumerate(self._runtime.ranks[0].states[n_trunk:], n_trunk):
            assert isinstance(state, KVState), "MTP blocks have attention"
            group = self._windows.index(state.window)
            first = max(contents.firsts[group], cache.n)
            self._runner.zero_rows(layer, _slots(cache, group, first, stop))


def _slots(cache: SequenceCache, group: int, first: int, stop: int) -> list[tuple[int, int]]:
    found = Piece(0, 0, cache.tables).runs(group, first, stop)
    return [(part.start, part.stop) for part in found]


def _first_held(table: Sequence[int]) -> int:
    gone = [index for index, page in enumerate(table) if page == GONE]
    return (gone[-1] + 1) * PAGE if gone else 0


class SavedStates:
    """The part of `engine.api.Model` that saves and loads cached sequences."""

    info: ModelInfo
    model_hash: str
    params: LoadParams
    runtime: ThreadRuntime
    scheduler: Scheduler
    _occupancy: Occupancy

    def save_state(
        self, path: str | Path, *, ids: Sequence[int] | None = None, start: int = 0,
        stop: int | None = None, on_progress: StateSink = ignore, is_cancelled: IsCancelled = never,
    ) -> StateSaved:  # fmt: skip
        """Save a cached sequence to a file, which any split of this model can load.

        An existing file at that path is either replaced as a whole or kept, for example if it has
        more of the sequence than the cache; the result then describes that file. The states of
        recurrent models can only be saved as a whole.

        Args:
            path: path of the file to write.
            ids: tokens of the sequence; None for the one that was computed last.
            start: first position to save; to load the file, earlier positions must be in the cache.
            stop: position after the last one to save; None for the end.
            on_progress: called with the number of saved bytes.
            is_cancelled: polled; returning True stops the save.

        Raises:
            StateFileError: the cache is empty, or the file cannot be written.
        """
        doing = Sentence("its state is being saved")
        with self._in_state(doing, is_cancelled) as (files, is_cancelled):
            tokens = self.scheduler.last if ids is None else ids
            n_tokens, n_bytes = files.save(
                Path(path), list(tokens), start, stop, on_progress, is_cancelled
            )
        return StateSaved(str(path), n_tokens, n_bytes)

    def load_state(
        self, path: str | Path, *, n_tokens: int | None = None, on_progress: StateSink = ignore,
        is_cancelled: IsCancelled = never,
    ) -> StateLoaded:  # fmt: skip
        """Load a sequence saved with `save_state` into the cache, in addition to its contents.

        For a prompt that begins with the same tokens, only the rest is then computed. Nothing
        changes until the file has been validated. The states of recurrent models, and usually of
        models with attention windows, can only be loaded as a whole.

        Args:
            path: path of the file.
            n_tokens: number of tokens to load from the start; None for all that fit in the context.
            on_progress: called with the number of loaded bytes.
            is_cancelled: polled; returning True stops the load.

        Raises:
            StateFileError: the file is damaged, or from another model or KV type.
            ContextOverflow: the context is too short for the file.
        """
        doing = Sentence("its state is being loaded")
        with self._in_state(doing, is_cancelled) as (files, is_cancelled):
            ids = files.load(Path(path), n_tokens, on_progress, is_cancelled)
            self.scheduler.last = ids
        return StateLoaded(str(path), tuple(ids))

    @contextmanager
    def _in_state(
        self, doing: Sentence, is_cancelled: IsCancelled
    ) -> Iterator[tuple[StateFiles, IsCancelled]]:
        with self._occupancy.use(doing, is_cancelled) as is_cancelled:
            self.runtime.runner.check_loaded()
            with explain_faults(self.runtime.devices), self.scheduler.emptied() as manager:
                yield (
                    StateFiles(
                        self.runtime, manager, self.info.name, self.model_hash, self.params.rope
                    ),
                    is_cancelled,
                )
