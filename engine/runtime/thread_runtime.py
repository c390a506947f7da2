"""A loaded model whose ranks are threads of this process."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.backends.executor import RankExecutor, RankOutOfMemory
from engine.backends.reference.weights import release_scratch
from engine.errors import DeviceStopped, EngineError, KernelError, OutOfDeviceMemory, Sentence
from engine.formats.gguf.companions import Direction, read_control_vectors
from engine.hardware.backend_choice import refuse_kernels
from engine.hardware.faults import call_all, explain_faults, has_stopped, stopped_error
from engine.hardware.torch_devices import (
    free_bytes,
    kind_of,
    mark_hanging,
    release_cached_memory,
    torch_devices,
)
from engine.model.architectures.declare import declare
from engine.model.forward.state import RecurrentState, windows_of
from engine.planning.memory import DeviceMemory
from engine.planning.plan import Plan, make_plan, mmproj_path
from engine.planning.threads import busy_on_cpu, threads_per_rank
from engine.runtime.kernel_proof import prove_kernels
from engine.runtime.loader import (
    ByteProgress,
    Prepare,
    RankBuilder,
    RankSetup,
    check_types,
    make_group,
)
from engine.runtime.memory import UsedMemory, plan_with_overheads
from engine.runtime.model_runner import ModelRunner
from engine.runtime.rank import Rank
from engine.runtime.resplit import DOING, Side, Transfer, UsedSlots
from engine.vision.encoders.base import TextModel

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.communicator import Communicator
    from engine.model.layers.hparams import HParams
    from engine.runtime.interface import TokenSource
    from engine.util.progress import IsCancelled, ProgressSink

log = logging.getLogger(__name__)


class ThreadRuntime:
    """Owner of a loaded model whose ranks are threads; loads and re-splits it and measures memory.

    Args:
        file: the model's file.
        params: load settings.
        on_progress: called with the progress, from several threads, one at a time.
        is_cancelled: returns whether the user has cancelled; called between chunks of weights.
        donor: runtime with another split of the same file, from which to take weights and cache. It
            is closed at the end, or stays usable if this fails.
        used: slots of the cache to take from `donor`.

    Attributes:
        local: numbers of this process's ranks.
        devices: devices of these ranks.
        directions: sum of the control vectors, by layer.
        fallbacks: fallbacks that make the GPUs slower.
        draft: kind of drafts to request for another split with the same layers.
        mmproj: path of the vision encoder's file; "" for none.
        left_pictures: whether a vision encoder was left out for lack of memory.
        plan: the model's placement and predicted memory.
        n_threads: total number of CPU threads over all ranks.
        group: group in which the ranks exchange values.
        runner: runner for forward passes on all ranks.

    Raises:
        EngineError: the file, the split or a device cannot be used; nothing stays allocated.
    """

    def __init__(
        self, file: GGUFFile, params: LoadParams, on_progress: ProgressSink,
        is_cancelled: IsCancelled, donor: ThreadRuntime | None = None, used: UsedSlots = (),
    ) -> None:  # fmt: skip
        if donor is not None:
            params = _as_before(params, donor)
        declaration = declare(file, params)
        self.local = self._local_ranks(declaration)
        holders = [rank for rank in declaration.split.holders if rank in self.local]
        devices = self._torch_devices(declaration.devices, holders)
        self.devices = [devices[rank] for rank in self.local]
        self.fallbacks = prove_kernels(declaration.devices[rank] for rank in holders)
        plan_with_overheads(self.devices)
        free = free_bytes(["cpu", *(declaration.devices[rank] for rank in holders)])
        if donor is not None:
            free = donor.free_once_closed(free)
        self.plan: Plan = make_plan(declaration, params, free)
        if params.may_leave_mtp and declaration.hp.n_mtp and self._lacks_memory(free):
            params = params.without_mtp
            declaration = declare(file, params)
            self.plan = make_plan(declaration, params, free)
        self.left_pictures: bool = params.mmproj == "auto" and self._leaves_pictures(free)
        if self.left_pictures:
            params = params.without_pictures
            self.plan = make_plan(declaration, params, free)
        self.local_plan.check_fits(free)
        check_types(str(file.path), declaration.slots)
        self.hp = declaration.hp
        self.mmproj: str = mmproj_path(params, TextModel.of(self.hp))
        self.draft: str = "mtp" if self.hp.n_mtp else params.without_mtp.draft
        self.directions: Mapping[int, Direction] = (
            _directions(params, self.hp) if donor is None else donor.directions
        )
        self.n_ctx = self.plan.n_ctx
        self.n_batch: int = self.plan.n_batch
        self._windows = windows_of(declaration.states)
        self.can_rewind = not any(isinstance(s, RecurrentState) for s in declaration.states)
        self._memory = UsedMemory(self.devices)
        self._start_threads(params)
        setup = RankSetup(
            devices, self._kinds(devices), self.plan, self.hp, self.n_batch, self.threads_per_rank,
            self._communicator, self.fallbacks,
        )  # fmt: skip
        builder = RankBuilder(setup, file, params, declaration, self.local[0])
        try:
            if donor is None:
                self._load(builder, on_progress, is_cancelled)
            else:
                self._take_over(donor, used, builder, on_progress, is_cancelled)
        except BaseException:
            self.close()
            raise
        self._memory.watch(self.ranks)

    def _start_threads(self, params: LoadParams) -> None:
        plan = self.local_plan
        self.threads_per_rank = threads = threads_per_rank(params.cpu_threads, plan)
        self.n_threads = threads * max(1, len(busy_on_cpu(plan)))
        self.group = make_group(plan, self.devices, params, self.fallbacks)
        self.plan = replace(self.plan, warnings=(*self.plan.warnings, *self.group.notes))
        executor = RankExecutor(self.devices, self.group, threads)
        me = weakref.ref(self)  # a reference cycle would keep weights alive
        self.runner = self._runner_type()(
            executor, self.hp.n_vocab, self.plan.cache_size, self._windows,
            can_rewind=self.can_rewind,
            guard=lambda doing, n_tokens: _guard(me(), doing, n_tokens), fallbacks=self.fallbacks,
        )  # fmt: skip
        self._finalizer = weakref.finalize(self, executor.close)

    def _local_ranks(self, declaration: Declaration) -> Sequence[int]:
        return range(len(declaration.devices))

    def _torch_devices(
        self, names: Sequence[str], holders: Collection[int]
    ) -> Sequence[torch.device]:
        return torch_devices(names, holders)

    def _kinds(self, devices: Sequence[torch.device]) -> Sequence[str]:
        """Return each rank's kind of device; ranks of the same kind compute the same bits."""
        return [kind_of(device) for device in devices]

    def _communicator(self, rank: int, device: torch.device, prepare: Prepare) -> Communicator:
        return prepare(self.group.communicator(rank, device))

    def _runner_type(self) -> type[ModelRunner]:
        return ModelRunner

    @property
    def local_plan(self) -> Plan:
        """Part of the plan for this process's ranks."""
        if len(self.local) == len(self.plan.devices):
            return self.plan
        return replace(self.plan, devices=tuple(self.plan.devices[rank] for rank in self.local))

    @property
    def ranks(self) -> list[Rank]:
        """Ranks of the model, in order; empty once closed."""
        return self.runner.ranks

    @property
    def token_source(self) -> TokenSource | None:
        """Token source that samples on a device; None if the host samples."""
        return self.runner.token_source

    @token_source.setter
    def token_source(self, source: TokenSource | None) -> None:
        self.runner.token_source = source

    def _load(
        self, builder: RankBuilder, on_progress: ProgressSink, is_cancelled: IsCancelled
    ) -> None:
        stop = threading.Event()
        progress = ByteProgress(
            self.plan.file_bytes, on_progress, lambda: stop.is_set() or is_cancelled()
        )

        def load(number: int) -> Rank:
            try:
                return builder.loaded(self.local[number], progress)
            except BaseException:
                stop.set()
                raise

        with self._explaining(Sentence("to load the model")):
            self.runner.ranks = self.runner.executor.run(load)
            self._steer()
        self._begin()

    def _begin(self) -> None:
        with self._explaining(Sentence("to compute the first tokens")):
            self.runner.warm_up()
        self.runner.sample_on_device()

    def _steer(self) -> None:
        for rank in self.ranks:
            rank.context.directions = {
                layer: torch.from_numpy(direction).to(rank.device)
                for layer, direction in self.directions.items()
            }

    def _take_over(
        self, donor: ThreadRuntime, used: UsedSlots, builder: RankBuilder,
        on_progress: ProgressSink, is_cancelled: IsCancelled,
    ) -> None:  # fmt: skip
        if donor.token_source is not None:
            donor.token_source.stop()
            donor.token_source = None
        self._keep_fallbacks(donor)
        with self._explaining(DOING):
            self.runner.ranks = self.runner.executor.run(builder.empty)
        transfer = Transfer(
            builder.file, donor._side(), self._side(), used, on_progress, is_cancelled
        )
        try:
            transfer.run()
            self._steer()
            for rank in self.ranks:
                rank.backend.prepare()
        except BaseException as error:
            donor._take_back(transfer, error)
            raise
        donor.close()

    def _keep_fallbacks(self, donor: ThreadRuntime) -> None:
        for kind in ("weights", "wrong", "draft"):
            self.fallbacks.take_over(donor.fallbacks, kind)

    def _side(self) -> Side:
        return Side(self.ranks, self.runner.executor, lambda: self._explaining(DOING))

    def _take_back(self, transfer: Transfer, error: BaseException) -> None:
        """Take everything back after a failed re-split; if that also fails, close this runtime."""
        self.runner.drop_recordings()
        try:
            transfer.undo()
        except BaseException:  # noqa: BLE001 the first failure is the one to report
            self.close()
            if isinstance(error, EngineError) and not isinstance(error, DeviceStopped):
                error.hint = Sentence(
                    "The old split could not be restored either: load the model again."
                )

    def free_once_closed(self, free: Mapping[str, int]) -> dict[str, int]:
        """Return each device's free memory without the model, given its current free memory."""
        return self._memory.free_once_closed(free, self.plan, self.ranks)

    def kernel_s(self) -> list[float] | None:
        """Return each rank's total seconds in kernels; None unless all ranks measure this."""
        found = [rank.backend.kernel_s for rank in self.ranks]
        known = [seconds for seconds in found if seconds is not None]
        return known if len(known) == len(self.devices) else None

    @contextmanager
    def _explaining(self, doing: str, n_tokens: int = 1) -> Iterator[None]:
        """Translate failures into errors for users, and drop recordings after a failure.

        Recorded collectives cannot be replayed. If a rank or GPU is lost, close the runtime.
        """
        if torch.get_num_threads() != self.threads_per_rank:
            torch.set_num_threads(self.threads_per_rank)  # torch's setting is shared by all models
        try:
            yield
        except BaseException as error:
            self.runner.drop_recordings()
            explained = self._explained(error, doing)
            if self.runner.executor.lost or has_stopped(self.devices):
                self.close()
            if explained is error:
                raise
            raise explained from None
        self._memory.note_pass(n_tokens)

    def _explained(self, error: BaseException, doing: str) -> BaseException:
        try:
            if isinstance(error, RankOutOfMemory):
                return self._out_of_memory(error.rank, doing)
        except RuntimeError as worse:
            error = worse
        return stopped_error(error, self.devices) or error

    def _out_of_memory(self, rank: int, doing: str) -> OutOfDeviceMemory:
        plan = self.plan.devices[self.local[rank]]
        device = plan.device
        free = free_bytes([device])[device]
        needed = max(plan.memory.total, free + 1)
        return OutOfDeviceMemory(device, needed, free, doing)

    def memory(self) -> list[DeviceMemory]:
        """Return each rank's predicted and measured bytes; see `UsedMemory.compared`."""
        return self._memory.compared(self.local_plan, self.ranks)

    def rest(self) -> None:
        """Put the ranks' threads to sleep until the next pass, as another model needs the cores."""
        for rank in self.ranks:
            rank.backend.rest()

    def note_beside(self, kind: str, n_bytes: int) -> None:
        """Note the device memory, in bytes, used by `kind`, one of `BESIDE`."""
        self._memory.note_beside(kind, n_bytes)
        self._memory.watch(self.ranks)

    def _lacks_memory(self, free: Mapping[str, int]) -> bool:
        return bool(self.local_plan.shortages(free))

    def _leaves_pictures(self, free: Mapping[str, int]) -> bool:
        return bool(self.plan.pictures_device) and bool(self.local_plan.shortages(free))

    def close(self) -> None:
        """Free everything, raising nothing; safe to call twice.

        Memory that a lost rank uses is freed when its thread returns.
        """
        lost = self.runner.executor.lost
        mark_hanging(self.devices[rank] for rank in lost)
        is_in_use = lost or has_stopped(self.devices)  # other ranks' kernels may still write to it
        call_all(
            self._finalizer,
            self.runner.close,
            *(() if is_in_use else (self.group.close,)),
            release_scratch,
            lambda: release_cached_memory(self.devices),
        )


def _as_before(params: LoadParams, donor: ThreadRuntime) -> LoadParams:
    params = replace(params, n_batch=donor.n_batch, draft=donor.draft, mmproj=donor.mmproj or "off")
    device = donor.plan.pictures_device
    return replace(params, mmproj_device=device) if device in params.picture_devices else params


def _guard(
    runtime: ThreadRuntime | None, doing: str, n_tokens: int
) -> AbstractContextManager[None]:
    return nullcontext() if runtime is None else runtime._explaining(doing, n_tokens)


def _directions(params: LoadParams, hp: HParams) -> Mapping[int, Direction]:
    return read_control_vectors(
        params.control_vectors, params.control_layers, hp.n_embd, hp.n_trunk
    )


def _without_machines(*_: object) -> ThreadRuntime:
    raise EngineError(
        "These settings need several machines, but they have not joined.",
        "Start them with tandem serve --nodes and tandem join.",
    )


_opener_on_machines: Callable[..., ThreadRuntime] = _without_machines


def open_on_machines_by(opener: Callable[..., ThreadRuntime]) -> None:
    """Set the function that loads models on several machines; it is called like `open_runtime`."""
    global _opener_on_machines  # a process takes part as one machine at most
    _opener_on_machines = opener


def open_runtime(
    file: GGUFFile, params: LoadParams, on_progress: ProgressSink, is_cancelled: IsCancelled,
    donor: ThreadRuntime | None = None, used: UsedSlots = (),
) -> ThreadRuntime:  # fmt: skip
    """Return a `ThreadRuntime`; GPUs whose kernels do not compile use the reference backend.

    Raises:
        EngineError: see `ThreadRuntime`; or the load needs several machines, but none have joined.
    """
    if params.machines:
        return _opener_on_machines(file, params, on_progress, is_cancelled, donor, used)
    gpus = [torch.device(name) for name in params.all_devices if name != "cpu"]
    while True:
        try:
            with explain_faults(gpus):
                return ThreadRuntime(file, params, on_progress, is_cancelled, donor, used)
        except DeviceStopped:
            if donor is not None and has_stopped(donor.devices):
                donor.close()
            raise
        except KernelError as error:
            log.warning("%s", error)
            refuse_kernels(error.device, error.why)
