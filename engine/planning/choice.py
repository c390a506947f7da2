"""The default split: one device, or several by tensor, layer or groups.

Candidates are few: single devices, and for some numbers of GPUs the set that promises most. What a
set promises is a formula: a token's time on the fastest GPU, with its reading divided by the
bandwidth of the set, plus its all-reduces. Only sets that promise enough are planned and predicted
in full, and of all that come near the fastest the one with the fewest devices is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

from engine.errors import EngineError
from engine.hardware.devices.types import CPU
from engine.model.forward.state import F32_BYTES
from engine.planning.evaluation.fit import Fit, Room
from engine.planning.search.estimate import Alternative
from engine.planning.search.results import GOALS, Goal, Speeds, names

if TYPE_CHECKING:
    from engine.load_params import LoadParams
    from engine.planning.evaluation.evaluator import Evaluation
    from engine.planning.evaluation.workload import ModelWorkload
    from engine.planning.plan import Plan
    from engine.planning.planner import Planner
    from engine.planning.speed.forecast import Forecast, Forecaster

MAX_NAMED = 3
"""Most GPUs that are named; more are counted."""


def reason_for_choice(
    chosen: Alternative | None, alternatives: Sequence[Alternative], gpus: Sequence[str]
) -> str:
    """Return why a split was chosen, in up to three short sentences.

    Args:
        chosen: the chosen split; None where nothing fits.
        alternatives: all predicted splits, the fastest first.
        gpus: ids of all GPUs of the machine.
    """
    if chosen is None:
        return "No device has room for the model with this context."
    others = [one for one in alternatives if one is not chosen]
    if CPU in chosen.params.all_devices:
        why = _with_cpu(chosen, others, gpus)
    elif len(chosen.params.devices) == 1:
        why = _alone(chosen, others, gpus)
    else:
        why = _several(chosen, others, gpus)
    return f"{_upper(why)}."


def _alone(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """Return why one GPU was chosen."""
    name, rate = names(chosen.params.devices), _rate(chosen)
    split = next((one for one in others if len(one.params.devices) > 1), None)
    if len(gpus) == 1:
        return f"{name} is the only GPU, and holds the model"
    if split is None:
        return f"{name} alone: {rate} tok/s. No split over several GPUs fits"
    how = "Split" if split.params.split_mode == "tensor" else _upper(_mode(split))
    told = f"{name} alone: {rate} tok/s. {how} over {_set(split, gpus)}: {_rate(split)}"
    is_slower = split.speeds.decode_ts <= chosen.speeds.decode_ts
    if split.seconds <= chosen.seconds:
        n_more = len(split.params.devices) - 1
        more = "a second GPU" if n_more == 1 else f"{n_more} more GPUs"
        if is_slower:
            return f"{told}; only prompts would gain from {more}"
        return f"{told}, too little gain for {more}"
    if not is_slower:
        prompts = f"{_number(split.speeds.prefill_ts)} tok/s instead of "
        prompts += _number(chosen.speeds.prefill_ts)
        return f"{told}, but prompts are read at {prompts}"
    return f"{told}, {_why_slower(split, chosen)}"


def _several(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """Return why several GPUs were chosen: one is slower, or none holds the model."""
    single = next((one for one in others if len(one.params.devices) == 1), None)
    how = f"{_mode(chosen)} over {_set(chosen, gpus)}: {_rate(chosen)} tok/s"
    if single is not None:
        alone = f"{how}, {names(single.params.devices)} alone: {_rate(single)}"
        if not chosen.n_sum:
            return f"{alone}, because only the slower GPU has room for the whole model"
        return (
            f"{alone}. Each GPU reads only its part of the weights, although {_all_reduces(chosen)}"
        )
    needed = f"no GPU holds the model alone. {_upper(how)}"
    other = _compared(chosen, others)
    if other is None:
        return needed
    compared = f"{needed}. {_upper(_difference(other, chosen, gpus))}: {_rate(other)}"
    if len(other.params.devices) > len(chosen.params.devices) and other.seconds < chosen.seconds:
        return f"{compared}, too little gain for more GPUs"
    if other.params.split_mode == chosen.params.split_mode and other.link_s <= chosen.link_s:
        return compared
    return f"{compared}, {_why_slower(other, chosen)}"


def _difference(other: Alternative, chosen: Alternative, gpus: Sequence[str]) -> str:
    """Return how another split differs: "by layer", "over GPU 0 and GPU 1", or both."""
    mode = [] if other.params.split_mode == chosen.params.split_mode else [_mode(other)]
    is_same = len(other.params.devices) == len(chosen.params.devices)
    return " ".join(mode if is_same and mode else [*mode, f"over {_set(other, gpus)}"])


def _compared(chosen: Alternative, others: Sequence[Alternative]) -> Alternative | None:
    """Return the split to compare with: another mode on as many GPUs, another mode, the next."""
    n, mode = len(chosen.params.devices), chosen.params.split_mode
    other_mode = [one for one in others if one.params.split_mode != mode]
    alike = [one for one in other_mode if len(one.params.devices) == n]
    return next(iter(alike or other_mode or others), None)


def _with_cpu(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """Return why the CPU takes part."""
    rate, params = _rate(chosen), chosen.params
    if params.devices == (CPU,):
        if not gpus:
            return "the CPU alone, as there is no GPU"
        told = f"the CPU alone: {rate} tok/s"
        if not others:
            return f"{told}. {_upper(_all(gpus))} {_have(gpus)} too little memory to help"
        with_gpus = f"{_all(gpus)}, which {_have(gpus)} room for a part only"
        return f"{told}. With {with_gpus}: {_rate(others[0])}"
    part = f"{params.n_cpu_blocks} blocks"
    if params.n_cpu_moe:
        part = f"the experts of {params.n_cpu_moe} blocks"
    are = "is" if len(gpus) == 1 else "are"
    told = f"{_all(gpus)} {are} too small, so {part} are on the CPU: {rate} tok/s"
    alone = next((one for one in others if one.params.devices == (CPU,)), None)
    return told if alone is None else f"{told}. The CPU alone: {_rate(alone)}"


def _all(gpus: Sequence[str]) -> str:
    return names(gpus) if len(gpus) <= MAX_NAMED else f"the {len(gpus)} GPUs"


def _have(gpus: Sequence[str]) -> str:
    return "has" if len(gpus) == 1 else "have"


def _why_slower(slow: Alternative, fast: Alternative) -> str:
    """Return why one split is slower than another, as the end of a sentence."""
    if slow.params.split_mode == "groups" and fast.params.split_mode == "tensor":
        return "because only one group computes at a time"
    if len(slow.params.devices) > 1 and not slow.n_sum:
        return "because only one GPU computes at a time"
    lost = 1 / slow.speeds.decode_ts - 1 / fast.speeds.decode_ts
    if slow.n_sum and slow.link_s >= lost:
        return f"because {_all_reduces(slow)}"
    limit = slow.limit.rstrip(".")
    if limit.startswith("Limited"):
        return f"{limit[0].lower()}{limit[1:].partition(':')[0]}"
    if limit.startswith("The "):
        limit = f"the {limit[4:]}"
    return f"because {limit}"


def _all_reduces(one: Alternative) -> str:
    """Return what all-reduces cost: "each token waits 64 times 13 µs for the other GPU"."""
    others = "the other GPU" if len(one.params.devices) == 2 else "the other GPUs"
    return f"each token waits {one.n_sum} times {1e6 * one.sum_s:.0f} µs for {others}"


def _mode(one: Alternative) -> str:
    """Return how a model is split, within a sentence."""
    if one.params.split_mode == "groups":
        sizes = " + ".join(map(str, one.params.group_sizes))
        return f"in groups of {sizes}"
    return "by layer" if one.params.split_mode == "layer" else "split by tensor"


def _set(one: Alternative, gpus: Sequence[str]) -> str:
    """Return a split's GPUs: "both", "GPU 0 and GPU 2", "4 GPUs", "all 8 GPUs"."""
    n = len(one.params.devices)
    if n == len(gpus):
        return "both" if n == 2 else f"all {n} GPUs"
    return names(one.params.devices) if n <= MAX_NAMED else f"{n} GPUs"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _rate(one: Alternative) -> str:
    return _number(one.speeds.decode_ts)


def _number(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 20 else f"{tokens_per_s:.1f}"


MIN_GAIN = 0.1
"""Least part of the time that more devices must save: each is one more to fail, and to heat."""

MAX_COMBINED = 8
"""Most GPUs of which all sets are considered; of more, the fastest and the largest of each size."""

MAX_PLANNED = 3
"""Most set sizes, beyond the smallest that holds the model, that are planned in full."""

MIN_LOADED = 0.9
"""Part of a file's bytes that a set must at least hold: some models have unused tensors."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The default split of a model, with its reason.

    Attributes:
        params: parameters to load it with.
        reason: sentences that say why it was chosen.
        alternatives: all splits that were predicted, this one included, the fastest first; empty
            where no speed is known or nothing fits.
    """

    params: LoadParams
    reason: str
    alternatives: tuple[Alternative, ...] = ()


def choose(
    planner: Planner,
    params: LoadParams,
    forecaster: Forecaster,
    goal: Goal = GOALS["chat"],
    free_bytes: Mapping[str, int] | None = None,
) -> Choice:
    """Choose the devices and the split of a model, by memory and the predicted time of a request.

    Args:
        params: context and other settings; devices and split are ignored.
        forecaster: predicts speeds, and knows the devices to choose from.
        goal: request whose time is compared.
        free_bytes: bytes that the model may take, by device; None is what is free.

    Raises:
        EngineError: the model cannot be run, or there is no device.
    """
    return _Chooser(planner, params, forecaster, goal, free_bytes).choice()


class _Chooser:
    """State of one choice; see `choose`."""

    def __init__(
        self,
        planner: Planner,
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
        """Predict the candidates and choose one of them."""
        self._plan(self._base, self._free)  # raises where no split can be run
        offloaded: LoadParams | None = None
        found = self._on_gpus()
        if not found:
            offloaded = self._fit.with_cpu(self._base, tuple(self._gpus))
            found = self._with_cpu(offloaded)
        found.sort(key=lambda one: one.seconds)
        good = [one for one in found if self._is_near(one, found[0])]
        best = min(good, key=lambda one: (len(one.params.all_devices), one.seconds), default=None)
        params = best.params if best else offloaded or self._base
        return Choice(params, reason_for_choice(best, found, self._gpus), tuple(found))

    def _is_near(self, one: Alternative, best: Alternative) -> bool:
        """Return whether `best` saves too little against `one` to be worth more devices.

        Where the answer is no shorter than the prompt, decoding must be faster as well: prompts are
        short then, and those of models with routed experts are predicted only roughly.
        """
        part = 1 - MIN_GAIN
        is_near = part * one.seconds <= best.seconds
        if self._goal.n_gen >= self._goal.n_prompt:
            is_near |= one.speeds.decode_ts >= part * best.speeds.decode_ts
        return is_near

    # candidates

    def _on_gpus(self) -> list[Alternative]:
        """Predict splits over the fewest GPUs that hold the model, and over more if promising."""
        fewest, found = self._fewest()
        for at, n in enumerate(self._more(fewest) if found else ()):
            least = min(one.seconds for one in found)
            if at and self._promised_s(self._promising(n)[0]) * self._goal.n_gen > least:
                break
            found += self._over(n, self._modes(n, fewest))
        return found

    def _fewest(self) -> tuple[int, list[Alternative]]:
        """Return the smallest number of GPUs that holds the model, and the splits over so many."""
        found = list(self._alone())
        if found:
            return 1, found
        for n in range(2, len(self._gpus) + 1):
            found = list(self._over(n, ("tensor", "layer", "groups")))
            if found:
                return n, found
        return 0, []

    def _modes(self, n: int, fewest: int) -> tuple[str, ...]:
        """Return the split modes that may be faster over n GPUs, more than are needed.

        By layer only if one GPU holds all and another one is faster; in groups only where so many
        are needed that cutting every block is slow.
        """
        speeds = {self._rooms[gpu].bytes_per_s for gpu in self._gpus}
        modes = ["tensor"]
        if fewest == 1 and n == 2 and len(speeds) > 1:
            modes.append("layer")
        if fewest > 2:
            modes.append("groups")
        return tuple(modes)

    def _more(self, fewest: int) -> list[int]:
        """Return larger numbers of GPUs to consider, the most promising first."""
        n_all = len(self._gpus)
        numbers = {2**n for n in range(1, n_all.bit_length())} | {n_all}
        larger = [n for n in numbers if fewest < n <= n_all]
        return sorted(larger, key=lambda n: self._promised_s(self._promising(n)[0]))[:MAX_PLANNED]

    def _alone(self) -> Iterator[Alternative]:
        """Yield one GPU of each kind by itself: the first one that holds the model."""
        kinds = set()
        for gpu in self._gpus:
            kind = self._forecaster.devices[gpu].name, self._rooms[gpu].bytes_per_s
            if kind not in kinds:
                found = self._fitting(replace(self._base, devices=(gpu,)))
                if found is not None:
                    kinds.add(kind)
                    yield found

    def _over(self, n: int, modes: Sequence[str]) -> Iterator[Alternative]:
        """Yield splits over n GPUs in these modes, of the most promising set that fits."""
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
        """Return the fastest and the largest of the sets of n GPUs that may hold the model."""
        if len(self._gpus) <= MAX_COMBINED:
            sets = list(combinations(self._gpus, n))
        else:
            by_room = sorted(self._gpus, key=lambda gpu: -self._rooms[gpu].free_bytes)[:n]
            sets = [tuple(self._gpus[:n]), tuple(g for g in self._gpus if g in by_room)]
        rooms = {gpus: sum(self._rooms[gpu].free_bytes for gpu in gpus) for gpus in sets}
        least = MIN_LOADED * self._planner.info.n_bytes
        roomy = sorted((s for s in sets if rooms[s] >= least), key=self._promised_s)
        return list(dict.fromkeys([*roomy[:1], *sorted(roomy, key=lambda s: -rooms[s])[:1]]))

    def _promised_s(self, gpus: Sequence[str]) -> float:
        """Estimate the least time of a token that all of `gpus` share, in seconds."""
        forecast, load = self._fastest_alone
        path = forecast.decode.path
        read_s = path.memory_s * self._rooms[self._gpus[0]].bytes_per_s
        read_s /= sum(self._rooms[gpu].bytes_per_s for gpu in gpus)
        n_sum = sum(block.count * block.n_reduce for block in load.blocks)
        sum_s = self._forecaster.sum_s(gpus, F32_BYTES * load.n_embd)
        return read_s + path.compute_s / len(gpus) + path.fixed_s + path.host_s + n_sum * sum_s

    @cached_property
    def _fastest_alone(self) -> tuple[Forecast, ModelWorkload]:
        """Forecast and work of the whole model on the fastest GPU, whether or not it has room."""
        params = replace(self._base, devices=(self._gpus[0],))
        evaluation = self._planner.evaluate(params, self._free)
        forecast = self._forecast(params, evaluation)
        assert forecast is not None, "rooms are of devices that are known"
        return forecast, evaluation.load

    def _with_cpu(self, offloaded: LoadParams) -> list[Alternative]:
        """Predict the CPU alone, and beside GPUs that share blocks or take whole ones.

        Args:
            offloaded: parameters that put on the CPU what GPUs cannot hold.
        """
        candidates = [replace(self._base, devices=(CPU,))] if CPU in self._rooms else []
        if offloaded.devices != (CPU,):
            candidates.append(offloaded)
        if len(offloaded.devices) > 1:
            by_layer = self._fit.balanced(replace(offloaded, split_mode="layer", split=None))
            candidates += [by_layer] if by_layer else []
        found = [self._fitting(params) for params in candidates]
        return [one for one in found if one is not None]

    # predictions

    def _plan(self, params: LoadParams, free: Mapping[str, int]) -> Plan:
        return self._planner.evaluate(params, free).plan

    def _fitting(self, params: LoadParams) -> Alternative | None:
        """Predict a split; None where it does not fit."""
        return self._predicted(params) if self._fit.fits(params) else None

    def _predicted(self, params: LoadParams) -> Alternative | None:
        """Predict a split that fits; None where a rank would get nothing: that is another split."""
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
        """Predict the speed of an evaluated split, as the window does."""
        return self._forecaster.forecast(evaluation, params, self._planner.info.quant)


def _group_sizes(n: int) -> list[tuple[int, ...]]:
    """Return the groupings of n GPUs to try: two halves, the faster GPUs first, and pairs."""
    if n < 3:
        return []
    halves = n - n // 2, n // 2
    pairs = (2,) * (n // 2) + (1,) * (n % 2)
    return list(dict.fromkeys([halves, pairs]))
