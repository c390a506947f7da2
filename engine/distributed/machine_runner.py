"""Runner of forward passes on this machine's ranks, for a model on several machines.

Machine 0 sends orders, and the others follow them. Each machine computes its part of every pass;
machines with a slice of the output head send machine 0 their logits, or the candidates for
sampling. State files pass through machine 0, a strip at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.decoding.sampling.slices import (
    SliceCandidates,
    SliceQuery,
    packed_words,
    sample_gathered,
    slice_candidates,
    slice_query,
)
from engine.distributed.machines import UNLOAD, ModelPlace
from engine.errors import EngineError, Sentence
from engine.model.forward.batch import FIRST_TOKEN, Batch, PictureRows, Piece
from engine.model.forward.state import RecurrentState
from engine.model.sharding.split import as_one, runs
from engine.runtime.memory import CachedRows
from engine.runtime.model_runner import DRAFT, NEXT_TOKENS, ModelRunner

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits, SamplingRequest
    from engine.runtime.interface import SlotState
    from engine.runtime.mtp_reading import Reading
    from engine.runtime.pass_executor import KernelMeetings
    from engine.runtime.rank import Captures

INTERRUPTED = Sentence("The machines were interrupted in the middle of a step.")
"""Error to report if an interruption did not leave one."""

PART_ROWS = 128
"""Number of prompt rows that machines with CPUs compute as one pipeline stage."""

PLAIN = ("copy_page", "clear_slot", "zero_rows", "forget_hidden_states")
"""Orders that each machine follows independently, using the methods of `ModelRunner`."""

Values = Sequence[Any]
"""A `Piece` or `SliceQuery` as the JSON values that arrive from another machine."""


class MachineRunner(ModelRunner):
    """Runner for one machine's ranks.

    On machine 0, callers use the methods of `ModelRunner`, each of which sends its order to the
    other machines; there, `do` is called.
    """

    _joined: ModelPlace | None = None

    def join(
        self, place: ModelPlace, captures: Captures, meetings: KernelMeetings,
        max_verify_rows: int,
    ) -> None:  # fmt: skip
        """Work with other machines from now on; called before the first pass.

        Args:
            place: the model's connections to the machines.
            captures, meetings: shared by all machines' ranks.
            max_verify_rows: see `ModelRunner`.
        """
        self._joined, self._max_verify_rows = place, max_verify_rows
        computing = place.layout.parts(self.ranks[0].model.split.holders)[1]
        # a machine that has no part of the model captures nothing and would not reply
        everyone = len(computing) == len(place.machines.names)
        self.meeting.join(meetings, place.first_problem if everyone else None)
        for rank in self.ranks:
            rank.elsewhere = captures
        self._is_pipeline = not captures.some and 0 not in place.heads(self.ranks[0].model.split)
        self._dropped: list[int] = []
        self._saved = weakref.WeakValueDictionary[int, PartsElsewhere]()
        self._n_saved = 0
        self._n_rows = 0
        self._last: np.ndarray | None = None
        self._ended: EngineError | None = None

    @property
    def _place(self) -> ModelPlace:
        assert self._joined is not None, "it is loaded"
        return self._joined

    @property
    def max_verify_rows(self) -> int:
        return super().max_verify_rows if self._joined is None else self._max_verify_rows

    def leave(self) -> None:
        """Let the other machines free the model, unless they are lost; safe to call twice."""
        place = self.forget_machines()
        if place is not None and place.machines.number == 0 and self._ended is None:
            with suppress(EngineError):
                place.order(UNLOAD)

    def forget_machines(self) -> ModelPlace | None:
        """Stop working with other machines; return the model's connections to them."""
        place, self._joined = self._joined, None
        return place

    def do(self, order: str, *values: Any) -> Any:
        """Do this machine's part of an order; on machine 0, return the combined result.

        Raises:
            EngineError: this machine cannot do its part, or another machine is lost.
        """
        if order in PLAIN:
            return getattr(super(), order)(*values)
        return getattr(self, f"_do_{order}")(*values)

    def _together(self, order: str, *values: Any, given: Any = None) -> Any:
        """Have all machines follow an order; `given` is only for this machine.

        An error midway would leave the machines out of step, so it makes the model unusable.
        """
        self._check_together()
        try:
            self._place.order(order, *values)
            return self.do(order, *values, *(() if given is None else (given,)))
        except BaseException as error:
            self._ended = EngineError(INTERRUPTED, "Load the model again.")
            if isinstance(error, EngineError):
                self._ended = EngineError(error.message, error.hint)
            self._place.machines.fail(self._ended)
            self.close()
            raise

    def _check_together(self) -> None:
        if self._joined is None:
            self.check_loaded()
        if self._ended is not None:
            raise EngineError(self._ended.message, self._ended.hint)

    def _found(self, found: Sequence[Tensor | None]) -> Tensor:
        """Return this machine's slice of the result; the slice may have no columns."""
        mine = [x for x in found if x is not None]
        return mine[0] if mine else torch.empty(self._n_rows, 0)

    # passes

    def forward(self, ids: Sequence[int], batch: Batch) -> Logits:
        return self._step(ids, batch, ())

    def compute(self, ids: Sequence[int], batch: Batch) -> Logits:
        return self._step(ids, batch, ())

    def rehearse(self, n: int) -> bool:
        """Have all machines compute n tokens while no kernel waits for another rank."""
        found: bool = self._together("rehearse", n)
        return found

    def _do_rehearse(self, n: int) -> bool:
        self._n_rows = 1
        return super().rehearse(n)

    def _step(self, ids: Sequence[int], batch: Batch, queries: Sequence[SliceQuery]) -> Logits:
        *firsts, last = self._parts(ids, batch)
        for part in firsts:
            self._one_step(*part, ())
        return self._one_step(*last, queries)

    def _parts(self, ids: Sequence[int], batch: Batch) -> Iterator[tuple[Sequence[int], Batch]]:
        """Yield a prompt's batch in parts, so that machines work as a pipeline.

        On GPUs the batch stays whole, as their kernels would dequantise matrices for each part.
        """
        start, (piece, *others) = 0, batch.pieces
        if self._is_pipeline and not others and not batch.pictures:
            while batch.first_logit >= start + PART_ROWS and len(ids) - start >= 2 * PART_ROWS:
                part = piece._replace(n_past=piece.n_past + start, n=PART_ROWS)
                yield ids[start : start + PART_ROWS], Batch((part,), PART_ROWS)
                piece, start = piece._replace(source=None), start + PART_ROWS
        if start:
            rest = piece._replace(n_past=piece.n_past + start, n=piece.n - start)
            batch = batch._replace(pieces=(rest,), first_logit=batch.first_logit - start)
        yield ids[start:], batch

    def _one_step(self, ids: Sequence[int], batch: Batch, queries: Sequence[SliceQuery]) -> Logits:
        images = [
            (rows.row, *rows.features.shape, rows.whole, rows.only_in_windows)
            for rows in batch.pictures
        ]
        features = [rows.features.float().contiguous() for rows in batch.pictures]
        with self._noted(ids, batch):
            found: Logits | None = self._together(
                "step", list(ids), *batch[:3], queries, images, batch.places, given=features or None
            )
        return np.empty((0, self.n_vocab), np.float32) if found is None else found

    def _do_step(
        self, ids: Sequence[int], pieces: Sequence[Values], first_logit: int, wants_hidden: bool,
        queries: Sequence[Values], images: Sequence[Values], places: Sequence[Sequence[int]],
        given: Sequence[Tensor] = (),
    ) -> np.ndarray | None:  # fmt: skip
        batch = batch_of(pieces, first_logit, wants_hidden)
        batch = batch._replace(pictures=self._images(images, given), places=tuple(places))
        self._n_rows = len(ids) - first_logit
        with self._guard(NEXT_TOKENS, len(ids)):
            found = super().compute(ids, batch)
            return self._collected(found, queries) if self._n_rows else None

    def _images(self, images: Sequence[Values], given: Sequence[Tensor]) -> tuple[PictureRows, ...]:
        """Send images' features from machine 0 to all others; return the images' rows."""
        machines = self._place.machines
        found = given or [torch.empty(n, width) for _, n, width, *_ in images]
        for x in found:
            for machine in range(1, len(machines.names)):
                machines.hand(x, 0, machine)
        return tuple(
            PictureRows(row, x, None if whole is None else (whole[0], whole[1]), is_windowed)
            for (row, _, _, whole, is_windowed), x in zip(images, found, strict=True)
        )

    def _collected(self, mine: np.ndarray, queries: Sequence[Values]) -> np.ndarray | None:
        """Send logits (rows, n) or candidates for `queries` to machine 0, which returns all."""
        split = self.ranks[0].model.split
        self._last = mine
        held, shape = None, None
        if queries:
            shape = len(queries), packed_words(SliceQuery(*queries[0]).n)
        if mine.shape[1] and queries:
            first = self._place.first_logit(split)
            parsed = [SliceQuery(*query) for query in queries]
            pairs = zip(mine, parsed, strict=True)
            rows = [slice_candidates(x, first, query).pack(query.n) for x, query in pairs]
            held = torch.from_numpy(np.stack(rows))
        elif mine.shape[1]:
            held = torch.from_numpy(mine)
        return self._place.collect(held, self._place.heads(split), shape)

    def _do_again(self) -> np.ndarray | None:
        """Send the last pass's logits because its candidates did not suffice."""
        assert self._last is not None, "a pass was computed"
        return self._collected(self._last, ())

    def sample(
        self, ids: Sequence[int], batch: Batch, requests: Sequence[SamplingRequest | None]
    ) -> Sequence[int | Logits]:
        """Run a batch's rows, and sample those for which all slices' candidates suffice."""
        queries = self._queries(requests)
        if not queries:
            return list(self.forward(ids, batch))
        packed = self._step(ids, batch, queries)
        n_heads = len(self._place.heads(self.ranks[0].model.split))
        found: list[int | None] = []
        for request, row in zip(requests, packed, strict=True):
            slices = [SliceCandidates.unpack(part) for part in np.split(row, n_heads)]
            assert request is not None, "all rows are sampled, or none"
            found.append(sample_gathered(request.sampler, slices))
        if None not in found:
            return [token for token in found if token is not None]
        rows: Logits = self._together("again")
        return [row if token is None else token for token, row in zip(found, rows, strict=True)]

    def _queries(self, requests: Sequence[SamplingRequest | None]) -> list[SliceQuery]:
        found: list[SliceQuery] = []
        for request in requests:
            if request is None or request.allowed is not None:
                return []
            query = slice_query(request.sampler, self.n_vocab, request.never)
            if query is None:
                return []
            found.append(query)
        most = max((query.n for query in found), default=0)
        return [query._replace(n=most) for query in found]

    # drafts from MTP blocks

    def draft(self, ids: Sequence[int], batch: Batch, number: int = 0) -> Logits:
        before, (block, (rows, places)) = self._unread.joined(ids, batch, number)
        self._read_tokens(before)
        found: Logits = self._together("guess", list(rows), *places[:2], block)
        self._unread.note_guess(batch, number)
        return found

    def _do_guess(
        self, ids: Sequence[int], pieces: Sequence[Values], first_logit: int, block: int
    ) -> np.ndarray | None:
        batch = batch_of(pieces, first_logit)
        self._n_rows = len(ids) - first_logit
        with self._guard(DRAFT, 1):
            guessed = partial(self._drafted, ids, batch, block)
            mine = self._read(guessed, lambda x: x.cpu().numpy())
            return self._collected(mine, ())

    def _read_tokens(self, passes: Iterable[Reading]) -> None:
        for block, (ids, batch) in passes:
            self._together("read_tokens", list(ids), *batch[:2], block)

    def _do_read_tokens(
        self, ids: Sequence[int], pieces: Sequence[Values], first_logit: int, block: int
    ) -> None:
        super()._read_tokens([(block, (ids, batch_of(pieces, first_logit)))])

    def forget_hidden_states(self, batch_index: int) -> None:
        self._together("forget_hidden_states", batch_index)

    def sample_on_device(self, token: int = 0, piece: Piece = FIRST_TOKEN) -> None:
        """Do nothing, as no device has all machines' candidates."""

    # the cache

    @property
    def n_ranks(self) -> int:
        """Number of ranks on all machines together."""
        return self._place.layout.n_ranks

    def copy_page(self, group: int, source: int, target: int) -> None:
        self._together("copy_page", group, source, target)

    def clear_slot(self, slot: int) -> None:
        self._together("clear_slot", slot)

    # recurrent states

    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        """Keep a copy of a slot's recurrent states; each machine keeps its own part.

        Returns:
            A reference to the copy, and the size of all parts in bytes.
        """
        key, self._n_saved = self._n_saved, self._n_saved + 1
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        self._together("save_slot", slot, key, dropped)
        saved = self._saved[key] = PartsElsewhere(key)
        weakref.finalize(saved, self._dropped.append, key)
        shapes = (s for _, state in self._recurrent_states() for s in state.whole_shapes().values())
        return saved, sum(4 * int(np.prod(shape)) for shape in shapes)

    def _do_save_slot(self, slot: int, key: int, dropped: Sequence[int]) -> None:
        for old in dropped:
            del self._place.kept[old]
        self._place.kept[key] = [
            {name: held.to("cpu", copy=True) for name, held in tensors.items()}
            for tensors in self._states_of(slot)
        ]

    def load_slot(self, slot: int, state: SlotState) -> None:
        if isinstance(state, PartsElsewhere) and not state:
            self._together("load_slot", slot, state.key)
        else:
            self._together("load_whole", slot, given=state)

    @torch.inference_mode()
    def _do_load_slot(self, slot: int, key: int) -> None:
        kept = self._place.kept[key]
        for tensors, saved in zip(self._states_of(slot), kept, strict=True):
            for name, held in tensors.items():
                held.copy_(saved[name])

    def _do_load_whole(self, slot: int, given: SlotState = ()) -> None:
        """Send whole states, such as those from a file, from machine 0 to the others."""
        machines, shown = self._place.machines, given or self._rooms()
        for x in (x for tensors in shown for x in tensors.values()):
            for machine in range(1, len(machines.names)):
                machines.hand(x, 0, machine)
        super().load_slot(slot, shown)

    def whole_state(self, state: SlotState) -> SlotState:
        if not isinstance(state, PartsElsewhere) or state:
            return state
        found: SlotState = self._together("whole_state", state.key)
        return found

    def _do_whole_state(self, key: int) -> SlotState:
        """Send all machines' parts of a state to machine 0, and return the whole state there."""
        place, found, kept = self._place, self._rooms(), self._place.kept[key]
        states = self._recurrent_states()
        for number, (_, state) in enumerate(states):
            for name, cut in state.cuts().items():
                for run in runs(cut, as_one(cut), 0, range(place.layout.n_ranks)):
                    part = found[number][name][run.goal : run.goal + run.n]
                    if run.source in place.layout.local:
                        local_rank = place.layout.local_rank(run.source)
                        held = kept[local_rank * len(states) + number][name]
                        part.copy_(held[run.start : run.start + run.n])
                    place.machines.hand(part, place.layout.machine_of(run.source), 0)
        return found

    def gather_states(self) -> None:
        """Bring all states that machines keep into machine 0's memory, for a new split."""
        for saved in list(self._saved.values()):
            saved.extend(self.whole_state(saved))
        self._saved.clear()

    def _rooms(self) -> list[dict[str, Tensor]]:
        return [
            {name: torch.empty(shape) for name, shape in state.whole_shapes().items()}
            for _, state in self._recurrent_states()
        ]

    def _states_of(self, slot: int) -> list[dict[str, Tensor]]:
        return [
            rank.context.cache.tensors(state, slot)
            for rank in self.ranks
            for state in rank.states
            if isinstance(state, RecurrentState)
        ]

    # keys and values

    def read_rows(self, rows: CachedRows) -> Tensor:
        if self._place.layout.machine_of(rows.rank) == 0:
            return super().read_rows(rows)
        found: Tensor = self._together("read_rows", *rows)
        return found

    def _do_read_rows(self, *values: Any) -> Tensor:
        rows, layout = CachedRows(*values), self._place.layout
        found = super().read_rows(rows) if rows.rank in layout.local else rows.room()
        self._place.machines.hand(found, layout.machine_of(rows.rank), 0)
        return found

    def write_rows(self, rows: CachedRows, found: Tensor) -> None:
        if self._place.layout.machine_of(rows.rank) == 0:
            super().write_rows(rows, found)
        else:
            self._together("write_rows", *rows, given=found)

    def _do_write_rows(self, *values: Any) -> None:
        n = len(CachedRows._fields)
        rows, layout = CachedRows(*values[:n]), self._place.layout
        found = values[n] if values[n:] else rows.room()
        self._place.machines.hand(found, 0, layout.machine_of(rows.rank))
        if rows.rank in layout.local:
            super().write_rows(rows, found)

    def zero_rows(self, layer: int, slots: Sequence[Sequence[int]]) -> None:
        self._together("zero_rows", layer, slots)


class PartsElsewhere(list["Mapping[str, Tensor]"]):
    """Reference to recurrent states; each machine keeps its own part under `key`.

    The list is empty until it is filled with the states themselves.
    """

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key = key


def batch_of(pieces: Sequence[Values], first_logit: int, wants_hidden: bool = False) -> Batch:
    """Create a batch from its JSON values."""
    made = [
        Piece(n_past, n, tuple(map(tuple, tables)), *places)
        for n_past, n, tables, *places in pieces
    ]
    return Batch(tuple(made), first_logit, wants_hidden)
