"""KV cache of a model on several machines, kept on machine 0 during a re-split."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from engine.formats.gguf.tensors import row_bytes
from engine.model.forward.state import KV_INFO, KVState, windows_of
from engine.model.sharding.split import as_one, runs
from engine.runtime.memory import CachedRows

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from engine.distributed.machine_runner import MachineRunner
    from engine.model.sharding.split import Segments
    from engine.runtime.resplit import UsedSlots


class _CachedTensor(NamedTuple):
    """One layer's keys or values in the file: the slots in use, for all heads.

    Attributes:
        layer: index of the layer in `Rank.states`.
        name: name of the tensor within the layer.
        cut: each rank's heads.
        begin: offset of the tensor in the file.
        unit_bytes: bytes per head.
        rows: the rows of the first head, on any rank.
    """

    layer: int
    name: str
    cut: Segments
    begin: int
    unit_bytes: int
    rows: CachedRows

    def of_unit(self, rank: int, unit: int) -> CachedRows:
        return self.rows._replace(rank=rank, units=(unit, unit + 1))


class KeptCache:
    """A model's keys and values in a temporary file on machine 0, as a context manager.

    Each machine's part of the recurrent states is gathered in machine 0's memory.

    Args:
        runner: the model's runner, which must not be computing an answer.
        kv_type: type of the model's keys and values.
        used: slots to keep.

    Raises:
        CommError: a machine is lost.
        OSError: the disk is full.
    """

    def __init__(self, runner: MachineRunner, kv_type: str, used: UsedSlots) -> None:
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

    def restore(self, runner: MachineRunner) -> None:
        """Copy everything back, to the same model with another split."""
        for tensor in self._tensors(runner):
            for rank in range(self._n_ranks):
                for run in runs(as_one(tensor.cut), tensor.cut, rank, [0]):
                    self._file.seek(tensor.begin + run.start * tensor.unit_bytes)
                    for at in range(run.n):
                        rows = tensor.of_unit(rank, run.goal + at)
                        found = rows.room()
                        self._file.readinto(found.numpy().data)
                        runner.write_rows(rows, found)

    def _tensors(self, runner: MachineRunner) -> Iterator[_CachedTensor]:
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
