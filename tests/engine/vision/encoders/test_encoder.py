"""Encoders of all known kinds: features for each token, sums in F32, and their memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import Cancelled
from engine.runtime.image_encoder import ImageEncoder
from engine.util.progress import never
from engine.vision.encoders.ops import FEWEST_PATCHES, QUERIES, VisionOps, product
from engine.vision.encoders.registry import ENCODERS
from engine.vision.images.placed import PromptImage
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.tiny_mmproj import N_TEXT, text_of, tiny_mmproj

F16_MAX = 65504.0


def opened(path: Path, projector: str) -> ImageEncoder:
    return ImageEncoder(str(path), "cpu", text_of(projector), never)


def picture_for(encoder: ImageEncoder) -> PromptImage:
    """Return a picture of noise, or a tile of one."""
    views = encoder.rule.resizing.views(40, 30)
    (width, height), (rows, columns) = views.sizes[-1], views.grid
    shape = (height // rows, width // columns, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return PromptImage.of(pixels, (40, 30), encoder.rule, encoder.hash)


@pytest.mark.parametrize("projector", sorted(ENCODERS))
def test_each_token_of_a_picture_has_its_features(projector: str, tmp_path: Path) -> None:
    encoder = opened(tiny_mmproj(tmp_path / "mmproj.gguf", projector), projector)
    picture = picture_for(encoder)
    features = encoder.encode(picture)
    assert len(features) == picture.n
    assert features.shape[1] % N_TEXT == 0
    assert features.isfinite().all()
    assert features.std() > 0.01


def test_sums_beyond_the_range_of_f16_are_no_infinities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices are F16 in the file; what they add to the residual stream may be larger."""
    path = tiny_mmproj(tmp_path / "mmproj.gguf", "gemma3")
    draft = ModelDraft.read(path)
    for name, tensor in draft.tensors.items():
        if name.startswith("v.blk.") and len(tensor.shape) == 2:
            values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
            scale = {"v.blk.0.ffn_down.weight": 60_000, "v.blk.0.ffn_up.weight": 20}.get(name, 1)
            draft.tensors[name] = DraftTensor.of((scale * values).astype(np.float16))
    encoder = opened(draft.write(path), "gemma3")
    largest: list[float] = []
    plain = VisionOps.layer_norm

    def layer_norm(self: VisionOps, x: torch.Tensor, *args: Any) -> torch.Tensor:
        assert x.dtype == torch.float32
        largest.append(float(x.abs().max()))
        return plain(self, x, *args)

    monkeypatch.setattr(VisionOps, "layer_norm", layer_norm)
    features = encoder.encode(picture_for(encoder))
    assert max(largest) > F16_MAX
    assert features.isfinite().all()


@pytest.mark.parametrize("most", [1, 7, 10**9])
def test_attention_of_some_queries_at_a_time_is_that_of_all(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = torch.randn(3, 24, 2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    scores = (q.transpose(0, 1) @ k.permute(1, 2, 0)) * 8**-0.5
    wanted = (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)
    monkeypatch.setattr("engine.vision.images.placed.MAX_SCORES", most * 24 * 2)
    assert torch.allclose(VisionOps().attend_all(q, k, v), wanted, atol=1e-5)
    windows: Sequence[int] = (10, 8, 6)
    parts = zip(*(x.split_with_sizes(list(windows)) for x in (q, k, v)), strict=True)
    apart = torch.cat([VisionOps().attend_all(*part) for part in parts])
    assert torch.equal(VisionOps().attend_all(q, k, v, windows), apart)


@pytest.mark.parametrize("n", [FEWEST_PATCHES, QUERIES + 1])
def test_attention_head_by_head_is_that_of_all_heads(n: int) -> None:
    q, k, v = torch.randn(3, n, 3, 8, generator=torch.Generator().manual_seed(0)).unbind()
    scores = (q.transpose(0, 1) @ k.permute(1, 2, 0)) * 8**-0.5
    wanted = (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)
    assert torch.allclose(VisionOps().attend_all(q, k, v), wanted, atol=1e-5)


def test_attention_of_many_patches_is_cancelled() -> None:
    ops = VisionOps()
    ops.is_cancelled = lambda: True
    with pytest.raises(Cancelled):
        ops.attend_all(*torch.zeros(3, FEWEST_PATCHES, 1, 4).unbind())


def test_products_equal_those_of_f64() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 40, generator=generator) for n in (300, 17))
    wanted = (x.double() @ w.double().T).float()
    assert torch.allclose(product(x, w), wanted, atol=1e-5)
    assert torch.allclose(product(x[:, ::2], w[:, ::2]), (x[:, ::2] @ w[:, ::2].T), atol=1e-5)
