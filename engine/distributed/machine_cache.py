"""What sequences remember on the ranks of all machines."""

from __future__ import annotations

import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.formats.gguf.tensors import row_bytes
from engine.model.forward.state import KV_INFO, KVState, RecurrentState, windows_of
from engine.model.sharding.split import as_one, runs
from engine.runtime.memory import CachedRows, CacheMemory

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from engine.distributed.machines import ModelPlace
    from engine.model.sharding.split import Segments
    from engine.runtime.interface import SlotState
    from engine.runtime.resplit import UsedSlots


class MachineCache(CacheMemory):
    """The part of `MachineRunner` that changes the caches of all machines together.

    What a state file holds passes through machine 0, a strip at a time.
    """

    _n_saved = 0
    _dropped: list[int]
    _saved: weakref.WeakValueDictionary[int, PartsElsewhere]

    @property
    @abstractmethod
    def _place(self) -> ModelPlace:
        """Place of the model among the machines."""

    @abstractmethod
    def _together(self, order: str, *values: Any, given: Any = None) -> Any:
        """Have all machines do something."""

    @property
    def n_ranks(self) -> int:
        """Number of ranks of all machines."""
        return self._place.layout.n_ranks

    def copy_page(self, group: int, source: int, target: int) -> None:
        self._together("copy_page", group, source, target)

    def _do_copy_page(self, group: int, source: int, target: int) -> None:
        super().copy_page(group, source, target)

    def clear_slot(self, slot: int) -> None:
        self._together("clear_slot", slot)

    def _do_clear_slot(self, slot: int) -> None:
        super().clear_slot(slot)

    # recurrent states

    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        """Keep a copy of the recurrent states of a slot, each machine of its own part.

        Returns:
            What stands for the copy, and the bytes of all parts.
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
        """Make the recurrent states of a slot those of a copy; see `ModelRunner`."""
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
        """Have machine 0 send states that it has whole, such as those of a file."""
        machines, shown = self._place.machines, given or self._rooms()
        for x in (x for tensors in shown for x in tensors.values()):
            for machine in range(1, len(machines.names)):
                machines.hand(x, 0, machine)
        super().load_slot(slot, shown)

    def whole_state(self, state: SlotState) -> SlotState:
        """Return the states that the machines keep in memory of machine 0."""
        if not isinstance(state, PartsElsewhere) or state:
            return state
        found: SlotState = self._together("whole_state", state.key)
        return found

    def _do_whole_state(self, key: int) -> SlotState:
        """Have all machines send what they keep to machine 0, which returns it."""
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
        """Bring all states that the machines keep to memory of machine 0, for another split."""
        for saved in list(self._saved.values()):
            saved.extend(self.whole_state(saved))
        self._saved.clear()

    def _rooms(self) -> list[dict[str, Tensor]]:
        """Return memory for the recurrent states of a sequence, see `SlotState`."""
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
        """Have the machine of some rows send them to machine 0."""
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
        """Have machine 0 send rows to the machine where they belong."""
        n = len(CachedRows._fields)
        rows, layout = CachedRows(*values[:n]), self._place.layout
        found = values[n] if values[n:] else rows.room()
        self._place.machines.hand(found, 0, layout.machine_of(rows.rank))
        if rows.rank in layout.local:
            super().write_rows(rows, found)

    def zero_rows(self, layer: int, slots: Sequence[Sequence[int]]) -> None:
        self._together("zero_rows", layer, slots)

    def _do_zero_rows(self, layer: int, slots: Sequence[Sequence[int]]) -> None:
        super().zero_rows(layer, slots)


class PartsElsewhere(list["Mapping[str, Tensor]"]):
    """Stand-in for copies of recurrent states that the machines keep, each of its own part.

    It is empty until it is filled with the states themselves.

    Attributes:
        key: number of the copies.
    """

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key = key


class _CachedTensor(NamedTuple):
    """Keys or values of a layer in the file: all heads, and of each the slots in use.

    Attributes:
        layer: index of the layer in `Rank.states`.
        name: name of the tensor within the layer.
        cut: which rank has which heads.
        begin: where the tensor begins in the file.
        unit_bytes: bytes of a head.
        rows: the rows of the first head, on any rank.
    """

    layer: int
    name: str
    cut: Segments
    begin: int
    unit_bytes: int
    rows: CachedRows

    def of_unit(self, rank: int, unit: int) -> CachedRows:
        """Return the rows of a head of a rank."""
        return self.rows._replace(rank=rank, units=(unit, unit + 1))


class KeptCache:
    """Keys and values of a model in a temporary file on machine 0, as a context.

    The machines keep their parts of recurrent states no longer: machine 0 has all of them.

    Args:
        runner: runner of the model, which no answer uses.
        kv_type: type of its keys and values.
        used: slots with what is to be kept.

    Raises:
        CommError: a machine is gone.
        OSError: the disk is full.
    """

    def __init__(self, runner: MachineCache, kv_type: str, used: UsedSlots) -> None:
        self._kv_type, self._used = kv_type, used
        self._n_ranks = runner.n_ranks
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 it is closed with the context
        try:
            for tensor in self._tensors(runner):
                for run in runs(tensor.cut, as_one(tensor.cut), 0, range(self._n_ranks)):
                    for at in range(run.n):
                        rows = tensor.of_unit(run.source, run.start + at)
                        self._file.write(runner.read_rows(rows).numpy().data)
            runner.gather_states()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._file.close()

    def restore(self, runner: MachineCache) -> None:
        """Copy everything to the same model with another split."""
        for tensor in self._tensors(runner):
            for rank in range(self._n_ranks):
                for run in runs(as_one(tensor.cut), tensor.cut, rank, [0]):
                    self._file.seek(tensor.begin + run.start * tensor.unit_bytes)
                    for at in range(run.n):
                        rows = tensor.of_unit(rank, run.goal + at)
                        found = rows.room()
                        self._file.readinto(found.numpy().data)
                        runner.write_rows(rows, found)

    def _tensors(self, runner: MachineCache) -> Iterator[_CachedTensor]:
        """Yield the tensors in the order of the file, as a split cuts them."""
        states, begin = runner.ranks[0].states, 0
        windows = windows_of(states)
        for layer, state in enumerate(states):
            if not isinstance(state, KVState):
                continue
            slots = [(part.start, part.stop) for part in self._used[windows.index(state.window)]]
            types = state.held_types(self._kv_type)
            held = {"k": (types.k, state.head_dim_k), "v": (types.v, state.head_dim_v)}
            for name, cut in state.cuts().items() if slots else ():
                kind, dim = held[name]
                rows = CachedRows(0, layer, name, (0, 1), slots, row_bytes(KV_INFO[kind], dim))
                unit_bytes = rows.room().nbytes
                yield _CachedTensor(layer, name, cut, begin, unit_bytes, rows)
                begin += unit_bytes * sum(segment.total for segment in cut)
