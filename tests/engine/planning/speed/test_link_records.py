"""Records of tested routes: the route chosen, its problems in words, JSON, and predictions."""

import json
from pathlib import Path

import pytest

from engine.hardware.devices.topology import Link, Pcie, Place, Topology, Way
from engine.hardware.devices.types import DeviceInfo
from engine.load_params import PeerMode
from engine.planning.speed.facts import LinkFacts
from engine.planning.speed.link_records import (
    LinkRecord,
    Means,
    TrialRecord,
    Verdict,
    chosen_way,
    link_problems,
    record_document,
    record_from,
    speed_of,
)
from engine.planning.speed.machine_file import MachineFile, known_links

GIB = 1 << 30
MIB = 1 << 20
DATE = "2026-03-01"
GPUS = [
    DeviceInfo(f"cuda:{n}", "cuda", "RTX 3090", 24 * GIB, 23 * GIB, pci_bus=f"0:{n}", driver="580")
    for n in range(2)
]
TOPOLOGY = Topology(
    {gpu.id: Pcie(4, 16, 4, 16) for gpu in GPUS}, (Link("cuda:0", "cuda:1", "nvlink", 4, 3),)
)


def passed(**seconds: float) -> TrialRecord:
    """Return a passed trial; k16=1e-5 is the time of 16 KiB, m16 that of 16 MiB."""
    sizes = {"k": 1 << 10, "m": MIB}
    return TrialRecord(
        "passed", "", {sizes[name[0]] * int(name[1:]): s for name, s in seconds.items()}
    )


FAST = LinkRecord(
    DATE,
    {
        ("stores", "peer"): passed(k1=5e-6, k16=6e-6, k32=8e-6, k256=4e-5),
        ("stores", "host"): passed(k1=1e-5, k16=2e-5, k32=2.5e-5),
        ("copies", "peer"): passed(m1=1e-4, m16=1e-3),
        ("copies", "host"): passed(m1=2e-4, m16=2e-3),
    },
)


def without(
    record: LinkRecord, *keys: tuple[Means, Place], verdict: Verdict = "lost"
) -> LinkRecord:
    return LinkRecord(DATE, {**record.trials, **{key: TrialRecord(verdict) for key in keys}})


@pytest.mark.parametrize(
    ("record", "p2p", "way"),
    [
        (None, "on", Way(None, "host")),
        (LinkRecord(DATE), "on", Way(None, "host")),
        (FAST, "auto", Way("peer", "peer")),
        (FAST, "off", Way("host", "host")),
        (without(FAST, ("stores", "peer")), "on", Way("host", "peer")),
        (without(FAST, ("copies", "peer")), "on", Way("peer", "host")),
        (without(FAST, ("stores", "peer"), ("stores", "host")), "on", Way(None, "peer")),
        (without(FAST, ("stores", "host")), "off", Way(None, "host")),
        (without(FAST, ("copies", "host"), ("copies", "peer")), "auto", Way("peer", "host")),
    ],
)
def test_only_what_passed_is_chosen(record: LinkRecord | None, p2p: PeerMode, way: Way) -> None:
    assert chosen_way(record, p2p) == way


def test_speed_is_that_of_the_chosen_way() -> None:
    assert speed_of(FAST, Way("peer", "peer")) == LinkFacts(8e-6, 16 * MIB / 1e-3, 32 << 10)
    assert speed_of(FAST, Way("host", "host")) == LinkFacts(2.5e-5, 16 * MIB / 2e-3, 32 << 10)
    assert speed_of(FAST, Way(None, "host")) == LinkFacts(2e-4, 16 * MIB / 2e-3, MIB)
    assert speed_of(without(FAST, ("copies", "host")), Way(None, "host")) is None


def test_what_is_wrong_is_said_with_its_date_and_what_is_done() -> None:
    assert link_problems("cuda:0", "cuda:1", FAST, "auto") == ()
    lost = without(FAST, ("stores", "peer"))
    (said,) = link_problems("cuda:0", "cuda:1", lost, "auto")
    assert said == (
        "Kernel writes from cuda:0 to cuda:1 do not arrive, tested on 2026-03-01; host memory is "
        "used instead."
    )
    assert link_problems("cuda:0", "cuda:1", lost, "off") == ()
    for verdict, text in (
        ("wrong", "arrive damaged"), ("hung", "never finish"), ("crashed", "crash the test"),
        ("refused", "were not tested"),
    ):  # fmt: skip
        bad = without(FAST, ("copies", "peer"), verdict=verdict)  # type: ignore[arg-type]
        (said,) = link_problems("cuda:0", "cuda:1", bad, "on")
        assert said.startswith("Direct copies from cuda:0 to cuda:1 ")
        assert text in said
        assert ("--measure" in said) == (verdict in ("hung", "crashed"))


def test_kernels_that_write_much_slower_than_copies_bring_are_named() -> None:
    slow = {**FAST.trials, ("stores", "peer"): passed(k16=6e-6, k256=1e-3)}
    (said,) = link_problems("cuda:0", "cuda:1", LinkRecord(DATE, slow), "on")
    assert said.startswith("Kernel writes from cuda:0 to cuda:1 reach 0.26 GB/s, copies 17 ")


@pytest.mark.parametrize(
    ("lanes", "is_slow"),
    [((4, 16), False), ((4, 4), True), ((1, 16), True), ((3, 8), False), ((0, 0), False)],
)
def test_a_slot_that_is_slow_at_work_is_named(lanes: tuple[int, int], is_slow: bool) -> None:
    copies = TrialRecord("passed", "", FAST.trials["copies", "peer"].seconds, lanes)
    record = LinkRecord(DATE, {**FAST.trials, ("copies", "peer"): copies})
    said = link_problems("cuda:0", "cuda:1", record, "auto")
    assert bool(said) == is_slow
    if said:
        assert f"The slot of cuda:0 runs at PCIe {lanes[0]}.0 x{lanes[1]} under load" in said[0]


def test_records_survive_json() -> None:
    record = without(FAST, ("stores", "host"), verdict="hung")
    assert record_from(json.loads(json.dumps(record_document(record)))) == record


@pytest.mark.parametrize(
    "document",
    [
        3, {}, {"date": 1, "trials": {}}, {"date": DATE}, {"date": DATE, "trials": []},
        {"date": DATE, "trials": {"stores/moon": {"verdict": "passed"}}},
        {"date": DATE, "trials": {"stores/peer": {"verdict": "fine"}}},
        {"date": DATE, "trials": {"stores/peer": {"verdict": "passed", "why": 1}}},
        {"date": DATE, "trials": {"stores/peer": {"verdict": "passed", "seconds": {"a": 1}}}},
        {"date": DATE, "trials": {"stores/peer": {"verdict": "passed", "seconds": {"1": True}}}},
        {"date": DATE, "trials": {"stores/peer": {"verdict": "passed", "seconds": {"1": -1}}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_record_is_none(document: object) -> None:
    assert record_from(document) is None


def test_predictions_are_made_from_the_way_that_is_used(tmp_path: Path) -> None:
    """The slower direction counts; without a record the link's class does."""
    file = MachineFile(tmp_path / "machine.json")
    expected = known_links(GPUS, TOPOLOGY, file).between("cuda:0", "cuda:1")
    assert expected.bytes_per_s > 5e10, "NVLink"
    staged = known_links(GPUS, TOPOLOGY, file, "off").between("cuda:0", "cuda:1")
    assert staged.bytes_per_s < 2e10, "by the host"
    file.keep_proof(GPUS[0], GPUS[1], FAST)
    file.keep_proof(GPUS[1], GPUS[0], without(FAST, ("stores", "peer")))
    again = MachineFile(tmp_path / "machine.json")
    assert again.proofs(GPUS)["cuda:0", "cuda:1"] == FAST
    auto, off = (
        known_links(GPUS, TOPOLOGY, again, mode).between("cuda:1", "cuda:0")
        for mode in ("auto", "off")
    )
    assert auto == LinkFacts(2.5e-5, 16 * MIB / 1e-3, 32 << 10)
    assert off == LinkFacts(2.5e-5, 16 * MIB / 2e-3, 32 << 10)


def test_a_file_of_an_older_version_has_no_proofs(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    file = MachineFile(path)
    file.keep_link(GPUS[0], GPUS[1], LinkFacts(1e-5, 9e9))
    document = json.loads(path.read_text())
    del document["proofs"]
    path.write_text(json.dumps(document))
    again = MachineFile(path)
    assert again.proofs(GPUS) == {}
    assert known_links(GPUS, TOPOLOGY, again).between("cuda:0", "cuda:1") == LinkFacts(1e-5, 9e9)
