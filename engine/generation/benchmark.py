"""Benchmark of a loaded model: speeds of prefill and decode, computed as for an answer.

A prompt is computed in batches, with logits for its last token; tokens are computed one by one,
each chosen from the previous one's logits. Tokenizing and sampling are not measured, unless a
device samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import exp, sqrt
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.decoding.sampling.sampler import Sampler, log_sums
from engine.errors import Cancelled, EngineError, PromptError, Sentence, paragraph
from engine.generation.results import Finished
from engine.planning.search.results import DraftTrial, reason_for_drafts
from engine.runtime.timeline import GpuTimes, RankTimes, timed
from engine.sampling_params import SamplingParams
from engine.util.progress import IsCancelled, never

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.generation.drafts import Drafts
    from engine.generation.queries import Queries
    from engine.generation.results import GenerationEvent
    from engine.generation.solo_sequence import SoloSequence
    from engine.planning.search.results import TuneResult
    from engine.runtime.thread_runtime import ThreadRuntime

N_WARM_UP = 4
"""Maximum number of tokens that a warm-up generates."""

N_RECORDED = 8
"""Maximum number of tokens for which GPU kernels are recorded."""

SAMPLING = SamplingParams(seed=0, temperature=1.0)
"""Settings for sampling on a device; random, so that the model does not repeat itself."""


@dataclass(frozen=True, slots=True)
class BenchTest:
    """A test to measure: prefill of `n_prompt` tokens, then decode of `n_gen` tokens.

    `n_depth` tokens are already in the KV cache; computing these is not measured.

    Raises:
        EngineError: a number is negative, or there is nothing to measure.
    """

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0

    def __post_init__(self) -> None:
        if min(self.n_prompt, self.n_gen, self.n_depth) < 0:
            raise EngineError("A benchmark cannot have a negative number of tokens.")
        if not self.n_prompt and not self.n_gen:
            raise EngineError(
                "A benchmark needs tokens to compute.", "Set -p or -n to more than 0."
            )

    def __str__(self) -> str:
        """Return llama-bench's name for the test, such as "pp512 @ d128"."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_ctx(self) -> int:
        """Context size that the test needs, in tokens."""
        return self.n_depth + self.n_prompt + self.n_gen


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of one test.

    Fields after `samples_s` are known only for tests without a prompt.

    Attributes:
        samples_s: seconds per repetition.
        overhead_s: seconds per token outside the kernels on the rank with the most work: Python,
            small torch operations, waiting for other ranks, and choosing the next token. None if a
            rank computes without our kernels.
        ranks: each rank's mean times per token; the rest of a token's time is spent in Python.
        host_s: seconds per token that the host spends outside kernels: on GPUs, launching the
            token; on CPUs, the rest of the token's time on the busiest rank. None if unknown.
        gpu: kernels that ran on GPUs, if requested.
    """

    test: BenchTest
    samples_s: tuple[float, ...]
    overhead_s: float | None = None
    ranks: tuple[RankTimes, ...] = ()
    host_s: float | None = None
    gpu: GpuTimes | None = None

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Speed of each repetition, in tokens per second."""
        return tuple((self.test.n_prompt + self.test.n_gen) / s for s in self.samples_s)

    @property
    def avg_ts(self) -> float:
        """Mean of `samples_ts`."""
        return fmean(self.samples_ts)

    @property
    def overhead(self) -> float | None:
        """`overhead_s` as a fraction of a token's time, 0 to 1."""
        if self.overhead_s is None:
            return None
        return self.overhead_s * self.test.n_gen / median(self.samples_s)

    @property
    def stddev_ts(self) -> float:
        """Sample standard deviation of `samples_ts`; 0 for a single repetition."""
        return stdev(self.samples_ts) if len(self.samples_s) > 1 else 0.0

    @property
    def token_s(self) -> float:
        """Mean seconds per token for a test that only generates."""
        return fmean(self.samples_s) / self.test.n_gen


class _Measured(NamedTuple):
    """Times of one repetition.

    Attributes:
        seconds: total seconds.
        outside_s: how many of these were spent outside kernels; None if kernels are not timed.
        ranks: each rank's times for all generated tokens.
        host_s: seconds that the host was working, if a device samples the tokens.
    """

    seconds: float
    outside_s: float | None
    ranks: tuple[RankTimes, ...]
    host_s: float | None = None


class Benchmark:
    """Benchmark of one model.

    Tokens are random, so that expert routing varies as in real text, but the same in each run.

    Args:
        sequence: sequence to compute.
        is_cancelled: called before each token and each batch of a prompt.
    """

    def __init__(
        self,
        sequence: SoloSequence,
        runtime: ThreadRuntime,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sequence = sequence
        self._runtime = runtime
        self._is_cancelled = is_cancelled

    def run(
        self, test: BenchTest, repetitions: int, *, warm_up: bool, has_kernels: bool = False
    ) -> BenchResult:
        """Measure `test` `repetitions` times; see `Model.bench`.

        Args:
            has_kernels: whether to also record GPU kernels.
        """
        if repetitions < 1:
            raise EngineError("A benchmark needs at least one repetition.")
        if test.n_ctx > self._sequence.n_ctx:
            raise EngineError(
                "{test} needs a context of {n} tokens, but the model has only {n_ctx}.",
                test=str(test),
                n=test.n_ctx,
                n_ctx=self._sequence.n_ctx,
            )
        n_vocab = self._runtime.hp.n_vocab
        ids = np.random.default_rng(0).integers(0, n_vocab, test.n_ctx).tolist()
        if warm_up:
            self._measure(test, ids, min(test.n_gen, N_WARM_UP))
        samples = [self._measure(test, ids, test.n_gen) for _ in range(repetitions)]
        seconds = tuple(sample.seconds for sample in samples)
        if test.n_prompt:
            return BenchResult(test, seconds)
        outside = [sample.outside_s for sample in samples if sample.outside_s is not None]
        overhead_s = median(outside) / test.n_gen if outside else None
        ranks = _means(samples, test.n_gen)
        found = BenchResult(test, seconds, overhead_s, ranks)
        gpu = self._recorded(test, ids) if has_kernels else None
        worked = [sample.host_s for sample in samples if sample.host_s is not None]
        host_s = median(worked) / test.n_gen if worked else self._host_s(test, ids, found)
        return replace(found, host_s=host_s, gpu=gpu)

    @property
    def _has_gpu(self) -> bool:
        return any(device.type == "cuda" for device in self._runtime.devices)

    def _host_s(self, test: BenchTest, ids: list[int], found: BenchResult) -> float | None:
        if self._has_gpu:
            from engine.runtime.measuring.kernel_times import host_s  # only for GPUs

            self._fill(ids[: test.n_depth])
            with self._sequence.scratch() as place:
                return host_s(self._runtime, place)
        if found.overhead_s is None:
            return None
        busiest = max(found.ranks, key=lambda times: times.computed_s)
        return max(0.0, found.token_s - busiest.computed_s - busiest.waited_s)

    def _recorded(self, test: BenchTest, ids: list[int]) -> GpuTimes | None:
        if not self._has_gpu:
            return None
        from engine.runtime.measuring.kernel_times import gpu_times

        self._fill(ids[: test.n_depth])
        recorded = ids[test.n_depth : test.n_depth + min(test.n_gen, N_RECORDED)]
        return gpu_times(lambda: self._generate(recorded), len(recorded))

    def _measure(self, test: BenchTest, ids: list[int], n_gen: int) -> _Measured:
        self._fill(ids[: test.n_depth])
        n_prompt = test.n_depth + test.n_prompt
        before, source = self._runtime.kernel_s(), self._runtime.token_source
        waited_s = source.waited_s if source else 0.0
        begun = time.perf_counter()
        if test.n_prompt:
            self._compute(ids[:n_prompt])
        ranks: tuple[RankTimes, ...] = ()
        if n_gen:
            generated = ids[n_prompt : n_prompt + n_gen]
            _, times = timed(self._runtime.ranks, n_prompt, lambda: self._generate(generated))
            ranks = times.ranks
        seconds = time.perf_counter() - begun
        after = self._runtime.kernel_s()
        if source:
            return _Measured(seconds, None, ranks, seconds - source.waited_s + waited_s)
        if before is None or after is None:
            return _Measured(seconds, None, ranks)
        inside = max(b - a for a, b in zip(before, after, strict=True))
        return _Measured(seconds, seconds - inside, ranks)

    def _fill(self, ids: list[int]) -> None:
        self._sequence.hold(ids)
        if len(self._sequence.ids) < len(ids):
            self._compute(ids)
            self._sequence.keep()

    def _compute(self, ids: list[int]) -> None:
        """Compute the missing tokens of `ids`; with recurrent states, the last one separately."""
        rest = ids[len(self._sequence.ids) :]
        if not self._runtime.can_rewind:
            self._pass(rest[:-1], len(rest))
            rest = rest[-1:]
        self._pass(rest, len(rest) - 1)

    def _pass(self, ids: list[int], first_logit: int) -> None:
        for _ in self._sequence.compute(ids, first_logit, self._check):
            pass

    def _generate(self, ids: list[int]) -> None:
        """Generate a token per entry in `ids`, offset by that entry to avoid repetition."""
        if self._runtime.token_source is not None:
            self._sample_on_device(ids)
            return
        token = ids[0]
        for step in ids:
            self._check()
            (logits,) = self._sequence.compute([token], 0)
            token = (int(logits.argmax()) + step) % logits.shape[1]

    def _sample_on_device(self, ids: list[int]) -> None:
        token, sampler = ids[0], Sampler(SAMPLING)
        for n_left in range(len(ids), 0, -1):
            self._check()
            result = self._sequence.follow(token, sampler, (), n_left)
            token = result if isinstance(result, int) else int(result.argmax())

    def _check(self) -> None:
        if self._is_cancelled():
            raise Cancelled(Sentence("Measuring"))


def _means(samples: Sequence[_Measured], n_gen: int) -> tuple[RankTimes, ...]:
    return tuple(
        RankTimes(
            fmean(times.computed_s for times in of_rank) / n_gen,
            fmean(times.waited_s for times in of_rank) / n_gen,
        )
        for of_rank in zip(*(sample.ranks for sample in samples), strict=True)
    )


log = logging.getLogger(__name__)

ROUNDS = 2
"""Number of answers per drafter and prompt; drafters take turns."""

MIN_TOKENS = 32
"""Minimum number of tokens per answer, as some are needed to choose the number of drafts."""

PROSE = "Once upon a time there was a small village at the edge of a"
CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2
    raise ValueError(f"unknown shape {shape.kind}")
"""
QUOTING = f"Repeat this code exactly:\n```python\n{CODE}```\nHere it is again:\n```python\ndef area"
TEXTS: Mapping[str, tuple[str, float]] = {"prose": (PROSE, 0.8), "quoting": (QUOTING, 0.0)}
"""Prompts by the kind of text that follows, with the temperature for their answers."""


GenerateFunction: TypeAlias = (
    "Callable[[Sequence[int], SamplingParams, IsCancelled], Iterator[GenerationEvent]]"
)
"""See `engine.api.Model.generate`."""


def measure_drafts(
    model: Queries, generate: GenerateFunction, ways: Mapping[str, Drafts], n_tokens: int,
    is_cancelled: IsCancelled = never,
) -> tuple[DraftTrial, ...]:  # fmt: skip
    """Measure answers without drafts first, then with each drafter.

    Args:
        generate: the model's method.
        ways: drafts by kind; see `Model.draft_variants`.
        n_tokens: number of tokens per answer.
        is_cancelled: polled; returning True stops the measurement.

    Returns:
        One trial per drafter; empty if there is nothing to compare.

    Raises:
        Cancelled: it was cancelled.
        EngineError: a device has failed.
    """
    before = model.scheduler.drafts
    if len(ways) < 2:
        return ()
    speeds: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    try:
        for text, (prompt, temperature) in TEXTS.items():
            ids = _ids(model, prompt)
            for turn in range(-1, ROUNDS):  # the first turn compiles and records
                for way, drafts in ways.items():
                    model.scheduler.drafts = drafts
                    n = max(MIN_TOKENS, n_tokens) if turn >= 0 else MIN_TOKENS // 2
                    found = _speed(generate, model.n_ctx, ids, temperature, n, is_cancelled)
                    if turn >= 0 and found:
                        speeds[way].setdefault(text, []).append(found)
    finally:
        model.scheduler.drafts = before
    return tuple(
        DraftTrial(way, *(median(found[text]) for text in TEXTS))
        for way, found in speeds.items()
        if all(found.get(text) for text in TEXTS)
    )


def with_draft_trials(
    result: TuneResult, measure: Callable[[], tuple[DraftTrial, ...]]
) -> TuneResult:
    """Return a search's result, adding draft measurements for its best split if they succeed."""
    begun = time.perf_counter()
    try:
        drafts = measure()
    except Cancelled:
        return replace(result, is_complete=False)
    except EngineError as error:
        log.warning("drafts were not measured: %s", error)
        return result
    reason = paragraph(result.reason, reason_for_drafts(drafts))
    seconds = result.seconds + time.perf_counter() - begun
    return replace(result, drafts=drafts, reason=reason, seconds=seconds)


def _ids(model: Queries, prompt: str) -> Sequence[int]:
    """Return a prompt's tokens, or repetitive made-up ones if there is no vocabulary."""
    with suppress(EngineError):
        return model.tokenize(prompt)
    return [3 + n % 24 for n in range(72)]


def _speed(
    generate: GenerateFunction, n_ctx: int, ids: Sequence[int], temperature: float, n: int,
    is_cancelled: IsCancelled,
) -> float:  # fmt: skip
    n = min(n, n_ctx // 2)
    ids = ids[-(n_ctx - n - 1) :]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=n, ignore_eos=True)
    speed = 0.0
    for event in generate(ids, params, is_cancelled):
        if isinstance(event, Finished):
            speed = event.timings.decode_per_s
    if is_cancelled():
        raise Cancelled(Sentence("The search"))
    return speed


MAX_NLL = 700.0
"""Limit for the mean loss in nats, as the exponential of a larger one overflows F64."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of a text, the usual measure of quantisation loss.

    Attributes:
        nll: mean negative log-likelihood per scored token, in nats.
        error: standard error of `perplexity`, by the delta method.
        n_chunks: number of chunks into which the text was cut.
    """

    nll: float
    perplexity: float
    error: float
    n_scored: int
    n_chunks: int


def perplexity(
    model: Queries,
    ids: Sequence[int],
    on_chunk: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Score `ids` in chunks as long as the model's context.

    As in llama.cpp's tool, the first n / 2 + 1 tokens in a chunk of n are only context and the
    others are scored, and each chunk starts with BOS if the model requires it. A text shorter than
    one chunk is scored from its second token on.

    Args:
        on_chunk: called with the number of finished chunks and the total.

    Raises:
        PromptError: the text or the context has fewer than two tokens.
        EngineError: the model's predictions are not finite.
    """
    if min(len(ids), model.n_ctx) < 2:
        raise PromptError(
            "The text or the context is too short to be scored.", "Give at least two tokens."
        )
    size = min(model.n_ctx, len(ids))
    n_chunks = len(ids) // size
    first = min(size // 2, size - 2) if len(ids) >= model.n_ctx else 0
    bos = model.tokenizer.bos_id if model.tokenizer.add_bos else None
    losses = []
    for index in range(n_chunks):
        chunk = list(ids[index * size : (index + 1) * size])
        targets = np.array(chunk)
        if bos is not None:
            chunk[0] = bos
        losses.append(_losses(model.logits(chunk), targets)[first:])
        on_chunk(index + 1, n_chunks)
    scored = np.concatenate(losses)
    nll = float(scored.mean())
    if not nll < MAX_NLL:  # not `>=`, which is false for NaN
        raise EngineError(
            "{model} has no usable probabilities for this text.",
            "The file may be damaged.",
            model=model.info.name,
        )
    spread = float(scored.std(ddof=1)) / sqrt(len(scored)) if len(scored) > 1 else 0.0
    return Perplexity(nll, exp(nll), exp(nll) * spread, len(scored), n_chunks)


def _losses(logits: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    rows = logits[:-1].astype(np.float64)
    losses: NDArray[np.float64] = log_sums(rows) - rows[np.arange(len(rows)), ids[1:]]
    return losses
