"""LongRoPE (arXiv 2402.13753): a file has rotations for short and for long contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.layers.hparams import HParams
    from engine.layers.module import TensorSource


def choose_rope_factors(source: TensorSource, hp: HParams) -> None:
    """Show the divisors of the frequencies that suit the context as `rope_freqs`.

    The choice holds for all positions, as in llama.cpp: keys that are in the cache cannot change
    with a sequence that grows.
    """
    is_long = hp.n_ctx > hp.rope.n_ctx_orig
    name = f"rope_factors_{'long' if is_long else 'short'}.weight"
    if name in source and "rope_freqs.weight" not in source:
        source.tensors["rope_freqs.weight"] = source.tensors[name]
