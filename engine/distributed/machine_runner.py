"""Runner of forward passes on this machine's ranks of a model that several machines compute.

Machine 0 says what is computed, and the others follow. All compute their part of the same passes;
those with a slice of the output head send machine 0 its logits, or what sampling needs of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
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
from engine.distributed.machine_cache import MachineCache
from engine.distributed.machines import UNLOAD, ModelPlace
from engine.errors import EngineError
from engine.model.forward.batch import FIRST_TOKEN, Batch, PictureRows, Piece
from engine.runtime.model_runner import ModelRunner

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits, SamplingRequest
    from engine.runtime.mtp_reading import Reading
    from engine.runtime.pass_executor import KernelMeetings
    from engine.runtime.rank import Captures

INTERRUPTED = "The machines were interrupted in the middle of a step."
"""Error of whatever is asked for once an order has ended without saying why."""

PART_ROWS = 128
"""Number of rows of a prompt that machines with CPUs compute at once, one behind the other."""

Values = Sequence[Any]
"""Values of a `Piece` or a `SliceQuery`, as they arrive from another machine."""


class MachineRunner(MachineCache, ModelRunner):
    """Runner of the ranks of one machine.

    On machine 0 whoever has the model calls the methods of `ModelRunner`; each of them is ordered
    on the other machines as well, where `do` is called.
    """

    _joined: ModelPlace | None = None

    def join(
        self, place: ModelPlace, captures: Captures, meetings: KernelMeetings,
        max_verify_rows: int,
    ) -> None:  # fmt: skip
        """Work with other machines from now on; called before the first pass.

        Args:
            place: place of the model among the machines.
            captures: captures of the ranks of all machines.
            meetings: meetings of the kernels of all machines' ranks.
            max_verify_rows: see `ModelRunner`.
        """
        self._joined, self._max_verify_rows = place, max_verify_rows
        computing = place.layout.parts(self.ranks[0].model.split.holders)[1]
        # a machine without a part of the model captures nothing, and would not answer
        everyone = len(computing) == len(place.machines.names)
        self.meeting.join(meetings, place.first_problem if everyone else str)
        for rank in self.ranks:
            rank.elsewhere = captures
        self._is_pipeline = not captures.some and 0 not in place.heads(self.ranks[0].model.split)
        self._dropped, self._saved = [], weakref.WeakValueDictionary()
        self._n_rows = 0
        self._last: np.ndarray | None = None
        self._ended: EngineError | None = None

    @property
    def _place(self) -> ModelPlace:
        """ModelPlace of the model among the machines."""
        assert self._joined is not None, "it is loaded"
        return self._joined

    @property
    def max_verify_rows(self) -> int:
        return super().max_verify_rows if self._joined is None else self._max_verify_rows

    def leave(self) -> None:
        """Have the other machines free the model, unless they are lost; safe to call twice."""
        place = self.forget_machines()
        if place is not None and place.machines.number == 0 and self._ended is None:
            with suppress(EngineError):
                place.order(UNLOAD)

    def forget_machines(self) -> ModelPlace | None:
        """Work with no other machines any more; return the place of the model among them."""
        place, self._joined = self._joined, None
        return place

    def do(self, order: str, *values: Any) -> Any:
        """Do this machine's part of an order; on machine 0 return what the machines have found.

        Raises:
            EngineError: this machine cannot do it, or another one is gone.
        """
        return getattr(self, f"_do_{order}")(*values)

    def _together(self, order: str, *values: Any, given: Any = None) -> Any:
        """Have all machines do something.

        Whatever fails in the middle leaves machines at different places, so that is the end.

        Args:
            values: what JSON knows, for all machines.
            given: what this machine alone has, unless it is None.

        Raises:
            EngineError: see `do`; or an earlier order has failed.
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
        """Check that no earlier order has failed.

        Raises:
            EngineError: one has.
        """
        if self._joined is None:
            self.check_loaded()
        if self._ended is not None:
            raise EngineError(self._ended.message, self._ended.hint)

    def _found(self, found: Sequence[Tensor | None]) -> Tensor:
        """Return this machine's slice of the result, without columns where it has none."""
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
        """Run the rows of a batch on all machines; return logits, or candidates of each slice."""
        *firsts, last = self._parts(ids, batch)
        for part in firsts:
            self._one_step(*part, ())
        return self._one_step(*last, queries)

    def _parts(self, ids: Sequence[int], batch: Batch) -> Iterator[tuple[Sequence[int], Batch]]:
        """Yield a batch of a prompt in parts, so that machines compute one behind the other.

        On GPUs it stays whole: their kernels dequantise matrices for each part.
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
        """Run the rows of a batch on all machines at once."""
        shown = [
            (rows.row, *rows.features.shape, rows.whole, rows.only_in_windows)
            for rows in batch.pictures
        ]
        features = [rows.features.float().contiguous() for rows in batch.pictures]
        with self._noted(ids, batch):
            found: Logits | None = self._together(
                "step", list(ids), *batch[:3], queries, shown, batch.places, given=features or None
            )
        return np.empty((0, self.n_vocab), np.float32) if found is None else found

    def _do_step(
        self, ids: Sequence[int], pieces: Sequence[Values], first_logit: int, wants_hidden: bool,
        queries: Sequence[Values], shown: Sequence[Values], places: Sequence[Sequence[int]],
        given: Sequence[Tensor] = (),
    ) -> np.ndarray | None:  # fmt: skip
        batch = batch_of(pieces, first_logit, wants_hidden)
        batch = batch._replace(pictures=self._pictures(shown, given), places=tuple(places))
        self._n_rows = len(ids) - first_logit
        with self._guard("to compute the next tokens", len(ids)):
            found = super().compute(ids, batch)
            return self._collected(found, queries) if self._n_rows else None

    def _pictures(
        self, shown: Sequence[Values], given: Sequence[Tensor]
    ) -> tuple[PictureRows, ...]:
        """Have machine 0 send the features of pictures to all others; return their rows.

        Args:
            shown: the first row of each, number of rows and columns, see `PictureRows`; what sees
                each other, and whether it does so in windows alone.
        """
        machines = self._place.machines
        found = given or [torch.empty(n, width) for _, n, width, *_ in shown]
        for x in found:
            for machine in range(1, len(machines.names)):
                machines.hand(x, 0, machine)
        return tuple(
            PictureRows(row, x, None if whole is None else (whole[0], whole[1]), is_windowed)
            for (row, _, _, whole, is_windowed), x in zip(shown, found, strict=True)
        )

    def _collected(self, mine: np.ndarray, queries: Sequence[Values]) -> np.ndarray | None:
        """Send what this machine has of some rows to machine 0; return all of it there.

        Args:
            mine: logits (rows, n) of this machine's slice of the vocabulary; n may be 0.
            queries: what sampling needs of each row; empty where all logits are wanted.
        """
        split = self.ranks[0].model.split
        self._last = mine
        held, shape = None, None
        if queries:
            shape = len(queries), packed_words(SliceQuery(*queries[0]).n)
        if mine.shape[1] and queries:
            first = self._place.first_logit(split)
            asked = [SliceQuery(*query) for query in queries]
            found = zip(mine, asked, strict=True)
            rows = [slice_candidates(x, first, query).pack(query.n) for x, query in found]
            held = torch.from_numpy(np.stack(rows))
        elif mine.shape[1]:
            held = torch.from_numpy(mine)
        return self._place.collect(held, self._place.heads(split), shape)

    def _do_again(self) -> np.ndarray | None:
        """Send the logits of the last pass, of which only candidates were sent."""
        assert self._last is not None, "a pass was computed"
        return self._collected(self._last, ())

    def sample(
        self, ids: Sequence[int], batch: Batch, wishes: Sequence[SamplingRequest | None]
    ) -> Sequence[int | Logits]:
        """Run the rows of a batch, and sample where the candidates of all slices suffice."""
        queries = self._queries(wishes)
        if not queries:
            return list(self.forward(ids, batch))
        packed = self._step(ids, batch, queries)
        n_heads = len(self._place.heads(self.ranks[0].model.split))
        found: list[int | None] = []
        for wish, row in zip(wishes, packed, strict=True):
            slices = [SliceCandidates.unpack(part) for part in np.split(row, n_heads)]
            assert wish is not None, "all rows are sampled, or none"
            found.append(sample_gathered(wish.sampler, slices))
        if None not in found:
            return [token for token in found if token is not None]
        rows: Logits = self._together("again")
        return [row if token is None else token for token, row in zip(found, rows, strict=True)]

    def _queries(self, wishes: Sequence[SamplingRequest | None]) -> list[SliceQuery]:
        """Return what to ask of each slice; nothing where all logits of a row are needed."""
        found: list[SliceQuery] = []
        for wish in wishes:
            if wish is None or wish.allowed is not None:
                return []
            query = slice_query(wish.sampler, self.n_vocab, wish.never)
            if query is None:
                return []
            found.append(query)
        most = max((query.n for query in found), default=0)
        return [query._replace(n=most) for query in found]

    # guesses of MTP blocks

    def draft(self, ids: Sequence[int], batch: Batch, number: int = 0) -> Logits:
        """Return logits of what follows tokens; see `ModelRunner`."""
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
        with self._guard("to guess the next tokens", 1):
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

    def _do_forget_hidden_states(self, batch_index: int) -> None:
        super().forget_hidden_states(batch_index)

    def sample_on_device(self, token: int = 0, piece: Piece = FIRST_TOKEN) -> None:
        """Do nothing: no device has the candidates of all machines."""


def batch_of(pieces: Sequence[Values], first_logit: int, wants_hidden: bool = False) -> Batch:
    """Return a batch of its values, whose pieces may be lists."""
    made = [
        Piece(n_past, n, tuple(map(tuple, tables)), *places)
        for n_past, n, tables, *places in pieces
    ]
    return Batch(tuple(made), first_logit, wants_hidden)
