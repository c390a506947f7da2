"""Log of the operations of a dry run: the first one that starts each compiled kernel.

Only these need a check on the device. Operations that others are composed of belong to the
outermost one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from engine.backends.cpu.weights import JoinedColumns
from engine.backends.gpu.launch.kernel_launch import ALIGNMENT, KernelLaunch, variant_key
from engine.backends.gpu.matmul.weights import GpuPlain, GpuPlanes
from engine.backends.reference.weights import DenseWeight, PackedWeight
from engine.formats.gguf.tensors import TYPES
from engine.model.forward.expert_rows import Groups

if TYPE_CHECKING:
    from engine.backends.gpu.launch.configs import KernelKey
    from engine.model.forward.context import Context
    from engine.model.forward.ops import Ops

LOGGED = (
    "linears", "gated_linears", "rms_norm", "layer_norm", "l2_norm", "add_norm", "activate",
    "gated", "xielu", "softplus", "norm_gated", "opened", "causal_conv", "delta_net",
    "selective_scan", "state_space_scan", "assign", "experts", "sum_of_experts", "rope_angles",
    "ropes", "write_cache", "attention", "new_attention",
)  # fmt: skip
"""Operations of `Ops` that start kernels."""

OF_WEIGHTS = ("matmul", "lookup", "per_head")
"""Methods of weights that layers call by themselves."""

WEIGHT_TYPES = GpuPlanes | GpuPlain | DenseWeight | PackedWeight | JoinedColumns


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operation that starts kernels which none before it has started.

    Attributes:
        name: name of the operation, or of a weight's method, whose first argument is the weight.
        args: arguments, with tensors that have no memory.
        named: arguments by name.
        mark: text that tells the compiled variants, types and cuts of weights from others.
    """

    name: str
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    mark: str


class OpCallLog:
    """Log of the operations of a dry run.

    Attributes:
        calls: the operations to check, in order.
        routings: arguments of the routing that made each group of rows, by its id; with the group,
            so that no other one gets its id.
        asked: kernels that the dry run asked for, refused ones included.
        context: context of the dry run.
    """

    context: Context

    def __init__(self) -> None:
        self.calls: list[OpCall] = []
        self.asked: dict[KernelKey, None] = {}
        self.routings: dict[int, tuple[Groups, tuple[Any, ...]]] = {}
        self._known: set[Hashable] = set()
        self._alike: set[Hashable] = set()
        self._begun: list[KernelLaunch] | None = None

    def note(self, launch: KernelLaunch) -> None:
        """Note a launch of the operation that is computed."""
        if self._begun is not None:
            self._begun.append(launch)

    def logged_ops(self, ops: Ops) -> Ops:
        """Return operations that are logged here."""
        return cast("Ops", _LoggedOps(ops, self))

    def log_weight(self, weight: object) -> None:
        """Log a weight's methods here from now on."""
        for part in weight.parts if isinstance(weight, JoinedColumns) else [weight]:
            if isinstance(part, GpuPlanes | GpuPlain):
                for name in OF_WEIGHTS:
                    method = getattr(type(part), name)
                    setattr(part, name, partial(self.call, name, method, part))

    def call(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Compute an operation; note it if it starts a kernel for the first time."""
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
        alike = name, weights, tuple(map(_quick_key, begun))
        if alike in self._alike:  # most calls: those of other layers
            return
        self._alike.add(alike)
        key = name, weights, frozenset(map(variant_of, begun))
        if key not in self._known:
            self._known.add(key)
            numbers = sorted(map(repr, key[2]))
            digest = hashlib.sha256(repr(numbers).encode()).hexdigest()[:12]
            words = " ".join(dict.fromkeys(map(str, weights)))
            self.calls.append(OpCall(name, args, named, f"{name} {words} {digest}"))


class _LoggedOps:
    """Operations that are noted in a log; everything else is passed on."""

    def __init__(self, ops: Ops, log: OpCallLog) -> None:
        self._ops, self._log = ops, log

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return partial(self._log.call, name, found) if name in LOGGED else found


def _quick_key(launch: KernelLaunch) -> Hashable:
    """Return a key that launches share only if they start the same variant, quickly made."""
    numbers = [
        (arg.dtype, arg.storage_offset() % ALIGNMENT) if isinstance(arg, Tensor) else arg
        for arg in launch.args
    ]
    return id(launch.kernel), *numbers, *launch.constants.values(), launch.num_warps


def variant_of(launch: KernelLaunch) -> Hashable:
    """Return a key of the variant that a launch starts; interpreted kernels are told apart too."""
    if hasattr(launch.kernel, "params"):
        return variant_key(launch)
    constants = tuple(sorted((name, str(value)) for name, value in launch.constants.items()))
    return launch.kernel.__name__, constants, launch.num_warps


def _is_shared(args: Sequence[Any]) -> bool:
    """Return whether other ranks take part in a call, with kernels that are proven with them."""
    return any(hasattr(value, "all_reduce") for value in args)


def _facts(value: Any) -> list[str]:
    """Return type and cut of the weights of an argument: code that packs and unpacks differs."""
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
