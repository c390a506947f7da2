"""The one function that launches kernels, so that launches can be collected, recorded and repeated.

No argument of a launch differs from token to token: such values are in the device's memory. So the
launches of one token serve for all tokens, in a CUDA graph.
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
    """A kernel with the arguments of one launch.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: number of programs in each of up to three dimensions.
        args: run-time arguments, in the order of the kernel's parameters.
        constants: values of the `tl.constexpr` parameters, by name.
    """

    kernel: Any
    grid: Grid
    args: tuple[Argument, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        """Launch the kernel, or compute it at once where it is interpreted."""
        run = self.kernel[self.grid]
        if not is_interpreted(self.kernel):
            run(*self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages)
            return
        interpret(lambda: run(*self.args, **self.constants))


_thread = threading.local()

LaunchHook = Callable[[KernelLaunch], bool]
"""Callback before each launch of a thread; returns whether the launch shall happen."""


def launch(
    kernel: Any,
    grid: Sequence[int],
    *args: Argument,
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
) -> None:
    """Launch a kernel on the device of its tensors, on torch's current stream.

    With tensors on the device "meta", which have no memory, the kernel is not launched, only
    passed to the thread's hook.

    Args:
        grid: number of programs in each of up to three dimensions; nothing happens if one is 0.
        args: run-time arguments, in the order of the kernel's parameters.
        constants: all `tl.constexpr` parameters by name.

    Raises:
        EngineError: kernels cannot be launched on this machine, see `launcher_choice.prepare`.
    """
    if 0 in grid:
        return
    request = KernelLaunch(kernel, tuple(grid), args, constants, num_warps, num_stages)
    hook: LaunchHook | None = getattr(_thread, "hook", None)
    is_wanted = hook is None or hook(request)
    if is_wanted and not any(isinstance(x, Tensor) and x.is_meta for x in args):
        device = next(x.device for x in args if isinstance(x, Tensor))
        if device.type == "cuda":
            prepare()
            with torch.cuda.device(device):
                request.run()
        else:
            request.run()


@contextmanager
def intercept_launches(hook: LaunchHook) -> Iterator[None]:
    """Call `hook` before each launch of this thread; launches that it rejects do not happen."""
    before = getattr(_thread, "hook", None)
    _thread.hook = hook
    try:
        yield
    finally:
        _thread.hook = before


def is_interpreted(kernel: Any) -> bool:
    """Return whether Triton interprets the kernel on the CPU, as with TRITON_INTERPRET=1."""
    return type(kernel).__name__ == "InterpretedFunction"
