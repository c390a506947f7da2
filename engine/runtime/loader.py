"""Loading of ranks: their slices of the file, and their caches and backends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.cpu.backend import CpuBackend
from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.reference.backend import Backend
from engine.backends.reference.weights import DenseWeight, PackedWeight, chunks
from engine.errors import Cancelled, EngineError, KernelError, Sentence, UnsupportedQuant, clause
from engine.formats.quants.dequantise import QUANTS, dequantise
from engine.hardware.backend_choice import kernels_for, use_interpreter
from engine.hardware.faults import call_all
from engine.hardware.torch_devices import is_out_of_memory
from engine.model.architectures.declare import Declaration, declare
from engine.model.forward.cache import Cache
from engine.model.forward.context import Context
from engine.model.forward.operands import Weight
from engine.model.forward.state import windows_of
from engine.model.layers.module import Slot
from engine.model.sharding.placement import Shard, Slices
from engine.planning.footprint import slot_pieces, x_bytes
from engine.planning.plan import Plan
from engine.planning.rank_size import keeps_kv_on_host
from engine.runtime.interconnect.proof import find_routes
from engine.runtime.micro_batches import MicroBatches
from engine.runtime.rank import Rank, warm_rows
from engine.util.progress import LoadProgress

if TYPE_CHECKING:
    from engine.backends.reference.backend import WeightLoader
    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensor_bytes import TensorBytes
    from engine.formats.gguf.tensors import TensorInfo
    from engine.hardware.fallbacks import Fallbacks
    from engine.load_params import LoadParams
    from engine.model.forward.communicator import Communicator
    from engine.model.forward.state import State
    from engine.model.layers.hparams import HParams

PROGRESS_INTERVAL_S = 0.04
"""Minimum time between two progress reports, in seconds."""


class ByteProgress:
    """Progress of a load in bytes, over all ranks, and its cancellation check.

    Args:
        total_bytes: number of bytes that all ranks will read.
        on_progress: called with the progress, from several threads, one at a time.
        is_cancelled: returns whether the user has cancelled.
        doing: name of the work for `Cancelled`'s message, such as "Loading".
    """

    def __init__(
        self, total_bytes: int, on_progress: Callable[[LoadProgress], None],
        is_cancelled: Callable[[], bool], doing: str = Sentence("Loading"),
    ) -> None:  # fmt: skip
        self._total = total_bytes
        self._doing = doing
        self._done = 0
        self._on_progress = on_progress
        self.is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._next_report = 0.0
        self._other_work: dict[int, str] = {}

    def note(self, rank: int, doing: str) -> None:
        """Report other work by a rank, such as compiling; "" when that is done."""
        with self._lock:
            self._other_work[rank] = doing
            self._report()

    def add(self, n_bytes: int) -> None:
        """Count `n_bytes` as read; report progress at most every `PROGRESS_INTERVAL_S`.

        Raises:
            Cancelled: the user has cancelled.
        """
        self.check()
        with self._lock:
            self._done += n_bytes
            now = time.monotonic()
            if now >= self._next_report or self._done >= self._total:
                self._next_report = now + PROGRESS_INTERVAL_S
                self._report()

    def _report(self) -> None:
        doing = next(filter(None, self._other_work.values()), "")
        self._on_progress(LoadProgress(self._done, self._total, doing))

    def check(self) -> None:
        """Check for a cancellation.

        Raises:
            Cancelled: the user has cancelled.
        """
        if self.is_cancelled():
            raise Cancelled(self._doing)


def check_types(path: str, slots: Sequence[Slot]) -> None:
    """Check that every tensor can be dequantised.

    Raises:
        UnsupportedQuant: a tensor cannot be dequantised; the error names the first one.
    """
    for slot in slots:
        if slot.tensor.type.number not in QUANTS:
            raise UnsupportedQuant(path, slot.tensor.type.name, slot.tensor.name)


def load_rank(
    file: GGUFFile, slots: Sequence[Slot], rank: int, device: torch.device, storage: str,
    backend: Backend, progress: ByteProgress,
) -> None:  # fmt: skip
    """Load a rank's parts of tensors into the attributes that `slots` name.

    Args:
        slots: tensors to load, and the attributes of the rank's modules to store them in.
        storage: storage format of the rank's matrices; see `engine.planning.plan.DevicePlan`.
        progress: progress of all ranks' loads.

    Raises:
        ModelFileError: the file has changed or was truncated, or its drive failed.
        Cancelled: the user has cancelled.
    """
    with backend.loader(file, slots, rank, progress.add) as loader:
        for slot in slots:
            pieces = slot_pieces(slot, rank)
            if pieces:
                value = _value(file, slot, pieces, device, storage, progress, loader)
                setattr(slot.owner, slot.attribute, value)
    file.check_unchanged()


def _value(
    file: GGUFFile, slot: Slot, pieces: Sequence[Slices], device: torch.device, storage: str,
    progress: ByteProgress, loader: WeightLoader,
) -> Weight | Tensor:  # fmt: skip
    dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
    kind = slot.holding(storage)
    if kind == "packed":
        return _load_packed(file, slot.tensor, pieces, dim, device, loader)
    if kind != "f32":
        return loader.matrix(slot, pieces)
    parts = [_dequantised(file, slot.tensor, piece, progress) for piece in pieces]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return DenseWeight(whole.to(device)) if slot.is_matrix else whole.to(device)


def _load_packed(
    file: GGUFFile, tensor: TensorInfo, pieces: Sequence[Slices], dim: int, device: torch.device,
    loader: WeightLoader,
) -> Weight:  # fmt: skip
    parts, columns, begin = [], [], 0
    for piece in pieces:
        raw, inside = _blocks(file, tensor, piece)
        parts.append(loader.copy_bytes(raw))
        columns.append(torch.arange(begin + inside.start, begin + inside.stop))
        begin += raw.shape[-1] // tensor.type.type_size * tensor.type.block_size
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    if dim != len(tensor.shape) - 1 or len(parts) == 1:
        kept: slice | Tensor = slice(int(columns[0][0]), int(columns[0][-1]) + 1)
    else:
        kept = torch.cat(columns).to(device)
    return PackedWeight(whole.to(device), tensor.type.number, kept)


def _dequantised(
    file: GGUFFile, tensor: TensorInfo, slices: Slices, progress: ByteProgress
) -> Tensor:
    raw, columns = _blocks(file, tensor, slices)
    n_columns = columns.stop - columns.start
    result = torch.empty(prod(raw.shape[:-1]), n_columns)
    for part, chunk in chunks(raw, progress.add):
        result[part] = dequantise(chunk, tensor.type.number)[:, columns]
    return result.reshape(*raw.shape[:-1], n_columns)


def _blocks(file: GGUFFile, tensor: TensorInfo, slices: Slices) -> tuple[TensorBytes, slice]:
    """Return the whole blocks that cover a slice, and the slice's column range in them."""
    kind = tensor.type
    first = slices[-1].start // kind.block_size
    last = -(-slices[-1].stop // kind.block_size)
    raw = file.raw(tensor)[(*slices[:-1], slice(first * kind.type_size, last * kind.type_size))]
    start = slices[-1].start - first * kind.block_size
    return raw, slice(start, start + slices[-1].stop - slices[-1].start)


Prepare = Callable[["Communicator"], "Communicator"]
"""Prepares a communicator for captured tokens; see `Backend.captured_collectives`."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Settings shared by the builders of all of a model's ranks.

    Attributes:
        kinds: kind of each rank's device; ranks of the same kind compute the same bits.
        n_batch: maximum number of prompt tokens per pass.
        communicator: returns a rank's communicator, given the rank's number, its device, and the
            function that prepares communicators between this process's ranks for captured tokens.
        fallbacks: fallbacks that make the model's GPUs slower.
    """

    devices: Sequence[torch.device]
    kinds: Sequence[str]
    plan: Plan
    hp: HParams
    n_batch: int
    threads_per_rank: int
    communicator: Callable[[int, torch.device, Prepare], Communicator]
    fallbacks: Fallbacks


class RankBuilder:
    """Builder of a model's ranks, called on each rank's own thread or in its own process.

    Args:
        declaration: declaration with modules for this process's first rank.
        first: number of that rank.
    """

    def __init__(
        self, setup: RankSetup, file: GGUFFile, params: LoadParams, declaration: Declaration,
        first: int = 0,
    ) -> None:  # fmt: skip
        self.file = file
        self._setup, self._params, self._declaration = setup, params, declaration
        self._first = first

    def empty(self, number: int) -> Rank:
        """Return a rank without weights and with a cache that has no layers."""
        return self._made(number, self._own_declaration(number), ())

    def loaded(self, number: int, progress: ByteProgress) -> Rank:
        """Return a rank with its weights and its cache; `progress` covers all ranks."""
        mine = self._own_declaration(number)
        rank = self._made(number, mine, mine.states)
        try:
            with self._compiled(rank, progress):
                load_rank(
                    self.file, rank.slots, number, rank.device, rank.storage, rank.backend, progress
                )
            with _explained(self._setup.plan.devices[number].device):
                rank.backend.check(self.file, rank.slots, rank.context.cache)
        except BaseException:
            call_all(rank.close)
            raise
        return rank

    def _own_declaration(self, number: int) -> Declaration:
        return self._declaration if number == self._first else declare(self.file, self._params)

    @contextmanager
    def _compiled(self, rank: Rank, progress: ByteProgress) -> Iterator[None]:
        setup = self._setup
        name = setup.plan.devices[rank.number].device
        with _explained(name):
            compiling = rank.backend.compile_ahead(
                lambda: declare(self.file, self._params), rank.number, self._params,
                warm_rows(min(setup.plan.n_ctx, setup.n_batch)),
                lambda doing: progress.note(rank.number, doing),
            )  # fmt: skip
        try:
            yield
            with _explained(name):
                compiling.wait(progress.is_cancelled)
        finally:
            compiling.cancel()

    def _made(self, number: int, declaration: Declaration, states: Sequence[State]) -> Rank:
        setup = self._setup
        device, storage = setup.devices[number], setup.plan.devices[number].storage
        cache = Cache(
            states, number, setup.plan.cache_size, device, windows_of(declaration.states),
            kv_on_host=keeps_kv_on_host(self._params, device.type),
        )  # fmt: skip
        backend = self._backend(number, storage == "kernels")
        comm = setup.communicator(number, device, backend.captured_collectives)
        kinds = setup.kinds

        mtp_blocks = declaration.split.blocks[setup.hp.n_trunk :]

        def make_context() -> Context:
            context = Context(comm, backend.make_ops(), cache, device, kinds)
            if any(number in block.group for block in mtp_blocks):
                context.keep_hidden_states(setup.hp.n_embd, setup.hp.n_mtp)
            return context

        micro_batches = None
        if backend.captures and not mtp_blocks:
            from engine.backends.gpu.comm.communicator import DeviceCommunicator  # needs Triton

            if isinstance(comm, DeviceCommunicator):
                micro_batches = MicroBatches(comm, make_context)
        return Rank(declaration, storage, make_context(), backend, micro_batches)

    def _backend(self, number: int, has_kernels: bool) -> Backend:
        """Return a rank's backend; an idle rank's backend can also record tokens."""
        setup, device = self._setup, self._setup.devices[number]
        is_idle = number not in self._declaration.split.holders
        name = "cpu" if is_idle else setup.plan.devices[number].device
        kernels = kernels_for(name) if has_kernels or is_idle else ""
        n_bytes = x_bytes(setup.hp)
        if kernels == "cpu":
            n_threads = 1 if is_idle else setup.threads_per_rank
            return CpuBackend(n_threads, n_bytes, fast_prompts=self._params.fast_prompts)
        if kernels == "gpu" and not is_idle:
            if device.type == "cpu":
                use_interpreter()
            from engine.backends.gpu.backend import GpuBackend  # needs Triton

            return GpuBackend(device, n_bytes, setup.plan.n_ctx, setup.fallbacks)
        return Backend()


def make_group(
    plan: Plan, devices: Sequence[torch.device], params: LoadParams, fallbacks: Fallbacks
) -> ThreadGroup:
    """Return the group in which a model's ranks exchange values.

    If all ranks use GPU kernels, collectives run on the devices without the host waiting.
    """
    used = [d for d in plan.devices if d.memory.total]
    has_kernels = all(d.storage == "kernels" for d in used)
    if len(used) < 2 or not has_kernels or {kernels_for(d.device) for d in used} != {"gpu"}:
        return ThreadGroup(spins=sum(d.storage == "kernels" for d in plan.devices) > 1)
    if "cpu" in {d.device for d in used}:
        use_interpreter()
    from engine.backends.gpu.comm.communicator import device_group

    routes = find_routes([d.device for d in used], params.p2p)
    return device_group(devices, routes, fallbacks)


@contextmanager
def _explained(device: str) -> Iterator[None]:
    """Turn errors, except out of memory and `Cancelled`, into a `KernelError` for the device."""
    try:
        yield
    except Cancelled:
        raise
    except EngineError as error:
        if is_out_of_memory(error):
            raise
        raise KernelError(device, clause(str(error))) from error
