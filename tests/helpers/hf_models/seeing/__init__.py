"""Models that see: tiny `transformers` models, written as text models and their mmproj files."""

from tests.helpers.hf_models.seeing import gemma, gemma4, mistral, qwen, tiles
from tests.helpers.hf_models.seeing.family import SeeingFamily

__all__ = ["SEEING", "SeeingFamily"]

SEEING: list[SeeingFamily] = [
    *gemma.FAMILIES,
    *qwen.FAMILIES,
    *mistral.FAMILIES,
    *tiles.FAMILIES,
    *gemma4.FAMILIES,
]
