"""A place for a widget that is made when it is first needed: most panels are not at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QVBoxLayout, QWidget

W = TypeVar("W", bound=QWidget)


class LateWidget(QWidget, Generic[W]):
    """A widget that makes its content when it is first shown or asked for.

    Args:
        make: makes the content, and whatever shows something in it.
    """

    def __init__(self, make: Callable[[], W], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._make = make
        self._content: W | None = None
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)

    @property
    def content(self) -> W:
        """The content, which is made now if there is none."""
        if self._content is None:
            self._content = self._make()
            layout = self.layout()
            assert layout is not None
            layout.addWidget(self._content)
        return self._content

    def showEvent(self, event: QShowEvent) -> None:
        _ = self.content
        super().showEvent(event)
