"""Reports of a search for kernel configurations; needs no Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TuningProgress = Callable[[int, int, str], None]
"""Callback: number of searches done, number of all searches, description of the next one."""


@dataclass(frozen=True, slots=True)
class KernelTuning:
    """Result of the search for the configuration of one kernel.

    Attributes:
        device: name of the GPU, such as "cuda:0".
        kernel: name of the kernel's rule, a key of `engine.backends.gpu.launch.configs.RULES`.
        facts: sizes of the product that the configuration is for, by name.
        rule_s: time of one product with the rule's configuration, in seconds.
        best_s: time of one product with the best configuration, in seconds.
        config: the best configuration.
        n_tried: number of configurations that were measured.
    """

    device: str
    kernel: str
    facts: dict[str, Any]
    rule_s: float
    best_s: float
    config: dict[str, int]
    n_tried: int
