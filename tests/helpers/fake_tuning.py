"""Made-up results of a measured search."""

from __future__ import annotations

from engine import GOALS, LoadParams, Region, Sample, Speeds, Trial, TuneEstimate, TuneResult
from engine.planning.search.estimate import TrialSize

DEVICES = ("cuda:0", "cuda:1")
ESTIMATE = TuneEstimate(12, 1.5, 22.0, 4, TrialSize(256, 32))
REGION = Region(DEVICES, "tensor", 0.9, 1.0, "It does not fit into free memory.")


def trial(
    share: float, decode: float, mode: str = "tensor", devices: tuple[str, ...] = DEVICES,
    problem: str = "",
) -> Trial:  # fmt: skip
    """Return a trial of a split over one or two devices, with given tokens per second."""
    split = (share, 1 - share) if len(devices) == 2 else None
    params = LoadParams("/models/tiny.gguf", devices, split, split_mode=mode)
    sample = None if problem else Sample((10 * decode,) * 2, (decode, decode))
    shares = (share, 1 - share) if len(devices) == 2 else (1.0,)
    return Trial(params, shares, sample, Speeds(9 * decode, decode), "Limited by it.", problem)


TRIALS = (
    trial(0.5, 40.0),
    trial(0.8, 30.0),
    trial(0.62, 61.8),
    trial(0.5, 35.0, "layer"),
    trial(1.0, 55.0, devices=("cuda:0",)),
    trial(0.95, 0.0, problem="cuda:0 has 2.00 GiB free but 8.00 GiB are needed."),
)


def result(trials: tuple[Trial, ...] = TRIALS, best: int | None = 2) -> TuneResult:
    return TuneResult(
        "Tiny Chat", "abc", 4096, "set", GOALS["chat"], trials, (REGION,), best,
        "It is 12 % faster than one device.", 20.0,
    )  # fmt: skip
