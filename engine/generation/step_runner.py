"""Plan and execution of one step: a forward pass, or a token sampled on the device.

If an image's tokens attend to each other (`ImageProcessor.is_two_way`), prompts and cache hits are
never cut inside the image. If they have rows and columns instead of positions (M-RoPE), a token's
position is its index plus `Piece.shift`, which depends on earlier images; caches and masks use the
index. Features wider than the residual stream are added after the first blocks (`Context.deepen`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from engine.generation.sequence import Decode
from engine.model.forward.batch import Batch, PictureRows, Piece, Places
from engine.runtime.timeline import timed
from engine.vision.images.placed import FIRST_ID

if TYPE_CHECKING:
    from engine.decoding.sampling.sampler import Logits, SamplingRequest
    from engine.generation.sequence import TokenSequence
    from engine.runtime.image_encoder import ImageEncoder
    from engine.runtime.model_runner import ModelRunner
    from engine.runtime.timeline import TokenTimes

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class StepPlan:
    """Plan of one step, with pages already reserved; created by `Scheduler.schedule`.

    Attributes:
        prefill: sequence whose prompt is being computed, if any.
        n_prefill: number of tokens in this step's piece of the prompt.
        is_last_piece: whether the piece ends the prompt, so that the next token is sampled.
        decodes: sequences whose next token to compute, after the prompt's rows.
        drafts: draft tokens to verify after these tokens; none with a prompt.
        n_ahead: number of tokens that the device may sample ahead for the only sequence
            (`AsyncDecode`); 0 for a forward pass.
        begun: `time.perf_counter()` at the start, minus the time that stopping a device took.
        made_s: `Drafts.made_s` at the start.
    """

    prefill: TokenSequence | None = None
    n_prefill: int = 0
    is_last_piece: bool = False
    decodes: Sequence[TokenSequence] = ()
    drafts: Mapping[TokenSequence, Sequence[int]] = field(default_factory=dict)
    n_ahead: int = 0
    begun: float = 0.0
    made_s: float = 0.0

    @property
    def sequences(self) -> list[TokenSequence]:
        """All sequences, in the order of the rows."""
        return [self.prefill, *self.decodes] if self.prefill else list(self.decodes)

    @property
    def sampled(self) -> list[TokenSequence]:
        """The sequences for which to sample a next token, in the order of the rows."""
        return self.sequences if self.is_last_piece else list(self.decodes)

    @property
    def n_rows(self) -> int:
        """Number of tokens to compute."""
        return self.n_prefill + len(self.decodes) + sum(map(len, self.drafts.values()))

    def rows(self) -> tuple[list[int], tuple[Piece, ...]]:
        """Return the tokens of the pass and their positions."""
        ids, pieces = list[int](), list[Piece]()
        for sequence in self.sequences:
            cache, drafts = sequence.cache, self.drafts.get(sequence, ())
            assert cache is not None
            n = self.n_prefill if sequence is self.prefill else 1
            at, tables, shift = cache.n, cache.tables, sequence.images.shift(cache.n)
            state = cache.state_slot
            slots = [state, state, *(cache.draft_slots or [state] * len(drafts))]
            for i, (source, goal) in enumerate(pairwise(slots)):
                n_row = 1 if i else n
                pieces.append(Piece(at + i, n_row, tables, goal, cache.batch_index, source, shift))
            ids += [*sequence.tokens[at : at + n], *drafts]
        return ids, tuple(pieces)

    def sampling_requests(self) -> list[SamplingRequest | None]:
        """Return the sampling request for each row with logits.

        It is None for rows whose logits are needed, such as all rows of a sequence with drafts.
        """
        requests: list[SamplingRequest | None] = []
        for sequence in self.sampled:
            step, drafts = sequence.step, self.drafts.get(sequence, ())
            if isinstance(step, Decode) and not drafts:
                requests.append(step.sampling_request)
            else:
                requests += [None] * (1 + len(drafts))
        return requests


@dataclass(slots=True)
class StepOutput:
    """Results of a step.

    Attributes:
        results: for each row with logits, the token or the logits (n_vocab,) to sample it from.
        times: times of the token, if requested.
        seconds: duration of the pass.
        is_lost: whether the device has lost the results, so that the states are undefined.
        error: error in the prompt that prevented the pass.
    """

    results: Sequence[int | Logits] = ()
    times: TokenTimes | None = None
    seconds: float = 0.0
    is_lost: bool = False
    error: Exception | None = None


class AsyncDecode:
    """Sampling of one sequence's tokens on a device, ahead of their reader (run-ahead).

    If a device has computed tokens past the end of the answer and recurrent states cannot go back,
    these tokens become part of the sequence: usually it is the token that ended the answer, with
    which the next turn begins.

    Attributes:
        sequence: the sequence, if any.
        sampled_at: `time.perf_counter()` when its last token was read, from which the next one is
            timed; None if the device did not sample that token.
    """

    def __init__(self, runtime: ModelRunner) -> None:
        self.runtime = runtime
        self.sequence: TokenSequence | None = None
        self.sampled_at: float | None = None
        self._lost: Decode | None = None  # step at which the device failed, left to the host

    @property
    def is_beyond(self) -> bool:
        """Whether states already include the sequence's last token and cannot go back."""
        source = self.runtime.token_source
        return self.sequence is not None and source is not None and source.is_beyond

    def can_serve(self, step: Decode) -> bool:
        """Return whether a device can compute a step and sample the next token."""
        source = self.runtime.token_source
        is_open = not step.wants_logits and step.allowed is None
        if source is None or not is_open or step is self._lost:
            return False
        return source.serve(step.sampler, step.never)

    def decode(self, sequence: TokenSequence, n_left: int) -> int | Logits | None:
        """Compute a token on the device and sample the next one; see `TokenSource.next`.

        Args:
            n_left: number of tokens for which there are pages.
        """
        source, step, cache = self.runtime.token_source, sequence.step, sequence.cache
        assert source is not None, "it can serve"
        assert isinstance(step, Decode)
        assert cache is not None
        self.sequence = sequence
        piece = cache.piece(1, shift=sequence.images.shift(cache.n))
        result = source.next(step.token, piece, n_left)
        self.sampled_at = time.perf_counter() if isinstance(result, int) else None
        if result is None:
            sequence.is_ahead, self._lost = True, step
        return result

    def stop(self, sequence: TokenSequence | None = None) -> None:
        """Stop sampling for this sequence, or for any if None; note irreversible tokens."""
        served, source = self.sequence, self.runtime.token_source
        if served is None or sequence not in (None, served):
            return
        self.sequence = self.sampled_at = None
        beyond = source.stop() if source is not None else ()
        if beyond:
            served.note_ahead(beyond)


class StepRunner:
    """Executor of a scheduler's plans on a runtime.

    Attributes:
        encoder: vision encoder; None if the model has none.
        async_decode: sampling ahead on a device.
    """

    def __init__(self, runtime: ModelRunner) -> None:
        self._runtime = runtime
        self.async_decode = AsyncDecode(runtime)
        self.encoder: ImageEncoder | None = None

    def move(self, runtime: ModelRunner) -> None:
        """Continue on another runtime."""
        self._runtime = self.async_decode.runtime = runtime

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute a step, after encoding the images of its prompt.

        Raises:
            EngineError: see `ModelRunner.forward`.
        """
        if plan.n_ahead:
            (sequence,) = plan.decodes
            ahead = self.async_decode
            token, times = self._timed(plan, lambda: ahead.decode(sequence, plan.n_ahead))
            return StepOutput(is_lost=True) if token is None else StepOutput([token], times)
        try:
            ids, batch = self.batch(plan)
        except Exception as error:  # noqa: BLE001 other answers continue
            return StepOutput(error=error)
        requests = plan.sampling_requests()
        begun = time.perf_counter()
        found, times = self._timed(plan, lambda: self._runtime.sample(ids, batch, requests))
        return StepOutput(found, times, time.perf_counter() - begun)

    def batch(self, plan: StepPlan) -> tuple[Sequence[int], Batch]:
        """Return a pass's tokens and their description.

        Raises:
            EngineError: an image of the prompt cannot be encoded.
            Cancelled: the prompt's request was cancelled.
        """
        ids, pieces = plan.rows()
        images, places = self._image_rows(plan), Places()
        if images and plan.prefill:
            ids = [token if token < FIRST_ID else 0 for token in ids]  # any token of the model
            places = plan.prefill.images.places(pieces[0].n_past, plan.n_prefill)
        return ids, Batch(pieces, plan.n_prefill - plan.is_last_piece, False, images, places)

    def _image_rows(self, plan: StepPlan) -> tuple[PictureRows, ...]:
        sequence = plan.prefill
        if sequence is None or not sequence.images:
            return ()
        assert sequence.cache is not None
        at, found = sequence.cache.n, list[PictureRows]()
        end = at + plan.n_prefill
        for start, image in sequence.images.among(at, end):
            assert self.encoder is not None, "only models with an encoder get images"
            first, stop = max(at, start), min(end, start + image.n)
            features = self.encoder.encode(image, sequence.is_cancelled)
            rule = image.rule
            whole = (start, stop) if rule.is_two_way else None
            rows = features[first - start : stop - start]
            found.append(PictureRows(first - at, rows, whole, rule.only_in_windows))
        return tuple(found)

    def n_with_one_new_image(self, sequence: TokenSequence, n: int) -> int:
        """Limit the next n tokens of a prompt to one image, or tile, that is not encoded yet.

        Other answers then wait for only one encoding.
        """
        assert sequence.cache is not None
        at, encoder = sequence.cache.n, self.encoder
        new = [
            placed.start
            for placed in sequence.images.among(at, at + n)
            if encoder is not None and not encoder.has(placed.image)
        ]
        return n if len(new) < 2 else new[1] - at

    def _timed(self, plan: StepPlan, compute: Callable[[], T]) -> tuple[T, TokenTimes | None]:
        for sequence in plan.sampled:
            if isinstance(sequence.step, Decode) and sequence.step.is_timed:
                assert sequence.cache is not None
                sampled_at = self.async_decode.sampled_at
                return timed(self._runtime.ranks, sequence.cache.n, compute, sampled_at)
        return compute(), None
