"""Dequantisation against the gguf package or, where that has none, the layout in plain Python."""

import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from gguf import quants as reference
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.formats.gguf.tensors import TYPES
from engine.formats.quants import dequantise as dequantise_module
from engine.formats.quants.dequantise import QUANTS, Quant, dequantise
from tests.helpers.block_bytes import assert_same_bits, random_rows

Q1_0, Q2_0 = 41, 42
F32, F16, BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
INTEGERS_AND_F64 = {"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F64": "<f8"}
KNOWN_TO_REFERENCE = sorted({int(kind) for kind in reference._type_traits} | {F32, F16})
# Byte offsets of the float16 numbers of a block; IQ1_M scatters its one over four words.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0],
    "IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64], "Q1_0": [0], "Q2_0": [0],
}  # fmt: skip

CODED = [number for number, quant in QUANTS.items() if quant.codes_of is not None]

every_type = pytest.mark.parametrize("number", QUANTS, ids=lambda number: QUANTS[number].name)


def realistic_rows(quant: Quant, n_rows: int, n_blocks: int) -> NDArray[np.uint8]:
    """Return random codes with scales of the size that weights have."""
    blocks = random_rows(quant, n_rows * n_blocks, 1, seed=1)
    scales = np.random.default_rng(2).normal(0, 0.01, (len(blocks), 2)).astype("<f2")
    for column, offset in enumerate(HALVES.get(quant.name, [])):
        blocks[:, offset : offset + 2] = scales[:, column : column + 1].view(np.uint8)
    if quant.name == "IQ1_M":
        number = scales[:, 0].view("<u2")
        for word in range(4):
            nibble = (number >> 4 * word & 0x0F).astype(np.uint8)
            blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 0x0F | nibble << 4
    return blocks.reshape(n_rows, n_blocks * quant.type_size)


def by_reference(raw: NDArray[np.uint8], number: int) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return reference.dequantize(raw, GGMLQuantizationType(number))


def by_torch(raw: NDArray[np.uint8], number: int) -> NDArray[np.float32]:
    return dequantise(torch.from_numpy(raw), number).numpy()


def q1_0_oracle(block: bytes) -> Iterator[float]:
    """Read Q1_0: a half scale, then 128 bits: bit j % 8 of byte j // 8 is set if weight j > 0."""
    (scale,) = struct.unpack_from("<e", block)
    for j in range(128):
        yield scale if block[2 + j // 8] & 1 << j % 8 else -scale


def q2_0_oracle(block: bytes) -> Iterator[float]:
    """Read Q2_0: a half scale, then 64 codes of two bits, lowest first, of (code - 1) * scale."""
    (scale,) = struct.unpack_from("<e", block)
    for j in range(64):
        code = block[2 + j // 4] // 4 ** (j % 4) % 4
        yield (code - 1) * scale


def test_every_type_of_the_reference_can_be_dequantised() -> None:
    """Nothing that `gguf.quants` can read is missing, and Q1_0 and Q2_0 come on top."""
    assert {*KNOWN_TO_REFERENCE, Q1_0, Q2_0} <= set(QUANTS)


@every_type
def test_quant_agrees_with_the_torch_free_table(number: int) -> None:
    """Name and sizes are those that the file reader goes by."""
    quant, info = QUANTS[number], TYPES[number]
    assert (quant.name, quant.block_size, quant.type_size) == (
        info.name,
        info.block_size,
        info.type_size,
    )


@every_type
def test_block_reader_has_the_shape_it_declares(number: int) -> None:
    """(n, type_size) bytes become (n, block_size) float32, also when n is zero."""
    quant = QUANTS[number]
    for n_blocks in (0, 1, 5):
        blocks = torch.from_numpy(random_rows(quant, n_blocks, 1))
        values = quant.dequantise_blocks(blocks)
        assert values.dtype == torch.float32
        assert values.shape == (n_blocks, quant.block_size)


@pytest.mark.parametrize("number", KNOWN_TO_REFERENCE, ids=lambda number: QUANTS[number].name)
def test_random_bytes_dequantise_to_the_bits_of_the_reference(number: int) -> None:
    """Every code, sign and scale, infinities and subnormals included."""
    n_blocks = 20_000 // QUANTS[number].block_size
    raw = random_rows(QUANTS[number], 20, n_blocks)
    assert_same_bits(by_torch(raw, number), by_reference(raw, number))


@pytest.mark.parametrize("number", KNOWN_TO_REFERENCE, ids=lambda number: QUANTS[number].name)
def test_realistic_scales_dequantise_to_the_bits_of_the_reference(number: int) -> None:
    """With scales as in real models all numbers are finite and most are not zero."""
    quant = QUANTS[number]
    raw = realistic_rows(quant, 8, 8_000 // quant.block_size)
    values = by_torch(raw, number)
    if quant.name in HALVES or quant.name == "IQ1_M":
        assert np.isfinite(values).all()
        assert np.count_nonzero(values) > values.size / 2
    assert_same_bits(values, by_reference(raw, number))


@pytest.mark.parametrize("number", [F16, BF16], ids=["F16", "BF16"])
def test_every_16_bit_float_widens_exactly(number: int) -> None:
    """All 65536 patterns."""
    raw = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(1, -1)
    assert_same_bits(by_torch(raw, number), by_reference(raw, number))


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_scale_and_code_of_the_4_bit_floats_matches(name: str) -> None:
    """All 256 scale bytes times all 16 codes."""
    number = int(GGMLQuantizationType[name])
    quant = QUANTS[number]
    raw = random_rows(quant, 256, 1)
    n_codes = quant.block_size // 2
    raw[:, : quant.type_size - n_codes] = np.arange(256, dtype=np.uint8)[:, None]
    raw[:, -n_codes:] = np.resize(np.array([0x10 * c + (c + 8) % 16 for c in range(16)]), n_codes)
    assert_same_bits(by_torch(raw, number), by_reference(raw, number))


@pytest.mark.parametrize("rows", [random_rows, realistic_rows], ids=["random", "realistic"])
@pytest.mark.parametrize(
    ("number", "oracle"), [(Q1_0, q1_0_oracle), (Q2_0, q2_0_oracle)], ids=["Q1_0", "Q2_0"]
)
def test_one_and_two_bit_types_follow_their_layout(
    number: int,
    oracle: Callable[[bytes], Iterator[float]],
    rows: Callable[[Quant, int, int], NDArray[np.uint8]],
) -> None:
    """Against a loop over single elements, since the reference knows neither type."""
    quant = QUANTS[number]
    raw = rows(quant, 10, 6)
    blocks = raw.reshape(-1, quant.type_size)
    wanted = [value for block in blocks for value in oracle(block.tobytes())]
    with np.errstate(invalid="ignore"):
        assert_same_bits(by_torch(raw, number), np.array(wanted, np.float32).reshape(10, -1))


@pytest.mark.parametrize("number", CODED, ids=lambda number: QUANTS[number].name)
def test_codes_are_few_numbers_on_scales_that_give_the_weights(number: int) -> None:
    """So that a product may count in whole numbers: at most 16 of them, in signed bytes."""
    quant = QUANTS[number]
    assert quant.codes_of is not None
    raw = realistic_rows(quant, 16, 16).reshape(-1, quant.type_size)
    scales, values = quant.codes_of(torch.from_numpy(raw))
    assert (scales.dtype, values.dtype) == (torch.float32, torch.int8)
    assert values.shape == (len(raw), quant.block_size)
    assert 2 <= len(values.unique()) <= 16
    part = quant.block_size // scales.shape[1]
    assert part >= 16
    weights = scales.numpy().repeat(part, 1) * values.numpy().astype(np.float32)
    assert_same_bits(weights, by_torch(raw, number))


@pytest.mark.parametrize("name", INTEGERS_AND_F64)
def test_wide_and_integer_types_are_rounded_to_float32(name: str) -> None:
    """Plain numbers are converted as numpy does."""
    number = int(GGMLQuantizationType[name])
    raw = random_rows(QUANTS[number], 4, 500)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = raw.view(INTEGERS_AND_F64[name]).astype(np.float32)
    assert_same_bits(by_torch(raw, number), wanted)


@every_type
@given(data=st.data())
def test_a_slice_dequantises_to_the_slice_of_the_whole(number: int, data: st.DataObject) -> None:
    """Any rows and any block-aligned columns, so that a rank may read only its part."""
    quant, (n_rows, n_blocks) = QUANTS[number], (4, 5)
    raw = torch.from_numpy(random_rows(quant, n_rows, n_blocks))
    top, bottom = sorted(data.draw(st.tuples(*[st.integers(0, n_rows)] * 2), label="rows"))
    left, right = sorted(data.draw(st.tuples(*[st.integers(0, n_blocks)] * 2), label="blocks"))
    part = raw[top:bottom, left * quant.type_size : right * quant.type_size]
    whole = dequantise(raw, number)[top:bottom, left * quant.block_size : right * quant.block_size]
    assert_same_bits(dequantise(part, number).numpy(), whole.contiguous().numpy())


@every_type
def test_chunks_join_without_a_seam(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than a chunk, with a shorter last one, has the same bits."""
    raw = torch.from_numpy(random_rows(QUANTS[number], 3, 13))
    whole = dequantise(raw, number)
    monkeypatch.setattr(dequantise_module, "_CPU_CHUNK", 10 * QUANTS[number].block_size)
    assert_same_bits(dequantise(raw, number).numpy(), whole.numpy())


@every_type
def test_bytes_at_an_odd_address_can_be_read(number: int) -> None:
    """A file may place its data anywhere."""
    raw = random_rows(QUANTS[number], 6)
    shifted = torch.from_numpy(np.concatenate([[np.uint8(0)], raw]))[1:]
    assert_same_bits(dequantise(shifted, number).numpy(), by_torch(raw, number))


@every_type
def test_the_bytes_are_left_alone(number: int) -> None:
    """Neither does the call change them, nor does its result alias them."""
    raw = torch.from_numpy(random_rows(QUANTS[number], 2, 2))
    before = raw.clone()
    dequantise(raw, number).zero_()
    assert torch.equal(raw, before)


@every_type
def test_the_result_lies_on_the_device_of_the_bytes(number: int) -> None:
    """No step or lookup table is bound to the CPU (seen on the device that only tracks shapes)."""
    raw = torch.from_numpy(random_rows(QUANTS[number], 2, 3, 2)).to("meta")
    values = dequantise(raw, number)
    assert values.device.type == "meta"
    assert values.shape == (2, 3, 2 * QUANTS[number].block_size)


@every_type
def test_out_receives_the_values_in_its_own_type(number: int) -> None:
    """A given tensor is filled and returned, rounded once from float32."""
    raw = torch.from_numpy(realistic_rows(QUANTS[number], 3, 4))
    values = dequantise(raw, number)
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    assert dequantise(raw, number, out=out) is out
    assert_same_bits(out.float().numpy(), values.bfloat16().float().numpy())


@pytest.mark.parametrize("shape", [(2, 64), (3, 32), (64,)])
def test_an_out_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """Rather than filled in part or reshaped."""
    with pytest.raises(ValueError, match="out of"):
        dequantise(torch.zeros(2, 18, dtype=torch.uint8), 2, out=torch.empty(shape))


@pytest.mark.parametrize("number", [9, 15, 5, 1000, -1])
def test_an_unknown_type_is_refused(number: int) -> None:
    """Types that are never stored, removed ones, and nonsense."""
    with pytest.raises(ValueError, match=f"GGML type {number} cannot"):
        dequantise(torch.zeros(18, dtype=torch.uint8), number)


@pytest.mark.parametrize(
    "raw",
    [
        torch.zeros(2, 17, dtype=torch.uint8),
        torch.zeros(2, 18, dtype=torch.int8),
        torch.tensor(0, dtype=torch.uint8),
    ],
    ids=["cut block", "not bytes", "no dimension"],
)
def test_what_is_no_row_of_blocks_is_refused(raw: torch.Tensor) -> None:
    """The message names the type and what its rows are made of."""
    with pytest.raises(ValueError, match="Q4_0 rows are bytes in blocks of 18"):
        dequantise(raw, 2)
