"""Runs a campaign round after round, from the command line or in a test, and reports figures."""

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self

from tests.soak.phases import Phase


class Campaign(Protocol):
    """Disturbances of one kind in one home.

    Attributes:
        report: figures of the rounds so far.
    """

    report: "Report"

    def round(self, number: int) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Report:
    """Figures of a campaign: rounds by kind, how many hit their phase, and the largest of each."""

    def __init__(self) -> None:
        self._rounds: Counter[str] = Counter()
        self._met: Counter[str] = Counter()
        self._largest: dict[str, float] = defaultdict(float)

    def add(self, kind: str, seconds: Mapping[str, float], phase: Phase | None = None) -> None:
        """Count a round.

        Args:
            seconds: times that were measured in it, by name.
            phase: phase that was to be disturbed; its own figures tell whether it was.
        """
        self._rounds[kind] += 1
        if phase is not None:
            self._met[kind] = phase.n_met
        for name, value in seconds.items():
            self._largest[name] = max(self._largest[name], value)

    def __str__(self) -> str:
        kinds = ", ".join(
            f"{kind} {n}" + (f" ({self._met[kind]} within)" if kind in self._met else "")
            for kind, n in sorted(self._rounds.items())
        )
        largest = ", ".join(f"{name} {value:.2f} s" for name, value in self._largest.items())
        return f"{sum(self._rounds.values())} rounds: {kinds}; largest: {largest}"


def run_campaign(make: Callable[[Path, int, str], Campaign], about: str) -> int:
    """Run a campaign from the command line; return 1 if a round has found something."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kind of the rounds; all in turn if not given")
    parser.add_argument("--keep-on", action="store_true", help="go on after a finding")
    args = parser.parse_args()
    findings, started, number, part = 0, time.monotonic(), 0, 0
    while number < args.rounds:
        seed, part = args.seed + 1000 * part, part + 1
        with (
            tempfile.TemporaryDirectory(prefix="tandem-soak-") as home,
            make(Path(home), seed, args.only) as campaign,
        ):
            try:
                while number < args.rounds:
                    number += 1
                    campaign.round(number - 1)
                    _say(f"{time.monotonic() - started:.0f} s: {campaign.report}")
                campaign.close()
            except AssertionError:
                findings += 1
                _say(f"finding in round {number}: {traceback.format_exc()}")
                if not args.keep_on:
                    return 1
    _say(f"{number} rounds in {time.monotonic() - started:.0f} s, {findings} findings")
    return 1 if findings else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
