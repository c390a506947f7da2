"""What an answer wants computed: `Generation` yields it, and is sent the result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from engine.decoding.sampling.sampler import SamplingWish
from engine.errors import ContextOverflow, PromptError
from engine.generation.results import GenerationEvent
from engine.vision.images.placed import NO_IMAGES, PlacedImages, text_ids

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Mask
    from engine.decoding.sampling.sampler import Logits, Sampler
    from engine.generation.background import Background


@dataclass(slots=True)
class Prefill:
    """Work that makes the cache hold `ids`, computing those that it does not hold yet.

    Attributes:
        ids: all tokens of the sequence.
        marks: numbers of tokens behind which a later prompt may go on otherwise, so that the states
            that cannot be cut are worth keeping there.
        is_told: whether its progress is an event.
        n_cached: number of the tokens that were cached, noted by who does it.
        pictures: pictures among the tokens.
    """

    ids: Sequence[int]
    marks: Sequence[int] = ()
    is_told: bool = True
    n_cached: int = 0
    pictures: PlacedImages = NO_IMAGES


@dataclass(slots=True)
class Follow:
    """Work that computes one token behind those computed so far.

    Attributes:
        token: id of the token.
        sampler, never: how the next token is to be sampled, where a device can; see `TokenSource`.
        n_left: number of tokens that may still be sampled.
        is_timed: whether the token's times are an event.
        wants_logits: whether the result has to be logits, so that no device may sample.
        allowed: returns which tokens may come next, (at most n_vocab,); None for all. A device that
            samples ahead cannot know.
    """

    token: int
    sampler: Sampler
    never: Sequence[int]
    n_left: int
    is_timed: bool = False
    wants_logits: bool = False
    allowed: Callable[[], Mask] | None = None

    @property
    def wish(self) -> SamplingWish | None:
        """Settings by which a device may sample the next token; None if the host must."""
        if self.wants_logits:
            return None
        return SamplingWish(self.sampler, self.never, self.allowed)


Work: TypeAlias = Prefill | Follow

NotDone = Literal["cancelled", "context"]
"""Reason why work was not done: the answer was cancelled, or the cache has no room for it."""

Found: TypeAlias = "Logits | int | NotDone"
"""Result of work: logits (n_vocab,) of the last token, the next token, or why there is none."""

Steps: TypeAlias = "Generator[GenerationEvent | Work | Background, Found | None, None]"
"""An answer under way: the result of work is sent to it, and None behind anything else."""


def check_prompt(
    ids: Sequence[int], n_vocab: int, n_ctx: int, pictures: PlacedImages = NO_IMAGES
) -> None:
    """Check that tokens can be computed.

    Args:
        pictures: pictures among them.

    Raises:
        PromptError: no tokens, or tokens that the model does not have.
        ContextOverflow: more than the context holds.
    """
    if not ids:
        raise PromptError("The prompt is empty.", "Write something first.")
    texts = text_ids(ids) if pictures else ids
    if texts and not 0 <= min(texts) <= max(texts) < n_vocab:
        raise PromptError(f"The prompt has token ids outside 0 to {n_vocab - 1}.")
    if len(ids) > n_ctx:
        raise ContextOverflow(len(ids), n_ctx)
