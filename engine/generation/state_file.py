"""Saving of a model's KV cache and recurrent states, and loading them on any split of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from engine.errors import Cancelled, ContextOverflow, StateFileError
from engine.files import atomic_write
from engine.generation.state_format import Contents, Entry, StateHeader, entries, header, identity
from engine.progress import StateProgress
from engine.sharding.recut import as_one, runs

if TYPE_CHECKING:
    from engine.generation.session import Session
    from engine.progress import IsCancelled, StateSink
    from engine.runtime.rank import Rank
    from engine.runtime.thread_runtime import ThreadRuntime

CHUNK_BYTES = 32 << 20
"""Approximate bytes of a copy; one head or unit of a layer is copied at least."""


class StateFiles:
    """Reader and writer of the state files of one loaded model.

    Args:
        name: name of the model, for error messages.
        model_hash: see `engine.gguf.identity`.
        rope: how a load has changed RoPE, see `LoadParams.rope`; "" if it has not.
    """

    def __init__(
        self, runtime: ThreadRuntime, session: Session, name: str, model_hash: str, rope: str = ""
    ) -> None:
        self._runtime, self._session, self._name = runtime, session, name
        self._ranks, self._kv_type = runtime.ranks, runtime.plan.kv_type
        self._states = runtime.ranks[0].states
        self._identity = identity(
            model_hash, self._kv_type, runtime.ranks[0].slots, runtime.directions, rope
        )

    @torch.inference_mode()
    def save(
        self, path: Path, start: int, stop: int | None, on_progress: StateSink,
        is_cancelled: IsCancelled,
    ) -> tuple[int, int]:  # fmt: skip
        """Write a state file; see `Model.save_state`.

        Returns:
            Number of tokens and number of bytes of the file.
        """
        contents = self._contents(path, start, stop)
        found = entries(self._states, self._kv_type, contents)
        total = sum(entry.n_bytes for entry in found)
        work = _Work(total, on_progress, is_cancelled, "Saving")
        first = header(found, self._identity, contents)
        try:
            with atomic_write(path) as file:
                file.write(first)
                for entry in found:
                    for part in self._parts(entry, contents):
                        file.write(part.view(torch.uint8).numpy().data)
                        work.add(part.nbytes)
        except OSError as error:
            size = f"{(total + len(first)) / (1 << 20):.1f} MiB"
            raise StateFileError(
                path,
                f"The state of {size} cannot be saved as {path}: {error.strerror or error}.",
                "Make room on that disk, or choose another folder.",
            ) from None
        return len(contents.ids), len(first) + total

    def _contents(self, path: Path, start: int, stop: int | None) -> Contents:
        session = self._session
        n = len(session.ids) if stop is None else min(stop, len(session.ids))
        if not 0 <= start < n:
            raise StateFileError(
                path,
                f"There are no tokens from {start} to {n} in the cache that could be saved.",
                "Ask the model something first.",
            )
        if not self._runtime.can_rewind and (start or n < len(session.ids)):
            raise StateFileError(
                path,
                f"{self._name} has a recurrent state, of which no part can be saved by itself.",
                "Save the whole.",
            )
        return Contents(session.ids[:n], start, session.n_saved)

    def _parts(self, entry: Entry, contents: Contents) -> Iterator[Tensor]:
        """Yield the numbers of a tensor in order, some units at a time, flat and on the CPU."""
        if entry.state < 0:
            yield torch.tensor(contents.ids, dtype=torch.int32)
            return
        cut = self._states[entry.state].cuts()[entry.tensor]
        for run in runs(cut, as_one(cut), 0, range(len(self._ranks))):
            held = self._held(self._ranks[run.source], entry, contents.start, len(contents.ids))
            units = held[run.start : run.start + run.n]
            step = _step(entry)
            for part in (units[at : at + step] for at in range(0, len(units), step)):
                yield part.cpu().contiguous().flatten()

    def _held(self, rank: Rank, entry: Entry, start: int, stop: int) -> Tensor:
        """Return a rank's part of a tensor, with all units that the rank owns."""
        state = rank.states[entry.state]
        held = rank.context.cache.tensors(state, saved=entry.saved)[entry.tensor]
        return held[:, start:stop] if entry.has_positions else held

    @torch.inference_mode()
    def load(
        self, path: Path, n_tokens: int | None, on_progress: StateSink, is_cancelled: IsCancelled
    ) -> int:
        """Load a state file, see `Model.load_state`; return the number of cached tokens."""
        try:
            with path.open("rb") as file:
                found = StateHeader(path, file)
                found.check_identity(self._identity, self._name)
                contents = found.contents(file, self._runtime.hp.n_vocab)
                expected = entries(self._states, self._kv_type, contents)
                places = found.places(expected)
                stop = self._n_wanted(path, contents, n_tokens)
                self._fill(file, expected, places, contents, stop, on_progress, is_cancelled)
        except OSError as error:
            raise StateFileError(
                path,
                f"{path} cannot be read: {error.strerror or error}.",
                "Without it the conversation is computed again.",
            ) from None
        return stop

    def _n_wanted(self, path: Path, contents: Contents, n_tokens: int | None) -> int:
        """Return the number of tokens whose state is to be loaded."""
        session, n = self._session, len(contents.ids)
        if self._runtime.can_rewind:
            stop = min(n, session.n_ctx, n if n_tokens is None else n_tokens)
            if (
                stop <= contents.start
                or session.ids[: contents.start] != (contents.ids[: contents.start])
            ):
                raise StateFileError(
                    path,
                    f"{path.name} begins behind token {contents.start}, and what comes before that "
                    "is not in the cache.",
                    "Load the state of what comes before first.",
                )
            return stop
        if n > session.n_ctx:
            raise ContextOverflow(n, session.n_ctx)
        if contents.start or (n_tokens is not None and n_tokens != n):
            raise StateFileError(
                path,
                f"{self._name} has a recurrent state, of which no part can be loaded by itself.",
                f"Load all {n} tokens.",
            )
        return n

    def _fill(
        self, file: BinaryIO, expected: list[Entry], places: Mapping[str, int],
        contents: Contents, stop: int, on_progress: StateSink, is_cancelled: IsCancelled,
    ) -> None:  # fmt: skip
        """Copy the positions before `stop` to all ranks that hold them."""
        goals = [
            (entry, rank, run)
            for entry in expected[1:]
            for rank in self._ranks
            for cut in [rank.states[entry.state].cuts()[entry.tensor]]
            for run in runs(as_one(cut), cut, rank.number, [0])
        ]
        total = sum(run.n * entry.n_bytes // entry.shape[0] for entry, _, run in goals)
        work = _Work(total, on_progress, is_cancelled, "Loading")
        self._session.hold(contents.ids[: contents.start], 0)  # until the rest is whole
        for entry, rank, run in goals:
            held = self._held(rank, entry, contents.start, stop)
            units = held[run.goal : run.goal + run.n]
            _read(file, places[entry.name], entry, run.start, units, work)
        self._session.hold(contents.ids[:stop], contents.n_saved)


def _read(file: BinaryIO, begin: int, entry: Entry, first: int, goal: Tensor, work: _Work) -> None:
    """Read units into `goal`, from the `first` on; `goal` may want fewer positions of each.

    Raises:
        OSError: the file has become shorter.
    """
    unit_bytes, step = entry.n_bytes // entry.shape[0], _step(entry)
    for at in range(0, len(goal), step):
        part = goal[at : at + step]
        data = bytearray(part.numel() * part.element_size())
        file.seek(begin + (first + at) * unit_bytes)
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise OSError("it has become shorter")
        if data:
            part.copy_(torch.frombuffer(data, dtype=part.dtype).view(part.shape))
        work.add(len(part) * unit_bytes)


def _step(entry: Entry) -> int:
    """Return the number of units to copy at a time: 1 where only some positions are wanted."""
    if entry.has_positions:
        return 1
    return max(1, CHUNK_BYTES * entry.shape[0] // max(1, entry.n_bytes))


class _Work:
    """Progress of a copy in bytes, and the check for cancellation.

    Args:
        total: number of bytes of the whole copy.
        doing: first word of the sentence about a cancelled copy, such as "Saving".
    """

    def __init__(
        self, total: int, on_progress: StateSink, is_cancelled: IsCancelled, doing: str
    ) -> None:
        self._total, self._done = total, 0
        self._on_progress, self._is_cancelled, self._doing = on_progress, is_cancelled, doing

    def add(self, n_bytes: int) -> None:
        """Report `n_bytes` more.

        Raises:
            Cancelled: the person has asked to stop.
        """
        if self._is_cancelled():
            raise Cancelled(self._doing)
        self._done += n_bytes
        self._on_progress(StateProgress(self._done, self._total))
