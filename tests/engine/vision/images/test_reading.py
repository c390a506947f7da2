"""Pictures of files: decoded within limits, upright, on white, and resized as by Pillow."""

import struct
import sys
import threading
import time
from base64 import b64encode
from pathlib import Path
from zlib import compress, crc32

import numpy as np
import psutil
import pytest
from PIL import Image
from transformers import Idefics3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from engine import Cancelled, EngineError, image_base64
from engine.vision.images.decoding import MAX_FILE_BYTES, in_rgb
from engine.vision.images.reading import DecodedImage, ImageDecoder
from engine.vision.images.resizing import Resizing, TooNarrow
from tests.helpers.peak_memory import PeakMemory
from tests.helpers.pictures import as_file, random_picture

SQUARE = Resizing("bilinear", side=32)
SIZES = [(100, 70), (1, 150), (3000, 2000), (5, 5), (641, 479)]
ORIENTATION = 0x0112
QUARTER_TURN = 6
"""EXIF's value for a picture that is to be turned by 90 degrees clockwise."""


def read_views(picture: str, rule: Resizing) -> DecodedImage:
    with ImageDecoder() as reading:
        return reading.views(picture, rule)


def read(data: bytes, rule: Resizing = SQUARE) -> np.ndarray:
    return read_views(image_base64(data), rule).views[0]


def test_a_picture_is_resized_as_by_pillow() -> None:
    image = random_picture(90, 50)
    for name, theirs in (
        ("bilinear", Image.Resampling.BILINEAR),
        ("bicubic", Image.Resampling.BICUBIC),
        ("lanczos", Image.Resampling.LANCZOS),
    ):
        wanted = np.asarray(image.resize((32, 32), theirs))
        assert (read(as_file(image), Resizing(name, side=32)) == wanted).all()


def test_a_turned_photograph_stands_upright() -> None:
    image, exif = random_picture(60, 30), Image.Exif()
    exif[ORIENTATION] = QUARTER_TURN
    size, _, (pixels,) = read_views(image_base64(as_file(image, exif=exif)), SQUARE)
    upright = image.transpose(Image.Transpose.ROTATE_270)
    assert size == (30, 60)
    assert (pixels == np.asarray(upright.resize((32, 32), Image.Resampling.BILINEAR))).all()


def test_what_is_transparent_is_white() -> None:
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert (read(as_file(clear)) == 255).all()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert (read(as_file(palette, transparency=1)) == 255).all()


def test_sixteen_bits_of_grey_are_eight() -> None:
    grey = Image.fromarray(np.full((8, 8), 0x8000, np.uint16))
    assert (read(as_file(grey)) == 0x80).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
def test_of_a_moving_picture_the_first_frame_is_seen(kind: str) -> None:
    red, *others = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime"))
    data = as_file(red, kind, save_all=True, append_images=others, lossless=True)
    assert (read(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "L", "1", "LA", "P"])
def test_all_kinds_of_colours_become_rgb(mode: str) -> None:
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
    plain = Image.new("RGB", (8, 8), (255, 255, 255))
    assert read(as_file(plain.convert(mode), kind, **options)).min() >= 253


def test_sixteen_bits_of_colours_are_eight() -> None:
    """Pillow writes none: a PNG of 1 x 2 pixels, red of 0xFF80 and blue of 0x8000."""
    rows = b"\0" + bytes.fromhex("ff8000000000") + b"\0" + bytes.fromhex("000000008000")

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 2, 16, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", compress(rows)) + chunk(b"IEND", b"")
    views = read_views(image_base64(data), Resizing("bicubic", side=2)).views
    assert (views[0][0, 0, 0], views[0][1, 0, 2]) == (255, 128)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_keep_proportions_are_those_of_smart_resize(size: tuple[int, int]) -> None:
    rule = Resizing("bicubic", factor=32, least=65536, most=500_000)
    height, width = smart_resize(size[1], size[0], 32, 65536, 500_000)
    assert rule.target(*size) == (width, height)
    assert width * height <= rule.most_pixels


@pytest.mark.parametrize("size", SIZES)
def test_sizes_with_a_longest_side_are_those_of_pixtral(size: tuple[int, int]) -> None:
    rule = Resizing("bicubic", factor=28, longest=1540)
    shape = np.empty((3, size[1], size[0]))
    height, width = get_resize_output_image_size(shape, 1540, 28, "channels_first")
    assert rule.target(*size) == (width, height)
    assert width * height <= rule.most_pixels


@pytest.mark.parametrize("size", [*SIZES, (3000, 9), (100_000, 9), (9, 100_000)])
def test_sizes_that_fill_what_a_picture_may_take_are_those_of_gemma4(size: tuple[int, int]) -> None:
    rule = Resizing("bicubic", factor=48, most=280 * 48 * 48, fills=True)
    height, width = get_aspect_ratio_preserving_size(size[1], size[0], 16, 280 * 9, 3)
    assert rule.target(*size) == (width, height)
    assert width * height <= rule.most_pixels


@pytest.mark.parametrize("size", [*SIZES, (448, 448), (900, 451), (4000, 500)])
def test_grids_of_tiles_are_those_of_internvl(size: tuple[int, int]) -> None:
    rule = Resizing("bicubic", side=448, least_tiles=1, most_tiles=12)
    columns, rows = get_optimal_tiled_canvas(size[::-1], (448, 448), 1, 12)
    assert rule.views(*size) == (((448 * columns, 448 * rows),), (rows, columns), False)


def test_tiles_are_those_of_idefics3() -> None:
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 32}, do_normalize=False
    )
    for size in [(100, 70), (1, 150), (33, 77), (64, 64), (400, 50)]:
        image = random_picture(*size)
        theirs = processor([[image]], return_tensors="np", return_row_col_info=True)
        found = read_views(image_base64(as_file(image)), Resizing("lanczos", side=32, longest=128))
        assert found.grid == (theirs["rows"][0][0], theirs["cols"][0][0])
        pixels = (theirs["pixel_values"][0] * 255).round().transpose(0, 2, 3, 1)
        assert (np.stack(found.views) == pixels).all()


def test_a_strip_is_refused() -> None:
    with pytest.raises(TooNarrow):
        Resizing("bicubic", factor=32, least=1024, most=4096).target(2000, 9)
    with pytest.raises(EngineError, match="it is too narrow, with 1 x 900 pixels"):
        read(as_file(Image.new("L", (1, 900))), Resizing("bicubic", factor=8, least=64, most=4096))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"no picture at all", "not one of PNG, JPEG"),
        (as_file(random_picture(64, 64))[:900], "damaged"),
        (as_file(random_picture(64, 64), "JPEG")[:700], "damaged"),
        (as_file(random_picture(64, 64), "WEBP")[:300], "damaged|none of"),
        (as_file(Image.new("1", (10_000, 10_000))), "10000 x 10000 pixels, more than 67 mega"),
    ],
)
def test_what_is_no_usable_picture_is_told_in_a_sentence(data: bytes, problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        read(data)


def test_files_that_are_too_large_or_not_there_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(EngineError, match=r"large\.png cannot be used: .* larger than 32 MiB"):
        image_base64(large)
    with pytest.raises(EngineError, match=r"missing\.png cannot be read"):
        image_base64(tmp_path / "missing.png")
    with pytest.raises(EngineError, match="larger than 32 MiB"):
        read_views("A" * (2 * MAX_FILE_BYTES), SQUARE)


def test_what_is_not_base64_is_refused() -> None:
    text = b64encode(as_file(random_picture(8, 8))).decode()
    with pytest.raises(EngineError, match="damaged"):
        read_views("?" + text[1:], SQUARE)


def test_transparency_takes_no_copies_of_the_whole() -> None:
    """A copy of these pixels takes 36 MB: decoded and in RGB there are two."""
    clear = as_file(Image.new("RGBA", (3000, 3000), (255, 0, 0, 0)), compress_level=1)
    with PeakMemory() as small:
        read(as_file(random_picture(8, 8)))
    with PeakMemory() as large:
        assert (read(clear) == 255).all()
    assert large.peak_bytes - small.peak_bytes < 15 * 3000 * 3000


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I;16"])
def test_strips_are_as_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = random_picture(31, 70)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    elif mode == "P":
        image = image.quantize(9)
        image.info["transparency"] = 3
    else:
        image.putalpha(random_picture(31, 70, seed=1).convert("L"))
        image = image.convert(mode)
    whole = np.asarray(in_rgb(image))
    monkeypatch.setattr("engine.vision.images.decoding.STRIP_PIXELS", 100)
    assert (np.asarray(in_rgb(image)) == whole).all()


SLOW = """
import sys, time
print('{"is_ready": true}', flush=True)
for line in sys.stdin:
    time.sleep(SECONDS)
    print('{"width": 1, "height": 1, "grid": [1, 1], "views": []}', flush=True)
"""
"""A program that takes its time for each picture."""


def slow_child(monkeypatch: pytest.MonkeyPatch, seconds: float) -> str:
    program = SLOW.replace("SECONDS", str(seconds))
    monkeypatch.setattr("engine.vision.images.reading.COMMAND", [sys.executable, "-c", program])
    return program


def test_all_pictures_together_have_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_child(monkeypatch, 0.1)
    monkeypatch.setattr("engine.vision.images.reading.MAX_SECONDS", 0.5)
    monkeypatch.setattr("engine.vision.images.reading.MORE_SECONDS", 0.02)
    problem = r"reading them takes more than 0\.68 seconds"
    with ImageDecoder(10) as reading, pytest.raises(EngineError, match=problem):
        _ = [reading.views("", SQUARE) for _ in range(10)]


def test_a_cancelled_reading_ends_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    program, is_cancelled = slow_child(monkeypatch, 60), threading.Event()

    def children() -> list[psutil.Process]:
        return [c for c in psutil.Process().children() if program in c.cmdline()]

    def cancel() -> None:
        while not children():
            time.sleep(0.005)
        is_cancelled.set()

    threading.Thread(target=cancel, daemon=True).start()
    with ImageDecoder(1, is_cancelled.is_set) as reading, pytest.raises(Cancelled):
        reading.views("", SQUARE)
    assert not children()
