"""The search for better configurations of kernels on a GPU that is here; never while a model runs.

Each kernel begins with what its rule says (`configs.RULES`). Then one number after the other is
doubled, halved, or changed by one, as long as that is faster; a configuration that cannot be
compiled or computes something else is out. Matrices are made up but have the sizes and types of a
model's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import Cancelled, EngineError
from engine.forward.operands import Routing
from engine.gguf import GGUFFile
from engine.gpu.launch import configs
from engine.gpu.launch.configs import RULES, Config, Key, config_of, key_of
from engine.gpu.launch.found_configs import configs_file, read_configs, save_configs
from engine.gpu.launch.graph import capture
from engine.gpu.launch.launcher_choice import prepare
from engine.gpu.launch.target import KernelTarget, target_of
from engine.gpu.matmul import experts, gemv, tile_gemm, unquantised
from engine.gpu.matmul.tuning_report import KernelTuning, TuningProgress
from engine.gpu.matmul.weights import GpuPlanes
from engine.gpu.routing import DeviceGroups, assign
from engine.quants.extent import Extent, n_tiles
from engine.quants.layout import LAYOUTS

if TYPE_CHECKING:
    from engine.progress import IsCancelled

log = logging.getLogger(__name__)

BOUNDS: Mapping[str, tuple[int, int]] = {
    "num_warps": (1, 16), "unroll": (1, 8), "parts": (1, 64), "tokens": (16, 256),
    "rows": (1, 256), "columns": (32, 256), "step": (64, 4096), "programs_per_sm": (1, 8),
    "least_steps": (1, 16), "num_stages": (1, 5),
}  # fmt: skip
"""Numbers that are tried out, and how far."""

BY_ONE = ("num_stages",)
"""Those that are changed by one, and not by two."""

WORTH = 0.98
"""A configuration is better if it takes at most so much of the time."""

TOKEN_COUNTS = (16, 32, 64, 128, 256)
"""Rows of activations for which products of some rows are tried."""

EXPERT_ROWS = (16, 32, 64, 128)
"""Rows of one expert that are multiplied together, for which its products are tried."""

MOST_USED = 8
"""Experts of a token, of those that a model has."""

CODE_BITS = 0x3F
"""Bytes of made-up planes have no others: so no scale among them is infinite or no number."""

DISTINCT_BYTES = 256 << 20
"""Of all copies of a matrix together: more than any cache of a GPU holds."""

MOST_COPIES = 32

N_REPLAYS = 8

TOLERANCE = 1e-3
"""By how much results may differ, as a part of the largest."""


class MatrixKind(NamedTuple):
    """A kind of matrices of a model.

    Attributes:
        type_number: the GGML type; not in `LAYOUTS` for plain numbers.
        dtype: of those.
        n_expert: each of which has one; 0 for a matrix that all tokens use.
    """

    type_number: int
    n_rows: int
    n_columns: int
    dtype: torch.dtype | None = None
    n_expert: int = 0

    @property
    def n_used(self) -> int:
        """Experts of a token."""
        return min(MOST_USED, -(-self.n_expert // 2))


class SearchCase(NamedTuple):
    """What is measured: a product, and the configuration that it asks for.

    Attributes:
        kernel: a key of `RULES`.
        facts: what its rule wants to know.
        matrix: what is multiplied.
        n_token: by so many rows.
    """

    kernel: str
    facts: Mapping[str, Any]
    matrix: MatrixKind
    n_token: int


class ProductTimer(Protocol):
    """Measures products, by default on the device itself."""

    def seconds(self, device: torch.device, compute: Callable[[], object], n: int) -> float:
        """Of one of `n` products that `compute` makes."""
        ...


class GraphTimer:
    """Replays a graph of all products between two events of the device."""

    def seconds(self, device: torch.device, compute: Callable[[], object], n: int) -> float:
        graph = capture(device, compute)
        make_event: Callable[..., Any] = torch.cuda.Event
        begin, end = (make_event(enable_timing=True) for _ in range(2))
        best = math.inf
        with torch.cuda.device(device):
            for _ in range(N_REPLAYS):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                best = min(best, begin.elapsed_time(end))
        return best / 1e3 / n


def tune(
    path: str | Path, devices: Sequence[str], on_progress: TuningProgress, is_cancelled: IsCancelled
) -> list[KernelTuning]:
    """See `engine.measuring.kernel_tuning.tune_kernels`; the devices are GPUs."""
    prepare()
    with GGUFFile.open(path) as file:
        matrices = matrices_of(file)
    found: list[KernelTuning] = []
    with torch.inference_mode():
        for name in devices:
            search = ConfigSearch(torch.device(name), GraphTimer(), is_cancelled)
            found += search.run(matrices, on_progress)
    return found


def matrices_of(file: GGUFFile) -> list[MatrixKind]:
    """The kinds of matrices of a model, each once.

    Raises:
        EngineError: it has none.
    """
    plain_types = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    found: dict[MatrixKind, None] = {}
    for tensor in file.tensors.values():
        dtype, number = plain_types.get(tensor.type.name), tensor.type.number
        if len(tensor.shape) == 2 and (dtype is not None or number in LAYOUTS):
            found[MatrixKind(number, *tensor.shape, dtype)] = None
        elif len(tensor.shape) == 3 and number in LAYOUTS:
            n_expert, n_rows, n_columns = tensor.shape
            found[MatrixKind(number, n_rows, n_columns, None, n_expert)] = None
    if not found:
        raise EngineError("The model has no matrices that kernels for GPUs multiply.")
    return list(found)


class ConfigSearch:
    """Finds configurations on one device.

    Args:
        clock: measures; made-up ones serve tests.
        is_cancelled: asked before each measurement.
    """

    def __init__(
        self, device: torch.device, clock: ProductTimer, is_cancelled: IsCancelled
    ) -> None:
        self._device, self._clock, self._is_cancelled = device, clock, is_cancelled
        self._target = target_of(device)

    def run(
        self, matrices: Sequence[MatrixKind], on_progress: TuningProgress
    ) -> list[KernelTuning]:
        """All searches; `configs` has what was found from then on, and the file, too."""
        known = read_configs(configs_file())
        results: list[KernelTuning] = []
        done: set[Key] = set()
        steps = search_cases(matrices)
        for index, (kernel, matrix, n_token) in enumerate(steps):
            configs.use_found(known)  # what a product asks may depend on what was found before
            facts = facts_of(kernel, self._target, matrix, n_token)
            probe = SearchCase(kernel, facts, matrix, n_token)
            key = key_of(self._target, probe.kernel, probe.facts)
            on_progress(index, len(steps), f"{probe.kernel} {_words(probe.facts)}")
            if key in done:
                continue
            done.add(key)
            known.pop(key, None)
            result = self._searched(probe, key, known)
            results.append(result)
            if result.best_s < result.rule_s:
                known[key] = result.config
                save_configs(configs_file(), {key: result.config})
        configs.use_found(known)
        return results

    def _searched(self, probe: SearchCase, key: Key, known: Mapping[Key, Config]) -> KernelTuning:
        rule = dict(RULES[probe.kernel](self._target, **probe.facts))
        product = ProductCopies(probe, self._device)
        wanted: list[Tensor] = []

        def seconds_of(config: Config) -> float:
            if self._is_cancelled():
                raise Cancelled("Tuning kernels")
            configs.use_found({**known, key: config})
            try:
                (result,) = product.computed(1)
                wanted.append(result)
                if not is_same(result, wanted[0]):
                    return math.inf
                compute = product.compute
                return self._clock.seconds(self._device, compute, product.n_copies)
            except (Cancelled, KeyboardInterrupt):
                raise
            except Exception as error:  # noqa: BLE001 compilers fail in all ways
                log.info("%s cannot be %s: %s", probe.kernel, dict(config), error)
                return math.inf

        best, best_s, rule_s, n_tried = hill_climb(rule, seconds_of)
        return KernelTuning(
            str(self._device), probe.kernel, dict(probe.facts), rule_s, best_s, dict(best), n_tried
        )


def hill_climb(
    start: Config, seconds_of: Callable[[Config], float]
) -> tuple[Config, float, float, int]:
    """Go from one configuration to its best neighbour until none is better.

    Returns:
        The best one, its seconds, those of the first one, and how many were measured.
    """
    tried = {_frozen(start): seconds_of(start)}
    best, best_s = start, tried[_frozen(start)]
    first_s, is_better = best_s, True
    while is_better:
        is_better = False
        for config in list(neighbours(best)):
            key = _frozen(config)
            if key in tried:
                continue
            tried[key] = seconds_of(config)
            if tried[key] < WORTH * best_s:
                best, best_s, is_better = config, tried[key], True
    return best, best_s, first_s, len(tried)


def neighbours(config: Config) -> Iterator[dict[str, int]]:
    """Configurations that differ in one number, by one step."""
    for name, (least, most) in BOUNDS.items():
        if name not in config:
            continue
        value = config[name]
        for other in (value + 1, value - 1) if name in BY_ONE else (2 * value, value // 2):
            if least <= other <= most:
                yield {**config, name: other}


def _frozen(config: Config) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(config.items()))


def search_cases(matrices: Iterable[MatrixKind]) -> list[tuple[str, MatrixKind, int]]:
    """What to measure for a model, large matrices first where several ask the same.

    Returns:
        Kernels, matrices and rows of activations; parts are chosen after all else of few rows.
    """
    ordered = sorted(matrices, key=lambda matrix: -matrix.n_rows * matrix.n_columns)
    planes = [matrix for matrix in ordered if matrix.dtype is None and not matrix.n_expert]
    experts = [matrix for matrix in ordered if matrix.n_expert]
    found = [(kernel, matrix, 1) for kernel in ("few", "few_parts") for matrix in planes]
    found += [("many", matrix, n) for matrix in planes for n in TOKEN_COUNTS]
    found += [("expert_rows", matrix, 1) for matrix in experts]
    found += [
        ("expert_blocks", matrix, n_rows * matrix.n_expert // matrix.n_used)
        for matrix in experts
        for n_rows in EXPERT_ROWS
    ]
    return found + [("plain", matrix, 1) for matrix in ordered if matrix.dtype is not None]


def facts_of(kernel: str, target: KernelTarget, matrix: MatrixKind, n_token: int) -> dict[str, int]:
    """What the rule of a kernel wants to know of a product."""
    n_rows, n_columns = matrix.n_rows, matrix.n_columns
    if matrix.dtype is not None:
        return {"n_token": n_token, "n_rows": n_rows, "n_columns": n_columns}
    if kernel == "many":
        return {"n_token": n_token, "low": LAYOUTS[matrix.type_number].low}
    if kernel == "expert_blocks":
        return {"rows": n_token * matrix.n_used // matrix.n_expert}
    n_blocks = Extent.of(0, n_columns).n_blocks
    if kernel in ("few", "expert_rows"):
        return {"n_blocks": n_blocks}
    n_warps = config_of(target, "few", n_blocks=n_blocks)["num_warps"]
    return {"n_blocks": n_blocks, "n_rows": n_rows, "num_warps": n_warps}


class ProductCopies:
    """Products with copies of a made-up matrix, as many as no cache holds.

    Attributes:
        n_copies: of the matrix; where it has experts, of tokens that use other ones.
    """

    def __init__(self, probe: SearchCase, device: torch.device) -> None:
        matrix, n_token = probe.matrix, probe.n_token
        first = _made_up(matrix, device)
        n_bytes = first.planes.nbytes if isinstance(first, GpuPlanes) else first.nbytes
        if matrix.n_expert:
            n_bytes = n_bytes * min(n_token * matrix.n_used, matrix.n_expert) // matrix.n_expert
        self.n_copies = max(1, min(MOST_COPIES, DISTINCT_BYTES // n_bytes))
        x = torch.randn(n_token, matrix.n_columns, device=device)
        self._products: list[Callable[[], Tensor | None]] = []
        for index in range(self.n_copies):
            if matrix.n_expert:
                groups = _groups(matrix, n_token, device)
                self._products.append(partial(experts.grouped, first, groups.rows(x), groups))
            else:
                weight = _made_up(matrix, device) if index else first
                self._products.append(partial(_multiplied, probe.kernel, x, weight))

    def compute(self) -> list[Tensor]:
        """One product with each copy."""
        return self.computed(self.n_copies)

    def computed(self, n: int) -> list[Tensor]:
        """Products with the first n copies.

        Raises:
            ValueError: no kernel serves.
        """
        results = [product() for product in self._products[:n]]
        found = [result for result in results if result is not None]
        if len(found) < n:
            raise ValueError("no kernel serves")
        return found


def _multiplied(kernel: str, x: Tensor, weight: GpuPlanes | Tensor) -> Tensor | None:
    if isinstance(weight, Tensor):
        return unquantised.product(x, weight)
    return tile_gemm.product(x, weight) if kernel == "many" else gemv.product(x, weight)


def _groups(matrix: MatrixKind, n_token: int, device: torch.device) -> DeviceGroups:
    """Experts of tokens, by chance."""
    logits = torch.randn(n_token, matrix.n_expert, device=device)
    found = assign(Routing(matrix.n_expert, matrix.n_used), logits, None)
    if found is None:
        raise ValueError(f"no kernel chooses among {matrix.n_expert} experts")
    return found[1]


def _made_up(matrix: MatrixKind, device: torch.device) -> GpuPlanes | Tensor:
    if matrix.dtype is not None:
        numbers = torch.randn(matrix.n_rows, matrix.n_columns, device=device)
        return numbers.to(matrix.dtype)
    extent = Extent.of(0, matrix.n_columns)
    shape = [n_tiles(matrix.n_rows), extent.tile_bytes(LAYOUTS[matrix.type_number])]
    if matrix.n_expert:
        shape.insert(0, matrix.n_expert)
    planes = torch.randint(CODE_BITS + 1, shape, dtype=torch.uint8, device=device)
    return GpuPlanes(planes, matrix.type_number, matrix.n_rows, extent, x_bytes=1)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by no more than an order of sums does; only here it is read."""
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _words(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
