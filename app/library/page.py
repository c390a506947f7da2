"""The models page of a window, made when it is first wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QWidget

from app.settings import Settings, SettingsStore
from app.split.plan_source import open_planner
from app.split.session import SplitSession
from app.split.settings import default_settings

if TYPE_CHECKING:
    from app.library.entries import Situation
    from app.library.presenter import LibraryPresenter
    from app.library.session import LibrarySession
    from app.library.views.library_view import LibraryView


class LibraryPage(QObject):
    """Page of all models, shown in the middle of the window.

    Args:
        show: shows a widget there.
        leave: shows the chat there again.
        keep: stores settings and has them written.
    """

    noticed = Signal(object)  # Notice
    opened = Signal(str)  # path of a model

    def __init__(
        self,
        split: SplitSession,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        show: Callable[[QWidget], None],
        leave: Callable[[], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._split, self._settings, self._keep = split, settings, keep
        self._show, self._leave = show, leave
        self.session: LibrarySession | None = None
        self.view: LibraryView | None = None
        self._presenter: LibraryPresenter | None = None

    @Slot()
    def toggle(self) -> None:
        """Show the page, with the models as they are now, or leave it."""
        if self.view is None:
            self._make()
        view, presenter = self.view, self._presenter
        assert view is not None
        assert presenter is not None
        if view.isVisible():
            self._leave()
            return
        self._show(view)
        view.search.setFocus()
        presenter.refresh()

    def close(self) -> None:
        """End all work on threads."""
        if self.session is not None and self._presenter is not None:
            self.session.close()
            self._presenter.close()

    def _make(self) -> None:
        # imported here, since the window's first picture does not need them
        from app.library.places import known_places
        from app.library.presenter import LibraryPresenter
        from app.library.session import LibrarySession
        from app.library.views.library_view import LibraryView

        self.session = LibrarySession(
            lambda: known_places(self._settings.current.model_folders), self._situation, self
        )
        self.view = LibraryView()
        self._presenter = LibraryPresenter(
            self.session, self.view, self._settings, self._keep, self
        )
        self._presenter.noticed.connect(self.noticed)
        self._presenter.open_requested.connect(self._open)
        self.view.left.connect(self._leave)

    def _situation(self) -> Situation:
        from app.library.entries import Situation

        split = self._split
        make = split.forecasters()
        forecaster = None if make is None else cache(make)  # one for all models
        return Situation(
            default_settings(split.devices), split.free_bytes(), forecaster, open_planner
        )

    @Slot(str)
    def _open(self, path: str) -> None:
        self._leave()
        self.opened.emit(path)
