"""The engine as a synchronous Python library: load a model, ask it, free it.

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
from engine.errors import EngineError
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
from engine.generation.stream import AnswerStream, Occupancy
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


class ImageSupport:
    """Encoder of images of a loaded model, if an mmproj file is loaded with it.

    Args:
        params: settings of the load.
        runtime: ranks of the model.
        prompts: writer of the model's prompts, which reads images from now on.
        scheduler: scheduler of the model's answers, which has images encoded from now on.
        is_cancelled: asked again and again; returning True ends the loading.

    Attributes:
        encoder: the encoder; None where the model cannot see.
        warnings: sentences for a person.

    Raises:
        EngineError: the file cannot be used with the model, the device is full, or it was
            cancelled.
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
            self.warnings = ("There is no memory left for pictures, so the model reads text only.",)
        try:
            self._open(runtime, is_cancelled)
        except EngineError as error:
            if params.mmproj != "auto" or is_cancelled():
                raise
            self.warnings = (f"The model reads text only: {error.message}",)

    def _open(self, runtime: ThreadRuntime, is_cancelled: IsCancelled) -> None:
        self.encoder = self._prompts.pictures = self._scheduler.runner.encoder = None
        device = runtime.plan.pictures_device
        if not device:
            return
        text = TextModel.of(runtime.hp)
        encoder = ImageEncoder(runtime.mmproj, device, text, is_cancelled, self._n_threads)
        rule = encoder.rule
        n_least = rule.most_tokens + MAX_AT_ONCE
        if rule.is_two_way and runtime.n_batch < n_least:
            raise EngineError(
                f"Pictures of this model need batches of at least {n_least} tokens; they have"
                f" {runtime.n_batch}.",
                "Load it with larger batches of prompts, or without pictures.",
            )
        self.encoder = encoder
        self._prompts.pictures = ImageReader(VisionInfo(runtime.mmproj, rule), encoder.hash)
        self._scheduler.runner.encoder = encoder
        runtime.note_beside("pictures", encoder.n_bytes)

    def make_way(self, runtime: ThreadRuntime, params: LoadParams) -> None:
        """Free the encoder before a re-split behind which it lies on another device."""
        if self.encoder is not None and self.encoder.device not in params.picture_devices:
            self.encoder = self._scheduler.runner.encoder = None
            runtime.note_beside("pictures", 0)

    def attach(self, runtime: ThreadRuntime) -> None:
        """Go on beside a model that was split anew; `make_way` came before.

        A failure is a fallback of the model, which goes on without images.
        """
        if not runtime.ranks:  # a failed re-split has closed it
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
        split: relative share of each rank, such as [3, 1]; None is even.
        on_progress: receiver of the loading's progress.
        is_cancelled: asked again and again; returning True ends the loading.
        options: further fields of `LoadParams`. `overrides` are pairs of a pattern and a device;
            `control_vectors` pairs of a GGUF and a factor; `reserve` is bytes by device.

    Raises:
        EngineError: the file, the split or a device cannot be used, or it was cancelled.
    """
    params = arguments.params_of(path, {"devices": devices, "split": split, **options})
    return Model(params, on_progress, is_cancelled)


class Model(Queries, SavedStates):
    """A loaded model.

    Any thread may call it. Answers are computed side by side: whoever reads an event of one that is
    not there yet computes a pass for all that are read, so several threads may read an answer each,
    and one thread several in turn. One that nobody reads is computed a few events further, and one
    whose iterator is closed or dropped frees its memory with the next pass. Where the cache has no
    room for all, those that came last wait, or are computed again later; their events are the same.

    Everything else is done between two passes, one call after the other, and answers go on behind
    it. `close` does not wait for answers: it frees the model, and who reads on gets an EngineError.
    A callback that calls the model in the middle of a call gets a `ModelBusy`; only `close` works
    there, and frees the model at the end of that call. `is_cancelled` of an answer may be asked on
    any thread that reads one.

    Attributes:
        info: description of the model from the file's header.
        model_hash: hash of the file's contents, whatever its name; see `gguf.identity`.
        n_ctx: context in tokens.
        params: settings with which the model is loaded and split now.
        runtime: ranks of the model; tests and tools look inside.
        scheduler: what decides who of the answers is computed; tests and tools look inside.
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
            self._pictures = ImageSupport(
                params, self.runtime, self._prompts, self.scheduler, is_cancelled
            )
        except BaseException:
            self._close()
            raise
        is_marked = not self.runtime.runner.can_rewind
        self._answers = Answers(self._prompts, self.n_ctx, is_marked=is_marked)
        self._occupancy = Occupancy()

    def _open_draft(self, is_cancelled: IsCancelled = never) -> None:
        """Load the draft model, if there is to be one, and use all sources of drafts.

        Raises:
            EngineError: it cannot be loaded, or it was cancelled.
        """
        self._draft = None
        if draft_model_path(self.params):
            self._draft = DraftModel(self.params, self.runtime, is_cancelled)
        sources = draft_sources(self.params, self._mtp)
        if self._draft is not None:
            sources.append(self._draft.source)
        self.scheduler.drafts = Drafts(self.params.n_draft, sources)

    def draft_variants(self) -> Mapping[str, Drafts]:
        """Return the drafts of each kind that the model allows as it is loaded, to compare."""
        return draft_variants(self.params, self._mtp, self._draft.source if self._draft else None)

    @contextmanager
    def _draft_beside(self, params: LoadParams) -> Iterator[None]:
        """Keep the draft model beside a re-split, or load it anew behind it on another device."""
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
        """Plan by which the model is split, with the predicted memory."""
        return self.runtime.plan

    @property
    def n_threads(self) -> int:
        """Number of CPU threads of all ranks."""
        return self.runtime.n_threads

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on the split, the file and slow GPUs that a person should see, as of now."""
        return self.other_warnings + tuple(fallback.sentence for fallback in self.fallbacks)

    @property
    def other_warnings(self) -> tuple[str, ...]:
        """Sentences of `warnings` that are not about `fallbacks`."""
        return self.plan.warnings + self._prompts.warnings + self._pictures.warnings

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Reasons why the GPUs are slower than they could be; they may change at any token."""
        return self.runtime.fallbacks.current

    def bench(
        self, test: BenchTest, repetitions: int = 5, *, warm_up: bool = True,
        kernels: bool = False, is_cancelled: IsCancelled = never,
    ) -> BenchResult:  # fmt: skip
        """Measure the speed of prefill and decode, while no answer is computed.

        Args:
            test: numbers of tokens to measure.
            repetitions: number of times that the test is measured.
            warm_up: whether to run the test once before, with few tokens, without counting it.
            kernels: whether to record what runs on GPUs as well, for some further tokens.
            is_cancelled: asked again and again; returning True ends the test.

        Raises:
            EngineError: the context is too short for it, a device failed, or it was cancelled.
        """
        doing = "its speed is being measured"
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
            params: settings of sampling and of the answer's end.
            is_cancelled: asked again and again; returning True ends the answer.
            timed_every: interval, in tokens, at which a token has a TokenTimes; 0 for none.

        Returns:
            Iterator over PrefillProgress, TokenText, ContextShifted, and one Finished at the end.
            It computes while an event is read, and raises an EngineError if the prompt cannot be
            used, a device failed, or the model was closed meanwhile.
        """
        steps = self._answers.plain(prompt, params, timed_every)
        return AnswerStream(self._occupancy, self.scheduler, steps, is_cancelled)

    def answer(
        self, request: AnswerRequest, is_cancelled: IsCancelled = never,
        wake: threading.Event | None = None,
    ) -> AnswerStream:  # fmt: skip
        """Return the events of the answer to an `AnswerRequest` command; see `generate`.

        Args:
            wake: set once the answer can go on after it has waited for other threads.
        """
        steps = self._answers.to(request)
        return AnswerStream(self._occupancy, self.scheduler, steps, is_cancelled, wake)

    def step(self) -> None:
        """Compute a pass for all answers whose events are read.

        Readers do so themselves; this is for one thread that takes the events of several answers as
        they come, see `AnswerStream.ready`.

        Raises:
            EngineError: the model has been closed.
        """
        with self._occupancy.use("it computes an answer"):
            self.scheduler.step()

    def resplit(
        self,
        split: Sequence[float] | None,
        *,
        devices: Sequence[str] | str | None = None,
        split_mode: str | None = None,
        overrides: Sequence[tuple[str, str]] | None = None,
        on_progress: ProgressSink = ignore,
        is_cancelled: IsCancelled = never,
    ) -> None:
        """Split the loaded model anew; the cache keeps its tokens, and answers go on.

        What is cached keeps its bits. What follows is computed by the sums of the new split, which
        are rounded otherwise than those of the old one, so where two tokens are about equally
        likely an answer may go on with another one than it would have.

        Args:
            split: relative share of each rank; None is even.
            devices, split_mode, overrides: see `load_model`; None leaves them as they are.
            on_progress: receiver of the loading's progress.
            is_cancelled: asked again and again; returning True leaves the old split.

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
        """Split the loaded model as `params` say; file, context, KV type and steering stay.

        Meanwhile no device holds more weights, keys and values than before or after, whichever is
        more, and those of one block beside them. If it fails, the model goes on as before; if even
        that is impossible, because the file cannot be read any more, it is closed.

        Raises:
            EngineError: the split cannot be made, a device is full, the file is gone or has
                changed, or it was cancelled.
        """
        with self._occupancy.use("it is being split anew", is_cancelled) as is_cancelled:
            self.runtime.runner.check_loaded()
            arguments.check_kept(self.params, params)
            with GGUFFile.open(params.path) as file, with_mtp_file(file, self._mtp_path) as whole:
                check_unchanged(whole, self._stamps)
                on_progress = self._occupancy.called_back(on_progress)
                self._pictures.make_way(self.runtime, params)
                try:
                    with self.scheduler.emptied() as cache, self._draft_beside(params):
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
                    self._pictures.attach(self.runtime)

    @property
    def n_cached(self) -> int:
        """Number of cached tokens of the sequence that was computed last."""
        with self._occupancy.use("its tokens are being counted"):
            self.scheduler.settle()
            return len(self.scheduler.last)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is still loaded: False once it is closed."""
        return bool(self.runtime.ranks)

    @property
    def has_stopped(self) -> bool:
        """Whether a GPU of the model has stopped working, so that it cannot answer any more."""
        return has_stopped(self.runtime.devices)

    def memory(self) -> list[DeviceMemory]:
        """Return the predicted and the measured memory of each rank."""
        with self._occupancy.use("its memory is being measured"):
            self.runtime.runner.check_loaded()
            return self.runtime.memory()

    def close(self) -> None:
        """Cancel what computes, free all memory and end the rank threads; safe to call twice."""
        self._occupancy.close(self._close)

    def _close(self) -> None:
        self.runtime.close()
        self._close_draft()
