"""The subcommand `tune`, which measures splits and shows the fastest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import engine  # modules that need torch are imported on first use
from app.cli.arguments import add_json, add_model
from app.cli.load_options import add_load, command_for, load_params, model_path
from app.cli.output import (
    fallback_fields,
    microseconds,
    note,
    note_progress,
    percent,
    table,
    write,
    write_json,
)
from app.cli.split.plans import save_plan
from app.cli.talk import Interrupt
from engine import (
    GOALS,
    SPLIT_MODES,
    EngineError,
    Forecaster,
    Goal,
    LoadParams,
    PlanBadge,
    Planner,
    Trial,
    TuneEstimate,
    TuneProgress,
    TuneResult,
    last_result,
    list_devices,
    parse_devices,
    result_document,
)

if TYPE_CHECKING:
    from engine import KernelTuning

KERNEL_HEADERS = (
    "DEVICE", "KERNEL", "FOR", "BY RULE", "BEST", "TIME SAVED", "CONFIGURATION", "TRIED",
)  # fmt: skip
KERNEL_RIGHT = frozenset({3, 4, 5, 7})


def run_tune_kernels(args: argparse.Namespace) -> None:
    """Tune the kernels for the GPUs in --devices, or for all GPUs."""
    interrupt = Interrupt()
    with interrupt.watching():
        tunings = engine.tune_kernels(
            model_path(args.model),
            parse_devices(args.devices) if args.devices else (),
            on_progress=_kernel_stepped,
            is_cancelled=interrupt,
        )
    note_progress()
    if args.json:
        write_json({"kernels": tunings})
    else:
        write(kernels_text(tunings))


def _kernel_stepped(n_done: int, n_total: int, what: str) -> None:
    note_progress(f"{n_done} of {n_total}: {what} …")


def kernels_text(tunings: Sequence[KernelTuning]) -> str:
    """Return a table of tuned kernels, followed by a summary."""
    n_better = sum(tuning.best_s < tuning.rule_s for tuning in tunings)
    rows = [_kernel_row(tuning) for tuning in tunings]
    end = "They are used from the next load on." if n_better else "The defaults are unchanged."
    sentence = f"{n_better} of {len(tunings)} can be faster. {end}"
    return f"{table(KERNEL_HEADERS, rows, KERNEL_RIGHT)}\n\n{sentence}"


def _kernel_row(tuning: KernelTuning) -> tuple[str, ...]:
    saved = 1 - tuning.best_s / tuning.rule_s
    return (
        tuning.device, tuning.kernel, _words(tuning.facts), microseconds(tuning.rule_s),
        microseconds(tuning.best_s), percent(saved) if saved > 0 else "-",
        _words(tuning.config), str(tuning.n_tried),
    )  # fmt: skip


def _words(facts: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items())


HEADERS = ("DEVICES", "MODE", "SHARES", "PROMPTS", "ANSWERS", "EXPECTED", "")
RIGHT = frozenset({3, 4, 5})

EPILOG = """\
Each trial is a short run of the real model: a prompt and some tokens, twice. The search tries
single devices, sets of devices, split modes and shares, the most promising first, and repeats the
best ones at the end. --devices limits the devices to choose from (default: all on this machine),
and --split-mode limits the modes; --split and --groups are ignored. Ctrl+C ends the search and
shows the best result so far.

'--for chat' rates each split by a prompt of 256 tokens and an answer of 256 tokens, '--for prompts'
by a prompt of 4096 tokens and an answer of 128 tokens.

With --draft, the best split is also measured with speculative decoding: with draft tokens from the
text, from the model's own MTP block, or from a draft model, as available.

--kernels tunes the GPU kernels instead: it searches for the fastest configuration of each kernel
for this model's matrix sizes and types. The results are used from the next load on."""


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_model(parser)
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="max search time (default: no limit)"
    )
    parser.add_argument(
        "--for", choices=tuple(GOALS), default="chat", dest="goal",
        help="what to optimise (default: chat)",
    )  # fmt: skip
    parser.add_argument(
        "--last", action="store_true",
        help="show the result of the last search with these options instead of searching again",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", action="store_true", help="tune the GPU kernels instead of the split"
    )
    parser.add_argument("--save", metavar="NAME", help="save the fastest split as a plan")
    add_load(parser)
    add_json(parser)


def run_tune(args: argparse.Namespace) -> None:
    if args.kernels:
        run_tune_kernels(args)
        return
    if args.devices is None and args.plan is None:
        args.devices = ",".join(device.id for device in list_devices() if device.usable)
    params = load_params(args)
    result = _last(params, args.goal) if args.last else _searched(params, args)
    note_progress()
    winner = result.winner
    if winner is None:
        raise EngineError(result.reason or "Nothing was measured.", "Allow more time or memory.")
    if args.save is not None:
        save_plan(args.save, winner.params, badge_of(result, winner))
    if args.json:
        write_json(document(result, winner))
    else:
        write(text(result, winner))


def _searched(params: LoadParams, args: argparse.Namespace) -> TuneResult:
    interrupt = Interrupt()
    with interrupt.watching():
        return engine.tune(
            params,
            goal=args.goal,
            budget_s=args.budget,
            with_drafts=args.draft not in (None, "off"),
            modes=SPLIT_MODES if args.split_mode is None else (args.split_mode,),
            on_start=_started,
            on_progress=_stepped,
            is_cancelled=interrupt,
        )


def _last(params: LoadParams, goal: str) -> TuneResult:
    with closing(Planner(params.path)) as planner:
        result = last_result(planner, params, Forecaster.of_machine(), goal)
    if result is None:
        raise EngineError(
            "There is no earlier search for this model, context and devices.", "Omit --last."
        )
    return result


def badge_of(result: TuneResult, trial: Trial) -> PlanBadge:
    """Return a trial's speeds, to save with a plan."""
    return PlanBadge(trial.prefill_ts, trial.decode_ts, result.n_ctx, result.when)


def _started(estimate: TuneEstimate) -> None:
    note(estimate.sentence)


def _stepped(step: TuneProgress) -> None:
    best = f", best so far: {_shares(step.best)}" if step.best else ""
    where = f"{','.join(step.trial.devices)} {_shares(step.trial)}"
    note_progress(f"{step.n_done} of {step.n_trials}: {where}{best} …")


def document(result: TuneResult, winner: Trial) -> dict[str, Any]:
    """Return the JSON document, with the winner first and then all trials."""
    return {
        "winner": _fields(winner, result.goal),
        "reason": result.reason,
        "command": command_for(winner.params),
        **result_document(result),
        "results": [_fields(trial, result.goal) for trial in result.trials],
    }


def _fields(trial: Trial, goal: Goal) -> dict[str, Any]:
    ran = trial.sample is not None
    return {
        "devices": trial.devices,
        "split": trial.params.split,
        "split_mode": trial.params.split_mode,
        "groups": trial.params.groups,
        "shares": trial.shares,
        "prefill_ts": trial.prefill_ts if ran else None,
        "prefill_spread": trial.prefill_spread if ran else None,
        "decode_ts": trial.decode_ts if ran else None,
        "decode_spread": trial.decode_spread if ran else None,
        "seconds": trial.seconds(goal) if ran else None,
        "is_final": trial.is_final,
        "predicted": trial.predicted,
        "problem": trial.problem or None,
        "fallbacks": fallback_fields(trial.sample.fallbacks if trial.sample else ()),
    }


def text(result: TuneResult, winner: Trial) -> str:
    """Return a table of all trials, finalists first, and the reason for the winner."""
    trials = sorted(result.trials, key=lambda t: (not t.is_final, t.seconds(result.goal)))
    lines = [table(HEADERS, [_row(trial, trial is winner) for trial in trials], RIGHT), ""]
    if not result.is_complete:
        lines.append("The search ended early; this is the best result so far.")
    lines += filter(None, (result.reason, result.note))
    samples = [trial.sample for trial in trials if trial.sample is not None]
    if reasons := list(dict.fromkeys(f.sentence for sample in samples for f in sample.fallbacks)):
        lines += ["Some were slower than possible:", *reasons]
    lines.append(f"Use it with: {command_for(winner.params)}")
    return "\n".join(lines)


def _row(trial: Trial, is_winner: bool) -> tuple[str, ...]:
    mode = _mode(trial.params)
    expected = f"{trial.predicted.decode_ts:.1f} t/s" if trial.predicted else "-"
    if trial.sample is None:
        return (",".join(trial.devices), mode, _shares(trial), "-", "-", expected, trial.problem)
    prefill = f"{trial.prefill_ts:.0f} ± {percent(trial.prefill_spread)}"
    decode = f"{trial.decode_ts:.1f} ± {percent(trial.decode_spread)}"
    marks = {
        "fastest": is_winner,
        "measured alternately": trial.is_final,
        "slower than possible": bool(trial.sample.fallbacks),
    }
    mark = ", ".join(mark for mark, applies in marks.items() if applies)
    return (",".join(trial.devices), mode, _shares(trial), prefill, decode, expected, mark)


def _mode(params: LoadParams) -> str:
    if len(params.devices) == 1:
        return "-"
    return " ".join([params.split_mode, ",".join(map(str, params.group_sizes))]).strip()


def _shares(trial: Trial) -> str:
    return " + ".join(f"{100 * share:.0f} %" for share in trial.shares)
