"""What `tandem serve --nodes` says about a model over the machines that have joined."""

from dataclasses import replace
from pathlib import Path

from app.cli.server.machines import machine_advice
from engine import JoinedMachine, LoadParams, WiresMeasured, WireSpeed, list_devices
from tests.helpers.hollow import hollow_llama


def test_the_advice_is_about_these_machines_and_their_link(tmp_path: Path) -> None:
    params = LoadParams(str(hollow_llama(tmp_path / "m.gguf", n_layer=2)), machines=(1, 1))
    cpu = next(device for device in list_devices() if device.id == "cpu")
    far = JoinedMachine(1, "other", "10.0.0.2", ("cpu",), (replace(cpu, n_cores=64),))

    def advice(latency_s: float) -> str:
        wire = WireSpeed(0, 1, latency_s, latency_s, 1e8, 2 * latency_s)
        return machine_advice(params, [far], WiresMeasured(("here", "other"), (wire,)))

    slow = advice(1.0)
    assert slow.startswith("Do not split over this link; run a copy on each machine")
    assert "Both machines together: " in slow
    both = (slow, advice(0.1))
    speeds = [float(text.partition("together: ")[2].partition(" tok/s")[0]) for text in both]
    assert speeds[0] < speeds[1]
    assert machine_advice(replace(params, path="/none.gguf"), [far], WiresMeasured((), ())) == ""
