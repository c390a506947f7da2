"""The subcommand `bench`, which measures a model's speed for all combinations of settings."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import engine  # modules that need torch are imported on first use
from app.cli.arguments import add_json, add_model
from app.cli.bench.report import Report
from app.cli.bench.tables import BenchRow, LoadSpeed, add_kernels, measured_products, product_types
from app.cli.load_options import (
    add_lists_of_kv_types,
    add_option,
    crossed_kv_types,
    group_sizes,
    model_path,
    note_speed,
    now,
    plan_params,
    split_shares,
)
from app.cli.loading import LoadWatch, open_model
from app.cli.output import note, note_progress, write, write_json
from app.cli.split.default_split import with_default_split
from engine import (
    KV_TYPES,
    PEER_MODES,
    SPLIT_MODES,
    BenchTest,
    EngineError,
    Forecaster,
    LoadParams,
    OutOfDeviceMemory,
    Planner,
    parse_devices,
    read_model_info,
    token_work,
)

if TYPE_CHECKING:
    from engine import DeviceSpeed, Model


def learn(path: str, quant: str, rows: Sequence[BenchRow]) -> None:
    """Record how much measured times differ from predictions.

    Failed tests and tests that mix prompt and generation are skipped.

    Args:
        path: model file.
        quant: quantization of the model.
        rows: results of a benchmark.
    """
    forecaster = Forecaster.of_machine()
    with closing(Planner(path)) as planner:
        for row in rows:
            if row.result is None:
                continue
            test, params = row.test, row.params
            evaluation = planner.evaluate(params, forecaster.free_bytes)
            seconds = median(row.result.samples_s)
            for _ in row.result.samples_s[:2]:  # all samples together count as at most two runs
                if not test.n_prompt:
                    middle = test.n_depth + test.n_gen // 2
                    forecaster.learn_decode(evaluation, params, quant, seconds / test.n_gen, middle)
                elif not test.n_gen:
                    forecaster.learn_prefill(
                        evaluation, params, quant, test.n_prompt, seconds, test.n_depth
                    )


EPILOG = """\
Every combination of all option values is measured. Separate values with commas, or with semicolons
if a value contains commas (--devices, --split, --groups, --pg); each option may be repeated:
  tandem bench m.gguf -p 128,512 --devices 'cpu;cpu,cpu' --split-mode tensor,layer --threads 1,2
A combination that cannot be loaded or run becomes a row with the reason; the others still run.

A test runs forward passes and reads their logits, without a tokenizer or sampling. T/S is tokens
per second: mean ± standard deviation over the repetitions.
REACHED compares a test with the combined speed of its devices, which is measured at the start. For
generation (tg), it compares the rate at which the file's weight bytes are read with the rate of
sequential memory reads; only active experts count. For prompts (pp), it compares the operations per
second in matrix products with those of torch's matrix product in F32 or BF16, whichever is faster.
OVERHEAD is the time per token outside the kernels, and its share of the token's time: Python, small
torch operations, waiting for other ranks, and sampling. With several ranks, it is the overhead of
the rank with the most work. It is unknown for a rank that uses only torch.
HOST is the host's work per token: with GPUs, the time until all of them have the token; on the CPU,
the time outside the kernels.
After all tests, --kernels measures the CPU's matrix products with the settings of the first load on
the CPU: weight bytes per second for one token, compared with a torch sum over memory; operations
per second for 8 and 512 tokens; and the arithmetic for 512 tokens, which is INT8 or F32 in Tandem's
kernels, or BF16 in torch (--fast-prompts).
FALLBACK appears if a GPU was slower than possible; the reasons are listed below the table."""


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_model(parser)
    tests = parser.add_argument_group("what to measure")
    _add_list(tests, ("-p", "--n-prompt"), _integers, "prompt lengths in tokens (default: 512)")
    _add_list(tests, ("-n", "--n-gen"), _integers, "how many tokens to generate (default: 128)")
    _add_list(
        tests, ("-pg", "--pg"), _pairs, "prompt length, then tokens to generate, e.g. 512,128"
    )
    _add_list(
        tests, ("-d", "--n-depth"), _integers, "tokens in the cache before a test (default: 0)"
    )
    tests.add_argument(
        "-r", "--repetitions", type=_positive, default=5, metavar="N",
        help="repetitions of each test (default: 5)",
    )  # fmt: skip
    tests.add_argument(
        "--timeline", action="store_true",
        help="show how each rank spends the time per token: computing, waiting, in Python",
    )  # fmt: skip
    add_kernels(tests)
    tests.add_argument("--no-warmup", action="store_true", help="skip the warm-up run")
    how = parser.add_argument_group("how to load")
    how.add_argument(
        "--plan", metavar="NAME",
        help="load a saved plan and save the measured speed with it; other options override the "
        "plan",
    )  # fmt: skip
    _add_list(how, ("--devices",), _devices, "one device per rank (default: the fastest)")
    _add_list(how, ("--split",), _splits, "relative shares, e.g. 3,1, or 'even' (default)")
    modes = f"{', '.join(SPLIT_MODES)} (default: tensor)"
    _add_list(how, ("--split-mode",), _choices(SPLIT_MODES), modes)
    _add_list(how, ("--groups",), _groups, "group sizes for mode groups, e.g. 2,2, or 'auto'")
    _add_list(
        how, ("--n-cpu-blocks",), _integers, "number of leading blocks on the CPU (default: 0)"
    )
    _add_list(
        how,
        ("--n-cpu-moe",),
        _integers,
        "number of leading blocks with experts on the CPU (default: 0)",
    )
    add_lists_of_kv_types(lambda flags, text: _add_list(how, flags, _choices(KV_TYPES), text))
    _add_list(how, ("-t", "--threads"), _integers, "total number of CPU threads, over all ranks")
    batch = "prompt tokens per batch (default: up to 2048 on GPUs, else 512)"
    _add_list(how, ("-b", "--batch"), _integers, batch)
    peers = f"peer-to-peer access between GPUs: {', '.join(PEER_MODES)} (default: auto)"
    _add_list(how, ("--p2p",), _choices(PEER_MODES), peers)
    for name in ("kv_on_host", "fast_prompts", "overrides", "reserve"):
        add_option(how, name)
    form = parser.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument("--csv", action="store_true", help="print CSV: a header and one row per test")


def _add_list(
    group: argparse._ArgumentGroup,
    flags: Sequence[str],
    parse: Callable[[str], Sequence[object]],
    text: str,
) -> None:
    group.add_argument(*flags, action="extend", type=parse, metavar="LIST", help=text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return int(text)


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of integers") from None


def _pairs(text: str) -> list[tuple[int, int]]:
    pairs = [tuple(_integers(part)) for part in text.split(";")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"'{text}' is not PROMPT,GENERATED")
    return [(pair[0], pair[1]) for pair in pairs]


def _devices(text: str) -> list[tuple[str, ...]]:
    return [tuple(parse_devices(part)) for part in text.split(";")]


def _splits(text: str) -> list[tuple[float, ...] | None]:
    return [None if part == "even" else split_shares(part) for part in text.split(";")]


def _groups(text: str) -> list[tuple[int, ...] | None]:
    return [None if part == "auto" else group_sizes(part) for part in text.split(";")]


def _choices(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        values = text.split(",")
        for value in values:
            if value not in known:
                raise argparse.ArgumentTypeError(f"'{value}' is not one of {', '.join(known)}")
        return values

    return parse


def run_bench(args: argparse.Namespace) -> None:
    path, settings, tests = model_path(args.model), _settings(args), _tests(args)
    info, work = read_model_info(path), token_work(path)
    report = Report(
        info, work, _speeds(settings), has_timeline=args.timeline, has_kernels=args.kernels
    )
    types = product_types(args.kernel_types, info) if args.kernels else []
    rows: list[BenchRow] = []
    try:
        for params in settings:
            rows.extend(_bench_load(params, tests, args))
        if args.kernels:
            report.products = measured_products(rows, types)
    finally:  # results so far are useful even after an interrupt
        if rows:
            _show(report, rows, args)
    learn(path, info.quant, rows)
    if args.plan is not None and len(settings) == 1:
        note_speed(args.plan, path, [row.result for row in rows if row.result])
    if all(row.result is None for row in rows):
        raise EngineError("No test could be run.", "The rows above say why.")


def _settings(args: argparse.Namespace) -> list[LoadParams]:
    path = model_path(args.model)
    base = LoadParams(path) if args.plan is None else plan_params(args.plan, path)
    base = with_default_split(args, base)
    if args.devices:  # the plan's shares are for other devices
        base = replace(base, split=None, groups=None)
    crossed = itertools.product(
        args.devices or [base.devices],
        args.split or [base.split],
        args.split_mode or [base.split_mode],
        crossed_kv_types(args, base.kv_type),
        args.threads or [base.cpu_threads],
        args.batch or [base.n_batch],
        args.groups or [base.groups],
        args.n_cpu_blocks or [base.n_cpu_blocks],
        args.n_cpu_moe or [base.n_cpu_moe],
        args.p2p or [base.p2p],
    )
    settings = (
        replace(
            base, devices=devices, split=split, split_mode=mode, kv_type=kv_type,
            cpu_threads=threads, n_batch=batch, groups=groups if mode == "groups" else None,
            n_cpu_blocks=n_blocks, n_cpu_moe=n_moe, p2p=p2p,
            overrides=base.overrides if args.override is None else tuple(args.override),
            kv_on_host=base.kv_on_host if args.kv_on_host is None else args.kv_on_host,
            fast_prompts=base.fast_prompts if args.fast_prompts is None else args.fast_prompts,
            reserve=base.reserve if args.reserve is None else tuple(args.reserve),
        )
        for devices, split, mode, kv_type, threads, batch, groups, n_blocks, n_moe, p2p in crossed
    )  # fmt: skip
    return list(dict.fromkeys(settings))


def _tests(args: argparse.Namespace) -> list[BenchTest]:
    n_prompts = [512] if args.n_prompt is None else args.n_prompt
    n_gens = [128] if args.n_gen is None else args.n_gen
    sizes = [(n, 0) for n in n_prompts if n] + [(0, n) for n in n_gens if n] + (args.pg or [])
    tests = [BenchTest(p, n, depth) for depth in args.n_depth or [0] for p, n in sizes]
    if not tests:
        raise EngineError("There is nothing to measure.", "Set -p, -n or --pg.")
    return list(dict.fromkeys(tests))


def _speeds(settings: Sequence[LoadParams]) -> dict[str, DeviceSpeed]:
    speeds = {}
    for device in sorted({device for params in settings for device in params.all_devices}):
        _progress(f"Measuring {device}")
        try:
            speeds[device] = engine.measure_device(device)
        except EngineError:
            continue
    return speeds


def _bench_load(
    params: LoadParams, tests: Sequence[BenchTest], args: argparse.Namespace
) -> Iterator[BenchRow]:
    """Load once and run all tests; if memory runs out, retry without the longest contexts."""
    waiting = list(tests)
    while waiting:
        n_ctx = max(test.n_ctx for test in waiting)
        start, watch = time.perf_counter(), LoadWatch()
        try:
            model = open_model(replace(params, n_ctx=n_ctx), watch)
        except EngineError as error:
            is_full = isinstance(error, OutOfDeviceMemory)
            kept = [test for test in waiting if is_full and test.n_ctx < n_ctx]
            for test in waiting:
                if test not in kept:
                    row = BenchRow(params, test, now(), params.cpu_threads)
                    yield replace(row, error=str(error), hint=error.hint)
            waiting = kept
            continue
        loaded = LoadSpeed(time.perf_counter() - start, watch.bytes_per_s)
        with model:
            for test in waiting:
                yield _bench_test(model, test, loaded, args)
        return


def _bench_test(
    model: Model, test: BenchTest, loaded: LoadSpeed, args: argparse.Namespace
) -> BenchRow:
    params = model.params
    _progress(f"{test} on {','.join(params.devices)}")
    row = BenchRow(
        params, test, now(), model.n_threads, model.plan.n_batch, model.plan.storage, loaded
    )
    try:
        result = model.bench(
            test, args.repetitions, warm_up=not args.no_warmup, kernels=args.kernels
        )
    except EngineError as error:
        return replace(row, error=str(error), hint=error.hint, fallbacks=model.fallbacks)
    return replace(row, result=result, fallbacks=model.fallbacks)


def _progress(text: str) -> None:
    note_progress(f"{text} …")


def _show(report: Report, rows: Sequence[BenchRow], args: argparse.Namespace) -> None:
    note_progress()
    if args.json:
        write_json(report.document(rows))
    elif args.csv:
        for sentence in report.machine():
            note(sentence)
        write(report.csv(rows))
    else:
        write(report.table(rows))
