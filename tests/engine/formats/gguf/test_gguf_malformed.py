"""Hostile and broken files: whatever the bytes, a header or an `EngineError`, at once."""

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, InvalidGGUF, UnsupportedQuant
from engine.formats.gguf import header
from engine.formats.gguf.reader import GGUFFile
from tests.helpers.golden import golden_path
from tests.helpers.raw_gguf import (
    ARRAY,
    F32,
    GGML_Q4_0,
    STRING,
    U8,
    U32,
    array,
    entry,
    gguf,
    string,
    strings,
    tensor,
    u32,
    u64,
)

BOUND_S = 1.0  # of processor time: a generous multiple of the milliseconds that it takes


def read_everything(path: Path) -> None:
    """Open a file and read all that it holds."""
    with GGUFFile.open(path) as file:
        for key in file.meta.keys():  # noqa: SIM118
            file.meta.get(key)
            file.meta.describe(key)
        for info in file.tensors.values():
            file.raw(info).flat()[-1].read()


def outcome(path: Path) -> str:
    """Return the error that a person would read, or nothing; fail if it takes long."""
    started = time.process_time()
    try:
        read_everything(path)
    except EngineError as error:
        return str(error)
    finally:
        assert time.process_time() - started < BOUND_S
    return ""


def check(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    return outcome(path)


INT64_MAX = 2**63 - 1
ALIGNMENT = "general.alignment"
F32_32 = bytes(128)  # data of a tensor of 32

ATTACKS = {
    "element count overflow": (
        gguf([], [tensor("t", [INT64_MAX, 2])]),
        "'t' claims an impossible size",
    ),
    "padded size wraps to zero": (
        gguf([], [tensor("t", [4, 2**30 - 1, 2**30 + 1, 1])]),
        "'t' claims an impossible size",
    ),
    "product of 2**80": (gguf([], [tensor("t", [2**40, 2**40])]), "'t' claims an impossible size"),
    "first size zero": (gguf([], [tensor("t", [0, 4])], F32_32), "'t' has an empty dimension"),
    "last size zero": (gguf([], [tensor("t", [4, 0])], F32_32), "'t' has an empty dimension"),
    "no dimensions": (gguf([], [tensor("t", [])], F32_32), "'t' has 0 dimensions"),
    "five dimensions": (gguf([], [tensor("t", [1] * 5)], F32_32), "'t' has 5 dimensions"),
    "2**60 entries": (gguf(n_entries=2**60), "claims to have 1152921504606846976 metadata"),
    "2**60 tensors": (gguf(n_tensors=2**60), "claims to have 1152921504606846976 tensors"),
    "more entries than any model": (gguf(n_entries=2**14 + 1), "claims to have 16385 metadata"),
    "more tensors than any model": (gguf(n_tensors=2**16 + 1), "claims to have 65537 tensors"),
    "more texts than any model": (
        gguf([strings("a", ["x"]), array("k", STRING, 2**22, b"")]),
        "its metadata claims to have 4194305 strings",
    ),
    "more entries than bytes": (gguf(n_entries=1000), "truncated"),
    "more tensors than bytes": (gguf(n_tensors=1000), "truncated"),
    "unknown value type": (gguf([entry("k", 13, u64(0))]), "'k' has the unknown type 13"),
    "unknown array type": (gguf([array("k", 99, 2**20, b"")]), "'k' has the unknown type 99"),
    "array of 2**60": (gguf([array("k", U8, 2**60, b"")]), f"'k' claims to have {2**60} elements"),
    "array past the end": (gguf([array("k", U32, 1000, b"")]), "truncated"),
    "strings past the end": (gguf([array("k", STRING, 1000, string("a"))]), "truncated"),
    "string of 2**64-1": (gguf([entry("k", STRING, u64(2**64 - 1))]), "truncated"),
    "string of 2**62 in an array": (gguf([array("k", STRING, 2, u64(2**62))]), "truncated"),
    "key of 2**40": (gguf([u64(2**40) + bytes(32)]), f"claims to be {2**40} bytes"),
    "nested arrays": (
        gguf([array("k", ARRAY, 1, (u32(ARRAY) + u64(1)) * 10_000)]),
        "'k' is an array of arrays",
    ),
    "duplicate key": (gguf([entry("k", U8, b"\0")] * 2), "the key 'k' twice"),
    "key not UTF-8": (gguf([entry(b"\xff", U8, b"\0")]), "key is not valid UTF-8"),
    "name not UTF-8": (gguf([], [tensor(b"\xff", [32])], F32_32), "name is not valid UTF-8"),
    "duplicate tensor": (
        gguf([], [tensor("t", [32]), tensor("t", [32], offset=128)], F32_32 * 2),
        "two tensors named 't'",
    ),
    "overlapping data": (
        gguf([], [tensor("a", [32]), tensor("b", [32], offset=96)], F32_32 * 2),
        "'a' and 'b' overlap",
    ),
    "offset not aligned": (gguf([], [tensor("t", [2], offset=4)], F32_32), "not aligned to 32"),
    "offset past the end": (
        gguf([], [tensor("t", [32], offset=1024)], F32_32),
        "truncated: 1024 of",
    ),
    "offset wraps": (
        gguf([], [tensor("t", [32], offset=2**64 - 32)], F32_32),
        "'t' claims an impossible size or position",
    ),
    "data cut short": (gguf([], [tensor("t", [32])], bytes(100)), "truncated: 28 of 192 bytes"),
    "unknown tensor type": (gguf([], [tensor("t", [32], 9999)], F32_32), "as type 9999"),
    "removed tensor type": (gguf([], [tensor("t", [32], 4)], F32_32), "'t' as type 4"),
    "row is no whole block": (
        gguf([], [tensor("t", [48], GGML_Q4_0)], F32_32),
        "the tensor 't' has rows of 48 elements, not a multiple of the Q4_0 block size 32",
    ),
    "alignment zero": (gguf([entry(ALIGNMENT, U32, u32(0))]), "alignment is 0"),
    "alignment three": (gguf([entry(ALIGNMENT, U32, u32(3))]), "alignment is 3"),
    "alignment a float": (gguf([entry(ALIGNMENT, F32, bytes(4))]), "'general.alignment'"),
    "alignment of 2**31": (
        gguf([entry(ALIGNMENT, U32, u32(2**31))], [tensor("t", [32])], F32_32),
        "truncated",
    ),
    "name with control characters": (
        gguf([], [tensor("a\n\x1b[31m\u202eb", [0])], F32_32),
        r"'a\n\x1b[31m\u202eb' has an empty dimension",
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_meets_its_sentence(tmp_path: Path, name: str) -> None:
    """Known attacks on parsers of this format, each refused for its own reason."""
    content, reason = ATTACKS[name]
    message = check(tmp_path, content)
    assert reason in message
    assert message.isprintable()
    assert len(message) < 300


def test_an_unknown_type_is_a_matter_of_support(tmp_path: Path) -> None:
    """The file is well-formed, so the advice is another quantisation."""
    path = tmp_path / "new.gguf"
    path.write_bytes(gguf([], [tensor("t", [32], 9999)], F32_32))
    with pytest.raises(UnsupportedQuant) as caught:
        GGUFFile.open(path)
    assert "quantisation" in caught.value.hint


def test_a_long_string_in_an_array_cannot_leave_the_file(tmp_path: Path) -> None:
    """Lengths that end beyond the data, at each width that an offset may have."""
    for n in (1, 9, 2**16, 2**31, 2**32, 2**62, 2**63 - 8, 2**63, 2**64 - 8, 2**64 - 1):
        for count in (1, 2, 3):
            content = gguf([array("k", STRING, count, u64(n))], alignment=1)
            assert "truncated" in check(tmp_path, content), (n, count)


def test_refusing_huge_claims_takes_no_memory(tmp_path: Path) -> None:
    """Nothing is allocated for what a file only claims to have."""
    tracemalloc.start()
    for content, _ in ATTACKS.values():
        check(tmp_path, content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000  # the nested arrays themselves are 120 kB


def test_a_header_that_does_not_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of gigabytes in metadata is refused before it is read."""
    monkeypatch.setattr("engine.formats.gguf.reader.HEADER_LIMIT", 1000)
    message = check(tmp_path, gguf([entry("k", STRING, string("x" * 2000))]))
    assert f"longer than {header.HEADER_LIMIT >> 20} MiB" in message


def small_file() -> bytes:
    """Return a file of a kilobyte with every kind of value and three tensors."""
    entries = [
        entry("general.architecture", STRING, string("llama")),
        entry(ALIGNMENT, U32, u32(32)),
        array("scores", F32, 4, struct.pack("<4f", 1, 2, 3, 4)),
        strings("tokens", ["<unk>", "▁the", "", "x"]),
        entry("split.count", U32, u32(1)),
    ]
    tensors = [
        tensor("a", [32, 2]),
        tensor("b", [64], GGML_Q4_0, offset=256),
        tensor("c", [2, 2, 2], offset=320),
    ]
    return gguf(entries, tensors, bytes(range(256)) + bytes(96))


SMALL = small_file()


def test_the_small_file_is_good(tmp_path: Path) -> None:
    """Else the mutations below would prove nothing."""
    assert check(tmp_path, SMALL) == ""


def test_every_truncation_says_truncated(tmp_path: Path) -> None:
    """Cut at each byte; only a cut through the magic looks like another file."""
    for n in range(4, len(SMALL)):
        assert "truncated" in check(tmp_path, SMALL[:n]), n
    for n in range(1, 4):
        assert "does not begin with" in check(tmp_path, SMALL[:n])


NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 9, 12, 255, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
AT = st.integers(0, len(SMALL) - 1)
MUTATIONS = st.one_of(
    st.tuples(AT, st.binary(min_size=1, max_size=4)),
    st.tuples(AT, NUMBERS.map(u64)),
    st.tuples(AT, NUMBERS.map(lambda n: u32(n & 0xFFFFFFFF))),
)


@settings(
    max_examples=500,
    deadline=None,  # the time is checked against BOUND_S
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mutations=st.lists(MUTATIONS, min_size=1, max_size=4), end=st.integers(0, len(SMALL)))
def test_no_mutation_breaks_the_reader(
    tmp_path: Path, mutations: list[tuple[int, bytes]], end: int
) -> None:
    """Overwritten at random places, and cut half of the time: never anything but an EngineError."""
    content = bytearray(SMALL)
    for at, new in mutations:
        content[at : at + len(new)] = new
    check(tmp_path, bytes(content))
    check(tmp_path, bytes(content[:end]))


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tail=st.binary(max_size=200))
def test_noise_after_the_magic_breaks_nothing(tmp_path: Path, tail: bytes) -> None:
    """Any bytes may follow a good beginning."""
    check(tmp_path, b"GGUF" + u32(3) + tail)
    check(tmp_path, gguf(n_entries=3, n_tensors=2, alignment=1) + tail)


def test_collected_broken_files_open_or_are_refused() -> None:
    """What fuzzers found in other readers."""
    folder = golden_path("malformed")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    messages = {path.name: outcome(path) for path in files}
    assert len(messages) > 100
    assert messages["valid-small.gguf"] == messages["v3-empty.bin"] == ""
    assert messages["llama3-8b.gguf"] == ""  # metadata alone
    assert "impossible" in messages["tensor-huge-dims.bin"]
    assert "truncated" in messages["kv-huge-strlen.bin"]
    assert "tensors" in messages["crash-69e8aa7487115a5484cc9c94c0decd84c1361bcb"]


def test_errors_are_of_the_file(tmp_path: Path) -> None:
    """So that the caller knows which of several it was."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(SMALL[:-1])
    with pytest.raises(InvalidGGUF) as caught:
        GGUFFile.open(path)
    assert caught.value.path == str(path)
