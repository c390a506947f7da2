"""Where a model goes if nobody says: one device, or several by tensor, layer or groups.

Candidates are few: devices by themselves, and of some numbers of GPUs the set that promises most.
What a set promises is a formula: a token's time on the fastest GPU, its reading divided by what all
read together, and a sum of ranks for each time they meet. Only what promises enough is planned and
predicted in full, and of all that comes near the fastest the one with the fewest devices is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Protocol

from engine.devices.types import CPU
from engine.errors import EngineError
from engine.planning.alternative import Alternative
from engine.planning.choice_reason import explained
from engine.planning.evaluation.fit import Fit, Room
from engine.planning.search.results import GOALS, Goal, Speeds

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.models.info import ModelInfo
    from engine.planning.evaluation.evaluator import Evaluation
    from engine.planning.evaluation.workload import ModelWorkload
    from engine.planning.plan import Plan
    from engine.planning.speed.forecast import Forecast, Forecaster

LEAST_GAIN = 0.1
"""More devices have to save this part of the time: each is one more to fail, and to heat."""

F32_BYTES = 4
"""Of a number of the stream, which ranks exchange."""

MOST_COMBINED = 8
"""Of more GPUs not all sets are looked at, only the fastest and the largest of each number."""

MOST_PLANNED = 3
"""Numbers of GPUs, beyond the fewest that hold the model, that are planned in full."""

LEAST_LOADED = 0.9
"""Of a file's bytes: some models have tensors that are not used."""


class PlanEvaluator(Protocol):
    """What is used of `Planner`."""

    info: ModelInfo

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        """Raises EngineError where the split cannot be made."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What to begin with.

    Attributes:
        params: what to load.
        reason: in a sentence.
        alternatives: all that was predicted, this one included, the fastest first; empty where
            no speed is known or nothing fits.
    """

    params: LoadParams
    reason: str
    alternatives: tuple[Alternative, ...] = ()


def choose(
    planner: PlanEvaluator,
    params: LoadParams,
    forecaster: Forecaster,
    goal: Goal = GOALS["chat"],
    free_bytes: Mapping[str, int] | None = None,
) -> Choice:
    """Where to put a model, by the predicted time of a request and by memory.

    Args:
        params: context and the rest; its devices and split do not matter.
        forecaster: knows the devices to choose from.
        free_bytes: what the model may take, by device; None is what is free.

    Raises:
        EngineError: the model cannot be run, or there is no device.
    """
    return _Chooser(planner, params, forecaster, goal, free_bytes).choice()


class _Chooser:
    """One choice; see `choose`."""

    def __init__(
        self,
        planner: PlanEvaluator,
        params: LoadParams,
        forecaster: Forecaster,
        goal: Goal,
        free_bytes: Mapping[str, int] | None,
    ) -> None:
        self._planner, self._forecaster, self._goal = planner, forecaster, goal
        self._free = dict(forecaster.free_bytes if free_bytes is None else free_bytes)
        rooms = [
            Room(room.device, self._free.get(room.device, 0), room.bytes_per_s)
            for room in forecaster.rooms
        ]
        if not rooms:
            raise EngineError("There is no device that a model can be put on.")
        self._rooms = {room.device: room for room in rooms}
        info = planner.info
        self._fit = Fit(self._plan, rooms, info.n_ctx_train, info.n_layer)
        by_speed = sorted(rooms, key=lambda room: -room.bytes_per_s)
        self._gpus = [room.device for room in by_speed if room.device != CPU]
        self._base = replace(
            params, devices=(by_speed[0].device,), split=None, split_mode="tensor", groups=None
        )
        self._known: dict[LoadParams, Alternative | None] = {}

    def choice(self) -> Choice:
        """Predict candidates and take one of them."""
        self._plan(self._base, self._free)  # what cannot be run on one device is an error
        offloaded: LoadParams | None = None
        found = self._on_gpus()
        if not found:
            offloaded = self._fit.with_cpu(self._base, tuple(self._gpus))
            found = self._with_cpu(offloaded)
        found.sort(key=lambda one: one.seconds)
        good = [one for one in found if self._is_near(one, found[0])]
        best = min(good, key=lambda one: (len(one.params.all_devices), one.seconds), default=None)
        params = best.params if best else offloaded or self._base
        return Choice(params, explained(best, found, self._gpus), tuple(found))

    def _is_near(self, one: Alternative, best: Alternative) -> bool:
        """Whether another one is too little faster to take more devices for it.

        Where the answer is no shorter than the prompt it has to come faster, too: prompts are short
        then, and predicted roughly where their tokens go to different experts.
        """
        part = 1 - LEAST_GAIN
        is_near = part * one.seconds <= best.seconds
        if self._goal.n_gen >= self._goal.n_prompt:
            is_near |= one.speeds.decode_ts >= part * best.speeds.decode_ts
        return is_near

    # what is a candidate

    def _on_gpus(self) -> list[Alternative]:
        """What fits on GPUs: the fewest of them in all modes, and more where that promises much."""
        fewest, found = self._fewest()
        for at, n in enumerate(self._more(fewest) if found else ()):
            least = min(one.seconds for one in found)
            if at and self._promised_s(self._promising(n)[0]) * self._goal.n_gen > least:
                break
            found += self._over(n, self._modes(n, fewest))
        return found

    def _fewest(self) -> tuple[int, list[Alternative]]:
        """The smallest number of GPUs that hold the model, and what so many can do."""
        found = list(self._alone())
        if found:
            return 1, found
        for n in range(2, len(self._gpus) + 1):
            found = list(self._over(n, ("tensor", "layer", "groups")))
            if found:
                return n, found
        return 0, []

    def _modes(self, n: int, fewest: int) -> tuple[str, ...]:
        """What may be faster with more GPUs than needed.

        Whole blocks only if that is another GPU than the one that holds all; groups only where
        memory asks for so many that cutting every block is slow.
        """
        speeds = {self._rooms[gpu].bytes_per_s for gpu in self._gpus}
        modes = ["tensor"]
        if fewest == 1 and n == 2 and len(speeds) > 1:
            modes.append("layer")
        if fewest > 2:
            modes.append("groups")
        return tuple(modes)

    def _more(self, fewest: int) -> list[int]:
        """Larger numbers of GPUs to look at, the most promising first."""
        n_all = len(self._gpus)
        numbers = {2**n for n in range(1, n_all.bit_length())} | {n_all}
        larger = [n for n in numbers if fewest < n <= n_all]
        return sorted(larger, key=lambda n: self._promised_s(self._promising(n)[0]))[:MOST_PLANNED]

    def _alone(self) -> Iterator[Alternative]:
        """One of each kind of GPU, the first that holds the model."""
        kinds = set()
        for gpu in self._gpus:
            kind = self._forecaster.devices[gpu].name, self._rooms[gpu].bytes_per_s
            if kind not in kinds:
                found = self._fitting(replace(self._base, devices=(gpu,)))
                if found is not None:
                    kinds.add(kind)
                    yield found

    def _over(self, n: int, modes: Sequence[str]) -> Iterator[Alternative]:
        """So many GPUs in some modes."""
        for gpus in self._promising(n):
            found = []
            for mode in modes:
                for groups in _group_sizes(n) if mode == "groups" else [None]:
                    ranks = gpus if groups else tuple(d for d in self._rooms if d in gpus)
                    params = replace(self._base, devices=ranks, split_mode=mode, groups=groups)
                    balanced = self._fit.balanced(params, in_turn=mode == "layer")
                    one = balanced and self._predicted(balanced)
                    if one:
                        found.append(one)
            if found:
                yield from found
                return

    def _promising(self, n: int) -> list[tuple[str, ...]]:
        """Of sets of so many GPUs that may hold the model the fastest and the largest."""
        if len(self._gpus) <= MOST_COMBINED:
            sets = list(combinations(self._gpus, n))
        else:
            by_room = sorted(self._gpus, key=lambda gpu: -self._rooms[gpu].free_bytes)[:n]
            sets = [tuple(self._gpus[:n]), tuple(g for g in self._gpus if g in by_room)]
        rooms = {gpus: sum(self._rooms[gpu].free_bytes for gpu in gpus) for gpus in sets}
        least = LEAST_LOADED * self._planner.info.n_bytes
        roomy = sorted((s for s in sets if rooms[s] >= least), key=self._promised_s)
        return list(dict.fromkeys([*roomy[:1], *sorted(roomy, key=lambda s: -rooms[s])[:1]]))

    def _promised_s(self, gpus: Sequence[str]) -> float:
        """A token's seconds where every block is cut, roughly and at best."""
        forecast, load = self._fastest_alone
        path = forecast.decode.path
        read_s = path.memory_s * self._rooms[self._gpus[0]].bytes_per_s
        read_s /= sum(self._rooms[gpu].bytes_per_s for gpu in gpus)
        n_sum = sum(block.count * block.n_reduce for block in load.blocks)
        sum_s = self._forecaster.sum_s(gpus, F32_BYTES * load.n_embd)
        return read_s + path.compute_s / len(gpus) + path.fixed_s + path.host_s + n_sum * sum_s

    @cached_property
    def _fastest_alone(self) -> tuple[Forecast, ModelWorkload]:
        """The whole model on the fastest GPU, whether or not it has room."""
        params = replace(self._base, devices=(self._gpus[0],))
        evaluation = self._planner.evaluate(params, self._free)
        forecast = self._forecast(params, evaluation)
        assert forecast is not None, "rooms are of devices that are known"
        return forecast, evaluation.load

    def _with_cpu(self, offloaded: LoadParams) -> list[Alternative]:
        """The CPU alone, or with what it leaves to GPUs, which share blocks or take whole ones."""
        candidates = [replace(self._base, devices=(CPU,))] if CPU in self._rooms else []
        if offloaded.devices != (CPU,):
            candidates.append(offloaded)
        if len(offloaded.devices) > 1:
            by_layer = self._fit.balanced(replace(offloaded, split_mode="layer", split=None))
            candidates += [by_layer] if by_layer else []
        found = [self._fitting(params) for params in candidates]
        return [one for one in found if one is not None]

    # what it would be like

    def _plan(self, params: LoadParams, free: Mapping[str, int]) -> Plan:
        return self._planner.evaluate(params, free).plan

    def _fitting(self, params: LoadParams) -> Alternative | None:
        """What is predicted of it; None where it does not fit."""
        return self._predicted(params) if self._fit.fits(params) else None

    def _predicted(self, params: LoadParams) -> Alternative | None:
        """Of what fits; None where a rank would get nothing, which is another candidate."""
        if params not in self._known:
            self._known[params] = self._alternative(params)
        return self._known[params]

    def _alternative(self, params: LoadParams) -> Alternative | None:
        evaluation = self._planner.evaluate(params, self._free)
        devices = evaluation.plan.devices[: len(params.devices)]
        forecast = self._forecast(params, evaluation)
        if forecast is None or not all(device.effective for device in devices):
            return None
        speeds = Speeds(forecast.prefill.tokens_per_s, forecast.decode.tokens_per_s)
        ids = params.all_devices
        meetings = [
            (block.count * block.n_reduce, tuple(ids[rank] for rank in block.group))
            for block in evaluation.load.blocks
            if len(block.group) > 1
        ]
        n_bytes = F32_BYTES * evaluation.load.n_embd
        return Alternative(
            params,
            speeds,
            self._goal.seconds(speeds.prefill_ts, speeds.decode_ts),
            sum(n for n, _ in meetings),
            max((self._forecaster.sum_s(group, n_bytes) for _, group in meetings), default=0.0),
            forecast.decode.path.link_s,
            forecast.decode.reason,
        )

    def _forecast(self, params: LoadParams, evaluation: Evaluation) -> Forecast | None:
        """As it is shown beside a split."""
        return self._forecaster.forecast(evaluation, params, self._planner.info.quant)


def _group_sizes(n: int) -> list[tuple[int, ...]]:
    """Two halves, the faster GPUs in the first, and pairs."""
    if n < 3:
        return []
    halves = n - n // 2, n // 2
    pairs = (2,) * (n // 2) + (1,) * (n % 2)
    return list(dict.fromkeys([halves, pairs]))
