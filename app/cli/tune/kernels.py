"""`tune --kernels`: finds the fastest configurations of the GPU kernels for a model's matrices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import engine  # names that need torch are resolved when they are used
from app.cli.load_options import model_path
from app.cli.output import note_progress, percent, table, write, write_json
from app.cli.talk import Interrupt
from engine import parse_devices

if TYPE_CHECKING:
    from engine import KernelTuning

HEADERS = ("DEVICE", "KERNEL", "FOR", "BY RULE", "BEST", "TIME SAVED", "CONFIGURATION", "TRIED")
RIGHT = frozenset({3, 4, 5, 7})


def run_tune_kernels(args: argparse.Namespace) -> None:
    """Search on the GPUs of --devices, or on all, with `engine.tune_kernels`."""
    interrupt = Interrupt()
    with interrupt.watching():
        found = engine.tune_kernels(
            model_path(args.model),
            parse_devices(args.devices) if args.devices else (),
            on_progress=_stepped,
            is_cancelled=interrupt,
        )
    note_progress()
    if args.json:
        write_json({"kernels": found})
    else:
        write(text(found))


def _stepped(n_done: int, n_total: int, what: str) -> None:
    note_progress(f"{n_done} of {n_total}: {what} …")


def text(found: Sequence[KernelTuning]) -> str:
    """Return for people a row per search, and what its results will change."""
    n_better = sum(tuning.best_s < tuning.rule_s for tuning in found)
    rows = [_row(tuning) for tuning in found]
    end = "They are used from the next load on." if n_better else "All rules stay as they are."
    return f"{table(HEADERS, rows, RIGHT)}\n\n{n_better} of {len(found)} can be faster. {end}"


def _row(tuning: KernelTuning) -> tuple[str, ...]:
    saved = 1 - tuning.best_s / tuning.rule_s
    return (
        tuning.device, tuning.kernel, _words(tuning.facts), _microseconds(tuning.rule_s),
        _microseconds(tuning.best_s), percent(saved) if saved > 0 else "-",
        _words(tuning.config), str(tuning.n_tried),
    )  # fmt: skip


def _words(facts: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items())


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs"
