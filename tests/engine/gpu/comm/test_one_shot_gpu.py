"""Lanes on a real GPU: ranks on one device, each with a stream of its own.

TRITON_INTERPRET=0 pytest -m gpu tests/engine/gpu/test_lane_gpu.py
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from engine.devices.routes import Ways
from engine.forward.addend import Addend
from engine.gpu import elementwise
from engine.gpu.comm.one_shot import Lane, Lanes
from engine.layers.norm import RMSNorm
from engine.sharding.placement import Replicate
from tests.helpers.one_shot import alike, expected, randn

pytestmark = pytest.mark.gpu

N = 4096

SUMS = 100
"""Of a graph whose time is taken."""


class Ranks:
    """Ranks on the first GPU.

    Args:
        place: where packets lie meanwhile.
    """

    def __init__(self, n: int, place: str, timeout_s: float = 2.0) -> None:
        self.device = torch.device("cuda", 0)
        self.group = tuple(range(n))
        self.lanes = Lanes([self.device] * n, Ways(), None, timeout_s)
        self.lanes._place = lambda source, goal: place  # type: ignore[method-assign]
        self.streams = [torch.cuda.Stream(self.device) for _ in self.group]

    def lane(self, seat: int) -> Lane:
        lane = self.lanes.lane(seat, self.group)
        assert lane is not None
        return lane

    def all(self, do: Callable[[Lane], object]) -> list[object]:
        """Start something on each rank, then wait for all of them."""
        torch.cuda.synchronize(self.device)
        found = []
        for seat, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                found.append(do(self.lane(seat)))
        torch.cuda.synchronize(self.device)
        return found

    def ready(self, do: Callable[[Lane], object]) -> None:
        """Have all kernels loaded before any waits for another one."""
        with self.lanes.without_waiting():
            self.all(do)

    def captured(self, do: Callable[[Lane], Tensor]) -> list[tuple[torch.cuda.CUDAGraph, Tensor]]:
        """A graph of each rank, and its result."""
        self.ready(do)
        found = []
        for seat, stream in enumerate(self.streams):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = do(self.lane(seat))
            found.append((graph, result))
        with self.lanes.without_waiting():
            self.replay(found)
        return found

    def replay(self, graphs: Sequence[tuple[torch.cuda.CUDAGraph, Tensor]]) -> None:
        """Start all of them, then wait."""
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
    ranks.ready(lambda lane: lane.all_reduce(xs[lane.seat], shape))
    for turn in range(4):
        values = [None if x is None else x * (turn + 1) for x in xs]
        found = ranks.all(lambda lane, v=values: lane.all_reduce(v[lane.seat], shape))
        assert alike(found, expected(values))  # type: ignore[arg-type]
    assert ranks.lanes.problem() is None


def test_sum_and_norm(place: str) -> None:
    ranks, norm = Ranks(2, place), RMSNorm(N, 1e-5, Replicate((0,)))
    norm.weight = randn(N, seed=5).cuda()
    x, values = randn(1, N, seed=9).cuda(), [randn(1, N, seed=seat).cuda() for seat in range(2)]

    def add(lane: Lane) -> tuple[Tensor, Tensor | None] | None:
        return lane.add_norm(x, Addend(values[lane.seat]), norm)

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
    ranks.ready(lambda lane: lane.words(own[lane.seat]))
    for one in ranks.all(lambda lane: lane.words(own[lane.seat])):
        assert isinstance(one, Tensor)
        assert torch.equal(one, own)


def test_a_rank_that_does_not_come(place: str) -> None:
    ranks, x = Ranks(2, place, timeout_s=0.3), randn(1, N).cuda()
    ranks.ready(lambda lane: lane.all_reduce(x, x.shape))
    begun = time.perf_counter()
    with torch.cuda.stream(ranks.streams[0]):
        for _ in range(100):
            ranks.lane(0).all_reduce(x, x.shape)
    torch.cuda.synchronize()
    assert 0.2 < time.perf_counter() - begun < 1.0, "only the first one waits"
    problem = ranks.lanes.problem()
    assert problem is not None
    assert (problem.rank, problem.device) == (1, "cuda:0")
    ranks.lanes.reset()
    assert alike(ranks.all(lambda lane: lane.all_reduce(x, x.shape)), x + x)  # type: ignore[arg-type]
    assert ranks.lanes.problem() is None


def test_waiting_ends_when_the_host_says_so(place: str) -> None:
    ranks, x = Ranks(2, place, timeout_s=30.0), randn(1, N).cuda()
    ranks.ready(lambda lane: lane.all_reduce(x, x.shape))
    with torch.cuda.stream(ranks.streams[0]):
        ranks.lane(0).all_reduce(x, x.shape)
    time.sleep(0.05)
    assert not ranks.streams[0].query(), "it waits"
    ranks.lanes.abort()
    begun = time.perf_counter()
    torch.cuda.synchronize()
    assert time.perf_counter() - begun < 1.0
    assert ranks.lanes.problem() is None


@pytest.mark.parametrize("n_byte", [8 << 10, 16 << 10, 32 << 10])
def test_latency(place: str, n_byte: int, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, x = Ranks(2, place), randn(1, n_byte // 4).cuda()

    def sums(lane: Lane) -> Tensor:
        total = x
        for _ in range(SUMS):
            total = lane.all_reduce(total, x.shape)
        return total

    graphs = ranks.captured(sums)
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        ranks.replay(graphs)
        times.append((time.perf_counter() - begun) / SUMS)
    assert ranks.lanes.problem() is None
    with capsys.disabled():
        sys.stdout.write(
            f"\n{n_byte >> 10} KB by the {place}: {1e6 * min(times):.2f} us a sum at best, "
            f"{1e6 * sorted(times)[10]:.2f} us in the middle, launches included\n"
        )


def test_ten_thousand_replays(place: str) -> None:
    """Graphs of four ranks, with other numbers each time and no bit that differs."""
    ranks = Ranks(4, place)
    xs = [randn(1, N, seed=seat).cuda() for seat in ranks.group]
    graphs = ranks.captured(lambda lane: lane.all_reduce(xs[lane.seat], (1, N)))
    for turn in range(10_000):
        for x in xs:
            x.add_(0.001)
        ranks.replay(graphs)
        assert alike([result for _, result in graphs], expected(xs)), f"replay {turn}"
    assert ranks.lanes.problem() is None
