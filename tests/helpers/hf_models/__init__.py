"""Random models of many families, computed by `transformers` and written as GGUF files.

The conversion follows llama.cpp's converters: their tensor names, keys, and changes to the weights.
Needs the package `transformers`; nothing is downloaded.
"""

from tests.helpers.hf_models import (
    gemma,
    linear_attention,
    llama,
    mistral,
    moe,
    others,
    state_space,
)
from tests.helpers.hf_models.family import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: list[Family] = [
    *llama.FAMILIES,
    *gemma.FAMILIES,
    *moe.FAMILIES,
    *mistral.FAMILIES,
    *linear_attention.FAMILIES,
    *state_space.FAMILIES,
    *others.FAMILIES,
]
