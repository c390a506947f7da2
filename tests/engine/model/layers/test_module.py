"""Tests of `TensorSource`: shapes in a file, and shapes that a model expects."""

import pytest

from engine.errors import InvalidGGUF
from engine.formats.gguf.tensors import TYPES, TensorInfo
from engine.model.layers.module import TensorSource

F32 = 0


def source(*shape: int) -> TensorSource:
    tensor = TensorInfo("x", TYPES[F32], shape, part=0, offset=64)
    return TensorSource("m.gguf", {"x": tensor})


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [((1, 64), (64,)), ((64,), (1, 64)), ((1, 1, 4, 1), (4, 1)), ((1,), (1, 1)), ((4, 1), (4, 1))],
)
def test_leading_dimensions_of_one_do_not_count(
    stored: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    found = source(*stored).get("x", wanted)
    assert found.shape == wanted
    assert found.offset == 64


@pytest.mark.parametrize(
    ("stored", "wanted"), [((64, 1), (64,)), ((2, 64), (64,)), ((4, 1), (1, 4)), ((1, 8), (64,))]
)
def test_other_shapes_are_named(stored: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    with pytest.raises(InvalidGGUF, match="the tensor x has shape"):
        source(*stored).get("x", wanted)
