"""Opening whole files: the same content as the reference reader, and reads that stay safe."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter

from engine.errors import EngineError, InvalidGGUF, ModelFileError
from engine.formats.gguf.reader import GGUFFile
from engine.formats.gguf.tensors import TYPES, TensorInfo
from tests.helpers import raw_gguf
from tests.helpers.golden import golden_path
from tests.helpers.tiny_gguf import tiny_gguf

GOLDEN = (
    "llama-gqa-q4_k_m",
    "llama-yarn-bias-q8_0",
    "qwen2-q4_k_m",
    "qwen3-q4_k_m",
    "gptoss-mxfp4",
    "gemma4-e2b-q5_1",
    "exaone4-64l-swa-q4_0",
    "granitehybrid-q4_k_m",
    "mamba-q5_0",
    "deepseek2-lite-q4_0",
    "types-f32",
    "types-bf16-pure",
    "types-iq1_m-pure",
    "types-tq2_0-pure",
    "trained/bitllama-3M-IQ4_XS",
    "tokenizers/ggml-vocab-phi-3",
)


def assert_same_as_reference(path: Path) -> None:
    reference = GGUFReader(path)
    keys = [key for key in reference.fields if not key.startswith("GGUF.")]
    with GGUFFile.open(path) as file:
        assert list(file.meta.keys()) == keys
        for key in keys:
            np.testing.assert_equal(file.meta.get(key), reference.fields[key].contents())
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for expected in reference.tensors:
            tensor = file.tensors[expected.name]
            assert tensor.type.name == expected.tensor_type.name
            assert tensor.shape == tuple(reversed(expected.shape.tolist()))
            assert tensor.offset == expected.data_offset
            assert (tensor.n_elements, tensor.n_bytes) == (expected.n_elements, expected.n_bytes)
            assert file.raw(tensor).read().tobytes() == expected.data.tobytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_reference_model_reads_as_with_the_reference_reader(name: str) -> None:
    """Names, shapes, types, offsets, bytes and metadata agree."""
    assert_same_as_reference(golden_path(f"{name}.gguf"))


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_1"])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_written_model_reads_as_with_the_reference_reader(
    tmp_path: Path, arch: str, quant: str
) -> None:
    """Both vocabularies and the types that the reference package writes agree."""
    extra = {"a.list": [1.5, 2.5], "a.flag": True, "negative": -7, "x": np.ones((2, 3, 4), "f4")}
    path = tiny_gguf(tmp_path / "m.gguf", arch=arch, quant=quant, qkv_bias=True, extra=extra)
    assert_same_as_reference(path)


def test_a_custom_alignment_moves_the_data(tmp_path: Path) -> None:
    """Offsets count from the header's end, padded to general.alignment."""
    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(4096)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_reference(path)


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    """Version 3 only added big-endian files."""
    path = tmp_path / "v2.gguf"
    entry = raw_gguf.tensor("t", [8])
    path.write_bytes(raw_gguf.gguf([], [entry], bytes(range(32)), version=2))
    with GGUFFile.open(path) as file:
        assert file.version == 2
        assert file.raw(file.tensors["t"]).read().tobytes() == bytes(range(32))


def test_the_shape_is_in_torch_order(tmp_path: Path) -> None:
    """The file's first size is the contiguous one and comes last."""
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q4_0", tokenizer=False, n_vocab=50)
    with GGUFFile.open(path) as file:
        tensor = file.tensors["token_embd.weight"]
        assert tensor.shape == (50, 64)
        assert (tensor.n_rows, tensor.row_bytes, tensor.n_bytes) == (50, 36, 1800)
        assert file.raw(tensor).shape == (50, 36)
        assert file.n_bytes == path.stat().st_size
        assert (file.path, file.paths) == (path, (path,))


def test_a_tensor_of_three_axes_keeps_them(tmp_path: Path) -> None:
    """Experts are stacked along the first axis."""
    extra = {"experts": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
    with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf", extra=extra)) as file:
        rows = file.raw(file.tensors["experts"]).read().view(np.float32)
        np.testing.assert_array_equal(rows, np.arange(24).reshape(2, 3, 4))


def test_what_was_read_is_not_the_file(tmp_path: Path) -> None:
    """Nobody changes the model file by accident."""
    path = tiny_gguf(tmp_path / "m.gguf")
    before = path.read_bytes()
    with GGUFFile.open(path) as file:
        raw = file.raw(file.tensors["output_norm.weight"])
        read = raw.read()
        read += 1
        assert not np.array_equal(raw.read(), read)
    assert path.read_bytes() == before


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    """Closing twice is fine, what was read stays, and more is refused."""
    file = GGUFFile.open(tiny_gguf(tmp_path / "m.gguf"))
    tensor = file.tensors["output_norm.weight"]
    view = file.raw(tensor).read()
    before = view.copy()
    file.close()
    file.close()
    np.testing.assert_array_equal(view, before)
    assert len(file.meta.strs("tokenizer.ggml.tokens")) > 256
    with pytest.raises(ValueError, match="closed"):
        file.raw(tensor).read()


def test_nothing_stays_open(tmp_path: Path) -> None:
    """Neither a closed file nor one that was refused holds a handle."""
    good = tiny_gguf(tmp_path / "good.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(good.read_bytes()[:-64])
    with GGUFFile.open(good):
        assert "good.gguf" in open_names()
    with pytest.raises(InvalidGGUF):
        GGUFFile.open(bad)
    assert not {"good.gguf", "bad.gguf"} & open_names()


def open_names() -> set[str]:
    return {Path(file.path).name for file in psutil.Process().open_files()}


def test_rows_of_a_fused_matrix_are_a_tensor(tmp_path: Path) -> None:
    """A row range has the same bytes as the slice of the whole."""
    with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf", quant="Q8_0")) as file:
        fused = file.tensors["blk.0.ffn_up.weight"]
        part = fused.rows(32, 80, "part")
        assert (part.name, part.shape, part.type) == ("part", (48, 64), fused.type)
        np.testing.assert_array_equal(file.raw(part).read(), file.raw(fused).read()[32:80])


def test_elements_of_a_vector_are_a_tensor(tmp_path: Path) -> None:
    """A fused bias is cut by elements."""
    with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf")) as file:
        fused = file.tensors["output_norm.weight"]
        part = fused.rows(10, 30, "part")
        expected = file.raw(fused).read().view(np.float32)[10:30]
        np.testing.assert_array_equal(file.raw(part).read().view(np.float32), expected)


@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    [((4, 32), -1, 2), ((4, 32), 2, 5), ((4, 32), 2, 2), ((2, 4, 32), 0, 1), ((64,), 16, 64)],
)
def test_rows_that_are_none_are_refused(shape: tuple[int, ...], start: int, stop: int) -> None:
    """Outside, empty, of a stack, or through a block."""
    tensor = TensorInfo("t", TYPES[raw_gguf.GGML_Q4_0], shape, part=0, offset=0)
    with pytest.raises(ValueError, match=r"rows|block"):
        tensor.rows(start, stop, "part")


@pytest.mark.parametrize("entries", [[], [raw_gguf.entry("a", raw_gguf.U32, raw_gguf.u32(1))]])
def test_a_file_without_tensors_opens(tmp_path: Path, entries: list[bytes]) -> None:
    """Vocabularies and bare metadata are files of their own."""
    path = tmp_path / "meta.gguf"
    path.write_bytes(raw_gguf.gguf(entries, alignment=1))
    with GGUFFile.open(str(path)) as file:
        assert (len(file.tensors), len(file.meta)) == (0, len(entries))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The whole path, since it may be a typing error in a folder."""
    path = tmp_path / "no" / "model.gguf"
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000])
def test_an_impossible_path_is_a_sentence(tmp_path: Path, name: str) -> None:
    """A folder, a name no system takes, one that is too long."""
    with pytest.raises(ModelFileError, match=r"folder|cannot be read"):
        GGUFFile.open(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    """Opening one would block until something writes to it."""
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile.open(pipe)


def test_a_forbidden_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The permission is simulated: the tests may run as root."""
    path = tiny_gguf(tmp_path / "m.gguf")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFileError, match="not allowed to read"):
        GGUFFile.open(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"Dear diary, ...", "does not begin with 'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(60), "PyTorch or zip archive"),
        (b"tjgg" + bytes(60), "before August 2023"),
        (b"GGUF", "truncated"),
        (raw_gguf.gguf(version=1), "version is 1,"),
        (raw_gguf.gguf(version=4), "version is 4,"),
    ],
)
def test_other_content_is_recognised(tmp_path: Path, content: bytes, reason: str) -> None:
    """The message says what the file is instead."""
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidGGUF, match=reason):
        GGUFFile.open(path)


def test_a_big_endian_file_says_so(tmp_path: Path) -> None:
    """Written by the reference writer for such machines."""
    path = tmp_path / "big.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidGGUF, match="big-endian"):
        GGUFFile.open(path)


def test_every_error_is_one_sentence_with_the_file_and_a_hint(tmp_path: Path) -> None:
    """What the window and the command line show."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(EngineError) as caught:
        GGUFFile.open(path)
    assert str(caught.value).startswith("broken.gguf is not a usable GGUF file: ")
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_reading_a_header_needs_no_torch() -> None:
    """Planner and window import this package before torch is there."""
    code = "import sys, engine.formats.gguf; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[4])


def test_every_type_of_the_reference_package_has_the_same_size() -> None:
    """The row sizes above rest on the table."""
    for kind, (block_size, type_size) in gguf.GGML_QUANT_SIZES.items():
        info = TYPES[int(kind)]
        assert (info.block_size, info.type_size) == (block_size, type_size)
