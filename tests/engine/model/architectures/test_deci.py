"""Llama with parts left out or replaced, against transformers with the same changes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import load_model
from engine.errors import InvalidGGUF
from tests.helpers.golden import nmse
from tests.helpers.model_draft import ModelDraft

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig

from tests.helpers.hf_models import Family
from tests.helpers.hf_models.family import randomise
from tests.helpers.hf_models.parts import (
    DENSE,
    NEIGHBOURS,
    SIZES,
    head_sizes,
    rope_base,
    rope_size,
    sizes,
)

LAYERS = [
    ("none", True),
    ("attention", True),
    ("linear", True),
    ("none", False),
    ("attention", False),
    ("linear", False),
    ("none", False),
]
"""Each layer's stand-in for attention, and whether the layer has an FFN."""

SPLITS: dict[str, dict[str, Any]] = {
    "1 rank": {"devices": ["cpu"]},
    "3 ranks": {"devices": ["cpu"] * 3},
    "uneven": {"devices": ["cpu"] * 3, "split": [5, 0, 1], "n_batch": 7},
    "by layers": {"devices": ["cpu"] * 2, "split_mode": "layer", "n_batch": 7},
    "moved": {"devices": ["cpu"] * 3, "split": [1, 2, 1], "overrides": [("attn_", "cpu")]},
}


class Linear(torch.nn.Module):
    """Stand-in for attention: one matrix, or nothing at all."""

    def __init__(self, n: int, *, is_nothing: bool) -> None:
        super().__init__()
        self.o_proj = torch.nn.Linear(n, n, bias=False)
        self.scale = 0.0 if is_nothing else 1.0

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.o_proj(hidden_states) * self.scale, None


def kinds(c: Any) -> dict[str, Any]:
    n_head, n_head_kv = c.num_attention_heads, c.num_key_value_heads
    heads = {"none": (0, 0), "linear": (n_head, 0), "attention": (n_head, n_head_kv)}
    return {
        **sizes(c),
        **head_sizes(c),
        **rope_base(c),
        **rope_size(c),
        "attention.head_count": [heads[kind][0] for kind, _ in LAYERS],
        "attention.head_count_kv": [heads[kind][1] for kind, _ in LAYERS],
        "feed_forward_length": [c.intermediate_size if ffn else 0 for _, ffn in LAYERS],
    }


FAMILY = Family(
    "deci",
    "deci",
    None,
    lambda: LlamaConfig(**SIZES, num_hidden_layers=len(LAYERS)),
    kinds,
    {**DENSE, **NEIGHBOURS},
)


def kept(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters without those of parts that are left out."""
    gone = []
    for layer, (kind, has_ffn) in enumerate(LAYERS):
        prefix = f"model.layers.{layer}."
        if kind == "none":
            gone += [f"{prefix}self_attn.", f"{prefix}input_layernorm."]
        if not has_ffn:
            gone += [f"{prefix}mlp.", f"{prefix}post_attention_layernorm."]
    return {name: v.numpy() for name, v in state.items() if not name.startswith(tuple(gone))}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], Any]:
    config, rng = FAMILY.config(), np.random.default_rng(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for layer, (kind, _) in zip(model.model.layers, LAYERS, strict=True):
        if kind != "attention":
            layer.self_attn = Linear(config.hidden_size, is_nothing=kind == "none")
    randomise(model, rng)
    for layer, (_, has_ffn) in zip(model.model.layers, LAYERS, strict=True):
        if not has_ffn:
            layer.mlp.down_proj.weight.data.zero_()
    path = tmp_path_factory.mktemp("deci") / "m.gguf"
    FAMILY.write(path, config, kept(model.state_dict()))
    ids = rng.integers(3, config.vocab_size, 30).tolist()
    with torch.no_grad():
        return path, ids, model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("split", SPLITS)
def test_logits_equal_transformers(built: tuple[Path, list[int], Any], split: str) -> None:
    path, ids, expected = built
    with load_model(path, kv_type="f32", n_ctx=64, **SPLITS[split]) as model:
        assert nmse(model.logits(ids), expected) <= 1e-10


def test_only_layers_with_attention_have_a_cache(built: tuple[Path, list[int], Any]) -> None:
    with load_model(built[0], ["cpu"], n_ctx=64) as model:
        assert len(model.runtime.ranks[0].context.cache.layers) == 2


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"attention.head_count": [5] * 7}, "cannot (share|be divided)"),
        ({"expert_count": 2, "expert_used_count": 1}, "experts"),
        ({"feed_forward_length": [104] * 7}, "missing"),
    ],
)
def test_sizes_that_do_not_fit(
    built: tuple[Path, list[int], Any], tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    path = ModelDraft.read(built[0]).changed(keys, "deci.").write(tmp_path / "m.gguf")
    with pytest.raises(InvalidGGUF, match=problem):
        load_model(path, ["cpu"]).close()
