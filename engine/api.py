"""The engine as a synchronous Python library: load a model, query it, free it.

model = load_model("model.gguf", devices=["cpu", "cpu"], split=[3, 1])
for event in model.generate("Once upon a time", SamplingParams(max_tokens=64)):
    ...
model.close()
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import engine.hardware.environment  # noqa: F401 before torch, which reads it
from engine import arguments
from engine.errors import EngineError, Sentence
from engine.formats.gguf.reader import GGUFFile, check_unchanged, model_hash
from engine.generation.answers import Answers
from engine.generation.benchmark import Benchmark, BenchResult, BenchTest
from engine.generation.draft_model import DraftModel
from engine.generation.drafts import Drafts, MTPSource, draft_sources, draft_variants
from engine.generation.image_prompts import ImageReader
from engine.generation.prompts import Prompts
from engine.generation.queries import Queries
from engine.generation.requests import AnswerRequest
from engine.generation.scheduler import Scheduler
from engine.generation.sequence import TokenSequence
from engine.generation.solo_sequence import solo_sequence
from engine.generation.state_file import SavedStates
from engine.generation.stream import COMPUTING, AnswerStream, Occupancy
from engine.hardware.devices.host import usable_cores
from engine.hardware.fallbacks import Fallback
from engine.hardware.faults import has_stopped
from engine.load_params import LoadParams
from engine.model.architectures.description import ModelInfo
from engine.model.architectures.info import describe
from engine.model.forward.batch import MAX_AT_ONCE
from engine.model.layers.mtp import draft_tokens
from engine.planning.draft import draft_model_path, mtp_path, with_mtp_file
from engine.planning.memory import DeviceMemory
from engine.planning.plan import Plan
from engine.runtime.image_encoder import ImageEncoder
from engine.runtime.thread_runtime import open_runtime
from engine.sampling_params import SamplingParams
from engine.text.vocabulary import check_vocabulary
from engine.util.progress import IsCancelled, ProgressSink, ignore, never
from engine.vision.encoders.base import TextModel
from engine.vision.images.placed import VisionInfo

if TYPE_CHECKING:
    from engine.runtime.thread_runtime import ThreadRuntime


RESPLITTING = Sentence("it is being re-split")


class ImageSupport:
    """Vision encoder of a loaded model, if an mmproj file was loaded with it.

    Args:
        params: load settings.
        runtime: the model's ranks.
        prompts: builder of the model's prompts, which is given an image reader.
        scheduler: scheduler of the model's answers, which is given the encoder.
        is_cancelled: polled; returning True stops the load.

    Attributes:
        encoder: the encoder; None if the model cannot see.
        warnings: sentences to show the user.

    Raises:
        EngineError: the file does not fit the model, the device is full, or the load was cancelled.
    """

    def __init__(
        self, params: LoadParams, runtime: ThreadRuntime, prompts: Prompts, scheduler: Scheduler,
        is_cancelled: IsCancelled,
    ) -> None:  # fmt: skip
        self._prompts, self._scheduler = prompts, scheduler
        self._n_threads = params.cpu_threads or usable_cores()
        self.encoder: ImageEncoder | None = None
        self.warnings: tuple[str, ...] = ()
        if runtime.left_pictures:
            text = "There is no memory left for images, so the model reads text only."
            self.warnings = (Sentence(text),)
        try:
            self._open(runtime, is_cancelled)
        except EngineError as error:
            if params.mmproj != "auto" or is_cancelled():
                raise
            text = "The model reads text only: {problem}"
            self.warnings = (Sentence(text, problem=error.message),)

    def _open(self, runtime: ThreadRuntime, is_cancelled: IsCancelled) -> None:
        self.encoder = self._prompts.image_reader = self._scheduler.runner.encoder = None
        device = runtime.plan.pictures_device
        if not device:
            return
        text = TextModel.of(runtime.hp)
        encoder = ImageEncoder(runtime.mmproj, device, text, is_cancelled, self._n_threads)
        rule = encoder.rule
        n_least = rule.most_tokens + MAX_AT_ONCE
        if rule.is_two_way and runtime.n_batch < n_least:
            raise EngineError(
                "This model needs batches of at least {n} tokens to read images; the batch size is"
                " {other}.",
                "Load it with a larger batch size, or without images.",
                n=n_least,
                other=runtime.n_batch,
            )
        self.encoder = encoder
        self._prompts.image_reader = ImageReader(VisionInfo(runtime.mmproj, rule), encoder.hash)
        self._scheduler.runner.encoder = encoder
        runtime.note_beside("pictures", encoder.n_bytes)

    def make_way(self, runtime: ThreadRuntime, params: LoadParams) -> None:
        """Free the encoder before a re-split that moves it to another device."""
        if self.encoder is not None and self.encoder.device not in params.picture_devices:
            self.encoder = self._scheduler.runner.encoder = None
            runtime.note_beside("pictures", 0)

    def attach(self, runtime: ThreadRuntime) -> None:
        """Continue after a re-split for which `make_way` was called.

        If this fails, the model falls back to text only.
        """
        if not runtime.ranks:  # closed by a failed re-split
            return
        if self.encoder is not None:
            runtime.note_beside("pictures", self.encoder.n_bytes)
            return
        try:
            self._open(runtime, lambda: False)
        except EngineError as error:
            runtime.fallbacks.report("pictures", [runtime.plan.pictures_device], str(error))


def load_model(
    path: str | Path, devices: Sequence[str] | str = ("cpu",), split: Sequence[float] | None = None,
    *,
    on_progress: ProgressSink = ignore,
    is_cancelled: IsCancelled = never,
    **options: Any,
) -> Model:  # fmt: skip
    """Load a model over one or several ranks.

    Args:
        path: path of a GGUF file, or of any part of a split one.
        devices: device of each rank ("cpu", "cuda:0", …); a repeated one is a virtual device.
        split: relative share of each rank, for example [3, 1]; None for equal shares.
        on_progress: called with the load's progress.
        is_cancelled: polled; returning True stops the load.
        options: further fields of `LoadParams`. `overrides` are (pattern, device) pairs,
            `control_vectors` are (GGUF, factor) pairs, and `reserve` is bytes by device.

    Raises:
        EngineError: the file, the split or a device cannot be used, or the load was cancelled.
    """
    params = arguments.params_of(path, {"devices": devices, "split": split, **options})
    return Model(params, on_progress, is_cancelled)


class Model(Queries, SavedStates):
    """A loaded model.

    It is thread-safe. Answers are batched: reading the next event computes a pass for all answers
    that are being read, so several threads may each read an answer, or one thread several in turn.
    An answer that is not read pauses after a few events, and one whose iterator is closed or
    dropped frees its memory with the next pass. If the cache has no room for all answers, the
    newest ones wait or are recomputed later, with the same events.

    Everything else runs between two passes, one call after the other, while answers pause. `close`
    does not wait for answers: it frees the model, and their readers get an EngineError. A callback
    that calls the model during a call gets a `ModelBusy`; only `close` works there, and frees the
    model at the end of the outer call. An answer's `is_cancelled` may be called on any thread that
    reads an answer.

    Attributes:
        info: description of the model from the file's header.
        model_hash: hash of the file's contents, independent of its name; see `gguf.identity`.
        n_ctx: context size in tokens.
        params: current load settings, including the split.
        runtime: the model's ranks, for tests and tools.
        scheduler: scheduler of the answers, for tests and tools.
    """

    def __init__(
        self,
        params: LoadParams,
        on_progress: ProgressSink = ignore,
        is_cancelled: IsCancelled = never,
    ) -> None:
        self.params = params
        with GGUFFile.open(params.path) as file:
            self.info: ModelInfo = describe(file)
            self.model_hash = model_hash(file)
            if path := draft_model_path(params):
                with GGUFFile.open(path) as draft:
                    check_vocabulary(draft, file)
            self._prompts = Prompts(file, self.info.name, params.chat_template)
            self._mtp_path = mtp_path(file, params)
            with with_mtp_file(file, self._mtp_path) as whole:
                self._stamps = whole.stamps
                self.runtime = open_runtime(whole, params, on_progress, is_cancelled)
                ids = draft_tokens(whole, self.runtime.hp.n_vocab) if self.runtime.hp.n_mtp else ()
        self.n_ctx = self.runtime.n_ctx
        self._draft: DraftModel[TokenSequence] | None = None
        self._mtp = MTPSource(self.runtime.runner, ids)
        self.scheduler = Scheduler(self.runtime.runner, self.runtime.plan.checkpoint_bytes)
        try:
            self._open_draft(is_cancelled)
            self._images = ImageSupport(
                params, self.runtime, self._prompts, self.scheduler, is_cancelled
            )
        except BaseException:
            self._close()
            raise
        is_marked = not self.runtime.runner.can_rewind
        self._answers = Answers(self._prompts, self.n_ctx, is_marked=is_marked)
        self._occupancy = Occupancy()

    def _open_draft(self, is_cancelled: IsCancelled = never) -> None:
        """Load the draft model, if any, and set up all drafters."""
        self._draft = None
        if draft_model_path(self.params):
            self._draft = DraftModel(self.params, self.runtime, is_cancelled)
        sources = draft_sources(self.params, self._mtp)
        if self._draft is not None:
            sources.append(self._draft.source)
        self.scheduler.drafts = Drafts(self.params.n_draft, sources)

    def draft_variants(self) -> Mapping[str, Drafts]:
        """Return the drafts for each drafter that the loaded model supports, to compare them."""
        return draft_variants(self.params, self._mtp, self._draft.source if self._draft else None)

    @contextmanager
    def _draft_kept(self, params: LoadParams) -> Iterator[None]:
        """Keep the draft model during a re-split, or reload it afterwards on another device."""
        draft = self._draft
        is_moved = draft is not None and draft.device != params.draft_device
        if draft is not None and is_moved:
            draft.close()
            self.runtime.note_beside("draft", 0)
        try:
            yield
        finally:
            if not self.is_loaded:
                self._close_draft()
            elif draft is not None and not is_moved:
                draft.attach(self.runtime)
            elif draft is not None:
                try:
                    self._open_draft()
                except EngineError as error:
                    self.runtime.fallbacks.report("draft", [self.params.draft_device], str(error))

    def _close_draft(self) -> None:
        if self._draft is not None:
            self._draft.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def plan(self) -> Plan:
        """Plan of the split, including predicted memory use."""
        return self.runtime.plan

    @property
    def n_threads(self) -> int:
        """Total number of CPU threads over all ranks."""
        return self.runtime.n_threads

    @property
    def warnings(self) -> tuple[str, ...]:
        """Current sentences about the split, the file and slow GPUs, to show the user."""
        return self.other_warnings + tuple(fallback.sentence for fallback in self.fallbacks)

    @property
    def other_warnings(self) -> tuple[str, ...]:
        """The `warnings` that are not about `fallbacks`."""
        return self.plan.warnings + self._prompts.warnings + self._images.warnings

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Current fallbacks that make the GPUs slower; they may change at any token."""
        return self.runtime.fallbacks.current

    def bench(
        self, test: BenchTest, repetitions: int = 5, *, warm_up: bool = True,
        kernels: bool = False, is_cancelled: IsCancelled = never,
    ) -> BenchResult:  # fmt: skip
        """Measure the speed of prefill and decode, while answers pause.

        Args:
            test: numbers of tokens to measure.
            repetitions: number of times to run the test.
            warm_up: whether to run the test once beforehand with few tokens.
            kernels: whether to also record GPU kernels, for a few more tokens.
            is_cancelled: polled; returning True stops the test.

        Raises:
            EngineError: the context is too short, a device failed, or the test was cancelled.
        """
        doing = Sentence("its speed is being measured")
        with (
            self._occupancy.use(doing, is_cancelled) as is_cancelled,
            solo_sequence(self.scheduler, self.runtime.runner) as sequence,
        ):
            bench = Benchmark(sequence, self.runtime, is_cancelled)
            return bench.run(test, repetitions, warm_up=warm_up, has_kernels=kernels)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 frozen
        is_cancelled: IsCancelled = never,
        *,
        timed_every: int = 0,
    ) -> AnswerStream:
        """Continue a text, in which special tokens are recognised, or token ids.

        Args:
            prompt: text or token ids to continue.
            params: settings for sampling and for ending the answer.
            is_cancelled: polled; returning True ends the answer.
            timed_every: interval, in tokens, between `TokenTimes` events; 0 for none.

        Returns:
            Iterator over PrefillProgress, TokenText, ContextShifted, and one Finished at the end.
            Reading an event computes it, and raises an EngineError if the prompt cannot be used, a
            device fails, or the model is closed.
        """
        steps = self._answers.plain(prompt, params, timed_every)
        return AnswerStream(self._occupancy, self.scheduler, steps, is_cancelled)

    def answer(
        self, request: AnswerRequest, is_cancelled: IsCancelled = never,
        wake: threading.Event | None = None,
    ) -> AnswerStream:  # fmt: skip
        """Return the events of the answer to an `AnswerRequest` command; see `generate`.

        Args:
            wake: event that is set when the answer can continue after background work.
        """
        steps = self._answers.to(request)
        return AnswerStream(self._occupancy, self.scheduler, steps, is_cancelled, wake)

    def step(self) -> None:
        """Compute a pass for all answers that are being read.

        Reading an answer already does this; `step` is for a thread that collects the events of
        several answers as they come; see `AnswerStream.ready`.

        Raises:
            EngineError: the model has been closed.
        """
        with self._occupancy.use(COMPUTING):
            self.scheduler.step()

    def resplit(
        self, split: Sequence[float] | None, *, devices: Sequence[str] | str | None = None,
        split_mode: str | None = None, overrides: Sequence[tuple[str, str]] | None = None,
        on_progress: ProgressSink = ignore, is_cancelled: IsCancelled = never,
    ) -> None:  # fmt: skip
        """Re-split the loaded model; the cache keeps its tokens, and answers continue.

        The cached values stay bit-identical. Later tokens are computed with the new split, which
        rounds sums differently, so an answer may change if two tokens are about equally likely.

        Args:
            split: relative share of each rank; None for equal shares.
            devices, split_mode, overrides: see `load_model`; None leaves them as they are.
            on_progress: called with the load's progress.
            is_cancelled: polled; returning True keeps the old split.

        Raises:
            EngineError: see `split_as`.
        """
        params = arguments.split_otherwise(self.params, split, devices, split_mode, overrides)
        self.split_as(params, on_progress, is_cancelled)

    def split_as(
        self,
        params: LoadParams,
        on_progress: ProgressSink = ignore,
        is_cancelled: IsCancelled = never,
    ) -> None:
        """Re-split the loaded model as in `params`; file, context, KV type and steering stay.

        A device never stores more weights, keys and values than the larger of its amounts before
        and after, plus those of one block. If it fails, the old split stays; if even that is
        impossible because the file can no longer be read, the model is closed.

        Raises:
            EngineError: the split is impossible, a device is full, the file is gone or has changed,
                or the re-split was cancelled.
        """
        with self._occupancy.use(RESPLITTING, is_cancelled) as is_cancelled:
            self.runtime.runner.check_loaded()
            arguments.check_kept(self.params, params)
            with GGUFFile.open(params.path) as file, with_mtp_file(file, self._mtp_path) as whole:
                check_unchanged(whole, self._stamps)
                on_progress = self._occupancy.called_back(on_progress)
                self._images.make_way(self.runtime, params)
                try:
                    with self.scheduler.emptied() as cache, self._draft_kept(params):
                        runtime = open_runtime(
                            whole,
                            params,
                            on_progress,
                            is_cancelled,
                            self.runtime,
                            cache.known_ranges,
                        )
                        self.scheduler.move(runtime.runner)
                        self._mtp.move(runtime.runner)
                        self.runtime, self.params = runtime, params
                finally:
                    self._images.attach(self.runtime)

    @property
    def n_cached(self) -> int:
        """Number of cached tokens in the sequence that was computed last."""
        with self._occupancy.use(Sentence("its tokens are being counted")):
            self.scheduler.settle()
            return len(self.scheduler.last)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is still loaded; False once it is closed."""
        return bool(self.runtime.ranks)

    @property
    def has_stopped(self) -> bool:
        """Whether one of the model's GPUs has stopped working, so that it can no longer answer."""
        return has_stopped(self.runtime.devices)

    def memory(self) -> list[DeviceMemory]:
        """Return each rank's predicted and measured memory use."""
        with self._occupancy.use(Sentence("its memory is being measured")):
            self.runtime.runner.check_loaded()
            return self.runtime.memory()

    def close(self) -> None:
        """Cancel all computation, free all memory and stop the rank threads; safe to call twice."""
        self._occupancy.close(self._close)

    def _close(self) -> None:
        self.runtime.close()
        self._close_draft()
