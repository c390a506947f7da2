"""Random models of many families, computed by `transformers` and written as GGUF files.

The conversion follows llama.cpp's converters: their tensor names, keys, and changes to the weights.
Needs the package `transformers`; nothing is downloaded.
"""

from tests.helpers.hf_models import (
    cohere,
    gated,
    gemma,
    gpt,
    linear_attention,
    llama,
    mamba,
    mistral,
    moe,
    nope,
    others,
    relatives,
    state_space,
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
    *state_space.FAMILIES,
    *gpt.FAMILIES,
    *cohere.FAMILIES,
    *stretched.FAMILIES,
    *gated.FAMILIES,
    *nope.FAMILIES,
    *relatives.FAMILIES,
    *others.FAMILIES,
]
