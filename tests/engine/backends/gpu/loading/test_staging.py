"""Staging buffers deliver bytes unchanged and in order, however long copies take."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.gpu.loading import staging as stages
from engine.backends.gpu.loading.staging import Buffer, CpuCopier, CudaCopier, Staging
from engine.formats.gguf.tensor_bytes import TensorBytes
from tests.helpers.stored_bytes import stored

Bytes = np.ndarray
CPU = torch.device("cpu")


class SlowCopier(CpuCopier):
    """Copier of a device with slow copies: it reads the host's buffers late."""

    def __init__(self) -> None:
        self.copies: dict[int, threading.Thread] = {}
        self.late: dict[int, tuple[Tensor, Tensor]] = {}
        self.changed = 0

    def copy(self, buffer: Buffer, n_bytes: int) -> Tensor:
        now = buffer.host.value[:n_bytes].clone()
        thread = threading.Thread(target=self._read, args=(buffer, now))
        self.copies[id(buffer)] = thread
        thread.start()
        return now

    def _read(self, buffer: Buffer, now: Tensor) -> None:
        time.sleep(0.01)
        self.changed += not torch.equal(buffer.host.value[: len(now)], now)

    def wait(self, buffer: Buffer) -> None:
        self.copies[id(buffer)].join()

    def finish(self) -> None:
        for thread in self.copies.values():
            thread.join()


def test_a_buffer_is_not_filled_before_its_copy_has_ended() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (1, 64, 1000), np.uint8)
    found: list[Tensor] = []
    copier = SlowCopier()
    with Staging(CPU, lambda n: None, 8000, copier) as staging:
        for first in range(0, 64, 8):
            staging.send(stored(rows)[:, first : first + 8], lambda raw: found.append(raw.clone()))
    assert np.array_equal(torch.cat(found, 1).numpy(), rows)
    assert copier.changed == 0


def test_parts_arrive_in_order_whatever_the_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, rng = stages._fill, np.random.default_rng(1)

    def slow(goal: Bytes, rows: TensorBytes) -> None:
        time.sleep(rng.uniform(0, 0.004))
        fill(goal, rows)

    monkeypatch.setattr(stages, "_fill", slow)
    rows = rng.integers(0, 256, (6, 40, 100), np.uint8)
    found = torch.zeros(rows.shape, dtype=torch.uint8)
    with Staging(CPU, lambda n: None, 1600) as staging:
        for index in range(6):
            for first in range(0, 40, 16):
                part = slice(first, min(40, first + 16))
                put = partial(_put, found[index : index + 1, part])
                staging.send(stored(rows)[index : index + 1, part], put)
    assert np.array_equal(found.numpy(), rows)


def _put(goal: Tensor, raw: Tensor) -> None:
    goal.copy_(raw)


class FakeStreams:
    """Fake streams and events of a device, which record the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.main = self.stream("main")
        self.now = [self.main]
        self.n_events = 0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Stream", lambda device: self.stream("copies"))
        monkeypatch.setattr(cuda, "Event", self.event)
        monkeypatch.setattr(cuda, "current_stream", lambda device: self.now[-1])
        monkeypatch.setattr(cuda, "stream", self.within)
        monkeypatch.setattr(Tensor, "copy_", self.copied(Tensor.copy_))

    def note(self, text: str) -> None:
        self.calls.append(text)

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.note(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.note(f"{name} waits for {event.name}"),
            synchronize=lambda: self.note(f"host waits for {name}"),
        )

    def event(self) -> SimpleNamespace:
        self.n_events += 1
        kind = "copied" if self.n_events % 2 else "used"
        name = f"{kind} {(self.n_events + 1) // 2}"
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.note(f"{name} on {stream.name}"),
            synchronize=lambda: self.note(f"host waits for {name}"),
        )

    @contextmanager
    def within(self, stream: SimpleNamespace) -> Iterator[None]:
        self.now.append(stream)
        yield
        self.now.pop()

    def copied(self, copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def copy_(goal: Tensor, given: Tensor, *, non_blocking: bool = False) -> Tensor:
            self.note(f"copy on {self.now[-1].name}" + ("" if non_blocking else ", and wait"))
            return copy(goal, given)

        return copy_


def test_copies_of_a_gpu_wait_for_what_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is copied after its previous use has ended, and used after it was copied."""
    cuda = FakeStreams(monkeypatch)
    rows = np.arange(4 * 300, dtype=np.uint8).reshape(4, 3, 100)
    found: list[Tensor] = []

    def take(raw: Tensor) -> None:
        cuda.note(f"use on {cuda.now[-1].name}")
        found.append(raw.clone())

    with Staging(CPU, lambda n: None, 300, CudaCopier(CPU)) as staging:
        for index in range(4):
            staging.send(stored(rows)[index : index + 1], take)
    assert np.array_equal(torch.cat(found).numpy(), rows)
    copied = [
        [f"copies waits for used {n}", "copy on copies", f"copied {n} on copies",
         f"main waits for copied {n}", "use on main", f"used {n} on main"]
        for n in (1, 2, 3, 1)
    ]  # fmt: skip
    ended = ["host waits for copies", "host waits for main"]
    assert cuda.calls == [
        "copies waits for main", *copied[0], *copied[1], "host waits for copied 1",
        *copied[2], *copied[3], *ended, *ended,
    ]  # fmt: skip


def test_nothing_is_allocated_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuCopier, "buffer", lambda *args: pytest.fail("a buffer was made"))
    with Staging(CPU, lambda n: None) as staging:
        staging.flush()


def test_the_speed_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "engine.backends.gpu.loading.staging")
    with Staging(CPU, lambda n: None) as staging:
        staging.send(stored(np.zeros((1, 4, 500), np.uint8)), lambda raw: None)
    (line,) = caplog.messages
    assert "GB/s" in line
    assert "cpu" in line
