"""Network namespaces joined by a wire that delays, limits and drops packets.

Each namespace has a TAP device, and a process passes frames between them, as `tc netem` would: that
is missing from many kernels, TAP devices are not. It takes root, or rights like it.

    python -m tests.helpers.wire NAMESPACE... --delay-ms 1 --mbit 1000 --loss 0.01
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
DEVICE = "wire0"
MAX_FRAME = 2048
QUEUE_S = 0.05
"""Seconds of packets that wait for the wire before more are dropped, like a switch's memory."""


class WireKind(NamedTuple):
    """What a wire does to packets, each way between any two namespaces.

    Attributes:
        delay_s: seconds that each packet takes.
        bits_per_s: most bits per second into one namespace.
        loss: part of the packets that is lost.
    """

    delay_s: float = 0.0
    bits_per_s: float = 1e9
    loss: float = 0.0


class Node(NamedTuple):
    """A namespace on the wire, and its address there."""

    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs in the namespace."""
        return ["ip", "netns", "exec", self.namespace, *command]


def can_wire() -> bool:
    """Return whether namespaces and TAP devices can be made here."""
    name = f"tandem-try-{os.getpid()}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return False
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def wired(n: int, kind: WireKind, net: int = 77) -> Iterator[list[Node]]:
    """Have n namespaces on a wire of one kind.

    Args:
        net: second number of their addresses, 10.NET.0.1 and so on.
    """
    nodes = [Node(f"tandem-{os.getpid()}-{net}-{i}", f"10.{net}.0.{i + 1}") for i in range(n)]
    switch = None
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.namespace)
        switch = subprocess.Popen(
            [
                sys.executable, "-m", "tests.helpers.wire", *(node.namespace for node in nodes),
                "--delay-ms", str(1e3 * kind.delay_s), "--mbit", str(kind.bits_per_s / 1e6),
                "--loss", str(kind.loss),
            ],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert switch.stdout is not None
        assert switch.stdout.readline().strip() == "ready"
        for node in nodes:
            _run(*node.command("ip", "addr", "add", f"{node.address}/24", "dev", DEVICE))
            for device in ("lo", DEVICE):
                _run(*node.command("ip", "link", "set", device, "up"))
        yield nodes
    finally:
        if switch is not None:
            switch.kill()
            switch.communicate()
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def open_tap(namespace: str) -> int:
    """Make the TAP device of a namespace; return the file that has its frames."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as own, Path("/run/netns", namespace).open() as other:
        assert libc.setns(other.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TAP | IFF_NO_PI))
        finally:
            assert libc.setns(own.fileno(), CLONE_NEWNET) == 0
    return tap


class Switch:
    """A switch whose cables delay, limit and drop packets."""

    def __init__(self, taps: Sequence[int], kind: WireKind) -> None:
        self._taps, self._kind = taps, kind
        self._place: dict[bytes, int] = {}  # of a hardware address
        self._free_at = dict.fromkeys(taps, 0.0)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._numbers, self._random = count(), random.Random(1)

    def run(self) -> None:
        """Pass frames on until the end of the process."""
        poll = select.epoll()
        for tap in self._taps:
            poll.register(tap, select.EPOLLIN)
        while True:
            left = self._waiting[0][0] - time.monotonic() if self._waiting else 1.0
            if left > 0:
                # epoll counts in milliseconds, and a wait that is too long would add to the delay
                for tap, _ in poll.poll(left if left > 2e-3 else 0):
                    self._take(tap)
            self._give()

    def _take(self, tap: int) -> None:
        """Read the frames of a namespace."""
        for _ in range(64):
            try:
                frame = os.read(tap, MAX_FRAME)
            except (BlockingIOError, OSError):
                return
            self._place[frame[6:12]] = tap
            goal = self._place.get(frame[:6])
            for target in [t for t in self._taps if t != tap] if goal is None else [goal]:
                self._send(target, frame)

    def _send(self, target: int, frame: bytes) -> None:
        """Put a frame on the cable of a namespace, unless it gets lost."""
        now, kind = time.monotonic(), self._kind
        begin = max(now, self._free_at[target])
        if self._random.random() < kind.loss or begin - now > QUEUE_S:
            return
        self._free_at[target] = begin + 8 * len(frame) / kind.bits_per_s
        due = self._free_at[target] + kind.delay_s
        heapq.heappush(self._waiting, (due, next(self._numbers), target, frame))

    def _give(self) -> None:
        """Write the frames that have arrived."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._waiting)
            try:
                os.write(target, frame)
            except OSError:  # the device is down
                continue


def main() -> None:
    """Pass frames between namespaces."""
    parser = argparse.ArgumentParser()
    parser.add_argument("namespaces", nargs="+")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--loss", type=float, default=0.0)
    options = parser.parse_args()
    taps = [open_tap(name) for name in options.namespaces]
    print("ready", flush=True)  # noqa: T201
    Switch(taps, WireKind(options.delay_ms / 1e3, options.mbit * 1e6, options.loss)).run()


if __name__ == "__main__":
    main()
