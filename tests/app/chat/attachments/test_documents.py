"""Text of files: encodings, PDFs, refused files, and where a text may be cut."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat.attachments.documents import NoText, Problem, answer, cuts, read_text
from app.chat.attachments.files import parts_of
from app.chat.message import Attachment, Message, framed
from tests.helpers.pdf import pdf
from tests.helpers.tiny_gguf import tiny_gguf

TEXT = "Grüße, 漢字 🙂\nsecond line\n"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (TEXT.encode(), TEXT), (TEXT.encode("utf-8-sig"), TEXT), (TEXT.encode("utf-16"), TEXT),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), TEXT), ("Grüße".encode("latin-1"), "Grüße"),
        ("„quoted“ – 5 €".encode("cp1252"), "„quoted“ – 5 €"), (b"a\r\nb\rc", "a\nb\nc"),
        (b"tab\tpage\x0c\x1b[1m", "tab\tpage\x0c\x1b[1m"),
    ],
)  # fmt: skip
def test_encodings_are_found(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    assert read_text(path) == text


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", Problem.EMPTY), (b" \n\n", Problem.EMPTY),
        (b"\x89PNG\r\n\x1a\n0000", Problem.PICTURE),
        (b"\xff\xd8\xff\xe0", Problem.PICTURE), (b"GIF89a", Problem.PICTURE),
        (b"RIFF0000WEBPVP8 ", Problem.PICTURE), (b"GGUF\x03\0\0\0", Problem.NO_TEXT),
        (b"\x7fELF\x02\x01\x01\0", Problem.NO_TEXT), (b"PK\x03\x04\x14\0", Problem.NO_TEXT),
        (b"abc\0def", Problem.NO_TEXT), (b"\xff\xfe\0\0a\0\0\0", Problem.NO_TEXT),
        (b"caf\xe9 \x01\x02", Problem.NO_TEXT), (b"%PDF-1.7 nonsense", Problem.DAMAGED),
    ],
)  # fmt: skip
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, problem: Problem) -> None:
    path = tmp_path / "a.dat"
    path.write_bytes(data)
    with pytest.raises(NoText, match=problem):
        read_text(path)


def test_only_files_are_read(tmp_path: Path) -> None:
    """Reading a pipe would block forever."""
    os.mkfifo(tmp_path / "pipe")
    for name, problem in (("", Problem.FOLDER), ("pipe", Problem.NO_FILE), ("x", Problem.NO_FILE)):
        assert answer({"path": str(tmp_path / name), "model": ""}) == {"problem": problem}


def test_a_file_beyond_the_limits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(NoText, match=Problem.TOO_LARGE):
        read_text(path)
    path.write_text("x" * 8_000_001)
    with pytest.raises(NoText, match=Problem.TOO_LONG):
        read_text(path)


def test_a_pdf_has_the_text_of_its_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf("First page", "Second page"))
    assert read_text(path) == "First page\n\nSecond page"


def test_a_pdf_without_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "scan.pdf"
    path.write_bytes(pdf("", ""))
    with pytest.raises(NoText, match=Problem.SCANNED):
        read_text(path)


@given(st.text("ab \n", max_size=9000))
def test_cuts_are_near_each_other_and_end_with_the_text(text: str) -> None:
    found = [0, *cuts(text)]
    assert found[-1] == len(text)
    assert all(0 <= b - a <= 2000 for a, b in pairwise(found))


def test_tokens_are_those_of_the_model(tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path / "m.gguf")
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 1000)
    made = answer({"path": str(path), "model": str(model)})
    marks = made["marks"]
    assert isinstance(marks, list)
    assert marks[-1][0] == 11_000
    import engine

    exact = len(engine.load_tokenizer(model).encode(path.read_text(), add_special=False))
    assert exact <= marks[-1][1] <= exact + len(marks)
    assert answer({"text": path.read_text(), "model": str(model)}) == {"marks": marks}
    assert answer({"path": str(path), "model": "/no/model.gguf"})["marks"] == []
    json.dumps(made)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_parts_have_room_and_leave_nothing_out(sizes: list[int], room: int) -> None:
    marks = tuple((10 * n, sum(sizes[:n])) for n in range(1, len(sizes) + 1))
    parts = parts_of(marks, room)
    if any(size > room for size in sizes) or not sizes:
        assert parts == ()
        return
    assert all(0 < part.n_tokens <= room for part in parts)
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == marks[-1][0]
    assert sum(part.n_tokens for part in parts) == marks[-1][1]


def test_the_frame_names_the_file() -> None:
    files = (Attachment("a.txt", "A\n"), Attachment('b "x"\n.md', "B", part=2, n_parts=3))
    assert framed("Why?", files) == (
        '<file name="a.txt">\nA\n</file>\n\n'
        '<file name="b \'x\' .md" part="2 of 3">\nB\n</file>\n\nWhy?'
    )
    assert framed("", files[:1]) == '<file name="a.txt">\nA\n</file>'
    assert framed("only text", ()) == "only text"


@pytest.mark.parametrize(
    "stored", [[{"name": 1, "text": "a"}], [{"name": "a"}], [3], [{"name": "a", "text": None}], 5]
)
def test_damaged_attachments_make_no_message(stored: object) -> None:
    with pytest.raises((TypeError, KeyError, AttributeError)):
        Message.from_json({"role": "user", "content": "", "attachments": stored})


def test_an_old_message_has_none() -> None:
    assert Message.from_json({"role": "user", "content": "a"}).attachments == ()
