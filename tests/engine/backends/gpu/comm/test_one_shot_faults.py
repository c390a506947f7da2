"""One-shot all-reduces in which a rank does not come, or must not be waited for."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from engine.backends.gpu.comm import one_shot as one_shot_module
from engine.backends.gpu.comm import slots as slots_module
from engine.backends.gpu.comm.one_shot import OneShot, OneShotGroups
from engine.backends.gpu.comm.slots import FIRST_ROUND, fresh_round, new_slot
from engine.backends.gpu.launch.configs import INTERPRETER
from engine.errors import CommError, EngineError
from engine.hardware.cuda_api import CudaApi
from engine.hardware.devices.topology import Routes, Way
from engine.model.forward.operands import Addend
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.one_shot import (
    CPU,
    Ranks,
    alike,
    expected,
    one_kernel,
    randn,
    ranks_of,
    values_of,
    write_only,
)

SHORT_S = 50e-6
"""Timeout of fifty polls, in seconds."""

LONG_S = 100.0
"""Number of polls that no test can wait for."""

SHAPE = (1, 20)


def starts_anew(ranks: Ranks) -> bool:
    """Return whether all-reduces are right on all ranks."""
    for seed in range(3):
        values = values_of(len(ranks.group), SHAPE, (), seed)
        if not alike(ranks.sums(values, SHAPE), expected(values)):
            return False
    return ranks.one_shots.problem() is None


def patient(one_shot: OneShot) -> OneShot:
    """Make a rank's kernels wait for longer than the test may take."""
    one_shot._end = replace(one_shot._end, patience=int(LONG_S * slots_module.POLLS_PER_S))
    return one_shot


Exchange = Callable[[OneShot], object]

EXCHANGES: dict[str, Exchange] = {
    "all_reduce": lambda one_shot: one_shot.all_reduce(randn(*SHAPE), SHAPE),
    "add_norm": lambda one_shot: one_shot.add_norm(randn(*SHAPE), Addend(randn(*SHAPE)), None),
    "words": lambda one_shot: one_shot.words(torch.arange(20, dtype=torch.int32)),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=list(EXCHANGES))
def test_a_rank_that_does_not_come_is_named(exchange: Exchange) -> None:
    with one_kernel(), ranks_of(4, SHORT_S) as ranks:
        ranks.one_shot(0)
        write_late(ranks, (1, 3), exchange)
        exchange(ranks.one_shot(0))
        problem = ranks.one_shots.problem()
        assert isinstance(problem, CommError)
        assert (problem.rank, problem.device) == (2, "cpu")
        assert int(ranks.one_shot(0).status) == (1 << 32) + 2 + 1, "of round 1"
        assert ranks.one_shot(0)._end.flags.tolist() == [1, 0]
        exchange(patient(ranks.one_shot(0)))  # later ones do not wait
        assert int(ranks.one_shot(0).status) == (1 << 32) + 2 + 1, "what came first is what counts"
        assert ranks.one_shot(1)._end.flags.tolist() == [0, 0], "others have their own"


def write_late(ranks: Ranks, seats: Sequence[int], exchange: Exchange) -> None:
    """Make some ranks write their packets without reading any."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (one_shot_module, slots_module):
            patch.setattr(module, "target_of", lambda device: INTERPRETER)
        for seat in seats:
            write_only(ranks, seat, exchange)


def test_words_that_did_not_come() -> None:
    with one_kernel(), ranks_of(2, SHORT_S) as ranks:
        found = ranks.one_shot(1).words(torch.arange(20, dtype=torch.int32))
        assert found.tolist() == [[-1] * 20, list(range(20))]


def test_after_a_reset_all_is_well() -> None:
    with ranks_of(3, SHORT_S) as ranks:
        assert starts_anew(ranks)
        with one_kernel():
            ranks.one_shot(0).all_reduce(randn(*SHAPE), SHAPE)
        assert ranks.one_shots.problem() is not None
        ranks.one_shots.reset()
        assert ranks.one_shots.problem() is None
        assert starts_anew(ranks)


def test_rounds_after_a_reset_are_not_those_before() -> None:
    """Packets that a link delivers late belong to no future round."""
    with ranks_of(2, SHORT_S) as ranks:
        slot = ranks.one_shot(1)._end.slots[0]._packets  # type: ignore[attr-defined]
        with one_kernel():
            ranks.one_shot(0).all_reduce(randn(*SHAPE), SHAPE)  # a round that the other one lacks
        late = slot.clone()
        assert ranks.one_shot(0).round == ranks.one_shot(1).round + 1
        ranks.one_shots.reset()
        assert not slot.any()
        assert ranks.one_shot(0).round == ranks.one_shot(1).round
        slot.copy_(late)
        with one_kernel():
            found = ranks.one_shot(1).words(torch.arange(4, dtype=torch.int32))
        assert found.tolist() == [[-1] * 4, [0, 1, 2, 3]], "nothing has come"
        ranks.one_shots.reset()
        assert starts_anew(ranks)


def test_rounds_go_on_beyond_the_largest_number() -> None:
    """Round numbers wrap around, but skip 0, which marks unwritten packets."""
    most = (1 << 31) - 1
    assert fresh_round([7, 9, 8]) == 10
    assert fresh_round([most, most]) == -most - 1
    assert fresh_round([most, -most]) == fresh_round([-most, most]) == -most + 1
    assert fresh_round([-1, -3]) == fresh_round([-2]) == fresh_round([0]) == FIRST_ROUND
    assert fresh_round([]) == FIRST_ROUND


def test_nobody_waits_while_all_are_started_once() -> None:
    """Ranks launch their kernels one after the other; later all-reduces work as usual."""
    with ranks_of(2) as ranks:
        assert starts_anew(ranks)
        with one_kernel(), ranks.one_shots.without_waiting():
            for seat in ranks.group:
                one_shot = patient(ranks.one_shot(seat))
                for exchange in EXCHANGES.values():
                    exchange(one_shot)
                found = one_shot.all_reduce(randn(*SHAPE), SHAPE)
                assert bool(found.isfinite().all())
        assert starts_anew(ranks)


def test_waiting_ends_when_the_host_says_so() -> None:
    with one_kernel(), ranks_of(2) as ranks:
        one_shot = patient(ranks.one_shot(0))
        thread = threading.Thread(target=lambda: EXCHANGES["add_norm"](one_shot))
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive(), "it waits"
        ranks.one_shots.abort()
        thread.join(20)
        assert not thread.is_alive()
        for exchange in EXCHANGES.values():
            exchange(one_shot)
        assert ranks.one_shots.problem() is None, "no rank is to blame"
        ranks.one_shots.reset()
        assert one_shot._end.flags.tolist() == [0, 0]


def test_what_is_made_later_does_not_wait_either() -> None:
    with one_kernel(), ranks_of(2) as ranks:
        ranks.one_shots.abort()
        EXCHANGES["all_reduce"](patient(ranks.one_shot(0)))
    with one_kernel(), ranks_of(2) as ranks, ranks.one_shots.without_waiting():
        EXCHANGES["all_reduce"](patient(ranks.one_shot(0)))


def test_ranks_in_several_groups() -> None:
    """A problem in one group ends waiting in all groups, and is reported once."""
    with one_kernel(), ranks_of(2, SHORT_S) as ranks:
        pair, alone = (0, 1), ranks.one_shots
        wide = OneShotGroups([CPU] * 3, Routes(), None, SHORT_S)
        narrow, all_three = wide.one_shot(0, pair), wide.one_shot(0, (0, 1, 2))
        assert narrow is not None
        assert all_three is not None
        all_three.all_reduce(randn(*SHAPE), SHAPE)
        patient(narrow).all_reduce(randn(*SHAPE), SHAPE)
        problem = wide.problem()
        assert problem is not None
        assert problem.rank == 1
        assert alone.problem() is None


def test_who_waited_itself_is_not_to_blame() -> None:
    with one_kernel():
        one_shots = OneShotGroups([CPU] * 3, Routes(), None, SHORT_S)
        for rank, group in ((0, (0, 1)), (1, (1, 2))):
            one_shot = one_shots.one_shot(rank, group)
            assert one_shot is not None
            one_shot.all_reduce(randn(*SHAPE), SHAPE)
        problem = one_shots.problem()
        assert problem is not None
        assert problem.rank == 2


class Peers(FakeCuda):
    """A fake CUDA driver that allocates memory.

    Attributes:
        allowed: devices that were given peer access, in order.
        allocated: allocated bytes by address.
        owners: devices of the allocations, in order.
    """

    def __init__(self, failing: tuple[str, int] = ("", 0)) -> None:
        super().__init__(failing=failing)
        self.allowed: list[int | None] = []
        self.allocated: dict[int, int] = {}
        self.owners: list[int | None] = []

    def _cuCtxSetCurrent(self, context: object) -> int:  # noqa: N802 as all below: CUDA's
        if not context.value:  # type: ignore[attr-defined]
            self.context = None
        return 0

    def _cuMemAlloc_v2(self, address: object, n_bytes: object) -> int:  # noqa: N802
        address._obj.value = 4096 * (1 + len(self.allocated))  # type: ignore[attr-defined]
        self.allocated[address._obj.value] = n_bytes.value  # type: ignore[attr-defined]
        self.owners.append(self.context)
        return 0

    def _cuMemFree_v2(self, address: object) -> int:  # noqa: N802
        del self.allocated[address.value]  # type: ignore[attr-defined]
        return 0

    def _cuCtxEnablePeerAccess(self, context: object, flags: object) -> int:  # noqa: N802
        self.allowed.append(self.context)
        return 704 if len(self.allowed) > 1 else 0

    def _cuMemHostGetDevicePointer_v2(  # noqa: N802
        self, found: object, address: object, flags: object
    ) -> int:
        found._obj.value = address.value + 1000 * (1 + (self.context or 0))  # type: ignore[attr-defined]
        return 0


CARDS = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Peers:
    peers = Peers()
    monkeypatch.setattr(CudaApi, "open", lambda: CudaApi(peers))
    return peers


def test_slots_in_the_memory_of_a_peer(driver: Peers) -> None:
    slot = new_slot("peer", 100, *CARDS)
    assert driver.allowed == [0], "the one that writes is allowed to"
    assert driver.allocated == {slot.source: 800}
    assert driver.owners == [1], "the one that gets it"
    assert slot.goal == slot.source
    assert driver.context is None, "this thread's context is unchanged"
    assert slot.device_bytes == 800
    driver.calls.clear()
    slot.clear()
    assert driver.calls[-3:-1] == ["cuMemsetD8_v2", "cuCtxSynchronize"]
    second = new_slot("peer", 100, *CARDS)  # access was allowed before
    assert second.goal != slot.goal
    del slot, second
    assert driver.allocated == {}


def test_slots_on_the_host_have_a_place_on_each_device(
    driver: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pinned(slots_module.HostTensor):
        def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
            super().__init__(shape, dtype, CPU)
            self.is_pinned = device.type == "cuda"

    monkeypatch.setattr(slots_module, "HostTensor", Pinned)
    slot = new_slot("host", 100, *CARDS)
    assert slot.goal - slot.source == 1000
    assert slot.device_bytes == 0
    slot.clear()


def test_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver's memory no rank has a one-shot all-reduce."""
    for failing in ("cuCtxEnablePeerAccess", "cuMemAlloc_v2", "cuMemsetD8_v2"):
        peers = Peers((failing, 2))
        monkeypatch.setattr(CudaApi, "open", lambda peers=peers: CudaApi(peers))
        with pytest.raises(EngineError, match=failing):
            new_slot("peer", 100, *CARDS)
        assert peers.allocated == {}
        way = Way("peer", "host")
        one_shots = OneShotGroups(
            CARDS, Routes({("cuda:0", "cuda:1"): way, ("cuda:1", "cuda:0"): way})
        )
        assert one_shots.one_shot(0, (0, 1)) is None
        assert one_shots.one_shot(1, (0, 1)) is None
