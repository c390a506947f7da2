"""Machines of a test: network namespaces on a bridge, or addresses of the loopback interface."""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

PREFIX = "tandem-test-"
"""What the names of all namespaces of tests begin with; the id of the test's process follows."""

HOSTS = Path("/etc/netns")
"""Folder with the files that `ip netns exec` shows in place of those of /etc, by namespace."""

CLONE_NEWNET = 0x40000000

_IN_NAMESPACE = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')


class Place(NamedTuple):
    """Where a process of a test runs.

    Attributes:
        address: its address for the other machines.
        prefix: words before the command lines of its programs.
        namespace: name of its network namespace; "" for none.
    """

    address: str
    prefix: tuple[str, ...] = ()
    namespace: str = ""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, and those that it starts, connect from this place."""
        if not self.namespace:
            yield
            return
        with Path("/proc/thread-self/ns/net").open() as before:
            with (Path("/run/netns") / self.namespace).open() as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())


def _enter(descriptor: int) -> None:
    """Move this thread to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "this thread cannot enter the namespace")


class Network:
    """Network namespaces with an Ethernet each, joined by a bridge in a namespace of its own.

    Each is a machine with a name, which its hosts file maps to 127.0.1.1 as Debian does.

    Args:
        n: number of machines.

    Attributes:
        places: the machines.

    Raises:
        OSError: the system does not permit it, or lacks a program; nothing is left behind.
    """

    def __init__(self, n: int) -> None:
        _remove_old()
        self._names = [f"{PREFIX}{os.getpid()}-{number}" for number in range(n)]
        self._hub = f"{PREFIX}{os.getpid()}-hub"
        try:
            self._make_hub()
            self.places = [self._made(number) for number in range(n)]
            ran = [*self.places[0].prefix, "true"]
            subprocess.run(ran, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            self.remove()
            raise OSError(error.stderr.strip()) from None
        except BaseException:
            self.remove()
            raise

    def _make_hub(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")

    def _made(self, number: int) -> Place:
        """Make a machine."""
        name, host, address = self._names[number], f"machine{number}", f"10.77.0.{number + 1}"
        _ip("netns", "add", name)
        port = f"port{number}"
        _ip("link", "add", port, "netns", self._hub, "type", "veth", "peer", "eth0", "netns", name)
        _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _ip("-n", name, "link", "set", interface, "up")
        (HOSTS / name).mkdir(parents=True)
        (HOSTS / name / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
        return Place(address, ("ip", "netns", "exec", name, *_IN_NAMESPACE, host), name)

    def cut(self, number: int) -> None:
        """Pull the cable of a machine."""
        _ip("-n", self._hub, "link", "set", f"port{number}", "down")

    def mend(self, number: int) -> None:
        """Put the cable of a machine back."""
        _ip("-n", self._hub, "link", "set", f"port{number}", "up")

    def remove(self) -> None:
        """Remove it with all processes in it; safe to call twice."""
        for name in (*self._names, self._hub):
            _remove(name)


@contextmanager
def network(n: int) -> Iterator[Network]:
    """Have machines on a bridge, which are removed at the end.

    Raises:
        OSError: see `Network`.
    """
    made = Network(n)
    try:
        yield made
    finally:
        made.remove()


def loopback(n: int) -> Sequence[Place]:
    """Return places on this machine with addresses of their own."""
    return [Place(f"127.0.0.{number + 1}") for number in range(n)]


def _ip(*words: str) -> str:
    """Run `ip`; return what it says."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _remove(name: str) -> None:
    """Remove a namespace, its processes and its hosts file, as far as there are any."""
    if (Path("/run/netns") / name).exists():
        for pid in _ip("netns", "pids", name).split():
            with suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", name)
    shutil.rmtree(HOSTS / name, ignore_errors=True)


def _remove_old() -> None:
    """Remove what processes have left that were killed."""
    for found in Path("/run/netns").glob(f"{PREFIX}*"):
        pid = found.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _remove(found.name)
