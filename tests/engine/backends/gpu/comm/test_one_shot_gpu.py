"""One-shot all-reduces on a real GPU: ranks on one device, each with its own stream.

TRITON_INTERPRET=0 pytest -m gpu tests/engine/backends/gpu/comm/test_one_shot_gpu.py
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from engine.backends.gpu import elementwise
from engine.backends.gpu.comm.one_shot import OneShot, OneShotGroups
from engine.hardware.devices.topology import Routes
from engine.model.forward.operands import Addend
from engine.model.layers.norm import RMSNorm
from engine.model.sharding.placement import Replicate
from tests.helpers.one_shot import alike, expected, randn

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

N = 4096

SUMS = 100
"""All-reduces in a graph that is timed."""


class Ranks:
    """Ranks on the first GPU.

    Args:
        place: place of the packet slots.
    """

    def __init__(self, n: int, place: str, timeout_s: float = 2.0) -> None:
        self.device = torch.device("cuda", 0)
        self.group = tuple(range(n))
        self.one_shots = OneShotGroups([self.device] * n, Routes(), None, timeout_s)
        self.one_shots._place = lambda source, goal: place  # type: ignore[method-assign]
        self.streams = [torch.cuda.Stream(self.device) for _ in self.group]

    def one_shot(self, seat: int) -> OneShot:
        one_shot = self.one_shots.one_shot(seat, self.group)
        assert one_shot is not None
        return one_shot

    def all(self, do: Callable[[OneShot], object]) -> list[object]:
        """Start work on each rank, then wait for all ranks; return the results."""
        torch.cuda.synchronize(self.device)
        found = []
        for seat, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(do(self.one_shot(seat)))
        torch.cuda.synchronize(self.device)
        return found

    def ready(self, do: Callable[[OneShot], object]) -> None:
        """Load all kernels before any of them waits for another."""
        with self.one_shots.without_waiting():
            self.all(do)

    def captured(
        self, do: Callable[[OneShot], Tensor]
    ) -> list[tuple[torch.cuda.CUDAGraph, Tensor]]:
        """Capture work on each rank; return the graphs and their results."""
        self.ready(do)
        found = []
        for seat, stream in enumerate(self.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = do(self.one_shot(seat))
            found.append((graph, result))
        with self.one_shots.without_waiting():
            self.replay(found)
        return found

    def replay(self, graphs: Sequence[tuple[torch.cuda.CUDAGraph, Tensor]]) -> None:
        """Replay all graphs, then wait."""
        for stream, (graph, _) in zip(self.streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize(self.device)


@pytest.fixture(params=["device", "host"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    yield str(request.param)
    torch.cuda.synchronize()


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("shape", [(1, N), (4, N), (1, 2880), (8, 8192)])
def test_sums_have_the_same_bits(place: str, n: int, shape: Sequence[int]) -> None:
    ranks = Ranks(n, place)
    xs = [None if seat == n - 1 else randn(*shape, seed=seat).cuda() for seat in ranks.group]
    ranks.ready(lambda one_shot: one_shot.all_reduce(xs[one_shot.seat], shape))
    for turn in range(4):
        values = [None if x is None else x * (turn + 1) for x in xs]
        found = ranks.all(lambda one_shot, v=values: one_shot.all_reduce(v[one_shot.seat], shape))
        assert alike(found, expected(values))  # type: ignore[arg-type]
    assert ranks.one_shots.problem() is None


def test_sum_and_norm(place: str) -> None:
    ranks, norm = Ranks(2, place), RMSNorm(N, 1e-5, Replicate((0,)))
    norm.weight = randn(N, seed=5).cuda()
    x, values = randn(1, N, seed=9).cuda(), [randn(1, N, seed=seat).cuda() for seat in range(2)]

    def add(one_shot: OneShot) -> tuple[Tensor, Tensor | None] | None:
        return one_shot.add_norm(x, Addend(values[one_shot.seat]), norm)

    ranks.ready(add)
    one, other = ranks.all(add)
    wanted = elementwise.add_norm(x, Addend(expected(values)), norm)
    assert wanted is not None
    assert wanted[1] is not None
    assert isinstance(one, tuple)
    assert isinstance(other, tuple)
    assert alike([one[0], other[0]], wanted[0])
    assert alike([other[1]], one[1])
    torch.testing.assert_close(one[1], wanted[1], rtol=2e-6, atol=2e-6)


def test_words(place: str) -> None:
    ranks = Ranks(3, place)
    own = torch.arange(3 * 514, dtype=torch.int32, device="cuda").view(3, -1)
    ranks.ready(lambda one_shot: one_shot.words(own[one_shot.seat]))
    for one in ranks.all(lambda one_shot: one_shot.words(own[one_shot.seat])):
        assert isinstance(one, Tensor)
        assert torch.equal(one, own)


def test_a_rank_that_does_not_come(place: str) -> None:
    ranks, x = Ranks(2, place, timeout_s=0.3), randn(1, N).cuda()
    ranks.ready(lambda one_shot: one_shot.all_reduce(x, x.shape))
    begun = time.perf_counter()
    with torch.cuda.stream(ranks.streams[0]):
        for _ in range(100):
            ranks.one_shot(0).all_reduce(x, x.shape)
    torch.cuda.synchronize()
    assert 0.2 < time.perf_counter() - begun < 1.0, "only the first one waits"
    problem = ranks.one_shots.problem()
    assert problem is not None
    assert (problem.rank, problem.device) == (1, "cuda:0")
    ranks.one_shots.reset()
    assert alike(ranks.all(lambda one_shot: one_shot.all_reduce(x, x.shape)), x + x)  # type: ignore[arg-type]
    assert ranks.one_shots.problem() is None


def test_waiting_ends_when_the_host_says_so(place: str) -> None:
    ranks, x = Ranks(2, place, timeout_s=30.0), randn(1, N).cuda()
    ranks.ready(lambda one_shot: one_shot.all_reduce(x, x.shape))
    with torch.cuda.stream(ranks.streams[0]):
        ranks.one_shot(0).all_reduce(x, x.shape)
    time.sleep(0.05)
    assert not ranks.streams[0].query(), "it waits"
    ranks.one_shots.abort()
    begun = time.perf_counter()
    torch.cuda.synchronize()
    assert time.perf_counter() - begun < 1.0
    assert ranks.one_shots.problem() is None


@pytest.mark.parametrize("n_byte", [8 << 10, 16 << 10, 32 << 10])
def test_latency(place: str, n_byte: int, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, x = Ranks(2, place), randn(1, n_byte // 4).cuda()

    def sums(one_shot: OneShot) -> Tensor:
        total = x
        for _ in range(SUMS):
            total = one_shot.all_reduce(total, x.shape)
        return total

    graphs = ranks.captured(sums)
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        ranks.replay(graphs)
        times.append((time.perf_counter() - begun) / SUMS)
    assert ranks.one_shots.problem() is None
    with capsys.disabled():
        sys.stdout.write(
            f"\n{n_byte >> 10} KB by the {place}: {1e6 * min(times):.2f} us a sum at best, "
            f"{1e6 * sorted(times)[10]:.2f} us in the middle, launches included\n"
        )


def test_ten_thousand_replays(place: str) -> None:
    """Graphs of four ranks give the right bits for new values each time."""
    ranks = Ranks(4, place)
    xs = [randn(1, N, seed=seat).cuda() for seat in ranks.group]
    graphs = ranks.captured(lambda one_shot: one_shot.all_reduce(xs[one_shot.seat], (1, N)))
    for turn in range(10_000):
        for x in xs:
            x.add_(0.001)
        ranks.replay(graphs)
        assert alike([result for _, result in graphs], expected(xs)), f"replay {turn}"
    assert ranks.one_shots.problem() is None
