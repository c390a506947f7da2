"""A Debian root of its own, in which packages are installed and started as on a new computer."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
PERSON = "anna"
ROOT_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}


class Root:
    """A folder with a Debian.

    To be used inside namespaces of mounts and processes of its own (`enter_namespaces`): whatever
    is mounted or still runs then ends with them, however the proof ends.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}

    def make(self, suite: str, base: Path | None) -> None:
        """Make the root by debootstrap, or copy one that was made before.

        Raises:
            SystemExit: debootstrap fails.
        """
        if base is not None:
            subprocess.run(["cp", "-a", f"{base}/.", str(self.folder)], check=True)
        else:
            command = ["debootstrap", "--variant=minbase", suite, str(self.folder), mirror()]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"debootstrap has failed:\n{done.stdout[-2000:]}")
        shutil.copyfile("/etc/resolv.conf", self.folder / "etc" / "resolv.conf")
        for kind, place in (("proc", "proc"), ("tmpfs", "dev/shm"), ("devpts", "dev/pts")):
            (self.folder / place).mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", kind, kind, str(self.folder / place)], check=True)
        self.run("useradd", "--create-home", "--shell", "/bin/sh", PERSON)

    def leave(self) -> None:
        """End what runs in the root and unmount what is mounted there."""
        for path in Path("/proc").glob("[0-9]*/root"):
            try:
                if path.readlink() == self.folder:
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:  # gone by now
                continue
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in reversed([one for one in mounts if one.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "--lazy", place], check=True)

    @property
    def home(self) -> Path:
        """The person's home, as this side sees it."""
        return self.folder / "home" / PERSON

    def run(self, *command: str, timeout: float = 600) -> str:
        """Run a program as root; return what it prints.

        Raises:
            AssertionError: it fails.
        """
        return _checked(self._command(command, "0:0", ROOT_ENVIRONMENT), timeout)

    def run_as_person(self, *command: str, timeout: float = 600) -> str:
        """Run a program as the person, inside the desktop; return what it prints.

        Raises:
            AssertionError: it fails.
        """
        return _checked(self._command(command, self._ids(), self._of_person()), timeout)

    def start_as_person(self, log: Path, *command: str) -> subprocess.Popen[bytes]:
        """Start a program as the person; what it prints goes into a file."""
        line = self._command(command, self._ids(), self._of_person())
        with log.open("ab") as file:
            return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def _of_person(self) -> dict[str, str]:
        home = f"/home/{PERSON}"
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "USER": PERSON, "LOGNAME": PERSON,
            "LANG": "C.UTF-8", **self.environment,
        }  # fmt: skip

    def _ids(self) -> str:
        stat = self.home.stat()
        return f"{stat.st_uid}:{stat.st_gid}"

    def _command(
        self, command: tuple[str, ...], ids: str, environment: Mapping[str, str]
    ) -> list[str]:
        words = [f"{name}={value}" for name, value in environment.items()]
        return [
            "chroot", f"--userspec={ids}", "--groups=", str(self.folder),
            "/usr/bin/env", "-i", "-C", environment["HOME"], *words, *command,
        ]  # fmt: skip


def enter_namespaces(command: list[str]) -> None:
    """Run this program again with mounts and processes of its own, unless it does already."""
    if os.environ.get("TANDEM_PROOF") == "inside":
        return
    os.environ["TANDEM_PROOF"] = "inside"
    options = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    os.execvp("unshare", ["unshare", *options, *command])


def leave_network() -> None:
    """Cut this process and those it starts off from every network; the loopback stays.

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "the network cannot be left")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def mirror() -> str:
    """Return the mirror of Debian that this machine uses; it has all versions.

    Raises:
        SystemExit: apt knows none.
    """
    form = "$(CODENAME) $(ORIGIN) $(COMPONENT) $(REPO_URI)"
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", form], capture_output=True, text=True, check=True
    )
    found = re.search(r"^\w+ Debian main (\S+)$", done.stdout, re.MULTILINE)  # not -updates etc.
    if found is None:
        raise SystemExit("apt knows no mirror of Debian. Run `apt-get update`, or give --base.")
    return found[1]


def _checked(command: list[str], timeout: float) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", timeout=timeout, check=False,
    )  # fmt: skip
    words = " ".join(word for word in command[7:] if not re.match(r"[A-Z_]+=", word))
    assert done.returncode == 0, f"{words}\nended with {done.returncode}:\n{done.stdout[-3000:]}"
    return done.stdout
