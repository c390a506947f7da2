"""Load options, as `LoadParams` defines them, and their conversion from and to command lines."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine  # its device list and plan store are imported on first use
from app.core.paths import demo_model
from app.core.units import MIB
from engine import (
    KV_TYPES,
    LOAD_DEFAULTS,
    LOAD_OPTIONS,
    ControlVector,
    EngineError,
    KVTypes,
    LoadParams,
    kv_types,
)

if TYPE_CHECKING:
    from engine import BenchResult

BOTH, OF_KEYS, OF_VALUES = (
    ("--kv-type", "--cache-type"), ("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")
)  # fmt: skip
"""Option names for the KV cache type: for both, for keys, for values."""


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the load options; all default to None."""
    group = parser.add_argument_group("split")
    group.add_argument(
        "--plan", metavar="NAME",
        help="load a saved plan, an exported plan file, or 'auto' for the fastest plan that fits; "
        "other options override the plan",
    )  # fmt: skip
    for name in (*HELP_ORDER, *(name for name in LOAD_OPTIONS if name not in HELP_ORDER)):
        add_option(group, name)


def add_option(group: argparse._ArgumentGroup, name: str) -> None:
    """Add the option for one `LoadParams` field, if the field has a flag."""
    option = LOAD_OPTIONS[name]
    if not option.flags:
        return
    if option.kind is bool:
        group.add_argument(*option.flags, action="store_true", default=None, help=option.help)
        return
    kind: Any = option.kind if option.kind in (int, float) else None
    choices = KV_TYPES if name == "kv_type" else option.choices
    group.add_argument(
        *option.flags, metavar=option.metavar, type=READ.get(name, kind), help=option.help,
        action="append" if name in REPEATED else "store",
        choices=None if option.may_be_file else [one for one in choices if one] or None,
    )  # fmt: skip
    if name == "kv_type":
        group.add_argument(*OF_KEYS, choices=KV_TYPES, help="KV cache type for keys only")
        group.add_argument(*OF_VALUES, choices=KV_TYPES, help="KV cache type for values only")


def given(args: argparse.Namespace, name: str) -> Any:
    """Return the value given for a field's option, or None."""
    flags = LOAD_OPTIONS[name].flags
    return getattr(args, flags[0].lstrip("-").replace("-", "_")) if flags else None


def load_params(args: argparse.Namespace) -> LoadParams:
    """Build the load parameters from the options.

    Raises:
        EngineError: an option is invalid, or the plan does not exist.
    """
    path, values = model_path(args.model), _given(args)
    base = LoadParams(path)
    if args.plan is not None:
        base = plan_params(args.plan, path)
    if "devices" in values:  # the plan's shares are for other devices
        values = {"split": None, "groups": None} | values
    return replace(base, **values | {"kv_type": given_kv_type(args, base.kv_type)})


def _given(args: argparse.Namespace) -> dict[str, Any]:
    found = {name: given(args, name) for name in LOAD_OPTIONS}
    return {
        name: READ_LATE[name](value) if name in READ_LATE else value
        for name, value in found.items()
        if value is not None
    }


def plan_params(name: str, path: str) -> LoadParams:
    """Return a plan's load parameters.

    Args:
        name: name of a saved plan, path of an exported plan, or "auto".
        path: model file.

    Raises:
        EngineError: the plan does not exist or needs a missing device, or no plan fits.
    """
    devices = engine.list_devices()
    if _is_file(name):
        return engine.import_plan(Path(name)).resolved(path, devices)
    store, key = engine.PlanStore.of_user(), engine.model_key(path)
    if name.lower() != engine.AUTO_PLAN:
        return store.find(key, name).resolved(path, devices)
    with closing(engine.Planner(path)) as planner:
        best = engine.fastest_plan(store.plans(key), planner, path, devices)
    if best is None:
        raise EngineError(
            "No plan for {model} fits into the free memory.",
            "Save one with: tandem plan MODEL --save NAME",
            model=key.name,
        )
    return best.resolved(path, devices)


def _is_file(name: str) -> bool:
    return name.lower().endswith(".json")


def note_speed(name: str, path: str, results: Sequence[BenchResult]) -> None:
    """Save the measured prompt and decode speeds with a saved plan, if both were measured."""
    if _is_file(name) or name.lower() == engine.AUTO_PLAN:
        return
    prefill = [r for r in results if not r.test.n_gen and not r.test.n_depth]
    decode = [r for r in results if not r.test.n_prompt]
    if not prefill or not decode:
        return
    store, key = engine.PlanStore.of_user(), engine.model_key(path)
    n_ctx = max(r.test.n_ctx for r in (prefill[0], decode[0]))
    badge = engine.PlanBadge(prefill[0].avg_ts, decode[0].avg_ts, n_ctx, now())
    store.save(key, replace(store.find(key, name), badge=badge))


def now() -> str:
    """Return the current UTC time in ISO 8601 format."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def given_kv_type(args: argparse.Namespace, base: str) -> str:
    """Return the KV cache type that the options select; `base` is the default."""
    k, v = kv_types(args.kv_type or base)
    return str(KVTypes(args.cache_type_k or k, args.cache_type_v or v))


def add_lists_of_kv_types(add: Callable[[tuple[str, ...], str], Any]) -> None:
    """Add options that take lists of KV cache types; `add` takes flags and a help text."""
    add(BOTH, f"{', '.join(KV_TYPES)} (default: f16)")
    add(OF_KEYS, "KV cache types for keys only")
    add(OF_VALUES, "KV cache types for values only")


def crossed_kv_types(args: argparse.Namespace, base: str) -> Iterator[str]:
    """Yield all combinations of the KV cache types listed in the options."""
    for text in args.kv_type or [base]:
        both = kv_types(text)
        for k in args.cache_type_k or [both.k]:
            for v in args.cache_type_v or [both.v]:
                yield str(KVTypes(k, v))


def flags_for(kv_type: str) -> Iterator[tuple[str, str]]:
    """Yield the options and values that select a KV cache type."""
    k, v = kv_types(kv_type)
    if k == v:
        yield BOTH[0], k
    else:
        yield OF_KEYS[1], k
        yield OF_VALUES[1], v


def _mib(text: str) -> int:
    try:
        return round(float(text) * MIB)
    except (ValueError, OverflowError):
        return -1


def checkpoint_size(text: str) -> int:
    """Parse a size in MiB; return bytes.

    Raises:
        EngineError: the text is not a size.
    """
    n_bytes = _mib(text)
    if n_bytes < 0:
        raise EngineError("'{text}' is not a size in MiB.", "Example: 1024", text=text)
    return n_bytes


def split_shares(text: str) -> tuple[float, ...]:
    """Parse shares such as "3,1" or "3/1".

    Raises:
        EngineError: the shares are not numbers.
    """
    try:
        return tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        raise EngineError(
            "The split '{text}' is not a list of numbers.", "Example: --split 3,1", text=text
        ) from None


def override(text: str) -> tuple[str, str]:
    """Parse REGEX=DEVICE or REGEX=#RANK.

    Raises:
        EngineError: the syntax is wrong.
    """
    pattern, equals, target = text.rpartition("=")
    if not equals or not pattern or not target:
        raise EngineError(
            "The override '{text}' is not REGEX=DEVICE.", "Example: 'ffn_.*_exps=cpu'", text=text
        )
    return pattern, engine.parse_target(target)


def group_sizes(text: str) -> tuple[int, ...]:
    """Parse group sizes such as "2,2".

    Raises:
        EngineError: the sizes are not integers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise EngineError(
            "The groups '{text}' are not a list of integers.", "Example: --groups 2,2", text=text
        ) from None


def reserve(text: str) -> tuple[str, int]:
    """Parse DEVICE=MIB; return the device and the number of bytes.

    Raises:
        EngineError: the syntax is wrong.
    """
    device, _, amount = text.rpartition("=")
    n_bytes = _mib(amount)
    if not device or n_bytes < 0:
        raise EngineError(
            "The reserve '{text}' is not DEVICE=MIB.", "Example: --reserve cuda:0=1024", text=text
        )
    return engine.parse_devices(device)[0], n_bytes


def _control_vector(text: str) -> ControlVector:
    path, equals, scale = text.rpartition("=")
    if equals:
        try:
            return ControlVector(path, float(scale))
        except ValueError:
            pass
    return ControlVector(text)


def _layers(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        raise EngineError(
            "The layers '{text}' are not FIRST-LAST.", "Example: --control-layers 10-20", text=text
        )
    return int(first), int(last)


def text_or_file(text: str, what: str) -> str:
    """Return a text, or the contents of a file if the text is "@" followed by its path.

    Args:
        what: name for the text in the error.

    Raises:
        EngineError: the file cannot be read.
    """
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise EngineError(
            "The {what} {path} cannot be read: {problem}.",
            what=what,
            path=text[1:],
            problem=str(error),
        ) from None


def model_path(name: str) -> str:
    """Return the path of the file that a MODEL argument names.

    Raises:
        EngineError: the argument is "demo", but this installation has no demo model.
    """
    if name != "demo":
        return name
    path = demo_model()
    if path is None:
        raise EngineError("This installation has no demo model.", "Specify a GGUF file.")
    return str(path)


READ: Mapping[str, Callable[[str], Any]] = {
    "groups": group_sizes,
    "checkpoint_bytes": checkpoint_size,
    "overrides": override,
    "reserve": reserve,
}
"""Parsers for options that are not plain numbers or strings."""

READ_LATE: Mapping[str, Callable[[Any], Any]] = {
    "devices": lambda text: tuple(engine.parse_devices(text)),
    "split": split_shares,
    "overrides": tuple,
    "reserve": tuple,
    "control_vectors": lambda texts: tuple(map(_control_vector, texts)),
    "control_layers": _layers,
    "chat_template": lambda text: text_or_file(text, "chat template"),
}
"""Parsers applied after all options are read."""

REPEATED = ("overrides", "reserve", "control_vectors")  # repeatable options

HELP_ORDER = (
    "devices", "split", "split_mode", "groups", "n_ctx", "parallel", "checkpoint_bytes",
    "n_cpu_blocks", "n_cpu_moe", "kv_on_host", "overrides", "reserve", "rope_scaling",
    "rope_factor", "rope_base", "chat_template", "p2p", "kv_type", "control_vectors",
    "control_layers", "cpu_threads", "n_batch", "fast_prompts", "draft", "draft_max",
    "draft_vocab", "mmproj", "mmproj_device",
)  # fmt: skip
"""Order of options in help texts; other options come last."""


def command_for(params: LoadParams, subcommand: str = "chat") -> str:
    """Return a command line for `params`, quoted for this system's shell.

    Parsing it yields the same `params`.
    """
    arguments = ["tandem", subcommand, _path(params.path), *options_for(params)]
    if os.name == "nt":
        return subprocess.list2cmdline(arguments)
    from shlex import join  # imported late to speed up the start

    return join(arguments)


def options_for(params: LoadParams) -> list[str]:
    """Return the options for all fields of `params` that differ from their defaults."""
    names = [name for name in LOAD_OPTIONS if getattr(params, name) != LOAD_DEFAULTS[name]]
    flags = [name for name in HELP_ORDER if name in names and LOAD_OPTIONS[name].kind is bool]
    found = [
        f"{flag}={text}"
        for name in sorted(names, key=_place_in_command)
        if name not in flags
        for flag, text in _given_as(name, getattr(params, name))
    ]
    return found + [LOAD_OPTIONS[name].flags[0] for name in flags]


def _place_in_command(name: str) -> int:
    known = [*(one for one in HELP_ORDER if one not in LAST_IN_COMMAND), *LAST_IN_COMMAND]
    return known.index(name) if name in known else len(known)


def _given_as(name: str, value: Any) -> Iterator[tuple[str, str]]:
    option = LOAD_OPTIONS[name]
    if name == "kv_type":
        yield from flags_for(value)
    elif option.flags:
        write = WRITTEN.get(name, _number if option.kind in (int, float) else str)
        for one in value if name in REPEATED else [value]:
            yield option.flags[0], write(one)


def _list(numbers: tuple[float, ...] | tuple[int, ...] | None) -> str:
    return ",".join(_number(number) for number in numbers or ())


def _number(number: float) -> str:
    return str(int(number)) if number == int(number) and abs(number) < 1e15 else repr(number)


def _path(path: str) -> str:
    """Return a path that cannot be mistaken for an option."""
    return os.path.join(os.curdir, path) if path.startswith("-") else path


WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "devices": ",".join,
    "split": _list,
    "groups": _list,
    "checkpoint_bytes": lambda n_bytes: _number(n_bytes / MIB),
    "overrides": "=".join,
    "reserve": lambda pair: f"{pair[0]}={_number(pair[1] / MIB)}",
    "control_vectors": lambda vector: f"{vector.path}={_number(vector.scale)}",
    "control_layers": lambda layers: "-".join(map(str, layers)),
}
"""Formatters for values that are not plain numbers or strings."""

LAST_IN_COMMAND = (
    "p2p", "draft", "draft_max", "draft_vocab", "mmproj", "mmproj_device", "chat_template",
    "rope_scaling", "rope_factor", "rope_base",
)  # fmt: skip
"""Options that come last in a command line."""
