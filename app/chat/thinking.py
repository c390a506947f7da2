"""The buttons by which a model is told whether to think, and how much, for each chat."""

from __future__ import annotations

from PySide6.QtCore import QObject, Slot
from PySide6.QtGui import QAction, QActionGroup
from PySide6.QtWidgets import QMenu, QPushButton, QSizePolicy

from app.chat.conversation import EFFORTS
from app.chat.session import ChatSession
from app.chat.views.composer import Composer
from app.core.engine_client import EngineClient
from app.core.translation import tr, tr_later
from app.widgets.buttons import button
from app.widgets.text import caption_text, set_tip

BY_TEMPLATE = tr_later("As the model has it")
LEVELS = dict(
    zip(
        ("", *EFFORTS),
        (BY_TEMPLATE, tr_later("Low"), tr_later("Medium"), tr_later("High")),
        strict=True,
    )
)
"""Names of how much a model thinks, by the word that its chat template is told."""


class ThinkingSwitch(QObject):
    """Buttons of the composer, there while the model's chat template asks for such wishes.

    Attributes:
        button: whether the model thinks.
        effort: how much it thinks, with a menu.
    """

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
        self.effort, self._levels = self._make_effort()
        for tool in (self.button, self.effort):
            composer.add_tool(tool)
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
        self.effort.setVisible(model is not None and model.info.has_effort)
        chosen = self._session.current.effort
        for action in self._levels.actions():
            action.setChecked(action.data() == chosen)
        level = tr(LEVELS[chosen])
        text = tr("Effort: {level}").format(level=level.lower()) if chosen else tr("Effort")
        self.effort.setText(f"{caption_text(text)} ▾")
        self.effort.setAccessibleName(tr("Effort of thinking: {level}").format(level=level))

    def _make_effort(self) -> tuple[QPushButton, QActionGroup]:
        made = button("", "chip")
        made.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        set_tip(made, tr("How much the model thinks before it answers, in this chat"))
        menu = QMenu(made)
        levels = QActionGroup(menu)
        for word, name in LEVELS.items():
            action = levels.addAction(caption_text(tr(name)))
            action.setCheckable(True)
            action.setData(word)
            menu.addAction(action)
        levels.triggered.connect(self._choose)
        made.setMenu(menu)
        return made, levels

    @Slot(QAction)
    def _choose(self, action: QAction) -> None:
        self._session.set_effort(action.data())
        self.refresh()
