"""Random models of many families, computed by `transformers` and written as GGUF files.

The conversion follows llama.cpp's converters: their tensor names, keys, and changes to the weights.
Needs the package `transformers`, without which tests that import this are skipped; nothing is
downloaded.
"""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

from tests.helpers.hf_models import (
    cohere,
    gated,
    gemma,
    gpt,
    gpt2,
    lfm2,
    linear_attention,
    llama,
    mamba,
    mamba2,
    mistral,
    moe,
    nope,
    relatives,
    stretched,
)
from tests.helpers.hf_models.family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: list[Family] = [
    *llama.FAMILIES,
    *gemma.FAMILIES,
    *moe.FAMILIES,
    *mistral.FAMILIES,
    *linear_attention.FAMILIES,
    *mamba.FAMILIES,
    *mamba2.FAMILIES,
    *lfm2.FAMILIES,
    *gpt2.FAMILIES,
    *gpt.FAMILIES,
    *cohere.FAMILIES,
    *stretched.FAMILIES,
    *gated.FAMILIES,
    *nope.FAMILIES,
    *relatives.FAMILIES,
]
