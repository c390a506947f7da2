"""A loaded model on several machines; this process has the ranks of one of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from engine.arguments import params_document, params_from
from engine.backends.cpu.kernels.language.isa import chosen
from engine.distributed.machine_cache import KeptCache
from engine.distributed.machine_comm import FarCommunicator, MachineCommunicator
from engine.distributed.machine_runner import MachineRunner
from engine.distributed.machines import END, LOAD, UNLOAD, Machines, ModelPlace
from engine.distributed.straight_proof import chosen_ports, used_ports
from engine.errors import EngineError, Sentence, SplitError, reason_of
from engine.formats.gguf.reader import GGUFFile, model_hash
from engine.hardware.torch_devices import kind_of, torch_device, torch_devices
from engine.model.forward.batch import PROMPT_BATCH
from engine.planning.draft import with_mtp_file
from engine.runtime.pass_executor import KernelMeetings, captures_of
from engine.runtime.rank import Captures
from engine.runtime.thread_runtime import ThreadRuntime
from engine.util.progress import ignore, never

if TYPE_CHECKING:
    from engine.distributed.straight import Ports
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.communicator import Communicator
    from engine.runtime.loader import Prepare, RankBuilder
    from engine.runtime.model_runner import ModelRunner
    from engine.runtime.resplit import UsedSlots
    from engine.util.progress import IsCancelled, ProgressSink

BLOCK = "mtp"
"""Key in a load's settings for the path of a separate file with an MTP block."""


class MachineRuntime(ThreadRuntime):
    """A `ThreadRuntime` whose ranks on other machines belong to other processes.

    All machines create one at the same time; all except the first then call `follow`.

    Args:
        machines: connections to the other machines.
        number: id of the model, the same on all machines.
        donor: runtime for the same file with another split, which this one replaces. It stays
            usable if a machine has too little memory, and is closed otherwise.

    Raises:
        EngineError: a machine cannot load the model; all machines raise this error.
    """

    runner: MachineRunner

    def __init__(
        self, file: GGUFFile, params: LoadParams, on_progress: ProgressSink,
        is_cancelled: IsCancelled, machines: Machines, number: int,
        donor: MachineRuntime | None = None,
    ) -> None:  # fmt: skip
        self._place = ModelPlace(machines, params.machines, number)
        self._is_agreed = False
        self._all_kinds = self._introduced(file, params)
        try:
            super().__init__(file, params, on_progress, is_cancelled, donor)
        except EngineError as error:
            if not self._is_agreed:
                machines.agreed(error)
            raise

    def _introduced(self, file: GGUFFile, params: LoadParams) -> Sequence[str]:
        """Check that all machines have the same file; return the kinds of all ranks' devices."""
        machines, found, problem = self._place.machines, None, None
        try:
            if len(params.all_devices) != sum(params.machines):
                raise SplitError(
                    "No part of a model on several machines can go to an additional device.",
                    "Name one of the ranks, for example #0.",
                )
            names = [params.devices[rank] for rank in self._place.layout.local]
            found = [[model_hash(file), _block_hash(file)], [_kind(name) for name in names]]
        except EngineError as error:
            problem = error
        all_found = machines.agreed(problem, found)
        for name, (digests, _) in zip(machines.names, all_found, strict=True):
            if digests != all_found[0][0]:
                is_file = digests[1] == all_found[0][0][1]
                raise EngineError(
                    "{machine} has a different {file} from {other}.",
                    "Copy the file there.",
                    machine=name,
                    file=Sentence("file" if is_file else "MTP file"),
                    other=machines.names[0],
                )
        return [kind for _, kinds in all_found for kind in kinds]

    # overrides for this machine's ranks only

    def _local_ranks(self, declaration: Declaration) -> Sequence[int]:
        self._ports = used_ports(declaration.split, self._place.layout)
        return self._place.layout.local

    def _torch_devices(
        self, names: Sequence[str], holders: Collection[int]
    ) -> Sequence[torch.device]:
        local = [name if rank in self.local else "cpu" for rank, name in enumerate(names)]
        return torch_devices(local, holders)

    def _kinds(self, devices: Sequence[torch.device]) -> Sequence[str]:
        return self._all_kinds

    def _start_threads(self, params: LoadParams) -> None:
        super()._start_threads(params)
        devices = dict(zip(self.local, self.devices, strict=True))
        self._straight = chosen_ports(
            self._place.machines, params.machine_link, self._ports, devices, self._agreed,
            self.fallbacks,
        )  # fmt: skip

    def _communicator(self, rank: int, device: torch.device, prepare: Prepare) -> Communicator:
        place = self._place
        inner = prepare(self.group.communicator(place.layout.local_rank(rank), device))
        way = partial(self._way, device)
        return MachineCommunicator(inner, way, place.layout, self.group.abroad)

    def _way(
        self, device: torch.device, ports: Ports, is_shape_known: bool, *kind: object
    ) -> FarCommunicator:
        machines = self._place.machines
        group = self._straight.get(ports) if is_shape_known else None
        if group is not None and machines.straight is not None:
            return machines.straight.communicator(group, device)
        return machines.far_for(device, *kind)

    def _runner_type(self) -> type[ModelRunner]:
        return MachineRunner

    def _lacks_memory(self, free: Mapping[str, int]) -> bool:
        return any(self._agreed(super()._lacks_memory(free)))

    def _agreed(self, value: Any = None) -> list[Any]:
        self._is_agreed = True  # a machine that fails has already notified all others
        found = self._place.machines.agreed(None, value)
        self._is_agreed = False
        return found

    def _take_over(
        self, donor: ThreadRuntime, used: UsedSlots, builder: RankBuilder,
        on_progress: ProgressSink, is_cancelled: IsCancelled,
    ) -> None:  # fmt: skip
        """Load in place of the donor once all machines have enough memory; see `KeptCache`."""
        assert isinstance(donor, MachineRuntime), "machines have split it before"
        self._agreed()
        self._keep_fallbacks(donor)
        donor.close_here()
        self._load(builder, on_progress, never)

    def _begin(self) -> None:
        """Agree with the other machines; machine 0 then warms up."""
        runner = self.runner
        facts = [
            *captures_of(self.ranks), *runner.meeting.here, runner.max_verify_rows,
            self.plan.checkpoint_bytes,
        ]  # fmt: skip
        self._is_agreed = True
        found = self._place.machines.agreed(None, facts)
        some, are_all, meet, wait, n_rows, n_bytes = zip(*found, strict=True)
        self.plan = replace(self.plan, checkpoint_bytes=min(n_bytes))
        captures, meetings = Captures(any(some), all(are_all)), KernelMeetings(any(meet), any(wait))
        runner.join(self._place, captures, meetings, min(n_rows))
        if self._place.machines.number == 0:
            with self._explaining(Sentence("to compute the first tokens")):
                runner.warm_up()

    def follow(self, order: str, values: Sequence[object]) -> None:
        """Follow an order from machine 0.

        Raises:
            EngineError: this machine cannot follow it, or another machine is lost.
        """
        self.runner.do(order, *values)

    def close(self) -> None:
        """Free everything on this and the other machines; safe to call twice."""
        runner = getattr(self, "runner", None)
        if runner is not None:
            runner.leave()
            super().close()

    def close_here(self) -> None:
        """Free everything on this machine; other machines do so themselves."""
        self.runner.forget_machines()
        super().close()

    @property
    def number(self) -> int:
        """Id of the model, the same on all machines."""
        return self._place.number


def open_on_machines(
    machines: Machines, file: GGUFFile, params: LoadParams, on_progress: ProgressSink,
    is_cancelled: IsCancelled, donor: ThreadRuntime | None, used: UsedSlots,
) -> MachineRuntime:  # fmt: skip
    """Load a model on all machines; called on machine 0.

    Raises:
        EngineError: see `MachineRuntime`.
    """
    params = shared_params(params)
    if donor is not None:
        assert isinstance(donor, MachineRuntime), "machines have split it before"
        return _resplit(machines, file, params, on_progress, donor, used)
    number = machines.announce(_document(file, params))
    return MachineRuntime(file, params, on_progress, is_cancelled, machines, number)


def _resplit(
    machines: Machines, file: GGUFFile, params: LoadParams, on_progress: ProgressSink,
    donor: MachineRuntime, used: UsedSlots,
) -> MachineRuntime:  # fmt: skip
    try:
        with KeptCache(donor.runner, donor.plan.kv_type, used) as kept:
            document = _document(file, replace(params, n_batch=donor.n_batch))
            number = machines.announce(document, donor.number)
            runtime = MachineRuntime(
                file, params, on_progress, never, machines, number, donor
            )  # fmt: skip
            kept.restore(runtime.runner)
            return runtime
    except OSError as error:
        raise SplitError(
            "The KV cache cannot be saved during the re-split: {problem}.",
            "Free some space on the disk for temporary files.",
            problem=reason_of(error),
        ) from None


def _document(file: GGUFFile, params: LoadParams) -> dict[str, Any]:
    block = "" if file.companion is None else str(file.companion)
    return {"path": params.path, BLOCK: block, **params_document(params)}


def shared_params(params: LoadParams) -> LoadParams:
    """Return settings that are the same on all machines, whatever memory is free on each."""
    return params if params.n_batch else replace(params, n_batch=PROMPT_BATCH)


def _block_hash(file: GGUFFile) -> str:
    if file.companion is None:
        return ""
    with GGUFFile.open(file.companion) as other:
        return model_hash(other)


def _kind(name: str) -> str:
    device = torch_device(name)
    return kind_of(device) if device.type == "cuda" else f"{name} {chosen()}"


log = logging.getLogger(__name__)


def follow(machines: Machines, path: str, cpu_threads: int | None) -> None:
    """Follow machine 0's orders until `END`.

    Args:
        path: path of this machine's copy of the model's file; "" for the path on machine 0.
        cpu_threads: number of threads for this machine's CPU ranks; None means one per core.

    Raises:
        EngineError: this machine failed mid-step, or another machine is lost.
    """
    models: dict[int, MachineRuntime] = {}
    while True:
        order, (*given,) = machines.orders.receive()
        if order == END:
            return
        machines.orders.expect()
        number, *values = given
        if order == LOAD:
            document, donor = values
            _load(machines, models, number, document, path, cpu_threads, models.get(donor))
            if donor in models and not models[donor].ranks:
                del models[donor]
        elif order == UNLOAD:
            models.pop(number).close()
        else:
            models[number].follow(order, values)


def _load(
    machines: Machines, models: dict[int, MachineRuntime], number: int,
    document: Mapping[str, Any], path: str, cpu_threads: int | None, donor: MachineRuntime | None,
) -> None:  # fmt: skip
    """Load a model, as all machines do; add it to `models` unless a machine fails."""
    try:
        settings = {k: v for k, v in document.items() if k not in ("path", BLOCK)}
        given, block = params_from(settings, document["path"]), document[BLOCK]
        # only machine 0 uses templates, draft models and images
        draft = "mtp" if block else "ngram" if given.draft_path else given.draft
        params = replace(
            given, path=path or given.path, cpu_threads=cpu_threads, chat_template="", draft=draft,
            mmproj="off",
        )  # fmt: skip
        with _opened(machines, params.path, block) as file:
            models[number] = MachineRuntime(file, params, ignore, never, machines, number, donor)
    except EngineError as error:
        log.warning("the model was not loaded: %s", error)


@contextmanager
def _opened(machines: Machines, path: str, block: str) -> Iterator[GGUFFile]:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(GGUFFile.open(Path(path)))
            whole = stack.enter_context(with_mtp_file(file, block and _own_copy(block, path)))
        except EngineError as error:
            machines.agreed(error)
            raise
        yield whole


def _own_copy(path: str, model: str) -> str:
    """Find this machine's copy of machine 0's file: next to the model, or under the same path."""
    name = PurePath(path.replace("\\", "/")).name
    for found in (Path(model).parent / name, Path(path)):
        if found.is_file():
            return str(found)
    raise EngineError("There is no file {file} next to the model.", "Copy it there.", file=name)
