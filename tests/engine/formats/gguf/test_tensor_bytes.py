"""Slices of a tensor in a file are those of an array; what fails is a sentence."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.formats.gguf import tensor_bytes
from engine.formats.gguf.tensor_bytes import OpenPart, TensorBytes

OFFSET = 100
SHAPE = (5, 40, 300)


@pytest.fixture
def part(tmp_path: Path) -> Iterator[OpenPart]:
    path = tmp_path / "m.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(OFFSET + 5 * 40 * 300))
    part = OpenPart(path)
    yield part
    part.close()


def whole(part: OpenPart) -> np.ndarray:
    return np.frombuffer(part.path.read_bytes()[OFFSET:], np.uint8).reshape(SHAPE)


CUTS = (slice(None), slice(1, 4), slice(2, 3), slice(2, 2), -1)


@pytest.mark.parametrize("span_bytes", [100, 1000, 1 << 18])
@pytest.mark.parametrize("long_row", [0, 100, 1 << 15])
def test_slices_are_those_of_an_array(
    part: OpenPart, long_row: int, span_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read at a time: single parts of rows, or whole ones."""
    monkeypatch.setattr(tensor_bytes, "LONG_ROW", long_row)
    monkeypatch.setattr(tensor_bytes, "SPAN_BYTES", span_bytes)
    raw, array = TensorBytes.of(part, OFFSET, SHAPE), whole(part)
    for at in product(CUTS, CUTS, (slice(None), slice(7, 250))):
        some, wanted = raw[at], array[at]
        assert (some.shape, some.nbytes) == (wanted.shape, wanted.nbytes)
        np.testing.assert_array_equal(some.read(), wanted)
    np.testing.assert_array_equal(raw[2:4][1][3:].read(), array[3, 3:])
    np.testing.assert_array_equal(raw.flat()[77:99].read(), array.reshape(-1)[77:99])


def test_a_goal_may_have_gaps(part: OpenPart) -> None:
    """A thread fills some rows of each matrix of a buffer."""
    goal = np.zeros(SHAPE, np.uint8)
    raw = TensorBytes.of(part, OFFSET, SHAPE)
    raw[:, 5:9, 10:20].read_into(goal[:, 5:9, 10:20])
    np.testing.assert_array_equal(goal[:, 5:9, 10:20], whole(part)[:, 5:9, 10:20])
    assert goal.any(axis=(0, 2)).sum() == 4
    with pytest.raises(ValueError, match="does not fit"):
        raw.read_into(goal[:, :, 1:])


def test_stacks_of_matrices(part: OpenPart) -> None:
    """A vector is a matrix of one row, and several axes of matrices become one."""
    raw = TensorBytes.of(part, OFFSET, (2, 5, 20, 300))
    assert raw.stack().shape == (10, 20, 300)
    np.testing.assert_array_equal(raw.stack().read(), whole(part).reshape(10, 20, 300))
    assert raw[0, 0].stack().shape == (1, 20, 300)
    assert raw[0, 0, 0].stack().shape == (1, 1, 300)
    with pytest.raises(ValueError, match="uneven"):
        raw[:, 1:3].stack()
    with pytest.raises(ValueError, match="gaps"):
        raw[:, 1:3].flat()


@pytest.mark.parametrize("at", [(0, 0, 0, 0), slice(0, 4, 2), 5])
def test_other_indices_are_refused(part: OpenPart, at: object) -> None:
    """Too many, with a step, or outside."""
    with pytest.raises(IndexError):
        TensorBytes.of(part, OFFSET, SHAPE)[at]


def test_short_reads_go_on(part: OpenPart, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may return less than it was asked for, as networks do."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, to, at: read(file, [to[0][:1000]], at))
    np.testing.assert_array_equal(TensorBytes.of(part, OFFSET, SHAPE).read(), whole(part))


def test_systems_without_reads_by_offset(part: OpenPart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows: threads do not move each other's position."""
    monkeypatch.delattr(os, "preadv")
    raw, array = TensorBytes.of(part, OFFSET, SHAPE), whole(part)
    barrier = threading.Barrier(8)

    def read(index: int) -> bool:
        barrier.wait()
        return all(
            np.array_equal(raw[n % 5].read(), array[n % 5]) for n in range(index, index + 50)
        )

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(8)))


@pytest.mark.parametrize("n_kept", [OFFSET + 5 * 40 * 300 - 1, OFFSET, 0])
@pytest.mark.parametrize("has_preadv", [True, False])
def test_a_shorter_file_is_a_sentence(
    part: OpenPart, n_kept: int, has_preadv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_preadv:
        monkeypatch.delattr(os, "preadv")
    os.truncate(part.path, n_kept)
    with pytest.raises(
        ModelFileError, match=r"^m.gguf became shorter while it was being read\.$"
    ) as e:
        TensorBytes.of(part, OFFSET, SHAPE).read()
    assert e.value.hint == "Copy or download it again."


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV])
def test_a_failing_drive_is_a_sentence(
    part: OpenPart, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken sector, a network that is gone, a drive that was pulled out."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelFileError, match=os.strerror(number)) as caught:
        TensorBytes.of(part, OFFSET, SHAPE).read()
    assert str(caught.value).startswith("m.gguf can no longer be read: ")
    assert "drive" in caught.value.hint
