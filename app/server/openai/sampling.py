"""Sampling parameters in OpenAI's protocol."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from app.server.context import MakeCommands
from app.server.refusal import Refusal, bad_value
from app.server.request_fields import body_field, sampling_field
from engine import AnswerRequest, EngineError, ModelInfo, ModelLoaded, SamplingParams

MAX_CHOICES = 16
MAX_STOPS = 64
MAX_BIASED = 4096  # maximum number of tokens with a logit bias
FORBIDDING = -100.0  # logit bias that bans a token, as documented by OpenAI
SEEDS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """A request's sampling fields; those after `n` are Tandem's own."""

    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    max_tokens: int | None = body_field(
        "Maximum number of tokens in the answer.", None, least=-1, most=2**31 - 1
    )
    stop: str | tuple[str, ...] | None = body_field(
        "The answer stops before any of these texts.", None, most=MAX_STOPS
    )
    seed: int | None = body_field(
        "The same seed gives the same answer; -1 chooses a random seed.", None, least=-1,
        most=SEEDS - 1,
    )  # fmt: skip
    logit_bias: Mapping[str, float] | None = body_field(
        "Numbers to add to the tokens' logits, by token id; -100 or less bans a token.", None
    )
    n: int = body_field("Number of answers.", 1, least=1, most=MAX_CHOICES)
    top_k: int | None = sampling_field("top_k")
    min_p: float | None = sampling_field("min_p")
    typical_p: float | None = sampling_field("typical_p")
    repeat_penalty: float | None = sampling_field("repeat_penalty")
    repeat_last_n: int | None = sampling_field("repeat_last_n")
    dry_multiplier: float | None = sampling_field("dry_multiplier")
    dry_base: float | None = sampling_field("dry_base")
    dry_allowed_length: int | None = sampling_field("dry_allowed_length")
    dry_last_n: int | None = sampling_field("dry_last_n")
    dry_breakers: tuple[str, ...] | None = body_field(
        "Texts that end a DRY repetition.", None, most=MAX_STOPS
    )
    top_n_sigma: float | None = sampling_field("top_n_sigma")
    xtc_probability: float | None = sampling_field("xtc_probability")
    xtc_threshold: float | None = sampling_field("xtc_threshold")
    dynatemp_range: float | None = sampling_field("dynatemp_range")
    dynatemp_exponent: float | None = sampling_field("dynatemp_exponent")
    mirostat: bool | None = sampling_field("mirostat")
    mirostat_tau: float | None = sampling_field("mirostat_tau")
    mirostat_eta: float | None = sampling_field("mirostat_eta")
    samplers: tuple[str, ...] | None = body_field("Order of the samplers.", None, most=16)
    banned_strings: tuple[str, ...] | None = body_field(
        "Texts that no answer may contain.", None, most=MAX_STOPS
    )
    ignore_eos: bool | None = sampling_field("ignore_eos")
    on_overflow: Literal["stop", "shift"] | None = sampling_field("on_overflow")
    cache_prompt: bool | None = body_field("Ignored; prompts are always cached.", None)


SAME = tuple(
    spec.name
    for spec in fields(SamplingFields)
    if spec.name in {own.name for own in fields(SamplingParams)}
    and spec.name not in ("stop", "seed", "logit_bias")
)
"""Fields that have the same name and meaning in `SamplingParams`."""


def recommended(given: SamplingParams, info: ModelInfo) -> SamplingParams:
    """Replace default values with those that the model's file recommends."""
    default = SamplingParams()
    changes: dict[str, Any] = {
        name: value
        for name, value in info.sampling
        if getattr(given, name) == getattr(default, name)
    }
    return replace(given, **changes)


def sampling_of(
    request: SamplingFields, defaults: SamplingParams, info: ModelInfo, max_tokens: int | None
) -> list[SamplingParams]:
    """Return the sampling parameters for each answer, with consecutive seeds.

    Args:
        defaults: values used if neither the request nor the model's file sets them.
        max_tokens: maximum tokens per answer; None if the request does not set it.

    Raises:
        Refusal: a value is invalid.
    """
    given: dict[str, Any] = {name: getattr(request, name) for name in SAME}
    given |= {"max_tokens": max_tokens, "stop": _stops(request.stop)}
    given["logit_bias"] = _biases(request.logit_bias, info.n_vocab)
    given = {name: value for name, value in given.items() if value is not None}
    defaults = recommended(defaults, info)
    try:
        params = replace(defaults, **given)
    except EngineError as error:
        raise Refusal(400, error.message, error.hint) from None
    seed = defaults.seed if request.seed is None else request.seed
    if seed is None or seed < 0:
        return [replace(params, seed=None)] * request.n
    return [replace(params, seed=(seed + index) % SEEDS) for index in range(request.n)]


def sampled(
    template: AnswerRequest,
    request: SamplingFields,
    defaults: SamplingParams,
    max_tokens: int | None,
) -> MakeCommands:
    """Return a function that creates commands from a template; see `sampling_of`."""

    def make(loaded: ModelLoaded) -> list[AnswerRequest]:
        all_params = sampling_of(request, defaults, loaded.info, max_tokens)
        return [replace(template, sampling=params) for params in all_params]

    return make


def _stops(stop: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    stops = (stop,) if isinstance(stop, str) else stop
    return tuple(one for one in stops if one)


def _biases(
    biases: Mapping[str, float] | None, n_vocab: int
) -> tuple[tuple[int, float], ...] | None:
    if biases is None:
        return None
    if len(biases) > MAX_BIASED:
        text = "logit_bias has more than {n} tokens."
        raise bad_value("logit_bias", text, n=MAX_BIASED)
    for token in biases:
        if not (token.isascii() and token.isdecimal() and int(token[:20]) < n_vocab):
            text = "logit_bias must have token ids from 0 to {last}, not {token}."
            raise bad_value("logit_bias", text, last=n_vocab - 1, token=token[:40])
    pairs = ((int(token), bias) for token, bias in biases.items())
    return tuple((token, -math.inf if bias <= FORBIDDING else bias) for token, bias in pairs)
