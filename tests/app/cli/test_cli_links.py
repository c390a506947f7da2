"""`devices`: links between GPUs of a made-up driver, and measurements."""

import pytest

from engine import EngineError, LinkRecord, LinkSpeed, MachineFile, list_devices
from engine.hardware.card_records import WHOLE_CARD, CardRecords, CardVerdict, card_key
from engine.planning.speed.link_records import TrialRecord
from tests.helpers.command_line import Run
from tests.helpers.fake_nvml import FakeDriver, FakeGpu, install

BUSES = [f"00000000:{bus:02x}:00.0" for bus in (1, 2, 3)]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Two GPUs with NVLink and one that only the host reaches."""
    gpus = [FakeGpu(f"H100 {n}", f"GPU-{n}", bus=n, gib=80) for n in (1, 2, 3)]
    first, second, third = gpus
    first.peers, second.peers = {BUSES[1]: 0}, {BUSES[0]: 0}
    first.nvlinks = [BUSES[1]] * 4
    third.pcie = (3, 8, 4, 16)
    return install(FakeDriver(gpus), monkeypatch)


def test_links_are_shown(run: Run, driver: FakeDriver) -> None:
    lines = [" ".join(line.split()) for line in run("devices").out.splitlines()]
    assert "cuda:0 cuda:1 4 × NVLink 4 one host bridge" in lines
    assert "cuda:0 cuda:2 by the host's memory: it is not supported one host bridge" in lines
    assert "cuda:2 3.0 x8 (4.0 x16)" in lines
    assert not any("MEASURED" in line for line in lines)


def test_links_are_in_the_document(run: Run, driver: FakeDriver) -> None:
    document = run("devices", "--json").document
    assert document["pcie"]["cuda:2"] == {
        "generation": 3, "width": 8, "max_generation": 4, "max_width": 16,
    }  # fmt: skip
    kinds = {(link["a"], link["b"]): link["kind"] for link in document["links"]}
    assert kinds == {
        ("cuda:0", "cuda:1"): "nvlink", ("cuda:0", "cuda:2"): "host", ("cuda:1", "cuda:2"): "host",
    }  # fmt: skip
    assert document["measured"] == {"devices": {}, "links": []}


def test_what_is_measured_is_shown_and_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "runtime.measuring.machine_speed.READ_BYTES": 1 << 20,
        "runtime.measuring.machine_speed.MATMUL_SIZES": {"cpu": (8, 64, 64)},
        "runtime.measuring.machine_speed.MIN_SECONDS": 0.01,
        "runtime.measuring.link_speed.LARGE_BYTES": 1 << 18,
        "runtime.measuring.link_speed.N_ROUNDS": 2,
    }.items():
        monkeypatch.setattr(f"engine.{name}", value)
    first = run("devices", "--measure", "--json").document["measured"]
    assert first["devices"]["cpu"]["bytes_per_s"] > 0
    (link,) = first["links"]
    assert (link["a"], link["b"]) == ("cpu", "cpu")
    assert 0 < link["latency_s"] < 0.1
    assert run("devices", "--json").document["measured"] == first
    assert "GB/s" in run("devices").out
    again = run("devices", "--measure", "--json").document["measured"]
    assert again["devices"]["cpu"]["bytes_per_s"] != first["devices"]["cpu"]["bytes_per_s"]


def test_what_cannot_be_measured_is_said_and_left_out(
    run: Run, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: object, *_: object) -> None:
        raise EngineError("It has no memory left.")

    def refuse(devices: object) -> None:
        raise EngineError("The trial of links failed.")

    def link(a: str, b: str) -> LinkSpeed:
        if "cuda:2" in (a, b):
            raise EngineError(f"{a} cannot reach {b}.")
        return LinkSpeed(a, b, {8192: 2e-6}, 1e9)

    monkeypatch.setattr("engine.measure_facts", fail)
    monkeypatch.setattr("engine.measure_link", link)
    monkeypatch.setattr("engine.prove_cards", fail)
    monkeypatch.setattr("engine.prove_links", refuse)
    outcome = run("devices", "--measure", "--json")
    assert outcome.err.count("no memory left") == 5, "three GPUs, the CPU, and kernels"
    assert outcome.err.count("Testing kernels on cuda:0, cuda:1, cuda:2 …") == 1
    assert "cuda:2 cannot reach cpu." in outcome.err
    links = outcome.document["measured"]["links"]
    assert {(found["a"], found["b"]) for found in links} == {
        ("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cuda:1", "cpu"), ("cpu", "cpu"),
    }  # fmt: skip
    assert outcome.err.count("Testing routes between cuda:0, cuda:1, cuda:2 …") == 1
    assert "The trial of links failed." in outcome.err


def test_ways_that_were_proven_are_shown_with_what_is_wrong(run: Run, driver: FakeDriver) -> None:
    assert "are tested when a model is first loaded" in run("devices").out
    file, gpus = MachineFile.of_user(), {d.id: d for d in list_devices()}
    fast = {n: TrialRecord("passed", "", {16384: 8e-6, 1 << 24: 1e-3}) for n in range(2)}
    trials = {("stores", "peer"): fast[0], ("copies", "peer"): fast[1]}
    slow = TrialRecord("passed", "", {16384: 2e-5}), TrialRecord("passed", "", {1 << 24: 2e-3})
    hosts = {("stores", "host"): slow[0], ("copies", "host"): slow[1]}
    lost = {("stores", "peer"): TrialRecord("lost", "after 3 of 1000 exchanges")}
    file.keep_proof(gpus["cuda:0"], gpus["cuda:1"], LinkRecord("2026-03-01", {**trials, **hosts}))
    file.keep_proof(
        gpus["cuda:1"], gpus["cuda:0"], LinkRecord("2026-03-01", {**trials, **hosts, **lost})
    )
    out = run("devices").out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "cuda:0 cuda:1 directly directly 2026-03-01 8.0 µs 16.78 GB/s" in lines
    assert "cuda:1 cuda:0 by the host directly 2026-03-01 20.0 µs 16.78 GB/s" in lines
    assert (
        "Kernel writes from cuda:1 to cuda:0 do not arrive (after 3 of 1000 exchanges), tested on "
        "2026-03-01; host memory is used instead."
    ) in lines
    assert "are tested when a model is first loaded" in out, "of the third GPU nothing is known"
    ways = run("devices", "--json").document["ways"]
    assert [(way["from"], way["to"], way["small"], way["large"]) for way in ways] == [
        ("cuda:0", "cuda:1", "directly", "directly"),
        ("cuda:1", "cuda:0", "by the host", "directly"),
    ]
    assert ways[1]["trials"]["stores/peer"]["verdict"] == "lost"
    assert ways[0]["trials"]["copies/peer"]["seconds"] == {"16384": 8e-6, str(1 << 24): 1e-3}
    assert (ways[0]["problems"], len(ways[1]["problems"])) == ([], 1)


def test_a_card_whose_kernels_failed_a_test_is_shown(run: Run, driver: FakeDriver) -> None:
    assert "instead of Tandem's kernels" not in run("devices").out
    gpu = next(d for d in list_devices() if d.id == "cuda:2")
    CardRecords.of_user().keep(
        card_key(gpu), WHOLE_CARD, CardVerdict("hung", "a test did not end", "2026-03-01")
    )
    why = "a test did not end, tested on 2026-03-01; 'tandem devices --measure' repeats the test"
    assert f"PyTorch is used on cuda:2 instead of Tandem's kernels: {why}." in run("devices").out
    assert run("devices", "--json").document["kernel_problems"] == {"cuda:2": why}
