"""Routes that follow from trials: proven, kept on disk and still working."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import DeviceStopped
from engine.hardware.devices.topology import Place, Routes, Way
from engine.load_params import PeerMode
from engine.planning.speed.link_records import TrialRecord
from engine.planning.speed.machine_file import MachineFile
from engine.runtime.interconnect import exchange, trial
from engine.runtime.interconnect.proof import find_routes, prove_links
from engine.runtime.interconnect.trial import BothDirections, Effort
from tests.helpers.dead_card import fault, forget_stopped
from tests.helpers.fake_links import FakeBench, FakeMachine, corrupt, honest, lost

TINY = Effort(n_rounds=1, n_pairs=4, n_rows=1, n_bulk=8, copied=(64,))
TWO = ("cuda:0", "cuda:1")
WITH_KERNELS = trial.try_stores
PEER, HOST = Way("peer", "peer"), Way("host", "host")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "N_PROGRAMS", 1)
    monkeypatch.setattr(exchange, "SIZE", 4)
    monkeypatch.setattr(trial, "FULL", TINY)
    monkeypatch.setattr(trial, "QUICK", TINY)
    monkeypatch.setattr(trial, "try_stores", stores_without_kernels)


def stores_without_kernels(bench: FakeBench, place: Place, effort: Effort) -> BothDirections:
    """Let the host write packets: interpreted kernels are slow, and tested elsewhere."""
    found = []
    for source in (0, 1):
        slot = bench.slot(source, place, 16)
        slot.sent.random_()
        bench.carry(slot)
        found.append(exchange.compared(slot.memory, slot.sent, slot.sent))
    return found[0], found[1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machine.json"


def both(routes: Routes) -> tuple[Way, Way]:
    return routes.between("cuda:0", "cuda:1"), routes.between("cuda:1", "cuda:0")


def test_one_gpu_or_none_needs_no_proof(path: Path) -> None:
    machine = FakeMachine()
    for devices in (("cpu",), ("cpu", "cpu"), ("cuda:0", "cuda:0", "cpu")):
        assert find_routes(devices, "on", file=MachineFile(path), machine=machine) == Routes()
    assert not machine.asked
    assert not machine.benches
    assert not path.exists()


def test_what_was_proven_is_used_and_found_again(path: Path) -> None:
    machine = FakeMachine()
    assert both(find_routes(TWO, file=MachineFile(path), machine=machine)) == (PEER, PEER)
    assert machine.asked == [TWO]
    again = FakeMachine()
    routes = find_routes(TWO, file=MachineFile(path), machine=again)
    assert both(routes) == (PEER, PEER)
    assert routes.notes == ()
    assert again.asked == []
    calls = again.benches[TWO].calls
    assert {"slot 0 peer", "slot 1 peer", "copy 0 peer", "copy 1 peer"} <= set(calls), "a check"


def test_gpus_that_nobody_can_name_have_copies_only(path: Path) -> None:
    machine = FakeMachine()
    routes = find_routes(("cuda:7", "cuda:8"), "on", file=MachineFile(path), machine=machine)
    assert routes.between("cuda:8", "cuda:7") == Way(None, "host")
    assert (len(routes.pairs), machine.asked) == (2, [])


def test_only_gpus_of_the_model_are_touched(path: Path) -> None:
    machine = FakeMachine()
    find_routes(("cuda:0", "cpu", "cuda:2"), file=MachineFile(path), machine=machine)
    assert machine.asked == [("cuda:0", "cuda:2")]
    assert set(machine.benches) == {("cuda:0", "cuda:2")}


@pytest.mark.parametrize(
    "change", [{"driver": "590.2"}, {"slot": "00000000:09:00.0"}], ids=["driver", "slot"]
)
def test_another_driver_or_slot_is_proven_anew(path: Path, change: dict[str, str]) -> None:
    find_routes(TWO, file=MachineFile(path), machine=FakeMachine())
    machine = FakeMachine(**change)  # type: ignore[arg-type]
    find_routes(TWO, file=MachineFile(path), machine=machine)
    assert machine.asked == [TWO]


def test_another_cuda_is_proven_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_routes(TWO, file=MachineFile(path), machine=FakeMachine())
    machine = FakeMachine()
    monkeypatch.setattr("engine.planning.speed.machine_file._cuda", lambda: "99.9")
    find_routes(TWO, file=MachineFile(path), machine=machine)
    assert machine.asked == [TWO]


def test_off_never_touches_the_memory_of_another_gpu(path: Path) -> None:
    for _ in range(2):  # also where a proof is known
        machine = FakeMachine()
        routes = find_routes(TWO, "off", file=MachineFile(path), machine=machine)
        assert both(routes) == (HOST, HOST)
        assert routes.notes == ()
        assert machine.asked == []
        assert not [call for call in machine.benches[TWO].calls if "peer" in call]
        find_routes(TWO, "auto", file=MachineFile(path), machine=FakeMachine())


def test_what_the_driver_forbids_is_not_tried(path: Path) -> None:
    machine = FakeMachine(forbidden=frozenset([TWO]))
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert both(routes) == (HOST, HOST)
    assert (machine.asked, routes.notes) == ([], ())
    (note,) = find_routes(TWO, "on", file=MachineFile(path), machine=machine).notes
    assert note == (
        "cuda:0 and cuda:1 cannot access each other's memory: the chipset does not support it."
    )


def test_stores_that_vanish_while_copies_arrive(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that pass prove nothing for stores; the other direction is as good as ever."""
    monkeypatch.setattr(trial, "try_stores", WITH_KERNELS)
    machine = FakeMachine({TWO: FakeBench(stores={(0, "peer"): lost})})
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert both(routes) == (Way("host", "peer"), PEER)
    (note,) = routes.notes
    assert note.startswith("Kernel writes from cuda:0 to cuda:1 do not arrive (")
    assert note.endswith("; host memory is used instead.")
    again = FakeMachine({TWO: FakeBench(stores={(0, "peer"): lost})})
    assert find_routes(TWO, file=MachineFile(path), machine=again) == replace(routes, notes=())
    assert again.asked == [], "what is known is told by `tandem devices`"
    on = find_routes(TWO, "on", file=MachineFile(path), machine=again)
    assert again.asked == [TWO], "it is tried once more"
    assert on == routes


def test_copies_that_are_damaged(path: Path) -> None:
    machine = FakeMachine({TWO: FakeBench(copies={(1, "peer"): corrupt})})
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert both(routes) == (PEER, Way("peer", "host"))
    assert "Direct copies from cuda:1 to cuda:0 arrive damaged (" in routes.notes[0]


def test_nothing_that_kernels_write_arrives(path: Path) -> None:
    faults = {(source, place): lost for source in (0, 1) for place in ("peer", "host")}
    machine = FakeMachine({TWO: FakeBench(stores=faults)})  # type: ignore[arg-type]
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert both(routes) == (Way(None, "peer"), Way(None, "peer"))
    assert not routes.have_stores(TWO)
    assert sum("cannot write to" in note for note in routes.notes) == 2


def test_no_memory_of_the_host_for_kernels(path: Path) -> None:
    """The memory may be there the next time, so the result is not kept."""
    machine = FakeMachine({TWO: FakeBench(without=frozenset(["host"]))}, forbidden=frozenset([TWO]))
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert both(routes) == (Way(None, "host"), Way(None, "host"))
    assert any("were not tested (There is no memory of host)" in note for note in routes.notes)
    routes = find_routes(
        TWO, file=MachineFile(path), machine=FakeMachine(forbidden=frozenset([TWO]))
    )
    assert both(routes) == (HOST, HOST)


def test_gpus_without_kernels_have_copies_only(path: Path) -> None:
    routes = find_routes(TWO, file=MachineFile(path), machine=FakeMachine(without_kernels=True))
    assert both(routes) == (Way(None, "peer"), Way(None, "peer"))
    assert routes.notes == ()


@pytest.mark.parametrize("means", ["stores", "copies"])
def test_what_no_longer_works_is_not_used_and_is_proven_anew(path: Path, means: str) -> None:
    find_routes(TWO, file=MachineFile(path), machine=FakeMachine())
    faults = {(0, "peer"): corrupt}
    machine = FakeMachine({TWO: FakeBench(**{means: faults})})  # type: ignore[arg-type]
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert getattr(routes.between(*TWO), means) == "host"
    assert routes.between("cuda:1", "cuda:0") == PEER
    assert routes.notes[0].startswith(
        "Data from cuda:0 to cuda:1 over the direct link used to arrive but no longer does"
    )
    assert machine.asked == []
    again = FakeMachine()
    assert both(find_routes(TWO, file=MachineFile(path), machine=again)) == (PEER, PEER)
    assert again.asked == [TWO]


def test_what_cannot_be_tried_shortly_is_not_used_and_stays_proven(path: Path) -> None:
    """There may be memory again the next time."""
    find_routes(TWO, file=MachineFile(path), machine=FakeMachine())
    machine = FakeMachine({TWO: FakeBench(without=frozenset(["peer"]))})
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert both(routes) == (Way("host", "peer"), Way("host", "peer"))
    assert "were not tested (There is no memory of peer)" in routes.notes[0]
    again = FakeMachine()
    assert both(find_routes(TWO, file=MachineFile(path), machine=again)) == (PEER, PEER)
    assert again.asked == []


def test_when_all_fails_at_once_copies_by_the_host_are_left(path: Path) -> None:
    find_routes(TWO, file=MachineFile(path), machine=FakeMachine())
    faults = {(source, place): lost for source in (0, 1) for place in ("peer", "host")}
    bench = FakeBench(stores=faults, copies={(0, "peer"): lost, (1, "peer"): lost})  # type: ignore[arg-type]
    routes = find_routes(TWO, file=MachineFile(path), machine=FakeMachine({TWO: bench}))
    assert both(routes) == (Way(None, "host"), Way(None, "host"))


def test_what_ended_its_process_is_not_tried_again_unless_asked(path: Path) -> None:
    bad = {("stores", "peer"): TrialRecord("hung", "for 20 s")}
    apart = {TWO: bad, ("cuda:1", "cuda:0"): bad}
    machine = FakeMachine(apart=apart)  # type: ignore[arg-type]
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert both(routes) == (Way("host", "peer"), Way("host", "peer"))
    assert "never finish (for 20 s), tested on 20" in routes.notes[0]
    assert "'tandem devices --measure' repeats the test" in routes.notes[0]
    again = FakeMachine()
    assert both(find_routes(TWO, file=MachineFile(path), machine=again)) == both(routes)
    assert again.asked == []
    assert both(prove_links(TWO, file=MachineFile(path), machine=again)) == (PEER, PEER)
    assert again.asked == [TWO]


def test_a_process_that_does_not_start_proves_nothing(path: Path) -> None:
    machine = FakeMachine()
    machine.try_in_child = lambda *_, **__: {}  # type: ignore[method-assign]
    assert both(find_routes(TWO, file=MachineFile(path), machine=machine)) == (HOST, HOST)
    again = FakeMachine()
    assert both(find_routes(TWO, file=MachineFile(path), machine=again)) == (PEER, PEER)


def test_the_faster_of_two_ways_is_taken_unless_asked(path: Path) -> None:
    """Some machines read a peer's memory fast and write it slowly."""
    slow = TrialRecord("passed", "", {16384: 9e-5, 32768: 1e-4})
    fast = TrialRecord("passed", "", {16384: 1e-5, 32768: 2e-5})
    apart = {
        pair: {("stores", "peer"): slow, ("stores", "host"): fast}
        for pair in (TWO, ("cuda:1", "cuda:0"))
    }
    machine = FakeMachine(apart=apart)  # type: ignore[arg-type]
    routes = find_routes(TWO, file=MachineFile(path), machine=machine)
    assert both(routes) == (Way("host", "peer"), Way("host", "peer"))
    assert both(find_routes(TWO, "on", file=MachineFile(path), machine=machine)) == (PEER, PEER)


def test_three_gpus_have_six_ways(path: Path) -> None:
    machine = FakeMachine({("cuda:1", "cuda:2"): FakeBench(stores={(1, "peer"): corrupt})})
    routes = find_routes(("cuda:0", "cuda:1", "cuda:2"), file=MachineFile(path), machine=machine)
    assert len(routes.pairs) == 6
    assert routes.between("cuda:2", "cuda:1") == Way("host", "peer")
    assert sum(way == PEER for way in routes.pairs.values()) == 5


@pytest.mark.parametrize(
    ("seconds", "p2p", "pays"),
    [(1e-3, "auto", True), (3e-3, "auto", False), (1e-3, "off", False)],
    ids=["faster", "slower", "off"],
)
def test_nccl_is_used_where_it_was_proven_and_is_faster(
    path: Path, seconds: float, p2p: PeerMode, pays: bool
) -> None:
    copies = TrialRecord("passed", "", {1 << 24: 2e-3})
    nccl = TrialRecord("passed", "", {1 << 24: seconds})
    trials = {("copies", "peer"): copies, ("copies", "host"): copies, ("nccl", "peer"): nccl}
    machine = FakeMachine({TWO: FakeBench(nccl=honest)})
    machine.apart = {TWO: trials, ("cuda:1", "cuda:0"): trials}  # type: ignore[dict-item]
    assert not find_routes(TWO, file=MachineFile(path), machine=FakeMachine()).has_nccl
    prove_links(TWO, file=MachineFile(path), machine=machine)
    routes = find_routes(TWO, p2p, file=MachineFile(path), machine=FakeMachine())
    assert (routes.has_nccl, routes.notes) == (pays, ())


def test_nccl_that_lies_is_named_and_not_used(path: Path) -> None:
    machine = FakeMachine({TWO: FakeBench(nccl=corrupt)})
    routes = prove_links(TWO, file=MachineFile(path), machine=machine)
    assert not routes.has_nccl
    assert any(n.startswith("NCCL transfers from cuda") and "damaged" in n for n in routes.notes)
    routes = prove_links(TWO, file=MachineFile(path), machine=FakeMachine())
    assert (routes.has_nccl, routes.notes) == (False, ()), "many do without it"


def test_a_gpu_that_dies_in_a_trial_is_no_slow_link(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_stopped(monkeypatch)
    file, machine = MachineFile(path), FakeMachine()
    assert both(find_routes(TWO, file=file, machine=machine)) == (PEER, PEER)

    def fail(*args: object) -> None:
        raise fault()

    monkeypatch.setattr(FakeBench, "copy", fail)
    monkeypatch.setattr("torch.cuda.current_stream", fail)
    with pytest.raises(DeviceStopped, match="cuda:0 has stopped working: device-side assert"):
        find_routes(TWO, file=file, machine=machine)
    assert file.proof(machine.infos()["cuda:0"], machine.infos()["cuda:1"]) is not None
