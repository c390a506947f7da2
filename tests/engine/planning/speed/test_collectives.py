"""Predicted all-reduces, against counting by hand and published measurements."""

from dataclasses import replace

import pytest

from engine.planning.speed.facts import LinkFacts
from engine.planning.speed.links import COPY_S, MAX_F32_BYTES, MAX_ONE_SHOT_BYTES, PEER_S, Links
from engine.planning.speed.rigs import parse_rig

RATE = 1e9
FREE = LinkFacts(0.0, RATE)
MUCH = 1 << 30
"""Bytes of a value: latencies do not count beside it."""


def gpus(n: int) -> list[str]:
    return [f"cuda:{number}" for number in range(n)]


def all_by(way: str, n: int) -> dict[tuple[str, str], str]:
    return {(a, b): way for a in gpus(n) for b in gpus(n) if a < b}


def by_how(links: Links, n: int, n_bytes: float) -> dict[str, float]:
    return {one.how: one.seconds for one in links.sums(gpus(n), n_bytes)}


def test_one_rank_has_nothing_to_add_up() -> None:
    assert Links({}).sums(["cuda:0"], 100) == []
    assert Links({}).all_reduce_s(["cuda:0"], 100) == 0.0
    assert Links({}).all_reduce_s([], 100) == 0.0


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_one_shot_sends_everything_to_everyone(n: int) -> None:
    """It sends twice the bytes, as every four have a mark."""
    links = Links({}, LinkFacts(1e-3, RATE))
    expected = 1e-3 + (n - 2) * PEER_S + (n - 1) * 2 * 1000 / RATE
    assert by_how(links, n, 1000)["lane"] == pytest.approx(expected)


@pytest.mark.parametrize("n", [3, 4, 5, 8])
def test_copies_send_slices_there_and_sums_back(n: int) -> None:
    """They send 2 (n - 1) / n of a value, in BF16, in two stages."""
    assert by_how(Links({}, FREE), n, MUCH)["copies"] == pytest.approx(
        2 * (n - 1) / n * MUCH / 2 / RATE + 2 * (COPY_S + (n - 2) * PEER_S)
    )


def test_two_ranks_exchange_by_copies_in_one_stage() -> None:
    found = by_how(Links({}, LinkFacts(1e-3, RATE)), 2, MUCH)["copies"]
    assert found == pytest.approx(MUCH / 2 / RATE + COPY_S + 1e-3)


def test_the_wire_has_f32_for_little_and_bf16_for_much() -> None:
    links = Links({}, FREE)
    little, much = links.sums(gpus(2), MAX_F32_BYTES), links.sums(gpus(2), MAX_F32_BYTES + 4)
    assert {one.wire for one in little} == {"F32"}
    assert {one.wire for one in much} == {"BF16"}
    assert much[0].seconds == pytest.approx(little[0].seconds / 2, rel=1e-3)


def test_one_shots_are_for_little_and_copies_for_much() -> None:
    links = Links({}, LinkFacts(6e-6, 26e9))
    assert {one.how for one in links.sums(gpus(4), 8 << 10)} == {"lane", "copies"}
    assert [one.how for one in links.sums(gpus(4), MAX_ONE_SHOT_BYTES + 4)] == ["copies"]
    for n_bytes in (1, 8 << 10, MAX_ONE_SHOT_BYTES, 1 << 28):
        used = links.sums(gpus(4), n_bytes)[0]
        assert used.how == ("lane" if n_bytes <= MAX_ONE_SHOT_BYTES else "copies")
        assert links.all_reduce_s(gpus(4), n_bytes) == used.seconds


@pytest.mark.parametrize("way", ["nvlink", "p2p", "host"])
def test_where_one_shots_end_copies_are_sooner(way: str) -> None:
    """Or nearly: larger all-reduces never become much cheaper."""
    links = parse_rig(f"4x3090@{way}").links
    last, next_ = (
        links.all_reduce_s(gpus(2), n) for n in (MAX_ONE_SHOT_BYTES, MAX_ONE_SHOT_BYTES + 4)
    )
    assert 0.5 * last < next_ < 4 * last
    assert links.all_reduce_s(gpus(2), 16 << 10) < by_how(links, 2, 16 << 10)["copies"]


def test_pairs_by_the_same_way_share_a_slot_and_others_do_not() -> None:
    """Two bridges among four GPUs: one of three values goes by the bridge, beside the others."""
    ways = all_by("host", 4)
    apart = Links(
        {}, FREE, {**ways, ("cuda:0", "cuda:1"): "nvlink", ("cuda:2", "cuda:3"): "nvlink"}
    )
    shared = Links({}, FREE, ways)
    by_hand = {links: by_how(links, 4, 1000)["lane"] - 2 * PEER_S for links in (apart, shared)}
    assert by_hand[shared] == pytest.approx(3 * 2000 / RATE)
    assert by_hand[apart] == pytest.approx(2 * 2000 / RATE)


def test_the_memory_of_the_host_is_shared_by_all_that_go_through_it() -> None:
    """Each byte of each pair is written and read there: 4 bytes for two ranks, 24 for four."""
    slow = 0.5 * RATE

    def copies(n: int, way: str) -> float:
        links = Links({}, FREE, all_by(way, n), host_bytes_per_s=slow)
        return by_how(links, n, MUCH)["copies"]

    assert copies(2, "host") == pytest.approx(4 * MUCH / 2 / slow, rel=1e-3)
    assert copies(4, "host") == pytest.approx(2 * 24 * MUCH / 2 / 4 / slow, rel=1e-3)
    assert copies(4, "p2p") == pytest.approx(2 * 3 / 4 * MUCH / 2 / RATE, rel=1e-3)


def test_the_slowest_pair_holds_up_a_sum() -> None:
    some = Links({("cuda:1", "cuda:0"): LinkFacts(0.0, RATE)}, LinkFacts(0.5, RATE))
    assert some.all_reduce_s(gpus(2), 8) < 1e-6
    assert some.all_reduce_s(gpus(3), 8) > 0.5


def test_ranks_on_the_cpu_and_beside_it_exchange_f32_by_threads() -> None:
    links = Links({}, FREE)
    for devices in (["cpu", "cpu"], ["cpu", "cuda:0"], ["cpu", "cpu", "cuda:0"]):
        (only,) = links.sums(devices, MUCH)
        assert (only.how, only.wire) == ("threads", "F32")
        assert only.seconds > MUCH / (3 * RATE + RATE)


def test_ranks_that_share_a_gpu_are_near() -> None:
    near, far = Links({}).between("cuda:0", "cuda:0"), Links({}).between("cuda:0", "cuda:1")
    assert near.latency_s < far.latency_s
    assert near.bytes_per_s > far.bytes_per_s
    assert Links({}).between("cpu", "cpu") != near


def test_what_is_covered_by_a_measured_latency_costs_nothing_more() -> None:
    measured = LinkFacts(1e-5, RATE, covered_bytes=64 << 10)
    links = Links({}, measured)
    assert links.all_reduce_s(gpus(2), 32 << 10) == pytest.approx(1e-5)
    bare = Links({}, replace(measured, covered_bytes=0.0))
    assert bare.all_reduce_s(gpus(2), 32 << 10) > 2e-5


@pytest.mark.parametrize(
    ("n_bytes", "measured_us"), [(4 << 10, 4.0), (8 << 10, 5.0), (16 << 10, 7.2), (32 << 10, 11.8)]
)
def test_a_push_of_four_gpus_takes_what_was_measured(n_bytes: int, measured_us: float) -> None:
    """Four V100 behind a PCIe 3.0 switch (sglang-V100#2), without marks: its latency is what the
    smallest sum has beside its bytes, all else follows."""
    slot = 0.84 * 0.985e9 * 16
    latency = 4.0e-6 - 3 * (4 << 10) / slot - 2 * PEER_S
    group = Links({}, LinkFacts(latency, slot)).group(gpus(4))
    assert 1e6 * group.one_shot_s(n_bytes) == pytest.approx(measured_us, rel=0.15)


def test_sums_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.planning.speed.links.MAX_KNOWN", 10)
    links = Links({}, FREE)
    for n_bytes in range(1, 50):
        links.all_reduce_s(gpus(2), n_bytes)
    assert len(links._sums) <= 10
