"""The table of GGML types."""

import subprocess
import sys

import pytest
from gguf.constants import GGML_QUANT_SIZES

from engine.formats.gguf.tensors import TYPES, row_bytes


def test_sizes_are_those_of_the_gguf_package() -> None:
    """Every type that the package knows is there with its number, name and sizes."""
    for kind, (block_size, type_size) in GGML_QUANT_SIZES.items():
        info = TYPES[int(kind)]
        assert (info.number, info.name) == (int(kind), kind.name)
        assert (info.block_size, info.type_size) == (block_size, type_size)


@pytest.mark.parametrize(
    ("number", "name", "block_size", "type_size"), [(41, "Q1_0", 128, 18), (42, "Q2_0", 64, 18)]
)
def test_types_unknown_to_the_package_are_added(
    number: int, name: str, block_size: int, type_size: int
) -> None:
    """A half scale and one or two bits per element."""
    info = TYPES[number]
    assert (info.number, info.name) == (number, name)
    assert (info.block_size, info.type_size) == (block_size, type_size)


@pytest.mark.parametrize(
    ("number", "n_elements", "n_bytes"), [(0, 7, 28), (2, 64, 36), (12, 256, 144), (12, 0, 0)]
)
def test_row_bytes_counts_whole_blocks(number: int, n_elements: int, n_bytes: int) -> None:
    """F32 takes four bytes each, a Q4_0 block of 32 takes 18, a Q4_K block of 256 takes 144."""
    assert row_bytes(TYPES[number], n_elements) == n_bytes


def test_a_row_that_cuts_a_block_is_refused() -> None:
    """The message names the type and its block."""
    with pytest.raises(ValueError, match="Q4_K blocks of 256"):
        row_bytes(TYPES[12], 128)


def test_sizes_are_known_without_torch() -> None:
    """A plan needs the table long before torch is loaded."""
    code = "import sys, engine.formats.gguf.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
