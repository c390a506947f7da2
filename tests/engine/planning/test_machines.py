"""Plans for several machines: simulated ones, the cost of their network, and what is advised."""

from contextlib import closing
from pathlib import Path

import pytest

from engine import EngineError, Forecaster, LinkFacts, LoadParams, Planner, choose_machines
from engine.planning.machines import parse_rig, parse_wire, rank_counts
from engine.planning.speed.facts import DeviceFacts, WireSpeed
from engine.planning.speed.links import SHARED_MEMORY, Links, Wires
from engine.planning.speed.speed_model import SpeedModel
from tests.helpers.hollow import hollow_70b, hollow_llama

MS = LinkFacts(1e-3, 100e6)
CPU = DeviceFacts("cpu", 20e9, 1e12, n_threads=1, thread_bytes_per_s=20e9)


def test_devices_of_further_machines_have_the_machine_in_their_ids() -> None:
    rig = parse_rig("2x3090@x16/x4 / 4090 ~ 10gbit, 0.1ms")
    assert [device.id for device in rig.devices] == [
        "cuda:0", "cuda:1", "cpu", "1/cuda:0", "1/cpu",
    ]  # fmt: skip
    assert set(rig.facts) == {device.id for device in rig.devices}
    assert rig.facts["1/cuda:0"].device == "1/cuda:0"
    wire = rig.links.between("cuda:1", "1/cuda:0")
    assert (wire.latency_s, wire.bytes_per_s) == (pytest.approx(1e-4), pytest.approx(1.175e9))
    alone = parse_rig("2x3090@x16/x4").links
    assert rig.links.between("cuda:0", "cuda:1") == alone.between("cuda:0", "cuda:1")
    assert rig.links.on_machine(1).between("cuda:0", "cpu") == (
        parse_rig("4090").links.between("cuda:0", "cpu")
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("3090 ~ 1gbit", "A network needs at least two machines."),
        ("3090 / ", "A rig needs at least one card."),
        ("3090 / 4090 ~ fast", "'fast' is not a network."),
        (" / ".join(["3090"] * 17), "At most 16 machines are allowed."),
    ],
)
def test_mistakes_are_told(text: str, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        parse_rig(text)


def test_a_wire_may_be_told_in_part() -> None:
    assert parse_wire("2ms").latency_s == 2e-3
    assert parse_wire("2ms").bytes_per_s == parse_wire("1gbit").bytes_per_s * 117e6 / 117.5e6
    assert parse_wire("100mbit").bytes_per_s == pytest.approx(11.75e6)


def test_sums_between_machines_take_two_latencies_and_the_bytes() -> None:
    links = Links({}, wires=Wires(other=MS))
    two = links.all_reduce_s(("cpu", "1/cpu"), 10_000)
    assert two == pytest.approx(2 * 1e-3 + 10_000 / 100e6)
    # a value that is not short is announced first, and each of two ranks of a machine sends one
    four = links.all_reduce_s(("cpu", "cpu", "1/cpu", "1/cpu"), 10_000)
    inside = links.all_reduce_s(("cpu", "cpu"), 10_000)
    assert four == pytest.approx(4 * 1e-3 + 2 * 10_000 / 100e6 + inside)
    large = links.all_reduce_s(("cpu", "1/cpu", "2/cpu"), 3e6)
    assert large == pytest.approx(6 * 1e-3 + 4e6 / 100e6)


def test_a_move_crosses_to_each_machine_once() -> None:
    links = Links({}, wires=Wires({(0, 1): MS}))
    inside = SHARED_MEMORY.latency_s
    found = links.move_s("cpu", ["1/cpu", "1/cpu"], 1000)
    assert found == pytest.approx(1e-3 + 1000 / 100e6 + inside)


def test_a_token_of_two_machines_waits_for_two_messages(tmp_path: Path) -> None:
    path = hollow_llama(tmp_path / "m.gguf")
    params = LoadParams(str(path), ("cpu", "1/cpu"), split_mode="groups", groups=(1, 1))
    with closing(Planner(path)) as planner:
        load = planner.evaluate(params).load
    facts = [CPU, DeviceFacts("1/cpu", *(20e9, 1e12), n_threads=1, thread_bytes_per_s=20e9)]

    def token_s(wire: LinkFacts) -> float:
        links = Links({}, wires=Wires(other=wire))
        return SpeedModel(facts, links).decode(load, 100).seconds

    near, far = token_s(LinkFacts(0.0, 1e12)), token_s(LinkFacts(5e-3, 1e12))
    assert far - near == pytest.approx(2 * 5e-3, rel=0.01)


def test_lost_packets_cost_more_where_tokens_go_round() -> None:
    def speeds(n: int) -> list[WireSpeed]:
        return [WireSpeed(a, b, 1e-3, 3e-3, 1e8, 2e-3) for a in range(n) for b in range(a + 1, n)]

    two, three = Wires(measured=speeds(2)), Wires(measured=speeds(3))
    assert two.message_s(0, (1,), 0) == pytest.approx(3e-3)
    assert three.message_s(0, (1,), 0) == pytest.approx(5e-3)
    assert two.order_s(1, 0.0, waits=False) == pytest.approx(3e-3)
    assert two.order_s(1, 1.0, waits=False) == pytest.approx(2e-3), "the rest went on meanwhile"
    assert two.sum_s(("cpu", "1/cpu"), 4096) == pytest.approx(2e-3), "as it was measured"
    assert two.is_measured(1, 0)
    assert not two.is_measured(0, 2)


@pytest.fixture
def planner(tmp_path: Path) -> Planner:
    return Planner(hollow_llama(tmp_path / "m.gguf"))


def test_a_model_that_fits_one_machine_is_not_split(planner: Planner) -> None:
    rig = parse_rig("3090 / 4090 ~ 1gbit,0.3ms")
    choice = choose_machines(planner, LoadParams("m"), Forecaster.of_rig(rig))
    assert choice.params.devices == ("1/cuda:0",)
    assert choice.reason.startswith("Do not split over this link; run a copy on each machine")
    assert "Machine 2 alone: " in choice.reason
    assert "Both machines together: " in choice.reason


def test_a_model_that_fits_none_is_split(tmp_path: Path) -> None:
    rig = parse_rig("3090 / 3090 / 3090 ~ 1gbit,0.3ms")
    with closing(Planner(hollow_70b(tmp_path / "m.gguf"))) as planner:
        choice = choose_machines(planner, LoadParams("m"), Forecaster.of_rig(rig))
    assert choice.params.devices == ("cuda:0", "1/cuda:0", "2/cuda:0")
    assert choice.params.machines == rank_counts(choice.params.devices) == (1, 1, 1)
    assert choice.params.split_mode == "groups"
    assert "All 3 machines together: " in choice.reason
