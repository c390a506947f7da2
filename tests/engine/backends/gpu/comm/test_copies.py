"""All-reduce by copies: the same bits on all ranks, in whatever order devices work."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.gpu.comm import copies
from engine.backends.gpu.comm.copies import CopyCollectives, Offer, Seat
from engine.hardware.devices.topology import Place
from engine.parallel.rank_threads import RankThreads
from engine.planning import memory as buffers
from tests.helpers.fake_streams import FakeQueues, Machine

ROUND = 1 << 10
PLACES: tuple[Place, ...] = ("host", "peer", "device")

Values = Sequence[Tensor | None]
Map = list[list[Place]]
"""Place of values from each rank (row) to each other rank (column)."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink buffers, so that even small values need several rounds."""
    monkeypatch.setattr(buffers, "LINK_ROUND_BYTES", ROUND)
    monkeypatch.setattr(copies, "ROUND_BYTES", ROUND)
    monkeypatch.setattr(copies, "MIN_CHUNK", 128)
    monkeypatch.setattr(copies, "SMALL_BYTES", 256)


class Ranks:
    """Members of one group on fake devices."""

    def __init__(self, machine: Machine, places: Map) -> None:
        self.machine = machine
        self.n = len(places)
        self._group = ThreadGroup()
        self._pool = RankThreads(self.n, self._group.abort, lambda: None)
        self._queues = [FakeQueues(machine) for _ in range(self.n)]
        self._ranks = [
            CopyCollectives(q, self._seat(places, k)) for k, q in enumerate(self._queues)
        ]

    def _seat(self, places: Map, number: int) -> Seat:
        meeting = self._group.barrier(tuple(range(self.n)))

        def meet(offer: Offer) -> list[Offer]:
            return list(meeting.exchange(number, offer)[0])  # type: ignore[arg-type]

        def until(events: Sequence[object]) -> None:
            while not all(event.query() for event in events):  # type: ignore[attr-defined]
                pass

        return Seat(number, places[number], [row[number] for row in places], meet, until)

    def run(self, collectives: Sequence[tuple[str, Values]]) -> list[list[Tensor]]:
        """Run collectives in a row; return each one's results on all ranks."""
        try:
            found = self._pool.call_on_all(lambda rank: [self._one(rank, *c) for c in collectives])
        finally:
            self._pool.close()
        self.machine.drain()
        return [list(results) for results in zip(*found, strict=True)]

    def _one(self, rank: int, kind: str, values: Values) -> Tensor:
        """Run a collective; the next work in its stream overwrites the memory."""
        compute, member = self._queues[rank].compute, self._ranks[rank]
        value = values[rank]
        shape = next(v for v in values if v is not None).shape
        x = None if value is None else torch.full(shape, torch.nan)
        if x is not None:
            compute.run(lambda: x.copy_(value))
        out = torch.full(shape, torch.nan)
        if "sum" in kind:
            done = member.all_reduce(x, out, is_exact=kind == "exact sum")
        else:
            done = member.broadcast(x, out if x is None else None)
        compute.wait(done)
        result = torch.empty(shape)
        given = x if kind == "broadcast" and x is not None else out
        compute.run(lambda: result.copy_(given))
        for used in (x, out):
            if used is not None:
                compute.run(lambda used=used: used.fill_(torch.nan))
        return result


def expected(kind: str, values: Values) -> Tensor:
    """Return the result that all ranks must have."""
    some = [v for v in values if v is not None]
    if kind == "broadcast":
        return some[0]
    is_small = kind == "exact sum" or some[0].nbytes <= copies.SMALL_BYTES
    total, *others = (v if is_small else v.bfloat16().float() for v in some)
    for value in others:
        total = total + value
    return total if is_small or len(values) == 2 else total.bfloat16().float()


def some_collectives(n: int, random: Random) -> list[tuple[str, Values]]:
    """Return all-reduces and broadcasts of all sizes, also with members without a value."""
    torch.manual_seed(random.random())
    made: list[tuple[str, Values]] = []
    for _ in range(4):
        kind = random.choice(["sum", "sum", "exact sum", "broadcast"])
        shape = random.choice([1, 7, 130]), random.choice([1, 3, 10])
        present = set(random.sample(range(n), random.randint(1, n)))
        if kind == "broadcast":
            present = {random.randrange(n)}
        values = [torch.randn(shape) * 10.0**k if k in present else None for k in range(n)]
        made.append((kind, values))
    return made


def uniform(n: int, place: Place) -> Map:
    return [[place] * n for _ in range(n)]


def mixed(n: int, random: Random) -> Map:
    return [[random.choice(PLACES) for _ in range(n)] for _ in range(n)]


def is_right(machine: Machine, places: Map, collectives: Sequence[tuple[str, Values]]) -> bool:
    found = Ranks(machine, places).run(collectives)
    return all(
        torch.equal(result, expected(*collective))
        for collective, results in zip(collectives, found, strict=True)
        for result in results
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", range(2, 9))
def test_all_ranks_get_the_same_right_bits(n: int, seed: int) -> None:
    random = Random(100 * n + seed)
    places = mixed(n, random) if seed > 2 else uniform(n, PLACES[seed])
    assert is_right(Machine(seed), places, some_collectives(n, random))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_memory_that_cannot_be_pinned_is_slow_but_right(n: int) -> None:
    for seed in range(4):
        random = Random(seed)
        machine = Machine(seed, is_pinned=False)
        assert is_right(machine, uniform(n, "host"), some_collectives(n, random))


def long_sums(n: int, kind: str = "sum") -> list[tuple[str, Values]]:
    """Return all-reduces of several rounds each, so that all sets of buffers are reused."""
    torch.manual_seed(n)
    source = [{k % n} if kind == "broadcast" else set(range(n)) for k in range(3)]
    return [(kind, [torch.randn(40, 50) if k in s else None for k in range(n)]) for s in source]


SCENES: list[tuple[Callable[[int], Map], int, str]] = [
    (lambda n, place=place: uniform(n, place), n, kind)  # type: ignore[misc]
    for place in PLACES
    for n, kind in ((2, "sum"), (3, "sum"), (2, "broadcast"))
]


def test_no_wait_is_there_in_vain() -> None:
    """Without any one of the waits a result is wrong, for some order of operations."""
    machine = Machine(0)
    for places, n, kind in SCENES:
        scene = Machine(0)
        assert is_right(scene, places(n), long_sums(n, kind))
        machine.sites |= scene.sites
    sites = {site for site in machine.sites if site.startswith("copies.py")}
    assert len(sites) >= 7
    missed = {site for site in sites if not is_missed(site)}
    assert not missed, "never needed"


def is_missed(site: str) -> bool:
    """Return whether a result is wrong without a wait."""
    return any(
        not is_right(Machine(seed, site), places(n), long_sums(n, kind))
        for seed in range(8)
        for places, n, kind in SCENES
    )


def test_what_arrives_is_less_than_all_values() -> None:
    """Each of n ranks receives 2 (n - 1) / n of a value, and sends only that to the host."""
    for n in (2, 3, 4, 8):
        machine = Machine(0)
        ranks = Ranks(machine, uniform(n, "host"))
        counts = {"up": 0, "down": 0}

        def counted(name: str, copy: Callable[[Tensor, Tensor], None], counts=counts):  # type: ignore[no-untyped-def]
            def count(goal: Tensor, source: Tensor) -> None:
                counts[name] += goal.nbytes
                copy(goal, source)

            return count

        for queues in ranks._queues:
            for name in counts:
                queue = getattr(queues, name)
                queue.copy = counted(name, queue.copy)
        values = [torch.randn(64, 64) for _ in range(n)]
        ranks.run([("sum", values)])
        wire = values[0].numel() * 2
        assert counts["down"] == (wire * n if n == 2 else 2 * (n - 1) * wire)
        assert counts["up"] == wire * n


def test_chunks_let_both_ways_be_used_at_once() -> None:
    held = torch.empty(4 << 20, dtype=torch.bfloat16)
    parts = list(copies._chunks(slice(0, len(held)), held))
    assert len(parts) > 1
    assert parts[0][0] == 0
    assert parts[-1][1] == len(held)
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all((stop - start) * 2 <= copies.MAX_CHUNK for start, stop in parts)
