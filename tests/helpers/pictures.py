"""Random pictures as files, and prompts with pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from engine import ChatMessage, Model, image_base64
from engine.generation.prompts import Prompt
from engine.generation.sequence import Prefill, Steps, TokenSequence
from engine.generation.step_runner import StepPlan
from engine.vision.images.placed import PlacedImages


def random_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a picture of soft coloured spots."""
    rng = np.random.default_rng(seed)
    spots = rng.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    return Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC)


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of an image's file."""
    held = io.BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


def shown(text: str, *images: Image.Image) -> ChatMessage:
    """Return a person's message with pictures."""
    return ChatMessage("user", text, pictures=tuple(image_base64(as_file(i)) for i in images))


def prompt_of(model: Model, messages: Sequence[ChatMessage]) -> Prompt:
    """Return the prompt of a conversation."""
    return model._prompts.chat(messages, model.n_ctx, continue_last=False, is_shortened=False)


def prompt_logits(model: Model, prompt: Prompt) -> Any:
    """Return the logits of all tokens of a prompt, computed in one pass: (tokens, n_vocab)."""
    sequence = TokenSequence(_steps(prompt))
    sequence.advance(None)
    sequence.cache = cache = model.scheduler.cache.allocate(())
    try:
        n = len(prompt.ids)
        cache.sequence.reserve(n)
        ids, batch = model.scheduler.runner.batch(StepPlan(sequence, n))
        return model.runtime.runner.forward(ids, batch._replace(first_logit=0))
    finally:
        model.scheduler.cache.free(cache, is_kept=False)
        sequence.close()


def _steps(prompt: Prompt) -> Steps:
    yield Prefill(prompt.ids, images=PlacedImages(prompt.ids, prompt.images))
