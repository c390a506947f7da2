"""The settings that a person can choose: one frozen dataclass per subject.

Each field of `SamplingParams` carries its title, help, bounds and step in `field(metadata=...)`:
validation reads them, and a settings panel is built from them. Imports neither torch nor Qt.
"""

from engine.config.fields import validate_fields
from engine.config.kv_types import KV_TYPES, KVTypes, kv_types
from engine.config.load import (
    DEFAULT_CONTEXT,
    PEER_MODES,
    ROPE_SCALINGS,
    SPLIT_MODES,
    ControlVector,
    LoadParams,
    PeerMode,
    default_groups,
)
from engine.config.sampling import MOST_TOKENS, SAMPLERS, Overflow, SamplingParams

__all__ = [
    "DEFAULT_CONTEXT",
    "KV_TYPES",
    "MOST_TOKENS",
    "PEER_MODES",
    "ROPE_SCALINGS",
    "SAMPLERS",
    "SPLIT_MODES",
    "ControlVector",
    "KVTypes",
    "LoadParams",
    "Overflow",
    "PeerMode",
    "SamplingParams",
    "default_groups",
    "kv_types",
    "validate_fields",
]
