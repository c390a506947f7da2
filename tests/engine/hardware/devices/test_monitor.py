"""The host's figures, and all devices over time, with a made-up NVIDIA driver."""

import os
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest

from engine.errors import NoDevice
from engine.hardware.devices import host
from engine.hardware.devices.catalog import list_devices
from engine.hardware.devices.host import OwnProcesses
from engine.hardware.devices.monitor import DeviceMonitor
from tests.helpers.fake_nvml import CODES, GIB, FakeDriver, install, no_gpus, three_gpus

NOBODY = 1 << 22  # above the numbers that Linux gives
IDLE = "import sys; sys.stdin.read()"
"""A program that waits until its standard input is closed."""


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    return install(three_gpus(), monkeypatch)


@pytest.fixture
def no_driver(monkeypatch) -> FakeDriver:
    return install(no_gpus(), monkeypatch)


# --- the host


def test_the_cpu_is_described():
    cpu = list_devices()[-1]
    assert (cpu.id, cpu.kind, cpu.usable, cpu.reason) == ("cpu", "cpu", True, "")
    assert 0 < cpu.free_bytes <= cpu.total_bytes == psutil.virtual_memory().total
    assert 1 <= cpu.n_cores <= psutil.cpu_count()
    assert cpu.name.strip()


def test_a_bound_process_counts_only_its_own_processors(monkeypatch):
    monkeypatch.setattr(host.psutil, "cpu_count", lambda logical=True: 8)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {0, 3}, raising=False)
    assert host.usable_cores() == 2


def test_the_name_comes_from_cpuinfo_on_linux(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast   CPU 9000\nflags\t: avx2\n")
    monkeypatch.setattr(host, "CPUINFO", cpuinfo)
    monkeypatch.setattr(host.sys, "platform", "linux")
    assert host.cpu_name() == "Fast CPU 9000"


def test_the_name_falls_back_to_the_architecture(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "absent")
    monkeypatch.setattr(host.sys, "platform", "linux")
    monkeypatch.setattr(host.platform, "processor", lambda: "")
    monkeypatch.setattr(host.platform, "machine", lambda: "riscv64")
    assert host.cpu_name() == "riscv64"


def test_the_name_is_asked_of_sysctl_on_macos(monkeypatch):
    def run(command, **options):
        assert command[-1] == "machdep.cpu.brand_string"
        return types.SimpleNamespace(stdout="Apple M9\n")

    monkeypatch.setattr(host.sys, "platform", "darwin")
    monkeypatch.setattr(host.subprocess, "run", run)
    assert host.cpu_name() == "Apple M9"


def test_a_mac_without_sysctl_still_has_a_name(monkeypatch):
    def run(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(host.sys, "platform", "darwin")
    monkeypatch.setattr(host.subprocess, "run", run)
    assert host.cpu_name()


def test_load_is_the_busy_share_since_the_last_reading(monkeypatch):
    """Guest time is part of user time, and waiting for a disk is not work."""

    class Times(types.SimpleNamespace):
        def _asdict(self):
            return vars(self)

    readings = iter(
        [
            Times(user=10.0, system=5.0, idle=100.0, iowait=5.0, guest=3.0),
            Times(user=12.0, system=6.0, idle=106.0, iowait=6.0, guest=4.0),
            Times(user=12.0, system=6.0, idle=106.0, iowait=6.0, guest=4.0),
        ]
    )
    monkeypatch.setattr(host.psutil, "cpu_times", lambda: next(readings))
    reader = host.CpuReader()
    assert reader.read().load_percent == pytest.approx(30.0)
    assert reader.read().load_percent is None


def test_the_load_of_other_programs_leaves_out_this_one_and_its_children(monkeypatch):
    readings = iter([(10.0, 20.0), (14.0, 30.0), (16.0, 40.0)])
    monkeypatch.setattr(host, "_cpu_seconds", lambda: next(readings))
    own = types.SimpleNamespace(busy_seconds=lambda: 3.0)
    reader = host.CpuReader(own)
    assert reader.read().others_percent == pytest.approx(10.0)
    assert reader.read().others_percent == 0  # counters that tick apart


def test_own_processor_time_counts_that_of_children():
    code = "import sys, time; s = time.process_time()\n"
    code += "while time.process_time() < s + 0.3: pass\nsys.stdin.read()"
    own = OwnProcesses()
    own.busy_seconds()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        own._looked_s = -1e9  # as if a few seconds had passed
        assert own.pids() >= {os.getpid(), child.pid}
        own.busy_seconds()
        deadline = time.monotonic() + 20
        used = 0.0
        while used < 0.25 and time.monotonic() < deadline:
            time.sleep(0.05)
            used += own.busy_seconds()
        assert used >= 0.25
    finally:
        child.communicate()


@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        ({"coretemp": [("Core 0", 50.0), ("Package id 0", 61.0)]}, 61.0),
        ({"nvme": [("Composite", 40.0)], "k10temp": [("Tccd1", 44.0), ("Tctl", 58.5)]}, 58.5),
        ({"cpu_thermal": [("", 47.0)]}, 47.0),
        ({"nvme": [("Composite", 40.0)]}, None),
        ({}, None),
    ],
)
def test_the_cpus_temperature_is_that_of_its_package(monkeypatch, sensors, expected):
    found = {
        driver: [types.SimpleNamespace(label=name, current=value) for name, value in entries]
        for driver, entries in sensors.items()
    }
    monkeypatch.setattr(host.psutil, "sensors_temperatures", lambda: found, raising=False)
    monkeypatch.setattr(host.psutil, "cpu_freq", lambda: types.SimpleNamespace(current=4211.6))
    got = host.CpuReader().read()
    assert (got.temperature_c, got.clock_mhz) == (expected, 4212)


def test_a_system_without_such_sensors_has_neither_temperature_nor_clock(monkeypatch):
    monkeypatch.delattr(host.psutil, "sensors_temperatures", raising=False)
    monkeypatch.setattr(host.psutil, "cpu_freq", lambda: None)
    got = host.CpuReader().read()
    assert (got.temperature_c, got.clock_mhz) == (None, None)


# --- the monitor


def test_a_snapshot_holds_every_device_once(driver):
    with DeviceMonitor(["cuda:1", "cpu", "cuda:1", "cpu"]) as monitor:
        assert [s.device for s in monitor.snapshot()] == ["cuda:1", "cpu"]
    with DeviceMonitor() as monitor:
        assert [s.device for s in monitor.snapshot()] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert driver.n_open == 0


def test_a_gpus_snapshot_carries_its_figures(driver):
    process = types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB)
    driver.named("RTX 3060").processes = [process]
    with DeviceMonitor(["cuda:0"]) as monitor:
        (got,) = monitor.snapshot()
    assert (got.used_bytes, got.free_bytes, got.total_bytes) == (GIB, 11 * GIB, 12 * GIB)
    assert (got.load_percent, got.temperature_c, got.power_w) == (42, 61, 215.5)
    assert (got.own_bytes, got.clock_mhz, got.problem) == (3 * GIB, 2520, "")
    assert (got.power_limit_w, got.memory_clock_mhz, got.clock_limits) == (450, 10501, ())
    assert (got.sent_bytes_s, got.received_bytes_s) == (None, None)


def test_only_regular_readings_have_the_traffic(driver):
    """The driver takes 40 ms for it, which a caller of `snapshot` would wait for."""
    received, came = [], threading.Event()

    def on_snapshots(snapshots):
        received.extend(snapshots)
        came.set()

    with DeviceMonitor(["cuda:0"]) as monitor:
        monitor.start(on_snapshots, interval_s=3600)
        assert came.wait(5)
    assert (received[0].sent_bytes_s, received[0].received_bytes_s) == (1_500_000, 2_000_000_000)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x01, ()),  # idle
        (0x04, ("power",)),
        (0x08, ("hardware",)),
        (0x08 | 0x40, ("heat",)),
        (0x08 | 0x80, ("supply",)),
        (0x20 | 0x04 | 0x100, ("power", "heat", "setting")),
        (0x10, ()),  # boards that run in step
    ],
)
def test_what_keeps_a_clock_down_is_told(driver, bits, expected):
    gpu = driver.named("RTX 3060")
    gpu.clock_events = bits
    with DeviceMonitor(["cuda:0"]) as monitor:
        assert monitor.snapshot()[0].clock_limits == expected
        gpu.errors = {"events": 3}  # a driver before 535
        assert monitor.snapshot()[0].clock_limits == expected


def test_the_memory_of_other_programs_leaves_out_this_ones_children(driver, monkeypatch):
    """The window's engine is a child; other programs may also hold memory for graphics."""
    child = subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE)
    gpu = driver.named("RTX 3060")
    gpu.processes = [held(os.getpid(), 3), held(child.pid, 2), held(1, 4)]
    gpu.graphics = [held(1, 4), held(NOBODY, 1)]
    try:
        with DeviceMonitor(["cuda:0"]) as monitor:
            assert monitor.snapshot()[0].others_bytes == 5 * GIB
            gpu.processes[-1].usedGpuMemory = None
            assert monitor.snapshot()[0].others_bytes is None  # Windows tells no sizes
    finally:
        child.communicate()


def held(pid: int, gib: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(pid=pid, usedGpuMemory=gib * GIB)


def test_the_cpus_snapshot_carries_its_figures():
    with DeviceMonitor(["cpu"]) as monitor:
        first, second = monitor.snapshot()[0], monitor.snapshot()[0]
    assert first.used_bytes + first.free_bytes == first.total_bytes
    assert first.own_bytes > 1 << 20
    assert first.load_percent is None or 0 <= first.load_percent <= 100
    assert second.time_s >= first.time_s


def test_figures_that_a_gpu_does_not_have_are_none(driver):
    missing = ["load", "temperature", "power", "clock", "processes", "limit", "events"]
    missing += ["throttling", "traffic", "graphics"]
    driver.named("RTX 3060").errors = dict.fromkeys(missing, 3)
    with DeviceMonitor(["cuda:0"]) as monitor:
        (got,) = monitor.snapshot()
    assert (got.load_percent, got.temperature_c, got.power_w) == (None, None, None)
    assert (got.own_bytes, got.clock_mhz, got.problem) == (None, None, "")
    assert (got.power_limit_w, got.memory_clock_mhz, got.clock_limits) == (None, None, None)
    assert got.others_bytes is None
    assert got.total_bytes == 12 * GIB


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([], 0),
        ([(1, 5 * GIB)], 0),
        ([(2**22 + 7, 5 * GIB)], None),  # a number of another namespace
        ([(os.getpid(), None)], None),  # Windows tells no sizes
        ([(os.getpid(), GIB), (os.getpid(), GIB), (1, GIB)], 2 * GIB),
    ],
)
def test_own_bytes_are_told_only_when_they_are_known(driver, monkeypatch, processes, expected):
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: pid in (1, os.getpid()))
    driver.named("RTX 3060").processes = [
        types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes
    ]
    with DeviceMonitor(["cuda:0"]) as monitor:
        assert monitor.snapshot()[0].own_bytes == expected


def test_a_gpu_lost_while_watched_has_a_problem_and_comes_back(driver):
    gpu = driver.named("RTX 5090")
    with DeviceMonitor() as monitor:
        gpu.errors["*"] = CODES["NVML_ERROR_GPU_IS_LOST"]
        lost = monitor.snapshot()
        gpu.errors.clear()
        back = monitor.snapshot()
    assert ["fell off the bus" in s.problem for s in lost] == [False, True, False, False]
    assert (lost[1].total_bytes, lost[1].load_percent) == (0, None)
    assert back[1].total_bytes == 32 * GIB
    assert back[1].problem == ""


def test_a_gpu_lost_before_the_monitor_started_is_watched_with_its_problem(driver):
    driver.named("RTX 5090").errors["handle"] = CODES["NVML_ERROR_GPU_IS_LOST"]
    with DeviceMonitor(["cuda:2"]) as monitor:
        assert "fell off the bus" in monitor.snapshot()[0].problem


def test_watching_a_device_that_is_not_here_is_refused(driver):
    with pytest.raises(NoDevice, match="cuda:7"):
        DeviceMonitor(["cpu", "cuda:7"])
    assert driver.n_open == 0


def test_watching_a_gpu_without_a_driver_is_refused_with_the_cause(no_driver):
    with pytest.raises(NoDevice, match="No NVIDIA driver"):
        DeviceMonitor(["cuda:0"])


def test_watching_only_the_cpu_does_not_open_the_driver(driver):
    with DeviceMonitor(["cpu"]) as monitor:
        assert monitor.snapshot()[0].device == "cpu"
        assert driver.n_open == 0


def monitor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tandem-monitor"]


def test_the_thread_reports_until_it_is_stopped_and_is_gone_then():
    received, enough = [], threading.Event()

    def on_snapshots(snapshots):
        received.append(threading.current_thread().name)
        if len(received) == 3:
            enough.set()

    monitor = DeviceMonitor(["cpu"])
    monitor.start(on_snapshots, interval_s=0.01)
    assert enough.wait(5)
    monitor.stop()
    n_received = len(received)
    assert set(received) == {"tandem-monitor"}
    assert monitor_threads() == []
    assert enough.wait(0.05)
    assert len(received) == n_received
    monitor.close()


def test_stopping_does_not_wait_for_the_interval_and_starting_again_works():
    with DeviceMonitor(["cpu"]) as monitor:
        for _ in range(2):
            called = threading.Event()
            monitor.start(lambda snapshots, called=called: called.set(), interval_s=3600)
            assert called.wait(5)
            monitor.stop()
    assert monitor_threads() == []


def test_the_interval_can_be_changed_while_it_runs():
    received, enough = [], threading.Event()

    def on_snapshots(snapshots):
        received.append(snapshots)
        monitor.pace(0.01 if len(received) < 3 else 3600)
        if len(received) == 3:
            enough.set()

    with DeviceMonitor(["cpu"]) as monitor:
        monitor.start(on_snapshots, interval_s=0.01)
        assert enough.wait(5)
        time.sleep(0.1)
        assert len(received) == 3


def test_starting_twice_is_a_mistake():
    with DeviceMonitor(["cpu"]) as monitor:
        monitor.start(lambda snapshots: None, interval_s=3600)
        with pytest.raises(RuntimeError, match="already running"):
            monitor.start(lambda snapshots: None, interval_s=3600)
    assert monitor_threads() == []


def test_a_failing_receiver_is_logged_and_does_not_end_the_monitor(caplog):
    calls, enough = [], threading.Event()

    def on_snapshots(snapshots):
        calls.append(snapshots)
        if len(calls) == 2:
            enough.set()
        raise ValueError("no room on the screen")

    with DeviceMonitor(["cpu"]) as monitor:
        monitor.start(on_snapshots, interval_s=0.01)
        assert enough.wait(5)
    assert "no room on the screen" in caplog.text


def test_closing_twice_is_fine_and_lets_go_of_the_driver_once(driver):
    monitor = DeviceMonitor()
    assert driver.n_open == 1
    monitor.close()
    monitor.close()
    assert driver.n_open == 0
