"""Simulated devices: what a person may write, and what comes of it."""

import pytest

from engine import EngineError, list_devices
from engine.planning.speed.device_specs import CPU_SPECS, GPU_SPECS, pcie_bytes_per_s
from engine.planning.speed.rigs import parse_rig, spec_from_driver, spec_from_text


def names(text: str) -> list[str]:
    return [device.name for device in parse_rig(text).devices]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3090", ["RTX 3090"]),
        ("2x3090,1x3060", ["RTX 3090", "RTX 3090", "RTX 3060"]),
        (" 2 X rtx 3090 , H200", ["RTX 3090", "RTX 3090", "H200"]),
        ("2×4060 ti", ["RTX 4060 Ti 16GB"] * 2),
        ("7900XTX,9070 xt", ["RX 7900 XTX", "RX 9070 XT"]),
        ("A100-40GB,a100", ["A100 40GB", "A100"]),
        ("rtx pro 6000", ["RTX PRO 6000"]),
    ],
)
def test_cards_are_found_by_what_people_write(text: str, expected: list[str]) -> None:
    assert names(text)[:-1] == expected


def test_there_is_always_a_cpu_and_it_comes_last() -> None:
    assert names("3090")[-1] == CPU_SPECS[0].name
    assert names("epyc 9654,2x4090") == ["RTX 4090", "RTX 4090", "EPYC 9654"]
    assert names("7950X") == ["Ryzen 9 7950X"]


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("", "at least one card", "For example"),
        ("2x3090,,3060", "at least one card", "For example"),
        ("3091", "'3091' is not known", "RTX 3090"),
        ("2x rtx3o90", "'rtx3o90' is not known", "Did you mean RTX 3090"),
        ("toaster", "'toaster' is not known", "known cards are"),
        ("2x", "is not known", "known cards are"),
        ("0x3090", "asks for no cards", "1x"),
        ("17x3090", "at most 16", "fewer"),
        ("9x3090,8x3060", "at most 16", "fewer"),
        ("2x7950X", "one CPU", "once"),
        ("2x3090@pigeon", "'pigeon' is not a route", "nvlink"),
        ("2x3090@p2p,x5", "'x5' is not a route", "x16/x4"),
        ("2x3090@x", "'x' is not a route", "x8"),
        ("3x3090@x8/x4", "2 slots, but there are 3 GPUs", "one per GPU"),
        ("2x4090@nvlink", "joined by NVLink", "p2p"),
        ("3090,a6000@nvlink", "joined by NVLink", "p2p"),
    ],
)
def test_what_cannot_be_meant_is_said_in_a_sentence(text: str, problem: str, hint: str) -> None:
    with pytest.raises(EngineError, match=problem) as caught:
        parse_rig(text)
    assert hint in caught.value.hint


def test_devices_look_like_real_ones() -> None:
    rig = parse_rig("2x3090,1x3060")
    assert [d.id for d in rig.devices] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert {type(d) for d in rig.list_devices()} == {type(d) for d in list_devices()}
    gib = 1 << 30
    assert [d.total_bytes // gib for d in rig.devices[:3]] == [24, 24, 12]
    assert all(0 < rig.free_bytes[d.id] < d.total_bytes for d in rig.devices)
    assert len({d.uuid for d in rig.devices}) == 4
    assert set(rig.facts) == {d.id for d in rig.devices}
    assert rig.facts["cuda:0"].bytes_per_s > 2 * rig.facts["cuda:2"].bytes_per_s


def test_gpus_reach_each_other_as_their_drivers_let_them() -> None:
    def kinds(text: str) -> set[str]:
        return {link.kind for link in parse_rig(text).topology.links}

    assert kinds("2x3090") == {"host"}
    assert kinds("2x3090@p2p") == {"p2p"}
    assert kinds("2xa6000") == {"p2p"}
    assert kinds("4xH100") == {"nvlink"}
    assert kinds("a6000,3090") == {"host"}
    assert len(parse_rig("4x3090").topology.links) == 6


def test_a_bridge_joins_two_cards_of_a_kind() -> None:
    def bridged(text: str) -> list[tuple[str, str]]:
        links = parse_rig(text).topology.links
        return [(link.a[-1], link.b[-1]) for link in links if link.kind == "nvlink"]

    assert bridged("2x3090@nvlink") == [("0", "1")]
    assert bridged("4x3090@nvlink") == [("0", "1"), ("2", "3")]
    assert bridged("3x3090@nvlink") == [("0", "1")]
    assert bridged("3090,4090,3090@nvlink") == [("0", "2")]
    assert len(bridged("4xA100@nvlink")) == 6
    others = [link for link in parse_rig("4x3090@nvlink").topology.links if link.kind != "nvlink"]
    assert {link.kind for link in others} == {"host"}
    assert {link.kind for link in parse_rig("3xA6000@nvlink").topology.links} == {"nvlink", "p2p"}
    rig = parse_rig("2x3090@nvlink")
    assert rig.topology.links[0].n_nvlink == 4
    assert rig.links.between("cuda:0", "cuda:1").bytes_per_s == pytest.approx(0.8 * 56.25e9)


def test_a_card_in_a_narrow_slot_is_slow_to_reach() -> None:
    wide, narrow, uneven = (parse_rig(f"2x4090@{lanes}") for lanes in ("x16", "x4", "p2p,x16/x4"))
    pair = "cuda:0", "cuda:1"
    assert parse_rig("2x4090").links.between(*pair) == wide.links.between(*pair)
    assert wide.links.between(*pair).bytes_per_s == pytest.approx(
        4 * narrow.links.between(*pair).bytes_per_s
    )
    assert uneven.links.way(*pair) == "p2p"
    assert {device: slot.width for device, slot in uneven.topology.pcie.items()} == {
        "cuda:0": 16, "cuda:1": 4,
    }  # fmt: skip
    assert uneven.links.between(*pair).bytes_per_s == pytest.approx(pcie_bytes_per_s(4, 4))
    assert parse_rig("4060ti@x16").topology.pcie["cuda:0"].width == 8  # it has no more


def test_many_gpus_share_the_memory_of_the_host() -> None:
    """A server's memory has more bandwidth than a desktop computer's."""

    def seconds(text: str) -> float:
        return parse_rig(text).links.all_reduce_s([f"cuda:{n}" for n in range(4)], 64 << 20)

    assert seconds("epyc 9654,4x4090") < 0.7 * seconds("4x4090")
    assert seconds("epyc 9654,4x4090@p2p") == seconds("4x4090@p2p")


def test_a_better_way_is_sooner() -> None:
    rigs = [parse_rig(f"2x3090@{way}") for way in ("nvlink", "p2p", "host", "shm")]
    times = [rig.links.all_reduce_s(["cuda:0", "cuda:1"], 1 << 20) for rig in rigs]
    assert times == sorted(times)
    assert len(set(times)) == 4
    narrow = parse_rig("2x4060ti@p2p").links.between("cuda:0", "cuda:1")
    wide = parse_rig("2x4090@p2p").links.between("cuda:0", "cuda:1")
    assert wide.bytes_per_s == pytest.approx(2 * narrow.bytes_per_s)


@pytest.mark.parametrize(
    ("driver", "card"),
    [
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4060", None),
        ("NVIDIA GeForce RTX 4070 SUPER", None),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-PCIE-32GB", "V100"),
        ("NVIDIA H200", "H200"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "Ryzen 9 7950X"),
        ("", None),
    ],
)
def test_a_driver_s_name_is_understood(driver: str, card: str | None) -> None:
    found = spec_from_driver(driver)
    assert (found.name if found else None) == card


def test_every_card_is_found_and_plausible() -> None:
    """A wrong digit shows: bytes per operation lie in a narrow range."""
    for card in GPU_SPECS:
        assert spec_from_text(card.name) is card
        assert spec_from_driver(f"NVIDIA GeForce {card.name}") is not None
        assert 30 < 1000 * card.tflop_per_s / card.gb_per_s < 400
        assert 1 <= card.memory_gib <= 256
        assert 0.5 < card.streaming < 1
        assert card.f32_tflop_per_s <= 0.6 * card.tflop_per_s
    assert len({card.name for card in (*GPU_SPECS, *CPU_SPECS)}) == len(GPU_SPECS) + len(CPU_SPECS)


def test_slots_give_what_is_measured_of_them() -> None:
    """26 GB/s on PCIe 4.0 x16, 53 on 5.0; later generations count as the last known one."""
    assert pcie_bytes_per_s(4, 16) == pytest.approx(26e9, rel=0.03)
    assert pcie_bytes_per_s(5, 16) == pytest.approx(53e9, rel=0.03)
    assert pcie_bytes_per_s(9, 16) == pcie_bytes_per_s(6, 16)
