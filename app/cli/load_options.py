"""Options of a load: from `LoadParams` to the command line and back.

What the options are is said there; here is how the texts of those are read that are no plain
number, text or flag.
"""

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

import engine  # what lists devices or reads plans is resolved when it is used
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
"""Names of the options for both types, for that of keys, and for that of values."""


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the options that place and split a model; all of them default to None."""
    group = parser.add_argument_group("split")
    group.add_argument(
        "--plan", metavar="NAME",
        help="load by a saved plan, an exported plan's file, or 'auto' for the fastest plan that "
        "fits; other options override it",
    )  # fmt: skip
    for name in (*HELP_ORDER, *(name for name in LOAD_OPTIONS if name not in HELP_ORDER)):
        add_option(group, name)


def add_option(group: argparse._ArgumentGroup, name: str) -> None:
    """Add the option of one setting of `LoadParams`, if it has a flag; it defaults to None."""
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
        group.add_argument(*OF_KEYS, choices=KV_TYPES, help="type of the keys alone")
        group.add_argument(*OF_VALUES, choices=KV_TYPES, help="type of the values alone")


def given(args: argparse.Namespace, name: str) -> Any:
    """Return what the option of a setting gives; None without it."""
    flags = LOAD_OPTIONS[name].flags
    return getattr(args, flags[0].lstrip("-").replace("-", "_")) if flags else None


def load_params(args: argparse.Namespace) -> LoadParams:
    """Return the load parameters of the common options.

    Raises:
        EngineError: the value of an option is invalid, or there is no such plan.
    """
    path, values = model_path(args.model), _given(args)
    base = LoadParams(path)
    if args.plan is not None:
        base = plan_params(args.plan, path)
    if "devices" in values:  # the plan's shares are of other devices
        values = {"split": None, "groups": None} | values
    return replace(base, **values | {"kv_type": given_kv_type(args, base.kv_type)})


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `LoadParams` that options set."""
    found = {name: given(args, name) for name in LOAD_OPTIONS}
    return {
        name: READ_LATE[name](value) if name in READ_LATE else value
        for name, value in found.items()
        if value is not None
    }


def plan_params(name: str, path: str) -> LoadParams:
    """Return the load parameters of a plan.

    Args:
        name: name of a plan, file of an exported one, or "auto".
        path: file of the model.

    Raises:
        EngineError: there is no such plan, none fits, or it needs a device that is not here.
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
            f"{key.name} has no plan that fits into the free memory.",
            "Save one with: tandem plan MODEL --save NAME.",
        )
    return best.resolved(path, devices)


def _is_file(name: str) -> bool:
    return name.lower().endswith(".json")


def note_speed(name: str, path: str, results: Sequence[BenchResult]) -> None:
    """Record measured speeds of prompts and generation in a saved plan.

    Nothing happens if one of them was not measured, or `name` is not a saved plan.
    """
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
    """Return the present time, UTC in ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def given_kv_type(args: argparse.Namespace, base: str) -> str:
    """Return the KV type that options ask for; what none of them says is that of `base`."""
    k, v = kv_types(args.kv_type or base)
    return str(KVTypes(args.cache_type_k or k, args.cache_type_v or v))


def add_lists_of_kv_types(add: Callable[[tuple[str, ...], str], Any]) -> None:
    """Add the options of a command that tries several; `add` makes one of names and a help."""
    add(BOTH, f"{', '.join(KV_TYPES)} (default: f16)")
    add(OF_KEYS, "types of the keys alone")
    add(OF_VALUES, "types of the values alone")


def crossed_kv_types(args: argparse.Namespace, base: str) -> Iterator[str]:
    """Yield each KV type that lists of options ask for."""
    for text in args.kv_type or [base]:
        both = kv_types(text)
        for k in args.cache_type_k or [both.k]:
            for v in args.cache_type_v or [both.v]:
                yield str(KVTypes(k, v))


def flags_for(kv_type: str) -> Iterator[tuple[str, str]]:
    """Yield the options, with their values, that ask for a KV type."""
    k, v = kv_types(kv_type)
    if k == v:
        yield BOTH[0], k
    else:
        yield OF_KEYS[1], k
        yield OF_VALUES[1], v


def kept_states(text: str) -> int:
    """Return the bytes of a number of MiB.

    Raises:
        EngineError: it is something else.
    """
    try:
        n_bytes = round(float(text) * MIB)
    except (ValueError, OverflowError):
        n_bytes = -1
    if n_bytes < 0:
        raise EngineError(f"'{text}' is no amount of memory in MiB.", "For example 1024.")
    return n_bytes


def split_shares(text: str) -> tuple[float, ...]:
    """Return the shares in "3,1" or "3/1".

    Raises:
        EngineError: they are no numbers.
    """
    try:
        return tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        raise EngineError(
            f"The split '{text}' is not a list of numbers.", "For example --split 3,1."
        ) from None


def override(text: str) -> tuple[str, str]:
    """Return the two sides of REGEX=DEVICE or REGEX=#RANK.

    Raises:
        EngineError: it is something else.
    """
    pattern, equals, target = text.rpartition("=")
    if not equals or not pattern or not target:
        raise EngineError(
            f"The override '{text}' is not REGEX=DEVICE.", "For example 'ffn_.*_exps=cpu'."
        )
    return pattern, engine.parse_target(target)


def group_sizes(text: str) -> tuple[int, ...]:
    """Return the numbers in "2,2".

    Raises:
        EngineError: they are no whole numbers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise EngineError(
            f"The groups '{text}' are not a list of whole numbers.", "For example --groups 2,2."
        ) from None


def reserve(text: str) -> tuple[str, int]:
    """Return the device and bytes of DEVICE=MIB.

    Raises:
        EngineError: it is something else.
    """
    device, _, amount = text.rpartition("=")
    try:
        n_bytes = round(float(amount) * MIB)
    except (ValueError, OverflowError):
        n_bytes = -1
    if not device or n_bytes < 0:
        raise EngineError(
            f"The reserve '{text}' is not DEVICE=MIB.", "For example --reserve cuda:0=1024."
        )
    return engine.parse_devices(device)[0], n_bytes


def _control_vector(text: str) -> ControlVector:
    """Return the control vector of FILE or FILE=SCALE; FILE itself may contain an equals sign."""
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
            f"The layers '{text}' are not FIRST-LAST.", "For example --control-layers 10-20."
        )
    return int(first), int(last)


def text_or_file(text: str, what: str) -> str:
    """Return a text, or what the file behind "@" holds.

    Args:
        what: what it is, for the error.

    Raises:
        EngineError: the file cannot be read.
    """
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise EngineError(f"The {what} {text[1:]} cannot be read: {error}.") from None


def model_path(name: str) -> str:
    """Return the file that MODEL names.

    Raises:
        EngineError: it is "demo" and this installation came without it.
    """
    if name != "demo":
        return name
    path = demo_model()
    if path is None:
        raise EngineError("The demo model is not in this installation.", "Give a GGUF file.")
    return str(path)


READ: Mapping[str, Callable[[str], Any]] = {
    "groups": group_sizes,
    "checkpoint_bytes": kept_states,
    "overrides": override,
    "reserve": reserve,
}
"""How the texts of options become values, other than numbers."""

READ_LATE: Mapping[str, Callable[[Any], Any]] = {
    "devices": lambda text: tuple(engine.parse_devices(text)),
    "split": split_shares,
    "overrides": tuple,
    "reserve": tuple,
    "control_vectors": lambda texts: tuple(map(_control_vector, texts)),
    "control_layers": _layers,
    "chat_template": lambda text: text_or_file(text, "chat template"),
}
"""The same for what is read once all options are known."""

REPEATED = ("overrides", "reserve", "control_vectors")
"""Options that may be given several times."""

HELP_ORDER = (
    "devices", "split", "split_mode", "groups", "n_ctx", "parallel", "checkpoint_bytes",
    "n_cpu_blocks", "n_cpu_moe", "kv_on_host", "overrides", "reserve", "rope_scaling",
    "rope_factor", "rope_base", "chat_template", "p2p", "kv_type", "control_vectors",
    "control_layers", "cpu_threads", "n_batch", "fast_prompts", "draft", "draft_max",
    "draft_vocab", "mmproj", "mmproj_device",
)  # fmt: skip
"""Order of the options in help texts; those that are not named come last."""


def command_for(params: LoadParams, subcommand: str = "chat") -> str:
    """Return the command with the options of `params`, quoted for this system's shell.

    Reading it with the parser of `subcommand` gives the same `params`.
    """
    arguments = ["tandem", subcommand, _path(params.path), *options_for(params)]
    if os.name == "nt":
        return subprocess.list2cmdline(arguments)
    from shlex import join  # late: the first picture does not need it

    return join(arguments)


def options_for(params: LoadParams) -> list[str]:
    """Return the options for all values of `params` that differ from the defaults."""
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
    """Yield flag and value of an option, repeated ones once per value."""
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
    """Return the shortest text that reads back as exactly `number`."""
    return str(int(number)) if number == int(number) and abs(number) < 1e15 else repr(number)


def _path(path: str) -> str:
    """Return a path that no parser takes for an option: one with a leading dash gets its folder."""
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
"""How values become texts, other than numbers."""

LAST_IN_COMMAND = (
    "p2p", "draft", "draft_max", "draft_vocab", "mmproj", "mmproj_device", "chat_template",
    "rope_scaling", "rope_factor", "rope_base",
)  # fmt: skip
"""Options that come last in a command."""
