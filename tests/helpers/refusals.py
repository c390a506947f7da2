"""Outcomes of loading a file as a person sees them: a refusal in one sentence, or an answer."""

import time
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams, inspect_model, load_model
from engine.errors import ModelFileError
from tests.helpers.answers import ids_of
from tests.helpers.model_draft import ModelDraft

PROMPT = [5, 6, 7]


def refusal(draft: ModelDraft, path: Path, **options: Any) -> str:
    """Return the sentence with which loading is refused; check that it comes fast."""
    draft.write(path)
    inspect_model(path)  # a file that cannot be run can still be looked at
    start = time.monotonic()
    with pytest.raises(ModelFileError) as caught:
        load_model(path, ["cpu", "cpu"], [3, 1], **options).close()
    assert time.monotonic() - start < 5
    sentence = str(caught.value)
    assert path.name in sentence
    assert "\n" not in sentence
    return sentence


def answers(draft: ModelDraft, path: Path) -> list[int]:
    """Return the token ids with which the model continues."""
    draft.write(path)
    with load_model(path, ["cpu", "cpu"], [3, 1]) as model:
        return ids_of(model.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0)))
