"""Images in the window: added, shown, sent, enlarged, stored, refused."""

from pathlib import Path

import pytest
from PIL import Image
from PySide6.QtCore import QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDropEvent, QImage
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.chat.images.draft import pages_in
from app.chat.views.chips import ImageChip, ImageTile
from app.chat.views.image_viewer import ImageViewer
from app.main import Shell
from engine import AnswerRequest, ImageFile, VisionInfo
from engine.vision.images.decoding import MAX_FILE_BYTES
from engine.vision.images.resizing import ImageProcessor, Resizing
from tests.app.chat.attachments.test_shell_attachments import drop
from tests.helpers.fake_host import Script
from tests.helpers.pdf import pdf
from tests.helpers.pictures import as_file, random_picture
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, until_idle

SIDE = 32
RESIZING = Resizing("bicubic", factor=SIDE, least=SIDE * SIDE, most=1 << 20)
SIGHT = VisionInfo(
    "/models/mmproj.gguf", ImageProcessor(RESIZING, SIDE, (0.5,) * 3, (0.5,) * 3, "<", ">")
)


def chips(shell: Shell) -> list[QWidget]:
    return list(shell.chat_presenter.files.chips._widgets)


def picture_chips(shell: Shell) -> list[ImageChip]:
    return [chip for chip in chips(shell) if isinstance(chip, ImageChip)]


def wait_for(qtbot: QtBot, shell: Shell, n: int) -> list[ImageChip]:
    """Wait until a number of images is read and shown."""

    def are_there() -> bool:
        found = picture_chips(shell)
        return len(chips(shell)) == len(found) == n and all(chip.canvas.image for chip in found)

    qtbot.waitUntil(are_there, timeout=20_000)
    return picture_chips(shell)


def tiles(shell: Shell) -> list[ImageTile]:
    return shell.window.chat_view.findChildren(ImageTile)


def sent(shell: Shell) -> list[tuple[str, ...]]:
    """Return the paths of the images of each message of the last prompt."""
    command = [c for c in host_of(shell).commands if isinstance(c, AnswerRequest)][-1]
    return [
        tuple(p.path for p in message.pictures if isinstance(p, ImageFile))
        for message in command.messages
    ]


@pytest.fixture(autouse=True)
def _seeing(script: Script) -> None:
    script.vision = SIGHT


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    path.write_bytes(as_file(random_picture(320, 256)))
    return path


def test_a_dropped_picture_goes_with_the_question_and_stays(
    qtbot: QtBot, make_shell: MakeShell, photo: Path
) -> None:
    shell = make_shell(model=MODEL)
    assert "images" in shell.window.composer.edit.placeholderText()
    assert drop(shell, photo)
    (chip,) = wait_for(qtbot, shell, 1)
    assert chip.accessibleName() == "photo.png, 320 x 256, 80 tokens"
    until_idle(qtbot, shell)
    assert shell.chat_presenter._context.counter.usage.n_draft >= 80
    photo.unlink()
    ask(qtbot, shell, "What is it?")
    ((path,),) = sent(shell)
    assert Path(path).read_bytes() == as_file(random_picture(320, 256))
    assert chips(shell) == []
    (tile,) = tiles(shell)
    qtbot.waitUntil(lambda: tile.image is not None)
    caption = "320 x 256, 80 tokens"
    assert tile.accessibleName() == f"Image photo.png, {caption}. Press to enlarge."
    shell.window.close()

    again = make_shell(model=MODEL)
    (tile,) = tiles(again)
    qtbot.waitUntil(lambda: tile.image is not None)
    again.session.regenerate()
    qtbot.waitUntil(lambda: not again.session.is_busy)
    assert sent(again) == [(path,)], "the same file, so that the KV cache matches"
    again.chat_presenter.edit(again.session.current.messages[0].id, "")
    qtbot.waitUntil(lambda: not again.session.is_busy)
    assert sent(again) == [(path,)], "even without text"
    assert again.session.current.title == "What is it?"


def test_pictures_are_pasted_and_taken_away(
    qtbot: QtBot, qapp: QApplication, make_shell: MakeShell, photo: Path
) -> None:
    shell = make_shell(model=MODEL)
    edit = shell.window.composer.edit
    image = QImage(64, 32, QImage.Format.Format_RGB32)
    image.fill(Qt.GlobalColor.red)
    qapp.clipboard().setImage(image)
    edit.paste()
    wait_for(qtbot, shell, 1)
    data = QMimeData()
    data.setData("image/png", photo.read_bytes())
    qapp.clipboard().setMimeData(data)
    edit.paste()
    first, second = wait_for(qtbot, shell, 2)
    assert [chip.more.accessibleName() for chip in (first, second)] == [
        "64 x 32, 2 tokens", "320 x 256, 80 tokens",
    ]  # fmt: skip
    first.removed.emit(shell.session.current.draft_pictures[:1])
    (left,) = wait_for(qtbot, shell, 1)
    assert left.more.accessibleName().startswith("320")
    assert shell.window.composer._send.isEnabled()
    shell.window.close()
    again = make_shell(model=MODEL)
    wait_for(qtbot, again, 1)


def test_a_picture_is_dropped_anywhere_on_the_window(
    qtbot: QtBot, make_shell: MakeShell, photo: Path
) -> None:
    shell = make_shell(model=MODEL)
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(photo))])
    event = QDropEvent(
        QPointF(9, 9), Qt.DropAction.CopyAction, data, Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.NoModifier,
    )  # fmt: skip
    shell.window.dropEvent(event)
    assert event.isAccepted()
    wait_for(qtbot, shell, 1)
    bar = shell.window.model_bar
    assert bar.vision.text() == "vision"
    assert bar.vision.toolTip().endswith("/models/mmproj.gguf")


def test_one_that_cannot_be_used_is_told(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path, photo: Path
) -> None:
    broken, large, huge = (tmp_path / name for name in ("broken.png", "large.png", "huge.bmp"))
    broken.write_bytes(photo.read_bytes()[:400])
    large.write_bytes(as_file(Image.new("1", (10_000, 10_000))))
    with huge.open("wb") as file:
        file.write(b"BM")
        file.truncate(MAX_FILE_BYTES + 1)
    shell = make_shell(model=MODEL)
    said = {
        broken: "broken.png is damaged and cannot be opened.",
        large: "large.png has 100 megapixels; the limit is 67.",
        huge: "huge.bmp is larger than 32 MiB, the limit for images.",
    }
    for path, sentence in said.items():
        assert drop(shell, path)
        qtbot.waitUntil(lambda sentence=sentence: banner(shell) == sentence, timeout=20_000)
        assert chips(shell) == []
    folder = shell.session.library.store.images.own_path(shell.session.current.id, "")
    assert not folder.exists() or not list(folder.iterdir())


def test_a_model_that_cannot_see_is_told_before_anything_is_sent(
    qtbot: QtBot, make_shell: MakeShell, script: Script, photo: Path
) -> None:
    script.vision = None
    shell = make_shell(model=MODEL)
    assert drop(shell, photo)
    (chip,) = wait_for(qtbot, shell, 1)
    assert chip.more.accessibleName() == "320 x 256, ignored by this model"
    blind = "Tiny Chat cannot read images: no mmproj file is loaded with it."
    assert banner(shell) == blind
    shell.chat_presenter.send("What is it?")
    assert banner(shell) == blind
    assert not [c for c in host_of(shell).commands if isinstance(c, AnswerRequest)]
    notice, chat = shell.window.banner.notice, shell.session.current
    assert notice is not None
    assert notice.on_action is not None
    shell.chat_presenter.new_chat()
    assert shell.window.banner.notice is None, "the image stays in the other chat"
    shell.chat_presenter.open_chat(chat.id)
    notice.on_action()
    assert chips(shell) == []
    ask(qtbot, shell, "Then this")
    assert sent(shell) == [()]


def test_another_model_goes_on_without_the_pictures(
    qtbot: QtBot, make_shell: MakeShell, script: Script, photo: Path
) -> None:
    shell = make_shell(model=MODEL)
    assert drop(shell, photo)
    wait_for(qtbot, shell, 1)
    ask(qtbot, shell, "What is it?")
    script.vision = None
    shell.models.open("/models/blind.gguf")
    qtbot.waitUntil(lambda: tiles(shell)[0].accessibleName().find("ignored") > 0)
    ask(qtbot, shell, "Go on")
    command = [c for c in host_of(shell).commands if isinstance(c, AnswerRequest)][-1]
    assert command.messages[0].content == "[photo.png]\nWhat is it?"
    assert command.messages[0].pictures == ()


def test_pages_of_a_document_go_as_pictures(
    qtbot: QtBot, make_shell: MakeShell, tmp_path: Path
) -> None:
    paper = tmp_path / "paper.pdf"
    paper.write_bytes(pdf("Page one", "Page two", ""))
    shell = make_shell(model=MODEL)
    assert drop(shell, paper)
    files = shell.chat_presenter.files
    qtbot.waitUntil(lambda: bool(files.files and files.files[0].file), timeout=20_000)
    chips(shell)[0].pages_wanted.emit(files.files[0])  # type: ignore[attr-defined]
    (chip,) = wait_for(qtbot, shell, 1)
    assert chip.accessibleName().startswith("paper.pdf, 3 pages as images · ")
    assert chip.accessibleName().endswith(" tokens")
    assert [p.page for p in shell.session.current.draft_pictures] == [1, 2, 3]
    assert {(p.width, p.height) for p in shell.session.current.draft_pictures} == {(1237, 1600)}
    drafts = shell.chat_presenter.pictures
    drafts.keep_pages(shell.session.current.draft_pictures, pages_in("none"))
    assert banner(shell) == "The document has no pages with these numbers."
    drafts.keep_pages(shell.session.current.draft_pictures, pages_in("3, 5-9 and 1"))
    assert [p.page for p in shell.session.current.draft_pictures] == [1, 3]
    ask(qtbot, shell, "")
    assert len(sent(shell)[0]) == 2
    message = shell.session.current.messages[0]
    assert [picture.title for picture in message.pictures] == [
        "paper.pdf, page 1", "paper.pdf, page 3",
    ]  # fmt: skip
    assert shell.session.current.title == "paper.pdf, page 1, paper.pdf, page 3"


def test_a_picture_is_shown_large_by_the_keyboard(
    qtbot: QtBot, qapp: QApplication, make_shell: MakeShell, photo: Path, tmp_path: Path
) -> None:
    shell = make_shell(model=MODEL)
    other = tmp_path / "other.png"
    other.write_bytes(as_file(random_picture(100, 200, seed=3)))
    assert drop(shell, photo, other)
    wait_for(qtbot, shell, 2)
    ask(qtbot, shell, "Which?")
    tile = tiles(shell)[0]
    tile.setFocus()
    qtbot.keyClick(tile, Qt.Key.Key_Space)
    (viewer,) = shell.window.findChildren(ImageViewer)
    qtbot.waitUntil(lambda: viewer.image is not None)
    viewer.copy()
    qtbot.waitUntil(lambda: not qapp.clipboard().image().isNull())
    assert qapp.clipboard().image().size() == QImage(320, 256, QImage.Format.Format_RGB32).size()
    viewer._go(1)
    assert viewer.picture.name == "other.png"
    target = tmp_path / "saved.png"
    shell.chat_presenter.album.save_as(viewer.picture, target)
    qtbot.waitUntil(target.is_file)
    assert target.read_bytes() == other.read_bytes()
    qtbot.waitUntil(lambda: viewer.image is not None)
    album = shell.chat_presenter.album
    album.path(viewer.picture).unlink()
    album.reader._kept.clear()
    viewer._go(0)
    words = "other.png cannot be read: "
    qtbot.waitUntil(lambda: words in viewer._label.text())
    viewer.resize(viewer.width() - 20, viewer.height())
    qapp.processEvents()
    assert words in viewer._label.text(), "at another size too"
    viewer.copy()
    qtbot.waitUntil(lambda: words in banner(shell))
    with qtbot.waitSignal(viewer.destroyed):
        qtbot.keyClick(viewer, Qt.Key.Key_Escape)
