"""The window's process: log, signals, single instance, shutdown."""

from __future__ import annotations

import sys

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication

import engine
from app.core import paths
from app.core.process.crash import LogFile
from app.core.process.environment import engine_place, start_host
from app.core.process.single_window import Application, SecondStarts, SignalWatch
from app.main import Shell
from app.widgets.theme import icon, theme


def run_window(
    model_path: str | None = None, demo: bool = False, simulate: str = "",
    make_shell: type[Shell] = Shell,
) -> int:  # fmt: skip
    """Open the window; return the exit status once it has been closed.

    Args:
        model_path: model to load, if any.
        make_shell: class of the application.

    Raises:
        EngineError: the simulated rig or `TANDEM_ENGINE` is invalid.
    """
    engine_place()
    rig = engine.parse_rig(simulate) if simulate else None
    QApplication.setHighDpiScaleFactorRoundingPolicy(
        Qt.HighDpiScaleFactorRoundingPolicy.PassThrough
    )
    app = Application(sys.argv[:1])
    app.setApplicationName("Tandem")
    app.setApplicationDisplayName("Tandem")
    app.setDesktopFileName("org.tandem_llm.Tandem")  # name of the file in packaging/linux
    app.setWindowIcon(icon("split", theme().accent))
    log_file = LogFile(paths.log_file())
    log_file.start()
    signals = SignalWatch(app)
    signals.came.connect(app.quit)
    signals.install()
    starts = SecondStarts(app)
    if rig is None:
        starts.claim()
    shell = make_shell(app, start_host, rig)
    starts.requested.connect(shell.take)
    app.opened.connect(shell.take)
    shell.start_up.host_imported.connect(starts.listen)
    shell.crashes.install()
    app.commitDataRequest.connect(shell.save, Qt.ConnectionType.DirectConnection)
    app.aboutToQuit.connect(shell.close)  # at log-off, Windows then kills the process
    shell.start()
    if demo:
        shell.model_presenter.open_demo()
    elif model_path is not None:
        shell.models.open(model_path)
    status = app.exec()
    starts.close()
    shell.close()
    shell.crashes.uninstall()
    signals.uninstall()
    log_file.stop()
    return status
