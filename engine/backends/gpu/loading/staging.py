"""Copies parts of a file to a device through pinned staging buffers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from engine.errors import DeviceError
from engine.hardware.devices.host import usable_cores
from engine.hardware.host_memory import HostTensor
from engine.planning.memory import LOAD_BUFFER_BYTES, LOAD_BUFFERS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.formats.gguf.tensor_bytes import TensorBytes

    Bytes = NDArray[np.uint8]

log = logging.getLogger(__name__)

N_FILLERS = 4  # threads that read the file; one cannot keep up with a fast link

Take = Callable[[Tensor], None]
"""Callback with bytes on the device; launches the work that uses them."""


@dataclass(slots=True)
class Buffer:
    """A host buffer and a device buffer of the same size.

    Attributes:
        host: pinned host memory.
        held: device memory; on the CPU, the same as `host`.
        copied: event after the last copy to the device; None on the CPU.
        used: event after the last use on the device; None on the CPU.
    """

    host: HostTensor
    held: Tensor
    copied: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None


class CpuCopier:
    """Copier for buffers, in call order; here to the CPU, which needs no copy."""

    def buffer(self, n_bytes: int) -> Buffer:
        host = HostTensor((n_bytes,), torch.uint8, torch.device("cpu"))
        return Buffer(host, host.value)

    def wait(self, buffer: Buffer) -> None:
        """Wait until the host buffer may be overwritten."""

    def copy(self, buffer: Buffer, n_bytes: int) -> Tensor:
        """Copy the first bytes; return them on the device, valid for work launched later."""
        return buffer.held[:n_bytes]

    def release(self, buffer: Buffer) -> None:
        """Note that all work that reads the device buffer has been launched."""

    def finish(self) -> None:
        """Wait until all copies and the work that reads them have finished."""


class CudaCopier:
    """Copier to a GPU, with a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._copies = make(device)
        self._copies.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, n_bytes: int) -> Buffer:
        host = HostTensor((n_bytes,), torch.uint8, self._device)
        held = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        make: Callable[[], torch.cuda.Event] = torch.cuda.Event
        return Buffer(host, held, make(), make())

    def wait(self, buffer: Buffer) -> None:
        assert buffer.copied is not None
        buffer.copied.synchronize()

    def copy(self, buffer: Buffer, n_bytes: int) -> Tensor:
        assert buffer.copied is not None
        assert buffer.used is not None
        held = buffer.held[:n_bytes]
        self._copies.wait_event(buffer.used)
        with torch.cuda.stream(self._copies):
            held.copy_(buffer.host.value[:n_bytes], non_blocking=True)
        buffer.copied.record(self._copies)
        torch.cuda.current_stream(self._device).wait_event(buffer.copied)
        return held

    def release(self, buffer: Buffer) -> None:
        assert buffer.used is not None
        buffer.used.record(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        self._copies.synchronize()
        torch.cuda.current_stream(self._device).synchronize()


Copier = CpuCopier | CudaCopier


def copier_for(device: torch.device) -> Copier:
    return CudaCopier(device) if device.type == "cuda" else CpuCopier()


@dataclass(frozen=True, slots=True)
class _Filling:
    """A part of the file that threads are reading into a buffer."""

    buffer: Buffer
    shape: tuple[int, ...]
    take: Take
    work: list[Future[None]]


class Staging:
    """Buffers between a file and a device; while one is copied, the next is filled.

    Use as a context manager: when it exits, everything sent has arrived, and the buffers are freed.
    If there is an error, the part that is still in a buffer is not sent.

    Args:
        report: callback with the number of bytes sent; may raise to stop.
        n_bytes: size of each buffer, allocated on first use, and the maximum for one `send`.
        copier: copies the buffers; None for the device's default copier.
    """

    def __init__(
        self, device: torch.device, report: Callable[[int], None],
        n_bytes: int = LOAD_BUFFER_BYTES, copier: Copier | None = None,
    ) -> None:  # fmt: skip
        self.device = device
        self.n_bytes = n_bytes
        self._report = report
        self._copier = copier
        self._buffers: deque[Buffer] = deque()
        self._fillers: ThreadPoolExecutor | None = None
        self._waiting: _Filling | None = None
        self._n_sent, self._begun = 0, 0.0

    def send(self, rows: TensorBytes, take: Take) -> None:
        """Send bytes to the device, in call order.

        Args:
            rows: 1 to `n_bytes` bytes, in three dimensions; other threads read them, even after
                this returns.
            take: callback with the bytes on the device; they are overwritten after the work that it
                launches.

        Raises:
            DeviceError: the device or the host refuses.
            ModelFileError: the file was truncated, or its drive fails.
        """
        assert rows.nbytes <= self.n_bytes, "that is too much at once"
        with _as_device_error(self.device):
            filling = self._fill_next(rows, take)
            before, self._waiting = self._waiting, filling
            if before is not None:
                self._deliver(before)

    def flush(self) -> None:
        """Deliver everything sent so far to work launched from now on; raises like `send`."""
        with _as_device_error(self.device):
            before, self._waiting = self._waiting, None
            if before is not None:
                self._deliver(before)

    def _fill_next(self, rows: TensorBytes, take: Take) -> _Filling:
        if self._fillers is None:
            self._begun = time.monotonic()
            self._copier = self._copier or copier_for(self.device)
            self._fillers = ThreadPoolExecutor(min(N_FILLERS, usable_cores()), "tandem-load")
        copier = self._copier
        assert copier is not None
        if len(self._buffers) < LOAD_BUFFERS:
            buffer = copier.buffer(self.n_bytes)
        else:
            buffer = self._buffers.popleft()
            copier.wait(buffer)
        self._buffers.append(buffer)
        goal = buffer.host.value[: rows.nbytes].numpy().reshape(rows.shape)
        work = [self._fillers.submit(_fill, goal[at], rows[at]) for at in _shares(rows.shape)]
        return _Filling(buffer, rows.shape, take, work)

    def _deliver(self, filling: _Filling) -> None:
        for part in filling.work:
            part.result()
        assert self._copier is not None
        n_bytes = prod(filling.shape)
        held = self._copier.copy(filling.buffer, n_bytes)
        filling.take(held.view(filling.shape))
        self._copier.release(filling.buffer)
        self._n_sent += n_bytes
        self._report(n_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            if error is None:
                self._finish()
        finally:
            self._close()

    def _finish(self) -> None:
        self.flush()
        with _as_device_error(self.device):
            if self._copier is not None:
                self._copier.finish()
        if self._n_sent:
            seconds = max(time.monotonic() - self._begun, 1e-9)
            log.info(
                "%.2f GB of weights copied to %s in %.2f s: %.1f GB/s",
                self._n_sent / 1e9, self.device, seconds, self._n_sent / 1e9 / seconds,
            )  # fmt: skip

    def _close(self) -> None:
        if self._fillers is not None:
            self._fillers.shutdown(cancel_futures=True)
        try:
            if self._copier is not None and self._buffers:
                self._copier.finish()
        except RuntimeError:  # already reported
            log.debug("copies to %s did not finish", self.device, exc_info=True)
        self._waiting = self._fillers = self._copier = None
        self._buffers.clear()


def _shares(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield each thread's part to copy: some matrices, or some rows of all matrices."""
    dim = 0 if shape[0] >= N_FILLERS else 1
    step = -(-shape[dim] // N_FILLERS)
    for start in range(0, shape[dim], step):
        yield (*[slice(None)] * dim, slice(start, start + step))


def _fill(goal: Bytes, rows: TensorBytes) -> None:
    rows.read_into(goal)


@contextmanager
def _as_device_error(device: torch.device) -> Iterator[None]:
    """Turn a device's error into a sentence, except out of memory, which callers report."""
    try:
        yield
    except (torch.AcceleratorError, OSError) as error:
        if "out of memory" in str(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DeviceError(
            "Weights could not be copied to {device}: {problem}",
            "Load the model again; if that also fails, the device needs a restart.",
            device=str(device),
            problem=reason,
        ) from error
