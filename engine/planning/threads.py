"""Number of CPU threads that each rank of a plan computes with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.hardware.devices.host import usable_cores

if TYPE_CHECKING:
    from engine.planning.plan import DevicePlan, Plan

ONE_THREAD_BYTES = 64 << 20
"""Smallest weights of a rank, in bytes, for which it gets more than one thread unasked; less stays
in the caches of one core's neighbourhood."""


def threads_per_rank(cpu_threads: int | None, plan: Plan) -> int:
    """Return the threads of each rank, so that the ranks on the CPU together use what was asked.

    A small model is done sooner by one thread than by waiting for a second at every operation,
    above all on a machine that has other things to do.

    Args:
        cpu_threads: threads of all ranks together; all usable cores if None.
    """
    on_cpu = busy_on_cpu(plan)
    if cpu_threads is None and all(d.memory.weights < ONE_THREAD_BYTES for d in on_cpu):
        return 1
    asked = min(cpu_threads or usable_cores(), os.cpu_count() or 1)
    return max(1, asked // max(1, len(on_cpu)))


def busy_on_cpu(plan: Plan) -> list[DevicePlan]:
    """Return the ranks on the CPU that hold something."""
    return [d for d in plan.devices if d.device == "cpu" and d.memory.total]
