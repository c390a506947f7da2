"""Models in several files."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.errors import InvalidGGUF, MissingShard
from engine.formats.gguf.reader import GGUFFile
from tests.helpers.raw_gguf import STRING, U32, entry, gguf, string, tensor, u32
from tests.helpers.tiny_gguf import split_gguf, tiny_gguf

N = 3
BYTES = bytes(128)  # data of a tensor of 32


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return split_gguf(tiny_gguf(tmp_path / "whole.gguf", quant="Q8_0"), N)


@pytest.mark.parametrize("asked", range(N))
def test_any_part_opens_the_whole(parts: list[Path], asked: int) -> None:
    """Tensors, bytes and metadata are those of the unsplit file."""
    with (
        GGUFFile.open(parts[0].with_name("whole.gguf")) as whole,
        GGUFFile.open(parts[asked]) as file,
    ):
        assert file.paths == tuple(parts)
        assert file.path == parts[0]
        assert file.n_bytes == sum(path.stat().st_size for path in parts)
        assert list(file.tensors) == list(whole.tensors)
        assert {tensor.part for tensor in file.tensors.values()} == set(range(N))
        for key in whole.meta.keys():  # noqa: SIM118
            assert file.meta.get(key) == whole.meta.get(key)
        for name, expected in whole.tensors.items():
            np.testing.assert_array_equal(
                file.raw(file.tensors[name]).read(), whole.raw(expected).read()
            )


def test_row_views_stay_in_their_part(parts: list[Path]) -> None:
    """A view keeps the part that its tensor is in."""
    with GGUFFile.open(parts[0]) as file:
        fused = file.tensors["blk.1.ffn_down.weight"]
        assert fused.part == N - 1
        view = file.raw(fused.rows(8, 16, "part")).read()
        np.testing.assert_array_equal(view, file.raw(fused).read()[8:16])


def test_missing_parts_are_named(parts: list[Path]) -> None:
    """Whichever part was opened."""
    parts[0].unlink()
    parts[2].unlink()
    with pytest.raises(MissingShard) as caught:
        GGUFFile.open(parts[1])
    assert caught.value.missing == [parts[0].name, parts[2].name]


def test_a_long_list_of_missing_parts_is_cut(tmp_path: Path) -> None:
    """A part of 99999 makes no message of megabytes."""
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(part(0, 99999))
    with pytest.raises(MissingShard, match="99990 more") as caught:
        GGUFFile.open(path)
    assert len(str(caught.value)) < 500


def test_a_renamed_part_says_what_it_should_be_called(parts: list[Path]) -> None:
    """Its siblings cannot be found under another name."""
    renamed = parts[1].rename(parts[1].with_name("model.gguf"))
    with pytest.raises(InvalidGGUF, match="-00001-of-00003") as caught:
        GGUFFile.open(renamed)
    assert "names" in caught.value.hint


def test_parts_with_swapped_names_are_refused(parts: list[Path]) -> None:
    """The name says one place, the content another."""
    shutil.copy(parts[0], parts[1])
    with pytest.raises(InvalidGGUF, match=r"00002-of-00003.* contains part 1 of 3"):
        GGUFFile.open(parts[0])


def test_a_damaged_part_is_named(parts: list[Path]) -> None:
    """Not the one that was opened."""
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    with pytest.raises(InvalidGGUF, match=r"00003-of-00003.* truncated"):
        GGUFFile.open(parts[0])


def test_a_single_part_needs_no_siblings(tmp_path: Path) -> None:
    """A split of one, and a whole file with the name of a part."""
    (only,) = split_gguf(tiny_gguf(tmp_path / "whole.gguf"), 1)
    named = tiny_gguf(tmp_path / "alone-00001-of-00002.gguf")
    for path in (only, named):
        with GGUFFile.open(path) as file:
            assert file.paths == (path,)


def test_a_link_finds_parts_beside_itself(tmp_path: Path) -> None:
    """Download caches keep the bytes elsewhere under other names."""
    source = split_gguf(tiny_gguf(tmp_path / "whole.gguf"), 2)
    cache = tmp_path / "cache"
    cache.mkdir()
    for i, path in enumerate(source):
        blob = path.rename(tmp_path / f"blob{i}")
        try:
            (cache / path.name).symlink_to(blob)
        except OSError:
            pytest.skip("this system makes no links")
    with GGUFFile.open(cache / source[0].name) as file:
        assert len(file.paths) == 2


def part(
    no: int, count: int, *, name: str = "", arch: str | None = "llama", total: int | None = None
) -> bytes:
    entries = [entry("split.no", U32, u32(no)), entry("split.count", U32, u32(count))]
    if arch is not None:
        entries.append(entry("general.architecture", STRING, string(arch)))
    if total is not None:
        entries.append(entry("split.tensors.count", U32, u32(total)))
    return gguf(entries, [tensor(name or f"t{no}", [32])], BYTES)


def write_pair(tmp_path: Path, first: bytes, second: bytes) -> Path:
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    paths[0].write_bytes(first)
    paths[1].write_bytes(second)
    return paths[0]


@pytest.mark.parametrize("arch", ["llama", None])
def test_agreeing_parts_open(tmp_path: Path, arch: str | None) -> None:
    """Later parts may leave the architecture out."""
    path = write_pair(tmp_path, part(0, 2, total=2), part(1, 2, arch=arch, total=2))
    with GGUFFile.open(path) as file:
        assert list(file.tensors) == ["t0", "t1"]


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (part(0, 2), part(1, 2, arch="qwen2"), "00002-of-00002.* architecture differs"),
        (part(0, 2), part(1, 3), "00002-of-00002.* part 2 of 3"),
        (part(0, 2), part(0, 2), "00002-of-00002.* part 1 of 2"),
        (part(0, 2), gguf([], [tensor("t1", [32])], BYTES), "00002-of-00002.* 'split.no'"),
        (part(0, 2), part(1, 2, name="t0"), "00002-of-00002.* 't0' is also in m-00001-of-00002"),
        (part(0, 2, total=5), part(1, 2, total=5), "2 tensors in total"),
        (part(0, 2, arch=None), part(1, 2), "'general.architecture'"),
    ],
)
def test_parts_that_disagree_are_refused(
    tmp_path: Path, first: bytes, second: bytes, reason: str
) -> None:
    """Place, number, architecture, tensors and their total."""
    with pytest.raises(InvalidGGUF, match=reason):
        GGUFFile.open(write_pair(tmp_path, first, second))
