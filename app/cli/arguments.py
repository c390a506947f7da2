"""Options that several subcommands share, and their translation into engine parameters."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import engine  # what lists devices or reads plans is resolved when it is used
from app.cli.load_options import (
    add_draft,
    add_fast_prompts,
    add_form,
    add_kept_states,
    add_kv_types,
    add_parallel,
    add_threads,
    given_form,
    given_kv_type,
    text_or_file,
)
from app.core.paths import demo_model
from app.core.units import MIB
from engine import (
    PEER_MODES,
    ROPE_SCALINGS,
    SAMPLERS,
    SPLIT_MODES,
    ControlVector,
    EngineError,
    LoadParams,
    SamplingParams,
)

SAMPLING_OPTIONS = {
    "temperature": ("--temp", "--temperature"),
    "top_k": ("--top-k",),
    "top_p": ("--top-p",),
    "min_p": ("--min-p",),
    "typical_p": ("--typical",),
    "repeat_penalty": ("--repeat-penalty",),
    "repeat_last_n": ("--repeat-last-n",),
    "frequency_penalty": ("--frequency-penalty",),
    "presence_penalty": ("--presence-penalty",),
    "dry_multiplier": ("--dry-multiplier",),
    "dry_base": ("--dry-base",),
    "dry_allowed_length": ("--dry-allowed-length",),
    "dry_last_n": ("--dry-penalty-last-n",),
    "top_n_sigma": ("--top-nsigma",),
    "xtc_probability": ("--xtc-probability",),
    "xtc_threshold": ("--xtc-threshold",),
    "dynatemp_range": ("--dynatemp-range",),
    "dynatemp_exponent": ("--dynatemp-exp",),
    "mirostat_tau": ("--mirostat-ent",),
    "mirostat_eta": ("--mirostat-lr",),
    "seed": ("--seed", "-s"),
}


def add_model(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    n = "?" if is_optional else None
    parser.add_argument("model", nargs=n, metavar="MODEL", help="a GGUF file, or 'demo'")


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the options that place and split a model; all of them default to None."""
    group = parser.add_argument_group("split")
    group.add_argument(
        "--plan", metavar="NAME",
        help="load by a saved plan, an exported plan's file, or 'auto' for the fastest plan that "
        "fits; other options override it",
    )  # fmt: skip
    group.add_argument(
        "--devices", metavar="LIST",
        help="one device per rank, such as cuda:0,cuda:1 or cpu,cpu (default: the fastest by "
        "prediction, unless another option chooses the split)",
    )  # fmt: skip
    group.add_argument(
        "--split", metavar="LIST", help="relative share of each device, such as 3,1 (default: even)"
    )
    group.add_argument(
        "--split-mode", choices=SPLIT_MODES,
        help="tensor: cut each block over all devices; layer: give whole blocks to devices; "
        "groups: give blocks to groups of devices and cut them inside (default: tensor)",
    )  # fmt: skip
    group.add_argument(
        "--groups", type=group_sizes, metavar="LIST",
        help="sizes of the groups, in the order of the devices, such as 2,2 (default: one group "
        "per kind of device, else pairs)",
    )  # fmt: skip
    group.add_argument(
        "--ctx", type=int, metavar="N",
        help="context length in tokens (default: the model's own, but at most 2048, or for serve "
        "what leaves memory for other programs)",
    )  # fmt: skip
    add_parallel(group)
    add_kept_states(group)
    _add_offload(group)
    _add_rope(group)
    group.add_argument(
        "--p2p", choices=PEER_MODES,
        help="let GPUs access each other's memory directly; auto: where a test shows that it "
        "works and is faster; on: wherever it works; off: nowhere (default: auto)",
    )  # fmt: skip
    add_kv_types(group)
    group.add_argument(
        "--control-vector", action="append", metavar="FILE[=SCALE]",
        help="apply a control vector, multiplied by SCALE; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--control-layers",
        metavar="FIRST-LAST",
        help="layers to apply control vectors to, such as 10-20 (default: all but layer 0)",
    )
    add_threads(group)
    group.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="prompt tokens per batch (default: up to 2048 on GPUs, else 512)",
    )
    add_fast_prompts(group)
    add_draft(group)


def _add_rope(group: argparse._ArgumentGroup) -> None:
    """Add the options that stretch the positions a model was trained for."""
    group.add_argument(
        "--rope-scaling", choices=ROPE_SCALINGS[1:],
        help="how to stretch positions to a longer context (default: as the file says)",
    )  # fmt: skip
    group.add_argument(
        "--rope-scale", type=float, metavar="X", help="factor by which positions are stretched"
    )
    group.add_argument(
        "--rope-freq-base", type=float, metavar="X", help="base of RoPE's frequencies"
    )
    group.add_argument(
        "--chat-template", metavar="JINJA",
        help="use this chat template in place of the file's; @FILE reads it from a file",
    )  # fmt: skip


def _add_offload(group: argparse._ArgumentGroup) -> None:
    """Add the options that place parts of the model apart from the split."""
    group.add_argument(
        "--n-cpu-blocks", type=int, metavar="N", help="place the first N blocks on the CPU"
    )
    group.add_argument(
        "--n-cpu-moe", type=int, metavar="N",
        help="place the experts of the first N blocks on the CPU",
    )  # fmt: skip
    group.add_argument(
        "--kv-on-host", action="store_true", default=None,
        help="keep the KV cache of GPUs in host memory",
    )  # fmt: skip
    add_override(group)
    add_reserve(group)


def add_override(group: argparse._ArgumentGroup) -> None:
    """Add the option that places parts of the model one by one."""
    group.add_argument(
        "--override", action="append", metavar="REGEX=DEVICE", type=override,
        help="place tensors with matching names on one device, or on one rank as in 'attn=#0'; "
        "may be repeated",
    )  # fmt: skip


def add_reserve(group: argparse._ArgumentGroup) -> None:
    """Add the option that keeps memory free."""
    group.add_argument(
        "--reserve", action="append", metavar="DEVICE=MIB", type=reserve,
        help="keep this much memory of a device free, such as cuda:0=1024; may be repeated",
    )  # fmt: skip


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling options; help and defaults come from `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    specs = {spec.name: spec for spec in fields(SamplingParams)}
    for name, flags in SAMPLING_OPTIONS.items():
        spec = specs[name]
        default = "random" if spec.default is None else spec.default
        text = f"{spec.metadata['help']} (default: {default})".replace("%", "%%")
        group.add_argument(
            *flags, dest=name, type=spec.metadata["kind"], default=spec.default, help=text,
            metavar="X" if spec.metadata["kind"] is float else "N",
        )  # fmt: skip
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text"
    )
    group.add_argument(
        "--ban", action="append", default=[], metavar="TEXT",
        help="never answer with this text, in large or small letters; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--dry-sequence-breaker", action="append", metavar="TEXT",
        help="end repetitions before this text, in place of the default ones",
    )  # fmt: skip
    group.add_argument("--mirostat", action="store_true", help="use Mirostat 2 for all filters")
    group.add_argument(
        "--logit-bias", action="append", default=[], type=token_bias, metavar="ID=X",
        help="add X to the score of a token; -inf forbids it",
    )  # fmt: skip
    group.add_argument(
        "--samplers", type=sampler_names, metavar="LIST",
        help=f"order of the steps; those not named are left out (default: {','.join(SAMPLERS)})",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )
    group.add_argument(
        "--on-overflow", choices=("stop", "shift"), default="stop",
        help="when the context is full: stop, or shift: drop the oldest tokens (default: stop)",
    )  # fmt: skip
    add_form(parser)


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


def load_params(args: argparse.Namespace) -> LoadParams:
    """Return the load parameters of the common options.

    Raises:
        EngineError: the value of an option is invalid, or there is no such plan.
    """
    path, given = model_path(args.model), _given(args)
    base = LoadParams(path)
    if args.plan is not None:
        from app.cli.split.plan_option import plan_params  # late: it imports the planner

        base = plan_params(args.plan, path)
    if "devices" in given:  # the plan's shares are of other devices
        given = {"split": None, "groups": None} | given
    return replace(base, kv_type=given_kv_type(args, base.kv_type), **given)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `LoadParams` that options set."""
    read: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "devices": (args.devices, lambda text: tuple(engine.parse_devices(text))),
        "split": (args.split, split_shares),
        "split_mode": (args.split_mode, str),
        "n_ctx": (args.ctx, int),
        "parallel": (args.parallel, int),
        "checkpoint_bytes": (args.kept_states, int),
        "overrides": (args.override, tuple),
        "cpu_threads": (args.threads, int),
        "n_batch": (args.batch, int),
        "control_vectors": (args.control_vector, lambda v: tuple(map(_control_vector, v))),
        "control_layers": (args.control_layers, _layers),
        "groups": (args.groups, tuple),
        "n_cpu_blocks": (args.n_cpu_blocks, int),
        "n_cpu_moe": (args.n_cpu_moe, int),
        "kv_on_host": (args.kv_on_host, bool),
        "fast_prompts": (args.fast_prompts, bool),
        "draft": (args.draft, str),
        "draft_max": (args.draft_max, int),
        "draft_vocab": (args.draft_vocab, int),
        "mmproj": (args.mmproj, str),
        "mmproj_device": (args.mmproj_device, str),
        "reserve": (args.reserve, tuple),
        "p2p": (args.p2p, str),
        "rope_scaling": (args.rope_scaling, str),
        "chat_template": (args.chat_template, lambda text: text_or_file(text, "chat template")),
        "rope_factor": (args.rope_scale, float),
        "rope_base": (args.rope_freq_base, float),
    }
    return {name: parse(value) for name, (value, parse) in read.items() if value is not None}


def sampling_params(args: argparse.Namespace, max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of the sampling options.

    Raises:
        EngineError: the value of an option is invalid.
    """
    lists: dict[str, Any] = {
        "dry_breakers": args.dry_sequence_breaker and tuple(args.dry_sequence_breaker),
        "samplers": args.samplers,
    }
    form: dict[str, Any] = given_form(args)
    return SamplingParams(
        max_tokens=max_tokens,
        stop=tuple(args.stop),
        banned_strings=tuple(args.ban),
        ignore_eos=args.ignore_eos,
        on_overflow=args.on_overflow,
        mirostat=args.mirostat,
        logit_bias=tuple(args.logit_bias),
        **{name: getattr(args, name) for name in SAMPLING_OPTIONS},
        **{name: given for name, given in lists.items() if given is not None},
        **form,
    )


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


def token_bias(text: str) -> tuple[int, float]:
    """Return the token id and the number in "42=-inf".

    Raises:
        EngineError: it has another form.
    """
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise EngineError(
            f"The bias '{text}' is not ID=NUMBER.", "For example --logit-bias 42=-inf."
        ) from None


def sampler_names(text: str) -> tuple[str, ...]:
    """Return the names in "top_k,temperature"."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


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
