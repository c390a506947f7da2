"""Programs that Tandem starts end with it, and are its own ones, whatever lies around."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.util import programs
from engine.util.programs import (
    KILL_ON_JOB_CLOSE,
    ExtendedLimits,
    JobObject,
    child_environment,
    program_command,
    tie_child,
)

JOB, PROCESS = 77, 88


class FakeKernel32:
    """Windows' kernel32 with one job; it notes what is done.

    Args:
        missing: name of a function that fails.
    """

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self.members: list[int] = []
        self.flags = 0
        self.open: list[int] = []
        self.pids: dict[int, int] = {}

    def CreateJobObjectW(self, security: None, name: None) -> int:  # noqa: N802
        return 0 if self.missing == "CreateJobObjectW" else JOB

    def SetInformationJobObject(self, job: int, kind: int, limits: Any, size: int) -> int:  # noqa: N802
        assert (job, kind, size) == (JOB, 9, ctypes.sizeof(ExtendedLimits))
        self.flags = limits._obj.basic.flags
        return self.missing != "SetInformationJobObject"

    def OpenProcess(self, rights: int, is_inherited: bool, pid: int) -> int:  # noqa: N802
        assert rights & 0x0101 == 0x0101
        assert not is_inherited
        if self.missing == "OpenProcess":
            return 0
        self.open.append(PROCESS)
        self.pids[PROCESS] = pid
        return PROCESS

    def AssignProcessToJobObject(self, job: int, process: int) -> int:  # noqa: N802
        assert job == JOB
        if self.missing == "AssignProcessToJobObject":
            return 0
        self.members.append(self.pids[process])
        return 1

    def CloseHandle(self, handle: int) -> int:  # noqa: N802
        self.open.remove(handle)
        return 1


def test_windows_ends_the_members_of_a_job_with_its_last_handle() -> None:
    kernel32 = FakeKernel32()
    job = JobObject(kernel32)
    assert kernel32.flags == KILL_ON_JOB_CLOSE == 0x2000  # JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    job.add(1234)
    job.add(1235)
    assert kernel32.members == [1234, 1235]
    assert kernel32.open == [], "handles of processes are closed, that of the job is not"


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="offsets of 64-bit Windows")
def test_the_limits_are_laid_out_as_in_windows_headers() -> None:
    assert ctypes.sizeof(ExtendedLimits) == 144
    assert ExtendedLimits.basic.offset == 0
    assert ExtendedLimits.io_counters.offset == 64
    assert type(ExtendedLimits().basic).flags.offset == 16


@pytest.mark.parametrize(
    "missing",
    ["CreateJobObjectW", "SetInformationJobObject", "OpenProcess", "AssignProcessToJobObject"],
)
def test_a_system_without_jobs_starts_programs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    kernel32 = FakeKernel32(missing)
    monkeypatch.setattr(programs, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(programs, "own_job", lambda: JobObject(kernel32))
    tie_child(1234)
    assert kernel32.members == kernel32.open == []


def test_children_are_tied_on_windows_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel32 = FakeKernel32()
    monkeypatch.setattr(programs, "own_job", lambda: JobObject(kernel32))
    tie_child(1)
    assert kernel32.members == []
    monkeypatch.setattr(programs, "sys", SimpleNamespace(platform="win32"))
    tie_child(1234)
    assert kernel32.members == [1234]


@pytest.mark.parametrize(
    "module", ["engine.hosts.process.child", "engine.util.sandbox", "engine.hardware.trial_process"]
)
def test_every_kind_of_child_is_tied(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    from engine.hardware.trial_process import TrialProcess
    from engine.hosts.process.child import EngineProcess
    from engine.text.chat_template import COMMAND
    from engine.util.sandbox import LimitedChild

    tied: list[int] = []
    monkeypatch.setattr(f"{module}.tie_child", tied.append)
    ends_at_once = sys.executable, "-c", "pass"
    if module == "engine.hosts.process.child":
        process = EngineProcess(ends_at_once, lambda message, error: None)
        assert tied == [process.pid]
        process.bury()
    elif module == "engine.util.sandbox":
        child = LimitedChild(COMMAND, 1 << 29)
        assert tied == [child.pid]
        child.close()
    else:
        with TrialProcess(ends_at_once, {}, {}):
            assert len(tied) == 1


DEAF_CHILD = """
import time
from engine.util.programs import tie_to_parent
tie_to_parent()
print(0, flush=True)
time.sleep(600)
"""

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="means of Linux")
def test_linux_ends_a_child_that_listens_to_nothing_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, DEAF_CHILD]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=child_environment(), text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        psutil.wait_procs([child], 20)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_nothing_in_the_working_directory_is_imported(tmp_path: Path) -> None:
    """A folder of downloads may hold a file with a module's name."""
    for name in ("json.py", "jinja2.py", "logging.py", "engine.py"):
        (tmp_path / name).write_text("raise SystemExit(3)")
    ended = subprocess.run(
        program_command("engine.text.templates.program"),
        cwd=tmp_path, env=child_environment(), input=b"", check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0
