"""Typed reads of the key-value section."""

import pickle
import struct
import tracemalloc
from pathlib import Path

import pytest

from engine.errors import InvalidGGUF
from engine.formats.gguf.metadata import Metadata
from engine.formats.gguf.reader import GGUFFile
from tests.helpers.raw_gguf import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    STRING,
    U8,
    U32,
    U64,
    array,
    entry,
    gguf,
    string,
    strings,
    u32,
    u64,
)


@pytest.fixture
def meta(tmp_path: Path) -> Metadata:
    return read(
        tmp_path,
        entry("general.architecture", STRING, string("llama")),
        entry("u8", U8, b"\xff"),
        entry("i32", I32, struct.pack("<i", -5)),
        entry("u64", U64, u64(2**64 - 1)),
        entry("i64", I64, struct.pack("<q", -(2**63))),
        entry("f32", F32, struct.pack("<f", 0.5)),
        entry("f64", F64, struct.pack("<d", 0.1)),
        entry("yes", BOOL, b"\x01"),
        entry("odd", BOOL, b"\x02"),
        entry("no", BOOL, b"\x00"),
        entry("text", STRING, string("naïve ▁")),
        entry("broken", STRING, string(b"a\xffb")),
        entry("empty", STRING, string("")),
        array("ints", I32, 3, struct.pack("<3i", 1, -2, 3)),
        array("floats", F32, 2, struct.pack("<2f", 0.25, -1)),
        array("flags", BOOL, 3, b"\x00\x01\x05"),
        strings("texts", ["a", "", b"\xc3", "▁b"]),
        array("none", I32, 0, b""),
        array("no texts", STRING, 0, b""),
    )


def read(tmp_path: Path, *entries: bytes) -> Metadata:
    path = tmp_path / "meta.gguf"
    path.write_bytes(gguf(entries))
    with GGUFFile.open(path) as file:
        return file.meta


def test_the_file_is_known_by_its_path(tmp_path: Path, meta: Metadata) -> None:
    """Messages about a value name it, long after the file was closed."""
    assert meta.path == tmp_path / "meta.gguf"
    with pytest.raises(AttributeError):
        meta.path = tmp_path  # type: ignore[misc]


def test_single_values_read_by_their_type(meta: Metadata) -> None:
    """Every width and sign."""
    assert meta.int("u8") == 255
    assert meta.int("i32") == -5
    assert meta.int("u64") == 2**64 - 1
    assert meta.int("i64") == -(2**63)
    assert meta.float("f32") == 0.5
    assert meta.float("f64") == 0.1
    assert [meta.bool(key) for key in ("yes", "odd", "no")] == [True, True, False]
    assert meta.str("text") == "naïve ▁"
    assert meta.str("empty") == ""
    assert meta.architecture == "llama"


def test_lists_read_by_their_type(meta: Metadata) -> None:
    """Empty ones too."""
    assert meta.ints("ints") == [1, -2, 3]
    assert meta.floats("floats") == [0.25, -1.0]
    assert meta.bools("flags") == [False, True, True]
    assert meta.strs("texts") == ["a", "", "\ufffd", "▁b"]
    assert meta.ints("none") == []
    assert meta.strs("no texts") == []


def test_a_float_may_be_stored_as_an_integer(meta: Metadata) -> None:
    """Some converters write rope.freq_base so."""
    value, values = meta.float("i32"), meta.floats("ints")
    assert (value, values) == (-5.0, [1.0, -2.0, 3.0])
    assert {type(v) for v in (value, *values)} == {float}


def test_text_that_is_not_utf8_is_replaced(meta: Metadata) -> None:
    """Vocabularies with broken entries stay usable."""
    assert meta.str("broken") == "a\ufffdb"


def test_a_missing_key_gives_the_default_or_an_error(meta: Metadata) -> None:
    """None is a default like any other."""
    assert meta.int("absent", 3) == 3
    assert meta.str("absent", None) is None
    assert meta.strs("absent", []) == []
    assert meta.int_list("absent", 2, None) is None
    with pytest.raises(InvalidGGUF, match=r"meta\.gguf .* lacks 'absent'"):
        meta.int("absent")
    with pytest.raises(InvalidGGUF, match="lacks 'absent'"):
        meta.int_list("absent", 2)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("int", "f32"),
        ("int", "ints"),
        ("int", "yes"),
        ("float", "text"),
        ("bool", "u8"),
        ("str", "u8"),
        ("str", "texts"),
        ("ints", "i32"),
        ("ints", "floats"),
        ("ints", "texts"),
        ("floats", "flags"),
        ("strs", "text"),
        ("bools", "ints"),
    ],
)
def test_a_wrong_type_is_named_even_with_a_default(meta: Metadata, method: str, key: str) -> None:
    """A default stands for what is missing, not for what is broken."""
    with pytest.raises(InvalidGGUF, match=rf"meta\.gguf .*'{key}' .* instead of"):
        getattr(meta, method)(key, None)


def test_a_value_per_layer_is_repeated_or_cut(meta: Metadata) -> None:
    """Head counts come in both forms."""
    assert meta.int_list("u8", 3) == [255, 255, 255]
    assert meta.int_list("ints", 2) == [1, -2]
    assert meta.int_list("ints", 0) == []
    with pytest.raises(InvalidGGUF, match="3 entries for 4 layers"):
        meta.int_list("ints", 4)
    with pytest.raises(InvalidGGUF, match="'f32'"):
        meta.int_list("f32", 2)


@pytest.mark.parametrize("n", [-1, 2**32 - 1, 2**63])
def test_an_absurd_number_of_layers_allocates_nothing(meta: Metadata, n: int) -> None:
    """A block count is as untrusted as everything else."""
    with pytest.raises(InvalidGGUF, match="layers"):
        meta.int_list("u8", n)


def test_anything_can_be_got(meta: Metadata) -> None:
    """For tools that show a file as it is."""
    assert meta.get("ints") == [1, -2, 3]
    assert meta.get("yes") is True
    assert meta.get("absent") is None
    assert meta.get("absent", 7) == 7


def test_it_is_a_container_of_its_keys(meta: Metadata) -> None:
    """Keys keep the file's order."""
    assert "u8" in meta
    assert "absent" not in meta
    assert list(meta.keys())[:2] == ["general.architecture", "u8"]
    assert len(meta) == len(meta.keys()) == 19


def test_array_lengths_need_no_decoding(meta: Metadata) -> None:
    """And what is no array has none."""
    assert meta.array_length("texts") == 4
    assert meta.array_length("none") == 0
    assert meta.array_length("text") is None
    assert meta.array_length("absent") is None


def test_descriptions_are_short(tmp_path: Path) -> None:
    """One line each, whatever the value."""
    meta = read(
        tmp_path,
        entry("long", STRING, string("line\n" * 1000)),
        strings("many", ["x" * 500] * 10),
        strings("few", ["a"]),
        entry("n", U32, u32(7)),
        entry("yes", BOOL, b"\x01"),
    )
    assert meta.describe("many").startswith("string[10] ['xxxx")
    assert meta.describe("few") == "string[1] ['a']"
    assert (meta.describe("n"), meta.describe("yes")) == ("7", "True")
    for key in list(meta.keys()):
        assert len(meta.describe(key)) <= 100
        assert "\n" not in meta.describe(key)


def test_describing_a_large_array_decodes_its_head_alone(tmp_path: Path) -> None:
    """A vocabulary is described without making an object of each of its tokens."""
    n = 200_000
    meta = read(tmp_path, strings("big", ["token"] * n))
    tracemalloc.start()
    assert meta.describe("big") == f"string[{n}] ['token', 'token', 'token', …]"
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000


@pytest.mark.parametrize("name", ["", "x" * 65, "llama\n"])
def test_an_architecture_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    """It goes into messages and looks up a class."""
    meta = read(tmp_path, entry("general.architecture", STRING, string(name)))
    with pytest.raises(InvalidGGUF, match="architecture"):
        _ = meta.architecture


def test_metadata_pickles(meta: Metadata) -> None:
    """It may cross to another process."""
    copy = pickle.loads(pickle.dumps(meta))
    assert copy.strs("texts") == meta.strs("texts")
    assert copy.int("u8") == 255


def test_the_kinds_are_those_of_the_format() -> None:
    """The test's own numbers, against the reference package."""
    from gguf import GGUFValueType

    pairs = {"UINT8": U8, "UINT32": U32, "STRING": STRING, "ARRAY": ARRAY, "FLOAT64": F64}
    assert {name: GGUFValueType[name].value for name in pairs} == pairs
