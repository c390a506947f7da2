"""What one step computes, and its execution: a forward pass, or a token sampled on the device.

Where an image's tokens see each other (`ImageProcessor.is_two_way`), prompts and cache hits are
never cut inside it. Where they have rows and columns in place of positions (M-RoPE), a token's
position is its number and `Piece.shift`, which follows from the images before it; caches and masks
go by numbers. Features wider than the residual stream are added behind the first blocks
(`Context.deepen`).
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
    """What one step computes, for which there are pages; `Scheduler.schedule` makes it.

    Attributes:
        prefill: sequence of which a piece of the prompt is computed; None for none.
        n_prefill: number of tokens of that piece.
        is_last_piece: whether it ends the prompt, so that the next token is sampled behind it.
        decodes: sequences of which the next token is computed, behind the prompt's rows.
        drafts: draft tokens to verify behind these tokens; none beside a prompt.
        n_ahead: number of tokens that the device may sample by itself, where it does that for the
            only sequence (`AsyncDecode`); 0 for a forward pass.
        begun: `time.perf_counter()` at the step's start, less the time that a device lost before.
        made_s: seconds that drafts had taken until then, see `Drafts.made_s`.
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
        """The sequences of which a next token is sampled, in the order of the rows."""
        return self.sequences if self.is_last_piece else list(self.decodes)

    @property
    def n_rows(self) -> int:
        """Number of tokens that are computed."""
        return self.n_prefill + len(self.decodes) + sum(map(len, self.drafts.values()))

    def rows(self) -> tuple[list[int], tuple[Piece, ...]]:
        """Return the tokens of the pass and where they belong."""
        ids, pieces = list[int](), list[Piece]()
        for sequence in self.sequences:
            cache, drafts = sequence.cache, self.drafts.get(sequence, ())
            assert cache is not None
            n = self.n_prefill if sequence is self.prefill else 1
            at, tables, shift = cache.n, cache.tables, sequence.pictures.shift(cache.n)
            state = cache.state_slot
            slots = [state, state, *(cache.draft_slots or [state] * len(drafts))]
            for i, (source, goal) in enumerate(pairwise(slots)):
                n_row = 1 if i else n
                pieces.append(Piece(at + i, n_row, tables, goal, cache.batch_index, source, shift))
            ids += [*sequence.tokens[at : at + n], *drafts]
        return ids, tuple(pieces)

    def sampling_requests(self) -> list[SamplingRequest | None]:
        """Return for each row with logits how its token may be sampled where they are.

        There is None for a row whose logits are wanted, as for all rows of a sequence with drafts.
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
    """What a step has found.

    Attributes:
        results: token, or logits (n_vocab,) to sample it from, for each row with logits.
        times: times of the token, if they were wanted.
        seconds: duration of the pass.
        is_lost: whether the device has lost its results, with what the states hold.
        error: error because of which nothing was computed, and which concerns the prompt alone.
    """

    results: Sequence[int | Logits] = ()
    times: TokenTimes | None = None
    seconds: float = 0.0
    is_lost: bool = False
    error: Exception | None = None


class AsyncDecode:
    """Sampling of one sequence's tokens on a device, ahead of their reader (run-ahead).

    Where a device has computed tokens that nobody has read, and recurrent states cannot go back,
    they become a part of the sequence: mostly it is the token that has ended the answer, with which
    the next turn begins.

    Attributes:
        sequence: the sequence; None while there is none.
        sampled_at: when its last token was read, in seconds of `time.perf_counter`, as the device
            has computed the next one since then; None if it has not.
    """

    def __init__(self, runtime: ModelRunner) -> None:
        self.runtime = runtime
        self.sequence: TokenSequence | None = None
        self.sampled_at: float | None = None
        self._lost: Decode | None = None  # what the device could not do, so that the host does it

    @property
    def is_beyond(self) -> bool:
        """Whether states have seen the sequence's last token already, and cannot go back."""
        source = self.runtime.token_source
        return self.sequence is not None and source is not None and source.is_beyond

    def can_serve(self, step: Decode) -> bool:
        """Return whether a device can compute a step, and sample the next token."""
        source = self.runtime.token_source
        is_open = not step.wants_logits and step.allowed is None
        if source is None or not is_open or step is self._lost:
            return False
        return source.serve(step.sampler, step.never)

    def decode(self, sequence: TokenSequence, n_left: int) -> int | Logits | None:
        """Have the device compute a token and sample the next one; see `TokenSource.next`.

        Args:
            n_left: number of tokens for which there are pages.
        """
        source, step, cache = self.runtime.token_source, sequence.step, sequence.cache
        assert source is not None, "it can serve"
        assert isinstance(step, Decode)
        assert cache is not None
        self.sequence = sequence
        piece = cache.piece(1, shift=sequence.pictures.shift(cache.n))
        found = source.next(step.token, piece, n_left)
        self.sampled_at = time.perf_counter() if isinstance(found, int) else None
        if found is None:
            sequence.is_ahead, self._lost = True, step
        return found

    def stop(self, sequence: TokenSequence | None = None) -> None:
        """End sampling there, and note if the states have seen what nobody has read.

        Args:
            sequence: sequence to do it for, if it is served; None for any.
        """
        served, source = self.sequence, self.runtime.token_source
        if served is None or sequence not in (None, served):
            return
        self.sequence = self.sampled_at = None
        beyond = source.stop() if source is not None else ()
        if beyond:
            served.note_ahead(beyond)


class StepRunner:
    """Executes the plans of a scheduler on a runtime.

    Attributes:
        encoder: encoder of images; None where the model cannot see.
        async_decode: sequence that the device samples ahead.
    """

    def __init__(self, runtime: ModelRunner) -> None:
        self._runtime = runtime
        self.async_decode = AsyncDecode(runtime)
        self.encoder: ImageEncoder | None = None

    def move(self, runtime: ModelRunner) -> None:
        """Go on with another runtime."""
        self._runtime = self.async_decode.runtime = runtime

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute a step; images of its prompt are encoded before.

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
        except Exception as error:  # noqa: BLE001 others go on
            return StepOutput(error=error)
        requests = plan.sampling_requests()
        begun = time.perf_counter()
        found, times = self._timed(plan, lambda: self._runtime.sample(ids, batch, requests))
        return StepOutput(found, times, time.perf_counter() - begun)

    def batch(self, plan: StepPlan) -> tuple[Sequence[int], Batch]:
        """Return the tokens of a pass, and what they are.

        Raises:
            EngineError: an image of the prompt cannot be encoded.
            Cancelled: the prompt's request was cancelled meanwhile.
        """
        ids, pieces = plan.rows()
        images, places = self._image_rows(plan), Places()
        if images and plan.prefill:
            ids = [token if token < FIRST_ID else 0 for token in ids]  # some token of the model
            places = plan.prefill.pictures.places(pieces[0].n_past, plan.n_prefill)
        return ids, Batch(pieces, plan.n_prefill - plan.is_last_piece, False, images, places)

    def _image_rows(self, plan: StepPlan) -> tuple[PictureRows, ...]:
        """Return the rows of images among the tokens of a prompt."""
        sequence = plan.prefill
        if sequence is None or not sequence.pictures:
            return ()
        assert sequence.cache is not None
        at, found = sequence.cache.n, list[PictureRows]()
        end = at + plan.n_prefill
        for start, picture in sequence.pictures.among(at, end):
            assert self.encoder is not None, "who has prompts with images can encode them"
            first, stop = max(at, start), min(end, start + picture.n)
            features = self.encoder.encode(picture, sequence.is_cancelled)
            rule = picture.rule
            whole = (start, stop) if rule.is_two_way else None
            rows = features[first - start : stop - start]
            found.append(PictureRows(first - at, rows, whole, rule.only_in_windows))
        return tuple(found)

    def n_with_one_new_image(self, sequence: TokenSequence, n: int) -> int:
        """Return how many of the next n tokens of a prompt to compute while other answers wait.

        Of the images and tiles among them, one at most is not encoded yet.
        """
        assert sequence.cache is not None
        at, encoder = sequence.cache.n, self.encoder
        new = [
            placed.start
            for placed in sequence.pictures.among(at, at + n)
            if encoder is not None and not encoder.has(placed.image)
        ]
        return n if len(new) < 2 else new[1] - at

    def _timed(self, plan: StepPlan, compute: Callable[[], T]) -> tuple[T, TokenTimes | None]:
        """Compute, and measure it if the times of one of the tokens are wanted."""
        for sequence in plan.sampled:
            if isinstance(sequence.step, Decode) and sequence.step.is_timed:
                assert sequence.cache is not None
                sampled_at = self.async_decode.sampled_at
                return timed(self._runtime.ranks, sequence.cache.n, compute, sampled_at)
        return compute(), None
