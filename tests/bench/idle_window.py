# ruff: noqa: T201 - a program that prints what it measures
"""What an open window costs: memory with nothing loaded, processor time while nothing happens.

    QT_QPA_PLATFORM=offscreen python -m tests.bench.idle_window --seconds 60

A real window with its engine in a process of its own, in a folder of its own. Printed are, for the
window's process alone: its memory with nothing loaded, the parts of a core that it takes with
nothing loaded and with a loaded model that is silent, and while the bundled model answers, by
turns with the monitor's graphs, with its overview and without the monitor. As answers differ from
turn to turn, what a reading with all that it draws takes of the processor is measured as well.
With `--pages`, only each page and panel is measured, with nothing loaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
from PySide6.QtCore import QEventLoop, QTimer
from PySide6.QtWidgets import QApplication

from app.core.units import GIB, MIB
from app.devices.monitor.views.monitor_panel import graph_names
from engine import DeviceSnapshot

PROMPT = "What is tensor parallelism?"
SETTLE_S = 10.0
TURN_S = 10.0


def wait(seconds: float) -> None:
    """Let the window live for a while."""
    loop = QEventLoop()
    QTimer.singleShot(int(1000 * seconds), loop.quit)
    loop.exec()


def cost(seconds: float) -> float:
    """Return the part of a core that this process takes, in percent."""
    began, cpu = time.monotonic(), time.process_time()
    wait(seconds)
    return 100 * (time.process_time() - cpu) / (time.monotonic() - began)


def measure(shell: Any, seconds: float, turns: int) -> None:
    """Print the figures of a window that was just opened, and close it."""
    wait(SETTLE_S)
    process = psutil.Process()
    print(f"nothing loaded: {process.memory_info().rss / 1e6:.0f} MB", flush=True)
    print(f"nothing loaded: {cost(seconds):.2f} % of a core", flush=True)
    shell.window.show_dock(shell.window.monitor_dock, False)
    print(f"nothing loaded, monitor closed: {cost(seconds):.2f} % of a core", flush=True)
    shell.window.show_dock(shell.window.monitor_dock, True)
    _drawing(shell)
    shell.model_presenter.open_demo()
    while shell.client.model is None:
        wait(0.2)
    wait(SETTLE_S)
    print(f"demo loaded, silent: {cost(seconds):.2f} % of a core", flush=True)
    print(f"demo loaded: {process.memory_info().rss / 1e6:.0f} MB", flush=True)
    _while_answering(shell, turns)
    shell.window.close()


def measure_pages(shell: Any, seconds: float) -> None:
    """Print what each page and panel takes while nothing happens, and close the window."""
    wait(SETTLE_S)

    def show_models(number: int) -> None:
        if shell.library.tabs is None or not shell.library.tabs.isVisible():
            shell.library.toggle()
        shell.library.tabs.setCurrentIndex(number)

    pages: dict[str, Callable[[], object]] = {
        "chat": shell._show_chat,
        "models": lambda: show_models(0),
        "download": lambda: show_models(1),
        "settings": shell.settings_page.toggle,
    }
    for dock in shell.window.right_docks:
        pages[dock.objectName()] = partial(shell.window.show_dock, dock, True)
    for name, show in pages.items():
        show()
        wait(2)
        print(f"{name}: {cost(seconds):.2f} % of a core", flush=True)
    shell.window.close()


def _drawing(shell: Any) -> None:
    """Print the processor time of the GUI thread for a reading of four devices, all drawn."""
    shell.poller.stop()
    views = {"three graphs": graph_names()[:3], "all graphs": graph_names(), "overview": ()}
    for name, graphs in views.items():
        shell.monitor_presenter._on_chosen(not graphs, graphs or graph_names()[:3])
        for second in range(130):
            shell.monitor.add_snapshots(_reading(second))
        QApplication.processEvents()
        costs = []
        for second in range(130, 190):
            began = time.thread_time()
            shell.monitor.add_snapshots(_reading(second))
            QApplication.processEvents()
            costs.append(1000 * (time.thread_time() - began))
        least, middle = min(costs), statistics.median(costs)
        print(f"a reading, {name}: {middle:.1f} ms, at least {least:.1f} ms", flush=True)
    shell.poller.start()


def _reading(second: int) -> list[DeviceSnapshot]:
    """Return a reading of three GPUs that tell all, and of the CPU."""
    at = time.monotonic() + second
    gpus = [
        DeviceSnapshot(
            f"cuda:{n}", at, (8 + n) * GIB + second * MIB, 24 * GIB, 9 * GIB, 50.0 + second % 9,
            60.0 + n, 210.0 + second % 5, clock_mhz=2520 - second, power_limit_w=450.0,
            memory_clock_mhz=10501, clock_limits=("heat",), sent_bytes_s=10**8,
            received_bytes_s=2 * 10**9 + second, others_bytes=GIB,
        )
        for n in range(3)
    ]  # fmt: skip
    return [*gpus, DeviceSnapshot("cpu", at, 8 * GIB, 32 * GIB, 24 * GIB, 30.0, others_percent=4.0)]


def _while_answering(shell: Any, turns: int) -> None:
    """Print what the monitor costs while answers stream, one after the other."""
    shell.client.finished.connect(lambda _: QTimer.singleShot(0, shell, ask))

    def ask() -> None:
        shell.chat_presenter.new_chat()
        shell.chat_presenter.send(PROMPT)

    ask()
    wait(2)
    found: dict[str, list[float]] = {"graphs": [], "overview": [], "closed": []}
    for _ in range(turns):
        for name, costs in found.items():
            shell.window.show_dock(shell.window.monitor_dock, name != "closed")
            current = shell.settings.current
            shell.monitor_presenter._on_chosen(name == "overview", current.monitor_graphs)
            wait(0.5)
            costs.append(cost(TURN_S))
    for name, costs in found.items():
        told = ", ".join(f"{one:.1f}" for one in costs)
        print(f"answering, monitor {name}: {statistics.median(costs):.1f} % of a core ({told})")
    for name in ("graphs", "overview"):
        more = [a - b for a, b in zip(found[name], found["closed"], strict=True)]
        print(f"the monitor's {name}: {statistics.median(more):+.2f} % of a core", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each idle phase")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pages", action="store_true", help="measure each page, and nothing else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["TANDEM_HOME"] = home
        from app.main import Shell
        from app.run import run_window

        begin = Shell.start

        def start(shell: Any) -> None:
            begin(shell)
            shell.keep(replace(shell.settings.current, theme="dark"))
            if args.pages:
                QTimer.singleShot(0, shell, lambda: measure_pages(shell, args.seconds))
            else:
                QTimer.singleShot(0, shell, lambda: measure(shell, args.seconds, args.turns))

        Shell.start = start  # type: ignore[method-assign]
        return run_window()


if __name__ == "__main__":
    sys.exit(main())
