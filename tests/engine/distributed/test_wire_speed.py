"""Measured links between machines: latency, mean and bandwidth of wires whose speed is known."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from torch import Tensor

from engine.distributed import straight_proof as wire_speed
from engine.distributed.straight_proof import measure_wires
from engine.distributed.wire import Parcel
from engine.planning.speed.facts import WireSpeed
from tests.helpers.queue_wires import Queues, QueueWire

DELAY_S, BYTES_PER_S = 2e-3, 200e6


class Clock:
    """A clock that goes on as tensors are sent, so that no other program slows it down."""

    def __init__(self) -> None:
        self._seconds, self._lock = 0.0, threading.Lock()

    def wait(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds

    def now(self) -> float:
        return self._seconds


class SlowWire(QueueWire):
    """A wire on which tensors take a known time; now and then one takes much longer."""

    every = 0

    def __init__(self, queues: Queues, rank: int, clock: Clock) -> None:
        super().__init__(queues, rank)
        self._n, self._clock = 0, clock

    def swap(self, out: Sequence[Parcel], into: Sequence[Parcel], tag: int = 0) -> None:
        for _, tensor in out:
            self._n += 1
            is_lost = self.every and self._n % self.every == 0
            self._clock.wait((20 if is_lost else 1) * DELAY_S + _large(tensor) / BYTES_PER_S)
        super().swap(out, into, tag)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Measure by a clock of the wires, for less time than between real machines."""
    made = Clock()
    monkeypatch.setattr(wire_speed, "time", SimpleNamespace(perf_counter=made.now))
    for name, seconds in (("USUAL_S", 0.1), ("MAX_TRIAL_S", 0.6), ("LARGE_S", 0.1)):
        monkeypatch.setattr(wire_speed, name, seconds)
    return made


def _large(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.nbytes > 4096 else 0


def measured(clock: Clock, n: int, every: int = 0) -> list[tuple[WireSpeed, ...]]:
    queues, found = Queues(["cpu"] * n), list[tuple[WireSpeed, ...]]()

    def run(rank: int) -> None:
        wire = SlowWire(queues, rank, clock)
        wire.every = every
        found.append(measure_wires(wire))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_all_machines_know_all_links(clock: Clock) -> None:
    found = measured(clock, 3)
    assert found[0] == found[1] == found[2]
    assert [(one.a, one.b) for one in found[0]] == [(0, 1), (0, 2), (1, 2)]
    for one in found[0]:
        assert one.latency_s == pytest.approx(DELAY_S)
        assert one.bytes_per_s == pytest.approx(BYTES_PER_S)
        assert one.facts.latency_s == one.mean_s
        # each side sends once, maybe before the other has begun to measure, or while a third one
        # tells what it knows
        assert 1.8 * DELAY_S < one.exchange_s < 2.5 * DELAY_S


def test_single_slow_messages_raise_the_mean_alone(clock: Clock) -> None:
    one = measured(clock, 2, every=20)[0][0]
    assert one.latency_s == pytest.approx(DELAY_S)
    assert one.mean_s == pytest.approx(1.95 * DELAY_S, rel=0.1)  # 20 times as long for one of 20
