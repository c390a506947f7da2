"""How kernels are cut up on a device: fixed rules, and what a search on the machine found better.

Nothing is tried out while a model runs. A rule depends only on facts that are known when a model is
loaded, so that the same product is always made by the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.gpu.launch.target import KernelTarget
from engine.quants.layout import TILE

Config = Mapping[str, int]
Rule = Callable[..., Config]
Key = tuple[str, int, int, str, tuple[tuple[str, Any], ...]]

WARP = 32
"""Threads of a warp."""

MOST_WARPS = 4
"""Of a program that multiplies few rows: small ones, so that some read while others end."""

PROGRAMS_PER_SM = 2
"""Programs of few rows that a multiprocessor should have before columns are cut into parts."""


def gemv_config(target: KernelTarget, *, n_blocks: int) -> Config:
    """Warps of a program that multiplies few rows with a tile, and blocks asked for ahead.

    Warps that have a second block at least, which can be asked for ahead.
    """
    n_warps = 1
    while n_warps < MOST_WARPS and 2 * n_warps * WARP // 4 < n_blocks:
        n_warps *= 2
    return {"num_warps": n_warps, "unroll": 1}


def gemv_parts_config(
    target: KernelTarget, *, n_blocks: int, n_rows: int, num_warps: int
) -> Config:
    """Programs that share a tile of a small matrix; each has at least one step of its own."""
    wanted = PROGRAMS_PER_SM * target.n_sm * TILE // max(TILE, n_rows)
    n_step = -(-n_blocks // (num_warps * WARP // 4))
    steps_each = -(-n_step // max(1, min(wanted, n_step)))
    return {"parts": -(-n_step // steps_each)}


def tile_gemm_config(target: KernelTarget, *, n_token: int, low: int) -> Config:
    """How a product of up to some hundred rows is cut; see `engine.gpu.kernels.tile_gemm.product`.

    As many rows of x at once as registers and shared memory leave room for, so that weights are
    taken apart once, but few sizes, since each is compiled for each type. Hopper's tensor cores
    read x from shared memory by themselves and have more of it. More stages hide more of the
    memory's latency, where a program has little else to do.
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
    """Warps, rows and columns at once of a program that multiplies few rows with plain weights."""
    n_warps = 4
    while n_warps > 1 and n_warps * WARP * PLAIN_PER_THREAD >= 2 * n_columns:
        n_warps //= 2
    rows = max(1, min(4, 8 // n_token))  # as registers have room for sums
    while rows > 1 and n_rows < PLAIN_PROGRAMS_PER_SM * target.n_sm * rows:
        rows //= 2
    return {"rows": rows, "step": n_warps * WARP * PLAIN_PER_THREAD, "num_warps": n_warps}


PLAIN_PER_THREAD = 8
"""Columns that a thread reads at once: 16 bytes of F16 and BF16."""

PLAIN_PROGRAMS_PER_SM = 4
"""Programs with plain weights that a multiprocessor should have before each takes more rows."""


def expert_gemv_config(target: KernelTarget, *, n_blocks: int) -> Config:
    """Warps and blocks at once where one row is multiplied with a tile of its expert.

    Experts are small and many programs start together: all a program needs is asked for at once.
    """
    n_warps = 1
    while n_warps < MOST_WARPS and 2 * n_warps * WARP // 4 < n_blocks:
        n_warps *= 2
    return {"num_warps": n_warps, "unroll": 1}


def expert_gemm_config(target: KernelTarget, *, rows: int) -> Config:
    """How many rows of an expert's matrix meet a block of rows in one program, and how."""
    if target.maker == "nvidia" and target.capability < 80:  # no tensor cores that Triton knows
        return {"columns": 64, "blocks": 1, "num_warps": 2, "num_stages": 2}
    if rows >= 128:
        return {"columns": 128, "blocks": 2, "num_warps": 8, "num_stages": 2}
    return {"columns": 64, "blocks": 2, "num_warps": 4, "num_stages": 2}


RULES: dict[str, Rule] = {
    "few": gemv_config,
    "few_parts": gemv_parts_config,
    "many": tile_gemm_config,
    "plain": unquantised_config,
    "expert_rows": expert_gemv_config,
    "expert_blocks": expert_gemm_config,
}
"""By the name under which a kernel asks."""

_found: dict[Key, Config] = {}


def config_of(target: KernelTarget, kernel: str, **facts: Any) -> Config:
    """How a kernel is cut up, by its rule if no search has found better.

    Args:
        kernel: a key of `RULES`.
        facts: what the rule wants to know: numbers and texts.
    """
    found = _found.get(key_of(target, kernel, facts))
    return RULES[kernel](target, **facts) if found is None else found


def key_of(target: KernelTarget, kernel: str, facts: Mapping[str, Any]) -> Key:
    """What a search's result is kept under; numbers of rows of x count as powers of two."""
    if "n_token" in facts:
        facts = {**facts, "n_token": 1 << (facts["n_token"] - 1).bit_length()}
    return (target.maker, target.capability, target.n_sm, kernel, tuple(sorted(facts.items())))


def use_found(found: Mapping[Key, Config]) -> None:
    """Replace what a search has found, on all devices."""
    _found.clear()
    _found.update(found)
