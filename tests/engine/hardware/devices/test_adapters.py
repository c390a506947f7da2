"""Display adapters by maker, with made-up files and registry values."""

import pytest

from engine.hardware.devices import other_gpus as adapters
from engine.hardware.devices.other_gpus import Adapter, find_adapters


def add(folder, name, kind, vendor):
    (folder / name).mkdir()
    (folder / name / "class").write_text(f"{kind}\n")
    (folder / name / "vendor").write_text(f"{vendor}\n")


@pytest.mark.skipif(adapters.sys.platform != "linux", reason="reads Linux's files")
def test_display_controllers_of_known_makers_are_found(monkeypatch, tmp_path):
    add(tmp_path, "0000:00:02.0", "0x030000", "0x8086")
    add(tmp_path, "0000:01:00.0", "0x030200", "0x10de")
    add(tmp_path, "0000:03:00.0", "0x038000", "0x1002")
    add(tmp_path, "0000:04:00.0", "0x020000", "0x8086")  # a network card
    add(tmp_path, "0000:05:00.0", "0x030000", "0x1234")  # a virtual machine's
    monkeypatch.setattr(adapters, "PCI", tmp_path)
    assert find_adapters() == [Adapter("intel"), Adapter("nvidia"), Adapter("amd")]
    monkeypatch.setattr(adapters, "PCI", tmp_path / "absent")
    assert find_adapters() == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {
                "MatchingDeviceId": r"PCI\VEN_1002&DEV_744C&SUBSYS_E4711DA2",
                "DriverDesc": "AMD Radeon RX 7900 XTX",
                "HardwareInformation.qwMemorySize": 24 << 30,
            },
            [Adapter("amd", "AMD Radeon RX 7900 XTX", 24 << 30)],
        ),
        ({"MatchingDeviceId": r"pci\ven_10de&dev_2684"}, [Adapter("nvidia")]),
        ({"MatchingDeviceId": r"ROOT\BasicDisplay"}, []),
        ({}, []),
    ],
)
def test_windows_names_makers_in_the_registry(values, expected):
    assert adapters._adapter_of(values) == expected
