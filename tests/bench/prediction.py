"""Table of predicted and measured speeds on one CPU rank.

    python -m tests.bench.prediction MODEL [...] [--rounds N] [--threads N] [-n TOKENS] [-p TOKENS]

In each round the facts that predictions start from are measured (each kind of weights once), then
the model, then the facts again, so that a noisy machine slows both. Shown are the medians of
predicted and measured tokens/s, and of the rounds' ratios of these, with their quartiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from statistics import median, quantiles

from engine import BenchTest, LoadParams, list_devices, load_model
from engine.hardware.devices.host import usable_cores
from engine.planning.evaluation.workload import ModelWorkload
from engine.planning.planner import Planner
from engine.planning.speed.facts import DeviceFacts, Prediction, WeightRate
from engine.planning.speed.links import Links
from engine.planning.speed.machine_file import expected_facts
from engine.planning.speed.speed_model import SpeedModel
from engine.runtime.measuring.weight_speed import Probe, measurable

PROBE_BYTES = 256 << 20
NO_LIMIT = 1e15
"""Operations per second of a kind of weights where these do not matter."""

HEADINGS = ("model", "test", "predicted", "measured", "ratio", "quartiles")


def load_of(path: str) -> ModelWorkload:
    """Return the work of a token, from the file's header."""
    with closing(Planner(path)) as planner:
        return planner.evaluate(LoadParams(path)).load


def facts_now(probes: Sequence[Probe], base: DeviceFacts, *, is_prompt: bool) -> DeviceFacts:
    """Measure the device as it is at this moment, each kind of weights once."""
    rates = {}
    for probe in probes:
        bytes_per_s = probe.bytes_per_s()
        flop_per_s = probe.flop_per_s() if is_prompt else NO_LIMIT
        rates[probe.kind] = WeightRate(bytes_per_s, bytes_per_s / base.n_threads, flop_per_s)
    return replace(base, rates=rates)


def compare(path: str, test: BenchTest, rounds: int, n_threads: int) -> list[str]:
    """Return one line of the table."""
    load, cpu = load_of(path), list_devices()[-1]
    base = replace(expected_facts(cpu), n_threads=n_threads)
    predict: Callable[[SpeedModel], Prediction]
    if test.n_prompt:
        predict = lambda speed: speed.prefill(load, test.n_prompt, 512)  # noqa: E731
    else:
        predict = lambda speed: speed.decode(load, test.n_gen // 2)  # noqa: E731
    predicted, measured, ratios = [], [], []
    with ExitStack() as stack:
        kinds = measurable(sorted(load.kinds))
        probes = [stack.enter_context(closing(Probe(k, n_threads, PROBE_BYTES))) for k in kinds]
        model = stack.enter_context(
            load_model(path, ["cpu"], n_ctx=max(256, test.n_ctx), cpu_threads=n_threads)
        )
        model.bench(test, 1, warm_up=True)
        is_prompt = test.n_prompt > 0

        def seconds() -> float:
            facts = facts_now(probes, base, is_prompt=is_prompt)
            return 1 / predict(SpeedModel([facts], Links({}), n_threads)).tokens_per_s

        before = seconds()
        for _ in range(rounds):
            measured.append(model.bench(test, 1, warm_up=False).avg_ts)
            after = seconds()
            predicted.append(2 / (before + after))
            ratios.append(predicted[-1] / measured[-1])
            before = after
    low, _, high = quantiles(ratios, n=4)
    return [
        path.rpartition("/")[2], str(test), f"{median(predicted):.2f}", f"{median(measured):.2f}",
        f"{median(ratios):.2f}", f"{low:.2f} {high:.2f}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("-n", type=int, default=8, help="tokens to generate in a round")
    parser.add_argument("-p", type=int, default=0, help="tokens of a prompt, in place of these")
    args = parser.parse_args(argv)
    _write(HEADINGS)
    test = BenchTest(n_prompt=args.p) if args.p else BenchTest(n_gen=args.n)
    for path in args.models:
        _write(compare(path, test, max(2, args.rounds), args.threads))


def _write(row: Sequence[str]) -> None:
    sys.stdout.write("".join(text.ljust(14) for text in row).rstrip() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
