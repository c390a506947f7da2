"""The default split: one device, or several by tensor, layer or groups.

There are few candidates: single devices and, for a few set sizes, the most promising set of GPUs.
A formula estimates a set's time per token: that of the fastest GPU, with the reading time scaled to
the set's bandwidth, plus all-reduces. Only promising sets are planned and predicted in full; among
all that come close to the fastest, the one with the fewest devices is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

from engine.errors import EngineError, Sentence, paragraph
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
"""Maximum number of GPUs listed by name; if there are more, only their number is given."""


def reason_for_choice(
    chosen: Alternative | None, alternatives: Sequence[Alternative], gpus: Sequence[str]
) -> str:
    """Return why a split was chosen; `alternatives` are sorted, fastest first."""
    if chosen is None:
        return Sentence("The model does not fit on any device with this context.")
    others = [one for one in alternatives if one is not chosen]
    if CPU in chosen.params.all_devices:
        return _with_cpu(chosen, others, gpus)
    if len(chosen.params.devices) == 1:
        return _alone(chosen, others, gpus)
    return _several(chosen, others, gpus)


def _alone(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    name = names(chosen.params.devices, begins=True)
    split = next((one for one in others if len(one.params.devices) > 1), None)
    if len(gpus) == 1:
        return Sentence("{device} is the only GPU, and the model fits on it.", device=name)
    if split is None:
        return Sentence(
            "{device} alone: {rate} tok/s. No split over several GPUs fits.",
            device=name,
            rate=_rate(chosen),
        )
    is_tensor = split.params.split_mode == "tensor"
    values = {
        "split": Sentence("Split") if is_tensor else _mode(split),
        "gpus": _set(split, gpus),
        "rate": _rate(split),
    }
    is_slower = split.speeds.decode_ts <= chosen.speeds.decode_ts
    if split.seconds <= chosen.seconds:
        n_more = len(split.params.devices) - 1
        more = Sentence("a second GPU" if n_more == 1 else "{n} more GPUs", n=n_more)
        compared = Sentence(
            "{split} over {gpus}: {rate}; only prompt processing would gain from {more}."
            if is_slower
            else "{split} over {gpus}: {rate}, too small a gain for {more}.",
            **values,
            more=more,
        )
    elif is_slower:
        why = _why_slower(split, chosen)
        compared = Sentence("{split} over {gpus}: {rate}, {why}.", **values, why=why)
    else:
        compared = Sentence(
            "{split} over {gpus}: {rate}, but prompts are processed at {prompts} tok/s instead of"
            " {other_prompts}.",
            **values,
            prompts=_number(split.speeds.prefill_ts),
            other_prompts=_number(chosen.speeds.prefill_ts),
        )
    alone = Sentence("{gpus} alone: {rate} tok/s.", gpus=name, rate=_rate(chosen))
    return paragraph(alone, compared)


def _several(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    single = next((one for one in others if len(one.params.devices) == 1), None)
    values = {"split": _mode(chosen), "gpus": _set(chosen, gpus), "rate": _rate(chosen)}
    if single is not None:
        values |= {"others": names(single.params.devices), "other_rate": _rate(single)}
        if not chosen.n_sum:
            return Sentence(
                "{split} over {gpus}: {rate} tok/s; {others} alone: {other_rate}, as only the"
                " slower GPU has room for the whole model.",
                **values,
            )
        return paragraph(
            Sentence("{split} over {gpus}: {rate} tok/s; {others} alone: {other_rate}.", **values),
            Sentence(
                "Each GPU reads only part of the weights, which pays off although {why}.",
                why=_all_reduces(chosen),
            ),
        )
    return paragraph(
        Sentence("No single GPU can hold the model."),
        Sentence("{split} over {gpus}: {rate} tok/s.", **values),
        _other_split(chosen, others, gpus),
    )


def _other_split(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    """Return a sentence on another mode, preferably with as many GPUs, or else the next split."""
    n, mode = len(chosen.params.devices), chosen.params.split_mode
    other_mode = [one for one in others if one.params.split_mode != mode]
    same_size = [one for one in other_mode if len(one.params.devices) == n]
    other = next(iter(same_size or other_mode or others), None)
    if other is None:
        return ""
    values = {"split": _mode(other), "gpus": _set(other, gpus), "rate": _rate(other)}
    is_other_mode = other.params.split_mode != mode
    if len(other.params.devices) > n and other.seconds < chosen.seconds:
        return Sentence(
            "{split} over {gpus}: {rate}, too small a gain for {more}."
            if is_other_mode
            else "Over {gpus}: {rate}, too small a gain for {more}.",
            **values,
            more=Sentence("more GPUs"),
        )
    if not is_other_mode and other.link_s <= chosen.link_s:
        return Sentence("Over {gpus}: {rate}.", **values)
    why = _why_slower(other, chosen)
    if not is_other_mode:
        return Sentence("Over {gpus}: {rate}, {why}.", **values, why=why)
    return Sentence(
        "{split}: {rate}, {why}."
        if len(other.params.devices) == n
        else "{split} over {gpus}: {rate}, {why}.",
        **values,
        why=why,
    )


def _with_cpu(chosen: Alternative, others: Sequence[Alternative], gpus: Sequence[str]) -> str:
    rate, params = _rate(chosen), chosen.params
    is_one = len(gpus) == 1
    if params.devices == (CPU,):
        if not gpus:
            return Sentence("The CPU alone, as there is no GPU.")
        alone = Sentence("{gpus} alone: {rate} tok/s.", gpus=Sentence("The CPU"), rate=rate)
        if not others:
            needed = Sentence(
                "{gpus} has too little memory to help."
                if is_one
                else "{gpus} have too little memory to help.",
                gpus=_all(gpus, begins=True),
            )
            return paragraph(alone, needed)
        with_gpus = Sentence(
            "With {gpus}, which has room for only a part: {rate}."
            if is_one
            else "With {gpus}, which have room for only a part: {rate}.",
            gpus=_all(gpus),
            rate=_rate(others[0]),
        )
        return paragraph(alone, with_gpus)
    n_moe = params.n_cpu_moe
    on_cpu = Sentence(
        "{gpus} is too small, so {part_of_model} are on the CPU: {rate} tok/s."
        if is_one
        else "{gpus} are too small, so {part_of_model} are on the CPU: {rate} tok/s.",
        gpus=_all(gpus, begins=True),
        part_of_model=Sentence(
            "the experts of {n} blocks" if n_moe else "{n} blocks", n=n_moe or params.n_cpu_blocks
        ),
        rate=rate,
    )
    cpu = next((one for one in others if one.params.devices == (CPU,)), None)
    if cpu is None:
        return on_cpu
    alone = Sentence("{gpus} alone: {rate}.", gpus=Sentence("The CPU"), rate=_rate(cpu))
    return paragraph(on_cpu, alone)


def _all(gpus: Sequence[str], *, begins: bool = False) -> str:
    if len(gpus) <= MAX_NAMED:
        return names(gpus, begins=begins)
    return Sentence("The {n} GPUs" if begins else "the {n} GPUs", n=len(gpus))


def _why_slower(slow: Alternative, fast: Alternative) -> str:
    if slow.params.split_mode == "groups" and fast.params.split_mode == "tensor":
        return Sentence("because only one group computes at a time")
    if len(slow.params.devices) > 1 and not slow.n_sum:
        return Sentence("because only one GPU computes at a time")
    lost = 1 / slow.speeds.decode_ts - 1 / fast.speeds.decode_ts
    if slow.n_sum and slow.link_s >= lost:
        return Sentence(
            "because each token waits {n} × {us} µs for the other GPU"
            if len(slow.params.devices) == 2
            else "because each token waits {n} × {us} µs for the other GPUs",
            n=slow.n_sum,
            us=round(1e6 * slow.sum_s),
        )
    return slow.why


def _all_reduces(one: Alternative) -> Sentence:
    return Sentence(
        "each token waits {n} × {us} µs for the other GPU"
        if len(one.params.devices) == 2
        else "each token waits {n} × {us} µs for the other GPUs",
        n=one.n_sum,
        us=round(1e6 * one.sum_s),
    )


def _mode(one: Alternative) -> Sentence:
    if one.params.split_mode == "groups":
        sizes = " + ".join(map(str, one.params.group_sizes))
        return Sentence("In groups of {sizes}", sizes=sizes)
    return Sentence("By layer" if one.params.split_mode == "layer" else "Split by tensor")


def _set(one: Alternative, gpus: Sequence[str]) -> str:
    """Return a split's GPUs in words: "both", "GPU 0 and GPU 2", "4 GPUs" or "all 8 GPUs"."""
    n = len(one.params.devices)
    if n == len(gpus):
        return Sentence("both" if n == 2 else "all {n} GPUs", n=n)
    return names(one.params.devices) if n <= MAX_NAMED else Sentence("{n} GPUs", n=n)


def _rate(one: Alternative) -> int | float:
    return _number(one.speeds.decode_ts)


def _number(tokens_per_s: float) -> int | float:
    return round(tokens_per_s) if tokens_per_s >= 20 else round(tokens_per_s, 1)


MIN_GAIN = 0.1
"""Minimum fraction of the time that more devices must save, because each adds heat and can fail."""

MAX_COMBINED = 8
"""Maximum number of GPUs for which all sets are considered; with more, only the fastest and the
largest set of each size."""

MAX_PLANNED = 3
"""Maximum number of set sizes planned in full, beyond the smallest that holds the model."""

MIN_LOADED = 0.9
"""Fraction of a file's bytes that a set must hold; below 1 because some tensors may be unused."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The default split with its reason; `alternatives` are all predictions, fastest first."""

    params: LoadParams
    reason: str
    alternatives: tuple[Alternative, ...] = ()


def choose(
    planner: Planner, params: LoadParams, forecaster: Forecaster, goal: Goal = GOALS["chat"],
    free_bytes: Mapping[str, int] | None = None,
) -> Choice:  # fmt: skip
    """Choose a model's devices and split, based on memory and the predicted time for a request.

    Args:
        params: context and other settings; devices and split are ignored.

    Raises:
        EngineError: the model cannot be run, or there is no device.
    """
    return _Chooser(planner, params, forecaster, goal, free_bytes).choice()


class _Chooser:
    def __init__(
        self, planner: Planner, params: LoadParams, forecaster: Forecaster, goal: Goal,
        free_bytes: Mapping[str, int] | None,
    ) -> None:  # fmt: skip
        self._planner, self._forecaster, self._goal = planner, forecaster, goal
        self._free = dict(forecaster.free_bytes if free_bytes is None else free_bytes)
        rooms = [
            Room(room.device, self._free.get(room.device, 0), room.bytes_per_s)
            for room in forecaster.rooms
        ]
        if not rooms:
            raise EngineError("There is no device to put a model on.")
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
        self._plan(self._base, self._free)  # raises if no split can be run
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
        """Return whether `best` saves too little over `one` to justify more devices.

        If the answer is at least as long as the prompt, decoding must be faster as well, because
        prompts are then short, and their speed with routed experts is predicted only roughly.
        """
        part = 1 - MIN_GAIN
        is_near = part * one.seconds <= best.seconds
        if self._goal.n_gen >= self._goal.n_prompt:
            is_near |= one.speeds.decode_ts >= part * best.speeds.decode_ts
        return is_near

    # candidates

    def _on_gpus(self) -> list[Alternative]:
        # the fewest GPUs that hold the model, and more if promising
        fewest, found = self._fewest()
        for at, n in enumerate(self._more(fewest) if found else ()):
            least = min(one.seconds for one in found)
            if at and self._promised_s(self._promising(n)[0]) * self._goal.n_gen > least:
                break
            found += self._over(n, self._modes(n, fewest))
        return found

    def _fewest(self) -> tuple[int, list[Alternative]]:
        found = list(self._alone())
        if found:
            return 1, found
        for n in range(2, len(self._gpus) + 1):
            found = list(self._over(n, ("tensor", "layer", "groups")))
            if found:
                return n, found
        return 0, []

    def _modes(self, n: int, fewest: int) -> tuple[str, ...]:
        """Return the split modes that may be faster over n GPUs, given the fewest that suffice.

        Splitting by layer may be faster only if one GPU holds everything and another is faster;
        groups only if more than two GPUs are needed, for which cutting every block is slow.
        """
        speeds = {self._rooms[gpu].bytes_per_s for gpu in self._gpus}
        modes = ["tensor"]
        if fewest == 1 and n == 2 and len(speeds) > 1:
            modes.append("layer")
        if fewest > 2:
            modes.append("groups")
        return tuple(modes)

    def _more(self, fewest: int) -> list[int]:
        n_all = len(self._gpus)
        numbers = {2**n for n in range(1, n_all.bit_length())} | {n_all}
        larger = [n for n in numbers if fewest < n <= n_all]
        return sorted(larger, key=lambda n: self._promised_s(self._promising(n)[0]))[:MAX_PLANNED]

    def _alone(self) -> Iterator[Alternative]:
        # one GPU per kind: the first that holds the model
        kinds = set()
        for gpu in self._gpus:
            kind = self._forecaster.devices[gpu].name, self._rooms[gpu].bytes_per_s
            if kind not in kinds:
                found = self._fitting(replace(self._base, devices=(gpu,)))
                if found is not None:
                    kinds.add(kind)
                    yield found

    def _over(self, n: int, modes: Sequence[str]) -> Iterator[Alternative]:
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
        """Return the fastest and the largest set of n GPUs that can probably hold the model."""
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
        """Estimate the shortest possible time per token over all of `gpus`, in seconds."""
        forecast, load = self._fastest_alone
        path = forecast.decode.path
        read_s = path.memory_s * self._rooms[self._gpus[0]].bytes_per_s
        read_s /= sum(self._rooms[gpu].bytes_per_s for gpu in gpus)
        n_sum = sum(block.count * block.n_reduce for block in load.blocks)
        sum_s = self._forecaster.sum_s(gpus, F32_BYTES * load.n_embd)
        return read_s + path.compute_s / len(gpus) + path.fixed_s + path.host_s + n_sum * sum_s

    @cached_property
    def _fastest_alone(self) -> tuple[Forecast, ModelWorkload]:
        # whether or not that GPU has room
        params = replace(self._base, devices=(self._gpus[0],))
        evaluation = self._planner.evaluate(params, self._free)
        forecast = self._forecast(params, evaluation)
        assert forecast is not None, "rooms are of devices that are known"
        return forecast, evaluation.load

    def _with_cpu(self, offloaded: LoadParams) -> list[Alternative]:
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
        return self._predicted(params) if self._fit.fits(params) else None

    def _predicted(self, params: LoadParams) -> Alternative | None:
        # None if a rank would get nothing, because that is another split
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
            params, speeds, self._goal.seconds(speeds.prefill_ts, speeds.decode_ts),
            sum(n for n, _ in meetings),
            max((self._forecaster.sum_s(group, n_bytes) for _, group in meetings), default=0.0),
            forecast.decode.path.link_s, forecast.decode.reason, forecast.decode.short_reason,
        )  # fmt: skip

    def _forecast(self, params: LoadParams, evaluation: Evaluation) -> Forecast | None:
        return self._forecaster.forecast(evaluation, params, self._planner.info.quant)


def _group_sizes(n: int) -> list[tuple[int, ...]]:
    # two halves, the faster GPUs first, and pairs
    if n < 3:
        return []
    halves = n - n // 2, n // 2
    pairs = (2,) * (n // 2) + (1,) * (n % 2)
    return list(dict.fromkeys([halves, pairs]))
