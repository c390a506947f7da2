"""Search for faster kernel configurations on one of this machine's GPUs; never while a model runs.

Each search starts from the rule's configuration (`configs.RULES`). Then one number after another is
doubled, halved, or changed by one, as long as this gains speed. A configuration that cannot be
compiled, or that gives different results, is rejected. Matrices are random, with a model's sizes
and types.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from engine.backends.gpu import moe
from engine.backends.gpu.launch import configs
from engine.backends.gpu.launch.configs import (
    RULES,
    Config,
    KernelTarget,
    Key,
    config_of,
    configs_file,
    key_of,
    read_configs,
    save_configs,
    target_of,
)
from engine.backends.gpu.launch.graph import capture
from engine.backends.gpu.launch.own_launcher import prepare
from engine.backends.gpu.matmul import gemv, tile_gemm
from engine.backends.gpu.matmul.weights import GpuPlanes
from engine.backends.gpu.moe import DeviceGroups, assign
from engine.errors import Cancelled, EngineError, Sentence
from engine.formats.gguf.reader import GGUFFile
from engine.formats.quants.layout import LAYOUTS, Extent, n_tiles
from engine.hardware.faults import fault_of
from engine.model.forward.operands import Routing

if TYPE_CHECKING:
    from engine.util.progress import IsCancelled

TuningProgress = Callable[[int, int, str], None]
"""Callback: number of searches done, total number, description of the next search."""


@dataclass(frozen=True, slots=True)
class KernelTuning:
    """Result of searching for one kernel's configuration.

    Attributes:
        device: name of the GPU, for example "cuda:0".
        kernel: name of the kernel's rule, a key in `engine.backends.gpu.launch.configs.RULES`.
        facts: the sizes, by name, of the product that the configuration is for.
        rule_s: seconds per product with the rule's configuration.
        best_s: seconds per product with the best configuration.
        n_tried: number of configurations measured.
    """

    device: str
    kernel: str
    facts: dict[str, Any]
    rule_s: float
    best_s: float
    config: dict[str, int]
    n_tried: int


log = logging.getLogger(__name__)

BOUNDS: Mapping[str, tuple[int, int]] = {
    "num_warps": (1, 16), "unroll": (1, 8), "parts": (1, 64), "tokens": (16, 256),
    "rows": (1, 256), "columns": (32, 256), "step": (64, 4096), "programs_per_sm": (1, 8),
    "least_steps": (1, 16), "num_stages": (1, 5),
}  # fmt: skip
"""Range of each number in a configuration."""

BY_ONE = ("num_stages",)  # numbers that change by one instead of by a factor of two
WORTH = 0.98  # a configuration replaces the best if it takes at most this fraction of its time
TOKEN_COUNTS = (16, 32, 64, 128, 256)  # row counts of x in tile GEMMs to search
EXPERT_ROWS = (16, 32, 64, 128)  # rows per expert in grouped GEMMs to search
MAX_USED = 8  # assumed largest number of experts per token
CODE_BITS = 0x3F  # bits that may be set in bytes of random planes, so that scales are finite
DISTINCT_BYTES = 256 << 20  # total size of a matrix's copies: more than any GPU's cache holds
MAX_COPIES = 32  # max. copies of a matrix
N_REPLAYS = 8  # timed replays; the fastest counts
TOLERANCE = 1e-3  # allowed difference between results, relative to the largest


class MatrixKind(NamedTuple):
    """Type and size of a model's matrices.

    Attributes:
        type_number: GGML type; not in `LAYOUTS` for unquantised matrices.
        dtype: an unquantised matrix's element type; None for quantised matrices.
        n_expert: number of experts with such a matrix each; 0 for a matrix that all tokens use.
    """

    type_number: int
    n_rows: int
    n_columns: int
    dtype: torch.dtype | None = None
    n_expert: int = 0

    @property
    def n_used(self) -> int:
        return min(MAX_USED, -(-self.n_expert // 2))


class SearchCase(NamedTuple):
    """A product that needs a configuration; `facts` are arguments for the rule of `kernel`."""

    kernel: str
    facts: Mapping[str, Any]
    matrix: MatrixKind
    n_token: int


Timer = Callable[[torch.device, Callable[[], object], int], float]
"""Function that measures like `graph_seconds`; tests replace it."""


def graph_seconds(device: torch.device, compute: Callable[[], object], n: int) -> float:
    """Return the seconds per product, for a CUDA graph with the `n` products in `compute`."""
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
    """Tune kernels; see `measuring.kernel_tuning.tune_kernels`; the devices are GPUs."""
    prepare()
    with GGUFFile.open(path) as file:
        matrices = matrices_of(file)
    found: list[KernelTuning] = []
    with torch.inference_mode():
        for name in devices:
            search = ConfigSearch(torch.device(name), graph_seconds, is_cancelled)
            found += search.run(matrices, on_progress)
    return found


def matrices_of(file: GGUFFile) -> list[MatrixKind]:
    """Return the distinct kinds of matrices in a model.

    Raises:
        EngineError: the model has no matrices that the kernels multiply.
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
        raise EngineError("The model has no matrices that GPU kernels can multiply.")
    return list(found)


class ConfigSearch:
    """Search for configurations on one device; `is_cancelled` is called before measurements."""

    def __init__(self, device: torch.device, timer: Timer, is_cancelled: IsCancelled) -> None:
        self._device, self._timer, self._is_cancelled = device, timer, is_cancelled
        self._target = target_of(device)

    def run(
        self, matrices: Sequence[MatrixKind], on_progress: TuningProgress
    ) -> list[KernelTuning]:
        """Run all searches; save the results in `configs` and in the file."""
        known = read_configs(configs_file())
        results: list[KernelTuning] = []
        done: set[Key] = set()
        steps = search_cases(matrices)
        for index, (kernel, matrix, n_token) in enumerate(steps):
            configs.use_found(known)  # a product's facts may depend on earlier findings
            facts = facts_of(kernel, self._target, matrix, n_token)
            case = SearchCase(kernel, facts, matrix, n_token)
            key = key_of(self._target, case.kernel, case.facts)
            on_progress(index, len(steps), f"{case.kernel} {_text(case.facts)}")
            if key in done:
                continue
            done.add(key)
            known.pop(key, None)
            result = self._search(case, key, known)
            results.append(result)
            if result.best_s < result.rule_s:
                known[key] = result.config
                save_configs(configs_file(), {key: result.config})
        configs.use_found(known)
        return results

    def _search(self, case: SearchCase, key: Key, known: Mapping[Key, Config]) -> KernelTuning:
        rule = dict(RULES[case.kernel](self._target, **case.facts))
        product = ProductCopies(case, self._device)
        wanted: list[Tensor] = []

        def seconds_of(config: Config) -> float:
            if self._is_cancelled():
                raise Cancelled(Sentence("Tuning kernels"))
            configs.use_found({**known, key: config})
            try:
                (result,) = product.compute_first(1)
                wanted.append(result)
                if not is_same(result, wanted[0]):
                    return math.inf
                compute = product.compute
                return self._timer(self._device, compute, product.n_copies)
            except (Cancelled, KeyboardInterrupt):
                raise
            except Exception as error:  # compilers fail in many ways
                if fault_of(error):
                    raise
                log.info("%s cannot be %s: %s", case.kernel, dict(config), error)
                return math.inf

        best, best_s, rule_s, n_tried = hill_climb(rule, seconds_of)
        return KernelTuning(
            str(self._device), case.kernel, dict(case.facts), rule_s, best_s, dict(best), n_tried
        )


def hill_climb(
    start: Config, seconds_of: Callable[[Config], float]
) -> tuple[Config, float, float, int]:
    """Move from a configuration to a faster neighbour until no neighbour is faster.

    Returns:
        The best configuration, its time and `start`'s time in seconds, and the number of
        configurations measured.
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
    """Yield the configurations that differ in one number, by one step."""
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
    """Return the kernels, matrices and row counts of x to search for a model.

    If several matrices have the same key, large ones come first; gemv's parts ("few_parts") come
    after its other numbers, on which they depend.
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
    """Return the keyword arguments to a kernel's rule for a product."""
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
    """Products with copies of a random matrix, too many for any cache.

    Attributes:
        n_copies: number of copies; for a matrix with experts, the number of groups of tokens that
            use different experts.
    """

    def __init__(self, case: SearchCase, device: torch.device) -> None:
        matrix, n_token = case.matrix, case.n_token
        first = _random_weight(matrix, device)
        n_bytes = first.planes.nbytes if isinstance(first, GpuPlanes) else first.nbytes
        if matrix.n_expert:
            n_bytes = n_bytes * min(n_token * matrix.n_used, matrix.n_expert) // matrix.n_expert
        self.n_copies = max(1, min(MAX_COPIES, DISTINCT_BYTES // n_bytes))
        x = torch.randn(n_token, matrix.n_columns, device=device)
        self._products: list[Callable[[], Tensor | None]] = []
        for index in range(self.n_copies):
            if matrix.n_expert:
                groups = _groups(matrix, n_token, device)
                self._products.append(partial(moe.grouped, first, groups.rows(x), groups))
            else:
                weight = _random_weight(matrix, device) if index else first
                self._products.append(partial(_multiply, case.kernel, x, weight))

    def compute(self) -> list[Tensor]:
        return self.compute_first(self.n_copies)

    def compute_first(self, n: int) -> list[Tensor]:
        """Compute products with the first n copies; raise ValueError if no kernel supports them."""
        results = [product() for product in self._products[:n]]
        found = [result for result in results if result is not None]
        if len(found) < n:
            raise ValueError("no kernel serves")
        return found


def _multiply(kernel: str, x: Tensor, weight: GpuPlanes | Tensor) -> Tensor | None:
    if isinstance(weight, Tensor):
        return gemv.plain_product(x, weight)
    return tile_gemm.product(x, weight) if kernel == "many" else gemv.product(x, weight)


def _groups(matrix: MatrixKind, n_token: int, device: torch.device) -> DeviceGroups:
    logits = torch.randn(n_token, matrix.n_expert, device=device)
    found = assign(Routing(matrix.n_expert, matrix.n_used), logits, None)
    if found is None:
        raise ValueError(f"no kernel chooses among {matrix.n_expert} experts")
    return found[1]


def _random_weight(matrix: MatrixKind, device: torch.device) -> GpuPlanes | Tensor:
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
    """Return whether two results differ only by the order of sums; waits for the device."""
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _text(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
