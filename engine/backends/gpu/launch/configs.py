"""Launch configurations for kernels, and which kernels may be used on a kind of GPU.

Configurations follow fixed rules unless a search has found better ones. Nothing is tried out while
a model runs. Rules depend only on sizes that are known when a model is loaded, so a given product
is always computed by the same kernel.

A kernel that gives wrong results on a kind of GPU (`gpu.checks`) is refused there. A function that
decides whether its kernel can be used calls `allows` or is `refusable`; its callers have a
fallback. The choice is the same for all cards of a kind, so that their results stay bit-equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from engine.formats.quants.layout import TILE
from engine.util.files import cache_folder, read_json, write_json
from engine.util.sanitize import package_version

Maker = Literal["nvidia", "amd", "interpreter"]
GemvOperands = Literal["int8", "f32"]


@dataclass(frozen=True, slots=True)
class KernelTarget:
    """Properties of a device for which kernels are compiled.

    Attributes:
        maker: "interpreter" for Triton's interpreter on the CPU.
        capability: ten times NVIDIA's compute capability, for example 90; 0 for other makers.
        n_sm: number of multiprocessors.
    """

    maker: Maker
    capability: int
    n_sm: int

    @property
    def is_interpreted(self) -> bool:
        """Whether kernels run in numpy, which has no BF16."""
        return self.maker == "interpreter"

    @property
    def has_asm(self) -> bool:
        """Whether kernels may use inline PTX."""
        return self.maker == "nvidia"

    @property
    def gemv_operands(self) -> GemvOperands:
        """Type of the activations in gemv: "int8" (multiplied by `dp4a`) or "f32"."""
        return "int8" if self.maker == "interpreter" or self.capability >= 61 else "f32"

    @property
    def dot_precision(self) -> str:
        """`input_precision` with which `tl.dot` on F32 operands is as exact as F32."""
        return "tf32x3" if self.capability >= 80 else "ieee"


INTERPRETER = KernelTarget("interpreter", 0, 4)


_aim = threading.local()
_cards: dict[torch.device, KernelTarget] = {}


def target_of(device: torch.device) -> KernelTarget:
    """Return the target for tensors on `device`; for "meta", the one set by `use_target`."""
    found = _cards.get(device)
    if found is None and device.type == "cuda":
        found = _cards[device] = _card(device)
    elif found is None and device.type == "meta":
        found = getattr(_aim, "target", None)
    return found or INTERPRETER


@contextmanager
def use_target(target: KernelTarget) -> Iterator[None]:
    """Use this target for the device "meta" on this thread."""
    before = getattr(_aim, "target", None)
    _aim.target = target
    try:
        yield
    finally:
        _aim.target = before


def _card(device: torch.device) -> KernelTarget:
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return KernelTarget("amd", 0, facts.multi_processor_count)
    return KernelTarget("nvidia", 10 * facts.major + facts.minor, facts.multi_processor_count)


Config = Mapping[str, int]
Rule = Callable[..., Config]
Key = tuple[str, int, int, str, tuple[tuple[str, Any], ...]]

WARP = 32  # threads per warp
MAX_WARPS = 4  # max. warps per gemv program; few, so that some programs load while others finish
PROGRAMS_PER_SM = 2  # gemv programs per multiprocessor below which columns are split
PLAIN_PER_THREAD = 8  # columns that a thread loads together: 16 bytes of F16 or BF16
PLAIN_PROGRAMS_PER_SM = 4  # unquantised gemv programs before each takes more rows


def gemv_config(target: KernelTarget, *, n_blocks: int) -> Config:
    """Return a gemv program's warp count, and how many blocks each thread prefetches.

    Each warp has at least a second block, so that there is one to prefetch. Also used for experts:
    they are small and many programs start together, so a program loads all it needs right away.
    """
    n_warps = 1
    while n_warps < MAX_WARPS and 2 * n_warps * WARP // 4 < n_blocks:
        n_warps *= 2
    return {"num_warps": n_warps, "unroll": 1}


def gemv_parts_config(
    target: KernelTarget, *, n_blocks: int, n_rows: int, num_warps: int
) -> Config:
    """Return the number of programs that share a tile of a small matrix (split K).

    Each program has at least one step.
    """
    wanted = PROGRAMS_PER_SM * target.n_sm * TILE // max(TILE, n_rows)
    n_step = -(-n_blocks // (num_warps * WARP // 4))
    steps_each = -(-n_step // max(1, min(wanted, n_step)))
    return {"parts": -(-n_step // steps_each)}


def tile_gemm_config(target: KernelTarget, *, n_token: int, low: int) -> Config:
    """Return the tile sizes for a tile GEMM; see `engine.backends.gpu.kernels.tile_gemm.product`.

    A tile has as many rows of x as registers and shared memory allow, so that weights are decoded
    once. Only a few sizes are used, since each is compiled for each type. Hopper's tensor cores
    read x from shared memory, and there is more of it. If a program has little else to do, more
    stages hide more of the memory latency.
    """
    is_hopper = target.maker == "nvidia" and 90 <= target.capability < 100
    has_cores = target.maker != "nvidia" or target.capability >= 80
    tokens = 16
    if n_token > 16 and has_cores:
        tokens = 256 if is_hopper and n_token > 64 and low > 2 else 64
    is_large = tokens == 256
    stages = 4 if tokens == 16 else 3 if is_hopper and not is_large else 2
    return {
        "rows": 128 if is_large else 64,
        "tokens": tokens,
        "blocks": {2: 8, 4: 4, 8: 4}[low],
        "num_warps": 8 if is_large else 4,
        "num_stages": stages if target.maker == "nvidia" else 2,
        "programs_per_sm": 4 if tokens == 16 else 2,
        "least_steps": 4,
    }


def unquantised_config(
    target: KernelTarget, *, n_token: int, n_rows: int, n_columns: int
) -> Config:
    """Return the warps, rows and columns per step for gemv programs with unquantised weights."""
    n_warps = 4
    while n_warps > 1 and n_warps * WARP * PLAIN_PER_THREAD >= 2 * n_columns:
        n_warps //= 2
    rows = max(1, min(4, 8 // n_token))  # bounded by the registers that hold sums
    while rows > 1 and n_rows < PLAIN_PROGRAMS_PER_SM * target.n_sm * rows:
        rows //= 2
    return {"rows": rows, "step": n_warps * WARP * PLAIN_PER_THREAD, "num_warps": n_warps}


def expert_gemm_config(target: KernelTarget, *, rows: int) -> Config:
    """Return the tile sizes for a GEMM of `rows` rows with their expert's matrix."""
    if target.maker == "nvidia" and target.capability < 80:  # Triton cannot use their tensor cores
        return {"columns": 64, "blocks": 1, "num_warps": 2, "num_stages": 2}
    if rows >= 128:
        return {"columns": 128, "blocks": 2, "num_warps": 8, "num_stages": 2}
    return {"columns": 64, "blocks": 2, "num_warps": 4, "num_stages": 2}


RULES: dict[str, Rule] = {
    "few": gemv_config,
    "few_parts": gemv_parts_config,
    "many": tile_gemm_config,
    "plain": unquantised_config,
    "expert_rows": gemv_config,
    "expert_blocks": expert_gemm_config,
}
"""Rules, by their kernel's name in configuration files."""

_found: dict[Key, Config] = {}


def config_of(target: KernelTarget, kernel: str, **facts: Any) -> Config:
    """Return a kernel's configuration: a search result if there is one, else its rule's result."""
    found = _found.get(key_of(target, kernel, facts))
    return RULES[kernel](target, **facts) if found is None else found


def key_of(target: KernelTarget, kernel: str, facts: Mapping[str, Any]) -> Key:
    """Return a saved configuration's key, with `n_token` rounded up to a power of two."""
    if "n_token" in facts:
        facts = {**facts, "n_token": 1 << (facts["n_token"] - 1).bit_length()}
    return (target.maker, target.capability, target.n_sm, kernel, tuple(sorted(facts.items())))


def use_found(found: Mapping[Key, Config]) -> None:
    """Replace the search results of all devices."""
    _found.clear()
    _found.update(found)


FILE_NAME = "kernels.json"
LARGEST = 1 << 20  # largest number allowed in a configuration


def configs_file() -> Path | None:
    """Return the path in the user's cache folder; None if the system has no such folder."""
    folder = cache_folder()
    return folder / FILE_NAME if folder else None


def read_configs(path: Path | None) -> dict[Key, Config]:
    """Return all valid entries written by this version of Tandem."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("version") != package_version():
        return {}
    entries = document.get("configs")
    found: dict[Key, Config] = {}
    for entry in entries if isinstance(entries, list) else []:
        made = _made(entry)
        if made is not None:
            found[made[0]] = made[1]
    return found


def save_configs(path: Path | None, found: Mapping[Key, Config]) -> None:
    """Add configurations to the file, replacing entries with the same keys."""
    everything = {**read_configs(path), **found}
    configs = [
        {
            "maker": maker, "capability": capability, "n_sm": n_sm, "kernel": kernel,
            "facts": dict(facts), "config": dict(config),
        }
        for (maker, capability, n_sm, kernel, facts), config in everything.items()
    ]  # fmt: skip
    write_json(path, {"version": package_version(), "configs": configs})


def _made(entry: Any) -> tuple[Key, Config] | None:
    """Return an entry's key and configuration; None if a field is missing or has the wrong type."""
    if not isinstance(entry, dict):
        return None
    maker, kernel, facts = entry.get("maker"), entry.get("kernel"), entry.get("facts")
    capability, n_sm, config = entry.get("capability"), entry.get("n_sm"), entry.get("config")
    if maker not in ("nvidia", "amd") or kernel not in RULES:
        return None
    if not isinstance(capability, int) or not isinstance(n_sm, int):
        return None
    if not isinstance(facts, dict) or not isinstance(config, dict):
        return None
    if not all(type(n) is int and 0 <= n <= LARGEST for n in (*facts.values(), *config.values())):
        return None
    return (maker, capability, n_sm, str(kernel), tuple(sorted(facts.items()))), config


KernelKey = tuple[str | int, ...]
"""A kernel's name, and properties of its variants: weight type, number of rows."""

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.Lock()
_thread = threading.local()
_refused: dict[KernelTarget, frozenset[KernelKey]] = {}
_n_watching = 0
_is_asked = False  # whether any kernel is refused or watched; if not, nothing else is checked


def allows(device: torch.device, *key: str | int) -> bool:
    """Return whether a kernel may compute on a device."""
    if not _is_asked:
        return True
    asked: dict[KernelKey, None] | None = getattr(_thread, "asked", None)
    if asked is not None:
        asked[key] = None
    if key in getattr(_thread, "on_trial", ()):
        return False
    return key not in _refused.get(target_of(device), ())


def refusable(function: Callable[P, T | None]) -> Callable[P, T | None]:
    """Make a function return None if its kernel, which has the same name, is refused."""

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if _is_asked and not allows(_device_of(args), function.__name__):
            return None
        return function(*args, **kwargs)

    return guarded


def refuse(device: torch.device, keys: Collection[KernelKey]) -> None:
    """Refuse kernels on all devices of this kind for the rest of the process."""
    if keys:
        target = target_of(device)
        with _lock:
            _refused[target] = _refused.get(target, frozenset()).union(keys)
            _note()


def refused(device: torch.device) -> frozenset[KernelKey]:
    """Return the kernels that are refused on a device."""
    return _refused.get(target_of(device), frozenset())


def allow_all() -> None:
    """Lift all refusals."""
    with _lock:
        _refused.clear()
        _note()


@contextmanager
def watched(on_trial: Collection[KernelKey] = ()) -> Iterator[dict[KernelKey, None]]:
    """Collect the kernels that this thread asks for, while those on trial are refused."""
    global _n_watching
    asked: dict[KernelKey, None] = {}
    with _lock:
        _n_watching += 1
        _note()
    _thread.asked, _thread.on_trial = asked, frozenset(on_trial)
    try:
        yield asked
    finally:
        _thread.asked, _thread.on_trial = None, ()
        with _lock:
            _n_watching -= 1
            _note()


def _note() -> None:
    global _is_asked
    _is_asked = bool(_refused) or _n_watching > 0


def _device_of(args: Collection[object]) -> torch.device:
    for value in args:
        if isinstance(value, Tensor):
            return value.device
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            return value[0].device
    return torch.device("cpu")
