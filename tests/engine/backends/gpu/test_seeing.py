"""Pictures in models that the kernels for GPUs compute, which Triton interprets."""

from pathlib import Path

import pytest

from engine import load_model
from tests.helpers.golden import nmse
from tests.helpers.hf_models.seeing import SEEING
from tests.helpers.pictures import prompt_logits, prompt_of, random_picture, shown

BAR = 1e-3
"""Largest NMSE against exact logits: activations are rounded to bytes, the cache to F16."""

ASKED = [shown("hi", random_picture(20, 12))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3vl", "idefics3"])
def test_a_prompt_with_a_picture_and_a_token_behind_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two-way in all layers or only in windows, rows and columns with deep features, and tiles."""
    next(family for family in SEEING if family.name == name).build(tmp_path)
    found = []
    for backend in ("reference", "interpreter"):
        monkeypatch.setenv("TANDEM_BACKEND", backend)
        with load_model(tmp_path / "model.gguf", n_ctx=256) as model:
            prompt = prompt_of(model, ASKED)
            logits = prompt_logits(model, prompt)
            found.append(logits)
            assert model.fallbacks == ()
    assert nmse(found[1], found[0]) < BAR
