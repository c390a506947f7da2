"""The command line that loads a model as it is set up: the result of "Copy as command"."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import fields

from app.cli.load_options import flags_for
from app.core.units import MIB
from engine import LoadParams

DEFAULTS = {spec.name: spec.default for spec in fields(LoadParams)}


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
    found = [f"{flag}={text}" for name, flag, text in _options(params) if _is_set(params, name)]
    flags = ("--kv-on-host", params.kv_on_host), ("--fast-prompts", params.fast_prompts)
    return found + [flag for flag, is_set in flags if is_set]


def _is_set(params: LoadParams, name: str) -> bool:
    return bool(getattr(params, name) != DEFAULTS[name])


def _options(params: LoadParams) -> Iterator[tuple[str, str, str]]:
    """Yield name, flag and value of every option, repeated ones once per value."""
    yield "devices", "--devices", ",".join(params.devices)
    yield "split", "--split", _list(params.split)
    yield "split_mode", "--split-mode", params.split_mode
    yield "groups", "--groups", _list(params.groups)
    yield "n_ctx", "--ctx", str(params.n_ctx)
    yield "parallel", "--parallel", str(params.parallel)
    kept = params.checkpoint_bytes or 0
    yield "checkpoint_bytes", "--kept-states", _number(kept / MIB)
    yield "n_cpu_blocks", "--n-cpu-blocks", str(params.n_cpu_blocks)
    yield "n_cpu_moe", "--n-cpu-moe", str(params.n_cpu_moe)
    for pattern, target in params.overrides:
        yield "overrides", "--override", f"{pattern}={target}"
    for device, n_bytes in params.reserve:
        yield "reserve", "--reserve", f"{device}={_number(n_bytes / MIB)}"
    for flag, kind in flags_for(params.kv_type):
        yield "kv_type", flag, kind
    for vector in params.control_vectors:
        yield "control_vectors", "--control-vector", f"{vector.path}={_number(vector.scale)}"
    layers = params.control_layers or ()
    yield "control_layers", "--control-layers", "-".join(map(str, layers))
    yield "cpu_threads", "--threads", str(params.cpu_threads)
    yield "n_batch", "--batch", str(params.n_batch)
    yield "p2p", "--p2p", params.p2p
    yield "draft", "--draft", params.draft
    yield "draft_max", "--draft-max", str(params.draft_max)
    yield "draft_vocab", "--draft-vocab", str(params.draft_vocab)
    yield "mmproj", "--mmproj", params.mmproj
    yield "mmproj_device", "--mmproj-device", params.mmproj_device
    yield "chat_template", "--chat-template", params.chat_template
    yield "rope_scaling", "--rope-scaling", params.rope_scaling
    yield "rope_factor", "--rope-scale", _number(params.rope_factor)
    yield "rope_base", "--rope-freq-base", _number(params.rope_base)


def _list(numbers: tuple[float, ...] | tuple[int, ...] | None) -> str:
    return ",".join(_number(number) for number in numbers or ())


def _number(number: float) -> str:
    """Return the shortest text that reads back as exactly `number`."""
    return str(int(number)) if number == int(number) and abs(number) < 1e15 else repr(number)


def _path(path: str) -> str:
    """Return a path that no parser takes for an option: one with a leading dash gets its folder."""
    return os.path.join(os.curdir, path) if path.startswith("-") else path
