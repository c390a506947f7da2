"""Replays of recorded calls read memory at replay time."""

import threading

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.kernels.running import call_log as logs
from engine.backends.cpu.kernels.running.call_log import (
    CHECKED,
    MAX_ARGUMENTS,
    CallLog,
    current_log,
)
from engine.backends.cpu.kernels.running.fastcall import bind
from engine.backends.cpu.kernels.running.replay import KernelReplay
from engine.backends.cpu.kernels.running.thread_all_reduce import ADDED, COMPLETE, ThreadAllReduce
from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.kernels.small.small_ops import SmallOps
from engine.model.forward.recording import recording_to, refuse_replay


def test_calls_are_replayed_in_order() -> None:
    pool, log = ThreadPool(2), CallLog()
    steps = SmallOps(pool)
    x, y = torch.randn(1, 3000), torch.randn(1, 3000)
    steps.pairwise("add", x, y)
    assert log.n_used == 0, "nothing is noted before it is asked for"
    pool.log_calls(log.address)
    total = steps.pairwise("add", x, y)
    assert total is not None
    normal = steps.rms_norm(total, None, None, 1e-5)
    pool.log_calls(0)
    steps.pairwise("multiply", x, y)
    assert log.n_used == len(log.words) == (2 + 5) + (2 + 12)
    replay = KernelReplay(log, pool)
    for _ in range(3):
        x.normal_()
        y.normal_()
        replay.run(0, log.n_used)
        assert torch.equal(total, x + y)
        expected = SmallOps(pool).rms_norm(total, None, None, 1e-5)
        assert expected is not None
        assert torch.equal(normal, expected)
    x.normal_()
    before = normal.clone()
    replay.run(0, 7)
    assert torch.equal(total, x + y)
    assert torch.equal(normal, before), "that call was left out"


def test_replayed_time_counts_for_the_pool() -> None:
    pool, log = ThreadPool(1), CallLog()
    steps, x = SmallOps(pool), torch.randn(1, 60_000)
    pool.log_calls(log.address)
    kept = [steps.pairwise("add", x, x) for _ in range(200)]
    pool.log_calls(0)
    before = pool.kernel_s
    KernelReplay(log, pool).run(0, log.n_used)
    if before is not None:
        assert pool.kernel_s > before + len(kept) * 1e-7


def test_a_full_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WORDS", 20)
    pool, log, x = ThreadPool(1), CallLog(), torch.randn(4)
    pool.log_calls(log.address)
    for _ in range(3):
        SmallOps(pool).pairwise("add", x, x)
    pool.log_calls(0)
    log.add_checked(1, [2, 3], lambda: None)
    log.check_room()
    assert "too many" in log.refusal
    assert not log.finishes


def test_the_first_refusal_counts_for_the_current_log_only() -> None:
    refuse_replay("nobody listens")
    log = CallLog()
    with recording_to(log):
        assert current_log() is log
        with recording_to(None):
            refuse_replay("not now")
        thread = threading.Thread(target=refuse_replay, args=("elsewhere",))
        thread.start()
        thread.join()
        assert log.refusal == ""
        refuse_replay("first")
        refuse_replay("second")
    assert log.refusal == "first"
    assert current_log() is None


def test_the_number_of_arguments_is_limited() -> None:
    bind(1, MAX_ARGUMENTS, holds_gil=True)
    with pytest.raises(AssertionError, match="replay"):
        bind(1, MAX_ARGUMENTS + 1, holds_gil=True)


class Seat:
    """One of two members that replay an all-reduce repeatedly."""

    def __init__(self, board: ThreadAllReduce, seat: int, turns: int) -> None:
        self.pool, self.log = ThreadPool(1), CallLog()
        self.x, self.out = torch.zeros(5), torch.zeros(5)
        self.n_finished = 0
        self._board, self._seat = board, seat
        places = self.x.data_ptr(), 5, self.out.data_ptr()
        board.record(self.log, seat, *places, turns, self._finish)
        self._places = places

    def _finish(self) -> None:
        self.n_finished += 1
        found = 0
        while not found & COMPLETE:
            number = self._board.round(self._seat)
            found = self._board.all_reduce(self._seat, number, *self._places, 1000)
        assert found & ADDED

    def run(self, number: int) -> Tensor:
        self.x.fill_(number)
        KernelReplay(self.log, self.pool).run(0, self.log.n_used)
        return self.out


@pytest.mark.parametrize("turns", [1, 1 << 30], ids=["stops", "waits"])
def test_replayed_all_reduces_use_new_rounds(turns: int) -> None:
    board, everyone = ThreadAllReduce(2), threading.Barrier(2)
    sums: list[list[float]] = [[], []]
    seats = [Seat(board, n, turns) for n in range(2)]

    def work(seat: int) -> None:
        for number in range(300):
            everyone.wait(60)  # the last round's values are not read
            sums[seat].append(float(seats[seat].run((seat + 1) * number).mean()))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == [[3.0 * n for n in range(300)]] * 2
    assert board.round(0) == board.round(1) == 300
    if turns > 1:
        assert seats[0].n_finished == seats[1].n_finished == 0
    assert int(seats[0].log.words[1]) == CHECKED + 7
