"""Predicted speed, against sums that can be done by hand."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.planning.evaluation.workload import BlockWorkload, ModelWorkload, RankWorkload, Weights
from engine.planning.speed.facts import CACHE, DeviceFacts, LinkFacts, WeightRate
from engine.planning.speed.links import Links
from engine.planning.speed.speed_model import CANDIDATE_BYTES, SpeedModel

FREE = LinkFacts(0.0, 1e30)
SLOW = LinkFacts(1e-3, 1e6)
GPU = DeviceFacts("cuda:0", bytes_per_s=100.0, flop_per_s=1000.0)
OTHER = replace(GPU, device="cuda:1")
NOTHING = RankWorkload()


def links(facts: LinkFacts = FREE) -> Links:
    return Links({("cpu", "cpu"): facts}, facts)


def model(*blocks: BlockWorkload, head: dict[int, RankWorkload] | None = None) -> ModelWorkload:
    first, last = blocks[0].group, blocks[-1].group
    ends = dict.fromkeys(last, NOTHING) if head is None else head
    return ModelWorkload(blocks, dict.fromkeys(first, NOTHING), ends, n_embd=10, n_vocab=100)


def block(count: int = 1, n_reduce: int = 1, **loads: RankWorkload) -> BlockWorkload:
    """Return equal blocks with these workloads of ranks: `r0=…, r1=…`."""
    ranks = {int(name[1:]): load for name, load in loads.items()}
    return BlockWorkload(count, tuple(ranks), ranks, n_reduce)


def alone(load: RankWorkload, device: DeviceFacts = GPU, position: int = 0, n: int = 1) -> float:
    """Return the seconds of one rank alone with this workload."""
    speed = SpeedModel([replace(device, device="cpu")], links())
    if n == 1:
        return speed.decode(model(block(r0=load)), position).seconds
    return speed.prefill(model(block(r0=load)), n, n).seconds


def test_reading_or_multiplying_counts_whichever_takes_longer() -> None:
    assert alone(RankWorkload(read_bytes=50, flop=100)) == pytest.approx(0.5)
    assert alone(RankWorkload(read_bytes=50, flop=900)) == pytest.approx(0.9)


def test_of_a_prompt_only_the_last_token_goes_through_the_end() -> None:
    """It is counted once for each batch, behind all tokens before it."""
    load = RankWorkload(flop=100, kv_flop=10)
    whole, ending = block(2, r0=load), replace(block(1, r0=load), is_ending=True)
    speed = SpeedModel([replace(GPU, device="cpu")], links())
    before, behind = (speed.prefill(model(*blocks), 20, 10).path.compute_s
                      for blocks in ([whole], [whole, ending]))  # fmt: skip
    seen = 10 + 20
    assert (behind - before) * 1000 == pytest.approx(2 * 100 + seen * 10)
    assert (
        speed.decode(model(whole, ending)).seconds == speed.decode(model(block(3, r0=load))).seconds
    )


def test_each_kind_of_weights_is_read_at_its_own_speed() -> None:
    device = replace(GPU, rates={"Q4_K": WeightRate(50.0, 50.0, 1000.0)})
    load = RankWorkload(read_bytes=30, flop=0, kinds=(Weights("Q4_K", 20, 0),))
    assert alone(load, device) == pytest.approx(20 / 50 + 10 / 100)
    known = RankWorkload(read_bytes=30, kinds=(Weights("Q4_K", 20, 0), Weights("F32", 10, 0)))
    assert alone(known, device) == pytest.approx(alone(load, device))


def test_a_matrix_costs_time_however_small_it_is() -> None:
    device = replace(GPU, op_s=0.01, routed_op_s=0.03, host_s=0.5)
    assert alone(RankWorkload(n_op=7), device) == pytest.approx(0.07 + 0.5)
    routed = RankWorkload(read_bytes=1, batch_bytes=8, n_op=7)
    assert alone(routed, device) == pytest.approx(0.21 + 0.01 + 0.5)


def test_a_longer_context_takes_longer_up_to_the_window() -> None:
    load = RankWorkload(kv_bytes=2)
    assert alone(load, position=9) == pytest.approx(10 * 2 / 100)
    assert alone(replace(load, window=4), position=9) == pytest.approx(4 * 2 / 100)
    assert alone(replace(load, window=4), position=1) == pytest.approx(2 * 2 / 100)
    assert alone(load, replace(GPU, cache_part=0.5), 9) == pytest.approx(10 * 2 / 50)
    device = replace(GPU, rates={CACHE: WeightRate(1000.0, 1000.0, 10.0)})
    assert alone(replace(load, kv_flop=3), device, 9) == pytest.approx(10 * 3 / 10)


def test_a_prompt_multiplies_with_what_is_read_once() -> None:
    assert alone(RankWorkload(read_bytes=50, flop=10), n=80) == pytest.approx(80 * 10 / 1000)
    assert alone(RankWorkload(read_bytes=500, flop=10), n=40) == pytest.approx(5.0)


def test_tokens_of_a_prompt_see_each_other() -> None:
    """The first token sees itself, the last one all; the cache is read once."""
    load = RankWorkload(kv_flop=1.0)
    assert alone(load, n=10) == pytest.approx(55 / 1000)
    assert alone(replace(load, window=3), n=10) == pytest.approx((1 + 2 + 8 * 3) / 1000)
    assert alone(RankWorkload(kv_bytes=1.0), n=10) == pytest.approx(10 / 100)


def test_batches_of_a_prompt_add_up() -> None:
    load = RankWorkload(kv_flop=1.0, read_bytes=200)
    speed = SpeedModel([replace(GPU, device="cpu")], links())
    whole = model(block(r0=load))
    batched = speed.prefill(whole, 25, 10)
    spans = (0, 10), (10, 20), (20, 25)
    by_hand = [200 / 100 + sum(range(a + 1, b + 1)) / 1000 for a, b in spans]
    assert batched.seconds == pytest.approx(sum(by_hand))
    assert batched.n_tokens == 25
    after = speed.prefill(whole, 10, 10, position=20)
    assert after.seconds == pytest.approx(2 + sum(range(21, 31)) / 1000)


def test_a_batch_reads_all_experts_and_a_short_one_not_more_than_its_tokens_need() -> None:
    load = RankWorkload(read_bytes=100, batch_bytes=800)
    assert alone(load) == pytest.approx(1.0)
    assert alone(load, n=4) == pytest.approx(4.0)
    assert alone(load, n=20) == pytest.approx(8.0)


def test_weights_that_are_dequantised_for_a_prompt_cost_traffic_once_a_batch() -> None:
    device = replace(GPU, unpack_bytes=4.0)
    quantised = RankWorkload(read_bytes=10, flop=100, kinds=(Weights("Q4_K", 10, 100),))
    plain = RankWorkload(read_bytes=10, flop=100, kinds=(Weights("F16", 10, 100),))
    for n in (20, 40):
        gap = alone(quantised, device, n=n) - alone(plain, device, n=n)
        assert gap == pytest.approx(50 * 4 / 100)
    assert alone(quantised, device) == pytest.approx(alone(plain, device))


def test_the_fast_device_waits_for_the_slow_one() -> None:
    speed = SpeedModel([GPU, OTHER], links())
    found = speed.decode(
        model(block(3, r0=RankWorkload(read_bytes=10), r1=RankWorkload(read_bytes=40)))
    )
    assert found.seconds == pytest.approx(3 * 0.4)
    fast, slow = found.ranks
    assert (fast.memory_s, fast.wait_s) == pytest.approx((0.3, 0.9))
    assert (slow.memory_s, slow.wait_s, slow.waited_s) == pytest.approx((1.2, 0.0, 0.9))
    assert (fast.limited_by, slow.limited_by) == ("wait", "memory")
    assert found.reason == "GPU 1 is slower; the other waits for it 75 % of the time."


def test_groups_compute_one_after_the_other() -> None:
    speed = SpeedModel([GPU, OTHER], links(LinkFacts(0.125, 1e30)))
    found = speed.decode(
        model(block(2, r0=RankWorkload(read_bytes=10)), block(3, r1=RankWorkload(read_bytes=20)))
    )
    move = 0.125
    assert found.seconds == pytest.approx(2 * 0.1 + move + 3 * 0.2)
    first, second = found.ranks
    assert (first.idle_s, first.wait_s) == pytest.approx((0.6, 0.0))
    assert (second.idle_s, second.link_s) == pytest.approx((0.2, move))
    for rank in found.ranks:
        whole = rank.busy_s + rank.wait_s + rank.link_s + rank.idle_s
        assert whole == pytest.approx(found.seconds)


def test_sums_cost_latency_and_payload() -> None:
    load = RankWorkload(read_bytes=1)
    slow, free = (SpeedModel([GPU, OTHER], links(facts)) for facts in (SLOW, FREE))
    loads = model(block(5, 2, r0=load, r1=load))
    gap = slow.decode(loads).seconds - free.decode(loads).seconds
    embedding = 1
    one = links(SLOW).all_reduce_s(["cuda:0", "cuda:1"], 4 * 10)
    none = links(FREE).all_reduce_s(["cuda:0", "cuda:1"], 4 * 10)
    assert one > SLOW.latency_s + 4 * 10 / SLOW.bytes_per_s
    devices = ["cuda:0", "cuda:1"]
    sampling_s = links(SLOW).all_reduce_s(devices, CANDIDATE_BYTES)
    sampling_s -= links(FREE).all_reduce_s(devices, CANDIDATE_BYTES)
    assert gap == pytest.approx((10 + embedding) * (one - none) + sampling_s)


def test_only_sampling_on_gpus_needs_no_logits() -> None:
    """The logits of a prompt go to the host, and so do those of a head partly on the CPU."""
    load, facts = RankWorkload(read_bytes=1), LinkFacts(1.0, 1.0)
    ends = {0: load, 1: load}
    alone, both = model(block(r0=load)), model(block(r0=load, r1=load), head=ends)
    assert SpeedModel([GPU], links(facts)).decode(alone).path.link_s == 0.0
    assert SpeedModel([GPU], links(facts)).prefill(alone, 1, 1).path.link_s == 1.0 + 4 * 100
    on_cpu = SpeedModel([CPU, GPU], links(facts)).decode(both).path.link_s
    on_gpus = SpeedModel([GPU, OTHER], links(facts)).decode(both).path.link_s
    sums = [
        2 * links(facts).all_reduce_s(devices, 4 * 10)
        for devices in (["cpu", "cuda:0"], ["cuda:0", "cuda:1"])
    ]
    assert on_cpu - sums[0] == pytest.approx(1.0 + 4 * 100 / 2)
    assert on_gpus - sums[1] == pytest.approx(1.0 + 2 * CANDIDATE_BYTES)


CPU = DeviceFacts("cpu", 100.0, 1000.0, n_threads=4, thread_bytes_per_s=40.0)


def test_ranks_on_one_cpu_share_its_threads() -> None:
    """Two of four threads read as fast as two can; all together as fast as memory is."""
    alone = SpeedModel([CPU], links()).decode(model(block(r0=RankWorkload(read_bytes=100)))).seconds
    assert alone == pytest.approx(1.0)
    half = RankWorkload(read_bytes=50)
    both = SpeedModel([CPU, CPU], links()).decode(model(block(r0=half, r1=half)))
    assert both.seconds == pytest.approx(1.0)
    uneven = SpeedModel([CPU, CPU], links()).decode(
        model(block(r0=RankWorkload(read_bytes=80), r1=RankWorkload(read_bytes=20)))
    )
    assert uneven.seconds == pytest.approx(20 / 50 * 1 + (80 - 20) / 80)
    in_turn = SpeedModel([CPU, CPU], links()).decode(model(block(r0=half), block(r1=half)))
    assert in_turn.seconds == pytest.approx(2 * 50 / 80)


def test_fewer_threads_are_slower_where_the_memory_could_give_more() -> None:
    load = model(block(r0=RankWorkload(read_bytes=100, flop=0)))
    times = [SpeedModel([CPU], links(), n).decode(load).seconds for n in (1, 2, 3, 4, 99)]
    assert times == pytest.approx([100 / 40, 100 / 80, 1.0, 1.0, 1.0])


def test_a_sentence_names_what_limits() -> None:
    def reason(load: RankWorkload, link: LinkFacts = FREE, **facts: float) -> str:
        devices = [replace(GPU, **facts), replace(OTHER, **facts)]
        return SpeedModel(devices, links(link)).decode(model(block(r0=load, r1=load))).reason

    assert reason(RankWorkload(read_bytes=99, n_op=1), op_s=0.01) == (
        "Limited by memory bandwidth: reading takes 99 % of the time."
    )
    assert "compute" in reason(RankWorkload(flop=99))
    assert "per-operation" in reason(RankWorkload(n_op=3), op_s=0.1)
    assert "links" in reason(RankWorkload(read_bytes=0.01), SLOW)
    assert "between tokens" in reason(RankWorkload(read_bytes=1), host_s=9.0)
    ranks = [CPU, CPU]
    uneven = model(block(r0=RankWorkload(read_bytes=90), r1=RankWorkload(read_bytes=1)))
    found = SpeedModel(ranks, links()).decode(uneven)
    assert found.reason.startswith("CPU 0 is slower; the other waits for it 9")
    on_gpu = SpeedModel([replace(GPU, device="cuda:3")] * 2, links()).decode(uneven)
    assert on_gpu.reason.startswith("GPU 3 (rank 0) is slower; ")
    three = model(block(**dict.fromkeys(("r1", "r2"), RankWorkload()), r0=RankWorkload(90)))
    found = SpeedModel([GPU, OTHER, CPU], links()).decode(three)
    assert found.reason.startswith("GPU 0 is slowest; the others wait for it ")


def test_a_corrected_prediction_keeps_its_proportions() -> None:
    found = SpeedModel([GPU, OTHER], links(SLOW)).decode(
        model(block(r0=RankWorkload(read_bytes=10), r1=RankWorkload(read_bytes=40)))
    )
    slower = found.scaled(2.0)
    assert slower.tokens_per_s == pytest.approx(found.tokens_per_s / 2)
    assert slower.reason == found.reason
    assert slower.ranks[1].busy_s == pytest.approx(2 * found.ranks[1].busy_s)


def test_a_prediction_takes_less_than_a_millisecond() -> None:
    """80 layers of two parts each, no two alike, on four devices, once they are known."""
    rates = {"Q4_K": WeightRate(9, 9, 9)}
    devices = [replace(GPU, device=f"cuda:{n}", rates=rates) for n in range(4)]
    kinds = (Weights("Q4_K", 3.0, 4.0), Weights("Q6_K", 1.0, 2.0))
    blocks = []
    for n in range(160):
        loads = {r: RankWorkload(4.0 + n, 6.0, 0.1, 0, 4, kinds, 0.1, 9.0) for r in range(4)}
        blocks.append(BlockWorkload(1, (0, 1, 2, 3), loads, 1))
    speed, many = SpeedModel(devices, links(SLOW)), model(*blocks)
    few = model(*(replace(block, count=40) for block in blocks[:4]))
    assert _best_seconds(lambda: speed.decode(few, 4096)) < 1e-3
    assert _best_seconds(lambda: speed.decode(many, 4096)) < 3e-3  # 1 ms where nothing else runs
    known = speed.decode(many, 4096)
    assert known == SpeedModel(devices, links(SLOW)).decode(many, 4096)


def _best_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.planning.speed.speed_model.MAX_KNOWN", 10)
    speed = SpeedModel([GPU, OTHER], links())
    for position in range(50):
        load = RankWorkload(read_bytes=position, kv_bytes=1.0)
        found = speed.decode(model(block(r0=load, r1=load)), position)
        fresh = SpeedModel([GPU, OTHER], links()).decode(model(block(r0=load, r1=load)), position)
        assert found == fresh
    assert len(speed._known) <= 20
