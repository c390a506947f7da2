"""The button by which a model is told to think before it answers, or not to, for each chat."""

from __future__ import annotations

from PySide6.QtCore import QObject, Slot
from PySide6.QtWidgets import QSizePolicy

from app.chat.session import ChatSession
from app.chat.views.composer import Composer
from app.engine_client import EngineClient
from app.translation import tr
from app.widgets.buttons import button
from app.widgets.text import set_tip


class ThinkingSwitch(QObject):
    """A button of the composer, there while the model's chat template asks for such a wish."""

    def __init__(
        self, composer: Composer, session: ChatSession, client: EngineClient, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._session, self._client = session, client
        self.button = button(tr("Think"), "chip", tr("Think before answering"))
        self.button.setCheckable(True)
        self.button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.button.clicked.connect(session.set_thinking)
        set_tip(self.button, tr("Whether the model thinks before it answers, in this chat"))
        composer.add_tool(self.button)
        session.opened.connect(self.refresh)
        for changed in (client.loaded, client.unloaded, client.state_changed):
            changed.connect(self.refresh)
        self.refresh()

    @Slot()
    def refresh(self) -> None:
        """Show the wish of the open chat; without one, templates have models think."""
        model = self._client.model
        self.button.setVisible(model is not None and model.info.can_think)
        self.button.setChecked(self._session.current.thinks is not False)
