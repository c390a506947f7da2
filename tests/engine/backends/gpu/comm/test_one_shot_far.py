"""Slots in host memory: few packets are polled over the link, and all are read once these came."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.backends.gpu import elementwise
from engine.backends.gpu.comm import one_shot as one_shot_module
from engine.backends.gpu.comm import slots
from engine.backends.gpu.elementwise import warps_of
from engine.backends.gpu.kernels import one_shot as kernels
from engine.errors import CommError
from engine.model.forward.operands import Addend
from tests.helpers.one_shot import (
    Ranks,
    alike,
    expected,
    one_kernel,
    randn,
    ranks_of,
    values_of,
    write_only,
)

N = 1200
"""Elements of a value: 600 pairs of packets, in a program of 2048 elements."""

N_PAIRS, N_PROBES = N // 2, -(-N // 2 // (1024 // warps_of(2048)))
"""Pairs of packets of a member, and how many of them are polled."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of pairs of packets that kernels read at a time, from slots that count as far."""
    found: list[int] = []
    read_pair = kernels.read_pair

    def counted(address: Any, mask: Any, asm: Any) -> Any:
        found.append(int(mask.handle.data.sum()))
        return read_pair(address, mask, asm)

    monkeypatch.setattr(kernels, "read_pair", counted)
    monkeypatch.setattr(slots._OnDevice, "is_far", True)
    return found


def awaited(reads: Sequence[int]) -> list[int]:
    """Return the numbers of pairs read from the other of two members."""
    return [n for n in reads if n]


def test_all_pairs_are_read_once_few_have_come(reads: list[int]) -> None:
    values = values_of(2, (N,), (), 1)
    with ranks_of(2) as ranks:
        write_only(ranks, 1, lambda one_shot: one_shot.all_reduce(values[1], (N,)))
        with one_kernel():
            found = ranks.one_shot(0).all_reduce(values[0], (N,))
    assert alike([found], expected(values))
    assert awaited(reads) == [N_PROBES, N_PAIRS]
    assert warps_of(2048) >= N_PROBES


def test_few_are_polled_while_none_comes(reads: list[int]) -> None:
    with one_kernel(), ranks_of(2, 20e-6) as ranks:
        ranks.one_shot(0).all_reduce(randn(N), (N,))
        problem = ranks.one_shots.problem()
    assert isinstance(problem, CommError)
    assert problem.rank == 1
    assert len(awaited(reads)) > 5
    assert set(awaited(reads)) == {N_PROBES}


def test_a_pair_that_comes_later_is_awaited(reads: list[int]) -> None:
    """No value is taken from packets that a poll did not find."""
    values = values_of(2, (N,), (), 1)
    with ranks_of(2, 20e-6) as ranks:
        write_only(ranks, 1, lambda one_shot: one_shot.all_reduce(values[1], (N,)))
        packets = ranks.one_shot(0)._end.slots[0]._packets  # type: ignore[attr-defined]
        half = packets[one_shot_module.SLOT :]
        late = one_shot_module.HEADER + 2 * (N_PAIRS - 1)
        assert int(half[late]) >> 32 == 1, "the last pair of the first round"
        half[late] = 0
        with one_kernel():
            ranks.one_shot(0).all_reduce(values[0], (N,))
        assert isinstance(ranks.one_shots.problem(), CommError)
    assert awaited(reads)[:3] == [N_PROBES, N_PAIRS, N_PAIRS]


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("most_in_f32", [3, 1 << 20], ids=["bf16", "f32"])
@pytest.mark.parametrize(("n", "empty"), [(2, ()), (2, (0,)), (3, (2,)), (5, (0, 3))])
def test_values_are_the_same_from_afar(
    n: int, empty: Sequence[int], most_in_f32: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_shot_module, "MAX_IN_F32", most_in_f32)
    with ranks_of(n) as ranks:
        for seed, shape in enumerate([(1, 32), (2, 150)]):
            values = values_of(n, shape, empty, seed)
            assert alike(ranks.sums(values, shape), expected(values))
            words = torch.arange(300, dtype=torch.int32)
            found = ranks.all(lambda one_shot: one_shot.words(words + one_shot.seat))  # noqa: B023
            wanted = torch.stack([words + seat for seat in range(n)])
            assert all(torch.equal(one, wanted) for one in found)  # type: ignore[arg-type]
            _check_norm(ranks, values, shape)


def _check_norm(ranks: Ranks, values: Sequence[torch.Tensor | None], shape: Sequence[int]) -> None:
    """Check a sum together with the addition and norm in its kernel."""
    x = randn(*shape, seed=9)
    found = ranks.all(lambda one_shot: one_shot.add_norm(x, Addend(values[one_shot.seat]), None))
    wanted = elementwise.add_norm(x, Addend(expected(values)), None)
    assert wanted is not None
    assert alike([one[0] for one in found], wanted[0])  # type: ignore[index]


def test_where_slots_lie() -> None:
    """Only host memory is far: a peer's slot is on the device that reads it."""
    assert slots._OnHost.is_far
    assert not slots._OnPeer.is_far
    assert not slots._OnDevice.is_far
