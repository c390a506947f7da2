"""What machines tell of their devices: facts when they join, states ever after."""

import threading
import time
from pathlib import Path

import engine
from engine.hardware.devices.types import far_id, is_cpu, local_id, machine_of
from engine.hosts.machines.joining import device_report, devices_from, state_report, states_from
from tests.helpers.tiny_gguf import tiny_gguf

TOKEN = "a token of a test"


def test_a_machine_that_joins_tells_of_its_devices(tmp_path: Path) -> None:
    path = str(tiny_gguf(tmp_path / "m.gguf"))
    sock = engine.listen_for_machines("127.0.0.1", 0)
    port = sock.getsockname()[1]
    gathering = engine.Gathering(sock, 2, TOKEN, path)
    request = engine.JoinRequest("127.0.0.1", port, TOKEN, ("cpu",))
    joining = threading.Thread(target=engine.join_machines, args=(request, lambda _: None))
    joining.start()
    try:
        assert gathering.wait(20)
        end = time.monotonic() + 10
        while not gathering.machines[0].states:
            assert time.monotonic() < end
            time.sleep(0.02)
        (machine,) = gathering.machines
        (here,) = [device for device in engine.list_devices() if device.id == "cpu"]
        (cpu,) = [device for device in machine.infos if device.id == "cpu"]
        assert (cpu.name, cpu.total_bytes, cpu.n_cores) == (
            here.name, here.total_bytes, here.n_cores,
        )  # fmt: skip
        (state,) = [state for state in machine.states if state.device == "cpu"]
        assert 0 < state.used_bytes < state.total_bytes == here.total_bytes
    finally:
        gathering.close()
        joining.join(20)
        assert not joining.is_alive()


def test_nonsense_is_left_out() -> None:
    good = device_report()
    for broken in (None, 3, [3], [{}], [{**good[0], "total_bytes": "much"}], [{"kind": "tpu"}]):
        assert devices_from(broken) == ()
        assert states_from(broken) == ()
    bad = {**good[0], "name": "x" * 9000}
    assert len(devices_from([bad])[0].name) == 200
    with engine.DeviceMonitor(["cpu"]) as monitor:
        (told,) = state_report(monitor.snapshot())
    for wrong in ("high", True, 10**400):
        assert states_from([{**told, "load_percent": wrong}])[0].load_percent is None
    for size in (-1, 10**400, True):
        assert states_from([{**told, "used_bytes": size}]) == ()


def test_ids_name_the_machine() -> None:
    assert far_id(0, "cuda:1") == "cuda:1"
    far = far_id(2, "cuda:1")
    assert (far, local_id(far), machine_of(far), is_cpu(far)) == ("2/cuda:1", "cuda:1", 2, False)
    assert is_cpu("cpu")
    assert is_cpu("1/cpu")
    assert machine_of("cpu") == 0
