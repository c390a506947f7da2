"""A loaded model from one split to another, in the middle of a conversation.

Weights are read from the file again, but only those that a device did not hold in the same form
before. Keys, values and recurrent states are carried over in their own bytes, layer by layer. What
has been given up for that comes back if anything fails on the way.

A device never holds more weights, keys and values than the larger of what it holds before and
after, and one block's beside them.

Heads that several ranks hold are taken from one of them. They are alike on all of them where these
compute alike, as ranks of one kind do.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from engine.forward.state import KVState
from engine.gguf.tensors import split_name
from engine.hardware.torch_devices import trim_heap
from engine.parallel.transfers import copy_over
from engine.planning.footprint import held_bytes, packed_bytes, slot_pieces
from engine.progress import IsCancelled, ProgressSink, ignore, never
from engine.runtime.loader import ByteProgress, load_rank
from engine.sharding.placement import Shard
from engine.sharding.recut import Move, next_move, runs

if TYPE_CHECKING:
    from engine.forward.weight import Weight
    from engine.gguf import GGUFFile
    from engine.parallel.executor import RankExecutor
    from engine.runtime.rank import Rank

DOING = "to split the model anew"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two splits.

    Attributes:
        ranks: its ranks, in order.
        executor: executor of these ranks.
        explaining: returns the context to call them in, which explains failures.
    """

    ranks: Sequence[Rank]
    executor: RankExecutor
    explaining: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class TransferBlock:
    """What is brought over together: indices into the slots and the states of a rank."""

    slots: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)


class Transfer:
    """Fills the ranks of a new split and empties those of an old one.

    The new ranks have neither weights nor layers in their caches yet. After `run` they have all,
    and the old ones are to be closed; after `undo` it is the other way round.

    Args:
        n_past: positions of keys and values that count.
        on_progress: told of the bytes that are read from the file.
    """

    def __init__(
        self, file: GGUFFile, old: Side, new: Side, n_past: int,
        on_progress: ProgressSink, is_cancelled: IsCancelled,
    ) -> None:  # fmt: skip
        self._file, self._old, self._new, self._n_past = file, old, new, n_past
        self._kept = _kept_slots(old.ranks, new.ranks)
        self._blocks = _blocks(new.ranks[0])
        self._moves = [self._move(block) for block in self._blocks]
        self._held, after = _held(old.ranks), _held(new.ranks)
        self._limits = {d: max(self._held[d], after[d]) for d in {*self._held, *after}}
        self._spare = self._spare_slots()
        self._freed: dict[int, list[int]] = defaultdict(list)
        self._carried: list[int] = []
        self._is_failed = is_failed = threading.Event()  # a cycle would keep weights alive
        self._progress = ByteProgress(
            self._file_bytes(), on_progress, lambda: is_failed.is_set() or is_cancelled(),
            "Splitting anew",
        )  # fmt: skip

    def run(self) -> None:
        """Bring everything over.

        Raises:
            EngineError: a device is full or lost, or it was cancelled; `undo` is to be called.
        """
        for rank in self._old.ranks:
            rank.let_go()
        for (number, index), source in self._kept.items():
            rank, value = self._new.ranks[number], self._old.ranks[source].value(index)
            assert value is not None, "a rank that has a part of a tensor holds it"
            _set(rank, index, rank.backend.adopt(value))
        while self._blocks:
            spare = {device: sum(n for *_, n in slots) for device, slots in self._spare.items()}
            place = next_move(self._moves, self._held, spare, self._limits)
            self._bring(self._blocks.pop(place), self._moves.pop(place))

    def undo(self) -> None:
        """Make the old ranks whole again; the new ones lose all.

        Raises:
            EngineError: that could not be done, and neither side can be used.
        """
        for rank in self._new.ranks:
            for index in range(len(rank.slots)):
                _set(rank, index, None)
            rank.let_go()
        trim_heap()
        for index in reversed(self._carried):
            self._carry(self._new, self._old, index)
        progress = ByteProgress(0, ignore, never)

        def load(number: int) -> None:
            rank = self._old.ranks[number]
            self._load(rank, self._freed[number], progress)

        with self._old.explaining():
            self._old.executor.run(load)

    def _bring(self, block: TransferBlock, move: Move) -> None:
        self._make_room(move)

        def load(number: int) -> None:
            wanted = [index for index in block.slots if (number, index) not in self._kept]
            try:
                self._progress.check()
                self._load(self._new.ranks[number], wanted, self._progress)
            except BaseException:
                self._is_failed.set()
                raise

        with self._new.explaining():
            self._new.executor.run(load)
        for index in block.states:
            self._carry(self._old, self._new, index)
            self._carried.append(index)
        for device, n_bytes in move.drops.items():
            self._held[device] -= n_bytes

    def _make_room(self, move: Move) -> None:
        """Free weights of the old split as far as the next block needs it."""
        n_on_heap = 0
        for device, n_bytes in move.adds.items():
            slots = self._spare.get(device, deque())
            while slots and self._held[device] + n_bytes > self._limits[device]:
                number, index, n_freed = slots.popleft()
                _set(self._old.ranks[number], index, None)
                self._freed[number].append(index)
                self._held[device] -= n_freed
                n_on_heap += n_freed if device == "cpu" else 0
            self._held[device] += n_bytes
        if n_on_heap:
            trim_heap()

    def _load(self, rank: Rank, indices: Sequence[int], progress: ByteProgress) -> None:
        slots = [rank.slots[index] for index in indices]
        load_rank(
            self._file, slots, rank.number, rank.device, rank.storage, rank.backend, progress,
        )  # fmt: skip

    def _carry(self, source: Side, target: Side, index: int) -> None:
        """Bring over what one layer remembers; if that fails, `source` still has all of it."""
        staying = _staying(source.ranks, target.ranks, index)

        def receive(number: int) -> None:
            if number not in staying:
                target.ranks[number].context.cache.add(target.ranks[number].states[index])
                copy_state(source.ranks, target.ranks[number], index, self._n_past)

        try:
            with target.explaining():
                target.executor.run(receive)
        except BaseException:
            _drop(target.ranks, index)
            raise
        for number, other in staying.items():
            rank, old = target.ranks[number], source.ranks[other]
            rank.context.cache.take(rank.states[index], old.context.cache, old.states[index])
        _drop(source.ranks, index)

    def _move(self, block: TransferBlock) -> Move:
        """What a block takes on devices, and what caches give back."""
        adds: Counter[str] = Counter()
        drops: Counter[str] = Counter()
        for rank in self._new.ranks:
            for index in block.slots:
                if (rank.number, index) not in self._kept:
                    adds[str(rank.device)] += _planned(rank, index)
        for index in block.states:
            staying = _staying(self._old.ranks, self._new.ranks, index)
            for rank in self._new.ranks:
                if rank.number not in staying:
                    _count_state(adds, rank, index)
            for rank in self._old.ranks:
                if rank.number not in staying.values():
                    _count_state(drops, rank, index)
        return Move(adds, drops)

    def _spare_slots(self) -> Mapping[str, deque[tuple[int, int, int]]]:
        """What can be freed on each device at any time: rank, index of the slot, bytes."""
        kept = {(source, index) for (_, index), source in self._kept.items()}
        spare: dict[str, deque[tuple[int, int, int]]] = defaultdict(deque)
        for block in self._blocks:
            for index in block.slots:
                for rank in self._old.ranks:
                    n_bytes = _planned(rank, index)
                    if n_bytes and (rank.number, index) not in kept:
                        spare[str(rank.device)].append((rank.number, index, n_bytes))
        return spare

    def _file_bytes(self) -> int:
        """Bytes of the file that the new ranks have to read."""
        return sum(
            packed_bytes(slot, piece)
            for rank in self._new.ranks
            for index, slot in enumerate(rank.slots)
            if (rank.number, index) not in self._kept
            for piece in slot_pieces(slot, rank.number)
        )


def copy_state(sources: Sequence[Rank], rank: Rank, index: int, n_past: int) -> None:
    """Copy what a layer remembers from other ranks to one of another cut, without a change.

    Args:
        index: of the layer's state in `Rank.states`.
        n_past: positions of keys and values that count; recurrent states are copied whole.
    """
    state = rank.states[index]
    order = sorted(range(len(sources)), key=lambda number: sources[number].device != rank.device)
    old = sources[0].states[index].cuts()
    for name, cut in state.cuts().items():
        for run in runs(old[name], cut, rank.number, order):
            source = sources[run.source]
            for saved in (False, True):
                theirs = source.context.cache.tensors(source.states[index], saved=saved)
                mine = rank.context.cache.tensors(state, saved=saved)
                if name in mine:
                    goal, held = (
                        _counting(x[name], start, run.n, state, n_past)
                        for x, start in ((mine, run.goal), (theirs, run.start))
                    )
                    copy_over(goal, held)


def _counting(tensor: Tensor, start: int, n: int, state: object, n_past: int) -> Tensor:
    """Some units, as far as they count."""
    units = tensor[start : start + n]
    return units[:, :n_past] if isinstance(state, KVState) else units


def _kept_slots(old: Sequence[Rank], new: Sequence[Rank]) -> dict[tuple[int, int], int]:
    """What new ranks hold just as an old one on their device: (rank, slot) to the old rank."""
    kept: dict[tuple[int, int], int] = {}
    for index in range(len(new[0].slots)):
        holders: dict[object, list[int]] = defaultdict(list)
        for rank in old:
            holders[_form(rank, index)].append(rank.number)
        for rank in new:
            form = _form(rank, index)
            if form is not None and (found := holders[form]):
                kept[rank.number, index] = found.pop(0)
    return kept


def _form(rank: Rank, index: int) -> object:
    """Equal for ranks whose values of a slot are the same, bit for bit; None without a part."""
    slot = rank.slots[index]
    pieces = slot_pieces(slot, rank.number)
    if not pieces:
        return None
    dim = slot.placement.dim if len(pieces) > 1 and isinstance(slot.placement, Shard) else None
    cut = tuple((part.start, part.stop) for piece in pieces for part in piece)
    return rank.device, slot.holding(rank.storage), dim, cut


def _staying(source: Sequence[Rank], target: Sequence[Rank], index: int) -> dict[int, int]:
    """Which target ranks remember just what a source rank on their device does: to that one."""
    holders: dict[object, list[int]] = defaultdict(list)
    for rank in source:
        holders[rank.context.cache.memory_key(rank.states[index])].append(rank.number)
    found: dict[int, int] = {}
    for rank in target:
        same = holders[rank.context.cache.memory_key(rank.states[index])]
        if same:
            found[rank.number] = same.pop(0)
    return found


def _blocks(rank: Rank) -> list[TransferBlock]:
    """The blocks of a model, and each tensor outside of them by itself."""
    blocks = [TransferBlock() for _ in rank.model.blk]
    others: list[TransferBlock] = []
    for index, slot in enumerate(rank.slots):
        place = split_name(slot.tensor.name)
        if place is None:
            others.append(TransferBlock(slots=[index]))
        else:
            blocks[place[0]].slots.append(index)
    layer_of = {id(s): layer for layer, block in enumerate(rank.model.blk) for s in block.states()}
    for index, state in enumerate(rank.states):
        blocks[layer_of[id(state)]].states.append(index)
    return blocks + others


def _held(ranks: Sequence[Rank]) -> Counter[str]:
    """Bytes of weights and caches on each device, when all is there."""
    held: Counter[str] = Counter()
    for rank in ranks:
        held[str(rank.device)] += sum(_planned(rank, i) for i in range(len(rank.slots)))
        for index in range(len(rank.states)):
            _count_state(held, rank, index)
    return held


def _planned(rank: Rank, index: int) -> int:
    return held_bytes(rank.slots[index], rank.number, rank.storage)


def _count_state(total: Counter[str], rank: Rank, index: int) -> None:
    device, n_bytes = rank.context.cache.room(rank.states[index])
    total[str(device)] += n_bytes


def _drop(ranks: Sequence[Rank], index: int) -> None:
    for rank in ranks:
        rank.context.cache.drop(rank.states[index])


def _set(rank: Rank, index: int, value: Weight | Tensor | None) -> None:
    setattr(rank.slots[index].owner, rank.slots[index].attribute, value)
