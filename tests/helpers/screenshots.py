"""Takes the screenshots of README and docs.

    QT_QPA_PLATFORM=offscreen python -m tests.helpers.screenshots FOLDER [--only dark light]
    QT_QPA_PLATFORM=offscreen python -m tests.helpers.screenshots FOLDER --resplit MODEL

`--resplit` makes the animated one: a drag of the split bar with live re-splits of MODEL, a small
chat model, while it answers.

`dark`, `light` and `search` run the demo model on three CPU ranks, at the speed of this machine:
nothing else should run beside them.
`split` and `map` plan a mixture of experts of 30 billion weights, of which there is only the
header, for simulated cards; so are the files of `models`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from PIL.ImageQt import fromqpixmap
from PySide6.QtCore import QEventLoop, QItemSelectionModel, QPoint, QRect, Qt, QTimer
from PySide6.QtGui import QImage, QPainter, QPixmap
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from app.core.paths import demo_model, settings_file
from app.core.settings import SettingsStore
from app.devices.map.grid import Part, with_pins
from app.devices.split.figures import SplitPicture
from app.devices.split.settings import SplitSettings
from app.main import Shell
from app.window.main_window import SIDEBAR_WIDTH, SPLIT_WIDTH
from engine import SamplingParams, ThreadHost, parse_rig
from tests.helpers.hollow import hollow_llama, hollow_moe

RIG = "1x4090,1x3090,1x3060"
GIB = 1 << 30
WIDTH, HEIGHT, MAP_HEIGHT = 1440, 900, 690
MODELS_WIDTH, MODELS_HEIGHT = 1180, 420
SHARES = (49.4, 29.6, 21.0)
CHATS = (
    ("What is a split?",),
    ("What is a KV cache?",),
    ("What does Tandem do?", "What is a split?", "What is tensor parallelism?"),
)
MOVING_SIZE = 1100, 700
FRAME_MS = 125
DRAG_STEPS = 14
WAIT_S = 120
SMALLEST = 0
"""Quality of a PNG that is compressed most."""


@contextmanager
def new_shell(
    app: QApplication, theme: str, rig: str = "", language: str = "en"
) -> Iterator[Shell]:
    """Show a window that knows nothing of earlier ones."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["TANDEM_HOME"] = home
        settings = SettingsStore(settings_file())
        settings.put(replace(settings.current, theme=theme, language=language))
        settings.save()
        shell = Shell(app, ThreadHost, rig=parse_rig(rig) if rig else None)
        shell.start()
        main = shell.window
        main.resize(WIDTH, HEIGHT)
        sides, widths = [main.chats_dock, main.split_dock], [SIDEBAR_WIDTH, SPLIT_WIDTH]
        main.resizeDocks(sides, widths, Qt.Orientation.Horizontal)
        pause(500)
        yield shell
        shell.window.close()
        pause(100)


def pause(ms: int) -> None:
    """Run the event loop; unlike `QTest.qWait`, it leaves Python's lock to the engine."""
    loop = QEventLoop()
    QTimer.singleShot(ms, loop.quit)
    loop.exec()


def wait(is_done: Callable[[], bool]) -> None:
    """Wait until something is done, and then for its picture."""
    end = time.monotonic() + WAIT_S
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError
        pause(50)
    pause(1000)


def load_demo(shell: Shell, model: str = "") -> None:
    """Load the demo model, or another one, on three CPU ranks."""
    shell.window.sampling.set_params(SamplingParams(temperature=0))
    shell.models.open(model or str(demo_model()))
    wait(lambda: shell.split.load_state == "loaded")
    shell.split.change(shell.split.settings.with_cpu_ranks(3).with_split(SHARES))
    pause(500)
    shell.split.request_load()
    wait(lambda: shell.split.load_state == "loaded")


def plan_moe(shell: Shell) -> None:
    """Plan a large model, without loading it."""
    path = Path(os.environ["TANDEM_HOME"]) / "moe.gguf"
    sizes = {"n_layer": 48, "n_embd": 2048, "n_head": 32, "n_head_kv": 4, "n_ff_exp": 768}
    shell.models.open(str(hollow_moe(path, **sizes)))
    wait(lambda: shell.models.info is not None)


def window(app: QApplication, theme: str) -> QPixmap:
    """Return the window with a conversation, the split and the monitor."""
    with new_shell(app, theme) as shell:
        load_demo(shell)
        for questions in CHATS:
            shell.session.new_chat("")
            for question in questions:
                shell.session.send(question)
                wait(lambda: not shell.session.is_busy)
                pause(5000)
        pause(2000)
        return shell.window.grab()


def resplit(app: QApplication, model: str) -> list[QPixmap]:
    """Return frames of a window whose split bar is dragged and applied during an answer."""
    frames: list[QPixmap] = []
    with new_shell(app, "dark") as shell:
        shell.window.resize(*MOVING_SIZE)
        shell.window.chats_dock.hide()
        load_demo(shell, model)
        shell.window.sampling.set_params(SamplingParams(temperature=0, ignore_eos=True))
        shell.session.new_chat("")
        camera = QTimer()
        camera.timeout.connect(lambda: frames.append(shell.window.grab()))
        camera.start(FRAME_MS)
        shell.session.send("Write the numbers from one to one thousand in words.")
        pause(2500)
        header, footer = shell.split_panel.header, shell.split_panel.footer
        for index, way in ((0, -0.3), (1, 0.2), (0, 0.35)):
            handle = header.bar.handles[index]
            middle = handle.rect().center()
            QTest.mousePress(handle, Qt.MouseButton.LeftButton, pos=middle)
            for _ in range(DRAG_STEPS):
                step = QPoint(round(way * header.bar.width() / DRAG_STEPS), 0)
                QTest.mouseMove(handle, middle + step)
                pause(FRAME_MS // 2)
            QTest.mouseRelease(handle, Qt.MouseButton.LeftButton, pos=middle)
            pause(1200)
            footer.load.click()
            wait(lambda: shell.split.load_state == "loaded")
            pause(1500)
        camera.stop()
        shell.session.stop()
        wait(lambda: not shell.session.is_busy)
    return frames


def search(app: QApplication) -> QPixmap:
    """Return the dialog of a search that is done."""
    with new_shell(app, "light") as shell:
        load_demo(shell)
        shell.side_panels.find.click()
        dialog = shell.side_panels.search.dialog
        dialog.resize(718, 662)
        wait(lambda: dialog.start.isEnabled())
        dialog.start.click()
        wait(lambda: dialog.state == "done")
        return dialog.grab()


def split(app: QApplication) -> QPixmap:
    """Return three split panels: with a device's details, with groups, and short of memory."""
    return beside([details(app), groups(app), shortage(app)])


def details(app: QApplication) -> QPixmap:
    with new_shell(app, "dark", RIG) as shell:
        plan_moe(shell)
        shell.split.change(base_settings(shell))
        shell.split_panel.rows[0].more.click()
        return side(shell)


def groups(app: QApplication) -> QPixmap:
    with new_shell(app, "light", RIG) as shell:
        plan_moe(shell)
        settings = base_settings(shell).with_mode("groups")
        settings = settings.with_joined(1, True).with_joined(2, False).with_locked(1, True)
        shell.split.change(settings)
        return side(shell)


def shortage(app: QApplication) -> QPixmap:
    with new_shell(app, "dark", RIG) as shell:
        plan_moe(shell)
        settings = base_settings(shell).with_rank_on(0, False).with_split((1, 1))
        shell.split.change(replace(settings, n_ctx=131072))
        return side(shell)


def base_settings(shell: Shell) -> SplitSettings:
    """Return a split over all three cards, with memory kept free on the smallest."""
    settings = shell.split.settings.with_mode("tensor")
    for index, rank in enumerate(settings.ranks):
        settings = settings.with_rank_on(index, rank.device != "cpu")
    settings = settings.with_split((43.8, 40.6, 15.6)).with_reserve("cuda:2", GIB)
    return replace(settings, n_ctx=32768)


def placement(app: QApplication) -> QPixmap:
    """Return the map, with the experts of the last blocks on the CPU, and the links."""
    with new_shell(app, "dark", RIG) as shell:
        plan_moe(shell)
        shell.window.resize(WIDTH, MAP_HEIGHT)
        pinned: list[Part] = [(block, "experts") for block in range(40, 48)]
        settings = replace(base_settings(shell), overrides=with_pins((), pinned, "cpu"))
        shell.split.change(settings)
        main = shell.window
        main.show_dock(main.links_dock, True)
        main.show_dock(main.placement_dock, True)
        wait(lambda: shell.side_panels.placement.view.isVisible())
        view = shell.side_panels.placement.view
        flag = QItemSelectionModel.SelectionFlag.ClearAndSelect
        view.selectionModel().setCurrentIndex(view.model().index(20, 5), flag)
        mapped = side(shell, MAP_HEIGHT)
        main.links_dock.raise_()
        return beside([mapped, side(shell, MAP_HEIGHT)])


def models(app: QApplication) -> QPixmap:
    """Return the window with the page of models, and how they would run on simulated cards."""
    with new_shell(app, "dark", RIG) as shell:
        folder = Path(os.environ["TANDEM_HOME"]) / "models"
        write_models(folder)
        window = shell.window
        window.show_dock(window.split_dock, False)
        window.show_dock(window.monitor_dock, False)
        window.resize(MODELS_WIDTH, MODELS_HEIGHT)
        wait(lambda: shell.start_up.is_ready)
        shell.library.toggle()
        session = shell.library.session
        wait(lambda: session is not None and not session.is_busy)
        return window.grab()


def write_models(folder: Path) -> None:
    """Write the headers of files that people have, with holes for the weights."""
    folder.mkdir(exist_ok=True)
    small = {"n_layer": 48, "n_embd": 2048, "n_head": 32, "n_head_kv": 4, "n_ff_exp": 768}
    hollow_moe(folder / "Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf", **small)
    hollow_moe(folder / "Qwen3-235B-A22B-Thinking-2507-Q4_K_M.gguf")
    hollow_llama(folder / "Llama-3.1-8B-Instruct-Q4_K_M.gguf")
    large = {"n_layer": 80, "n_embd": 8192, "n_head": 64, "n_head_kv": 8, "n_ff": 28672}
    hollow_llama(folder / "Llama-3.3-70B-Instruct-Q4_K_M.gguf", **large)


def side(shell: Shell, height: int = HEIGHT) -> QPixmap:
    """Return the right side of the window, without the monitor."""
    shell.window.monitor_dock.hide()
    shell.window.resize(WIDTH, height)
    pictures: list[SplitPicture] = []
    shell.split.pictured.connect(pictures.append)
    shell.split.read_speeds()  # for a picture
    wait(lambda: bool(pictures) and pictures[-1].fit.is_current)
    return shell.window.grab(QRect(WIDTH - SPLIT_WIDTH, 0, SPLIT_WIDTH, height))


def beside(pictures: list[QPixmap]) -> QPixmap:
    """Return pictures of equal height side by side."""
    made = QPixmap(sum(picture.width() for picture in pictures), pictures[0].height())
    painter, x = QPainter(made), 0
    for picture in pictures:
        painter.drawPixmap(x, 0, picture)
        x += picture.width()
    painter.end()
    return made


SCENES: dict[str, Callable[[QApplication], QPixmap]] = {
    "dark": lambda app: window(app, "dark"),
    "light": lambda app: window(app, "light"),
    "split": split,
    "map": placement,
    "models": models,
    "search": search,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--resplit", metavar="MODEL", help="make the animated one only")
    args = parser.parse_args()
    app = QApplication([])
    if args.resplit:
        frames = [fromqpixmap(frame) for frame in resplit(app, args.resplit)]
        frames[0].save(
            args.folder / "resplit.webp", save_all=True, append_images=frames[1:], loop=0,
            duration=FRAME_MS, quality=45, method=6,
        )  # fmt: skip
        return
    for name in args.only:
        picture = SCENES[name](app).toImage().convertToFormat(QImage.Format.Format_RGB888)
        picture.save(str(args.folder / f"{name}.png"), "PNG", SMALLEST)


if __name__ == "__main__":
    main()
