"""Collectives of ranks that are processes: the same results as of ranks that are threads.

Here the processes are threads as well, with queues in place of connections.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.thread_comm import ThreadGroup
from engine.distributed.process_comm import MAX_AT_ONCE, MIN_SLICED, ProcessCommunicator
from engine.errors import CommError
from engine.model.forward.communicator import Communicator
from engine.parallel.rank_threads import RankThreads
from tests.helpers.queue_wires import Queues, QueueWire

CPU = torch.device("cpu")
Step = Callable[[Communicator], Tensor | None]


class Ranks:
    """Two sets of equal ranks: connected by queues, and as threads that share memory."""

    def __init__(self, n: int, kinds: Sequence[str] = ()) -> None:
        self.everyone = tuple(range(n))
        self.queues = Queues(kinds or ["cpu"] * n)
        self.wires = [QueueWire(self.queues, rank) for rank in range(n)]
        self._group = ThreadGroup()
        self._pools = (
            RankThreads(n, self.queues.is_broken.set, lambda: None),
            RankThreads(n, self._group.abort, lambda: None),
        )

    def sent(self, step: Step) -> list[Tensor | None]:
        comms = [ProcessCommunicator(wire, CPU) for wire in self.wires]
        found = self._pools[0].call_on_all(lambda rank: step(comms[rank]))
        assert all(way.empty() for way in self.queues.ways.values()), "all was received"
        return found

    def shared(self, step: Step) -> list[Tensor | None]:
        comms = [self._group.communicator(rank, CPU) for rank in self.everyone]
        found = self._pools[1].call_on_all(lambda rank: step(comms[rank]))
        self._group.settle()
        return found

    def check(self, step: Step) -> None:
        """Check that both sets of ranks give the same results."""
        found = self.sent(step)
        for mine, expected in zip(found, self.shared(step), strict=True):
            assert (mine is None) == (expected is None)
            if mine is not None and expected is not None:
                assert mine.dtype is expected.dtype
                assert torch.equal(mine, expected)

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


SHAPES = [(1, 5), (3, 7, 2), (1, MAX_AT_ONCE), (1, MAX_AT_ONCE + 1), (3, MIN_SLICED // 2 + 1)]


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_told", [False, True])
def test_sums_have_the_bits_of_threads(n: int, shape: tuple[int, ...], *, is_told: bool) -> None:
    ranks = Ranks(n)
    for absent in [(), (0,), (1,), tuple(range(1, n))]:
        values = [
            None if rank in absent else torch.randn(shape) * 10.0 ** (3 * rank) for rank in range(n)
        ]
        ranks.check(
            lambda comm, values=values: comm.all_reduce(  # type: ignore[misc]
                values[comm.rank], ranks.everyone, shape if is_told else None
            )
        )
    ranks.close()


def test_large_sums_are_cut_so_that_nobody_sends_it_all_to_everybody() -> None:
    ranks, x = Ranks(4), torch.ones(8, MIN_SLICED)
    ranks.sent(lambda comm: comm.all_reduce(x, ranks.everyone))
    once = x.nbytes * 2 * 3 / 4
    assert all(once <= wire.n_sent < once * 1.01 for wire in ranks.wires)
    ranks.close()


@pytest.mark.parametrize("n", [2, 3, 5])
def test_joins_and_broadcasts_are_those_of_threads(n: int) -> None:
    ranks, half = Ranks(n), (0, n - 1)
    wide, same = torch.randn(2, 3 * n), torch.randn(4, 8)
    numbers = torch.randint(99, (1, 4))

    def joined(comm: Communicator) -> Tensor | None:
        start = 3 * comm.rank
        mine = None if comm.rank == 1 else wide[:, start : start + 3]
        return comm.gather(mine, ranks.everyone, same)

    ranks.check(joined)
    for x in (wide.T, numbers, same.double(), same.bfloat16()):
        for group in (ranks.everyone, half):
            ranks.check(
                lambda comm, x=x, group=group: (  # type: ignore[misc]
                    comm.broadcast(x if comm.rank == n - 1 else None, n - 1, group)
                    if comm.rank in group
                    else None
                )
            )
    ranks.check(
        lambda comm: comm.broadcast(same if comm.rank == 0 else None, 0, ranks.everyone, (4, 8))
    )
    ranks.check(lambda comm: comm.all_reduce(same, (comm.rank,)))
    ranks.check(lambda comm: comm.gather(same, (comm.rank,)))
    ranks.close()


def test_values_that_do_not_fit_name_rank_and_host() -> None:
    ranks = Ranks(3)
    with pytest.raises(CommError, match=r"^host2 \(rank 2\) has provided values \(1, 3\)"):
        ranks.sent(
            lambda comm: comm.all_reduce(torch.ones(1, 2 + (comm.rank == 2)), ranks.everyone)
        )
    ranks.close()


@pytest.mark.parametrize("kinds", [("a", "a", "a"), ("a", "b", "a"), ("a", "b", "c")])
def test_a_bit_that_differs_is_seen_among_ranks_of_a_kind(kinds: tuple[str, ...]) -> None:
    ranks, row = Ranks(3, kinds), torch.randn(1, 40)

    def step(comm: Communicator) -> Tensor | None:
        mine = row.clone()
        mine.view(torch.int32)[0, 3] ^= comm.rank == 2
        return comm.gather(torch.ones(1, 2), ranks.everyone, mine)

    if kinds.count("a") > 1:
        with pytest.raises(CommError, match=r"^host2 \(rank 2\)"):
            ranks.sent(step)
    else:
        assert ranks.sent(step)[0] is not None
    ranks.close()
