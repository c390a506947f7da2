"""Streams of GPUs, as far as they can be tested without one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.backends.gpu.comm.streams import CudaQueue

HERE, THERE = torch.device("cuda:0"), torch.device("cuda:1")


class FakeStream:
    """A fake stream on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Cuda:
    """Torch's current device, and its current stream of each device.

    Attributes:
        copies: the current device and streams at each copy.
    """

    def __init__(self) -> None:
        self.streams = {device: FakeStream(device) for device in (HERE, THERE)}
        self.device = HERE
        self.copies: list[tuple[torch.device, FakeStream, FakeStream]] = []

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        device, before = self.device, self.streams[stream.device]
        self.device, self.streams[stream.device] = stream.device, stream
        yield
        self.device, self.streams[stream.device] = device, before


class FakeTensor:
    """A tensor on a device, without data."""

    def __init__(self, cuda: Cuda, device: torch.device) -> None:
        self._cuda = cuda
        self.device = device
        self.is_cuda = device.type == "cuda"

    def copy_(self, source: "FakeTensor", non_blocking: bool = False) -> None:
        assert non_blocking
        self._cuda.copies.append(
            (self._cuda.device, self._cuda.streams[HERE], self._cuda.streams[THERE])
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.streams[device])
    return made


def test_a_copy_from_another_gpu_keeps_out_of_the_stream_it_computes_in(cuda: Cuda) -> None:
    """Torch copies in the current stream of the source GPU, in which a rank computes."""
    own, computing = FakeStream(HERE), cuda.streams[THERE]
    queue = CudaQueue(HERE, own)  # type: ignore[arg-type]
    mine, other = FakeTensor(cuda, HERE), FakeTensor(cuda, THERE)
    host = FakeTensor(cuda, torch.device("cpu"))
    for _ in range(2):
        queue.copy(mine, other)  # type: ignore[arg-type]
    for goal, source in ((mine, host), (host, mine)):
        queue.copy(goal, source)  # type: ignore[arg-type]
    assert [device for device, *_ in cuda.copies] == [HERE] * 4
    assert all(here is own for _, here, _ in cuda.copies)
    (_, _, first), (_, _, second), *with_host = cuda.copies
    assert first is second is not computing, "one separate stream for all copies"
    assert first.device == THERE
    assert all(there is computing for _, _, there in with_host)
    assert cuda.streams[THERE] is computing


def test_without_a_stream_of_its_own_a_queue_is_the_current_one(cuda: Cuda) -> None:
    queue = CudaQueue(THERE, None)
    assert queue.stream is cuda.streams[THERE]
    with cuda.stream(other := FakeStream(THERE)):
        assert queue.stream is other
        queue.run(lambda: FakeTensor(cuda, THERE).copy_(FakeTensor(cuda, THERE), True))
    assert cuda.copies[0][2] is other
