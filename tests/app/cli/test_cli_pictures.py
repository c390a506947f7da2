"""`--image` and `/image`: pictures before a prompt, and in a chat."""

from pathlib import Path

import pytest

from tests.helpers.command_line import GREEDY, Run, assert_refused
from tests.helpers.hf_models.seeing import SEEING, SeeingFamily
from tests.helpers.pictures import as_file, random_picture


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    SEEING[0].build(folder)
    (folder / "picture.jpg").write_bytes(as_file(random_picture(90, 60), "JPEG"))
    return folder


def test_a_picture_stands_before_the_prompt(run: Run, seeing: Path) -> None:
    model, picture = seeing / "model.gguf", seeing / "picture.jpg"
    asked = ("generate", model, "-p", "hello", *GREEDY, "--json")
    blind = run(*asked).document["usage"]["prompt_tokens"]
    one = run(*asked, "--image", picture).document["usage"]["prompt_tokens"]
    two = run(*asked, "--image", picture, "--image", picture).document["usage"]["prompt_tokens"]
    assert two - one == one - blind > 16


@pytest.mark.slow
@pytest.mark.parametrize("family", SEEING, ids=lambda family: family.name)
def test_all_families_see(run: Run, tmp_path: Path, family: SeeingFamily) -> None:
    family.build(tmp_path)
    picture = tmp_path / "picture.webp"
    picture.write_bytes(as_file(random_picture(90, 60), "WEBP"))
    asked = ("generate", tmp_path / "model.gguf", "-p", "hello", *GREEDY, "--json")
    blind = run(*asked).document["usage"]["prompt_tokens"]
    seen = run(*asked, "--image", picture, "--mmproj-device", "cpu").document["usage"]
    assert seen["prompt_tokens"] > blind + 4
    assert seen["completion_tokens"] > 0


def test_pictures_go_with_one_message_of_a_chat(run: Run, seeing: Path) -> None:
    picture = seeing / "picture.jpg"
    typed = f"hello\n/new\n/image {seeing}/none.png\n/image '{picture}'\nhello\n/new\nhello\n"
    chat = run("chat", seeing / "model.gguf", *GREEDY, "--json", stdin=typed)
    blind, seen, again = (turn["usage"]["prompt_tokens"] for turn in chat.document["turns"])
    assert "none.png cannot be read" in chat.err
    assert seen > blind + 16
    assert again == blind
    asked = ("chat", seeing / "model.gguf", *GREEDY, "--json", "--image", picture)
    (turn,) = run(*asked, stdin="hello").document["turns"]
    assert turn["usage"]["prompt_tokens"] == seen


def test_a_plan_shows_the_memory_for_pictures(run: Run, seeing: Path) -> None:
    told = run("plan", seeing / "model.gguf", "--devices", "cpu").out
    assert "on cpu is for images (in its total)" in told
    blind = run("plan", seeing / "model.gguf", "--devices", "cpu", "--mmproj", "off").out
    assert "for pictures" not in blind


def test_what_cannot_be_seen_is_told(run: Run, seeing: Path, model: Path) -> None:
    picture = seeing / "picture.jpg"
    asked = ("generate", seeing / "model.gguf", "-p", "hello")
    assert_refused(run(*asked, "--image", seeing / "none.png"), "none.png cannot be read")
    assert_refused(run(*asked, "--image", seeing / "model.gguf"), "An image cannot be used")
    assert_refused(run(*asked, "--raw", "--image", picture), "--image has no effect with --raw")
    off = run(*asked, "--mmproj", "off", "--image", picture)
    assert_refused(off, "cannot see images: no mmproj file is loaded")
    assert_refused(run("generate", model, "-p", "x", "--mmproj", picture), "'mmproj' must be")
