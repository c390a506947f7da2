"""Figures of the machines that compute a model together, as Prometheus and people read them."""

from app.server.context import Admission, MachinesState, wires_text
from app.server.request_log import RequestLog
from app.server.web.state import metrics_text
from engine import DeviceSnapshot, JoinedMachine, WiresMeasured, WireSpeed

SNAPSHOT = DeviceSnapshot("cuda:0", 1.0, 3 << 30, 24 << 30, 21 << 30, load_percent=40.0)
MACHINE = JoinedMachine(1, "big", "10.0.0.2", ("cuda:0",), (), (SNAPSHOT,))
LINKED = WiresMeasured(("small", "big"), (WireSpeed(0, 1, 0.0005, 0.002, 117e6, 0.004),))


def test_metrics_have_machines_and_links() -> None:
    state = MachinesState((MACHINE,), LINKED)
    lines = metrics_text(RequestLog(), Admission(4, 4), None, None, state).splitlines()
    device = 'machine="big",device="cuda:0"'
    assert "tandem_machines_joined 1" in lines
    assert f"tandem_machine_memory_used_bytes{{{device}}} {3 << 30}" in lines
    assert f"tandem_machine_load_ratio{{{device}}} 0.4" in lines
    assert 'tandem_machine_link_latency_seconds{from="small",to="big"} 0.002' in lines
    assert 'tandem_machine_link_bytes_per_second{from="small",to="big"} 117000000' in lines


def test_a_server_on_one_machine_has_none_of_them() -> None:
    assert "machine" not in metrics_text(RequestLog(), Admission(4, 4), None, None)


def test_links_are_told_to_people() -> None:
    text = wires_text(LINKED)
    assert text.startswith("small - big: 0.50 ms, 936 Mbit/s (uneven: 2.00 ms on average")
    even = WiresMeasured(("a", "b"), (WireSpeed(0, 1, 0.0005, 0.0006, 117e6, 0.001),))
    assert wires_text(even) == "a - b: 0.50 ms, 936 Mbit/s"
