"""Measurement of the split panel's time from a mouse move to the picture, on a large split.

    python -m tests.bench.drag [--rig 2xH200,2x4090] [--mode tensor] [--moves 200]

The devices are simulated, and the model is an 80-layer mixture of experts of which there is only
the header. Each handle is dragged over its range, a few pixels at a time; a frame is the time from
one mouse event until everything that follows from it is painted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")  # before Qt is imported

from PySide6.QtCore import QEvent, QPoint, QPointF, Qt
from PySide6.QtGui import QMouseEvent
from PySide6.QtWidgets import QApplication

from app.devices.split.speed import simulated_machine
from app.devices.split.views.split_bar import ShareHandle
from app.widgets.theme import apply_theme
from engine import parse_rig, read_model_info
from tests.helpers.hollow import hollow_moe
from tests.helpers.split_panels import WiredPanel

RIG = "2xH200,2x4090"
FRAME_S = 1 / 60


class Frame(NamedTuple):
    """Seconds from an event to the picture: by the clock, and of this thread's processor time."""

    wall: float
    busy: float


def make_panel(path: Path, rig: str = RIG, mode: str = "tensor") -> WiredPanel:
    """Return a panel on screen that plans for all GPUs of a simulated machine."""
    machine = parse_rig(rig)
    panel = WiredPanel(machine_factory=lambda _: simulated_machine(machine))
    panel.resize(408, 1000)
    panel.session.set_devices(machine.devices)
    panel.session.set_model(read_model_info(path))
    panel.session.set_state("ready")
    panel.session.restore(panel.session.to_dict() | {"mode": mode, "n_ctx": 32768})
    panel.show()
    settle()
    return panel


def drag_frames(panel: WiredPanel, n_moves: int) -> Iterator[Frame]:
    """Yield each frame while every handle is dragged there and back."""
    for handle in panel.header.bar.handles:
        _send(handle, QEvent.Type.MouseButtonPress, 0)
        for n in range(n_moves):
            wall, busy = time.perf_counter(), time.thread_time()
            _send(handle, QEvent.Type.MouseMove, _target(panel, handle, n, n_moves))
            settle()
            yield Frame(time.perf_counter() - wall, time.thread_time() - busy)
        _send(handle, QEvent.Type.MouseButtonRelease, 0)
        settle()


def settle() -> None:
    """Plan, lay out and paint whatever is due."""
    for _ in range(3):
        QApplication.processEvents()


def _target(panel: WiredPanel, handle: ShareHandle, n: int, n_moves: int) -> int:
    """Return the mouse's distance from the handle's middle in its n-th move, in pixels.

    The moves go there and back over a third of the bar.
    """
    width = panel.header.bar.width()
    way = width / 3 * (1 - abs(1 - 2 * n / n_moves))
    start = (handle.index + 0.6) * width / (len(panel.header.bar.handles) + 1)
    return round(start + way - handle.geometry().center().x())


def _send(handle: ShareHandle, kind: QEvent.Type, x: int) -> None:
    middle = handle.rect().center() + QPoint(x, 0)
    is_move = kind == QEvent.Type.MouseMove
    button = Qt.MouseButton.NoButton if is_move else Qt.MouseButton.LeftButton
    is_up = kind == QEvent.Type.MouseButtonRelease
    down = Qt.MouseButton.NoButton if is_up else Qt.MouseButton.LeftButton
    event = QMouseEvent(
        kind, QPointF(middle), QPointF(handle.mapToGlobal(middle)), button, down,
        Qt.KeyboardModifier.NoModifier,
    )  # fmt: skip
    QApplication.sendEvent(handle, event)


def report(seconds: Sequence[float]) -> str:
    """Return a line with the distribution of times."""
    ms = sorted(1000 * one for one in seconds)
    in_time = sum(one <= FRAME_S for one in seconds) / len(seconds)
    return (
        f"median {median(ms):.1f} ms, 95 % within {quantiles(ms, n=20)[-1]:.1f}, "
        f"longest {ms[-1]:.1f}; {in_time:.0%} within 1/60 s"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rig", default=RIG)
    parser.add_argument("--mode", default="tensor", choices=("tensor", "layer", "groups"))
    parser.add_argument("--moves", type=int, default=200, help="for each handle")
    args = parser.parse_args(argv)
    app = QApplication(sys.argv[:1])
    apply_theme(app, "dark")
    with tempfile.TemporaryDirectory() as folder:
        panel = make_panel(hollow_moe(Path(folder) / "hollow.gguf"), args.rig, args.mode)
        for name in ("first", "second"):
            frames = list(drag_frames(panel, args.moves))
            sys.stdout.write(f"{name} time, {len(frames)} frames\n")
            for what in Frame._fields:
                sys.stdout.write(f"  {what}: {report([getattr(f, what) for f in frames])}\n")
        panel.close()


if __name__ == "__main__":
    main()
