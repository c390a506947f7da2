"""Random models for measuring speed: their logits, types, sizes and files."""

import os
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine import SamplingParams, TokenText, load_model, read_model_info
from engine.formats.gguf.tensors import TYPES
from engine.formats.quants.dequantise import dequantise
from tests.bench import synthetic
from tests.bench.random_blocks import KINDS, n_bytes, random_tensor
from tests.bench.synthetic import (
    MODELS,
    RECIPES,
    Sizes,
    has_more_bits,
    shapes,
    typed,
    write_header,
    write_model,
)

DENSE = Sizes("llama", 8, 256, 4, 2, 512, 600, tied=True, n_ctx=64)
ROUTED = Sizes("olmoe", 2, 256, 4, 4, 256, 600, n_expert=8, n_expert_used=2, n_ctx=64)
QWEN = Sizes(
    "qwen3moe", 2, 256, 4, 2, 256, 600, n_expert=8, n_expert_used=2, n_ctx=64, head_dim=128
)


@pytest.mark.usefixtures("reference")  # kernels would be compiled for each type
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_type_makes_a_model_with_sensible_logits(recipe: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", DENSE, recipe)
    with load_model(path, kv_type="f32") as model:
        logits = model.logits([0, 1, 599, 7])
    assert logits.shape == (4, 600)
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    ("sizes", "recipe"),
    [(ROUTED, "Q4_K_M"), (ROUTED, "Q8_0"), (ROUTED, "BF16"), (QWEN, "Q4_K_M")],
    ids=lambda one: getattr(one, "architecture", one),
)
def test_experts_are_routed_to_on_every_split(sizes: Sizes, recipe: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", sizes, recipe)
    with load_model(path, kv_type="f32") as model:
        alone = model.logits([3, 4, 5])
    with load_model(path, ["cpu", "cpu"], [3, 1], kv_type="f32") as model:
        split = model.logits([3, 4, 5])
    assert np.isfinite(alone).all()
    assert np.abs(split - alone).max() < 1e-3 * np.abs(alone).max()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: TYPES[kind].name)
def test_weights_are_as_large_as_asked(kind: int) -> None:
    data = random_tensor(kind, (64, 2048), 0.02, np.random.default_rng(1))
    weights = dequantise(torch.from_numpy(data.reshape(64, -1)), kind).numpy()
    # few numbers can be scales of these
    low, high = {Kind.MXFP4: (0.45, 1.1), Kind.NVFP4: (0.8, 1.2)}.get(kind, (0.9, 1.1))
    assert low < weights.std() / 0.02 < high
    assert abs(weights.mean()) < 0.5 * weights.std()


def test_the_mixture_is_the_one_of_llama_cpp(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", DENSE, "Q4_K_M")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert types.pop("token_embd.weight") == "Q6_K"
    better = {0, 3, 6, 7}
    for name, found in types.items():
        if "norm" in name:
            assert found == "F32"
        elif "attn_v" in name or "ffn_down" in name:
            assert found == ("Q6_K" if int(name.split(".")[1]) in better else "Q4_K")
        else:
            assert found == "Q4_K"
    assert read_model_info(path).quant == "Q4_K_M"
    assert sum(has_more_bits(layer, 16) for layer in range(16)) == 8


@pytest.mark.parametrize(
    ("name", "n_params"),
    [("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248), ("moe-1b", 6_919_161_856),
     ("moe-30b", 30_532_122_624)],
)  # fmt: skip
def test_real_shapes_have_as_many_weights_as_their_models(name: str, n_params: int) -> None:
    assert sum(prod(shape) for _, shape in shapes(MODELS[name])) == n_params


@pytest.mark.parametrize(
    ("name", "recipe", "gb"),
    [("llama-8b", "Q4_K_M", 4.92), ("llama-8b", "Q8_0", 8.53), ("moe-30b", "Q4_K_M", 18.6)],
)
def test_headers_of_real_shapes_are_understood(
    name: str, recipe: str, gb: float, tmp_path: Path
) -> None:
    """The file is as large as the model's own, but has holes where the weights would be."""
    path, sizes = tmp_path / "m.gguf", MODELS[name]
    writer = write_header(path, sizes, recipe)
    writer.close()
    n_data = sum(n_bytes(kind, shape) for _, shape, kind in typed(sizes, recipe))
    os.truncate(path, path.stat().st_size + writer.data_alignment + n_data)
    info = read_model_info(path)
    assert (info.supported, info.quant, info.n_layer) == (True, recipe, sizes.n_layer)
    assert (info.n_embd, info.n_vocab) == (sizes.n_embd, sizes.n_vocab)
    assert n_data / 1e9 == pytest.approx(gb, rel=0.01)


def test_files_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first, again, other = (
        write_model(tmp_path / f"{i}.gguf", ROUTED, "Q4_K_M", seed).read_bytes()
        for i, seed in enumerate([5, 5, 6])
    )
    assert first == again != other


def test_the_command_line_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(synthetic.MODELS, "llama-1b", DENSE)
    synthetic.main(["llama-1b", "Q5_K_M", str(tmp_path / "m.gguf")])
    assert capsys.readouterr().out.startswith("0.00 GB in ")
    info = read_model_info(tmp_path / "m.gguf")
    assert (info.quant, info.supported, info.n_vocab) == ("Q5_K_M", True, 600)


def test_a_model_can_be_asked(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", DENSE, "Q4_K_M")
    with load_model(path, n_ctx=64) as model:
        assert model.tokenizer.encode("a tiger") == [97, 32, 116, 105, 103, 256]
        events = list(model.generate("a", SamplingParams(max_tokens=8, temperature=0.0)))
    assert any(isinstance(event, TokenText) and event.text for event in events)


def test_rows_that_do_not_fill_blocks_are_refused(tmp_path: Path) -> None:
    odd = Sizes("llama", 1, 96, 4, 2, 96, 64)
    with pytest.raises(ValueError, match="not a whole number of Q4_K blocks"):
        write_model(tmp_path / "m.gguf", odd, "Q4_K_M")
    assert not (tmp_path / "m.gguf").exists()
