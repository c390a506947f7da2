"""The one way by which kernels are started: so that starts can be collected, noted and repeated.

A kernel is never started with what differs from token to token: such values stand in the device's
memory. So the starts of one token serve for all, in a graph of the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.gpu.launch.interpreter import interpret
from engine.gpu.launch.launcher_choice import prepare

Grid = tuple[int, ...]
Argument = Tensor | int | float


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel with what it was, or is to be, started with.

    Args:
        kernel: what `triton.jit` made of a function.
        constants: values that the kernel is compiled for, by name.
    """

    kernel: Any
    grid: Grid
    args: tuple[Argument, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        """Start it, or compute it at once where it is interpreted."""
        run = self.kernel[self.grid]
        if not is_interpreted(self.kernel):
            run(*self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
            return
        interpret(lambda: run(*self.args, **self.constants))


_present = threading.local()

LaunchHook = Callable[[KernelLaunch], bool]
"""Is shown each start of its thread, before it happens; whether it shall happen."""


def launch(
    kernel: Any,
    grid: Sequence[int],
    *args: Argument,
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
) -> None:
    """Start a kernel on the device of its tensors, in the order of torch's current stream.

    Tensors on the device "meta" have no memory: a kernel with such is only shown to who watches.

    Args:
        grid: programs in each of up to three directions; nothing happens if one is 0.
        args: what is not a constant, in the order of the kernel's parameters.
        constants: all `tl.constexpr` parameters by name.

    Raises:
        EngineError: kernels cannot be started on this machine, see `launcher_choice.prepare`.
    """
    if 0 in grid:
        return
    start = KernelLaunch(kernel, tuple(grid), args, constants, num_warps, num_stages)
    watch: LaunchHook | None = getattr(_present, "watch", None)
    is_wanted = watch is None or watch(start)
    if is_wanted and not any(isinstance(x, Tensor) and x.is_meta for x in args):
        device = next(x.device for x in args if isinstance(x, Tensor))
        if device.type == "cuda":
            prepare()
            with torch.cuda.device(device):
                start.run()
        else:
            start.run()


@contextmanager
def intercept_launches(watch: LaunchHook) -> Iterator[None]:
    """Show each start of this thread to `watch`."""
    before = getattr(_present, "watch", None)
    _present.watch = watch
    try:
        yield
    finally:
        _present.watch = before


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton interprets the kernel on the CPU, as it does with TRITON_INTERPRET=1."""
    return type(kernel).__name__ == "InterpretedFunction"
