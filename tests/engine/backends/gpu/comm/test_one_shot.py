"""One-shot all-reduce: the same bits on all ranks, round after round."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.backends.gpu import elementwise
from engine.backends.gpu.comm import one_shot as one_shot_module
from engine.backends.gpu.comm import slots
from engine.backends.gpu.comm.one_shot import MAX_ONE_SHOT, MAX_WORDS, OneShot, OneShotGroups
from engine.backends.gpu.comm.slots import most_waiting
from engine.backends.gpu.kernels import one_shot
from engine.backends.gpu.launch.configs import KernelTarget, use_target
from engine.backends.gpu.launch.graph import NotRepeatable, Tape, capture
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches
from engine.backends.gpu.ops import GpuOps
from engine.backends.gpu.quantised import quantise
from engine.formats.quants.layout import Extent
from engine.hardware.devices.topology import Routes, Way
from engine.model.forward.attention import computing
from engine.model.forward.operands import Addend
from engine.model.layers.norm import LayerNorm, Norm, RMSNorm
from engine.model.sharding.placement import Replicate
from tests.helpers.checked_pass import checked
from tests.helpers.one_shot import (
    CPU,
    Ranks,
    alike,
    expected,
    one_kernel,
    randn,
    ranks_of,
    values_of,
    write_only,
)

META = torch.device("meta")


@pytest.fixture(params=["f32", "bf16"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Type of the packets: F32, or BF16 for values of more than 3 elements."""
    if request.param == "bf16":
        monkeypatch.setattr(one_shot_module, "MAX_IN_F32", 3)
    return str(request.param)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(("n", "empty"), [(2, ()), (2, (0,)), (3, (2,)), (5, (0, 3)), (8, (1, 7))])
def test_all_members_have_the_same_bits(n: int, empty: Sequence[int]) -> None:
    shapes = [(1, 32), (2, 9), (5,), (2, 9)]
    with ranks_of(n) as ranks:
        for seed, shape in enumerate(shapes if n < 5 else shapes[:2]):
            values = values_of(n, shape, empty, seed)
            assert alike(ranks.sums(values, shape), expected(values))
        assert ranks.one_shots.problem() is None


def test_rows_that_check_guesses_are_added_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In F32, however many they are, in several rounds if a slot cannot hold all."""
    monkeypatch.setattr(one_shot_module, "MAX_IN_F32", 3)
    monkeypatch.setattr(one_shot_module, "MAX_WORDS", 20)

    def summed(one_shot: OneShot) -> Tensor:
        with computing(checked(2)):
            return one_shot.all_reduce(values[one_shot.rank], (3, 17))

    values = values_of(3, (3, 17), (1,), 0)
    first, second = (value for value in values if value is not None)
    with ranks_of(3) as ranks:
        found = [x for x in ranks.all(summed) if isinstance(x, Tensor)]
        assert alike(found, first + second)


@pytest.mark.usefixtures("wire")
def test_numbers_that_are_none(wire: str) -> None:
    """Zeros keep their sign; NaN and infinity survive, whatever their bits."""
    odd = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3.4e38, 1e-40]
    x = torch.tensor([odd]).repeat(1, 2)
    x.view(torch.int32)[0, 12:15] = torch.tensor([0x7FFFFFFF, -1, 0x7FC00001])
    with ranks_of(2) as ranks:
        (one, other) = ranks.sums([x, None], x.shape)
        assert alike([one], other)
        if wire == "f32":
            assert alike([one], x)
        else:
            assert torch.equal(one.isnan(), x.isnan())
            assert alike([one.nan_to_num(7.0)], x.bfloat16().float().nan_to_num(7.0))
        (one, other) = ranks.sums([x / 4, x / 4], x.shape)
        assert alike([one.nan_to_num(7.0)], other.nan_to_num(7.0))
        assert torch.equal(one.isinf(), x.isinf())


@pytest.mark.usefixtures("wire")
def test_several_programs_with_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round counts once, for values of one program and of many in turn."""
    monkeypatch.setattr(one_shot_module, "BLOCK", 128)
    with ranks_of(2) as ranks:
        for seed, n in enumerate((300, 1, 129, 513, 128)):
            values = values_of(2, (n,), (1,) if n == 129 else (), seed)
            assert alike(ranks.sums(values, (n,)), expected(values))
            assert ranks.one_shot(0)._words.tolist() == [seed + 2, 0]


def norm_of(n: int, kind: type[Norm] = RMSNorm, *, has_bias: bool = False) -> Norm:
    norm = kind(n, 1e-5, Replicate((0,)))
    norm.weight = randn(n, seed=5)
    norm.bias = randn(n, seed=6) if has_bias else None
    return norm


def same(found: object, wanted: tuple[Tensor, Tensor | None] | None) -> bool:
    """Return whether two pairs of hidden state and normed state have the same bits."""
    assert isinstance(found, tuple)
    assert wanted is not None
    pairs = zip(found, wanted, strict=True)
    return all((a is None and b is None) or alike([a], b) for a, b in pairs)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("n", [3, 48])
def test_sum_and_norm_in_one_kernel(n: int) -> None:
    shape, norm = (2, n), norm_of(n)
    x, bias = randn(*shape, seed=9), randn(n, seed=4)
    cases = [
        (Addend(None), norm, ()),
        (Addend(None, bias, norm_of(n, LayerNorm, has_bias=True), 0.5), None, (1,)),
        (Addend(None, bias, sum_scale=randn(1)), norm_of(n, LayerNorm), (0,)),
    ]
    with ranks_of(3) as ranks:
        for seed, (addend, outer, empty) in enumerate(cases):
            values = values_of(3, shape, empty, seed)
            found = ranks.all(
                lambda one_shot, a=addend, o=outer, v=values: one_shot.add_norm(
                    x, a._replace(partial=v[one_shot.seat]), o
                )
            )
            wanted = elementwise.add_norm(x, addend.summed(expected(values)), outer)
            assert all(same(one, wanted) for one in found)


@pytest.mark.parametrize("how", ["int8", "f32"])
def test_normed_rows_are_rounded_on_the_way(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelTarget, "gemv_operands", how)
    values, x, norm = values_of(2, (2, 160), (), 1), randn(2, 160, seed=9), norm_of(160)
    with ranks_of(2) as ranks:
        found = ranks.all(
            lambda one_shot: one_shot.add_norm(x, Addend(values[one_shot.seat]), norm, 1)
        )
    plain = elementwise.add_norm(x, Addend(expected(values)), norm)
    assert plain is not None
    assert plain[1] is not None
    alone = quantise(plain[1], Extent.of(0, 160), 1)
    for one in found:
        assert isinstance(one, tuple)
        starts: list[KernelLaunch] = []
        with intercept_launches(lambda start: starts.append(start) is None):  # noqa: B023
            rows = quantise(one[1], Extent.of(0, 160), 1)
        assert not starts
        assert torch.equal(rows.numbers, alone.numbers)
        assert torch.equal(rows.facts, alone.facts)
        assert not rows.counters.any()


def test_arithmetic_by_a_one_shot() -> None:
    """A rank's add_norm uses the one-shot all-reduce, with or without the fused kernel."""
    values, x, norm = values_of(2, (2, 48), (), 3), randn(2, 48, seed=9), norm_of(48)
    norm_without = norm_of(48)
    norm_without.weight = norm_without.weight.double()  # no kernel reads it
    with ranks_of(2) as ranks:
        for outer in (norm, norm_without):
            found = ranks.all(
                lambda one_shot, o=outer: GpuOps(CPU).add_norm(
                    x, Addend(values[one_shot.seat]), o, one_shot
                )
            )
            wanted = GpuOps(CPU).add_norm(x, Addend(expected(values)), outer)
            for one in found:
                assert isinstance(one, tuple)
                assert torch.equal(one[0], wanted[0])
                assert torch.equal(one[1], wanted[1])


@pytest.mark.parametrize("m", [1, 7, 150])
def test_words_of_all_members(m: int) -> None:
    generator = torch.Generator().manual_seed(m)
    own = torch.randint(-(1 << 31), 1 << 31, (3, m), generator=generator).int()
    with ranks_of(3) as ranks:
        for turn in range(3):
            mine = own * (turn + 1)
            found = ranks.all(lambda one_shot, w=mine: one_shot.words(w[one_shot.seat]))
            assert all(isinstance(one, Tensor) and torch.equal(one, mine) for one in found)


@pytest.mark.parametrize("start", [(1 << 31) - 2, -2])
def test_numbers_of_rounds_begin_anew(start: int) -> None:
    with ranks_of(2) as ranks:
        for seat in ranks.group:
            ranks.one_shot(seat)._words[0] = start
        for seed in range(4):
            values = values_of(2, (1, 20), (), seed)
            assert alike(ranks.sums(values, (1, 20)), expected(values))
        assert ranks.one_shot(0)._words[0] == ((start + 4 + (1 << 31)) % (1 << 32)) - (1 << 31)


def test_old_packets_are_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """All old packets are rewritten, including ones beyond this size of rounds."""
    renewed = one_shot.RENEWED.value
    monkeypatch.setattr(one_shot_module, "SLOT", 2 + 2 * 3 * renewed)
    with ranks_of(2) as ranks:
        slot = ranks.one_shot(1)._end.slots[0]._packets  # type: ignore[attr-defined]
        slot.fill_(77 << 32)  # as if from a round long ago
        for seat in ranks.group:
            ranks.one_shot(seat)._words[0] = 70
        for seed in range(6):
            values = values_of(2, (1, 20), (0,) if seed % 3 else (), seed)
            assert alike(ranks.sums(values, (1, 20)), expected(values))
        flags = slot >> 32
        assert bool(((flags >= 68) & (flags < 76)).all())
        values = values_of(2, (120,), (), 9)
        assert alike(ranks.sums(values, (120,)), expected(values))


def soak(ranks: Ranks, n_replay: int, n_sum: int) -> None:
    """Replay tapes of all ranks with changing values; each bit must be right each time.

    Args:
        n_sum: number of all-reduces in a tape, each over the previous result.
    """
    xs = [randn(1, 8, seed=seat) for seat in ranks.group]

    def sums(one_shot: OneShot) -> Tensor:
        x = xs[one_shot.seat]
        for _ in range(n_sum):
            x = one_shot.all_reduce(x, x.shape)
        return x

    ranks.all(sums)
    tapes = ranks.all(lambda one_shot: Tape(lambda: sums(one_shot)))
    for turn in range(n_replay):
        for seat, x in enumerate(xs):
            x.copy_(randn(1, 8, seed=1000 + turn * len(xs) + seat))
        list(ranks.pool.map(lambda one: one.replay(), tapes))
        wanted = expected(xs)
        for _ in range(n_sum - 1):
            wanted = expected([wanted] * len(xs))
        assert alike([one.result for one in tapes], wanted), f"replay {turn}"
    assert ranks.one_shots.problem() is None


@pytest.mark.parametrize(("n", "n_replay"), [(2, 50), (3, 8)])
def test_rounds_in_a_row(n: int, n_replay: int) -> None:
    with ranks_of(n) as ranks:
        soak(ranks, n_replay, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_replays() -> None:
    with ranks_of(2) as ranks:
        soak(ranks, 10_000, 1)


def test_one_kernel_for_all() -> None:
    """GPUs launch a single kernel, which writes, waits and adds."""
    values, x, norm = values_of(2, (2, 48), (), 3), randn(2, 48, seed=9), norm_of(48)
    wanted = elementwise.add_norm(x, Addend(expected(values)), norm)
    with ranks_of(2) as ranks:
        write_only(ranks, 1, lambda one_shot: one_shot.add_norm(x, Addend(values[1]), norm))
        with one_kernel():
            assert same(ranks.one_shot(0).add_norm(x, Addend(values[0]), norm), wanted)
            assert same(ranks.one_shot(1).add_norm(x, Addend(values[1]), norm), wanted)
        assert ranks.one_shots.problem() is None


def test_first_meetings_are_not_captured() -> None:
    one_shots = OneShotGroups([CPU] * 2, Routes(), lambda rank, group: None)
    with pytest.raises(NotRepeatable):
        capture(CPU, lambda: one_shots.one_shot(0, (0, 1)))
    assert one_shots.one_shot(0, (0, 1)) is not None
    assert capture(CPU, lambda: one_shots.one_shot(1, (0, 1)) is not None).result


def test_who_has_no_one_shot() -> None:
    one_shots = OneShotGroups([CPU] * 2, Routes())
    assert one_shots.one_shot(0, (0,)) is None
    assert OneShotGroups([META] * 9, Routes()).one_shot(0, tuple(range(9))) is None
    assert OneShotGroups([META] * 8, Routes()).one_shot(0, tuple(range(8))) is not None
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    cut = OneShotGroups(devices, Routes({("cuda:0", "cuda:1"): Way(None, "host")}))
    assert cut.one_shot(0, (0, 1)) is None
    assert one_shots.one_shot(0, (0, 1)) is not None
    one_shots.retire("it gave other bits")
    assert one_shots.one_shot(0, (0, 1)) is None


@pytest.mark.parametrize(
    ("loading", "blocking", "numbers", "is_made"),
    [
        ("LAZY", "", (0, 0), False),
        ("LAZY", "", (0, 1), True),
        ("EAGER", "", (0, 0), True),
        ("EAGER", "1", (0, 1), False),
        ("", "0", (1, 1), False),
    ],
)
def test_kernels_that_could_not_run_together_have_none(
    monkeypatch: pytest.MonkeyPatch, loading: str, blocking: str, numbers: tuple[int, int],
    is_made: bool,
) -> None:  # fmt: skip
    tried = []
    monkeypatch.setattr(
        OneShotGroups, "_connected", lambda one_shots, group: tried.append(group) or ()
    )
    monkeypatch.setenv("CUDA_MODULE_LOADING", loading)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    one_shots = OneShotGroups([torch.device("cuda", n) for n in numbers], Routes())
    assert one_shots.one_shot(0, (0, 1)) is None
    assert bool(tried) == is_made


def test_what_a_one_shot_takes() -> None:
    one_shot = OneShotGroups([META] * 2, Routes()).one_shot(0, (0, 1))
    assert one_shot is not None
    assert (
        one_shot.serves(1),
        one_shot.serves(MAX_ONE_SHOT),
        one_shot.serves(MAX_ONE_SHOT + 1),
    ) == (1, 1, 0)
    long = torch.empty(2, MAX_ONE_SHOT, device=META)
    assert one_shot.add_norm(long, Addend(long), None) is None
    odd = torch.empty(MAX_ONE_SHOT // 5, 5, device=META)  # more packets than it has numbers
    assert one_shot.add_norm(odd, Addend(odd), None) is None
    assert one_shot.words(torch.empty(MAX_WORDS, dtype=torch.int32, device=META)).shape[0] == 2


def test_programs_of_ranks_on_one_gpu_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that wait for each other must run together; a single rank needs no limit."""
    monkeypatch.setattr(slots, "target_of", lambda device: KernelTarget("nvidia", 86, 28))
    first, second = (torch.device("cuda", n) for n in range(2))
    assert [most_waiting(first, 2), most_waiting(second, 1)] == [7, sys.maxsize]
    with ranks_of(2) as ranks:
        one_shot = ranks.one_shot(0)
        one_shot._end = replace(one_shot._end, most_programs=7)
        rows = torch.zeros(8, 8)
        assert one_shot.serves(7 * one_shot_module.BLOCK)
        assert not one_shot.serves(7 * one_shot_module.BLOCK + 1)
        assert one_shot.add_norm(rows, Addend(rows), None) is None


@pytest.mark.parametrize(("n_row", "n"), [(1, 1), (80, 128), (1, 4096), (4, 9000), (3, 16384)])
def test_each_pair_is_read_by_one_thread(
    n_row: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second reader could see the pair later than the first, and miss it."""
    starts: list[KernelLaunch] = []
    x = torch.empty(n_row, n, device=META)
    with (
        use_target(KernelTarget("nvidia", 90, 132)),
        intercept_launches(lambda start: starts.append(start) is not None),
    ):
        one_shot = OneShotGroups([META] * 2, Routes()).one_shot(0, (0, 1))
        assert one_shot is not None
        assert one_shot.add_norm(x, Addend(x), None) is not None
        one_shot.all_reduce(x, x.shape)
        one_shot.words(torch.empty(n, dtype=torch.int32, device=META))
    for start in starts:
        size = start.constants.get("SIZE", 0) // (4 if start.constants.get("HALVES") else 2)
        assert (start.constants.get("PAIRS") or size) >= 32 * start.num_warps
    assert len(starts) == 3
    monkeypatch.setattr(one_shot_module, "warps_of", lambda size: 32 if size < 4096 else 128)
    with pytest.raises(AssertionError, match="read by one thread"):
        one_shot.all_reduce(x, x.shape)


def test_without_memory() -> None:
    """A collective is one kernel on a GPU, and two where kernels are interpreted."""
    x = torch.empty(2, 64, device=META)
    norm = SimpleNamespace(kind="rms", weight=x[0].clone(), bias=None, eps=1e-5, is_absent=False)
    for target, n_start in ((KernelTarget("nvidia", 90, 132), 1), (KernelTarget("amd", 0, 96), 1)):
        starts: list[KernelLaunch] = []
        with use_target(target), intercept_launches(lambda start: starts.append(start) is not None):  # noqa: B023
            one_shot = OneShotGroups([META] * 3, Routes()).one_shot(1, (0, 1, 2))
            assert one_shot is not None
            made = one_shot.add_norm(x, Addend(None), norm, 1)  # type: ignore[arg-type]
            assert made is not None
            assert made[0].shape == x.shape
            assert one_shot.all_reduce(None, (2, 64)).is_meta
            assert one_shot.words(torch.empty(9, dtype=torch.int32, device=META)).shape == (3, 9)
        assert len(starts) == 3 * n_start


def test_memory_is_told() -> None:
    one_shots = OneShotGroups([CPU] * 3, Routes())
    assert one_shots.n_bytes(0) == 0
    one_shots.one_shot(2, (0, 2))
    slot = 2 * one_shot_module.SLOT * 8
    assert slot < one_shots.n_bytes(0) < slot + 4096
    assert one_shots.n_bytes(1) == 0
    one_shots.one_shot(2, (0, 1, 2))
    assert 3 * slot < one_shots.n_bytes(2) < 3 * slot + 4096
