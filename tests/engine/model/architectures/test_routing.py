"""Tokens get the same experts on every rank, whatever the kind of its device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import Model, load_model
from engine.model.layers.ffn import MoE
from tests.helpers.hf_models import FAMILIES

pytest.importorskip("transformers")

ROUTED = ("mixtral", "qwen3moe", "gpt-oss", "glm4moe", "deepseek2")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    folder = tmp_path_factory.mktemp("routed")
    families = {family.name: family for family in FAMILIES}
    built: dict[str, Any] = {}

    def build(name: str) -> Any:
        if name not in built:
            built[name] = (folder / f"{name}.gguf", *families[name].build(folder / f"{name}.gguf"))
        return built[name]

    return build


def disturb(model: Model) -> None:
    """Make all routers but one prefer other experts, as another rounding might on a near tie."""
    with torch.inference_mode():
        for rank in model.runtime.ranks:
            for block in rank.model.blk:
                ffn: Any = getattr(block, "ffn", None)
                if isinstance(ffn, MoE) and rank.context.rank in ffn.columns.owners()[1:]:
                    ffn.ffn_gate_inp.weight.data.neg_()


def load(path: Path) -> Model:
    return load_model(path, ["cpu"] * 3, [3, 1, 2], kv_type="f32")


@pytest.mark.parametrize("name", ROUTED)
def test_devices_of_different_kinds_follow_one_router(
    build: Callable[[str], Any], name: str
) -> None:
    path, ids, _ = build(name)
    with load(path) as model:
        expected = model.logits(ids)
    for kinds, is_equal in ((["cpu", "cuda", "mps"], True), (["cpu"] * 3, False)):
        with load(path) as model:
            disturb(model)
            for rank in model.runtime.ranks:
                rank.context._kinds = kinds
            assert np.array_equal(model.logits(ids), expected) == is_equal
