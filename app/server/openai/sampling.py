"""Sampling and the end of answers, as requests of OpenAI's protocol ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from app.server.context import MakeCommands
from app.server.refusal import Refusal, bad_value
from app.server.request_fields import body_field, sampling_field
from engine import AnswerRequest, EngineError, ModelInfo, ModelLoaded, SamplingParams

MAX_CHOICES = 16
"""Largest number of answers to one request."""

MAX_STOPS = 64
"""Largest number of stop strings."""

MAX_BIASED = 4096
"""Largest number of tokens with a bias."""

FORBIDDING = -100.0
"""Bias from which on a token never comes, as OpenAI documents it."""

SEEDS = 1 << 64
"""Number of seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """The fields of a request that become `SamplingParams`; those below `n` are Tandem's own."""

    temperature: float | None = sampling_field("temperature")
    top_p: float | None = sampling_field("top_p")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    presence_penalty: float | None = sampling_field("presence_penalty")
    max_tokens: int | None = body_field(
        "Most tokens of the answer.", None, least=-1, most=2**31 - 1
    )
    stop: str | tuple[str, ...] | None = body_field(
        "The answer ends before any of these texts.", None, most=MAX_STOPS
    )
    seed: int | None = body_field(
        "The same seed gives the same answer again; -1 is a new one.", None, least=-1,
        most=SEEDS - 1,
    )  # fmt: skip
    logit_bias: Mapping[str, float] | None = body_field(
        "Numbers added to the scores of tokens, by token id; -100 or less forbids a token.", None
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
        "DRY ends a repetition before any of these texts.", None, most=MAX_STOPS
    )
    top_n_sigma: float | None = sampling_field("top_n_sigma")
    xtc_probability: float | None = sampling_field("xtc_probability")
    xtc_threshold: float | None = sampling_field("xtc_threshold")
    dynatemp_range: float | None = sampling_field("dynatemp_range")
    dynatemp_exponent: float | None = sampling_field("dynatemp_exponent")
    mirostat: bool | None = sampling_field("mirostat")
    mirostat_tau: float | None = sampling_field("mirostat_tau")
    mirostat_eta: float | None = sampling_field("mirostat_eta")
    samplers: tuple[str, ...] | None = body_field("Order of the steps of sampling.", None, most=16)
    banned_strings: tuple[str, ...] | None = body_field(
        "Texts that no answer contains.", None, most=MAX_STOPS
    )
    ignore_eos: bool | None = sampling_field("ignore_eos")
    on_overflow: Literal["stop", "shift"] | None = sampling_field("on_overflow")
    cache_prompt: bool | None = body_field("Without effect: prompts are always cached.", None)


SAME = tuple(
    spec.name
    for spec in fields(SamplingFields)
    if spec.name in {own.name for own in fields(SamplingParams)}
    and spec.name not in ("stop", "seed", "logit_bias")
)
"""Fields that have the same name and meaning in `SamplingParams`."""


def recommended(given: SamplingParams, info: ModelInfo) -> SamplingParams:
    """Return settings with what a model's file recommends in place of the engine's defaults."""
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
    """Return the settings of each answer to a request, whose seeds follow each other.

    Args:
        defaults: what holds where neither the request nor the model's file says anything.
        info: description of the model.
        max_tokens: most tokens of the answer, as the protocol says; None where it does not.

    Raises:
        Refusal: a value is not possible.
    """
    given: dict[str, Any] = {name: getattr(request, name) for name in SAME}
    given |= {"max_tokens": max_tokens, "stop": _stops(request.stop)}
    given["logit_bias"] = _biases(request.logit_bias, info.n_vocab)
    given = {name: value for name, value in given.items() if value is not None}
    defaults = recommended(defaults, info)
    try:
        params = replace(defaults, **given)
    except EngineError as error:
        raise Refusal(400, str(error), error.hint) from None
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
    """Return what makes the commands of a request: a template with the settings of each answer.

    Args:
        defaults, max_tokens: see `sampling_of`.
    """

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
    """Return pairs of token ids and numbers to add.

    Raises:
        Refusal: a token is not one of the model's.
    """
    if biases is None:
        return None
    if len(biases) > MAX_BIASED:
        raise bad_value("logit_bias", f"logit_bias has more than {MAX_BIASED} tokens.")
    for token in biases:
        if not (token.isascii() and token.isdecimal() and int(token[:20]) < n_vocab):
            shown = f"logit_bias must have ids of tokens from 0 to {n_vocab - 1}, not {token:.40}."
            raise bad_value("logit_bias", shown)
    return tuple((int(token), _bias(bias)) for token, bias in biases.items())


def _bias(bias: float) -> float:
    return float("-inf") if bias <= FORBIDDING else bias
