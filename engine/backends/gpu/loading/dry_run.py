"""Dry run: a forward pass on meta tensors, which collects the kernels it would launch.

The kernels are thus known before weights are read. The dry run also fails if a layer reads a number
back from the device, as a CUDA graph cannot do that.

`OpCallLog` records the first operation that launches each compiled kernel; only these need a check
on the device (`gpu.checks`). Nested operations count as part of the outermost one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from engine.backends.cpu.weights import JoinedColumns
from engine.backends.gpu.comm.one_shot import OneShotGroups
from engine.backends.gpu.launch.configs import KernelTarget, use_target, watched
from engine.backends.gpu.launch.kernel_launch import (
    ALIGNMENT,
    KernelLaunch,
    intercept_launches,
    variant_key,
)
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.gpu.ops import GpuOps
from engine.backends.reference.weights import DenseWeight, PackedWeight
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.layout import LAYOUTS, Extent, n_tiles
from engine.hardware.devices.topology import Routes
from engine.model.forward.batch import MAX_IN_F32, SMALL_BATCH, Batch
from engine.model.forward.cache import Cache
from engine.model.forward.context import Context
from engine.model.forward.expert_rows import Groups
from engine.model.forward.operands import Weight
from engine.model.forward.state import CacheSize
from engine.model.sharding.placement import Shard, Slices
from engine.planning.footprint import plane_parts, slot_pieces, x_bytes

if TYPE_CHECKING:
    from engine.backends.gpu.launch.configs import KernelKey
    from engine.load_params import LoadParams
    from engine.model.architectures.declare import Declaration
    from engine.model.forward.communicator import FusedAllReduce, Group
    from engine.model.forward.ops import Ops
    from engine.model.layers.module import Slot

LOGGED = (
    "linears", "gated_linears", "rms_norm", "layer_norm", "l2_norm", "add_norm", "activate",
    "gated", "xielu", "softplus", "norm_gated", "opened", "causal_conv", "delta_net",
    "selective_scan", "state_space_scan", "assign", "experts", "sum_of_experts", "rope_angles",
    "ropes", "write_cache", "attention", "new_attention",
)  # fmt: skip
"""Operations in `Ops` that launch kernels."""

OF_WEIGHTS = ("matmul", "lookup", "per_head")
"""Weight methods that layers call directly."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operation that launches kernels for the first time.

    Attributes:
        name: name of the operation, or of a weight's method, with the weight as first argument.
        args, named: arguments, with meta tensors.
        mark: text that distinguishes compiled variants, weight types and cuts.
    """

    name: str
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    mark: str


class OpCallLog:
    """Log of a dry run's operations.

    Attributes:
        calls: the operations to check, in order.
        routings: for each group of rows, by its id, the group and the arguments of the routing that
            created it; storing the group keeps its id from being reused.
        asked: kernels that the dry run asked for, including refused ones.
    """

    context: Context

    def __init__(self) -> None:
        self.calls: list[OpCall] = []
        self.asked: dict[KernelKey, None] = {}
        self.routings: dict[int, tuple[Groups, tuple[Any, ...]]] = {}
        self._known: set[Hashable] = set()
        self._seen: set[Hashable] = set()
        self._begun: list[KernelLaunch] | None = None

    def note(self, launch: KernelLaunch) -> None:
        """Record a launch by the current operation."""
        if self._begun is not None:
            self._begun.append(launch)

    def log_weight(self, weight: object) -> None:
        """Log calls to a weight's methods here from now on."""
        for part in weight.parts if isinstance(weight, JoinedColumns) else [weight]:
            if isinstance(part, GpuPlanes | GpuPlain):
                for name in OF_WEIGHTS:
                    method = getattr(type(part), name)
                    setattr(part, name, partial(self.call, name, method, part))

    def call(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Compute an operation; log it if it launches a kernel for the first time."""
        if self._begun is not None:
            return function(*args, **named)
        self._begun = []
        try:
            found = function(*args, **named)
            begun = self._begun
        finally:
            self._begun = None
        if name == "assign":
            self.routings[id(found[1])] = found[1], args
        if begun and not _is_shared(args):
            self._keep(name, args, named, begun)
        return found

    def _keep(
        self, name: str, args: tuple[Any, ...], named: Mapping[str, Any],
        begun: Sequence[KernelLaunch],
    ) -> None:  # fmt: skip
        weights = tuple(fact for value in (*args, *named.values()) for fact in _facts(value))
        quick = name, weights, tuple(map(_quick_key, begun))
        if quick in self._seen:  # most calls: the same operation in another layer
            return
        self._seen.add(quick)
        key = name, weights, frozenset(map(variant_of, begun))
        if key not in self._known:
            self._known.add(key)
            numbers = sorted(map(repr, key[2]))
            digest = hashlib.sha256(repr(numbers).encode()).hexdigest()[:12]
            words = " ".join(dict.fromkeys(map(str, weights)))
            self.calls.append(OpCall(name, args, named, f"{name} {words} {digest}"))


class _LoggedOps:
    """Operations that are logged; all other attributes are passed through."""

    def __init__(self, ops: Ops, log: OpCallLog) -> None:
        self._ops, self._log = ops, log

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return partial(self._log.call, name, found) if name in LOGGED else found


def _quick_key(launch: KernelLaunch) -> Hashable:
    """Return a cheap key that launches share only if they launch the same variant."""
    numbers = [
        (arg.dtype, arg.storage_offset() % ALIGNMENT) if isinstance(arg, Tensor) else arg
        for arg in launch.args
    ]
    return id(launch.kernel), *numbers, *launch.constants.values(), launch.num_warps


def variant_of(launch: KernelLaunch) -> Hashable:
    """Return a key for the variant that a launch starts; also works for interpreted kernels."""
    if hasattr(launch.kernel, "params"):
        return variant_key(launch)
    constants = tuple(sorted((name, str(value)) for name, value in launch.constants.items()))
    return launch.kernel.__name__, constants, launch.num_warps


def _is_shared(args: Sequence[Any]) -> bool:
    """Return whether other ranks take part in a call; such kernels are proven jointly with them."""
    return any(hasattr(value, "all_reduce") for value in args)


def _facts(value: Any) -> list[str]:
    """Return the types and cuts of an argument's weights; packing and unpacking depend on both."""
    weight = getattr(value, "weight", value)
    parts = weight.parts if isinstance(weight, JoinedColumns) else [weight]
    return [fact for part in parts if (fact := _fact(part))]


def _fact(weight: Any) -> str:
    if isinstance(weight, GpuPlain):
        return str(weight.data.dtype).removeprefix("torch.")
    if not isinstance(weight, GpuPlanes):
        return ""
    extent = weight.extent
    cuts = ("skip" * bool(extent.skip), "lead" * bool(extent.lead), "odd" * (not extent.is_exact))
    return "-".join(filter(None, (TYPES[weight.type_number].name, *cuts)))


META = torch.device("meta")
PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def collect_launches(
    declaration: Declaration, rank: int, params: LoadParams, target: KernelTarget,
    row_counts: Sequence[int], log: OpCallLog | None = None,
) -> list[KernelLaunch]:  # fmt: skip
    """Return the launches in forward passes over `row_counts` rows each, after one cached token.

    Args:
        declaration: a separately declared model, which is unusable afterwards.
        log: log for checking the operations later; it keeps their arguments.
    """
    context, comm = dry_run_context(declaration, rank, params, log)
    launches: list[KernelLaunch] = []
    with (
        torch.inference_mode(),
        use_target(target),
        intercept_launches(lambda launch: _record(launches, launch, log)),
        watched() as asked,
    ):
        for n, n_wanted in _passes(row_counts):
            comm.n_tokens = n
            context.keeps_rows = n_wanted == 0
            context.begin(Batch.of_one(1, n, n - max(1, n_wanted)))
            ids = torch.zeros(n, dtype=torch.int64, device=META)
            declaration.model.forward(ids, context)
        for block in range(declaration.hp.n_mtp):
            comm.n_tokens = 1
            context.begin(Batch.of_one(1, 1, 0))
            declaration.model.guess(torch.zeros(1, dtype=torch.int64, device=META), context, block)
    if log is not None:
        log.asked = asked
    return launches


def _passes(row_counts: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Return the passes to run: row counts, and how many rows reach the last layer.

    The latter is 0 if all do, so that no block is left out. At the end of a prompt, only a few do:
    one row and two rows launch different kernel variants; more rows launch the same ones as two.
    """
    most = max(row_counts)
    endings = [(most, 1), (most, 2)] if most > SMALL_BATCH else []
    return [*((n, 0) for n in row_counts), *endings]


def dry_run_context(
    declaration: Declaration, rank: int, params: LoadParams, log: OpCallLog | None = None
) -> tuple[Context, LoneRank]:
    """Give a rank's modules meta tensors; return the rank's context and communicator."""
    n_bytes = x_bytes(declaration.hp)
    size = CacheSize.asked(params, declaration.hp.n_ctx)
    ops: Ops = GpuOps(META, n_bytes, n_ctx=size.n_ctx)
    for slot in declaration.slots:
        pieces = slot_pieces(slot, rank)
        if pieces:
            value = _held(slot, pieces, n_bytes)
            if log is not None:
                log.log_weight(value)
            setattr(slot.owner, slot.attribute, value)
    cache = Cache(declaration.states, rank, size, META)
    comm = LoneRank(rank, declaration.hp.n_embd, _one_shots(declaration))
    if log is not None:
        ops = cast("Ops", _LoggedOps(ops, log))
    context = Context(comm, ops, cache, META, ["cuda"] * len(declaration.devices))
    if any(rank in block.group for block in declaration.split.blocks[declaration.hp.n_trunk :]):
        context.keep_hidden_states(declaration.hp.n_embd, declaration.hp.n_mtp)
    if log is not None:
        log.context = context
    return context, comm


def _record(launches: list[KernelLaunch], launch: KernelLaunch, log: OpCallLog | None) -> bool:
    launches.append(launch)
    if log is not None:
        log.note(launch)
    return False


def _held(slot: Slot, pieces: Sequence[Slices], n_bytes: int) -> Weight | Tensor:
    dim = slot.placement.dim if isinstance(slot.placement, Shard) else 0
    shape = [part.stop - part.start for part in pieces[0]]
    shape[dim] = sum(piece[dim].stop - piece[dim].start for piece in pieces)
    kind, number = slot.holding("kernels"), slot.tensor.type.number
    if kind == "packed":
        raw = torch.empty(*shape[:-1], slot.tensor.row_bytes, dtype=torch.uint8, device=META)
        return PackedWeight(raw, number, slice(0, shape[-1]))
    if kind == "planes":
        parts = [
            _planes(number, n_matrix, n_rows, columns, len(shape), n_bytes)
            for n_matrix, n_rows, columns in plane_parts(slot, pieces)
        ]
        widths = [piece[-1].stop - piece[-1].start for piece in pieces]
        return parts[0] if len(parts) == 1 else JoinedColumns(parts, widths)
    if kind == "plain":
        return GpuPlain(torch.empty(shape, dtype=PLAIN[slot.tensor.type.name], device=META))
    whole = torch.empty(shape, device=META)
    return DenseWeight(whole) if slot.is_matrix else whole


def _planes(
    number: int, n_matrix: int, n_rows: int, columns: slice, n_dim: int, n_bytes: int
) -> GpuPlanes:
    extent = Extent.of(columns.start, columns.stop)
    shape = n_tiles(n_rows), extent.tile_bytes(LAYOUTS[number])
    matrices = (n_matrix,) if n_dim > 2 else ()
    planes = torch.empty(*matrices, *shape, dtype=torch.uint8, device=META)
    return GpuPlanes(planes, number, n_rows, extent, n_bytes)


def _one_shots(declaration: Declaration) -> OneShotGroups | None:
    """Return the one-shot all-reduces of the model's ranks; None unless all are on GPUs."""
    devices = declaration.devices
    return None if "cpu" in devices else OneShotGroups([META] * len(devices), Routes())


class LoneRank:
    """Communicator for a rank without peers: it adds nothing and makes up received values."""

    waited_s = 0.0

    def __init__(self, rank: int, n_embd: int, one_shots: OneShotGroups | None) -> None:
        self.rank = rank
        self.n_tokens = 1
        self._n_embd = n_embd
        self._one_shots = one_shots

    def all_reduce(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        found = self._by_one_shot(x, group, shape)
        return found if found is not None else self._given(x, shape)

    def _by_one_shot(
        self, x: Tensor | None, group: Group, shape: Sequence[int] | None
    ) -> Tensor | None:
        one_shot = None if shape is None else self.one_shot(group, prod(shape))
        return None if one_shot is None or shape is None else one_shot.all_reduce(x, shape)

    def one_shot(self, group: Group, n: int) -> FusedAllReduce | None:
        one_shot = None if self._one_shots is None else self._one_shots.one_shot(self.rank, group)
        return one_shot if one_shot is not None and one_shot.serves(n) else None

    def gather(self, x: Tensor | None, group: Group, alike: Tensor | None = None) -> Tensor | None:
        return x

    def broadcast(
        self, x: Tensor | None, source: int, group: Group, shape: Sequence[int] | None = None
    ) -> Tensor:
        if shape is not None and prod(shape) <= MAX_IN_F32:
            self._by_one_shot(x if source == self.rank else None, group, shape)
        return self._given(x, shape)

    def _given(self, x: Tensor | None, shape: Sequence[int] | None) -> Tensor:
        if x is not None:
            return x
        return torch.empty(tuple(shape or (self.n_tokens, self._n_embd)), device=META)
