"""Metadata under short names; files are untrusted, so each number is checked against `BOUNDS`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from engine.errors import InvalidGGUF, ModelFileError
from engine.model.forward.operands import RopeParams, RopeStyle

if TYPE_CHECKING:
    from engine.formats.gguf.metadata import Metadata
    from engine.load_params import LoadParams

T = TypeVar("T")

MAX_SIZE = 1 << 24
MAX_CONTEXT = 1 << 32
MAX_LIST = 4096  # maximum elements in a list, which has at most one per layer
SIZE = (1, MAX_SIZE)
COUNT = (0, MAX_SIZE)
CONTEXT = (0, MAX_CONTEXT)
FACTOR = (0, 10**6)
EPS = (0, 1)
SIGNED = (-(10**6), 10**6)

BOUNDS: dict[str, tuple[float, float]] = {
    "block_count": (1, 1024),
    "nextn_predict_layers": (0, 4096),
    "context_length": CONTEXT,
    "embedding_length": SIZE,
    "embedding_length_per_layer_input": COUNT,
    "feed_forward_length": COUNT,
    "expert_count": COUNT,
    "expert_used_count": COUNT,
    "expert_feed_forward_length": COUNT,
    "expert_group_count": COUNT,
    "expert_group_used_count": COUNT,
    "expert_gating_func": (0, 16),
    "expert_weights_scale": FACTOR,
    "moe_latent_size": COUNT,
    "leading_dense_block_count": COUNT,
    "full_attention_interval": SIZE,
    "attention.head_count": COUNT,
    "attention.head_count_kv": COUNT,
    "attention.key_length": SIZE,
    "attention.value_length": SIZE,
    "attention.key_length_swa": SIZE,
    "attention.value_length_swa": SIZE,
    "attention.key_length_mla": SIZE,
    "attention.value_length_mla": SIZE,
    "attention.q_lora_rank": COUNT,
    "attention.kv_lora_rank": COUNT,
    "attention.layer_norm_epsilon": EPS,
    "attention.layer_norm_rms_epsilon": EPS,
    "attention.sliding_window": CONTEXT,
    "attention.sliding_window_pattern": (0, 4096),
    "attention.shared_kv_layers": (0, 4096),
    "attention.scale": FACTOR,
    "attention.clamp_kqv": FACTOR,
    "attention.max_alibi_bias": FACTOR,
    "attention.temperature_scale": FACTOR,
    "attention.temperature_length": CONTEXT,
    "attn_logit_softcapping": FACTOR,
    "final_logit_softcapping": FACTOR,
    "embedding_scale": FACTOR,
    "residual_scale": FACTOR,
    "logit_scale": FACTOR,
    "swiglu_clamp_exp": FACTOR,
    "swiglu_clamp_shexp": FACTOR,
    "pooling_type": (-1, 16),
    "rope.dimension_count": (2, MAX_SIZE),
    "rope.dimension_count_swa": (2, MAX_SIZE),
    "rope.dimension_sections": COUNT,
    "rope.freq_base": (2, 10**12),
    "rope.freq_base_swa": (2, 10**12),
    "rope.scale_linear": FACTOR,
    "rope.scaling.factor": FACTOR,
    "rope.scaling.attn_factor": (0, 1000),
    "rope.scaling.alpha": FACTOR,
    "rope.scaling.original_context_length": CONTEXT,
    "rope.scaling.yarn_log_multiplier": (0, 1000),
    "rope.scaling.yarn_beta_fast": (1e-6, 10**6),
    "rope.scaling.yarn_beta_slow": (1e-6, 10**6),
    "ssm.conv_kernel": (1, 4096),
    "ssm.inner_size": SIZE,
    "ssm.state_size": SIZE,
    "ssm.time_step_rank": SIZE,
    "ssm.group_count": COUNT,
    "kda.head_dim": SIZE,
    "shortconv.l_cache": (1, 4096),
    "vision.image_size": (1, 1 << 14),
    "vision.patch_size": (1, 1 << 10),
    "vision.embedding_length": SIZE,
    "vision.feed_forward_length": COUNT,
    "vision.block_count": (0, 1024),
    "vision.attention.head_count": COUNT,
    "vision.attention.layer_norm_epsilon": EPS,
    "vision.image_mean": (-1000, 1000),
    "vision.image_std": (0, 1000),
    "vision.spatial_merge_size": (1, 16),
    "vision.projector.scale_factor": (1, 16),
    "vision.n_wa_pattern": (1, 1024),
    "vision.window_size": (1, 1 << 14),
    "vision.preproc_image_size": (1, 1 << 14),
    "vision.preproc_min_tiles": (1, 64),
    "vision.preproc_max_tiles": (1, 64),
    "vision.image_min_pixels": COUNT,
    "vision.image_max_pixels": COUNT,
    "xielu.alpha_n": SIGNED,
    "xielu.alpha_p": SIGNED,
    "xielu.beta": SIGNED,
    "xielu.eps": SIGNED,
}
"""Minimum and maximum for each key, wider than any model needs and safe to compute with."""

UNPREFIXED = ("xielu.",)  # prefixes of keys that do not start with the architecture


class Keys:
    """A file's metadata, by key without the architecture: `keys.integer("block_count")`.

    Raises:
        InvalidGGUF: (all reads) a key without a default is missing, or a value has the wrong type
            or length.
    """

    def __init__(self, meta: Metadata) -> None:
        self.meta = meta
        self._prefix = f"{meta.architecture}."

    def full_key(self, name: str) -> str:
        """Return the key as stored in the file."""
        return name if name.startswith(UNPREFIXED) else self._prefix + name

    def __contains__(self, name: str) -> bool:
        return self.full_key(name) in self.meta

    def invalid(self, problem: str, **values: str | int | float) -> InvalidGGUF:
        """Return an error about this file; `problem` is a template."""
        return InvalidGGUF(self.meta.path, problem, "", **values)

    def check_bounds(self) -> None:
        """Check every number against `BOUNDS`; types are checked on each read.

        Raises:
            InvalidGGUF: a value is out of bounds, or a list is too long.
        """
        for name, (low, high) in BOUNDS.items():
            key = self.full_key(name)
            values = self._limited(key)
            for value in values if isinstance(values, list) else [values]:
                if isinstance(value, int | float) and not low <= value <= high:
                    raise self.invalid(
                        "'{key}' is {value}, not between {low} and {high}",
                        key=key, value=value, low=low, high=high,
                    )  # fmt: skip

    def integer(self, name: str, default: int | None = None) -> int:
        """Read a whole number."""
        key = self._bounded(name)
        return self.meta.int(key) if default is None else self.meta.int(key, default)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a number."""
        key = self._bounded(name)
        return self.meta.float(key) if default is None else self.meta.float(key, default)

    def flag(self, name: str, default: bool) -> bool:
        """Read a flag."""
        return self.meta.bool(self.full_key(name), default)

    def text(self, name: str, default: str) -> str:
        """Read a string."""
        return self.meta.str(self.full_key(name), default)

    def integers(
        self, name: str, n_layer: int, default: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """Read one whole number per layer, from a list or a single value."""
        key = self._bounded(name)
        if default is not None and key not in self.meta:
            return default
        return tuple(self.meta.int_list(key, n_layer))

    def numbers(self, name: str, n_layer: int, default: float | None = None) -> tuple[float, ...]:
        """Read one number per layer, from a list or a single value."""
        key = self._bounded(name)
        if self.meta.array_length(key) is None:
            return (self.number(name, default),) * n_layer
        return tuple(self._complete(key, self.meta.floats(key), n_layer))

    def flags(self, name: str, n_layer: int, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """Read one flag per layer, from a list of booleans or of zeros and ones."""
        key = self.full_key(name)
        if self.meta.array_length(key) is None:
            return default
        items = self._limited(key)
        if not all(isinstance(item, int) for item in items):
            raise self.invalid("'{key}' in its metadata is not a list of flags", key=key)
        return tuple(bool(item) for item in self._complete(key, items, n_layer))

    def sections(self) -> tuple[int, ...]:
        """Read M-RoPE's sections (numbers of pairs for time, row and column); () if absent."""
        key = self._bounded("rope.dimension_sections")
        if key not in self.meta:
            return ()
        sections = tuple(int(n) for n in self._complete(key, self.meta.ints(key), 3))
        if min(sections) < 0:
            raise self.invalid("'{key}' in its metadata contains a negative number", key=key)
        return sections if any(sections) else ()

    def norm_eps(self, kind: Literal["rms", "layer"]) -> float:
        """Read the norms' epsilon; some files store it only under the key for the other kind."""
        rms, layer = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
        first, second = (rms, layer) if kind == "rms" else (layer, rms)
        return self.number(second if second in self and first not in self else first)

    def _limited(self, key: str) -> Any:
        """Return a value of any type or None; refuse long lists, which would take seconds to
        read."""
        n = self.meta.array_length(key)
        if n is not None and n > MAX_LIST:
            raise self.invalid(
                "'{key}' in its metadata has {n} entries, more than any model needs", key=key, n=n
            )
        return self.meta.get(key)

    def _bounded(self, name: str) -> str:
        assert name in BOUNDS, f"{name} is read without bounds"
        return self.full_key(name)

    def _complete(self, key: str, items: list[T], n_layer: int) -> list[T]:
        if len(items) < n_layer:
            raise self.invalid(
                "'{key}' in its metadata has {n} entries for {layers} layers",
                key=key, n=len(items), layers=n_layer,
            )  # fmt: skip
        return items[:n_layer]


SCALING_TYPES = ("none", "linear", "yarn", "longrope")  # supported values of `rope.scaling.type`
DEFAULT_BASE = 10000.0  # RoPE's base for files without one (arXiv 2104.09864)


def stretched(rope: RopeParams, params: LoadParams) -> RopeParams:
    """Return RoPE parameters with a load's overrides.

    As in llama.cpp, a scaling type without a factor keeps the file's factor.
    """
    scale = 1 / params.rope_factor if params.rope_factor else rope.scale
    kind = params.rope_scaling
    return replace(
        rope,
        base=params.rope_base or rope.base,
        scale=1.0 if kind == "none" else scale,
        yarn=kind == "yarn" if kind else rope.yarn,
    )


def read_rope(keys: Keys, head_dim: int, style: RopeStyle) -> RopeParams:
    """Read the `rope.*` keys of a file.

    As in llama.cpp, a factor without a type means linear scaling.

    Raises:
        ModelFileError: the scaling type is not supported.
    """
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in SCALING_TYPES:
        raise ModelFileError(
            keys.meta.path,
            "{file} uses {kind} position scaling, which is not supported yet.",
            "Pick another model.",
            file=keys.meta.path.name, kind=repr(kind[:40]),
        )  # fmt: skip
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 1.0)
    n_ctx_train = keys.integer("context_length", 0)
    return RopeParams(
        n_rot=keys.integer("rope.dimension_count", head_dim),
        style=style,
        base=keys.number("rope.freq_base", DEFAULT_BASE),
        scale=1.0 if kind in ("none", "longrope") or factor == 0 else 1.0 / factor,
        yarn=kind == "yarn",
        n_ctx_orig=keys.integer("rope.scaling.original_context_length", n_ctx_train),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
    )
