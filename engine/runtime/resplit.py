"""Re-split: a loaded model changes from one split to another during a conversation.

Only weights that a device does not already hold in the same format are read from the file again.
Keys, values and recurrent states are copied unchanged, layer by layer. If anything fails, the old
split is restored. The new split adds partial sums in another order, so its logits are rounded
differently: they have the same bits as if the model had been loaded with the new split and had read
the same state from a file.

A device never stores more weights, keys and values than the larger of its amounts before and after,
plus those of one block. KV heads that are on several ranks are copied from one of them; they are
equal on ranks of the same kind, which compute the same bits.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import Sentence
from engine.formats.gguf.tensors import split_name
from engine.hardware.torch_devices import trim_heap
from engine.model.forward.state import RecurrentState
from engine.model.sharding.placement import Shard
from engine.model.sharding.split import Move, next_move, runs
from engine.parallel.transfers import copy_over
from engine.planning.footprint import arena_key, held_bytes, packed_bytes, slot_pieces
from engine.runtime.loader import ByteProgress, load_rank
from engine.util.progress import IsCancelled, ProgressSink, ignore, never

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backends.executor import RankExecutor
    from engine.formats.gguf.reader import GGUFFile
    from engine.model.forward.operands import Weight
    from engine.model.forward.state import State
    from engine.runtime.rank import Rank

UsedSlots = Sequence[Sequence[range]]
"""For each group of layers, the ranges of KV cache slots to keep."""

DOING = Sentence("to re-split the model")
"""Purpose for which a re-split needs memory, for error messages."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two splits in a transfer; `explaining` explains failed calls."""

    ranks: Sequence[Rank]
    executor: RankExecutor
    explaining: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class TransferBlock:
    """Unit of a transfer: a block of the model, or a tensor outside all blocks.

    Attributes:
        slots: indices into `Rank.slots`.
        states: indices into `Rank.states`.
    """

    slots: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)


class Transfer:
    """Transfer of weights and caches from an old split's ranks to a new split's.

    The new ranks start with no weights, and no layers in their caches. After `run` they have
    everything, and the old ranks should be closed; after `undo` it is the other way round.

    Args:
        used: slots of the cache to keep; see `UsedSlots`.
        on_progress: called with the progress of reading the file.
        is_cancelled: returns whether the user has cancelled.
    """

    def __init__(
        self, file: GGUFFile, old: Side, new: Side, used: UsedSlots,
        on_progress: ProgressSink, is_cancelled: IsCancelled,
    ) -> None:  # fmt: skip
        self._file, self._old, self._new, self._used = file, old, new, used
        self._kept = _kept_slots(old.ranks, new.ranks)
        self._blocks = _blocks(new.ranks[0])
        self._moves = [self._move(block) for block in self._blocks]
        self._held, after = _held(old.ranks), _held(new.ranks)
        self._limits = {d: max(self._held[d], after[d]) for d in {*self._held, *after}}
        self._spare = self._spare_slots()
        self._freed: dict[int, list[int]] = defaultdict(list)
        self._moved_states: list[int] = []
        self._is_failed = is_failed = threading.Event()  # a cycle would keep weights alive
        self._progress = ByteProgress(
            self._file_bytes(), on_progress, lambda: is_failed.is_set() or is_cancelled(),
            Sentence("Re-splitting"),
        )  # fmt: skip

    def run(self) -> None:
        """Transfer everything.

        Raises:
            EngineError: a device is full or lost, or the user cancelled; then call `undo`.
        """
        for rank in self._old.ranks:
            rank.drop_references()
        for (number, index), source in self._kept.items():
            rank, value = self._new.ranks[number], self._old.ranks[source].value(index)
            assert value is not None, "a rank that has a part of a tensor holds it"
            _set(rank, index, rank.backend.adopt(value))
        while self._blocks:
            spare = {device: sum(n for *_, n in slots) for device, slots in self._spare.items()}
            place = next_move(self._moves, self._held, spare, self._limits)
            self._transfer(self._blocks.pop(place), self._moves.pop(place))

    def undo(self) -> None:
        """Restore the old ranks and empty the new ones.

        Raises:
            EngineError: restoring failed, so neither side can be used.
        """
        for rank in self._new.ranks:
            for index in range(len(rank.slots)):
                _set(rank, index, None)
            rank.drop_references()
        trim_heap()
        for index in reversed(self._moved_states):
            self._move_state(self._new, self._old, index)
        progress = ByteProgress(0, ignore, never)

        def load(number: int) -> None:
            rank = self._old.ranks[number]
            self._load(rank, self._freed[number], progress)

        with self._old.explaining():
            self._old.executor.run(load)

    def _transfer(self, block: TransferBlock, move: Move) -> None:
        self._make_room(move)

        def load(number: int) -> None:
            missing = [index for index in block.slots if (number, index) not in self._kept]
            try:
                self._progress.check()
                self._load(self._new.ranks[number], missing, self._progress)
            except BaseException:
                self._is_failed.set()
                raise

        with self._new.explaining():
            self._new.executor.run(load)
        for index in block.states:
            self._move_state(self._old, self._new, index)
            self._moved_states.append(index)
        for device, n_bytes in move.drops.items():
            self._held[device] -= n_bytes

    def _make_room(self, move: Move) -> None:
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

    def _move_state(self, source: Side, target: Side, index: int) -> None:
        """Move one layer's state; if that fails, `source` still has all of it."""
        staying = _staying(source.ranks, target.ranks, index)

        def receive(number: int) -> None:
            if number not in staying:
                target.ranks[number].context.cache.add(target.ranks[number].states[index])
                copy_state(source.ranks, target.ranks[number], index, self._used)

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
        """Return the bytes that a block takes up on devices, and the bytes that old caches free."""
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
        return sum(
            packed_bytes(slot, piece)
            for rank in self._new.ranks
            for index, slot in enumerate(rank.slots)
            if (rank.number, index) not in self._kept
            for piece in slot_pieces(slot, rank.number)
        )


def copy_state(sources: Sequence[Rank], rank: Rank, index: int, used: UsedSlots) -> None:
    """Copy a rank's part of a layer's state unchanged from the ranks in another split.

    Args:
        sources: ranks in the other split.
        index: index of the layer's state in `Rank.states`.
        used: slots of the cache to copy; recurrent states are copied whole.
    """
    state = rank.states[index]
    order = sorted(range(len(sources)), key=lambda number: sources[number].device != rank.device)
    old = sources[0].states[index].cuts()
    for name, cut in state.cuts().items():
        for run in runs(old[name], cut, rank.number, order):
            source = sources[run.source]
            for slot in range(min(rank.context.cache.n_slots, source.context.cache.n_slots)):
                theirs = source.context.cache.tensors(source.states[index], slot)
                mine = rank.context.cache.tensors(state, slot)
                if name in mine:
                    goal = mine[name][run.goal : run.goal + run.n]
                    held = theirs[name][run.start : run.start + run.n]
                    for part in _parts_to_copy(rank, state, used):
                        copy_over(goal[part], held[part])


def _parts_to_copy(rank: Rank, state: State, used: UsedSlots) -> list[tuple[slice, ...]]:
    """Return the parts of a layer's tensors to copy; for keys and values, only the slots in use."""
    if isinstance(state, RecurrentState):
        return [(slice(None),)]
    slots = used[rank.context.cache.kv(state).group]
    return [(slice(None), slice(part.start, part.stop)) for part in slots]


def _kept_slots(old: Sequence[Rank], new: Sequence[Rank]) -> dict[tuple[int, int], int]:
    """Return, for each (new rank, slot), the old rank on its device that supplies its value."""
    kept: dict[tuple[int, int], int] = {}
    for index in range(len(new[0].slots)):
        holders: dict[object, list[int]] = defaultdict(list)
        for rank in old:
            holders[_form(rank, index)].append(rank.number)
        for rank in new:
            form = _form(rank, index)
            if form is not None and (found := holders[form]):
                kept[rank.number, index] = found.pop(0)
    return _kept_whole(kept, old)


def _kept_whole(
    kept: Mapping[tuple[int, int], int], old: Sequence[Rank]
) -> dict[tuple[int, int], int]:
    """Return `kept`, excluding matrices that share memory with others that are not kept."""
    taken = {(source, index) for (_, index), source in kept.items()}
    left = {
        (rank.number, arena_key(slot, rank.storage))
        for rank in old
        for index, slot in enumerate(rank.slots)
        if rank.backend.has_arenas
        and (rank.number, index) not in taken
        and slot_pieces(slot, rank.number)
    }

    def is_whole(source: int, index: int) -> bool:
        key = arena_key(old[source].slots[index], old[source].storage)
        return key is None or (source, key) not in left

    return {place: source for place, source in kept.items() if is_whole(source, place[1])}


def _form(rank: Rank, index: int) -> object:
    slot = rank.slots[index]
    pieces = slot_pieces(slot, rank.number)
    if not pieces:
        return None
    dim = slot.placement.dim if len(pieces) > 1 and isinstance(slot.placement, Shard) else None
    cut = tuple((part.start, part.stop) for piece in pieces for part in piece)
    return rank.device, slot.holding(rank.storage), dim, cut


def _staying(source: Sequence[Rank], target: Sequence[Rank], index: int) -> dict[int, int]:
    """Return, for each target rank, the source rank whose whole state it can take over."""
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
    held: Counter[str] = Counter()
    for rank in ranks:
        held[str(rank.device)] += sum(_planned(rank, i) for i in range(len(rank.slots)))
        for index in range(len(rank.states)):
            _count_state(held, rank, index)
    return held


def _planned(rank: Rank, index: int) -> int:
    return held_bytes(rank.slots[index], rank.number, rank.storage)


def _count_state(total: Counter[str], rank: Rank, index: int) -> None:
    device, n_bytes = rank.context.cache.allocation(rank.states[index])
    total[str(device)] += n_bytes


def _drop(ranks: Sequence[Rank], index: int) -> None:
    for rank in ranks:
        rank.context.cache.drop(rank.states[index])


def _set(rank: Rank, index: int, value: Weight | Tensor | None) -> None:
    setattr(rank.slots[index].owner, rank.slots[index].attribute, value)
