"""The search on made-up landscapes: how near it comes, with how many trials, and when it stops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from random import Random

import pytest

from engine.errors import Cancelled
from engine.load_params import LoadParams
from engine.planning.search.model_space import Candidate, Family, minimise, ranges
from engine.planning.search.results import Goal, Sample, Speeds, Trial, best_of, reason_for_best
from engine.planning.search.split_search import (
    Infeasible,
    SplitSearch,
    TrialBudget,
    expected_trials,
)

GOAL = Goal("decode", 0, 1)
N_STEP = 100

Split = tuple[float, ...]
Cost = Callable[[tuple[str, ...], Split], float]


@dataclass
class HundredPositions:
    """A handle with a hundred positions."""

    base: Split
    number: int

    def __len__(self) -> int:
        return N_STEP + 1

    def split(self, index: int) -> Split:
        both = self.base[self.number] + self.base[self.number + 1]
        part = both * index / N_STEP
        return (*self.base[: self.number], part, both - part, *self.base[self.number + 2 :])

    def nearest(self, split: Split) -> int:
        return round(
            N_STEP * split[self.number] / (split[self.number] + split[self.number + 1] or 1)
        )


@dataclass
class World:
    """Seconds of a token by devices and split; predictions need not be true."""

    truth: Cost
    predicted: Cost
    starts: dict[tuple[str, ...], Split]
    fits: Callable[[tuple[str, ...], Split], bool] = lambda _devices, _split: True
    noise: float = 0.0
    trial_s: float = 1.0
    busy: Callable[[Split], tuple[float, ...]] | None = None
    seconds: float = 0.0
    measured: list[tuple[tuple[str, ...], Split]] = field(default_factory=list)
    dice: Random = field(default_factory=lambda: Random(1))

    def families(self) -> Sequence[Family]:
        found = [
            Family(LoadParams("m", devices), split, self.predicted(devices, split))
            for devices, split in self.starts.items()
        ]
        return sorted(found, key=lambda family: family.predicted_s)

    def candidate(self, family: Family, split: Split) -> Candidate | None:
        devices = family.params.devices
        if not self.fits(devices, split) or min(split) == 0:
            return None
        key = devices, tuple(round(share * N_STEP) for share in split)
        expected = Speeds(1.0, 1 / self.predicted(devices, split))
        params = LoadParams("m", devices, split)
        return Candidate(params, key, split, expected, "Limited by tests.")

    def handle(self, family: Family, split: Split, number: int) -> HundredPositions:
        return HundredPositions(split, number)

    def measure(self, candidate: Candidate) -> Sample:
        devices, split = candidate.params.devices, candidate.shares
        self.seconds += self.trial_s
        self.measured.append((devices, split))
        cost = self.truth(devices, split)
        if cost == inf:
            raise Infeasible("no memory")
        rates = [1 / (cost * (1 + self.dice.uniform(-self.noise, self.noise))) for _ in range(3)]
        return Sample((1.0,), tuple(rates), self.busy(split) if self.busy else ())

    def search(self, budget_s: float = 1000) -> SplitSearch:
        clock = TrialBudget(budget_s, self.trial_s, lambda: self.seconds)
        search = SplitSearch(self, GOAL, self.measure, clock)
        search.run()
        return search

    def found(self, search: SplitSearch) -> tuple[Trial, float]:
        """Return the best trial and its true seconds."""
        at = best_of(search.trials, GOAL)
        assert at is not None
        trial = search.trials[at]
        return trial, self.truth(trial.devices, trial.shares)


def slowest(*speeds: float, fixed: float = 0.0) -> Callable[[Split], float]:
    """Return the time of a token if all wait for the slowest rank."""
    return lambda split: fixed + max(x / speed for x, speed in zip(split, speeds, strict=True))


def two(truth: Callable[[Split], float], start: float = 0.5, **more: object) -> World:
    """Return a world of two devices, each alone as fast as with all of the share."""
    starts = {("cuda:0",): (1.0,), ("cuda:1",): (1.0,), ("cuda:0", "cuda:1"): (start, 1 - start)}

    def cost(devices: tuple[str, ...], split: Split) -> float:
        alone = {("cuda:0",): (1.0, 0.0), ("cuda:1",): (0.0, 1.0)}
        return truth(alone.get(devices, split))

    return World(cost, cost, starts, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimum", range(0, 101, 7))
@pytest.mark.parametrize("start", [0, 30, 50, 100])
def test_one_way_is_searched_with_few_costs(optimum: int, start: int) -> None:
    asked: dict[int, float] = {}

    def cost(index: int) -> float:
        assert 0 <= index <= N_STEP
        return asked.setdefault(index, 1 + abs(index - optimum) / 50)

    best = minimise(cost, N_STEP + 1, start, 10, 2)
    assert abs(best - optimum) <= 2
    assert len(asked) <= 13
    if start == optimum:
        assert len(asked) <= 7


def test_a_way_with_infinite_ends() -> None:
    def cost(index: int) -> float:
        return abs(index - 10) if 40 <= index <= 60 else inf

    assert minimise(cost, 101, 50, 10, 1) in (40, 41)
    assert minimise(lambda _: inf, 101, 50, 10, 1) == 50
    assert minimise(lambda _: 1.0, 1, 0, 1, 1) == 0


@pytest.mark.parametrize("share", [0.25, 0.5, 0.61, 0.8])
def test_two_devices_come_near_the_best_share(share: float) -> None:
    world = two(slowest(share, 1 - share), start=min(0.9, share + 0.15))
    search = world.search()
    winner, seconds = world.found(search)
    assert winner.devices == ("cuda:0", "cuda:1")
    assert seconds <= 1.05
    assert search.is_complete
    assert len(world.measured) <= 3 + 10 + 6


def test_a_prediction_that_is_right_saves_trials() -> None:
    world = two(slowest(0.6, 0.4), start=0.6)
    world.search()
    wrong = two(slowest(0.6, 0.4), start=0.1)
    wrong.search()
    assert len(world.measured) < len(wrong.measured)
    assert len(world.measured) <= 3 + 6 + 6
    assert world.found(wrong.search())[1] <= 1.05


def test_noise_does_not_lead_far_astray() -> None:
    for seed in range(20):
        world = two(slowest(0.65, 0.35, fixed=0.2), start=0.5, noise=0.05)
        world.dice.seed(seed)
        _, seconds = world.found(world.search())
        assert seconds <= 1.2 * 1.12, seed


def test_what_does_not_fit_is_never_tried() -> None:
    def fits(devices: tuple[str, ...], split: Split) -> bool:
        return len(devices) == 2 and 0.3 <= split[0] <= 0.55

    world = two(slowest(0.7, 0.3), start=0.45, fits=fits)
    winner, seconds = world.found(world.search())
    assert all(fits(*tried) for tried in world.measured)
    assert winner.shares[0] >= 0.53
    assert "No single device can hold the model" in reason_for_best(world.search().trials, GOAL)
    assert seconds <= 0.47 / 0.3


def test_running_out_of_memory_is_a_place_to_avoid() -> None:
    def truth(split: Split) -> float:
        return inf if split[0] > 0.5 else slowest(0.7, 0.3)(split)

    world = two(truth, start=0.55)
    search = world.search()
    assert any(trial.problem == "no memory" and not trial.sample for trial in search.trials)
    winner, _ = world.found(search)
    assert winner.sample is not None
    # the start failed, so the family was given up for what runs
    assert winner.devices == ("cuda:1",)
    world = two(truth, start=0.45)
    winner, _ = world.found(world.search())
    assert 0.45 <= winner.shares[0] <= 0.5


def test_one_device_wins_where_splitting_costs_more() -> None:
    def truth(split: Split) -> float:
        return slowest(0.6, 0.4)(split) + (0.9 if 0 < split[0] < 1 else 0)

    world = two(truth, start=0.6)
    search = world.search()
    winner, _ = world.found(search)
    assert winner.devices == ("cuda:0",)
    text = reason_for_best(search.trials, GOAL)
    assert text.startswith("GPU 0 alone gives 0.6 tok/s")
    assert "over GPU 0 and GPU 1, gives" in text
    assert text.endswith("Limited by tests.")


@pytest.mark.parametrize(
    ("devices", "name"), [(("cuda:0", "cuda:1"), "GPU 1"), (("cpu", "cpu"), "CPU 1")]
)
def test_the_rank_that_waits_longest_in_a_slow_split_is_named(
    devices: tuple[str, ...], name: str
) -> None:
    params = [LoadParams("m", devices[:1]), LoadParams("m", devices)]
    alone = Trial(params[0], (1.0,), Sample((90.0,), (10.0,)))
    split = Trial(params[1], (0.5, 0.5), Sample((45.0,), (5.0,), (0.15, 0.1), (0.05, 0.1)))
    text = reason_for_best([alone, split], GOAL)
    assert text.endswith(f"In that split, {name} waits for others 50 % of the time.")


def test_of_equally_fast_ones_the_fewest_devices_are_used() -> None:
    world = two(lambda split: 1.0 if split[0] in (0, 1) else 0.99, start=0.5)
    search = world.search()
    assert len(world.found(search)[0].devices) == 1
    assert "difference is negligible" in reason_for_best(search.trials, GOAL)


def of_four(**more: object) -> tuple[World, tuple[float, ...]]:
    """Return a world of all sets of four unequal devices; each one costs 0.02 s more."""
    speeds = dict(zip(("cuda:0", "cuda:1", "cuda:2", "cpu"), (0.45, 0.3, 0.2, 0.05), strict=True))
    sets = [s for n in range(1, 5) for s in combinations(speeds, n)]

    def cost(devices: tuple[str, ...], split: Split) -> float:
        mine = [speeds[device] for device in devices]
        return slowest(*mine, fixed=0.02 * len(devices))(split)

    starts = {s: tuple(speeds[d] / sum(speeds[e] for e in s) for d in s) for s in sets}
    return World(cost, cost, starts, **more), tuple(speeds.values())  # type: ignore[arg-type]


def test_four_devices_where_predictions_are_right() -> None:
    world, _ = of_four()
    _, seconds = world.found(world.search())
    assert seconds <= 1.05 * (1 + 0.08)
    assert len(world.measured) <= 60
    tried = {devices for devices, _ in world.measured}
    assert ("cpu",) not in tried, "it is twenty times slower"
    assert ("cuda:0",) in tried, "the best single device is always compared"


def test_busy_ranks_get_less() -> None:
    """From even shares, a few trials balance four devices by their true speeds."""
    world, speeds = of_four(
        busy=lambda split: (
            tuple(x / s for x, s in zip(split, (0.45, 0.3, 0.2, 0.05), strict=True))
            if len(split) == 4
            else ()
        )
    )
    everything = ("cuda:0", "cuda:1", "cuda:2", "cpu")
    world.starts = {everything: (0.25,) * 4}
    winner, seconds = world.found(world.search())
    assert seconds <= 1.03 * (1 + 0.08)
    assert winner.shares == pytest.approx(speeds, abs=0.02)
    assert len(world.measured) <= 2 + 12 + 6


def test_moving_handles_alone_finds_a_better_split_of_four() -> None:
    """The cost is smooth, and nothing tells which rank is busy."""
    best = (0.4, 0.3, 0.2, 0.1)

    def cost(_devices: tuple[str, ...], split: Split) -> float:
        return 1 + sum((x - y) ** 2 for x, y in zip(split, best, strict=True))

    everything = ("cuda:0", "cuda:1", "cuda:2", "cpu")
    world = World(cost, cost, {everything: (0.25,) * 4})
    winner, seconds = world.found(world.search())
    assert seconds < 1.01 < cost(everything, (0.25,) * 4)
    assert winner.shares == pytest.approx(best, abs=0.08)
    assert len(world.measured) <= 50


def test_time_ends_the_search_with_the_best_so_far() -> None:
    whole = two(slowest(0.6, 0.4), start=0.3)
    whole.search()
    for budget in (0, 1, 3, 8, 12):
        world = two(slowest(0.6, 0.4), start=0.3)
        search = world.search(budget)
        assert max(1, budget) - 2 <= len(world.measured) <= max(1, budget)
        assert world.seconds <= max(1, budget)
        assert not search.is_complete
        assert best_of(search.trials, GOAL) is not None
    assert whole.seconds > 12


def test_cancelling_keeps_what_was_found() -> None:
    world = two(slowest(0.6, 0.4), start=0.5)
    original = world.measure

    def measure(candidate: Candidate) -> Sample:
        if len(world.measured) == 4:
            raise Cancelled("The search")
        return original(candidate)

    search = SplitSearch(world, GOAL, measure, TrialBudget(100, 1, lambda: world.seconds))
    search.run()
    assert len(search.trials) == 4
    assert not search.is_complete
    assert world.found(search)[1] <= 0.5 / 0.4


def test_the_best_are_repeated_in_turn() -> None:
    world = two(slowest(0.6, 0.4), start=0.6)
    search = world.search()
    last = world.measured[-6:]
    assert len(set(last)) == 3
    assert last[:3] == last[5:2:-1], "there and back"
    n_repetitions = sorted(len(trial.sample.decode_ts) for trial in search.trials if trial.sample)
    assert n_repetitions[-3:] == [6, 6, 6]
    assert set(n_repetitions[:-3]) == {3}
    assert sum(trial.is_final for trial in search.trials) == 3
    assert any(len(trial.devices) == 1 and trial.is_final for trial in search.trials)


def test_the_end_is_measured_in_whole_rounds() -> None:
    for budget in range(1, 30):
        search = two(slowest(0.6, 0.4), start=0.6).search(budget)
        n_repetitions = [len(t.sample.decode_ts) for t in search.trials if t.sample and t.is_final]
        assert len(set(n_repetitions)) <= 1, budget
        assert len(n_repetitions) in (0, 2, 3)


def test_a_machine_that_is_busy_for_a_while_does_not_deceive() -> None:
    """One device is the fastest, but was measured while something else ran."""

    def truth(split: Split) -> float:
        busy = 2.5 if world.seconds <= 2 else 1.0
        return busy * (1.0 if split[0] in (0, 1) else 1.2 + abs(split[0] - 0.5))

    world = two(slowest(0.5, 0.5), start=0.6)
    world.truth = lambda devices, split: truth((1.0,) if len(devices) == 1 else split)
    search = world.search()
    singles = [trial for trial in search.trials if len(trial.devices) == 1]
    assert max(trial.decode_ts for trial in singles) == pytest.approx(1.0)
    winner, _ = world.found(search)
    assert len(winner.devices) == 1
    assert reason_for_best(search.trials, GOAL).startswith("GPU")


def test_nothing_fits() -> None:
    world = two(lambda _: inf)
    search = world.search()
    assert best_of(search.trials, GOAL) is None
    assert reason_for_best(search.trials, GOAL).startswith("No split could be run")
    assert search.is_complete


@pytest.mark.parametrize("start", [0.3, 0.6])
def test_the_number_of_trials_is_about_as_expected(start: float) -> None:
    world = two(slowest(0.6, 0.4), start=start)
    expected = expected_trials(world.families())
    world.search()
    assert 0.5 * expected <= len(world.measured) <= 2 * expected


def test_runs_of_what_does_not_fit() -> None:
    assert ranges([True, True, False, True]) == [(0, 1), (3, 3)]
    assert ranges([False]) == []
    assert ranges([]) == []
