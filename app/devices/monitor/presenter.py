"""The monitor's presenter: what is shown is kept in the settings, and saved as a file on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject, Signal, Slot

from app.core.background import LatestJob
from app.core.engine_sentences import reason_of
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.devices.monitor.views.monitor_head import MonitorHead, graph_names
from app.devices.monitor.views.monitor_panel import MonitorPanel
from app.widgets.files import ask_where_to_save
from engine import EngineError


class MonitorPresenter(QObject):
    """Connection of the monitor with its buttons and the settings.

    Args:
        keep: uses settings and has them written.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        panel: MonitorPanel,
        head: MonitorHead,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._panel, self._head = panel, head
        self._settings, self._keep = settings, keep
        self._job = LatestJob("tandem-monitor-file", self)
        self._job.failed.connect(lambda error: self.noticed.emit(Notice.of(error)))
        self._job.done.connect(self._on_saved)
        head.chosen.connect(self._on_chosen)
        head.export_requested.connect(self._ask)
        current = settings.current
        self._show(current.monitor_overview, current.monitor_graphs)

    def close(self) -> None:
        """Wait for a file that is being written."""
        self._job.close()

    def save(self, path: Path) -> None:
        """Write what is shown to a file, on a thread: a table, or a picture for ".png"."""
        if path.suffix.lower() == ".png":
            picture = self._panel.grab().toImage()
            self._job.run(lambda: _written(path, lambda: picture.save(str(path))))
        else:
            rows = self._panel.table()
            self._job.run(lambda: _written(path, lambda: path.write_bytes(_csv(rows))))

    def _show(self, is_overview: bool, graphs: Sequence[str]) -> None:
        known = [name for name in graph_names() if name in graphs] or list(graph_names()[:3])
        self._panel.choose(is_overview, known)
        self._head.show_choice(is_overview, known)

    @Slot(bool, object)
    def _on_chosen(self, is_overview: bool, graphs: tuple[str, ...]) -> None:
        self._show(is_overview, graphs)
        current = self._settings.current
        self._keep(replace(current, monitor_overview=is_overview, monitor_graphs=graphs))

    @Slot(str)
    def _ask(self, suffix: str) -> None:
        kind = tr("Table (*.csv)") if suffix == ".csv" else tr("Picture (*.png)")
        title, name = tr("Save what is shown"), f"tandem-monitor{suffix}"
        chosen, _ = ask_where_to_save(self._panel, title, name, kind)
        if chosen:
            path = Path(chosen)
            self.save(path if path.suffix.lower() == suffix else Path(f"{path}{suffix}"))

    @Slot(object)
    def _on_saved(self, path: Path) -> None:
        self.noticed.emit(Notice(tr("Saved as {name}.").format(name=path.name)))


def _written(path: Path, write: Callable[[], object]) -> Path:
    """Write a file and return its path.

    Raises:
        EngineError: it cannot be written.
    """
    try:
        is_done = write()
    except OSError as error:
        why = reason_of(error)
        raise EngineError(
            tr("{name} cannot be written ({why}).").format(name=path.name, why=why),
            tr("Choose another folder."),
        ) from error
    if is_done is False:
        raise EngineError(
            tr("{name} cannot be written.").format(name=path.name), tr("Choose another folder.")
        )
    return path


def _csv(rows: Sequence[Sequence[str]]) -> bytes:
    """Return a table as CSV (RFC 4180)."""
    import csv  # late: the first picture needs neither
    import io

    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8")
